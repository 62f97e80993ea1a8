"""Tuning: keys, the file of measured choices, and what a run does, with fake times on the CPU."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.bench.environment import Environment
from fusedops.bench.measurement import Failed, Measurement, Outcome, summarize
from fusedops.bench.precompile import H200, layer_problem
from fusedops.bench.products import Layer
from fusedops.bench.timer import Protocol
from fusedops.bench.tune import Tuned, tune
from fusedops.bench.tune_file import TORCH, TuneFile
from fusedops.bench.tune_measure import measure_in_chain, measure_rotated
from fusedops.bench.tune_problems import (
    HEAD_ROWS,
    CutlassCandidate,
    TuneProblem,
    candidate_work,
    candidates,
    decoder_layers,
    parse_shape,
    tune_problems,
)
from fusedops.cli import main
from fusedops.cli.tune import parse_rows
from fusedops.config import files, prefill_tiles, tuned_choices, tuning_key
from fusedops.config.files import rank, tuned_path, tuning_m
from fusedops.errors import ConfigError
from fusedops.jit.prebuild import Compiled, KernelPool, Work
from fusedops.packing import unpack_gate_up
from fusedops.providers.cutlass import CutlassProvider, choose_candidate
from fusedops.providers.cutlass_sm80 import CutlassSm80Provider
from fusedops.providers.gemm import GemmProvider
from serving_demo.shapes import SHAPES

ENVIRONMENT = Environment(
    "NVIDIA H200", "580.1", "cpu", "3.12", {"torch": "2.11"}, "abc", "tune", "2026-01-01T00:00:00"
)
QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
SHAPE = "4096,4096,residual"


class FakePool(KernelPool):
    """Compiles nothing: every kernel is there, but those of the tiles named in ``broken``."""

    def __init__(self, broken: Sequence[str] = (), ready: bool = True) -> None:
        self.asked: list[str] = []
        self._broken = broken
        self._is_ready = ready

    def close(self) -> None:
        """There are no processes."""

    def submit(self, work: Work) -> str:
        name: str = work.__self__.name  # type: ignore[attr-defined]
        self.asked.append(name)
        return name

    def ready(self, names: Any, timeout_s: float | None = None) -> bool:
        return self._is_ready

    def result(self, name: str, work: Work) -> Compiled:
        return Compiled("failed", "no registers left") if name in self._broken else Compiled("disk")


def timed(us: float) -> Measurement:
    return summarize([us, us * 1.01, us * 0.99], mode="fake", launches=1, hot=False)


class FakeMeasure:
    """Times by name; a string is why a candidate failed. What is not named takes 1000 us."""

    def __init__(self, times: dict[str, float | str] | None = None) -> None:
        self._times = times or {}
        self.calls: list[str] = []

    def __call__(
        self, problem: TuneProblem, tried: Sequence[CutlassCandidate]
    ) -> dict[str, Outcome]:
        self.calls.append(problem.key)
        names = [*(candidate.name for candidate in tried), TORCH]
        values = {name: self._times.get(name, 1000.0) for name in names}
        return {
            name: Failed(value) if isinstance(value, str) else timed(value)
            for name, value in values.items()
        }


def problems_at(*rows: int, shape: str = SHAPE) -> list[TuneProblem]:
    return tune_problems([], [shape], rows, H200)


def run(
    path: Path,
    problems: Sequence[TuneProblem],
    measure: FakeMeasure,
    sources: str = "today",
    **options: Any,
) -> Tuned:
    file = TuneFile(path, ENVIRONMENT, sources, start=options.pop("start", None))
    options.setdefault("pool", FakePool())
    return tune(problems, file, measure=measure, top=options.pop("top", 3), **options)


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of configurations with the real tiles and no measured choices."""
    real = files._folder()
    for path in real.glob("*.toml"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(files, "_folder", lambda: tmp_path)
    tuned_choices.cache_clear()
    yield tmp_path
    tuned_choices.cache_clear()


def problem_at(m: int, **layer: Any) -> Any:
    return layer_problem(Layer(m, 4096, 4096, **layer), H200)


# Keys


@pytest.mark.parametrize(
    ("m", "filed"),
    [
        (1, 8),
        (8, 8),
        (9, 16),
        (33, 48),
        (64, 64),
        (65, 80),
        (97, 112),
        (129, 192),
        (193, 256),
        (5000, 6144),
    ],
)
def test_rows_are_filed_under_the_next_bucket(m: int, filed: int) -> None:
    assert tuning_m(m) == filed
    assert tuning_key(problem_at(m)) == f"n4096 k4096 m{filed} bfloat16 plain"


def test_very_many_rows_share_the_last_bucket() -> None:
    assert tuning_m(16385) == tuning_m(10**6) == 16384


def test_a_gate_has_a_key_of_its_own() -> None:
    gated = layer_problem(Layer(16, 4096, 4096, activation="silu", gated=True), H200)
    assert tuning_key(gated) == "n4096 k4096 m16 bfloat16 gated"
    assert tuning_key(gated) != tuning_key(problem_at(16))


def test_the_file_is_named_after_the_gpu() -> None:
    assert tuned_path("NVIDIA H200").name == "nvidia_h200.json"


# What is tuned


def test_a_decoders_products_carry_their_epilogues() -> None:
    layers = decoder_layers(SHAPES["qwen2.5-7b"].config, 16)
    chains = {name: (layer.N, layer.K, layer.chain_text) for name, layer in layers.items()}
    assert chains == {
        "qkv": (4608, 3584, "bias"),
        "o": (3584, 3584, "residual"),
        "gate_up": (37888, 3584, "gate(silu)"),
        "down": (3584, 18944, "residual"),
        "lm_head": (152064, 3584, "none"),
    }


def test_the_head_is_left_out_of_long_prefills() -> None:
    config = SHAPES["llama3-8b"].config
    assert "lm_head" in decoder_layers(config, HEAD_ROWS)
    assert "lm_head" not in decoder_layers(config, HEAD_ROWS + 1)


def test_problems_come_once_a_key_in_the_order_of_the_rows() -> None:
    config = SHAPES["llama3-8b"].config
    found = tune_problems([("llama3-8b", config)], [SHAPE], [64, 1, 8], H200)
    assert [problem.problem.m for problem in found] == [64] * 5 + [8] * 5
    # The shape given on its own is the output projection again.
    assert len({problem.key for problem in found}) == len(found)


@pytest.mark.parametrize("text", ["4096", "a,b", "4096,4096,relu", "4096,12", "0,8", "24,8,gate"])
def test_a_bad_shape_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--shape {text}"):
        parse_shape(text, 16)


@pytest.mark.parametrize("text", ["", "16,", "0", "-1", "1.5"])
def test_bad_rows_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--m"):
        parse_rows(text)


@pytest.mark.parametrize("m", [8, 64, 128, 4096])
@pytest.mark.parametrize("top", [1, 4])
def test_candidates_are_the_best_by_the_model(m: int, top: int, config_folder: Path) -> None:
    for layer in decoder_layers(SHAPES["llama3-8b"].config, m).values():
        problem = layer_problem(layer, H200)
        found = candidates(problem, top)
        assert choose_candidate(problem).name in {candidate.name for candidate in found}
        assert all(candidate.tile.legal(problem) is None for candidate in found)
        assert len({candidate.name for candidate in found}) == len(found)


@pytest.mark.parametrize("m", [16, 4096])
def test_rows_that_no_kernel_can_load_have_no_candidates(m: int) -> None:
    with pytest.raises(ConfigError, match="got multiples of 4"):
        candidates(layer_problem(Layer(m, 4096, 4098), H200), 3)


def test_a_tiling_that_won_for_the_product_is_tried_at_every_m(config_folder: Path) -> None:
    far = candidates(problem_at(16), 100)[-1].name
    assert far not in {one.name for one in candidates(problem_at(64), 3)}
    run(tuned_path(H200.gpu), problems_at(16), FakeMeasure({far: 1.0}), top=100)
    tuned_choices.cache_clear()
    assert far in {one.name for one in candidates(problem_at(64), 3)}
    other = layer_problem(Layer(64, 4096, 8192), H200)
    assert far not in {one.name for one in candidates(other, 3)}


def test_ties_go_to_the_larger_tile() -> None:
    tied: dict[float, list[Any]] = {}
    problem = layer_problem(Layer(256, 128256, 4096), H200)
    for tile in prefill_tiles():
        if tile.legal(problem) is None:
            tied.setdefault(tile.predicted_us(problem), []).append(tile)
    groups = [group for group in tied.values() if len({tile.size for tile in group}) > 1]
    assert groups
    for group in groups:
        first = min(group, key=lambda tile: rank(tile, problem))
        assert first.size == max(tile.size for tile in group)


# The file


def test_a_row_holds_times_peers_and_runner_up(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    names = [candidate.name for candidate in candidates(problem_at(16), 3)]
    fastest, second, wrong = names[1], names[2], names[0]
    times: dict[str, float | str] = {fastest: 10.0, second: 12.0, TORCH: 15.0}
    measure = FakeMeasure({**times, wrong: "relative error 1"})
    done = run(path, problems_at(16), measure, pool=FakePool(broken=[names[3]]))
    data = json.loads(path.read_text())
    key = tuning_key(problem_at(16))
    row = data["choices"][key]
    assert done.measured == [key]
    assert (data["schema"], data["gpu"], data["driver"]) == (1, "NVIDIA H200", "580.1")
    assert (row["config"], row["us"]) == (fastest, 10.0)
    assert row["low_us"] < row["us"] < row["high_us"]
    assert row["runner_up"] == {"config": second, "us": 12.0}
    assert (row["cublas_us"], row["cublaslt_us"]) == (15.0, None)
    assert row["failed"] == {wrong: "relative error 1", names[3]: "no registers left"}
    assert row["candidates"][fastest] == 10.0
    assert wrong not in row["candidates"]
    assert row["model_choice"] == {"config": names[0], "us": None}
    assert (row["sources"], row["commit"], row["epilogue"]) == ("today", "abc", "residual")


def test_equal_times_are_told_apart_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    run(path, problems_at(16), FakeMeasure())
    row = json.loads(path.read_text())["choices"][tuning_key(problem_at(16))]
    assert row["config"] == min(row["candidates"])


def test_what_never_ran_right_is_not_chosen(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    key = tuning_key(problem_at(16))
    run(path, problems_at(16), FakeMeasure(), sources="yesterday")
    names = [candidate.name for candidate in candidates(problem_at(16), 3)]
    run(path, problems_at(16), FakeMeasure(dict.fromkeys(names, "wrong")))
    data = json.loads(path.read_text())
    assert data["choices"] == {}
    assert data["failures"][key]["failed"] == dict.fromkeys(names, "wrong")
    run(path, problems_at(16), FakeMeasure())
    data = json.loads(path.read_text())
    assert key in data["choices"]
    assert data["failures"] == {}


def test_what_cannot_be_compiled_is_not_measured(tmp_path: Path) -> None:
    names = [candidate.name for candidate in candidates(problem_at(16), 3)]
    measure = FakeMeasure()
    run(tmp_path / "tuned.json", problems_at(16), measure, pool=FakePool(broken=names))
    assert measure.calls == []


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    path, problems = tmp_path / "tuned.json", problems_at(16, 64, 256)

    class Killed(FakeMeasure):
        def __call__(
            self, problem: TuneProblem, tried: Sequence[CutlassCandidate]
        ) -> dict[str, Outcome]:
            if len(self.calls) == 1:
                raise KeyboardInterrupt
            return super().__call__(problem, tried)

    with pytest.raises(KeyboardInterrupt):
        run(path, problems, Killed())
    assert list(json.loads(path.read_text())["choices"]) == [problems[0].key]

    pool, measure = FakePool(), FakeMeasure()
    done = run(path, problems, measure, pool=pool)
    assert done.skipped == [problems[0].key]
    assert measure.calls == done.measured == [problem.key for problem in problems[1:]]
    again = FakeMeasure()
    assert run(path, problems, again).skipped == [problem.key for problem in problems]
    assert again.calls == []


def test_rows_of_other_sources_are_measured_again(tmp_path: Path) -> None:
    path, problems = tmp_path / "tuned.json", problems_at(16, 64)
    run(path, problems, FakeMeasure(), sources="yesterday")
    measure = FakeMeasure()
    assert run(path, problems[:1], measure).measured == [problems[0].key]
    rows = json.loads(path.read_text())["choices"]
    assert {key: row["sources"] for key, row in rows.items()} == {
        problems[0].key: "today",
        problems[1].key: "yesterday",
    }


def test_force_measures_current_rows(tmp_path: Path) -> None:
    path, problems = tmp_path / "tuned.json", problems_at(16)
    run(path, problems, FakeMeasure())
    assert run(path, problems, FakeMeasure(), force=True).measured == [problems[0].key]


def test_a_new_file_begins_with_the_committed_rows(tmp_path: Path) -> None:
    committed, problems = tmp_path / "committed.json", problems_at(16, 64)
    run(committed, problems[:1], FakeMeasure())
    before = committed.read_bytes()
    done = run(tmp_path / "out.json", problems, FakeMeasure(), start=committed)
    assert (done.skipped, done.measured) == ([problems[0].key], [problems[1].key])
    assert len(json.loads((tmp_path / "out.json").read_text())["choices"]) == 2
    assert committed.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    ['{"schema": 9, "gpu": "NVIDIA H200"}', '{"schema": 1, "gpu": "NVIDIA A100"}'],
)
def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tuned\.json"):
        run(path, problems_at(16), FakeMeasure())
    assert path.read_text() == text


# The time budget


def test_the_time_budget_stops_between_problems(tmp_path: Path) -> None:
    problems, now = problems_at(16, 64, 256), iter([0.0, 5.0, 11.0])
    done = run(
        tmp_path / "tuned.json", problems, FakeMeasure(), deadline=10.0, clock=lambda: next(now)
    )
    assert done.measured == [problem.key for problem in problems[:2]]
    assert done.left == [problems[2].key]
    assert len(json.loads((tmp_path / "tuned.json").read_text())["choices"]) == 2


def test_compilation_that_outlasts_the_budget_leaves_the_rest(tmp_path: Path) -> None:
    problems = problems_at(16, 64)
    done = run(
        tmp_path / "tuned.json",
        problems,
        FakeMeasure(),
        pool=FakePool(ready=False),
        deadline=10.0,
        clock=lambda: 0.0,
    )
    assert done.left == [problem.key for problem in problems]
    assert not (tmp_path / "tuned.json").exists()


# What reads the file


def test_two_tuners_of_one_file_keep_each_others_rows(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    first, second = (TuneFile(path, ENVIRONMENT, "today") for _ in range(2))
    few, more, many = problems_at(16, 64, 128)
    failing = FakeMeasure(dict.fromkeys((c.name for c in candidates(few.problem, 3)), "wrong"))

    def measure(file: TuneFile, problem: TuneProblem, with_times: FakeMeasure) -> None:
        tune([problem], file, measure=with_times, top=3, pool=FakePool())

    measure(first, few, failing)
    measure(second, few, FakeMeasure())
    measure(second, more, FakeMeasure())
    measure(first, many, FakeMeasure())
    data = json.loads(path.read_text())
    assert set(data["choices"]) == {few.key, more.key, many.key}
    assert data["failures"] == {}, "what failed here ran right there, later"


def test_a_measured_choice_is_taken_for_its_key_only(config_folder: Path) -> None:
    here, elsewhere = problem_at(16), problem_at(32)
    by_model = choose_candidate(here).name, choose_candidate(elsewhere).name
    slow = candidates(here, 4)[-1].name
    assert slow != by_model[0]
    run(tuned_path(H200.gpu), problems_at(16), FakeMeasure({slow: 1.0}), top=4)
    tuned_choices.cache_clear()
    assert tuned_path(H200.gpu).parent.parent == config_folder
    assert choose_candidate(here).name == slow
    assert choose_candidate(problem_at(9)).name == slow, "9 rows are filed under 16"
    assert choose_candidate(elsewhere).name == by_model[1]
    other_gpu = layer_problem(Layer(16, 4096, 4096), type(H200)("NVIDIA H100", "sm_90a", 132))
    assert choose_candidate(other_gpu).name == by_model[0]


GOOD = {"schema": 1, "gpu": "NVIDIA H200", "choices": {"n8 k8 m8": {"config": "r16k128"}}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "malformed"),
        ("{}", "schema"),
        (json.dumps({**GOOD, "schema": 2}), "schema 2"),
        (json.dumps({**GOOD, "gpu": "NVIDIA H20"}), "NVIDIA H20"),
        (json.dumps({**GOOD, "choices": []}), "malformed"),
        (json.dumps({**GOOD, "choices": {"k": {}}}), "config"),
        (json.dumps({**GOOD, "choices": {"k": {"config": "r17"}}}), "r17"),
        (json.dumps({**GOOD, "choices": {"k": {"config": []}}}), "malformed"),
    ],
)
def test_a_malformed_file_is_named(config_folder: Path, text: str, reason: str) -> None:
    path = tuned_path("NVIDIA H200")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        choose_candidate(problem_at(16))
    assert str(caught.value).count(path.name) == 1
    path.write_text(json.dumps(GOOD))
    assert tuned_choices("NVIDIA H200") == GOOD["choices"]


@pytest.mark.parametrize("provider", [CutlassProvider(), CutlassSm80Provider()])
def test_a_malformed_file_is_no_reason_to_pass_kernels_over(
    provider: GemmProvider, config_folder: Path
) -> None:
    path = tuned_path("NVIDIA H200")
    path.parent.mkdir()
    path.write_text("[]")
    with pytest.raises(ConfigError, match="malformed"):
        provider.supports(problem_at(16))


def test_the_committed_file_is_sound() -> None:
    choices = tuned_choices(H200.gpu)
    assert all(row["us"] > 0 and key.startswith("n") for key, row in choices.items())


# Measuring, with torch in the place of the kernels


def fake_launch(layer: Layer, error: float = 0.0) -> Callable[..., None]:
    def launch(
        x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
    ) -> None:
        given = list(operands)
        weight = torch.cat(unpack_gate_up(w, layer.N // 2)) if layer.gated else w
        product = x.float() @ weight.float().T
        if layer.bias:
            bias = given.pop(0).float()
            product += torch.cat(unpack_gate_up(bias, layer.N // 2)) if layer.gated else bias
        residual = given.pop(0).float() if layer.residual else None
        assert not given
        assert not extra
        out.copy_(layer.epilogue(product, residual) * (1 + error))

    return launch


LAYERS = [
    Layer(8, 48, 32, bias=True),
    Layer(8, 32, 32, residual=True),
    Layer(8, 64, 32, activation="silu", gated=True, bias=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.chain_text)
@pytest.mark.parametrize("rotated", [False, True])
def test_wrong_candidates_get_no_time(
    layer: Layer, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusedops.bench.chain.MIN_WEIGHT_BYTES", 1)
    monkeypatch.setattr("fusedops.bench.chain.STREAMED_BYTES", 1)
    row = measure_rotated if rotated else measure_in_chain
    launches = {"right": fake_launch(layer), "wrong": fake_launch(layer, error=0.1)}
    outcomes = row(layer, launches, torch.device("cpu"), QUICK)
    assert isinstance(outcomes["right"], Measurement)
    assert isinstance(outcomes["wrong"], Failed)
    assert "relative error" in outcomes["wrong"].reason
    assert isinstance(outcomes[TORCH], Measurement)


def test_work_for_a_worker_process_can_be_sent_to_it() -> None:
    for m in (16, 256):
        work = candidate_work(candidates(problem_at(m, residual=True), 1)[0])
        there = pickle.loads(pickle.dumps(work))()
        assert (there.family, there.spec) == (work().family, work().spec)


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPU")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "nothing to tune"),
        (("--model", "llama3-8b"), "no CUDA device"),
        (("--model", "llama2-7b"), "llama3-8b"),
        (("--shape", "8", "--compile-only"), "--shape 8"),
        (("--shape", SHAPE, "--m", "x"), "--m x"),
    ],
)
def test_bad_input_ends_with_one_line(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.err.startswith("error: ")


def test_the_command_ends_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command on a GPU that is only pretended, out of time after one problem."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("fusedops.bench.tune_problems.target_of", lambda device: H200)
    monkeypatch.setattr("fusedops.bench.environment.collect_environment", lambda: ENVIRONMENT)
    pool, in_time = FakePool(), iter([True, False])
    monkeypatch.setattr(pool, "ready", lambda *_: next(in_time))
    monkeypatch.setattr("fusedops.cli.tune.KernelPool", lambda *_, **__: pool)
    fastest = candidates(problem_at(16), 2)[1].name
    measure = FakeMeasure({fastest: 9.0, TORCH: 20.0})
    monkeypatch.setattr(
        "fusedops.bench.tune_measure.measure_on_gpu",
        lambda problem, tried, _: measure(problem, tried),
    )
    path = tmp_path / "tuned.json"
    arguments = ["tune", "--shape", SHAPE, "--m", "16,64", "--minutes", "1", "--out", str(path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 measured, 0 current, 1 left" in out
    assert re.search(rf"{SHAPE} m16 +{fastest} +9\.00 .* 20\.00", out)
    assert re.search(rf"{SHAPE} m64 +not reached", out)
    assert len(json.loads(path.read_text())["choices"]) == 1
