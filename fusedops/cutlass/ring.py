"""The ring of shared memory stages between the loading warp and the multiplying warpgroups.

Stage s has full[s] (one arrival: the loading warp, which also announces the bytes; they come from
every CTA of the cluster that shares a tile with this one) and empty[s] (one arrival for every
consumer warp of every CTA of the cluster, because a CTA's loads are written to all of them).
Iteration i of a CTA uses stage i % stages in round i // stages: consumers wait for parity
``round & 1`` of full, the loading warp for parity ``(round & 1) ^ 1`` of empty, which holds at
once in round 0 (PTX ISA, "mbarrier.test_wait": the phase before the first counts as complete).

A peer cannot be a round ahead: before it loads stage s again it waits for arrivals of this CTA's
consumers, and they follow the completion of this CTA's full[s]. Its bytes may come before this
CTA announces them: the phase stays open until the announcement. All CTAs of a cluster run the same
iterations, also for tiles that lie beyond the result; there the loads give zeros.

Sources: PTX ISA, "mbarrier", "cp.async.bulk.tensor", "elect.sync".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

__all__ = ["Ring", "load", "load_atom", "partition"]


@dataclass(frozen=True)
class Ring:
    """The barriers of a ring; their pointers are passed along, as run-time values.

    Attributes:
        stages: of the ring.
        warps: consumer warps of a CTA that read a stage.
        cluster: CTAs whose consumers read what a CTA loads.
    """

    stages: int
    warps: int
    cluster: int

    @cute.jit
    def initialize(self, full: cute.Pointer, empty: cute.Pointer, thread: Int32) -> None:
        """Set the barriers up; every thread of every CTA of the cluster calls this."""
        if thread == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, self.warps * self.cluster)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.cluster > 1):
            # No CTA may write to its peer before the peer's barriers stand.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def next(self, stage: Any, parity: Any) -> tuple[Any, Any]:
        """The stage after ``stage`` and the parity of its round."""
        following = stage + 1
        wraps = following == self.stages
        return (
            cutlass.select_(wraps, Int32(0), following),
            cutlass.select_(wraps, parity ^ 1, parity),
        )

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        """Tell every CTA that loads into a stage, given by its barrier, that this warp read it."""
        if const_expr(self.cluster == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty)
        else:
            lane = cute.arch.lane_idx()
            if lane < self.cluster:
                cute.arch.mbarrier_arrive(empty, lane)


def load_atom(tensor: Any, layout: Any, tile: tuple[int, int], multicast: int) -> tuple[Any, Any]:
    """The TMA load of a tile, in equal slices by the CTAs that share it."""
    operation = (
        cpasync.CopyBulkTensorTileG2SMulticastOp()
        if multicast > 1
        else cpasync.CopyBulkTensorTileG2SOp()
    )
    atom, coordinates = cpasync.make_tiled_tma_atom(
        operation, tensor, cute.slice_(layout, (None, None, 0)), tile, num_multicast=multicast
    )
    return atom, coordinates


def partition(
    atom: Any, tensor: Any, smem: Any, tile: tuple[int, int], slice_index: Any, slices: int
) -> tuple[Any, Any]:
    """(global, shared) sides of a CTA's slice of the loads, indexed (tile, k tile) and (stage)."""
    tiles = cute.local_tile(tensor, tile, (None, None))
    to, source = cpasync.tma_partition(
        atom,
        slice_index,
        cute.make_layout(slices),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    return source, to


def load(atom: Any, source: Any, to: Any, barrier: Any, slices: int) -> None:
    """Start a load; with several slices it is written to every CTA of the cluster."""
    if slices > 1:
        every = cutlass.Int16((1 << slices) - 1)
        cute.copy(atom, source, to, tma_bar_ptr=barrier, mcast_mask=every)
    else:
        cute.copy(atom, source, to, tma_bar_ptr=barrier)
