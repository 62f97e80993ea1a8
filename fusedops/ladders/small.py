"""The small ladder: figures instead of steps, each with its explanation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusedops.ladders.catalog import specified
from fusedops.ladders.figures import Figure
from fusedops.ladders.model import Ladder
from fusedops.ladders.small_attention import attention
from fusedops.ladders.small_calls import calls
from fusedops.ladders.small_fusion import fusion
from fusedops.ladders.small_host import clocks, copies, launches
from fusedops.ladders.small_memory import coalescing, saxpy
from fusedops.ladders.small_warps import divergence, occupancy

__all__ = ["LADDER"]

NAME = "small"

_FIGURES: tuple[Callable[[str, str], Figure], ...] = (
    saxpy,
    divergence,
    coalescing,
    occupancy,
    copies,
    clocks,
    launches,
    attention,
    fusion,
    calls,
)


def _figure(make: Callable[[str, str], Figure]) -> Figure:
    name = f"{NAME}.{make.__name__}"
    module = make.__module__.rpartition(".")[2]
    figure = make(name, specified()[NAME].steps[name])
    return replace(figure, modules=(f"ladders/{module}.py",))


LADDER = Ladder(
    NAME,
    specified()[NAME].title,
    "Each of these is one figure: a single effect, measured over the range in which it shows.",
    0,
    lambda size: (),
    (),
    figures=tuple(map(_figure, _FIGURES)),
)
"""Effects that a kernel of any kind meets."""
