"""Runs measuring functions of goals, records what they read, and prints the table.

``reports/<gpu>/goals.json`` holds one entry a goal, ``goals_rows.json`` beside it the raw rows.
They are written after every goal and row, so a run that is cut off goes on where it stopped.
"""

from __future__ import annotations

import datetime
import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedops.bench.environment import Environment
from fusedops.bench.files import read_json, update_json
from fusedops.bench.goal_run import GoalError, GoalRun, OutOfTimeError, Reading, RowStore
from fusedops.bench.goal_spec import Goal
from fusedops.bench.goals import Registered
from fusedops.bench.measurement import Bound
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError
from fusedops.providers.base import use_provider

__all__ = [
    "NOT_BUILT",
    "Harness",
    "add_entries",
    "entries_of",
    "select",
    "table",
]

SCHEMA = 1
NOT_BUILT = "not built"
_SETTLED = ("ok", "missed")
"""States that are not measured again on the same sources; a failed goal is."""


def select(goals: Mapping[str, Goal], patterns: Sequence[str]) -> list[Goal]:
    """Goals whose id matches one of the patterns (shell style); all of them without patterns.

    Raises:
        ConfigError: a pattern matches no id.
    """
    for pattern in patterns:
        if not fnmatch.filter(goals, pattern):
            raise ConfigError(f"no goal's id matches {pattern!r}; `--list` shows the ids.")
    return [
        goal
        for goal in goals.values()
        if not patterns or any(fnmatch.fnmatchcase(goal.id, pattern) for pattern in patterns)
    ]


@dataclass(frozen=True)
class Harness:
    """Where goals are measured and recorded.

    Attributes:
        folder: the GPU's folder of reports.
        environment: written into each entry.
        registry: id -> measuring function.
        device: where to measure.
        protocol: the timer's settings; each row is capped at its ``cap_s``.
        deadline: value of ``clock`` after which no row is begun, or None.
        force: measure again what is recorded for today's sources.
        clock: monotonic seconds.
        now: the time that goes into entries.
    """

    folder: Path
    environment: Environment
    registry: Mapping[str, Registered]
    device: torch.device | str = "cuda"
    protocol: Protocol = field(default_factory=Protocol)
    deadline: float | None = None
    force: bool = False
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)

    @property
    def goals_path(self) -> Path:
        """One entry a goal."""
        return self.folder / "goals.json"

    @property
    def rows_path(self) -> Path:
        """The raw rows."""
        return self.folder / "goals_rows.json"

    def recorded(self) -> dict[str, Any]:
        """Id -> entry, as recorded.

        Raises:
            ConfigError: the file is of another schema.
        """
        return entries_of(self.goals_path)

    def known(self, goal: Goal) -> dict[str, Any]:
        """The goal's recorded entry; without one, its status is ``not built`` or ``not run``."""
        status = "not run" if goal.id in self.registry else NOT_BUILT
        return dict(self.recorded().get(goal.id, {"status": status}))

    def run(self, goal: Goal) -> dict[str, Any]:
        """Measure one goal (or take over what is recorded) and return its entry.

        The entry's ``status`` is ``ok``, ``missed``, ``failed``, ``not built`` or ``not run`` (the
        time budget was spent); the last two are not recorded.
        """
        registered = self.registry.get(goal.id)
        if registered is None:
            return {"status": NOT_BUILT}
        sources = registered.sources()
        known = self.recorded().get(goal.id)
        current = known is not None and known["sources"] == sources
        if known is not None and current and known["status"] in _SETTLED and not self.force:
            return dict(known)
        try:
            status, reading, reason, bounds = self._measure(goal, registered, sources)
        except OutOfTimeError:
            return {"status": "not run", "reason": "the time budget was spent"}
        entry = self._entry(goal, registered, sources, status, reading, reason)
        if bounds:
            entry["bounds"] = {
                name: {**bound.to_json(), "ok": bound.ok} for name, bound in bounds.items()
            }

        add_entries(self.goals_path, "goals", {goal.id: entry})
        return entry

    def _measure(
        self, goal: Goal, registered: Registered, sources: str
    ) -> tuple[str, Reading | None, str, dict[str, Bound]]:
        with use_provider(registered.provider, strict=True) as usage:
            run = GoalRun(
                goal,
                provider=registered.provider,
                device=self.device,
                protocol=self.protocol,
                store=self._store(goal, sources),
                usage=usage,
                deadline=self.deadline,
                clock=self.clock,
            )
            try:
                reading = registered.function(run)
            except OutOfTimeError:
                raise
            except GoalError as error:
                return "failed", None, str(error), run.bounds
            except Exception as error:  # noqa: BLE001 - a goal that raises is a row of the table
                return "failed", None, f"{type(error).__name__}: {error}", run.bounds
        if run.rows == 0:
            return "failed", None, "its measuring function measured no row", run.bounds
        if not all(map(math.isfinite, (reading.value, reading.low, reading.high))):
            return "failed", None, f"the reading is not finite: {reading}", run.bounds
        status = "ok" if goal.met(reading.value) else "missed"
        return status, reading, reading.note, run.bounds

    def _store(self, goal: Goal, sources: str) -> RowStore:
        rows: dict[str, Any] = entries_of(self.rows_path, "rows").get(goal.id, {})

        def save() -> None:
            add_entries(self.rows_path, "rows", {goal.id: rows})

        return RowStore(rows, sources, save, force=self.force)

    def _entry(
        self,
        goal: Goal,
        registered: Registered,
        sources: str,
        status: str,
        reading: Reading | None,
        reason: str,
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "status": status,
            "ok": status == "ok",
            "unit": goal.unit,
            "value": None,
            "low": None,
            "high": None,
            "peer": "",
            "note": reason,
            "provider": registered.provider,
            "gpu": self.environment.gpu,
            "driver": self.environment.driver,
            "versions": self.environment.versions,
            "variables": self.environment.variables,
            "commit": self.environment.commit,
            "sources": sources,
            "date": self.now().isoformat(timespec="seconds"),
        }
        if reading is not None:
            entry |= {
                "value": round(reading.value, 6),
                "low": round(reading.low, 6),
                "high": round(reading.high, 6),
                "peer": reading.peer,
            }
        return entry


