"""Which ladders there are: what ``steps.json`` specifies, and which of it is built."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusedops.errors import ConfigError

if TYPE_CHECKING:
    from fusedops.ladders.model import Ladder

__all__ = ["Specified", "built", "load_ladder", "specified"]

_FILE = Path(__file__).with_name("steps.json")


@dataclass(frozen=True)
class Specified:
    """A ladder as specified: its ``title``, and id -> title of its ``steps`` in order."""

    title: str
    steps: Mapping[str, str]


@functools.cache
def specified() -> dict[str, Specified]:
    """Every ladder by name, in the order of the report."""
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Specified(entry["title"], entry["steps"]) for name, entry in data.items()}


def _module(name: str) -> str:
    return f"{__package__}.{name}"


def built() -> tuple[str, ...]:
    """Names of the ladders that have a module, in the order of the report."""
    return tuple(name for name in specified() if importlib.util.find_spec(_module(name)))


def load_ladder(name: str) -> Ladder:
    """A built ladder.

    Raises:
        ConfigError: there is no ladder of that name, or it is not built.
    """
    if name not in built():
        state = "is not built yet" if name in specified() else "is unknown"
        raise ConfigError(f"ladder {name!r} {state}; accepted are {', '.join(built())}.")
    ladder: Ladder = importlib.import_module(_module(name)).LADDER
    return ladder
