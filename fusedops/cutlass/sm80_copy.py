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

__all__ = ["ELEMENT_BYTES", "UNIT", "UNIT_BYTES", "Share", "TileCopy", "unit_swizzle"]

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
class Share:
    """What one thread copies of every tile along K: a unit of each ``row_step``-th row.

    Attributes:
        address: global address of its first unit at k = 0.
        pitch: bytes from one of its rows to its next.
        rows: rows from its first to the operand's end; may be negative.
        k: columns of K from its first unit to the end.
        target: offset of its first unit in shared memory.
    """

    address: Any
    pitch: Any
    rows: Any
    k: Any
    target: Any


@dataclass(frozen=True)
class TileCopy:
    """How a CTA's threads copy one operand's tiles.

    Attributes:
        rows: rows of a tile.
        tile_k: columns of K of a tile.
        threads: of the CTA; they copy every ``row_step`` rows, a multiple of 8, together.
        align_bytes: what divides the global addresses: 2, 4, 8 or 16.
    """

    rows: int
    tile_k: int
    threads: int
    align_bytes: int

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in shared memory."""
        return self.rows * self.tile_k * ELEMENT_BYTES

    @property
    def row_step(self) -> int:
        """Rows that the threads copy at once."""
        return self.threads // (self.tile_k // UNIT)

    def share(self, source: Any, first_row: Any, thread: Any) -> Share:
        """The thread's share of the tiles of ``source``, (rows, K), that start at a row."""
        per_row = self.tile_k // UNIT
        row, unit = thread // per_row, thread % per_row
        rows, k_size = source.shape
        pitch = Int64(source.stride[0]) * ELEMENT_BYTES
        address = source.iterator.toint() + Int64(first_row + row) * pitch
        # Rows a multiple of 8 apart are swizzled alike.
        place = row * per_row + (unit ^ unit_swizzle(row, self.tile_k))
        return Share(
            address + Int64(unit) * UNIT_BYTES,
            pitch * self.row_step,
            rows - first_row - row,
            k_size - unit * UNIT,
            place * UNIT_BYTES,
        )

    def copy(self, share: Share, k: Any, target: Any, whole: bool = False) -> None:
        """Start copying the tile at column ``k`` to shared memory address ``target``.

        Args:
            share: the thread's.
            k: first column of the tile.
            target: of the tile.
            whole: the tile lies before the end of K.
        """
        left = cutlass.min(share.k - k, Int32(UNIT)) * ELEMENT_BYTES
        valid = cutlass.max(left, Int32(0))
        address = share.address + Int64(k) * ELEMENT_BYTES
        self._units(address, share.pitch, target + share.target, share.rows, valid, whole)

    @cute.jit
    def _units(
        self,
        address: Int64,
        pitch: Int64,
        target: Int32,
        rows: Int32,
        valid: Int32,
        whole: cutlass.Constexpr,
    ) -> None:
        """Copy a unit of ``valid`` bytes of each of the thread's rows."""
        count = self.rows // self.row_step
        step_bytes = self.row_step * self.tile_k * ELEMENT_BYTES
        if const_expr(self.align_bytes in (ELEMENT_BYTES, UNIT_BYTES)):
            for i in cutlass.range_constexpr(count):
                self._unit(
                    address + i * pitch,
                    target + i * step_bytes,
                    rows - i * self.row_step,
                    valid,
                    whole,
                )
        else:
            # Several instructions a unit: a loop keeps their sizes from all being in registers.
            for _ in cutlass.range(count, unroll=1):
                self._unit(address, target, rows, valid, whole)
                address = address + pitch
                target = target + step_bytes
                rows = rows - self.row_step

    def _unit(self, address: Any, target: Any, rows: Any, valid: Any, whole: bool) -> None:
        size = self.align_bytes
        inside = cutlass.select_(rows > 0, valid, Int32(0))
        if size == ELEMENT_BYTES:
            _copy_elements(address, target, inside)
            return
        # Only whole 16-byte copies may pass L1 by (.cg).
        copy = f"cp.async.{'cg' if size == UNIT_BYTES else 'ca'}.shared.global"
        for offset in range(0, UNIT_BYTES, size):
            at = [Int32(target + offset), address + offset]
            if whole:
                # ignore-src writes zeros. The size in bytes, which the end of K needs, costs four
                # instructions more.
                cute.arch.inline_ptx(
                    "{ .reg .pred outside; setp.le.s32 outside, {$r2}, 0; "
                    f"{copy} [{{$r0}}], [{{$r1}}], {size}, outside; }}",
                    read_only_args=[*at, Int32(rows)],
                )
                continue
            piece = inside
            if size < UNIT_BYTES:
                piece = cutlass.max(cutlass.min(inside - offset, Int32(size)), Int32(0))
            cute.arch.inline_ptx(
                f"{copy} [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
                read_only_args=[*at, Int32(piece)],
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
