"""The measuring functions of the hand-written kernels, small and on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.bench import Buffers, Protocol, environment, peers
from fusedops.bench.goal_run import GoalError, GoalRun, OutOfTimeError, Reading, RowStore
from fusedops.bench.goal_spec import load_goals
from fusedops.bench.goals import (
    cuda_compile,
    cuda_histogram,
    cuda_host,
    cuda_memory,
    cuda_reduce,
    cuda_rows,
    cuda_sampling,
    load_all,
)
from fusedops.bench.goals.cuda_rows import (
    MINE,
    TABLE_PEERS,
    best_peer,
    bounded,
    contenders,
    reading,
    rows_beside,
    with_absent,
)
from fusedops.bench.measurement import (
    Absent,
    Bound,
    Failed,
    Measurement,
    Outcome,
    outcome_from_json,
    outcome_to_json,
    summarize,
)
from fusedops.errors import BuildError, ConfigError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.jit.resources import csrc_dir
from fusedops.ops.transpose import transpose
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_plan import Gpu

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
IDS = (
    *(f"cuda.transpose.{name}" for name in cuda_memory.TRANSPOSES),
    *("cuda.copy_over_torch_mul", "cuda.argmax", "cuda.host_us"),
    *(f"cuda.reduce.{name}" for name in ("sum_2p28", "sum_2p16", "rows", "logsumexp")),
)


def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave torch as the only peer."""

    def status(names: list[str]) -> dict[str, object]:
        return {
            name: peers.Available("") if name == "torch" else Absent("left out") for name in names
        }

    for module in (peers, cuda_rows, cuda_histogram, cuda_sampling):
        monkeypatch.setattr(module, "peer_status", status)


def reference_run(monkeypatch: pytest.MonkeyPatch, goal: str) -> Iterator[GoalRun]:
    """A run on the CPU that pins the reference, with torch as its only peer."""
    without_peers(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with use_provider("reference") as usage:
        yield GoalRun(
            load_goals()[goal],
            provider="reference",
            device="cpu",
            protocol=QUICK,
            store=RowStore({}, "sources", lambda: None),
            usage=usage,
        )
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalRun]:
    yield from reference_run(monkeypatch, "cuda.reduce.rows")


def time_of(us: float) -> Measurement:
    return summarize([us], mode="fake", launches=1, hot=False)


def failures(rows: dict[str, Outcome]) -> dict[str, Outcome]:
    return {name: row for name, row in rows.items() if isinstance(row, Failed)}


def timed(rows: dict[str, Outcome]) -> set[str]:
    """Names of contenders with a time; all others of the table are absent with a reason."""
    absent = {name for name, row in rows.items() if isinstance(row, Absent) and row.reason}
    assert absent >= set(TABLE_PEERS) - failures(rows).keys()
    return rows.keys() - absent - failures(rows).keys()


@pytest.mark.parametrize("goal_id", IDS)
def test_each_goal_has_a_function_that_pins_the_kernels(goal_id: str) -> None:
    registered = load_all()[goal_id]
    assert registered.provider == "cuda"
    assert registered.sources()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_transpose_row_times_us_and_torch(run: GoalRun, dtype: torch.dtype) -> None:
    rows = cuda_memory.transpose_outcomes(run, 33, 65, dtype)
    assert timed(rows) == {MINE, "torch"}
    assert not failures(rows)


@pytest.mark.parametrize("granularity", cuda_memory.STORAGES)
def test_a_quantizing_transpose_is_timed_beside_its_parts(run: GoalRun, granularity: str) -> None:
    rows = cuda_memory.quantize_outcomes(run, 256, 40, granularity)
    assert timed(rows) == {MINE, f"{MINE} transpose, quantize", "torch.t, quantize", "torch"}
    assert not failures(rows)


@pytest.mark.parametrize(("source", "target"), cuda_memory.CASTS, ids=str)
def test_a_casting_transpose_row_times_us_and_torch(
    run: GoalRun, source: torch.dtype, target: torch.dtype
) -> None:
    rows = cuda_memory.cast_outcomes(run, 33, 65, source, target)
    assert timed(rows) == {MINE, "torch"}
    assert not failures(rows)


