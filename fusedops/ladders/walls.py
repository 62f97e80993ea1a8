"""The wall of a step by rule, from its time and the counters of its kernel."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from fusedops.bench.measurement import Measurement
from fusedops.bench.roofline import NEAR_LAUNCH, Ceilings, Traffic, floor

if TYPE_CHECKING:
    from fusedops.ladders.counters import Counters

__all__ = ["Wall", "wall_of"]


class Wall(Enum):
    """What holds a kernel back."""

    LAUNCH = "launch"
    MEMORY = "memory"
    GLOBAL_ATOMICS = "global atomics"
    EXCESS_SECTORS = "excess sectors"
    BANK_CONFLICTS = "bank conflicts"
    DIVERGENCE = "divergence"
    SHARED_ATOMICS = "shared atomics"
    FMA_PIPE = "FMA pipe"
    LOAD_UNITS = "load units"
    TENSOR_PIPE = "tensor pipe"
    LATENCY = "latency"


NEAR_ROOF = 0.8
"""From this fraction of the floor on, the roof itself is the wall: memory, or the pipe."""

EXCESS_SHARE = 0.3
"""Sectors beyond the least, over all that were asked for."""

CONFLICT_SHARE = 0.4
"""Turns that bank conflicts added, over all turns of shared memory."""

FEW_ACTIVE_THREADS = 24.0
"""Threads of 32 that an average instruction runs for."""

ATOMICS_AN_OPERATION = 0.25
"""Atomic additions (32 a warp's instruction) for each operation of the problem."""

BUSY_PIPE_PCT = 60.0
"""Of its peak; from here on a pipe is the wall."""


def wall_of(
    row: Measurement,
    traffic: Traffic,
    operations: float,
    limits: Ceilings,
    counters: Counters | None,
    pipe: Wall = Wall.TENSOR_PIPE,
) -> Wall | None:
    """The wall of a step; first rule that holds.

    A time under ``NEAR_LAUNCH`` empty kernels is the launch. ``NEAR_ROOF`` of the floor is the
    memory, or ``pipe`` where FLOPs set the floor. Then the counters, in this order: global atomics,
    excess sectors, bank conflicts, divergence, shared atomics, then the pipes: FMA, load units,
    tensor. What none explains is latency: too little under way, barriers, or instructions.

    Three of them only cost time where what they use up is scarce: excess sectors where memory sets
    the floor (where FLOPs do, a load costs the load units, and its sectors are turns of theirs),
    divergence where the issue slots are busy, and shared atomics where the load units are. A pipe
    that was not counted is taken for busy.

    Args:
        row: the step's time.
        traffic: the problem's least work.
        operations: of the problem; atomics are compared with them.
        limits: ceilings of the GPU; their peak is that of ``pipe``.
        counters: of the kernel, where they could be read.
        pipe: that the problem's FLOPs run on.

    Returns:
        None where neither the time nor, for lack of them, the counters name a wall.
    """
    bound = floor(traffic, limits)
    is_memory = bound.memory_us >= bound.compute_us
    if row.median_us < NEAR_LAUNCH * limits.launch_us:
        return Wall.LAUNCH
    if bound.fraction(row.median_us) >= NEAR_ROOF:
        return Wall.MEMORY if is_memory else pipe
    if counters is None:
        return None
    atomics = ATOMICS_AN_OPERATION * operations / 32
    issues, loads = _is_busy(counters.issue_slots_pct), _is_busy(counters.load_units_pct)
    rules = (
        (Wall.GLOBAL_ATOMICS, counters.global_atomics, atomics, True),
        (Wall.EXCESS_SECTORS, counters.excess_share, EXCESS_SHARE, is_memory),
        (Wall.BANK_CONFLICTS, counters.conflict_share, CONFLICT_SHARE, True),
        (Wall.DIVERGENCE, counters.inactive_threads, 32.0 - FEW_ACTIVE_THREADS, issues),
        (Wall.SHARED_ATOMICS, counters.shared_atomics, atomics, loads),
        (Wall.FMA_PIPE, counters.fma_pipe_pct, BUSY_PIPE_PCT, True),
        (Wall.LOAD_UNITS, counters.load_units_pct, BUSY_PIPE_PCT, True),
        (Wall.TENSOR_PIPE, counters.tensor_pipe_pct, BUSY_PIPE_PCT, True),
    )
    for wall, value, limit, costs_time in rules:
        if costs_time and value is not None and value >= limit:
            return wall
    return Wall.LATENCY


def _is_busy(pipe_pct: float | None) -> bool:
    return pipe_pct is None or pipe_pct >= BUSY_PIPE_PCT
