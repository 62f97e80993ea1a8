"""Adding the partial sums of a cluster of 2 or 4 CTAs through distributed shared memory.

Accumulator j of a thread (``fusedops.cutlass.accumulators``) is in its column slot ``2 (j >> 2) +
(j & 1)``, row half ``(j >> 1) & 1``. Of the column slots the CTA of rank r owns every ``split``-th
one from r on, with both row halves: a gate and its up value stay in one thread. Every CTA sends
each peer the sums that the peer owns; the owner adds them in a fixed order, so results are bitwise
repeatable. A CTA has received all that its peers send before it ends: the cluster need not meet
once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from fusedops.cutlass.distributed import mapped, read, send
from fusedops.cutlass.tile import Coordinates, Slot

__all__ = ["Exchange"]


@dataclass(frozen=True)
class Exchange:
    """The exchange of a kernel.

    Attributes:
        split: CTAs of the cluster; 1: nothing is exchanged.
        m_pad: padded M.
        threads: consumer threads of a CTA.
        rows: weight rows of a tile.
    """

    split: int
    m_pad: int
    threads: int
    rows: int

    @property
    def owned(self) -> int:
        """Accumulators of a thread that a CTA owns."""
        return self.m_pad // (2 * self.split)

    @property
    def part_bytes(self) -> int:
        """What one peer sends."""
        return self.threads * self.owned * 4

    def buffer(self, smem: Any) -> Any:
        """Shared memory for what all peers send."""
        size = (self.split - 1) * self.threads * self.owned
        return smem.allocate_tensor(Float32, cute.make_layout(size), byte_alignment=128)

    def coordinates(
        self, row: Any, column: Any, tile_row: Any, rank: Any, sizes: tuple[Any, Any]
    ) -> Coordinates:
        """Coordinates of the owned accumulators; rows beyond the tile get a column beyond N.

        Args:
            row, column: of the thread's accumulator 0 in the tile.
            tile_row: first weight row of the tile.
            rank: of the CTA in its cluster.
            sizes: (M, N).
        """
        m = []
        for first in range(0, self.m_pad // 4, self.split):
            slot = rank + first if self.split > 1 else first
            m.append(column + 8 * (slot >> 1) + (slot & 1))
        n = tuple(self._inside(row + 8 * half, tile_row, sizes[1]) for half in range(2))
        return Coordinates(tuple(m), n, ((0, 1),), *sizes)

    def _inside(self, row: Any, tile_row: Any, n_size: Any) -> Any:
        position = tile_row + row
        return (
            position if self.rows % 64 == 0 else cutlass.select_(row < self.rows, position, n_size)
        )

    def source(self, e: int, rank: int) -> int:
        """Accumulator of owned value ``e`` of a rank: slots in turn, both row halves of each."""
        slot = rank + self.split * (e >> 1)
        return (slot >> 1) * 4 + (slot & 1) + 2 * (e & 1)

    def values(self, acc: Any, mine: Any) -> dict[Slot, Any]:
        """A thread's results by (m slot, n slot): of ``acc``, or with a split those in ``mine``."""
        owned = range(self.owned)
        sums = mine if self.split > 1 else [acc[self.source(e, 0)] for e in owned]
        return {(e >> 1, e & 1): sums[e] for e in owned}

    @cute.jit
    def run(
        self,
        acc: cute.Tensor,
        mine: cute.Tensor,
        buffer: cute.Tensor,
        received: cute.Pointer,
        drained: cute.Pointer,
        rank: Int32,
        thread: Int32,
        step: Int32,
    ) -> None:
        """Send every peer its part of the sums; add up in ``mine`` what this CTA owns.

        Args:
            acc: a consumer thread's partial sums.
            mine: ``owned`` sums.
            buffer: of ``buffer``; an owned vector of four (two where there are no more) lies beside
                those of the neighbouring threads.
            received: barrier of one arrival; its transactions are the peers' stores.
            drained: barrier that all peers' consumer threads arrive at when they have read a step's
                sums.
            step: tiles that the CTA has finished.
        """
        vector = 4 if self.owned % 4 == 0 else 2
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(received, (self.split - 1) * self.part_bytes)
        if step > 0:
            cute.arch.mbarrier_wait(drained, (step - 1) & 1)
        base = Int32(buffer.iterator.toint()) + thread * (4 * vector)
        for peer in cutlass.range_constexpr(self.split):
            if rank == peer:
                for e in cutlass.range_constexpr(self.owned):
                    mine[e] = acc[self.source(e, peer)]
            else:
                # Parts lie by how far the sender stands behind the owner: 1, 2, 3.
                part = base + ((rank - peer) & (self.split - 1)) * self.part_bytes
                remote = mapped(part - self.part_bytes, peer)
                barrier = mapped(received.toint(), peer)
                for first in cutlass.range_constexpr(0, self.owned, vector):
                    sent = [acc[self.source(first + e, peer)] for e in range(vector)]
                    send(remote + first * (4 * self.threads), sent, barrier)
        cute.arch.mbarrier_wait(received, step & 1)
        for part in cutlass.range_constexpr(self.split - 1):
            for first in cutlass.range_constexpr(0, self.owned, vector):
                at = base + part * self.part_bytes + first * (4 * self.threads)
                given = read(at, vector, Float32)
                for e in cutlass.range_constexpr(vector):
                    mine[first + e] = mine[first + e] + given[e]

    def release(self, drained: Any, rank: Any) -> None:
        """Tell every peer that this thread has read a step's sums."""
        for distance in range(1, self.split):
            peer = (rank + distance) & (self.split - 1)
            cute.arch.mbarrier_arrive(drained, peer, scope=MemScopeKind.CLUSTER)
