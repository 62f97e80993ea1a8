"""``transpose`` by csrc/transpose.cu: tiles through shared memory, or threads along the long side.

Rows of 16-byte vectors take square tiles; rows that start anywhere take shifted ones, or, of
elements below four bytes, realigned ones.

Source: Ruetsch and Micikevicius, "Optimizing Matrix Transpose in CUDA", 2009, for tiles in shared
memory; here each thread also turns a square block in registers, so that all accesses have 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_plan import (
    DIMS_PARAMETERS,
    OUT,
    THREADS,
    VECTOR_BYTES,
    Axis,
    Gpu,
    Launch,
    Plan,
    View,
    X,
    ceil_div,
    coalesce,
    dims_constants,
    element_count,
)

__all__ = ["UnalignedTile", "plan_transpose", "tile_side", "unaligned_tile"]

_SOURCE = "transpose.cu"
_WORDS = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned",
    8: "unsigned long long",
    16: "uint4",
}
_TILE_VECTORS = 16
_SECTOR_BYTES = 32
_SHIFTED_ROWS = 128
_REALIGNED_THREADS = 288

_GROUP_BYTES = 128 << 10
"""What neighbouring blocks write of a row of the result: all of it, where it is no longer. Blocks
that run at once write whole rows then (32768 x 8192 float32 on an H200: 520 us, and 528 us with
groups of 32 KB, 565 with 8 KB)."""

_SHORT_SIDE = 8
"""Below this many rows or columns a tile would be mostly empty."""

_LARGEST_GRID = 2**31 - 1
_GATHER_BLOCKS_PER_SM = 16

_TILE_PARAMETERS = ("pointer", "pointer", *["int64"] * 4, *["uint32"] * 3, *DIMS_PARAMETERS)
_UNALIGNED_PARAMETERS = ("pointer", "pointer", *["int64"] * 3, *["uint32"] * 3, *DIMS_PARAMETERS)
_GATHER_PARAMETERS = ("pointer", "pointer", *["int64"] * 7, *DIMS_PARAMETERS)


def tile_side(element_bytes: int) -> int:
    """Rows and columns of a tile, which has 256 bytes a row."""
    return _TILE_VECTORS * VECTOR_BYTES // element_bytes


@dataclass(frozen=True)
class UnalignedTile:
    """A tile of rows that start anywhere.

    Attributes:
        name: the kernel.
        rows: of x, which are written.
        columns: of x.
        threads: a block.
        shared_bytes: of a block.
    """

    name: str
    rows: int
    columns: int
    threads: int
    shared_bytes: int


def unaligned_tile(element_bytes: int) -> UnalignedTile:
    """``ShiftedTile`` or ``RealignedTile`` of csrc/include for elements of so many bytes."""
    width = VECTOR_BYTES // element_bytes
    sector = _SECTOR_BYTES // element_bytes
    if element_bytes >= 4:
        held = _SHIFTED_ROWS + sector - 1
        vectors = held * (_TILE_VECTORS + 1) + (held - 1) // width
        side = tile_side(element_bytes)
        return UnalignedTile(
            "transpose_shifted", _SHIFTED_ROWS, side, THREADS, vectors * VECTOR_BYTES
        )
    rows = 256 // element_bytes
    columns = (15 if element_bytes == 1 else 31) * width
    of_row = (rows + sector) // width
    vectors = columns * of_row + (columns - 1) // width
    return UnalignedTile(
        "transpose_realigned", rows, columns, _REALIGNED_THREADS, vectors * VECTOR_BYTES
    )


def plan_transpose(x: View, gpu: Gpu) -> Plan:
    """How (..., R, C) becomes (..., C, R).

    Raises:
        UnsupportedError: too many batch dimensions.
    """
    *batch_shape, rows, columns = x.shape
    shape = (*batch_shape, columns, rows)
    if 0 in shape:
        return Plan(shape, x.dtype)
    *outer, (_, row_stride), (_, column_stride) = x.axes
    batch = coalesce(outer)
    if 1 in (rows, columns) or row_stride == 1:
        # Rows of the result lie in x as they are, `row_stride` apart: a copy.
        launch = _copy(x, [*outer, (columns, column_stride), (rows, row_stride)], gpu)
    elif min(rows, columns) < _SHORT_SIDE:
        launch = _walk(x, batch, (rows, row_stride), (columns, column_stride), gpu)
    else:
        launch = _tiles(x, batch, (rows, row_stride), (columns, column_stride))
    return Plan(shape, x.dtype, (launch,))


def _is_vectors(x: View, row: int, strides: list[int]) -> bool:
    """Whether rows of ``row`` elements start and end at multiples of 16 bytes."""
    width = VECTOR_BYTES // x.dtype.itemsize
    return x.aligned_bytes == VECTOR_BYTES and all(n % width == 0 for n in (row, *strides))


def _tiles(x: View, batch: list[Axis], row: Axis, column: Axis) -> Launch:
    (rows, row_stride), (columns, column_stride) = row, column
    size = x.dtype.itemsize
    loads_vectors = column_stride == 1 and _is_vectors(
        x, columns, [row_stride, *(stride for _, stride in batch)]
    )
    stores_vectors = rows % (VECTOR_BYTES // size) == 0
    side = tile_side(size)
    unaligned = unaligned_tile(size)
    # A smaller matrix would leave most of an unaligned tile empty.
    is_unaligned = (
        column_stride == 1
        and not (loads_vectors and stores_vectors)
        and rows >= unaligned.rows
        and columns >= unaligned.columns
    )
    tile_rows, tile_columns = (unaligned.rows, unaligned.columns) if is_unaligned else (side, side)
    row_tiles, column_tiles = ceil_div(rows, tile_rows), ceil_div(columns, tile_columns)
    tiles = (row_tiles, column_tiles, min(_GROUP_BYTES // (tile_rows * size), row_tiles))
    blocks = row_tiles * column_tiles * element_count(batch)
    if blocks > _LARGEST_GRID:
        raise UnsupportedError(f"takes up to {_LARGEST_GRID} tiles, got {blocks}")
    if is_unaligned:
        kernel = f"fusedops::{unaligned.name}<{_WORDS[size]}>"
        parameters = _UNALIGNED_PARAMETERS
        strides: tuple[int, ...] = (row_stride,)
        threads, shared_bytes = unaligned.threads, unaligned.shared_bytes
    else:
        flags = ", ".join(str(flag).lower() for flag in (loads_vectors, stores_vectors))
        kernel = f"fusedops::transpose_tiles<{_WORDS[size]}, {flags}>"
        parameters = _TILE_PARAMETERS
        strides = (row_stride, column_stride)
        threads, shared_bytes = THREADS, side * _TILE_VECTORS * VECTOR_BYTES
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        parameters,
        (X, OUT),
        (rows, columns, *strides, *tiles, *dims_constants(batch, "batch dimensions")),
        (blocks, 1),
        threads=threads,
        shared_bytes=shared_bytes,
    )


def _copy(x: View, axes: list[Axis], gpu: Gpu) -> Launch:
    """The positions of ``axes`` one after another; as vectors where the innermost ones allow it."""
    *outer, (row, stride) = coalesce(axes) or [(1, 1)]
    size = x.dtype.itemsize
    if stride == 1 and _is_vectors(x, row, [s for _, s in outer]):
        width = VECTOR_BYTES // size
        row, size = row // width, VECTOR_BYTES
        outer = [(n, s // width) for n, s in outer]
    return _gather(size, outer, (row, stride, 1), (1, 1, row), gpu)


def _walk(x: View, batch: list[Axis], row: Axis, column: Axis, gpu: Gpu) -> Launch:
    """A matrix with a short side: threads lie along the long one."""
    (rows, row_stride), (columns, column_stride) = row, column
    along_rows = (rows, row_stride, 1)
    along_columns = (columns, column_stride, rows)
    if rows < columns:
        along_rows, along_columns = along_columns, along_rows
    return _gather(x.dtype.itemsize, batch, along_rows, along_columns, gpu)


def _gather(
    size: int,
    batch: list[Axis],
    long: tuple[int, int, int],
    short: tuple[int, int, int],
    gpu: Gpu,
) -> Launch:
    """``long`` and ``short``: size, stride in x, stride in the result."""
    matrices = element_count(batch)
    kernel = f"fusedops::transpose_gather<{_WORDS[size]}>"
    blocks = ceil_div(matrices * long[0], THREADS)
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _GATHER_PARAMETERS,
        (X, OUT),
        (
            *(matrices, long[0], short[0], long[1], short[1], long[2], short[2]),
            *dims_constants(batch, "batch dimensions"),
        ),
        (min(blocks, _GATHER_BLOCKS_PER_SM * gpu.sms), 1),
    )
