"""The GEMM goals' logic with injected timings, and what of them runs on the CPU."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops.bench.data import Buffers
from fusedops.bench.environment import Environment
from fusedops.bench.goal_harness import Harness
from fusedops.bench.goal_run import GoalError, GoalRun, Reading
from fusedops.bench.goal_spec import Goal, load_goals
from fusedops.bench.goals import Registered, gemm_rows, gemm_sets, gemm_start, gemm_step, load_all
from fusedops.bench.goals.gemm_large import bare_peers
from fusedops.bench.goals.gemm_layers import GOAL_ROWS, Row
from fusedops.bench.goals.gemm_rows import (
    MINE,
    annotated,
    our_contender,
    plan_text,
    ratio,
    refuse_void,
    traffic,
)
from fusedops.bench.goals.gemm_sets import scored_set
from fusedops.bench.goals.gemm_start import cold_outcomes, run_process, warm_outcomes
from fusedops.bench.goals.gemm_step import StepChain, step_bytes, step_outcomes
from fusedops.bench.measurement import Absent, Failed, Measurement, Outcome, summarize
from fusedops.bench.peers import Available
from fusedops.bench.products import (
    CUBLASLT,
    MODELS,
    PRODUCTS,
    Layer,
    ModelShape,
    make_layer_buffers,
)
from fusedops.bench.roofline import PUBLISHED_CEILINGS
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError
from fusedops.jit.location import CACHE_VARIABLE
from fusedops.providers.base import current_policy, use_provider
from serving_demo.shapes import SHAPES

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
ENVIRONMENT = Environment(
    "NVIDIA H200", "580.1", "cpu", "3.12", {"torch": "2.11"}, "abc", "goals.py", "2026-01-01"
)
GOALS = load_goals()
TINY = ModelShape(hidden=64, query=64, kv=32, intermediate=128, vocabulary=256, layers=3)


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Every test starts as a new process would, with one thread."""
    gemm_sets.forget_rows()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gemm_sets.forget_rows()


def us(*samples: float) -> Measurement:
    return summarize(samples, mode="cuda graph", launches=1, hot=False)


def ran(times: int = 1) -> None:
    """What a served call leaves in the usage of the pinned provider."""
    policy = current_policy()
    assert policy.usage is not None
    policy.usage.calls["gemm", policy.pinned or ""] += times


def harness(tmp_path: Path, **options: Any) -> Harness:
    options.setdefault("registry", load_all())
    return Harness(tmp_path / "h200", ENVIRONMENT, device="cpu", protocol=QUICK, **options)


class Timings:
    """Stands for the GPU: outcomes by row, and the rows that were asked for."""

    def __init__(self, outcomes: Callable[[Layer], dict[str, Outcome]]) -> None:
        self.outcomes = outcomes
        self.rows: list[str] = []

    def __call__(self, run: GoalRun, row: Row) -> dict[str, Outcome]:
        self.rows.append(row.key)
        ran()
        return self.outcomes(row.layer)


def faster_by(factor: float) -> Callable[[Layer], dict[str, Outcome]]:
    return lambda layer: {
        MINE: us(10.0, 10.0, 10.0),
        "torch": us(*[12.0 * factor] * 3),
        CUBLASLT: us(*[10.0 * factor] * 3),
    }


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> Timings:
    """The sets' chains, with injected times: ours 10 us, cuBLASLt 13 us."""
    found = Timings(faster_by(1.3))

    class Chain:
        def __init__(self, layer: Layer, device: str) -> None:
            self.chain = self.layer = layer

        def contender(self, name: str, launch: object) -> str:
            return name

        def peers(self) -> list[str]:
            return ["torch", CUBLASLT]

    def measure_chain(layer: Layer, contenders: list[str], **_: Any) -> dict[str, Outcome]:
        assert contenders == [MINE, "torch", CUBLASLT]
        key = f"n{layer.N} k{layer.K} m{layer.M}"
        return found(None, Row(key, layer))  # type: ignore[arg-type]

    monkeypatch.setattr(gemm_sets, "LayerChain", Chain)
    monkeypatch.setattr(gemm_sets, "chain_launch", lambda chain: None)
    monkeypatch.setattr(gemm_sets, "measure_chain", measure_chain)
    monkeypatch.setattr(gemm_rows, "row_ceilings", lambda device: PUBLISHED_CEILINGS["NVIDIA H200"])
    monkeypatch.setattr(gemm_rows, "plan_text", lambda layer, device: "cutlass: some tile")
    return found


