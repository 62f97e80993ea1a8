"""Decode steps of real shapes: the shapes, the step against the demo's own, checks, report, CLI."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import flashinfer_fake
import pytest
import torch
from rich.console import Console

from fusedops.bench.environment import Environment
from fusedops.bench.measurement import Failed, summarize
from fusedops.bench.runner import CpuRunner, Replay
from fusedops.bench.timer import Protocol
from fusedops.cli import main
from fusedops.errors import ConfigError, DeviceError, UnsupportedError
from serving_demo import step_bench
from serving_demo.cache import PagedKVCache
from serving_demo.config import ModelConfig, expected_tensors
from serving_demo.options import ShapeOptions
from serving_demo.random_model import fill_cache, random_model, weight_bytes
from serving_demo.shapes import SHAPES
from serving_demo.state import decode_step
from serving_demo.step_bench import (
    OURS,
    TORCH_GRAPH,
    measure_shape,
    run_shapes,
)
from serving_demo.step_model import ADVANCES, FusedStep, StepBatch, StepProviders
from serving_demo.step_report import StepRow, step_row, steps_table, write_steps
from serving_demo.step_timing import HostWorkRunner, Oracle, StepTimes
from serving_demo.step_torch import PlainStep, PlainWeights

REFERENCE = StepProviders("reference", "reference", "reference", "reference", "torch")
CONTEXT = 21
OPTIONS = ShapeOptions("llama3-8b", batches=(1, 3), context=CONTEXT, replays=3)


def tiny(**changed: Any) -> ModelConfig:
    """A Llama of two layers; the intermediate size is no multiple of 8, so packed rows are padded.

    Head dim and group are what FlashInfer's kernels take.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 64,
        "intermediate_size": 52,
        "vocab_size": 96,
    }
    return replace(SHAPES["llama3-8b"].config, **{**sizes, **changed})


def tiny_batch(
    size: int = 3, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32
) -> StepBatch:
    config = config or tiny()
    model = random_model(config, CONTEXT + ADVANCES, "cpu", dtype)
    pages = size * StepBatch.pages_each(CONTEXT, 16)
    cache = PagedKVCache(config, pages, dtype=dtype)
    fill_cache(cache, CONTEXT)
    return StepBatch.make(model, cache, size, CONTEXT)


def measure(
    contenders: dict[str, StepProviders] | None = None,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    options: ShapeOptions = OPTIONS,
) -> tuple[StepRow, ...]:
    return measure_shape(
        options,
        config or tiny(),
        contenders or {OURS: REFERENCE},
        device=torch.device("cpu"),
        dtype=dtype,
        read_bytes_per_s=1e9,
        runner=CpuRunner(),
        protocol=Protocol(samples=options.replays, min_samples=1, settle_max_s=0.01),
    )


# Shapes and random weights


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_a_shape_has_its_models_published_parameter_count(name: str, parameters: int) -> None:
    config = SHAPES[name].config
    assert sum(map(prod, expected_tensors(config).values())) == parameters
    matrices = sum(prod(s) for s in expected_tensors(config).values() if len(s) == 2)
    assert weight_bytes(config, torch.bfloat16) == 2 * matrices


def test_eight_shares_make_up_the_70b_model() -> None:
    shapes = expected_tensors(SHAPES["llama3-70b-tp8"].config)
    norms = sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
    # Norms are on every rank; everything else is split.
    assert 8 * sum(map(prod, shapes.values())) - 7 * norms == 70_553_706_496


