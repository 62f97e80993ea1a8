"""A warpgroup's result tile on its way from registers through shared memory to global memory.

Accumulator fragments (PTX ISA, "Register Fragments for wgmma.mma_async") are rounded, written to a
swizzled buffer of 64 rows, and leave it by a bulk tensor store that needs no thread to wait, or,
where the result is not aligned for one, by coalesced copies of single elements.

Protocol, for the two buffers of a warpgroup, filled in turn::

    write buffer b (all threads) -> proxy fence -> warp 0: wait until the store of the other buffer
    has read it -> warpgroup barrier -> warp 0: store b, commit -> write the other buffer ...

A buffer is written again only after the barrier of the one filled in between. Before that barrier
warp 0 saw the last store of the buffer read, or, without bulk stores, every thread had copied it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from fusedops.cutlass.math import STORAGE_DTYPES, packed_pair, store_pair, unpacked_pair
from fusedops.cutlass.tile import Slot, ThreadTile

__all__ = ["ROWS", "Staging"]

ROWS = 64
"""Rows of a buffer: one wgmma row block."""

_WARPGROUP = 128
_FIRST_BARRIER = 1
"""Named barrier of warpgroup 0; warpgroup 1 has the next. Barrier 0 is the whole CTA's."""


@dataclass(frozen=True)
class Staging:
    """The staging buffers of a kernel.

    Attributes:
        dtype: dtype of the result.
        columns: columns of a buffer; 16, 32, 64 or 128 bytes.
        buffers: of a warpgroup.
        warpgroups: that have buffers.
    """

    dtype: torch.dtype
    columns: int
    buffers: int
    warpgroups: int

    @property
    def width_bytes(self) -> int:
        """Bytes of a buffer's row, which is also the span of its swizzle."""
        return self.columns * self.dtype.itemsize

    def layout(self) -> Any:
        """Shared memory layout (rows, columns, buffers of all warpgroups)."""
        element = STORAGE_DTYPES[self.dtype]
        kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, element, self.columns)
        return cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind, element),
            (ROWS, self.columns, self.buffers * self.warpgroups),
            order=(0, 1, 2),
        )

    def store_side(self, out: Any, bulk: bool) -> tuple[Any, ...]:
        """The result as it is stored: (atom, TMA tensor) for bulk tensor stores, else (tensor,)."""
        if not bulk:
            return (out,)
        buffer = cute.slice_(self.layout(), (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(store, out, buffer, (ROWS, self.columns))
        return atom, coordinates

    def buffer_address(self, base: Any, index: Any) -> Any:
        """Shared memory address of a buffer; ``base`` is that of the first."""
        return base + index * (ROWS * self.width_bytes)

    def write(self, tile: ThreadTile, address: Any, thread: Any, first: int) -> None:
        """Round a fragment and write it into a buffer.

        Args:
            tile: two rows 8 apart, and per 8 columns a pair of neighbours, of the buffer's rows.
            address: of the buffer.
            thread: index in the warpgroup.
            first: the buffer's column at which the fragment starts.
        """
        values = tile.values
        groups = len({j for _, j in values}) // 2
        if self.dtype.itemsize == 2:
            self._write_matrices(values, address, thread, first, groups)
            return
        row = (thread // 32) * 16 + (thread % 32) // 4
        column_bytes = 2 * (thread % 4) * self.dtype.itemsize
        for half in range(2):
            at = row + 8 * half
            lane = self.offset(at, column_bytes)
            for group in range(groups):
                low, high = values[half, 2 * group], values[half, 2 * group + 1]
                span = (first + 8 * group) * self.dtype.itemsize
                store_pair(Int32(address + (lane ^ span)), low, high, self.dtype, space="shared")

    def read(self, address: Any, thread: Any, first: int, groups: int) -> dict[Slot, Any]:
        """A fragment of a buffer of 16-bit values, ``groups`` of 8 columns, as ``write`` takes it.

        The thread's warp alone reads these rows, and may overwrite them next.
        """
        lane = self._matrix_lane(thread)
        found: dict[Slot, Any] = {}
        for group in range(0, groups, 2):
            span = (first + 8 * group) * 2
            registers = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[Int32(address + (lane ^ span))],
            )
            places = [(half, 2 * g) for g in (group, group + 1) for half in range(2)]
            for (half, slot), register in zip(places, registers, strict=True):
                pair = unpacked_pair(register, self.dtype)
                found[half, slot], found[half, slot + 1] = pair
        return found

    def _matrix_lane(self, thread: Any) -> Any:
        # stmatrix.x4: lane l gives the address of row l % 8 of matrix l / 8; the matrices are
        # (rows 0-7, rows 8-15) x (columns 0-7, columns 8-15) of the warp's 16 rows.
        row = (thread // 32) * 16 + thread % 16
        half_bytes = ((thread % 32) // 16) * 16
        return self.offset(row, half_bytes)

    def _write_matrices(
        self, values: Any, address: Any, thread: Any, first: int, groups: int
    ) -> None:
        lane = self._matrix_lane(thread)
        for group in range(0, groups, 2):
            registers = [
                packed_pair(values[half, 2 * g], values[half, 2 * g + 1], self.dtype)
                for g in (group, group + 1)
                for half in range(2)
            ]
            span = (first + 8 * group) * 2
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[Int32(address + (lane ^ span)), *registers],
            )

    def offset(self, row: Any, column_bytes: Any) -> Any:
        """Byte offset in a buffer: the swizzle of ``layout`` flips bits 4 to 6 by the row's number.

        A step along the row over bits that ``column_bytes`` leaves zero is one more xor.
        """
        units = self.width_bytes // 16
        flipped = (((row * self.width_bytes) >> 7) & (units - 1)) << 4
        return row * self.width_bytes + (column_bytes ^ flipped)

    @cute.jit
    def publish(self, thread: Int32, warpgroup_index: Int32, bulk: cutlass.Constexpr) -> None:
        """All of the warpgroup has written a buffer, and the other one may be written."""
        if const_expr(bulk):
            cute.arch.fence_view_async_shared()
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.synchronize(warpgroup_index)

    def synchronize(self, warpgroup_index: Any) -> None:
        """A barrier of one warpgroup."""
        cute.arch.barrier(barrier_id=_FIRST_BARRIER + warpgroup_index, number_of_threads=_WARPGROUP)

    @cute.jit
    def copy(
        self,
        buffer: cute.Tensor,
        out: cute.Tensor,
        thread: Int32,
        row: Int32,
        column: Int32,
        columns: Int32,
    ) -> None:
        """Copy a buffer (rows, columns) to ``out`` at (row, column), element by element.

        Args:
            columns: width of the result; what lies beyond it or beyond ``out``'s rows is left.
        """
        rows = cute.size(out, mode=[0])
        for i in cutlass.range(ROWS * self.columns // _WARPGROUP, unroll=4):
            position = i * _WARPGROUP + thread
            m, n = position // self.columns, position % self.columns
            if row + m < rows:
                if column + n < columns:
                    out[row + m, column + n] = buffer[m, n]
