"""Adding up the partial sums of a cluster's CTAs that share a tile's K: each gets some columns.

A CTA owns the same share of the tile's columns in every thread, so its threads' accumulators of
those columns come from the same threads of the other CTAs, and a chain of the epilogue runs on them
as on a narrower tile. The sums go through distributed shared memory, into the ring that the main
loop has left::

    main loop done -> tell every peer (``drained``) -> all peers drained: send their columns into
    their shared memory (``received`` counts the bytes) -> all received: add in the order of the
    distance

Both barriers are used once, for clusters have one tile, and a CTA has received all that its peers
send before it ends, so the cluster need not meet once more. The order in which a CTA adds is fixed,
and one CTA alone computes an element, so results are bitwise repeatable.

Sources: PTX ISA, "mbarrier.arrive".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from fusedops.cutlass.distributed import mapped, read, send

__all__ = ["ReduceScatter"]

_VECTOR = 4
"""Sums in one store of 16 bytes."""


@dataclass(frozen=True)
class ReduceScatter:
    """The exchange among ``split`` CTAs of ``threads`` consumer threads each.

    Attributes:
        split: CTAs of the cluster.
        threads: consumer threads of a CTA.
        accumulators: of a thread, a multiple of 4 * ``split``; columns in order, 8 in every 4.
    """

    split: int
    threads: int
    accumulators: int

    @property
    def owned(self) -> int:
        """Accumulators of a thread that its CTA owns."""
        return self.accumulators // self.split

    def initialize(self, drained: Any, received: Any) -> None:
        """Set the barriers up; one thread calls this before the cluster synchronises."""
        others = (self.split - 1) * self.threads
        cute.arch.mbarrier_init(drained, others)
        cute.arch.mbarrier_init(received, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(received, others * self.owned * 4)

    @cute.jit
    def run(
        self,
        acc: cute.Tensor,
        mine: cute.Tensor,
        buffer: Int32,
        drained: cute.Pointer,
        received: cute.Pointer,
        rank: Int32,
        thread: Int32,
    ) -> None:
        """Sum the CTA's columns over the cluster into ``mine``; every consumer thread calls this.

        Args:
            acc: the thread's partial sums; all of its reads of the ring are complete.
            mine: the sums it owns.
            buffer: shared memory address of the ring, of 16 bytes' alignment.
            thread: index among the consumers.
        """
        for distance in cutlass.range_constexpr(1, self.split):
            peer = (rank + distance) % self.split
            cute.arch.mbarrier_arrive(drained, peer, scope=MemScopeKind.CLUSTER)
        cute.arch.mbarrier_wait(drained, 0)
        for own in cutlass.range_constexpr(self.split):
            if rank == own:
                for distance in cutlass.range_constexpr(1, self.split):
                    peer = (own + distance) % self.split
                    self._send(acc, buffer, received, peer, distance, thread)
                self._keep(acc, mine, own)
        cute.arch.mbarrier_wait(received, 0)
        for distance in cutlass.range_constexpr(1, self.split):
            self._add(mine, buffer, distance, thread)

    def _keep(self, acc: Any, mine: Any, own: int) -> None:
        for j in range(self.owned):
            mine[j] = acc[own * self.owned + j]

    def _add(self, mine: Any, buffer: Any, distance: int, thread: Any) -> None:
        """Add what came from ``distance`` ranks off."""
        for first in range(0, self.owned, _VECTOR):
            given = read(buffer + self._offset(distance, first, thread), _VECTOR, mine.element_type)
            for e in range(_VECTOR):
                mine[first + e] = mine[first + e] + given[e]

    def _offset(self, distance: int, first: int, thread: Any) -> Any:
        """Bytes to the vector that begins with owned sum ``first``, from ``distance`` ranks off."""
        vectors = self.owned // _VECTOR
        return (((distance - 1) * vectors + first // _VECTOR) * self.threads + thread) * 16

    def _send(
        self, acc: Any, buffer: Any, received: Any, peer: int, distance: int, thread: Any
    ) -> None:
        """Write what ``peer``, ``distance`` ranks on, owns into its shared memory."""
        remote, barrier = mapped(buffer, peer), mapped(received.toint(), peer)
        for first in range(0, self.owned, _VECTOR):
            at = peer * self.owned + first
            sums = [acc[at + e] for e in range(_VECTOR)]
            send(remote + self._offset(distance, first, thread), sums, barrier)