def test_random_weights_are_of_unit_gain_and_repeat_with_the_seed() -> None:
    config = tiny(hidden_size=512, vocab_size=400, tied_embeddings=True)
    model, same, other = (random_model(config, 8, "cpu", torch.bfloat16, s) for s in (3, 3, 4))
    layer: Any = model.layers[1]
    for weight, columns in ((layer.qkv.weight, 512), (layer.output.weight, 128)):
        assert float(weight.float().std()) == pytest.approx(columns**-0.5, rel=0.03)
    assert float(layer.mlp_norm.weight.float().mean()) == pytest.approx(1.0, abs=0.03)
    assert float(layer.mlp_norm.weight.float().std()) == pytest.approx(0.1, rel=0.2)
    gate, up, down = layer.mlp.unpacked()
    assert gate.shape == up.shape == (52, 512)
    assert not layer.mlp.down[:, 52:].any()
    assert float(down.float().std()) == pytest.approx(52**-0.5, rel=0.03)
    assert model.head.weight.data_ptr() == model.token_embedding.data_ptr()
    pairs = list(zip(model.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(next(model.parameters()), next(other.parameters()))


# The step


def stock_steps(batch: StepBatch, count: int) -> list[list[int]]:
    """The tokens of ``count`` steps of the demo's own model and state, on a copy of the cache."""
    step = FusedStep("state", batch, REFERENCE)
    step.prepare()
    state, cache = step._state, batch.cache
    saved = cache._pool.clone()
    tokens = []
    for _ in range(count):
        decode_step(batch.model, cache, state, batch.size, sampled=False)
        tokens.append(state.tokens.tolist())
    cache._pool.copy_(saved)
    return tokens


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "activation": "gelu_tanh"},
        {"tied_embeddings": True, "rope_scaling": SHAPES["llama3.2-1b"].config.rope_scaling},
    ],
    ids=["plain", "biases, gelu", "tied, scaled rope"],
)
@torch.inference_mode()
def test_steps_equal_the_demos_own_and_plain_torch(changed: dict[str, Any]) -> None:
    batch = tiny_batch(config=tiny(**changed))
    expected = stock_steps(batch, 3)
    oracle = Oracle.of(PlainStep("plain", batch, PlainWeights(batch.model)), 2)
    step = FusedStep("ours", batch, REFERENCE)
    for number, tokens in enumerate(expected):
        step.prepare()
        step.run()
        if number == 0:
            assert oracle.problem(step) is None
        assert step.tokens.tolist() == tokens
        assert step.positions() == [CONTEXT + number] * 3


@torch.inference_mode()
def test_a_measurement_returns_to_its_first_position_within_a_page() -> None:
    batch = tiny_batch(2)
    step = FusedStep("ours", batch, REFERENCE)
    tokens = []
    for number in range(ADVANCES + 2):
        step.prepare()
        step.run()
        tokens.append(step.tokens.tolist())
        assert step.positions() == [CONTEXT + number % ADVANCES] * 2
    assert tokens[ADVANCES:] == tokens[:2]
    assert step.mean_length == sum(range(CONTEXT, CONTEXT + ADVANCES)) / ADVANCES


@torch.inference_mode()
def test_every_operation_is_served_by_the_provider_that_is_pinned() -> None:
    step = FusedStep("ours", tiny_batch(), REFERENCE)
    step.prepare()
    step.run()
    assert step.served == {
        ("gemm", "reference"): 2 * 4 + 1,
        ("rms_norm", "reference"): 2 * 2 + 1,
        ("rope", "reference"): 2,
        ("paged_attention", "reference"): 2,
        ("embedding", "reference"): 1,
        ("greedy", "reference"): 1,
    }
    with pytest.raises(UnsupportedError, match="cublas"):
        FusedStep("ours", tiny_batch(), replace(REFERENCE, gemm="cublas")).run()


# Through FlashInfer's interfaces, on a stand-in


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> flashinfer_fake.Fake:
    return flashinfer_fake.install(monkeypatch)


def test_flashinfer_plans_each_step_on_the_host(fake: flashinfer_fake.Fake) -> None:
    by = StepProviders("reference", "flashinfer", "flashinfer", "reference", "flashinfer")
    contenders = {OURS: by, "torch norms": replace(by, norm="reference")}
    options = replace(OPTIONS, batches=(2,))
    rows = measure(contenders, dtype=torch.bfloat16, options=options)
    plain, ours, torch_norms = rows
    assert [row.notes for row in rows if row.ms is None] == []
    assert plain.plan_us is None
    for row, norms in ((ours, "flashinfer"), (torch_norms, "reference")):
        assert row.plan_us is not None
        assert row.plan_us > 0
        assert (row.provider, row.norms, row.rope) == ("reference", norms, "flashinfer")
        assert row.attention == "flashinfer"
    assert fake.calls.count("rmsnorm") > 0
    # One plan a step: each runs once a layer.
    assert fake.calls.count("run") == 2 * fake.calls.count("plan")


