"""Runs ladders: each step is checked, timed and recorded before the next one, then profiled.

``ladders.json`` in the folder of results is written after every step, so that a run that is cut off
goes on where it stopped. What was recorded on the same GPU for the same sources is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from fusedops.bench.contenders import measure
from fusedops.bench.environment import Environment
from fusedops.bench.files import read_json, update_json
from fusedops.bench.measurement import (
    Absent,
    Failed,
    Measurement,
    Outcome,
    outcome_from_json,
    outcome_to_json,
)
from fusedops.bench.peers import peer_status
from fusedops.bench.roofline import Ceilings, row_ceilings
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError
from fusedops.ladders.catalog import load_ladder
from fusedops.ladders.counters import Counters, read_counters
from fusedops.ladders.figure_run import FigureTask, run_figures
from fusedops.ladders.figures import Figure
from fusedops.ladders.model import Ladder, Problem, Step
from fusedops.ladders.report import SCHEMA, Report, ceilings_to_json, derived, read_report
from fusedops.providers.base import use_provider

__all__ = ["Runner", "Task", "select_steps", "tasks_of"]

RESULTS = "ladders.json"
NOT_READ = "not read: --no-counters"

CounterReader = Callable[[str, str, Sequence[str]], dict[str, Counters] | str]


def select_steps(ladders: Sequence[Ladder], pattern: str | None) -> dict[str, list[Step | Figure]]:
    """Ladder -> its steps and figures whose id matches the pattern (shell style); all without one.

    Raises:
        ConfigError: no step matches.
    """
    found = {
        ladder.name: [
            step for step in ladder.rungs if pattern is None or fnmatchcase(step.id, pattern)
        ]
        for ladder in ladders
    }
    if not any(found.values()):
        ids = ", ".join(step.id for ladder in ladders for step in ladder.rungs)
        raise ConfigError(f"--steps {pattern}: no step's id matches; accepted are {ids}.")
    return found


@dataclass(frozen=True)
class Task:
    """One row of the report: a step on a problem."""

    ladder: Ladder
    problem: Problem
    step: Step


def tasks_of(names: Sequence[str], pattern: str | None = None) -> list[Task | FigureTask]:
    """The rows and figures of ladders, in the order of the report.

    Raises:
        ConfigError: as ``load_ladder`` and ``select_steps``.
    """
    ladders = [load_ladder(name) for name in names]
    chosen = select_steps(ladders, pattern)
    tasks: list[Task | FigureTask] = []
    for ladder in ladders:
        rungs = chosen[ladder.name]
        tasks += [
            Task(ladder, problem, step)
            for problem in ladder.problems(ladder.size)
            for step in rungs
            if isinstance(step, Step) and step.solves(problem)
        ]
        tasks += [FigureTask(ladder.name, each) for each in rungs if isinstance(each, Figure)]
    return tasks


def _unavailable(step: Step, device: torch.device) -> str | None:
    """Why a step cannot run here."""
    if step.recorded:
        return step.recorded
    if step.peer:
        status = peer_status([step.peer])[step.peer]
        if isinstance(status, Absent):
            return status.reason
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < step.capability:
            least, here = (".".join(map(str, pair)) for pair in (step.capability, found))
            return f"needs compute capability {least}; this GPU has {here}"
    return None


def time_step(task: Task, device: torch.device, protocol: Protocol) -> Outcome:
    """Check a step and time it; a wrong result is ``Failed`` and gets no time."""
    reason = _unavailable(task.step, device)
    if reason is not None:
        return Absent(reason)
    step = task.step
    with use_provider(step.provider, strict=True) as usage:
        try:
            outcome = measure(
                [task.step.contender(task.problem)],
                task.problem.make,
                device=device,
                protocol=protocol,
            )[task.step.id]
        except (RuntimeError, ValueError) as error:
            return Failed(f"{type(error).__name__}: {error}")
    missed = step.operation and not usage.count(step.operation, step.provider)
    if missed and isinstance(outcome, Measurement):
        return Failed(f"{step.operation} was not served by the provider {step.provider}")
    return outcome


def _readings(task: Task, outcome: Outcome, device: torch.device) -> dict[str, Any]:
    """What a step is asked for beside its time, as a field of its row."""
    if task.step.readings is None or not isinstance(outcome, Measurement):
        return {}
    return {"readings": task.step.readings(device)}


@dataclass(frozen=True)
class Runner:
    """Where ladders run and where their rows go.

    Attributes:
        folder: of the results.
        environment: written into them.
        device: a CUDA device.
        protocol: the timer's settings.
        force: run again what is recorded for today's sources.
        read: reads counters; None leaves them out.
        limits: ceilings; None takes those of the device.
    """

    folder: Path
    environment: Environment
    device: torch.device
    protocol: Protocol = field(default_factory=Protocol)
    force: bool = False
    read: CounterReader | None = read_counters
    limits: Ceilings | None = None

    @property
    def path(self) -> Path:
        """The file of results."""
        return self.folder / RESULTS

    def run(
        self, tasks: Sequence[Task | FigureTask], advance: Callable[[str, int], None]
    ) -> Report:
        """Time every row, then read counters for each problem, and return all that is recorded.

        Args:
            tasks: from ``tasks_of``.
            advance: called with what is under way, and how many rows or figures were done since.

        Raises:
            LoadError: the file of results is damaged or of another schema.
        """
        limits = self.limits or row_ceilings(self.device)
        self._begin(limits)
        rows = [task for task in tasks if isinstance(task, Task)]
        self._run_rows(rows, limits, advance)
        run_figures(
            [task for task in tasks if isinstance(task, FigureTask)],
            self.path,
            self.device,
            limits,
            self.environment.versions,
            force=self.force,
            read=self.read,
            not_read=NOT_READ,
            advance=advance,
        )
        return read_report(self.path)

    def _run_rows(
        self, tasks: Sequence[Task], limits: Ceilings, advance: Callable[[str, int], None]
    ) -> None:
        for task in tasks:
            advance(task.step.id, 0)
            if not self._is_recorded(task):
                outcome = time_step(task, self.device, self.protocol)
                values = _readings(task, outcome, self.device)
                self._record(task, {"outcome": outcome_to_json(outcome), **values})
            advance(task.step.id, 1)
        self._profile(tasks, advance)
        self._derive(tasks, limits)

    def _begin(self, limits: Ceilings) -> None:
        """Start a file, or go on with one of the same GPU."""
        if self.path.is_file():
            read_report(self.path)  # refuses what this version does not understand

        def change(data: dict[str, Any]) -> None:
            if data and data["environment"]["gpu"] != self.environment.gpu:
                data.clear()
            data["schema"] = SCHEMA
            data["environment"] = self.environment.to_json()
            data["ceilings"] = ceilings_to_json(limits)
            data.setdefault("ladders", {})

        update_json(self.path, change)

    def _sources(self, step: Step) -> str:
        return step.sources(self.environment.versions)

    def _row(self, task: Task) -> dict[str, Any]:
        data = read_json(self.path)["ladders"].get(task.ladder.name, {})
        rows: dict[str, Any] = data.get(task.problem.name, {})
        row: dict[str, Any] = rows.get(task.step.id, {})
        return row

    def _is_recorded(self, task: Task) -> bool:
        row = self._row(task)
        settled = "median_us" in row.get("outcome", {})
        return settled and row.get("sources") == self._sources(task.step) and not self.force

    def _record(self, task: Task, values: dict[str, Any]) -> None:
        """Replace a row; what was read of other sources is dropped."""

        def change(data: dict[str, Any]) -> None:
            rows = data["ladders"].setdefault(task.ladder.name, {})
            rows = rows.setdefault(task.problem.name, {})
            rows[task.step.id] = {**values, "sources": self._sources(task.step)}

        update_json(self.path, change)

    def _profile(self, tasks: Sequence[Task], advance: Callable[[str, int], None]) -> None:
        """Read the counters that timed rows lack, a problem at a time."""
        problems: dict[tuple[str, str], list[Task]] = {}
        for task in tasks:
            row = self._row(task)
            if "median_us" in row["outcome"] and "counters" not in row:
                problems.setdefault((task.ladder.name, task.problem.name), []).append(task)
        refused = NOT_READ if self.read is None else ""
        for (ladder, problem), rows in problems.items():
            found: dict[str, Counters] | str = refused
            if self.read is not None and not refused:
                advance(f"counters of {ladder}", 0)
                found = self.read(ladder, problem, [task.step.id for task in rows])
            if isinstance(found, str):
                refused = found  # what keeps ncu from one problem keeps it from all
            for task in rows:
                self._record(task, {**self._row(task), **_read_of(found, task.step.id)})

    def _derive(self, tasks: Sequence[Task], limits: Ceilings) -> None:
        """Add to each row what follows from it: rate, fraction of the ceiling, wall."""
        for task in tasks:
            row = self._row(task)
            outcome = outcome_from_json(row["outcome"])
            counters = Counters.from_json(row["counters"]) if "counters" in row else None
            self._record(task, {**row, **derived(task.problem, outcome, counters, limits)})


def _read_of(found: dict[str, Counters] | str, step: str) -> dict[str, Any]:
    """The fields of a row that tell its counters, or why it has none."""
    if isinstance(found, str):
        return {"counters_absent": found}
    if step not in found:
        return {"counters_absent": "ncu saw no kernel of this step"}
    return {"counters": found[step].to_json()}