def test_converting_transposes_stand_beside_one_goal(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def outcomes(run: GoalRun, *options: Any) -> dict[str, Outcome]:
        asked.append(options[2:])
        return {MINE: time_of(5) if len(asked) > 1 else Failed("no")}

    monkeypatch.setattr(cuda_memory, "quantize_outcomes", outcomes)
    monkeypatch.setattr(cuda_memory, "cast_outcomes", outcomes)
    monkeypatch.setattr(cuda_memory, "transpose_outcomes", lambda *_: {MINE: time_of(3)})
    registered = load_all()
    notes = {
        name: registered[f"cuda.transpose.{name}"].function(run).note
        for name in cuda_memory.TRANSPOSES
    }
    assert asked == [(granularity,) for granularity in cuda_memory.STORAGES] + list(
        cuda_memory.CASTS
    )
    assert [note for note in notes.values() if note] == ["4 rows beside; e4m3 block128: no"]


@pytest.mark.parametrize(
    ("shape", "op", "dim"),
    [((999,), "sum", None), ((40, 60), "sum", 1), ((40, 60), "sum", 0), ((40, 60), "logsumexp", 1)],
)
def test_a_reduction_row_times_us_and_torch(
    run: GoalRun, shape: tuple[int, ...], op: str, dim: int | None
) -> None:
    def torchs(x: Tensor) -> Tensor:
        dims = list(range(x.dim())) if dim is None else [dim]
        return x.logsumexp(dims) if op == "logsumexp" else x.sum(dims)

    rows = cuda_reduce.reduce_outcomes(run, shape, op, dim, torchs)
    assert timed(rows) == {MINE, "torch"}
    assert not failures(rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize(("op", "dim"), [("sum", None), ("max", None), ("max", 1), ("sum", 1)])
def test_integers_and_maxima_are_checked_exactly(
    run: GoalRun, op: str, dim: int | None, dtype: torch.dtype
) -> None:
    torchs = cuda_reduce._by_torch(op, dim)
    rows = cuda_reduce.reduce_outcomes(run, (40, 60), op, dim, torchs, dtype)
    assert timed(rows) == {MINE, "torch"}
    wrong = cuda_reduce.reduce_outcomes(
        run, (40, 61), op, dim, lambda x: torchs(x) + torch.ones((), dtype=x.dtype), dtype
    )
    assert set(failures(wrong)) == {"torch"}


def test_rows_of_integers_and_maxima_stand_beside_the_sum_without_counting(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def outcomes(_run: GoalRun, shape: Any, op: str, dim: Any, *rest: Any) -> dict[str, Outcome]:
        asked.append((op, shape, dim, *rest[1:]))
        row = time_of(3) if len(asked) == 1 else Failed("no") if op == "sum" else time_of(9)
        return {MINE: row, "torch": time_of(4)}

    monkeypatch.setattr(cuda_reduce, "reduce_outcomes", outcomes)
    found = cuda_reduce.sum_of_all(run)
    assert (found.value, found.peer) == (3, "torch 4.0 us")
    assert asked[1:] == list(cuda_reduce.BESIDE)
    assert found.note == "5 rows beside; sum int32 1D: no; sum int32 2D: no"


def test_the_positions_of_a_row_are_checked(run: GoalRun) -> None:
    rows = cuda_reduce.reduce_outcomes(run, (5, 300), "argmax", 1, lambda x: x.argmax(1))
    assert not failures(rows)
    rows = cuda_reduce.reduce_outcomes(run, (5, 301), "argmax", 1, lambda x: x.argmin(1))
    assert set(failures(rows)) == {"torch"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.sum(1) + 1.0,
        lambda x: x[:, 1:].sum(1),
        lambda x: x.sum(1).mul_(float("nan")),
    ],
)
def test_a_wrong_sum_gets_no_time(run: GoalRun, wrong: Any) -> None:
    rows = cuda_reduce.reduce_outcomes(run, (40, 60), "sum", 1, wrong)
    assert isinstance(rows["torch"], Failed)
    assert isinstance(rows[MINE], Measurement)


def test_a_wrong_transpose_gets_no_time(run: GoalRun) -> None:
    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return None if torch.equal(results[0], buffers.inputs[0].t()) else "wrong"

    found = contenders(transpose, lambda x: x.flip(0).t(), check)
    rows = run.measure("wrong", found, lambda g: Buffers((torch.randn(4, 5, generator=g),)))
    assert isinstance(rows["torch"], Failed)
    assert isinstance(rows[MINE], Measurement)


def test_a_row_that_never_ran_the_provider_is_refused(run: GoalRun) -> None:
    found = contenders(torch.neg, torch.neg, lambda results, buffers: None)
    with pytest.raises(GoalError, match="never ran"):
        run.measure("none", found, lambda g: Buffers((torch.randn(4, 5, generator=g),)))


def test_the_best_peer_is_the_fastest_that_is_not_ours() -> None:
    rows = {MINE: time_of(1), f"{MINE} 2": time_of(2), "a": time_of(4), "b": time_of(3)}
    assert best_peer({**rows, "c": Failed("no")}) == "b 3.0 us"
    assert best_peer({MINE: time_of(1)}) == ""


def test_a_reading_is_our_time_with_its_peer(run: GoalRun) -> None:
    found = reading(run, {MINE: time_of(7), "torch": time_of(9)}, note="a note")
    assert (found.value, found.peer, found.note) == (7, "torch 9.0 us", "a note")


def test_rows_and_columns_count_with_the_slower(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes(_run: GoalRun, _shape: Any, _op: str, dim: int, _call: Any) -> dict[str, Outcome]:
        return {MINE: time_of(200 if dim == 0 else 100), "torch": time_of(300)}

    monkeypatch.setattr(cuda_reduce, "reduce_outcomes", outcomes)
    found = cuda_reduce.rows(run)
    assert found.value == 200
    assert "rows 100.0 us" in found.note
    assert "columns 200.0 us" in found.note


def test_what_stands_beside_a_goal_says_what_is_wrong_and_fails_nothing() -> None:
    def broken() -> dict[str, Outcome]:
        raise GoalError("never ran")

    def late() -> dict[str, Outcome]:
        raise OutOfTimeError

    rows = {
        "fine": lambda: {MINE: bounded(time_of(0.5), 0.7), "torch": Failed("not ours")},
        "slow": lambda: {f"{MINE} a": bounded(time_of(0.9), 0.7), f"{MINE} b": time_of(99)},
        "broken": broken,
        "absent": lambda: {MINE: Absent("no GPU")},
    }
    assert rows_beside(rows) == (
        "4 rows beside; slow a: 0.90 us, bound 0.7 us: missed; broken: GoalError: never ran; "
        "absent: no GPU"
    )
    with pytest.raises(OutOfTimeError):
        rows_beside({"late": late})


def test_a_row_with_a_bound_says_whether_it_is_kept() -> None:
    for row, limit_us, value_us, ok in (
        (bounded(time_of(0.7), 0.7), 0.7, 0.7, True),
        (bounded(time_of(1.0), 1.5e6, 2e6), 1.5e6, 2e6, False),
    ):
        data = outcome_to_json(row)
        assert data["bound"] == {"limit_us": limit_us, "value_us": value_us}
        assert data["ok"] is ok
        assert outcome_from_json(data) == row
    assert not {"bound", "ok"} & outcome_to_json(time_of(1)).keys()
    with pytest.raises(ConfigError, match="no measurement"):
        outcome_from_json({**data, "bound": {"limit_us": 1.0}})


def test_a_bound_is_kept_with_its_row_and_known_when_it_is_taken_over(run: GoalRun) -> None:
    def measure_row() -> dict[str, Outcome]:
        run.ran_elsewhere("reduce", 1)
        return {MINE: bounded(time_of(0.5), 0.7), "torch": time_of(1)}

    run.row("a", measure_row)
    assert run._store._rows["a"]["outcomes"][MINE]["ok"] is True
    run.bounds.clear()
    run.row("a", dict)
    assert run.bounds == {f"a: {MINE}": Bound(0.7, 0.5)}


def test_every_peer_of_the_table_has_a_time_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    status = dict.fromkeys(TABLE_PEERS, peers.Available("1"))
    monkeypatch.setattr(
        cuda_rows, "peer_status", lambda names: {name: status[name] for name in names}
    )
    monkeypatch.setattr(peers, "peer_status", lambda names: dict.fromkeys(names, Absent("no gcc")))
    rows = with_absent({MINE: time_of(1), "quack": time_of(2)}, {"cub": "left out", "x": "why"})
    assert {name: row.reason for name, row in rows.items() if isinstance(row, Absent)} == {
        "torch.compile": "no gcc",
        "flashinfer": "it has no operation like this one",
        "cub": "left out",
        "x": "why",
    }
    assert timed({**rows, "quack": Absent("?")}) == {MINE}


def test_a_rows_own_reason_goes_before_what_is_missing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_peers(monkeypatch)
    budget = peers.CompileBudget(0.0)
    monkeypatch.setattr(cuda_rows, "COMPILE_BUDGET", budget)
    own = {name: f"no {name}" for name in ("torch.compile", "flashinfer")}
    rows = with_absent({MINE: time_of(1)}, own)
    reasons = {name: row.reason for name, row in rows.items() if isinstance(row, Absent)}
    assert reasons == {**own, "quack": "left out", "cub": "left out"}


def test_asking_for_peers_changes_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.setattr(peers.torch.cuda, "is_available", lambda: True)
    peers._PROBES["flashinfer"]()
    assert "FLASHINFER_DISABLE_JIT" not in os.environ


def test_who_times_peers_forbids_them_to_build_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_versions", dict)
    monkeypatch.setattr(environment, "git_commit", lambda: "abc")
    for given, kept in (("0", "0"), (None, "1")):
        monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
        assert environment.collect_environment("x").variables == {}
        if given is not None:
            monkeypatch.setenv("FLASHINFER_DISABLE_JIT", given)
        environment.set_peer_variables()
        assert environment.collect_environment("x").variables == {"FLASHINFER_DISABLE_JIT": kept}


def test_torch_compile_may_not_eat_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peers, "peer_status", lambda names: dict.fromkeys(names, peers.Available("2"))
    )
    monkeypatch.setattr(peers, "fresh_compile", lambda function: function)
    ticks = iter([0.0, 4.0, 10.0, 17.0])
    budget = peers.CompileBudget(10.0, lambda: next(ticks))
    monkeypatch.setattr(peers, "COMPILE_BUDGET", budget)
    (first,) = peers.compiled_peers(lambda x: x + 1, lambda results, buffers: None)
    buffers = Buffers((torch.ones(1),))
    assert [first.run(buffers).item() for _ in range(3)] == [2.0] * 3
    assert budget.spent_s == 4.0
    (second,) = peers.compiled_peers(lambda x: x + 2, lambda results, buffers: None)
    assert second.run(buffers).item() == 3.0
    assert peers.compiled_peers(lambda x: x, lambda results, buffers: None) == []
    state = budget.status()
    assert isinstance(state, Absent)
    assert state.reason.startswith("left out: compiling had taken 11 s")


def test_the_copy_counts_with_its_default_and_names_the_others(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {MINE: time_of(100), f"{MINE} 2": time_of(90), "torch.mul": time_of(99)}
    monkeypatch.setattr(cuda_memory, "copy_outcomes", lambda run, size: rows)
    found: Reading = cuda_memory.copy_over_torch_mul(run)
    assert found.value == pytest.approx(0.99)
    assert found.note == "us: fusedops 100, fusedops 2 90, torch.mul 99"


def test_a_cold_compile_has_the_bound_of_its_slowest_kernel(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [CudaProgram("norm.cu", (name,)) for name in ("a", "b")]
    programs.append(CudaProgram("copy.cu", ("broken",)))
    folders = set()

    def compile_one(program: CudaProgram, arch: str, folder: Path) -> dict[str, str]:
        folders.add(folder.parent)
        if program.kernels == ("broken",):
            raise BuildError("no such kernel")
        (folder / "kernel.cubin").write_bytes(b"cubin")
        clock.now += 2.0 if program.kernels == ("b",) else 0.25
        return {}

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(cuda_compile, "compile_program", compile_one)
    monkeypatch.setattr(cuda_compile.time, "perf_counter", lambda: clock.now)
    gpu = Gpu("sm_90a", 132)
    rows = run.row("cold", lambda: cuda_compile.cold_outcomes(run, gpu, programs))
    norm, broken = rows[f"{MINE} norm.cu"], rows[f"{MINE} copy.cu"]
    assert isinstance(norm, Measurement)
    assert norm.samples == (0.25e6, 2e6)
    assert norm.notes == ("slowest b: 2.00 s",)
    assert norm.bound == Bound(1.5e6, 2e6)
    assert isinstance(broken, Failed)
    assert "no such kernel" in broken.reason
    assert not any(folder.exists() for folder in folders)


def test_every_file_of_csrc_has_a_program_to_compile() -> None:
    files = {program.file for program in cuda_compile.cold_programs(Gpu("sm_90a", 132))}
    assert files == {path.name for path in csrc_dir().glob("*.cu")} - {"probe.cu"}


def test_the_hosts_time_of_a_call_is_the_slower_operators(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_host, "_ROUNDS", 2)
    monkeypatch.setattr(cuda_host, "_CALLS", 3)
    monkeypatch.setattr(cuda_host, "_gpu", lambda run: Gpu("sm_90a", 132))

    def cold(run: GoalRun, gpu: Gpu) -> dict[str, Outcome]:
        run.ran_elsewhere("compile", 1)
        return {f"{MINE} norm.cu": bounded(time_of(2e6), 1.5e6)}

    monkeypatch.setattr(cuda_host, "cold_outcomes", cold)
    found = cuda_host.host_us(run)
    assert found.value > 0
    assert found.note.startswith("transpose ")
    assert found.peer.startswith("torch")
    assert {(MINE, "reduce")} <= {(MINE, text.split()[0]) for text in found.note.split(", ")}
    assert found.note.endswith(
        "1 rows beside; cold compile norm.cu: 2000000.00 us, bound 1500000 us: missed"
    )
