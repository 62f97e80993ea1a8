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


NEAR_ROOF = 0.75
"""From this fraction of the floor on, the memory itself is the wall."""

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
) -> Wall | None:
    """The wall of a step; first rule that holds.

    A time under ``NEAR_LAUNCH`` empty kernels is the launch. ``NEAR_ROOF`` of the floor is the
    memory, or the tensor pipe where FLOPs set the floor. Then the counters, in this order: global
    atomics, excess sectors, bank conflicts, divergence, shared atomics, then the pipes: FMA, load
    units, tensor. What none explains is latency: too little under way, barriers, or instructions.

    Args:
        row: the step's time.
        traffic: the problem's least work.
        operations: of the problem; atomics are compared with them.
        limits: ceilings of the GPU.
        counters: of the kernel, where they could be read.

    Returns:
        None where neither the time nor, for lack of them, the counters name a wall.
    """
    bound = floor(traffic, limits)
    if row.median_us < NEAR_LAUNCH * limits.launch_us:
        return Wall.LAUNCH
    if bound.fraction(row.median_us) >= NEAR_ROOF:
        return Wall.MEMORY if bound.memory_us >= bound.compute_us else Wall.TENSOR_PIPE
    if counters is None:
        return None
    atomics = ATOMICS_AN_OPERATION * operations / 32
    rules = (
        (Wall.GLOBAL_ATOMICS, counters.global_atomics, atomics),
        (Wall.EXCESS_SECTORS, counters.excess_share, EXCESS_SHARE),
        (Wall.BANK_CONFLICTS, counters.conflict_share, CONFLICT_SHARE),
        (Wall.DIVERGENCE, counters.inactive_threads, 32.0 - FEW_ACTIVE_THREADS),
        (Wall.SHARED_ATOMICS, counters.shared_atomics, atomics),
        (Wall.FMA_PIPE, counters.fma_pipe_pct, BUSY_PIPE_PCT),
        (Wall.LOAD_UNITS, counters.load_units_pct, BUSY_PIPE_PCT),
        (Wall.TENSOR_PIPE, counters.tensor_pipe_pct, BUSY_PIPE_PCT),
    )
    for wall, value, limit in rules:
        if value is not None and value >= limit:
            return wall
    return Wall.LATENCY