# The rows


def test_every_gemm_goal_is_measured_and_every_set_is_a_goal() -> None:
    registry = load_all()
    assert {name for name in GOALS if name.startswith("gemm.")} <= set(registry)
    assert set(GOAL_ROWS) <= set(GOALS)


def test_models_have_the_sizes_that_the_demo_gives_them() -> None:
    assert set(MODELS) == set(SHAPES)
    for name, shape in MODELS.items():
        config = SHAPES[name].config
        assert shape == ModelShape(
            config.hidden_size,
            config.n_heads * config.head_dim,
            config.n_kv_heads * config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            config.n_layers,
        )


def test_layers_of_llama_3_8b_are_those_of_the_decode_goals() -> None:
    shape = MODELS["llama3-8b"]
    found = {name: shape.layer(name, 16) for name in PRODUCTS}
    assert {(layer.N, layer.K, layer.chain_text) for layer in found.values()} == {
        (6144, 4096, "bias"),
        (4096, 4096, "residual"),
        (28672, 4096, "gate(silu)"),
        (4096, 14336, "residual"),
        (128256, 4096, "none"),
    }
    assert Layer(1, 8, 8, bias=True, activation="gelu", residual=True).chain_text == (
        "bias|act(gelu)|residual"
    )
    with pytest.raises(ConfigError, match="product"):
        shape.layer("attention", 1)


@pytest.mark.parametrize(
    ("goal_id", "lowest", "highest", "count"),
    [
        ("gemm.small_m.geomean", 1, 64, 120),
        ("gemm.mid_m.geomean", 96, 512, 80),
        ("gemm.large_m.fused_over_bare", 1024, 8192, 12),
        ("gemm.quack.small_m", 1, 64, 25),
        ("gemm.quack.large_m", 96, 4096, 24),
    ],
)
def test_sets_hold_each_shape_once_and_come_m_by_m(
    goal_id: str, lowest: int, highest: int, count: int
) -> None:
    rows = GOAL_ROWS[goal_id]()
    assert len({row.key for row in rows}) == len({row.layer for row in rows}) == count
    sizes = [row.layer.M for row in rows]
    assert (min(sizes), max(sizes)) == (lowest, highest)
    # Whole columns: once another M begins, the one before it does not come back.
    changes = sum(a != b for a, b in itertools.pairwise(sizes))
    assert changes == len(set(sizes)) - 1


# Ratios


def test_the_ratio_is_against_the_best_peer_of_the_row(tmp_path: Path) -> None:
    run = GoalRun.__new__(GoalRun)
    outcomes = {MINE: us(10, 11, 12), "torch": us(30, 30, 30), CUBLASLT: us(20, 22, 24)}
    name, found = ratio(run, outcomes)
    assert (name, found.median) == (CUBLASLT, 2.0)
    name, found = ratio(run, {**outcomes, "torch": us(5, 5.5, 6)})
    assert (name, found.median) == ("torch", 0.5)


@pytest.mark.parametrize("missing", [None, Failed("no algorithm"), Absent("no library")])
def test_a_row_without_cublaslt_is_not_measurable(missing: Outcome | None) -> None:
    outcomes: dict[str, Outcome] = {MINE: us(10), "torch": us(30)}
    if missing is not None:
        outcomes[CUBLASLT] = missing
    with pytest.raises(GoalError, match="not measurable without cublaslt best of 8"):
        ratio(GoalRun.__new__(GoalRun), outcomes)
    assert ratio(GoalRun.__new__(GoalRun), outcomes, required=())[0] == "torch"


