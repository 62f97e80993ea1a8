"""Measuring functions of the goals: one function an id, in the modules of this package.

A module registers its functions with the decorator::

    @goal("cuda.rms_norm", provider="cuda", covers=("fusedops/ops/norm.py", "csrc/norm.cu"))
    def rms_norm(run: GoalRun) -> Reading:
        rows = run.measure("16384x4096", [...], make_buffers)
        return Reading.of(run.mine(rows, "fusedops"), run.goal.unit)

The harness pins ``provider`` in strict mode around the call. Every row must launch it, and every
contender's result is checked before it is timed (``Contender.check``).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusedops.bench.environment import source_hash
from fusedops.errors import ConfigError
from fusedops.providers.base import PROVIDER_ORDER

if TYPE_CHECKING:
    from fusedops.bench.goal_run import GoalRun, Reading

__all__ = ["REGISTRY", "Registered", "goal", "load_all"]

Measure = Callable[["GoalRun"], "Reading"]


@dataclass(frozen=True)
class Registered:
    """A measuring function with what it depends on.

    Attributes:
        function: measures and returns a ``Reading``.
        provider: the provider that is pinned and must run.
        covers: source files, folders or globs that the figure depends on.
    """

    function: Measure
    provider: str
    covers: tuple[str, ...]

    def sources(self) -> str:
        """Hash of the covered sources and of the measuring function itself."""
        return source_hash(self.covers, extra=inspect.getsource(self.function))


REGISTRY: dict[str, Registered] = {}
"""Goal id -> measuring function."""


def goal(goal_id: str, *, provider: str, covers: tuple[str, ...]) -> Callable[[Measure], Measure]:
    """Register the measuring function of a goal.

    Args:
        goal_id: an id of goals.json.
        provider: pinned in strict mode while the function runs.
        covers: what a change of makes the figure stale (see ``source_hash``).

    Raises:
        ConfigError: the id has a function already, the provider is unknown, or nothing is covered.
    """
    if goal_id in REGISTRY:
        raise ConfigError(f"goal {goal_id}: a measuring function is registered already.")
    if provider not in PROVIDER_ORDER:
        raise ConfigError(
            f"goal {goal_id}: unknown provider {provider!r}; accepted are "
            f"{', '.join(PROVIDER_ORDER)}."
        )
    if not covers:
        raise ConfigError(f"goal {goal_id}: covers is empty; name the sources that it depends on.")

    def register(function: Measure) -> Measure:
        REGISTRY[goal_id] = Registered(function, provider, covers)
        return function

    return register


def load_all() -> dict[str, Registered]:
    """Import every module of this package and return the registry."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return REGISTRY
