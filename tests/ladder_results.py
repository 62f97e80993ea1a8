"""Results of ladders as a run would write them, with figures that no GPU gave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedops.bench.environment import Environment
from fusedops.bench.files import write_json
from fusedops.bench.measurement import Absent, Measurement, Outcome, outcome_to_json, summarize
from fusedops.ladders import built, load_ladder
from fusedops.ladders.ceilings import LadderCeilings
from fusedops.ladders.counters import Counters
from fusedops.ladders.report import SCHEMA, ceilings_to_json, derived

LIMITS = LadderCeilings(
    "test GPU", 4e12, 3.5e12, 700e12, 1.2, ("read: a test",), float32_flops_per_s=70e12
)
ENVIRONMENT = Environment(
    "test GPU", "1.0", "a CPU", "3.11", {"torch": "2.11"}, "abc", "fusedops ladder", "2026-01-02"
)


def timed(us: float) -> Measurement:
    """A measurement around ``us``."""
    return summarize([us, us * 1.01, us * 1.02], mode="cuda graph", launches=2, hot=False)


def write_results(
    path: Path,
    counters: Counters | None = None,
    other: Mapping[str, Outcome] | None = None,
    date: str = ENVIRONMENT.date,
) -> None:
    """Every step of every built ladder, each faster than the one before.

    Args:
        counters: of each row; None writes a reason.
        other: id -> what stands there instead of a time.
        date: when they were read.
    """
    ladders: dict[str, Any] = {}
    for name in built():
        ladder = load_ladder(name)
        for problem in ladder.problems(ladder.size):
            rows = ladders.setdefault(name, {}).setdefault(problem.name, {})
            for number, step in enumerate(ladder.steps_on(problem.name)):
                usual = Absent(step.recorded) if step.recorded else timed(4000.0 / (number + 1))
                outcome = (other or {}).get(step.id) or usual
                read = {"counters": counters.to_json()} if counters else {}
                rows[step.id] = {
                    "outcome": outcome_to_json(outcome),
                    **(read or {"counters_absent": "ncu is <not> here"}),
                    **derived(problem, outcome, counters, LIMITS),
                }
    data = {
        "schema": SCHEMA,
        "environment": {**ENVIRONMENT.to_json(), "date": date},
        "ceilings": ceilings_to_json(LIMITS),
        "ladders": ladders,
    }
    write_json(path, data)
