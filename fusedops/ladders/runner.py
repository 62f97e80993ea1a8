"""Runs ladders: each step is checked, timed and recorded before the next; then all are profiled.

``ladders.json`` in the folder of results is written after every step, so that a run that is cut off
goes on where it stopped. What was recorded on the same GPU for the same sources is not run again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fusedops.bench.precompile import Target, layer_problem, precompile
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError, FusedOpsError
from fusedops.jit.dsl import missing_wheels
from fusedops.ladders.catalog import load_ladder
from fusedops.ladders.ceilings import LadderCeilings, device_ceilings
from fusedops.ladders.counters import Counters
from fusedops.ladders.figure_run import FIGURES, FigureTask, add_counters, run_figures, uncounted
from fusedops.ladders.figures import Figure
from fusedops.ladders.findings import record_findings
from fusedops.ladders.model import Ladder, Problem, Step
from fusedops.ladders.ncu import Asked, CounterReader, read_counters
from fusedops.ladders.report import SCHEMA, Report, ceilings_to_json, derived, read_report
from fusedops.providers.base import use_provider

__all__ = ["Runner", "Task", "left_of", "select_steps", "tasks_of"]

RESULTS = "ladders.json"
NOT_READ = "not read: --no-counters"
TIME_IS_UP = "not read: the time of --minutes was up"

LEAST_FOR_COUNTERS_S = 30.0
"""With less time left ncu is not started: it takes a good part of that until the first step."""


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


def left_of(tasks: Sequence[Task | FigureTask], report: Report) -> list[str]:
    """Ids of the steps and figures that a run did not come to, each once."""

    def is_there(task: Task | FigureTask) -> bool:
        if isinstance(task, FigureTask):
            return task.figure.id in report.figures
        rows = report.ladders.get(task.ladder.name, {}).get(task.problem.name, {})
        return task.step.id in rows

    missing = [task for task in tasks if not is_there(task)]
    ids = [task.figure.id if isinstance(task, FigureTask) else task.step.id for task in missing]
    return list(dict.fromkeys(ids))


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
    step = task.step
    reason = _unavailable(step, device)
    if reason is not None:
        return Absent(reason)
    try:
        with use_provider(step.provider, strict=True) as usage:
            outcome = measure(
                [step.contender(task.problem)],
                task.problem.make,
                device=device,
                protocol=protocol,
            )[step.id]
    except Exception as error:  # noqa: BLE001 - one step must not cost the others
        return _failed(error)
    missed = step.operation and not usage.count(step.operation, step.provider)
    if missed and isinstance(outcome, Measurement):
        return Failed(f"{step.operation} was not served by the provider {step.provider}")
    return outcome


def _failed(error: Exception) -> Failed:
    return Failed(f"{type(error).__name__}: {error}")


def _fields(task: Task, device: torch.device, protocol: Protocol) -> dict[str, Any]:
    """The fields of a step's row: its outcome, and what else it is asked for."""
    outcome, values = time_step(task, device, protocol), {}
    if task.step.readings is not None and isinstance(outcome, Measurement):
        try:
            values = {"readings": task.step.readings(device)}
        except Exception as error:  # noqa: BLE001 - as above
            outcome = _failed(error)
    return {"outcome": outcome_to_json(outcome), **values}