def test_geomean_and_worst_read_the_same_rows_measured_once(
    tmp_path: Path, timings: Timings
) -> None:
    slow = MODELS["llama3-8b"].layer("lm_head", 64)
    plain = faster_by(1.3)
    timings.outcomes = lambda layer: faster_by(0.9)(layer) if layer == slow else plain(layer)
    run = harness(tmp_path)
    mean = run.run(GOALS["gemm.small_m.geomean"])
    assert len(timings.rows) == 120
    wanted = math.exp((119 * math.log(1.3) + math.log(0.9)) / 120)
    assert mean["value"] == pytest.approx(wanted, abs=1e-6)
    assert mean["status"] == "ok"
    assert mean["peer"] == "cublaslt best in 120"
    assert "m64 " in mean["note"]
    assert "worst llama3-8b lm_head n128256 k4096 m64 0.900" in mean["note"]
    worst = run.run(GOALS["gemm.small_m.worst"])
    assert len(timings.rows) == 120
    assert (worst["value"], worst["status"]) == (0.9, "missed")
    assert worst["note"].startswith("lowest of 120: llama3-8b lm_head")
    assert mean["sources"] == worst["sources"]


def test_a_set_that_is_cut_off_goes_on_at_the_next_row(tmp_path: Path, timings: Timings) -> None:
    ticks = iter(range(1000))
    cut = harness(tmp_path, deadline=50.5, clock=lambda: float(next(ticks)))
    assert cut.run(GOALS["gemm.mid_m.geomean"])["status"] == "not run"
    assert len(timings.rows) == 51
    gemm_sets.forget_rows()
    assert harness(tmp_path).run(GOALS["gemm.mid_m.geomean"])["status"] == "ok"
    assert len(timings.rows) == len(set(timings.rows)) == 80


def test_the_second_goal_of_a_set_needs_no_time_of_its_own(
    tmp_path: Path, timings: Timings
) -> None:
    spent = False
    run = harness(tmp_path, deadline=1.0, clock=lambda: 2.0 if spent else 0.0)
    assert run.run(GOALS["gemm.small_m.geomean"])["status"] == "ok"
    spent = True
    assert run.run(GOALS["gemm.small_m.worst"])["status"] == "ok"


def test_a_failed_row_leaves_the_set_without_a_figure_and_the_others_measured(
    tmp_path: Path, timings: Timings
) -> None:
    plain = timings.outcomes
    bad = MODELS["qwen2.5-7b"].layer("down_residual", 128)
    timings.outcomes = lambda layer: (
        {**plain(layer), MINE: Failed("relative error 1")} if layer == bad else plain(layer)
    )
    entry = harness(tmp_path).run(GOALS["gemm.mid_m.geomean"])
    assert len(timings.rows) == 80
    assert (entry["status"], entry["value"]) == ("failed", None)
    assert entry["note"].startswith("1 of 80 rows have no ratio: qwen2.5-7b down_residual")
    assert "relative error 1" in entry["note"]


def test_rows_carry_floor_plan_and_speed_ups(tmp_path: Path, timings: Timings) -> None:
    timings.outcomes = lambda layer: {MINE: us(9.0), "torch": us(15.2), CUBLASLT: us(13.7)}
    rows = [Row("o", Layer(16, 4096, 4096, residual=True))]

    def one_row(run: GoalRun) -> Reading:
        return gemm_rows.geomean(scored_set(run, "o", rows, timings))

    registry = {"gemm.mid_m.geomean": Registered(one_row, "cutlass", ("fusedops/gemm.py",))}
    run = harness(tmp_path, registry=registry)
    assert run.run(GOALS["gemm.mid_m.geomean"])["value"] == pytest.approx(13.7 / 9.0, abs=1e-4)
    stored = json.loads(run.rows_path.read_text())["rows"]["gemm.mid_m.geomean"]["o"]
    assert stored["outcomes"][MINE]["notes"] == [
        "floor 7.27 us, 80.8% of it reached",
        "plan cutlass: some tile",
        "speed-up 1.689 over torch",
        "speed-up 1.522 over cublaslt best of 8",
    ]