def test_flashinfer_plans_the_length_of_each_step(fake: flashinfer_fake.Fake) -> None:
    by = StepProviders("reference", "flashinfer", "flashinfer", "reference", "flashinfer")
    step = FusedStep("ours", tiny_batch(2, dtype=torch.bfloat16), by)
    for number in range(ADVANCES + 1):
        step.prepare()
        length = CONTEXT + number % ADVANCES
        last = fake.wrappers[0].buffers["last_page_len"].tolist()
        assert last == [(length - 1) % 16 + 1] * 2
    assert len(step.attention.plan_us) == ADVANCES + 1


@pytest.mark.parametrize(
    ("options", "config", "expected"),
    [
        ({}, tiny(), ("flashinfer", "")),
        ({"attention": "torch"}, tiny(), ("torch", "")),
        ({}, tiny(n_heads=7), ("torch", "--tensor-cores")),
        ({"tensor_cores": True}, tiny(n_heads=7), ("flashinfer", "")),
        ({}, tiny(head_dim=96), ("torch", "head dim 96")),
    ],
)
def test_auto_takes_flashinfer_where_it_has_a_kernel(
    fake: flashinfer_fake.Fake,
    options: dict[str, Any],
    config: ModelConfig,
    expected: tuple[str, str],
) -> None:
    name, reason = step_bench._resolve_attention(replace(OPTIONS, **options), config)
    assert name == expected[0]
    assert expected[1] in reason
    assert bool(reason) == bool(expected[1])


def test_flashinfer_is_refused_before_any_work_where_it_has_no_kernel(
    fake: flashinfer_fake.Fake,
) -> None:
    options = replace(OPTIONS, attention="flashinfer")
    assert step_bench._resolve_attention(options, tiny()) == ("flashinfer", "")
    with pytest.raises(UnsupportedError, match="--tensor-cores"):
        step_bench._resolve_attention(options, tiny(n_heads=7))


def test_auto_says_that_flashinfer_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bench, "absent", lambda: "flashinfer is not installed")
    name, reason = step_bench._resolve_attention(OPTIONS, tiny())
    assert (name, reason) == ("torch", "flashinfer is not installed")


def test_without_flashinfer_torch_runs_all_but_the_products() -> None:
    assert list(step_bench._contenders(OPTIONS, "torch").values()) == [
        StepProviders("cublas", "torch", "torch", "torch", "torch")
    ]
    norms = [by.norm for by in step_bench._contenders(OPTIONS, "flashinfer").values()]
    assert norms == ["flashinfer", "torch"]


# Measuring


def test_rows_of_a_measurement() -> None:
    config = tiny()
    rows = measure()
    assert [(row.batch, row.contender) for row in rows] == [
        (batch, name) for batch in (1, 3) for name in (TORCH_GRAPH, OURS)
    ]
    model = random_model(config, 8, "cpu", torch.float32)
    weights = sum(p.nbytes for p in model.parameters())
    for row in rows:
        assert row.ms is not None
        assert row.ms_low is not None
        assert row.ms_high is not None
        assert 0 < row.ms_low <= row.ms <= row.ms_high
        # 2 layers of 64 float32 keys and values; floors are bytes over 1 GB/s.
        length = CONTEXT if row.contender == TORCH_GRAPH else CONTEXT + 7.5
        n_bytes = weights + row.batch * length * 2 * 2 * 64 * 4
        assert row.floor_ms == pytest.approx(n_bytes / 1e6)
        assert row.fraction == pytest.approx(row.floor_ms / row.ms)
        assert row.steps == 3
        assert (row.plan_us, row.kernels_per_step) == (None, None)


def spoil_table(step: FusedStep) -> None:
    step._state.block_table[:, 0] = step._state.block_table[:, 1]


def spoil_positions(step: FusedStep) -> None:
    step._state.positions.fill_(CONTEXT - 2)


def spoil_logits(step: FusedStep) -> None:
    step._batch.model.final_norm.weight[3] = torch.nan


