"""What the goals of the hand-written kernels share: contenders, and how a row is read.

A goal may keep rows that it does not count beside those that it does: other sizes, dtypes and
operations of the same kernels. They resume like any row, and none of them can fail the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, OutOfTimeError, Reading
from fusedops.bench.measurement import Absent, Bound, Failed, Measurement, Outcome
from fusedops.bench.peers import COMPILE_BUDGET, Check, compiled_peers, peer_status

__all__ = [
    "COVERS",
    "MINE",
    "TABLE_PEERS",
    "best_peer",
    "bounded",
    "contenders",
    "measured",
    "reading",
    "rows_beside",
    "with_absent",
]

MINE = "fusedops"

TABLE_PEERS = ("torch.compile", "flashinfer", "quack", "cub")
"""Peers that every table has beside torch, timed or with the reason why not."""

COVERS: tuple[str, ...] = ("csrc/include",)
"""What every figure of these kernels depends on, beside its own .cu file and what is imported."""


def contenders(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor], check: Check
) -> list[Contender]:
    """Our function of a row's one input, torch's, and torch's compiled where that works here."""

    def on_input(name: str, function: Callable[[Tensor], Tensor]) -> Contender:
        return Contender(name, lambda buffers: function(buffers.inputs[0]), check)

    return [on_input(MINE, ours), on_input("torch", torchs), *compiled_peers(torchs, check)]


def with_absent(
    outcomes: Mapping[str, Outcome], reasons: Mapping[str, str] | None = None
) -> dict[str, Outcome]:
    """A row with every peer of ``TABLE_PEERS``: what is not timed is there with its reason.

    Args:
        outcomes: what was measured.
        reasons: peer -> why it takes no part, wherever it is installed; without one it is said
            why the peer cannot run here, or that it has no such operation. Other names than those
            of ``TABLE_PEERS`` are added.
    """
    known = reasons or {}
    missing = [name for name in TABLE_PEERS if name not in outcomes]
    # The row's own reason goes first: it holds on any machine and at any time of a run.
    unknown = [name for name in missing if name not in known]
    status = peer_status(unknown)
    if "torch.compile" in unknown:
        status["torch.compile"] = COMPILE_BUDGET.status()
    absent: dict[str, Outcome] = {}
    for name in missing:
        state = status.get(name)
        reason = known.get(name, "it has no operation like this one")
        absent[name] = state if isinstance(state, Absent) else Absent(reason)
    others = [name for name in known if name not in outcomes and name not in TABLE_PEERS]
    return {**outcomes, **absent, **{name: Absent(known[name]) for name in others}}


def measured(
    run: GoalRun,
    key: str,
    found: Sequence[Contender],
    make_buffers: Callable[[torch.Generator], Buffers],
    *,
    hot: bool = False,
    reasons: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """``GoalRun.measure`` of a row that also says which peers are absent; see ``with_absent``."""

    def measure_row() -> dict[str, Outcome]:
        outcomes = measure(found, make_buffers, device=run.device, hot=hot, protocol=run.protocol)
        return with_absent(outcomes, reasons)

    return run.row(key, measure_row)


def bounded(row: Measurement, limit_us: float, value_us: float | None = None) -> Measurement:
    """A row that is held against a bound.

    Args:
        row: as measured.
        limit_us: what ``value_us`` (by default the median) may not exceed.
    """
    value_us = row.median_us if value_us is None else value_us
    return replace(row, bound=Bound(limit_us, value_us))


def _complaint(row: Outcome) -> str | None:
    """What is to be said about a row of ours that is not as it should be, or None."""
    if not isinstance(row, Measurement):
        return row.reason
    bound = row.bound
    if bound is None or bound.ok:
        return None
    return f"{bound.value_us:.2f} us, bound {bound.limit_us:.10g} us: missed"


def rows_beside(rows: Mapping[str, Callable[[], Mapping[str, Outcome]]]) -> str:
    """Rows that a goal keeps without counting them; what goes wrong ends its own row only.

    Args:
        rows: name -> measures (or takes over) one row.

    Returns:
        for the goal's note: how many rows there are, and which of our contenders failed or missed
        their bound.

    Raises:
        OutOfTimeError: the budget was spent.
    """
    complaints = []
    for name, measure_row in rows.items():
        try:
            outcomes = measure_row()
        except OutOfTimeError:
            raise
        except Exception as error:  # noqa: BLE001 - the goal's own rows are measured all the same
            outcomes = {MINE: Failed(f"{type(error).__name__}: {error}")}
        for contender, row in outcomes.items():
            complaint = _complaint(row) if contender.startswith(MINE) else None
            if complaint is not None:
                complaints.append(f"{name}{contender.removeprefix(MINE)}: {complaint}")
    return "; ".join([f"{len(rows)} rows beside", *complaints])


def best_peer(rows: Mapping[str, Outcome]) -> str:
    """Name and time of the fastest contender but ours, as text."""
    timed = {
        name: row.median_us
        for name, row in rows.items()
        if not name.startswith(MINE) and isinstance(row, Measurement)
    }
    if not timed:
        return ""
    name = min(timed, key=lambda key: timed[key])
    return f"{name} {timed[name]:.1f} us"


def reading(run: GoalRun, rows: Mapping[str, Outcome], note: str = "") -> Reading:
    """Our time, with the best peer's."""
    return Reading.of(run.mine(rows, MINE), run.goal.unit, peer=best_peer(rows), note=note)
