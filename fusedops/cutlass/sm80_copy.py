"""Copying tiles of x and w into shared memory: cp.async where the alignment allows it.

A tile is stored as rows of ``tile_k`` 16-bit elements, in units of 16 bytes (8 elements). Units are
swizzled: unit u of row r lies at u XOR a function of r, so that the eight rows of an 8 x 8 matrix
that ldmatrix reads lie on different banks. Whatever the alignment of global memory, a thread copies
whole units: as one 16-byte, two 8-byte or four 4-byte cp.async, or, where only single elements are
aligned, as eight loads and one store. What lies beyond K or beyond the last row is zero.

Sources: PTX ISA, "cp.async", "ldmatrix"; CUDA C++ Programming Guide, "Shared Memory" (banks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint16, const_expr, cute

__all__ = ["ELEMENT_BYTES", "UNIT", "UNIT_BYTES", "TileCopy", "unit_swizzle"]

ELEMENT_BYTES = 2
UNIT = 8
"""Elements of a unit."""
UNIT_BYTES = UNIT * ELEMENT_BYTES


def unit_swizzle(row: Any, tile_k: int) -> Any:
    """What the index of a unit in ``row`` is XORed with.

    Rows of 128 bytes or more start on the same bank: eight rows need eight places. Two rows of 64
    bytes fill a line of banks together: four places do.
    """
    return row & 7 if tile_k >= 64 else (row >> 1) & 3


@dataclass(frozen=True)
class TileCopy:
    """How a CTA's threads copy one operand's tiles.

    Attributes:
        rows: rows of a tile.
        tile_k: columns of K of a tile.
        threads: of the CTA.
        align_bytes: what divides the global addresses: 2, 4, 8 or 16.
        cached: keep the lines in L1 too: for narrow copies, which touch a sector several times.
    """

    rows: int
    tile_k: int
    threads: int
    align_bytes: int

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in shared memory."""
        return self.rows * self.tile_k * ELEMENT_BYTES

    def copy(self, source: Any, first_row: Any, k: Any, target: Any, thread: Any) -> None:
        """Start copying the tile at (``first_row``, ``k``) of ``source`` to address ``target``.

        Args:
            source: (rows, K) tensor in global memory, K of stride 1.
            first_row, k: of the tile.
            target: shared memory address, a multiple of 128 bytes.
            thread: index in the CTA.
        """
        per_row = self.tile_k // UNIT
        units = self.rows * per_row
        for i in range(-(-units // self.threads)):
            index = thread + i * self.threads
            row, unit = index // per_row, index % per_row
            at = target + row * (self.tile_k * ELEMENT_BYTES)
            at = at + ((unit ^ unit_swizzle(row, self.tile_k)) * UNIT_BYTES)
            limit = units if (i + 1) * self.threads > units else None
            self._unit(source, first_row + row, k + unit * UNIT, at, index, limit)

    @cute.jit
    def _unit(
        self,
        source: cute.Tensor,
        row: Int32,
        k: Int32,
        target: Int32,
        index: Int32,
        limit: cutlass.Constexpr,
    ) -> None:
        """Copy the unit at (row, k); beyond ``limit`` a thread has none."""
        rows, k_size = source.shape
        left = cutlass.min(k_size - k, Int32(UNIT)) * ELEMENT_BYTES
        valid = cutlass.select_(row < rows, cutlass.max(left, Int32(0)), Int32(0))
        address = source.iterator.toint() + (
            Int64(row) * Int64(source.stride[0]) + Int64(k)
        ) * Int64(ELEMENT_BYTES)
        if const_expr(limit is None):
            self._pieces(address, target, valid)
        else:
            if index < limit:
                self._pieces(address, target, valid)

    def _pieces(self, address: Any, target: Any, valid: Any) -> None:
        size = self.align_bytes
        if size == ELEMENT_BYTES:
            _copy_elements(address, target, valid)
            return
        # Only whole 16-byte copies may pass L1 by (.cg).
        cache = "cg" if size == UNIT_BYTES else "ca"
        for offset in range(0, UNIT_BYTES, size):
            piece = cutlass.max(cutlass.min(valid - offset, Int32(size)), Int32(0))
            cute.arch.inline_ptx(
                f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
                read_only_args=[Int32(target + offset), address + offset, Int32(piece)],
            )


def _copy_elements(address: Any, target: Any, valid: Any) -> None:
    """A unit by single 16-bit loads, for addresses that are multiples of 2 bytes only."""
    elements = [
        cute.arch.inline_ptx(
            "{ .reg .pred inside; setp.gt.s32 inside, {$r1}, {$r2}; mov.b16 {$w0}, 0; "
            "@inside ld.global.b16 {$w0}, [{$r0}]; }",
            write_only_types=[Uint16],
            read_only_args=[
                address + j * ELEMENT_BYTES,
                Int32(valid),
                Int32(j * ELEMENT_BYTES),
            ],
        )
        for j in range(UNIT)
    ]
    words = [Int32(elements[j]) | (Int32(elements[j + 1]) << 16) for j in range(0, UNIT, 2)]
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(target), *words],
    )
