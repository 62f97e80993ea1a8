"""Staging of results whose columns lie along a fragment's rows: weights on wgmma's row side.

A warpgroup's 64 rows of the accumulator are columns of the result; matrices of 8 x 8 values are
transposed on their way to and from a buffer of ``fusedops.cutlass.staging``. A thread has its two
columns (8 apart; one, where a gate has halved them) of pairs of neighbouring rows, 8 rows from pair
to pair. A warp's columns are its own, in every row, so it may read what it will overwrite. Blocks
of 8 rows are swizzled alike: an address is that in the first block and a constant.

Source: PTX ISA, "stmatrix", "ldmatrix" (.trans).
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from fusedops.cutlass.math import packed_pair, storage_value, unpacked_pair
from fusedops.cutlass.staging import Staging
from fusedops.cutlass.tile import Slot, ThreadTile

__all__ = ["read_transposed", "write_transposed"]


def write_transposed(
    staging: Staging, tile: ThreadTile, address: Any, thread: Any, first: int
) -> None:
    """Round a fragment and write it into a buffer.

    Args:
        tile: two m slots for every 8 rows, and one or two n slots.
        address: of the buffer.
        thread: index in the warpgroup.
        first: the buffer's row at which the fragment starts, a multiple of 8.
    """
    values, dtype = tile.values, staging.dtype
    columns = 1 + max(j for _, j in values)
    blocks = (1 + max(i for i, _ in values)) // 2
    if dtype.itemsize == 2:
        for places in _matrices(blocks, columns):
            registers = [
                packed_pair(values[2 * b, j], values[2 * b + 1, j], dtype) for b, j in places
            ]
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[
                    _matrix_address(staging, address, thread, first, columns, places[0][0]),
                    *registers,
                ],
            )
        return
    lane = thread % 32
    column = (thread // 32) * (8 * columns) + lane // 4
    offsets = {
        (parity, j): staging.offset(2 * (lane % 4) + parity, (column + 8 * j) * dtype.itemsize)
        for parity in range(2)
        for j in range(columns)
    }
    for (i, j), value in values.items():
        at = address + offsets[i & 1, j] + (first + 8 * (i >> 1)) * staging.width_bytes
        cute.arch.inline_ptx(
            "st.shared.b8 [{$r0}], {$r1};",
            read_only_args=[Int32(at), Int32(storage_value(value, dtype))],
        )


def read_transposed(
    staging: Staging, address: Any, thread: Any, first: int, blocks: int, columns: int
) -> dict[Slot, Any]:
    """A fragment of a buffer of 16-bit values, ``blocks`` of 8 rows and 1 or 2 columns a thread.

    It is as ``write_transposed`` takes it.
    """
    found: dict[Slot, Any] = {}
    for places in _matrices(blocks, columns):
        registers = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[
                _matrix_address(staging, address, thread, first, columns, places[0][0])
            ],
        )
        for (b, j), register in zip(places, registers, strict=True):
            found[2 * b, j], found[2 * b + 1, j] = unpacked_pair(register, staging.dtype)
    return found


def _matrices(blocks: int, columns: int) -> list[list[Slot]]:
    """(block of 8 rows, n slot) of each four matrices that one instruction moves."""
    places = [(b, j) for b in range(blocks) for j in range(columns)]
    return [places[i : i + 4] for i in range(0, len(places), 4)]


def _matrix_address(
    staging: Staging, address: Any, thread: Any, first: int, columns: int, block: int
) -> Any:
    """Lane l gives the address of row l % 8 of matrix l / 8."""
    matrix, row = (thread % 32) // 8, thread % 8
    column = (thread // 32) * (8 * columns)
    if columns == 2:
        row += (matrix >> 1) * 8
        column += (matrix & 1) * 8
    else:
        row += matrix * 8
    lane = staging.offset(row, column * staging.dtype.itemsize)
    return Int32(address + lane + (first + 8 * block) * staging.width_bytes)