def spoil_end(step: FusedStep) -> None:
    step._state.last_positions.fill_(0)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_table, "logits: relative error"),
        (spoil_positions, "relative error"),
        (spoil_end, "positions are"),
        (spoil_logits, "not finite"),
    ],
)
def test_a_wrong_step_gets_a_reason_and_no_time(
    spoil: Callable[[FusedStep], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = FusedStep.prepare

    def spoiled(step: FusedStep) -> None:
        prepare(step)
        spoil(step)

    monkeypatch.setattr(FusedStep, "prepare", spoiled)
    row = next(row for row in measure() if row.contender == OURS)
    assert row.ms is None
    assert row.fraction is None
    assert reason in row.notes[0]


@torch.inference_mode()
def test_a_wrong_append_is_found() -> None:
    batch = tiny_batch()
    oracle = Oracle.of(PlainStep("plain", batch, PlainWeights(batch.model)), 2)
    step = FusedStep("ours", batch, REFERENCE)
    step.prepare()
    step.run()
    assert oracle.problem(step) is None
    page = int(batch.block_table[1, (CONTEXT - 1) // 16])
    batch.cache.v[1][page, (CONTEXT - 1) % 16] = batch.cache.v[1][page, 0]
    problem = oracle.problem(step)
    assert problem is not None
    assert "appended values of layer 1" in problem


def test_a_replay_that_chooses_another_token_fails_at_batch_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def counting(step: FusedStep) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return step._state.tokens + (calls > 1)

    monkeypatch.setattr(FusedStep, "tokens", property(counting))
    row = next(row for row in measure() if row.contender == OURS)
    assert "the replay chose token" in row.notes[0]


class _Recorder(CpuRunner):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def time_round(self, replays: Any, *, hot: bool) -> list[float]:
        self.events.append("window")
        return super().time_round(replays, hot=hot)

    def synchronize(self) -> None:
        self.events.append("synchronize")


def test_the_host_works_before_each_window_and_outside_of_it() -> None:
    events: list[str] = []
    runner = HostWorkRunner(_Recorder(events))

    def program(name: str) -> Replay:
        runner.prepare_next(lambda: events.append(f"prepare {name}"))
        return runner.capture(lambda: None)

    one, two = program("one"), program("two")
    bare = runner.capture(lambda: None)
    one()
    assert events == []
    assert len(runner.time_round([one, two], hot=False)) == 2
    assert events == [
        *("prepare one", "synchronize", "window"),
        *("prepare two", "synchronize", "window"),
    ]
    events.clear()
    runner.time_round([bare], hot=False)
    assert events == ["synchronize", "window"]
    assert runner.empty_window_us() == 0.0


# Report


WHO = {"provider": "cublas", "norms": "torch", "rope": "torch", "attention": "torch"}
ENVIRONMENT = Environment("GPU", "1", "CPU", "3.11", {}, "abc", "command", "2026-01-01T00:00:00Z")


def row_of(batch: int, ms: float | None, contender: str = OURS) -> StepRow:
    outcome = Failed("wrong page")
    if ms is not None:
        outcome = summarize([ms * 1e3] * 5, mode="cpu", launches=1, hot=False, notes=("a note",))
    return step_row("llama3-8b", batch, 1024, contender, WHO, StepTimes(outcome, 210.4, 640), 3.2)


def test_the_table_shows_losses_and_failures() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(steps_table("title", [row_of(1, 6.4), row_of(8, None)]))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "1 fusedops 6.400 6.400-6.400 210 3.20 50% 640" in lines
    assert "8 fusedops - 3.20" in lines


def test_the_json_adds_up_and_replaces_rows_of_the_same_contender(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    write_steps(path, [row_of(1, 6.4), row_of(8, None)], ENVIRONMENT)
    newer = replace(ENVIRONMENT, commit="def")
    write_steps(path, [row_of(8, 7.0), row_of(1, 5.9, TORCH_GRAPH)], newer)
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert data["environment"]["commit"] == "def"
    found = {(row["batch"], row["contender"]): row for row in data["rows"]}
    assert len(data["rows"]) == 3
    assert found[1, OURS]["commit"] == "abc"
    assert found[1, OURS]["ms"] == pytest.approx(6.4)
    assert found[8, OURS]["commit"] == "def"
    assert found[8, OURS]["fraction"] == pytest.approx(3.2 / 7.0)
    assert found[1, TORCH_GRAPH] | {"ms": 0, "ms_low": 0, "ms_high": 0} == {
        **WHO,
        "shape": "llama3-8b",
        "batch": 1,
        "context": 1024,
        "contender": TORCH_GRAPH,
        "ms": 0,
        "ms_low": 0,
        "ms_high": 0,
        "plan_us": 210.4,
        "floor_ms": 3.2,
        "fraction": pytest.approx(3.2 / 5.9),
        "kernels_per_step": 640,
        "steps": 5,
        "notes": ["a note"],
        "date": ENVIRONMENT.date,
        "commit": "def",
    }


def test_a_failed_row_keeps_its_reason_in_the_json(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    write_steps(path, [row_of(8, None)], ENVIRONMENT)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ms"] is None
    assert row["notes"] == ["failed: wrong page"]


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"schema": 7}')
    with pytest.raises(ConfigError, match="schema 7"):
        write_steps(path, [row_of(1, 6.4)], ENVIRONMENT)
    assert path.read_text() == '{"schema": 7}'


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama4"], "llama3-8b, llama3.2-1b, qwen2.5-7b, llama3-70b-tp8"),
        (["--batch", "0"], "--batch 0: accepted are whole numbers from 1"),
        (["--batch", "8,8"], "each size once (--batch)"),
        (["--batch", "1,x"], "--batch 1,x: accepted are whole numbers"),
        (["--context", "0"], "--context 0: accepted are whole numbers from 1"),
        (["--context", "8178"], "accepted are 1 to 8,177"),
        (["--provider", "nobody"], "cublas"),
        (["--attention", "none"], "auto, flashinfer, torch"),
        (["--replays", "0"], "--replays 0: accepted are whole numbers from 1"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    shape = [] if "--shape" in arguments else ["--shape", "llama3-8b"]
    assert main(["demo", *shape, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_no_gpu_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees none"):
        run_shapes(ShapeOptions("llama3-8b"))


def test_a_run_prints_its_table_and_notes_and_writes_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: dict[str, Any] = {}

    def stand_in(
        options: ShapeOptions, config: ModelConfig, contenders: Any, **given: Any
    ) -> tuple[StepRow, ...]:
        measured.update(given, contenders=contenders, config=config)
        return (row_of(1, 6.4), row_of(8, None))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (139 << 30, 140 << 30))
    monkeypatch.setattr(step_bench, "absent", lambda: "flashinfer is not installed")
    monkeypatch.setattr(step_bench, "make_runner", lambda _device: CpuRunner())
    monkeypatch.setattr(step_bench, "measure_shape", stand_in)
    monkeypatch.setattr(step_bench, "collect_environment", lambda: ENVIRONMENT)
    path, text = tmp_path / "steps.json", io.StringIO()
    options = ShapeOptions("llama3-70b-tp8", json_path=path)
    run_shapes(options, Console(file=text, width=100))
    assert measured["read_bytes_per_s"] == 4.67e12
    assert measured["dtype"] is torch.bfloat16
    assert measured["contenders"] == step_bench._contenders(options, "torch")
    assert measured["config"] is SHAPES["llama3-70b-tp8"].config
    assert len(json.loads(path.read_text())["rows"]) == 2
    for part in (
        "llama3-70b-tp8, context 1024, bf16, on NVIDIA H200",
        "one rank's share",
        "attention by torch: flashinfer is not installed",
        "batch 1, fusedops: a note",
        "batch 8, fusedops: failed: wrong page",
    ):
        assert part in text.getvalue()
    assert text.getvalue().splitlines()[-1] == f"file written: {path}"


def test_too_little_memory_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, config = torch.device("cuda"), SHAPES["llama3-8b"].config
    check = step_bench._require_memory
    # 16.1 GB of weights, 7.5 GB packed again, two caches of 8.9 GB, and room.
    for free, fits in ((139 << 30, True), (46 << 30, True), (40 << 30, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, f=free: (f, f))
        if fits:
            check(ShapeOptions("llama3-8b"), config, torch.bfloat16, device)
        else:
            with pytest.raises(ConfigError, match="lower --batch"):
                check(ShapeOptions("llama3-8b"), config, torch.bfloat16, device)


def test_the_exit_code_tells_of_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, code in (([row_of(1, 6.0)], 0), ([row_of(1, 6.0), row_of(8, None)], 1)):
        monkeypatch.setattr(step_bench, "run_shapes", lambda *_args, r=rows: tuple(r))
        assert main(["demo", "--shape", "llama3-8b", "--quiet"]) == code