def _answers(device: torch.device) -> bool:
    """Whether the device still works: an illegal access in a kernel ends it for the process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


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
        deadline: as ``clock``; nothing is begun later. None for no limit.
        clock: seconds that only rise.
    """

    folder: Path
    environment: Environment
    device: torch.device
    protocol: Protocol = field(default_factory=Protocol)
    force: bool = False
    read: CounterReader | None = read_counters
    limits: LadderCeilings | None = None
    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def path(self) -> Path:
        """The file of results."""
        return self.folder / RESULTS

    def run(
        self, tasks: Sequence[Task | FigureTask], advance: Callable[[str, int], None]
    ) -> Report:
        """Time all rows and figures, then read counters, and return all that is recorded.

        A run ends early where the deadline has come, or where a step has broken the device.

        Args:
            tasks: from ``tasks_of``.
            advance: called with what is under way, and how many rows or figures were done since.

        Raises:
            LoadError: the file of results is damaged or of another schema.
        """
        limits = self.limits or device_ceilings(self.device)
        self._begin(limits)
        rows = [task for task in tasks if isinstance(task, Task)]
        figures = [task for task in tasks if isinstance(task, FigureTask)]
        self._compile_ahead(rows, figures, advance)
        done = list(self._timed(rows, advance))
        # Before the counters as well: a run that is cut off there has rates all the same.
        self._derive(done, limits)
        if len(done) == len(rows):
            run_figures(
                figures,
                self.path,
                self.device,
                limits,
                self.environment.versions,
                force=self.force,
                advance=advance,
                may_begin=lambda: not self._is_late() and _answers(self.device),
            )
        self._count(done, figures, advance)
        self._derive(done, limits)
        report = read_report(self.path)
        record_findings(self.path, [task.ladder for task in rows], report.ladders)
        return report

    def _compile_ahead(
        self,
        rows: Sequence[Task],
        figures: Sequence[FigureTask],
        advance: Callable[[str, int], None],
    ) -> None:
        """Compile the library's products in parallel; one by one they take seconds each."""
        there = read_json(self.path).get(FIGURES, {})
        needed = [task.step.layers for task in rows if not self._is_recorded(task)]
        needed += [task.figure.layers for task in figures if task.figure.id not in there]
        layers = dict.fromkeys(layer for each in needed for layer in each)
        if not layers or self.device.type != "cuda" or missing_wheels(prebuilt=False):
            return
        advance("compiling", 0)
        target = Target.of(self.device)
        # What fails here fails again in its step, whose row then says why.
        with contextlib.suppress(FusedOpsError):
            precompile([layer_problem(layer, target) for layer in layers], target.arch)

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.clock()

    def _is_late(self) -> bool:
        left = self._seconds_left()
        return left is not None and left <= 0

    def _timed(self, tasks: Sequence[Task], advance: Callable[[str, int], None]) -> Iterator[Task]:
        """Time what is not recorded, and yield each row that is there."""
        # What failed before comes last, so that a step that breaks the device costs no other twice.
        for task in sorted(tasks, key=lambda task: "failed" in self._row(task).get("outcome", {})):
            advance(task.step.id, 0)
            if not self._is_recorded(task):
                if self._is_late():
                    return
                self._record(task, _fields(task, self.device, self.protocol))
                if "failed" in self._row(task)["outcome"] and not _answers(self.device):
                    yield task
                    return
            advance(task.step.id, 1)
            yield task

    def _begin(self, limits: LadderCeilings) -> None:
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

    def _count(
        self,
        tasks: Sequence[Task],
        figures: Sequence[FigureTask],
        advance: Callable[[str, int], None],
    ) -> None:
        """Read the counters that rows and figures lack, all in one go."""
        problems: dict[tuple[str, str], list[Task]] = {}
        for task in tasks:
            row = self._row(task)
            if "median_us" in row["outcome"] and "counters" not in row:
                problems.setdefault((task.ladder.name, task.problem.name), []).append(task)
        asked = [
            Asked(*names, tuple(task.step.id for task in rows)) for names, rows in problems.items()
        ]
        lacking = [(task, keys) for task in figures if (keys := uncounted(self.path, task))]
        asked += [Asked(task.ladder, task.figure.id, keys) for task, keys in lacking]
        found = self._read(asked, advance) if asked else []
        each: list[dict[str, Counters] | str]
        each = [found] * len(asked) if isinstance(found, str) else [*found]
        for rows, one in zip(problems.values(), each, strict=False):
            for task in rows:
                row = self._row(task)
                row.pop("counters_absent", None)
                self._record(task, {**row, **_read_of(one, task.step.id)})
        for (figure, _), one in zip(lacking, each[len(problems) :], strict=True):
            add_counters(self.path, figure, one)

    def _read(
        self, asked: Sequence[Asked], advance: Callable[[str, int], None]
    ) -> list[dict[str, Counters]] | str:
        if self.read is None:
            return NOT_READ
        left_s = self._seconds_left()
        if left_s is not None and left_s < LEAST_FOR_COUNTERS_S:
            return TIME_IS_UP
        advance("counters", 0)
        if self.device.type == "cuda" and _answers(self.device):
            torch.cuda.empty_cache()  # the child needs memory of its own
        return self.read(asked, left_s)

    def _derive(self, tasks: Sequence[Task], limits: LadderCeilings) -> None:
        """Add to each row what follows from it: rate, fraction of the ceiling, wall."""
        for task in tasks:
            row = self._row(task)
            outcome = outcome_from_json(row["outcome"])
            counters = Counters.from_json(row["counters"]) if "counters" in row else None
            self._record(task, {**row, **derived(task.problem, outcome, counters, limits)})


def _read_of(found: Mapping[str, Counters] | str, step: str) -> dict[str, Any]:
    """The fields of a row that tell its counters, or why it has none."""
    if isinstance(found, str):
        return {"counters_absent": found}
    if step not in found:
        return {"counters_absent": "ncu saw no kernel of this step, or had no time for it"}
    return {"counters": found[step].to_json()}
