"""The measuring functions of the hand-written kernels, small and on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.bench import Buffers, Protocol
from fusedops.bench.goal_run import GoalError, GoalRun, Reading, RowStore
from fusedops.bench.goal_spec import load_goals
from fusedops.bench.goals import cuda_host, cuda_memory, cuda_reduce, load_all
from fusedops.bench.goals.cuda_rows import MINE, best_peer, contenders, reading
from fusedops.bench.measurement import Failed, Measurement, Outcome, summarize
from fusedops.ops.transpose import transpose
from fusedops.providers.base import use_provider

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
IDS = (
    *(f"cuda.transpose.{name}" for name in cuda_memory.TRANSPOSES),
    *("cuda.copy_over_torch_mul", "cuda.argmax", "cuda.host_us"),
    *(f"cuda.reduce.{name}" for name in ("sum_2p28", "sum_2p16", "rows", "logsumexp")),
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalRun]:
    """A run on the CPU that pins the reference, without torch.compile."""
    monkeypatch.setattr(
        "fusedops.bench.goals.cuda_rows.peer_status", lambda names: dict.fromkeys(names)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with use_provider("reference") as usage:
        yield GoalRun(
            load_goals()["cuda.reduce.rows"],
            provider="reference",
            device="cpu",
            protocol=QUICK,
            store=RowStore({}, "sources", lambda: None),
            usage=usage,
        )
    torch.set_num_threads(threads)


def time_of(us: float) -> Measurement:
    return summarize([us], mode="fake", launches=1, hot=False)


def failures(rows: dict[str, Outcome]) -> dict[str, Outcome]:
    return {name: row for name, row in rows.items() if not isinstance(row, Measurement)}


@pytest.mark.parametrize("goal_id", IDS)
def test_each_goal_has_a_function_that_pins_the_kernels(goal_id: str) -> None:
    registered = load_all()[goal_id]
    assert registered.provider == "cuda"
    assert registered.sources()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_transpose_row_times_us_and_torch(run: GoalRun, dtype: torch.dtype) -> None:
    rows = cuda_memory.transpose_outcomes(run, 33, 65, dtype)
    assert set(rows) == {MINE, "torch"}
    assert not failures(rows)


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
    assert {MINE, "torch"} <= set(rows)
    assert not failures(rows)


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


def test_the_copy_counts_with_its_default_and_names_the_others(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {MINE: time_of(100), f"{MINE} 2": time_of(90), "torch.mul": time_of(99)}
    monkeypatch.setattr(cuda_memory, "copy_outcomes", lambda run, size: rows)
    found: Reading = cuda_memory.copy_over_torch_mul(run)
    assert found.value == pytest.approx(0.99)
    assert found.note == "us: fusedops 100, fusedops 2 90, torch.mul 99"


def test_the_hosts_time_of_a_call_is_the_slower_operators(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_host, "_ROUNDS", 2)
    monkeypatch.setattr(cuda_host, "_CALLS", 3)
    found = cuda_host.host_us(run)
    assert found.value > 0
    assert found.note.startswith("transpose ")
    assert found.peer.startswith("torch")
    assert {(MINE, "reduce")} <= {(MINE, text.split()[0]) for text in found.note.split(", ")}
