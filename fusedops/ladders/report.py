"""Results of ladders as data: rows with times, counters and walls, read back from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusedops.bench.environment import Environment, repository_root
from fusedops.bench.files import read_json
from fusedops.bench.measurement import Measurement, Outcome, outcome_from_json
from fusedops.bench.roofline import floor
from fusedops.errors import ConfigError, LoadError
from fusedops.ladders.ceilings import LadderCeilings
from fusedops.ladders.counters import Counters
from fusedops.ladders.figures import FigureResult
from fusedops.ladders.model import Problem
from fusedops.ladders.walls import Wall, wall_of

__all__ = [
    "SCHEMA",
    "Report",
    "ResultRow",
    "ceilings_to_json",
    "classified",
    "committed_reports",
    "cores_of",
    "derived",
    "read_report",
]

SCHEMA = 2


@dataclass(frozen=True)
class ResultRow:
    """A step on a problem, as recorded.

    Attributes:
        outcome: its time, or why there is none.
        counters: of its longest kernel, or None.
        counters_absent: why there are none; empty where there are, or where no time is.
        bytes_per_s: the problem's least bytes over the time.
        operations_per_s: the problem's operations over the time.
        flops_per_s: the problem's floating-point operations over the time; None where bytes count.
        of_ceiling: the floor over the time; 1 is the ceiling, see ``LadderCeilings``.
        intensity: operations a byte: of memory where that was counted, else of the least traffic.
        wall: by rule; empty where no rule can tell.
        readings: what else the step was asked for.
    """

    outcome: Outcome
    counters: Counters | None = None
    counters_absent: str = ""
    bytes_per_s: float | None = None
    operations_per_s: float | None = None
    flops_per_s: float | None = None
    of_ceiling: float | None = None
    intensity: float | None = None
    wall: str = ""
    readings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All results of a GPU.

    Attributes:
        environment: where they come from.
        ceilings: of that GPU.
        ladders: ladder -> problem -> step's id -> row.
        figures: figure's id -> its rows.
    """

    environment: Environment
    ceilings: LadderCeilings
    ladders: Mapping[str, Mapping[str, Mapping[str, ResultRow]]]
    figures: Mapping[str, FigureResult] = field(default_factory=dict)


def ceilings_to_json(limits: LadderCeilings) -> dict[str, Any]:
    """A JSON object with the fields."""
    return {**asdict(limits), "details": list(limits.details)}


def derived(
    problem: Problem, outcome: Outcome, counters: Counters | None, limits: LadderCeilings
) -> dict[str, Any]:
    """The fields of a row that follow from its time and counters; none without a time."""
    if not isinstance(outcome, Measurement):
        return {}
    traffic = problem.traffic
    moved = traffic.read_bytes + traffic.write_bytes
    counted = counters.dram_bytes if counters is not None else None
    held = limits.under(problem.pipe)
    wall = wall_of(outcome, traffic, problem.operations, held, counters, problem.pipe)
    flops = {"flops_per_s": traffic.flops / outcome.median_us * 1e6} if traffic.flops else {}
    return {
        **flops,
        "bytes_per_s": moved / outcome.median_us * 1e6,
        "operations_per_s": problem.operations / outcome.median_us * 1e6,
        "of_ceiling": floor(traffic, held).fraction(outcome.median_us),
        "intensity": problem.operations / (counted or moved),
        "wall": wall.value if wall is not None else "",
    }


def classified(problem: Problem, limits: LadderCeilings) -> str:
    """What a problem costs at least, by bytes and operations, and which roof that is under."""
    traffic = problem.traffic
    moved = traffic.read_bytes + traffic.write_bytes
    bound = floor(traffic, limits.under(problem.pipe))
    text = (
        f"At least {traffic.read_bytes / 1e6:,.1f} MB read and {traffic.write_bytes / 1e6:,.1f} MB "
        f"written for {problem.operations:.4g} {problem.unit}: {problem.operations / moved:.4g} "
        f"{problem.unit} a byte"
    )
    if traffic.flops:
        ridge = limits.flops_per_s(problem.pipe) * bound.memory_us / moved / 1e6
        side = "above" if traffic.flops / moved >= ridge else "below"
        text += f", {side} the ridge point of {ridge:.4g}"
    roof = "memory" if bound.memory_us >= bound.compute_us else f"the {cores_of(problem)}"
    return f"{text}. The floor is {bound.us:.1f} us, by {roof}."


def cores_of(problem: Problem) -> str:
    """What computes a problem's FLOPs."""
    return "CUDA cores" if problem.pipe is Wall.FMA_PIPE else "tensor cores"


def _row(data: dict[str, Any]) -> ResultRow:
    names = ("bytes_per_s", "operations_per_s", "flops_per_s", "of_ceiling", "intensity")
    values = {name: data[name] for name in (*names, "wall", "readings") if name in data}
    return ResultRow(
        outcome_from_json(data["outcome"]),
        Counters.from_json(data["counters"]) if "counters" in data else None,
        data.get("counters_absent", ""),
        **values,
    )


def read_report(path: Path) -> Report:
    """The results in a file.

    Raises:
        LoadError: the file is missing, damaged, incomplete or of another schema.
    """
    data = read_json(path)
    if not data:
        raise LoadError(f"{path}: no results there; run `fusedops ladder` on a GPU.")
    if data.get("schema") != SCHEMA:
        raise LoadError(
            f"{path}: schema {data.get('schema')!r}; this version reads {SCHEMA}. Remove the file "
            "and run again."
        )
    try:
        limits = {**data["ceilings"], "details": tuple(data["ceilings"]["details"])}
        return Report(
            Environment(**data["environment"]),
            LadderCeilings(**limits),
            {
                ladder: {
                    problem: {step: _row(row) for step, row in rows.items()}
                    for problem, rows in problems.items()
                }
                for ladder, problems in data["ladders"].items()
            },
            {
                figure: FigureResult.from_json(entry)
                for figure, entry in data.get("figures", {}).items()
            },
        )
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise LoadError(f"{path}: incomplete results: {error!r}.") from error


def committed_reports(root: Path | None = None) -> list[Path]:
    """Files of results that come with the checkout, one a GPU; a wheel has none."""
    root = root or repository_root()
    return [] if root is None else sorted((root / "reports").glob("*/ladders.json"))
