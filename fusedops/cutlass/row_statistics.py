"""Row statistics of a tile whose columns lie across threads and warps, joined in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from fusedops.cutlass.math import DslMath
from fusedops.cutlass.tile import Coordinates

__all__ = ["RowStatistics"]

_JOIN = {"sum": lambda left, right: left + right, "max": DslMath().maximum}


@dataclass(frozen=True)
class RowStatistics:
    """The statistics that a kernel with weights on wgmma's row side collects.

    A thread holds two columns (N) of a row (M) for each of its row slots; the eight lanes that
    differ in bits 2 to 4 hold the others of its warp, and every warp has other columns.

    Attributes:
        names: the extra outputs, one a statistic.
        warps: consumer warps of the CTA.
        m_pad: padded M.
        split: CTAs of a cluster; of two each owns the rows whose lowest bit is its rank, of four
            bit 3 of the row is the rank's second bit.
    """

    names: tuple[str, ...]
    warps: int
    m_pad: int
    split: int

    def _owner(self, row: Any) -> Any:
        """The rank that owns a row."""
        if self.split <= 2:
            return row & (self.split - 1)
        return (row & 1) | ((row >> 2) & 2)

    def buffer(self, smem: Any) -> Any:
        """Per statistic a column for every warp and one for the CTA's total; None for none."""
        columns = (self.warps + 1) * len(self.names)
        if columns == 0:
            return None
        layout = cute.make_layout((self.m_pad, columns))
        return smem.allocate_tensor(Float32, layout, byte_alignment=128)

    def add(
        self,
        output: str,
        by_slot: dict[int, Any],
        combine: str,
        at: Coordinates,
        buffer: Any,
        thread: Any,
        step: Any,
    ) -> None:
        """Join a tile's columns into the CTA's statistic of each row."""
        first = (self.warps + 1) * self.names.index(output)
        join = _JOIN[combine]
        for slot, value in by_slot.items():
            for offset in (4, 8, 16):
                value = join(value, cute.arch.shuffle_sync_bfly(value, offset))
            _store_row(buffer, at.m[slot], first + thread // 32, value, thread % 32 < 4)
        self._join_warps(buffer, first, combine, thread, step)

    @cute.jit
    def _join_warps(
        self,
        buffer: cute.Tensor,
        first: cutlass.Constexpr,
        combine: cutlass.Constexpr,
        thread: Int32,
        step: Int32,
    ) -> None:
        cute.arch.barrier(barrier_id=1, number_of_threads=self.warps * 32)
        if thread < self.m_pad:
            total = buffer[thread, first]
            for warp in cutlass.range_constexpr(1, self.warps):
                total = _JOIN[combine](total, buffer[thread, first + warp])
            if step > 0:
                total = _JOIN[combine](buffer[thread, first + self.warps], total)
            buffer[thread, first + self.warps] = total
        cute.arch.barrier(barrier_id=1, number_of_threads=self.warps * 32)

    @cute.jit
    def write(
        self,
        outputs: Any,
        buffer: cute.Tensor,
        thread: Int32,
        rank: Int32,
        cluster: Int32,
        clusters: Int32,
        m_size: Int32,
    ) -> None:
        """Write the cluster's part; the first cluster zeroes the parts that no cluster has."""
        for index in cutlass.range_constexpr(len(self.names)):
            parts = outputs[self.names[index]]
            if thread < m_size:
                if self._owner(thread) == rank:
                    parts[cluster, thread] = buffer[thread, (self.warps + 1) * index + self.warps]
                    if cluster == 0:
                        for part in cutlass.range(clusters, cute.size(parts, mode=[0]), unroll=1):
                            parts[part, thread] = Float32(0.0)


@cute.jit
def _store_row(parts: Any, row: Any, column: Any, value: Any, mine: Any) -> None:
    if mine:
        parts[row, column] = value
