"""The cells of a ladder's table, the same for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping

from fusedops.bench.measurement import Absent, Failed
from fusedops.ladders.counters import Counters
from fusedops.ladders.model import Ladder, Step
from fusedops.ladders.report import ResultRow

__all__ = ["HEADINGS", "cells", "counters_notes", "table_rows"]

HEADINGS = (
    "step",
    "us",
    "spread",
    "rate",
    "of ceiling",
    "excess sectors",
    "bank conflicts",
    "global atomics",
    "active threads",
    "tensor pipe",
    "occupancy",
    "registers",
    "wall",
    "lines",
)

NOT_RUN = "not run"
_NONE = "-"


def _count(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _rate(row: ResultRow) -> str:
    if row.flops_per_s is not None:
        return f"{row.flops_per_s / 1e12:.1f} TFLOP/s"
    if row.bytes_per_s is None:
        return _NONE
    if row.bytes_per_s < 1e11:
        return f"{row.bytes_per_s / 1e9:.3g} GB/s"
    return f"{row.bytes_per_s / 1e12:.2f} TB/s"


def _counter_cells(counters: Counters | None) -> tuple[str, ...]:
    if counters is None:
        return (_NONE,) * 7
    excess = _count(counters.excess_sectors)
    if counters.excess_share:
        excess = f"{excess} ({counters.excess_share:.0%})"
    conflicts = _count(counters.bank_conflicts)
    if counters.bank_conflicts and counters.load_ways is not None:
        conflicts = f"{conflicts} (loads {counters.load_ways:.1f}-way)"
    active = counters.active_threads
    percents = [
        None if value is None else value / 100
        for value in (counters.tensor_pipe_pct, counters.occupancy_pct)
    ]
    return (
        excess,
        conflicts,
        _count(counters.global_atomics),
        _NONE if active is None else f"{active:.1f} of 32",
        *map(_percent, percents),
        _count(counters.registers),
    )


def cells(step: Step, row: ResultRow | None) -> tuple[str, ...]:
    """A step's cells, one for each of ``HEADINGS``."""
    lines = str(step.lesson.lines) if step.lesson.lines else _NONE
    if row is None or isinstance(row.outcome, Failed | Absent):
        if row is None:
            state = NOT_RUN
        elif isinstance(row.outcome, Failed):
            state = f"failed: {row.outcome.reason}"
        elif isinstance(row.outcome, Absent):
            state = f"absent: {row.outcome.reason}"
        return (step.id, state, *([""] * (len(HEADINGS) - 3)), lines)
    return (
        step.id,
        _us(row.outcome.median_us),
        f"{row.outcome.spread:.1%}",
        _rate(row),
        _percent(row.of_ceiling),
        *_counter_cells(row.counters),
        row.wall or "not known without counters",
        lines,
    )


def table_rows(
    ladder: Ladder, problem: str, rows: Mapping[str, ResultRow]
) -> list[tuple[str, ...]]:
    """All steps of a ladder that solve one problem, run or not."""
    return [cells(step, rows.get(step.id)) for step in ladder.steps_on(problem)]


def counters_notes(rows: Mapping[str, ResultRow]) -> list[str]:
    """Why counters are absent, each reason once, with the steps that it holds for."""
    reasons: dict[str, list[str]] = {}
    for step, row in rows.items():
        if row.counters_absent:
            reasons.setdefault(row.counters_absent, []).append(step)
    return [
        f"No counters for {'any step' if len(steps) == len(rows) else ', '.join(steps)}: {reason}."
        for reason, steps in reasons.items()
    ]
