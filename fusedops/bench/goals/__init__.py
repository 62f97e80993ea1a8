"""Measuring functions of the goals: one function an id, in the modules of this package.

A module registers its functions with the decorator::

    @goal("cuda.rms_norm", provider="cuda", covers=("csrc/include", "csrc/norm.cu"))
    def rms_norm(run: GoalRun) -> Reading:
        rows = run.measure("16384x4096", [...], make_buffers)
        return Reading.of(run.mine(rows, "fusedops"), run.goal.unit)

The harness pins ``provider`` in strict mode around the call. Every row must launch it, and every
contender's result is checked before it is timed (``Contender.check``).

A figure depends on more than its kernels: what else a goal's module imports of this package, and
the provider's module, is found by itself (``Registered.files``). So goals whose rows need more than
those beside them have a module of their own. ``covers`` names what no import leads to.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusedops.bench.environment import repository_root, source_files, source_hash
from fusedops.bench.imports import imported_files
from fusedops.errors import ConfigError
from fusedops.providers.base import PROVIDER_ORDER

if TYPE_CHECKING:
    from fusedops.bench.goal_run import GoalRun, Reading

__all__ = ["REGISTRY", "Registered", "goal", "load_all"]

Measure = Callable[["GoalRun"], "Reading"]

NO_PART_OF_A_FIGURE = (
    "fusedops.bench.environment",
    "fusedops.bench.files",
    "fusedops.bench.goal_spec",
    "fusedops.bench.goals",
    "fusedops.errors",
)
"""Modules that say what is wanted, record what was read, or only hold words."""


@dataclass(frozen=True)
class Registered:
    """A measuring function with what it depends on.

    Attributes:
        function: measures and returns a ``Reading``.
        provider: the provider that is pinned and must run.
        covers: source files, folders or globs that the figure depends on and no import leads to.
    """

    function: Measure
    provider: str
    covers: tuple[str, ...]

    def files(self) -> list[str]:
        """Every source that the figure depends on, relative to the checkout, sorted.

        They are what ``covers`` names, and the modules of the measuring function and of the
        provider with all that these import of this package, but for ``NO_PART_OF_A_FIGURE``.

        Raises:
            ConfigError: ``covers`` names no source file, or there is no checkout.
        """
        root = repository_root()
        if root is None:
            raise ConfigError("goals: fusedops runs from a wheel; run from a checkout.")
        modules = [self.function.__module__]
        if self.provider in _WITH_MODULE:
            modules.append(f"fusedops.providers.{self.provider}")
        found: set[Path] = set(source_files(self.covers, root))
        found |= imported_files(modules, root, NO_PART_OF_A_FIGURE)
        return sorted(path.as_posix() for path in found)

    def sources(self) -> str:
        """Hash of ``files`` and of the measuring function itself."""
        return source_hash(self.files(), extra=inspect.getsource(self.function))


_WITH_MODULE = frozenset({"cuda", "cutlass", "cutlass_sm80", "flashinfer"})
"""Providers with a module of their name, which chooses and launches; no operation imports it."""


REGISTRY: dict[str, Registered] = {}
"""Goal id -> measuring function."""


def goal(goal_id: str, *, provider: str, covers: tuple[str, ...]) -> Callable[[Measure], Measure]:
    """Register the measuring function of a goal.

    Args:
        goal_id: an id of goals.json.
        provider: pinned in strict mode while the function runs.
        covers: what a change of makes the figure stale, beside what is imported (see
            ``Registered.files`` and ``source_files``).

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
