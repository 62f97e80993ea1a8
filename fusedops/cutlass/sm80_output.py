"""What a CTA of the Ampere-style kernel writes: its tile of the result and its row statistics.

The rounded tile goes through shared memory, in the place of the ring, so that global memory is
written by whole rows: 16 bytes a thread where address, pitch and width allow it, else by elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusedops.cutlass.math import DslMath, packed_pair
from fusedops.cutlass.tile import ThreadTile

__all__ = ["OutputTile", "TileStatistics", "join_slots", "quad_maximum"]

_JOIN = {"sum": lambda left, right: left + right, "max": DslMath().maximum}
_VECTOR_BYTES = 16


def _store_shared(address: Any, kind: str, *values: Any) -> None:
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    operand = f"{{{names}}}" if len(values) > 1 else names
    cute.arch.inline_ptx(
        f"st.shared.{kind} [{{$r0}}], {operand};", read_only_args=[Int32(address), *values]
    )


def join_slots(
    total: dict[int, Any] | None, by_slot: dict[int, Any], combine: str
) -> dict[int, Any]:
    """A row statistic of more columns: by m slot, the ``sum`` or ``max`` with what there was."""
    if total is None:
        return by_slot
    return {slot: _JOIN[combine](total[slot], value) for slot, value in by_slot.items()}


def quad_maximum(value: Any) -> Any:
    """The largest over the four lanes that hold a row, NaN if one is."""
    return _over_quad(value, DslMath().maximum)


def _over_quad(value: Any, join: Callable[[Any, Any], Any]) -> Any:
    for offset in (1, 2):
        value = join(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


@dataclass(frozen=True)
class OutputTile:
    """A CTA's tile of the result in shared memory.

    Attributes:
        dtype: of the result.
        rows, columns: of the tile.
        pitch_bytes: of its rows, see ``MmaConfig.output_pitch_bytes``.
        threads: of the CTA.
    """

    dtype: torch.dtype
    rows: int
    columns: int
    pitch_bytes: int
    threads: int

    def write(self, tile: ThreadTile, base: Any, first_row: Any, first_column: Any) -> None:
        """Round a thread's values and write them.

        Args:
            tile: two rows, and n slots in twos of neighbouring columns.
            base: shared memory address of the tile.
            first_row, first_column: of the CTA's tile in the result.
        """
        at = tile.coordinates
        for i, row in enumerate(at.m):
            line = base + (row - first_row) * self.pitch_bytes
            for j in range(0, len(at.n), 2):
                address = line + (at.n[j] - first_column) * self.dtype.itemsize
                pair = tile.values[i, j], tile.values[i, j + 1]
                if self.dtype == torch.float32:
                    _store_shared(address, "v2.f32", *(Float32(value) for value in pair))
                else:
                    kind = "b32" if self.dtype.itemsize == 2 else "b16"
                    _store_shared(address, kind, packed_pair(*pair, self.dtype))

    @cute.jit
    def store(
        self,
        base: cute.Pointer,
        out: cute.Tensor,
        first_row: Int32,
        first_column: Int32,
        columns: Int32,
        thread: Int32,
    ) -> None:
        """Copy the tile to (``first_row``, ``first_column``) of ``out``; cut off at its edges.

        Args:
            base: the tile, bytes in shared memory.
            out: the result, as ``STORAGE_DTYPES`` stores it.
            first_row, first_column: of the tile.
            columns: width of the result.
            thread: index in the CTA.
        """
        size = self.dtype.itemsize
        rows = cute.size(out, mode=[0])
        pitch_bytes = Int64(out.stride[0]) * size
        start = out.iterator.toint()
        whole = ((start | pitch_bytes | Int64(columns) * size) & (_VECTOR_BYTES - 1)) == 0
        if whole:
            per_row = self.columns * size // _VECTOR_BYTES
            vectors = self.rows * per_row
            for i in cutlass.range(-(-vectors // self.threads), unroll=2):
                index = i * self.threads + thread
                row, vector = index // per_row, index % per_row
                column = first_column + vector * (_VECTOR_BYTES // size)
                if (index < vectors) & (first_row + row < rows) & (column < columns):
                    words = cute.make_tensor(
                        cute.recast_ptr(
                            (base + (row * self.pitch_bytes + vector * _VECTOR_BYTES)).align(
                                _VECTOR_BYTES
                            ),
                            dtype=Uint32,
                        ),
                        cute.make_layout(4),
                    ).load()
                    cute.arch.inline_ptx(
                        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                        read_only_args=[
                            start + Int64(first_row + row) * pitch_bytes + Int64(column) * size,
                            words[0],
                            words[1],
                            words[2],
                            words[3],
                        ],
                    )
        else:
            values = cute.make_tensor(
                cute.recast_ptr(base, dtype=out.element_type),
                cute.make_layout((self.rows, self.columns), stride=(self.pitch_bytes // size, 1)),
            )
            elements = self.rows * self.columns
            for i in cutlass.range(-(-elements // self.threads), unroll=4):
                index = i * self.threads + thread
                row, column = index // self.columns, index % self.columns
                if (
                    (index < elements)
                    & (first_row + row < rows)
                    & (first_column + column < columns)
                ):
                    out[first_row + row, first_column + column] = values[row, column]


@dataclass(frozen=True)
class TileStatistics:
    """Row statistics of a CTA's tile: one part of each, joined in a fixed order.

    The four lanes of a quad hold a row's columns of a warp; warps side by side hold the others.

    Attributes:
        names: the extra outputs, one a statistic.
        warps_n: warps along N.
        rows: of the tile.
    """

    names: tuple[str, ...]
    warps_n: int
    rows: int

    def layout(self) -> Any:
        """Shared memory layout: (rows, warps along N, statistics)."""
        return cute.make_layout((self.rows, self.warps_n, len(self.names)))

    def add(
        self,
        output: str,
        by_slot: dict[int, Any],
        combine: str,
        buffer: Any,
        first_row: Any,
        warp_n: Any,
        thread: Any,
    ) -> None:
        """Join a warp's columns of the two rows that a thread holds, 8 apart.

        Args:
            output: the statistic.
            by_slot: a thread's part by m slot.
            combine: ``sum`` or ``max``.
            buffer: shared memory of ``layout``.
            first_row: of the row block in the CTA's tile.
            warp_n: index of the warp along N.
            thread: index in the CTA.
        """
        index = self.names.index(output)
        for slot, value in by_slot.items():
            row = first_row + (thread % 32) // 4 + 8 * slot
            total = _over_quad(value, _JOIN[combine])
            _store_if(thread % 4 == 0, buffer, (row, warp_n, index), total)

    @cute.jit
    def write(
        self,
        outputs: Any,
        combines: cutlass.Constexpr,
        buffer: cute.Tensor,
        first_row: Int32,
        part: Int32,
        parts: Int32,
        m_size: Int32,
        thread: Int32,
        threads: cutlass.Constexpr,
    ) -> None:
        """Write the tile's part; the tiles of part 0 zero the parts that no tile has.

        Args:
            outputs: the extra outputs by name, (parts, M).
            combines: ``sum`` or ``max`` by name.
            buffer: shared memory, complete.
            first_row: of the CTA's tile.
            part: the tile's index along N.
            parts: tiles along N.
            m_size: M.
            thread: index in the CTA.
            threads: of the CTA.
        """
        for index in cutlass.range_constexpr(len(self.names)):
            output = outputs[self.names[index]]
            join = _JOIN[combines[self.names[index]]]
            for start in cutlass.range_constexpr(0, self.rows, threads):
                row = start + thread
                m = first_row + row
                if (row < self.rows) & (m < m_size):
                    total = buffer[row, 0, index]
                    for warp in cutlass.range_constexpr(1, self.warps_n):
                        total = join(total, buffer[row, warp, index])
                    output[part, m] = total
                    if part == 0:
                        for other in cutlass.range(parts, cute.size(output, mode=[0]), unroll=1):
                            output[other, m] = Float32(0.0)


@cute.jit
def _store_if(mine: Any, buffer: Any, coordinate: Any, value: Any) -> None:
    if mine:
        buffer[coordinate] = value