def entries_of(path: Path, key: str = "goals") -> dict[str, Any]:
    """The entries of a file of results; an absent file has none.

    Raises:
        ConfigError: the file is of another schema.
    """
    data = read_json(path)
    if data and data.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path}: schema {data.get('schema')!r}; this version reads {SCHEMA}. Remove the file "
            "and measure again."
        )
    entries: dict[str, Any] = data.get(key, {})
    return entries


def add_entries(path: Path, key: str, entries: Mapping[str, Any]) -> None:
    """Add entries to a file of results, replacing those of the same id."""

    def change(data: dict[str, Any]) -> None:
        data["schema"] = SCHEMA
        data.setdefault(key, {}).update(entries)

    update_json(path, change)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bound_line(name: str, bound: Mapping[str, Any]) -> tuple[str, ...]:
    limit, value = (f"{_number(bound[key])} us" for key in ("limit_us", "value_us"))
    return (f"  {name}", f"<= {limit}", "-", "-", value, "-", "ok" if bound["ok"] else "missed")


def table(lines: Iterable[tuple[Goal, Mapping[str, Any]]]) -> str:
    """The goals with what was read, as a text table: id, goal, floor, peer, measured, spread, ok.

    The peer is this run's where the measuring function gave one, else the known figure. Rows of a
    goal that have a bound follow it, each with its bound as its goal.
    """
    rows: list[tuple[str, ...]] = [
        ("id", "goal", "floor", "peer", "measured", "spread", "ok"),
    ]
    remarks = []
    for goal, entry in lines:
        value, status = entry.get("value"), str(entry["status"])
        spread = ""
        if value:
            spread = f"{(entry['high'] - entry['low']) / abs(value):.1%}"
        peer = entry.get("peer") or goal.best_peer or "-"
        rows.append(
            (
                goal.id,
                f"{goal.op} {_number(goal.goal)} {goal.unit}",
                _number(goal.floor),
                peer if len(peer) <= 40 else peer[:39] + "…",
                f"{_number(value)} {goal.unit}" if value is not None else "-",
                spread or "-",
                status,
            )
        )
        rows += [_bound_line(name, bound) for name, bound in entry.get("bounds", {}).items()]
        reason = entry.get("note") or entry.get("reason")
        if reason and status not in ("ok", NOT_BUILT):
            remarks.append(f"{goal.id}: {reason}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*text, *remarks])