def test_traffic_counts_each_operand_once() -> None:
    layer = Layer(2, 8, 4, bias=True, activation="silu", gated=True, residual=True)
    assert traffic(layer).read_bytes == 2 * (8 * 4 + 2 * 4 + 8 + 2 * 4)
    assert traffic(layer).write_bytes == 2 * (2 * 4)
    assert traffic(layer).flops == 2 * 2 * 8 * 4


def test_outcomes_of_a_failed_row_are_left_as_they_are() -> None:
    outcomes: dict[str, Outcome] = {MINE: Failed("wrong"), "torch": us(1.0)}
    assert annotated(Layer(1, 8, 8), outcomes, "cpu") == outcomes


def test_a_void_row_is_refused_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    head = Layer(16, 128256, 4096)
    with pytest.raises(GoalError, match="the row is void"):
        refuse_void(head, {"torch": us(300.0)}, "cuda")
    refuse_void(head, {"torch": us(252.0)}, "cuda")
    refuse_void(head, {"torch": us(300.0), CUBLASLT: us(252.0)}, "cuda")
    refuse_void(head, {"torch": us(300.0)}, "cpu")
    refuse_void(dataclasses.replace(head, residual=True), {"torch": us(300.0)}, "cuda")


# Rows on buffers, on the CPU


@pytest.mark.parametrize(
    "layer",
    [
        Layer(3, 32, 16, bias=True, activation="silu", gated=True),
        Layer(3, 32, 16, bias=True, activation="silu", residual=True),
        Layer(3, 32, 16, bias=True, activation="gelu"),
        Layer(3, 32, 16),
    ],
)
def test_our_contender_computes_the_layer(layer: Layer) -> None:
    buffers = make_layer_buffers(layer, torch.Generator().manual_seed(0))
    contender = our_contender(layer)
    assert contender.prepare is not None
    result = contender.run(contender.prepare(buffers))
    assert isinstance(result, torch.Tensor)
    assert contender.check((result,), buffers) is None
    assert "relative error" in (contender.check((result * 2,), buffers) or "")


def test_bare_peers_multiply_without_the_epilogue() -> None:
    layer = Layer(3, 32, 16, bias=True, activation="silu", gated=True)
    buffers = make_layer_buffers(layer, torch.Generator().manual_seed(0))
    contenders = bare_peers(layer)
    assert contenders[0].name == "torch"
    assert contenders[0].prepare is not None
    result = contenders[0].run(contenders[0].prepare(buffers))
    assert isinstance(result, torch.Tensor)
    assert result.shape == (3, 32)
    assert contenders[0].check((result,), buffers) is None
    swapped = Buffers((buffers.inputs[0], buffers.inputs[1].flip(0), *buffers.inputs[2:]))
    assert contenders[0].check((result,), swapped) is not None


def test_the_plan_is_what_explain_says() -> None:
    assert plan_text(Layer(3, 32, 16), "cpu").startswith("reference: ")


