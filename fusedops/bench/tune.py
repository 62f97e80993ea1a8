"""Tuning: compiles the candidates of many problems ahead, measures each, keeps the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedops.bench.measurement import Failed, Outcome
from fusedops.bench.tune_file import TuneFile, choice_row
from fusedops.bench.tune_problems import (
    CutlassCandidate,
    TuneProblem,
    candidate_work,
    candidates,
)
from fusedops.errors import ConfigError
from fusedops.jit.prebuild import KernelPool

__all__ = ["Compilation", "Tuned", "compile_candidates", "tune"]

Measure = Callable[[TuneProblem, Sequence[CutlassCandidate]], dict[str, Outcome]]
"""Times candidates of a problem; returns an outcome for each by name, and for the peers."""


@dataclass
class Tuned:
    """What a run of ``tune`` did.

    Attributes:
        measured: keys measured by it, in order.
        skipped: keys whose choice was current already.
        left: keys that the time did not reach.
    """

    measured: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Compilation:
    """The candidates of a problem, and the names of their kernels in a pool."""

    problem: TuneProblem
    tried: tuple[CutlassCandidate, ...]
    kernels: tuple[str, ...]

    def split(self, pool: KernelPool) -> tuple[list[CutlassCandidate], dict[str, Outcome]]:
        """Candidates whose kernels are there, and why the others' are not."""
        usable, failed = [], dict[str, Outcome]()
        for candidate, kernel in zip(self.tried, self.kernels, strict=True):
            compiled = pool.result(kernel, candidate_work(candidate))
            if compiled.ok:
                usable.append(candidate)
            else:
                failed[candidate.name] = Failed(compiled.reason)
        return usable, failed


def compile_candidates(
    problems: Sequence[TuneProblem], top: int, pool: KernelPool
) -> list[Compilation]:
    """Have all candidates compiled, in the order of the problems; returns at once.

    Raises:
        ConfigError: ``top`` is not positive, or no tiling is legal for a problem.
    """
    if top < 1:
        raise ConfigError(f"tune: top={top}; accepted: 1 or more.")
    found = []
    for problem in problems:
        tried = tuple(candidates(problem.problem, top))
        if not tried:
            raise ConfigError(f"tune: no tiling is legal for {problem.label} ({problem.key}).")
        kernels = tuple(pool.submit(candidate_work(candidate)) for candidate in tried)
        found.append(Compilation(problem, tried, kernels))
    return found


def tune(
    problems: Sequence[TuneProblem],
    file: TuneFile,
    *,
    measure: Measure,
    pool: KernelPool,
    top: int,
    deadline: float | None = None,
    force: bool = False,
    clock: Callable[[], float] = time.monotonic,
    on_problem: Callable[[TuneProblem, dict[str, Any] | None], object] = lambda *_: None,
) -> Tuned:
    """Measure the candidates of every problem that has no current choice, and keep the fastest.

    Kernels are compiled in other processes while earlier problems are measured.

    Args:
        problems: what to choose for, most urgent first.
        file: takes every row as soon as it is measured.
        measure: see ``Measure``.
        pool: compiles.
        top: see ``candidates``.
        deadline: value of ``clock`` after which no problem is begun.
        force: measure again what is current.
        on_problem: called after each problem with its row; None: it was current.

    Raises:
        ConfigError: as ``compile_candidates``.
    """
    done = Tuned()
    todo = []
    for problem in problems:
        if file.is_current(problem.key) and not force:
            done.skipped.append(problem.key)
            on_problem(problem, None)
        else:
            todo.append(problem)
    compilations = compile_candidates(todo, top, pool)
    for position, compilation in enumerate(compilations):
        left_s = None if deadline is None else deadline - clock()
        if left_s is not None and (left_s <= 0 or not pool.ready(compilation.kernels, left_s)):
            done.left += [later.problem.key for later in compilations[position:]]
            break
        problem = compilation.problem
        usable, failed = compilation.split(pool)
        outcomes = failed | (measure(problem, usable) if usable else {})
        row = choice_row(problem, list(compilation.tried), outcomes)
        file.put(problem.key, row)
        done.measured.append(problem.key)
        on_problem(problem, row)
    return done
