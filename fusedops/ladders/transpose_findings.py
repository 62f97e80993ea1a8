"""What the first transposes say together: the pattern of sectors and bank conflicts."""

from __future__ import annotations

from collections.abc import Mapping

from fusedops.bench.measurement import Measurement
from fusedops.ladders.counters import Counters
from fusedops.ladders.model import Finding
from fusedops.ladders.report import ResultRow

__all__ = ["findings"]

STEPS = ("transpose.v1", "transpose.v2", "transpose.v3", "transpose.v4")
_NOTED = 13
"""Times that V1 takes of V4 in course notes on another GPU of this class; to compare with."""

_NONE = "-"


def _number(value: float | None, form: str = ",.0f") -> str:
    return _NONE if value is None else f"{value:{form}}"


def findings(rows: Mapping[str, Mapping[str, ResultRow]]) -> tuple[Finding, ...]:
    """Times and counters of the first four steps on each problem, and what they show."""
    return tuple(_pattern(problem, each) for problem, each in rows.items())


def _pattern(problem: str, rows: Mapping[str, ResultRow]) -> Finding:
    us: dict[str, float] = {}
    counted: dict[str, Counters] = {}
    for step in STEPS:
        row = rows.get(step)
        if row is not None and isinstance(row.outcome, Measurement):
            us[step] = row.outcome.median_us
            if row.counters is not None:
                counted[step] = row.counters
    none = Counters("")
    last = us.get(STEPS[-1])
    lines = tuple(
        (
            step,
            _number(us.get(step), ".2f"),
            _number(None if last is None or step not in us else us[step] / last, ".1f"),
            _number(counted.get(step, none).excess_sectors),
            _number(counted.get(step, none).excess_share, ".0%"),
            _number(counted.get(step, none).load_ways, ".1f"),
            _number(counted.get(step, none).bank_conflicts),
        )
        for step in STEPS
    )
    return Finding(
        f"V1 to V4 by counters, {problem}",
        " ".join([_times(us), *_counters(counted)]),
        (
            *("step", "us", "times V4", "excess sectors", "of all sectors"),
            *("turns a shared load", "bank conflicts"),
        ),
        lines,
    )


def _times(us: Mapping[str, float]) -> str:
    first, last = us.get(STEPS[0]), us.get(STEPS[-1])
    if first is None or last is None:
        return "V1 and V4 have no times yet."
    return f"V1 takes {first / last:.1f} times V4; course notes on another GPU say {_NOTED}."


def _counters(counted: Mapping[str, Counters]) -> list[str]:
    excess = [each.excess_sectors for step in STEPS if (each := counted.get(step)) is not None]
    if len(excess) < len(STEPS) or None in excess:
        return ["Counters were not read for all four."]
    first, second, third, _ = (value or 0.0 for value in excess)
    text = [f"Excess sectors go from {first:,.0f} over {second:,.0f} to {third:,.0f}."]
    before, after = (counted[step].load_ways for step in STEPS[2:])
    if before is not None and after is not None:
        text.append(f"A load from shared memory takes {before:.1f} turns in V3, {after:.1f} in V4.")
    return text