@pytest.mark.parametrize(
    ("goal_id", "ours_us", "wanted"),
    [
        ("gemm.large_m.fused_over_bare", 11.0, 1.1),
        ("gemm.8192_over_cublas", 8.0, 1.25),
    ],
)
def test_large_goals_read_the_least_favourable_row(
    goal_id: str,
    ours_us: float,
    wanted: float,
    tmp_path: Path,
    timings: Timings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = GOAL_ROWS[goal_id]()
    last = rows[-1].layer

    def outcomes(*_: Any, **__: Any) -> dict[str, Outcome]:
        ran()
        layer = asked.pop()
        mine = ours_us if layer == last else 9.0
        return {MINE: us(mine), "torch": us(12.0), CUBLASLT: us(10.0)}

    asked: list[Layer] = []
    module = "fusedops.bench.goals.gemm_large"
    monkeypatch.setattr(f"{module}.measure", outcomes)
    monkeypatch.setattr(f"{module}.our_contender", asked.append)
    monkeypatch.setattr(f"{module}.bare_peers", lambda layer: [])
    entry = harness(tmp_path).run(GOALS[goal_id])
    assert entry["value"] == pytest.approx(wanted, abs=1e-6)
    assert entry["peer"] == CUBLASLT


def test_quack_is_a_peer_by_its_best_configuration(
    tmp_path: Path, timings: Timings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes(*_: Any, **__: Any) -> dict[str, Outcome]:
        ran()
        return {MINE: us(10.0), "quack a": us(14.0), "quack b": us(12.0), "quack c": Failed("no")}

    monkeypatch.setattr(gemm_sets, "measure", outcomes)
    monkeypatch.setattr(gemm_sets, "our_contender", lambda layer: None)
    monkeypatch.setattr(gemm_sets, "quack_peers", lambda layer, check: [])
    status = {"quack": Available("0.6.5")}
    monkeypatch.setattr(gemm_sets, "peer_status", lambda names: status)
    for goal_id in ("gemm.quack.small_m", "gemm.quack.large_m"):
        entry = harness(tmp_path).run(GOALS[goal_id])
        assert entry["value"] == pytest.approx(1.2)
        assert entry["peer"] == "QuACK 0.6.5"


def test_without_quack_its_goals_are_not_measurable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"quack": Absent("the package quack-kernels is not installed")}
    monkeypatch.setattr(gemm_sets, "peer_status", lambda names: status)
    entry = harness(tmp_path).run(GOALS["gemm.quack.small_m"])
    assert entry["status"] == "failed"
    assert entry["note"] == (
        "not measurable without QuACK: the package quack-kernels is not installed"
    )


# The step


def step_run(goal: Goal) -> GoalRun:
    run = GoalRun.__new__(GoalRun)
    run.goal, run.device, run.protocol = goal, "cpu", QUICK
    return run


def test_a_step_chains_every_product_and_checks_each() -> None:
    with use_provider("reference") as usage:
        outcomes = step_outcomes(step_run(GOALS["gemm.chain129.m1"]), TINY, m=2)
    assert {name: type(row) for name, row in outcomes.items()} == {
        MINE: Measurement,
        "torch": Measurement,
    }, outcomes
    mine = outcomes[MINE]
    assert isinstance(mine, Measurement)
    assert mine.launches == 1
    assert usage.calls["gemm", "reference"] % (4 * TINY.layers + 1) == 0


def test_a_wrong_product_in_the_middle_of_a_step_is_found() -> None:
    chain = StepChain(TINY, "cpu")
    assert len(chain.products) == 13
    for product in chain.products:
        gemm_step.torch_launch(product)
    assert chain.wrong() is None
    chain.products[6].out.mul_(1.05)
    assert (chain.wrong() or "").startswith("product 6: relative error")
    chain.poison()
    assert (chain.wrong() or "").startswith("product 0: relative error nan")


def test_values_neither_fade_nor_grow_over_a_whole_models_layers() -> None:
    deep = dataclasses.replace(TINY, hidden=256, query=256, intermediate=512, layers=32)
    chain = StepChain(deep, "cpu", m=4)
    for product in chain.products:
        gemm_step.torch_launch(product)
    assert all(0.5 < float(product.out.float().std()) < 2 for product in chain.products)


def test_bytes_of_a_step_are_those_of_the_129_weights() -> None:
    assert step_bytes(MODELS["llama3-8b"]) == pytest.approx(15.01e9, rel=1e-3)


def test_the_steps_reading_is_the_whole_chain_in_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes(run: GoalRun, shape: ModelShape) -> dict[str, Outcome]:
        ran(129)
        return {MINE: us(3400.0), "torch": us(4200.0), CUBLASLT: us(4050.0)}

    monkeypatch.setattr(gemm_step, "step_outcomes", outcomes)
    entry = harness(tmp_path).run(GOALS["gemm.chain129.m1"])
    assert (entry["value"], entry["status"]) == (3.4, "ok")
    assert entry["peer"] == "cublaslt best of 8 4.050 ms"
    assert "4.42 TB/s" in entry["note"]


# First calls


def first_call(**changes: Any) -> dict[str, Any]:
    return {"seconds": 0.5, "error": 1e-3, "calls": 1, "wall_s": 4.0, **changes}


def test_a_warm_first_call_fills_the_store_and_then_compiles_nothing(tmp_path: Path) -> None:
    forbidden: list[bool] = []

    def processes(arguments: list[str], environment: Any) -> dict[str, Any]:
        forbidden.append(environment.get("FUSEDOPS_COMPILE") == "0")
        return first_call(seconds=0.4 + 0.1 * len(forbidden))

    def warm(run: GoalRun) -> Reading:
        outcomes = run.row("warm", lambda: warm_outcomes(run, processes))
        return Reading.of(run.mine(outcomes, MINE), run.goal.unit)

    name = "gemm.warm_first_call_s"
    registry = {name: Registered(warm, "cutlass", ("fusedops/gemm.py",))}
    entry = harness(tmp_path, registry=registry).run(GOALS[name])
    assert entry["value"] == pytest.approx(0.7)
    assert forbidden == [False, True, True, True]


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_wrong_first_result_is_no_time(error: float) -> None:
    with pytest.raises(GoalError, match="the first result is wrong"):
        warm_outcomes(step_run(GOALS["gemm.warm_first_call_s"]), lambda *_: first_call(error=error))


def test_a_cold_compile_is_the_wall_time_of_an_empty_store(tmp_path: Path) -> None:
    folders: list[Path] = []

    def processes(arguments: list[str], environment: Any) -> dict[str, Any]:
        folder = Path(environment[CACHE_VARIABLE])
        assert folder.is_dir()
        assert not list(folder.iterdir())
        folders.append(folder)
        assert arguments[:2] == ["-m", "fusedops.bench.precompile"]
        return {"compiled": 25, "present": 0, "failed": {}, "wall_s": 21.5}

    def cold(run: GoalRun) -> Reading:
        outcomes = run.row("cold", lambda: cold_outcomes(run, processes))
        return Reading.of(run.mine(outcomes, MINE), run.goal.unit)

    name = "gemm.cold_model_compile_s"
    registry = {name: Registered(cold, "cutlass", ("fusedops/gemm.py",))}
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    entry = harness(tmp_path, registry=registry, now=lambda: noon).run(GOALS[name])
    assert (entry["value"], entry["status"]) == (21.5, "ok")
    assert entry["note"] == "25 GEMM kernels of llama3-8b"
    assert not folders[0].exists()


@pytest.mark.parametrize("change", [{"failed": {"x": "no room"}}, {"present": 1}])
def test_a_compile_that_was_not_cold_or_whole_is_no_time(change: dict[str, Any]) -> None:
    done = {"compiled": 25, "present": 0, "failed": {}, "wall_s": 21.5, **change}
    with pytest.raises(GoalError, match="not a cold compile"):
        cold_outcomes(step_run(GOALS["gemm.cold_model_compile_s"]), lambda *_: done)


def test_a_cold_compile_needs_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    entry = harness(tmp_path).run(GOALS["gemm.cold_model_compile_s"])
    assert entry["note"] == "not measurable: it needs 8 cores, this machine has 2"


def test_a_process_is_read_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json; print('noise'); print(json.dumps({'a': 1}))"
    done = run_process(["-c", code], {})
    assert done["a"] == 1
    assert done["wall_s"] > 0
    with pytest.raises(GoalError, match="exit status 3"):
        run_process(["-c", "raise SystemExit(3)"], {})
    with pytest.raises(GoalError, match="a process failed"):
        run_process(["-c", "print('no json')"], {})
    monkeypatch.setattr(gemm_start, "TIMEOUT_S", 0.2)
    with pytest.raises(GoalError, match=r"over 0\.2 s"):
        run_process(["-c", "import time; time.sleep(5)"], {})


def test_the_first_call_is_valid_python() -> None:
    compile(gemm_start.FIRST_CALL, "first call", "exec")
