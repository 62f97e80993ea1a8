"""Goals: the figures that the project has set itself, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.bench.files import write_json
from fusedops.errors import LoadError

__all__ = ["GOALS_FILE", "Goal", "load_goals", "sync_goals"]

GOALS_FILE = Path(__file__).with_name("goals.json")

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda value, goal: value <= goal,
    ">=": lambda value, goal: value >= goal,
}


@dataclass(frozen=True)
class Goal:
    """One figure to reach.

    Attributes:
        id: dotted name, e.g. ``cuda.transpose.8192_fp32``; its first word is the part.
        what: what is measured.
        unit: of ``goal``, ``floor`` and the measured value.
        op: ``<=`` or ``>=``.
        goal: the figure.
        floor: what the hardware allows, or None.
        best_peer: what the best known peer reaches, as text, or None.
        part: the part of the work that it belongs to.
    """

    id: str
    what: str
    unit: str
    op: str
    goal: float
    floor: float | None
    best_peer: str | None
    part: str

    def met(self, value: float) -> bool:
        """Whether a measured value reaches the goal; NaN never does."""
        return math.isfinite(value) and _COMPARE[self.op](value, self.goal)


def _goal(data: Any, origin: Path) -> Goal:
    try:
        floor = data["floor"]
        goal = Goal(
            id=str(data["id"]),
            what=str(data["what"]),
            unit=str(data["unit"]),
            op=str(data["op"]),
            goal=float(data["goal"]),
            floor=None if floor is None else float(floor),
            best_peer=None if data["best_peer"] is None else str(data["best_peer"]),
            part=str(data["part"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{origin}: not a goal: {error!r} in {data!r}") from error
    if goal.op not in _COMPARE:
        raise LoadError(f"{origin}: {goal.id}: op {goal.op!r}; accepted are <= and >=.")
    return goal


def load_goals(path: Path = GOALS_FILE) -> dict[str, Goal]:
    """Every goal by id, in the file's order.

    Raises:
        LoadError: the file is missing or malformed, or an id stands in it twice.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["goals"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path}: not a readable list of goals: {error!r}") from error
    goals: dict[str, Goal] = {}
    for entry in entries:
        goal = _goal(entry, path)
        if goal.id in goals:
            raise LoadError(f"{path}: the id {goal.id} stands in it twice.")
        goals[goal.id] = goal
    return goals


def sync_goals(source: Path, target: Path = GOALS_FILE) -> tuple[int, list[str]]:
    """Replace the project's goals by those of another file: the GPU's name and the goals, no more.

    Returns:
        the number of goals, and the ids that changed, came or went.

    Raises:
        LoadError: ``source`` is malformed; the project's file is then untouched.
    """
    new = load_goals(source)
    old = load_goals(target) if target.exists() else {}
    data = json.loads(source.read_text(encoding="utf-8"))
    write_json(target, {"gpu": data.get("gpu", ""), "goals": data["goals"]})
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return len(new), changed
