"""``transpose_cast`` and ``transpose_quantize`` by csrc/transpose_quantize.cu.

A group of 128 elements in a row of the result is 128 rows of one column of x: a tile has them, so
one pass over x does. A scale a row takes two: csrc/reduce.cu finds the columns' largest magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedops.epilogue.outputs import GROUP
from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import (
    DIMS_PARAMETERS,
    OUT,
    THREADS,
    VECTOR_BYTES,
    WORK,
    Gpu,
    Launch,
    View,
    X,
    ceil_div,
    coalesce,
    dims_constants,
    element_count,
)
from fusedops.providers.cuda_quantize import plan_quantize
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_rows import (
    KERNEL_FLOATS,
    MOST_CLUSTER,
    MOST_COLUMNS,
    access_width,
    rows_of,
    scale_pitch,
)
from fusedops.providers.cuda_sinks import (
    ABSENT,
    Served,
    first_result,
    given_stride,
    quantized_results,
    sink_of,
)
from fusedops.providers.cuda_transpose import tile_side

__all__ = ["TRANSPOSE_CAST", "TRANSPOSE_QUANTIZE", "plan_transpose_cast", "plan_transpose_quantize"]

_SOURCE = "transpose_quantize.cu"
_X, _GIVEN, _ABSENT = range(3)
_VALUES, _SCALES, _LARGEST, _WORK = range(3, 7)
"""Results of ``transpose_quantize``, of which the operation does not return the last; memory."""

_GROUP_BYTES = 128 << 10
"""What neighbouring blocks write of a row of the result, see csrc/include/tiles.cuh."""

_LARGEST_GRID = 2**31 - 1
_TILE_PARAMETERS = (
    *("pointer",) * 4,
    *("int64",) * 4,
    *("uint32",) * 3,
    *("int64",) * 3,
    *DIMS_PARAMETERS,
)
_PACK_PARAMETERS = ("pointer", "pointer", "int64", *DIMS_PARAMETERS)


def _turned(x: View) -> View:
    """What ``x.transpose(-1, -2)`` is: its rows are rows of the result."""
    *shape, rows, columns = x.shape
    *strides, row_stride, column_stride = x.strides
    return View(
        (*shape, columns, rows), (*strides, column_stride, row_stride), x.dtype, x.aligned_bytes
    )


def _is_in_order(x: View) -> bool:
    """Whether rows of the result are best read as rows: they lie in x so, or are one element."""
    return 0 in x.shape or 1 in x.shape[-2:] or x.strides[-2] == 1


def plan_transpose_cast(views: Sequence[View | None], gpu: Gpu, dtype: torch.dtype) -> CallPlan:
    """How ``transpose_cast`` computes its result; the arguments were checked.

    Args:
        views: x, and two that are always absent.
        gpu: where to run.
        dtype: of the result.

    Raises:
        UnsupportedError: x lies in too many dimensions, or takes more blocks than a grid has.
    """
    x = views[_X]
    if x is None:
        raise UnsupportedError("transposes x, which is absent")
    result = (_turned(x).shape, dtype)
    if 0 in x.shape:
        return CallPlan((result,))
    if _is_in_order(x):
        return CallPlan((result,), (_cast_packs(x, dtype),))
    sink = f"fusedops::Rounded<{KERNEL_FLOATS[dtype]}>"
    return CallPlan((result,), (_tiles(x, sink, dtype.itemsize, (_X, _ABSENT, _VALUES, _ABSENT)),))


def plan_transpose_quantize(
    views: Sequence[View | None], gpu: Gpu, dtype: str, granularity: str
) -> CallPlan:
    """How ``transpose_quantize`` computes its results; the arguments were checked.

    Args:
        views: x, given scale, and one that is always absent.
        gpu: where to run.
        dtype, granularity: as the operation.

    Raises:
        UnsupportedError: as ``plan_transpose_cast``.
    """
    x, given, _ = views
    if x is None:
        raise UnsupportedError("transposes x, which is absent")
    turned = _turned(x)
    sink = sink_of(dtype, granularity, given is not None)
    longest = MOST_COLUMNS * (MOST_CLUSTER if gpu.has_clusters else 1)
    if _is_in_order(x) and not (sink.joins and x.shape[-2] > longest):
        return plan_quantize(
            (turned, given, None), gpu, dtype, granularity if given is None else None
        )
    results = sink.results(turned.shape, x.dtype)
    before: tuple[Launch, ...] = ()
    known, scales, work_bytes = _GIVEN, _ABSENT, 0
    if given is None:
        scales = _SCALES
    if sink.joins:
        largest = plan_reduce(x, gpu, "absmax", (-2,), False)
        place = {X: _X, OUT: _LARGEST, WORK: _WORK}
        before = tuple(
            replace(launch, tensors=tuple(place[tensor] for tensor in launch.tensors))
            for launch in largest.launches
        )
        known, work_bytes = _LARGEST, largest.work_bytes
        results = (*results, (largest.shape, largest.dtype))
    tiles = _tiles(
        x,
        f"fusedops::Coded<{sink.name}>",
        1,
        (_X, known, _VALUES, scales),
        known_stride=given_stride(given),
    )
    return CallPlan(results, (*before, tiles), work_bytes)


def _tiles(
    x: View, sink: str, out_bytes: int, tensors: tuple[int, ...], known_stride: int = 0
) -> Launch:
    """``turn_tiles``; tensors: x, what is known of scales, result, scales."""
    rows, columns = x.shape[-2:]
    batch = coalesce(x.axes[:-2])
    side = tile_side(x.dtype.itemsize)
    row_tiles, column_tiles = ceil_div(rows, GROUP), ceil_div(columns, side)
    matrices = element_count(batch)
    blocks = row_tiles * column_tiles * matrices
    if blocks > _LARGEST_GRID:
        raise UnsupportedError(f"takes up to {_LARGEST_GRID} tiles, got {blocks}")
    width = _access(x)
    is_aligned = rows * out_bytes % VECTOR_BYTES == 0
    arguments = (sink, KERNEL_FLOATS[x.dtype], str(width), str(is_aligned).lower())
    kernel = f"fusedops::turn_tiles<{', '.join(arguments)}>"
    all_rows = matrices * columns
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _TILE_PARAMETERS,
        tensors,
        (
            *(rows, columns, *x.strides[-2:]),
            *(row_tiles, column_tiles, min(_GROUP_BYTES // (GROUP * out_bytes), row_tiles)),
            *(all_rows, known_stride, scale_pitch(all_rows)),
            *dims_constants(batch, "batch dimensions"),
        ),
        (blocks, 1),
        shared_bytes=side * GROUP * out_bytes,
    )


def _access(x: View) -> int:
    """``kAccess`` of ``turn_tiles``: elements read at once.

    0 stands for aligned vectors of rows that start between them, which pays where a row has more
    tiles than its first and its last.
    """
    width = access_width([rows_of(x)], [], x.shape[-1])
    is_whole = width * x.dtype.itemsize == VECTOR_BYTES
    is_long = x.shape[-1] > 2 * tile_side(x.dtype.itemsize)
    return 0 if x.strides[-1] == 1 and is_long and not is_whole else width


def _cast_packs(x: View, dtype: torch.dtype) -> Launch:
    """Elements of x in the order of the result, as many at once as lie side by side."""
    axes = coalesce(_turned(x).axes) or [(1, 1)]
    sizes, strides = zip(*axes, strict=True)
    rows = rows_of(View(sizes, strides, x.dtype, x.aligned_bytes))
    width = access_width([rows], [], rows.columns)
    axes = coalesce([*axes[:-1], (rows.columns // width, rows.inner * width)])
    count = element_count(axes)
    blocks = ceil_div(count, THREADS)
    if blocks > _LARGEST_GRID:
        raise UnsupportedError(f"takes up to {_LARGEST_GRID} blocks of threads, got {blocks}")
    floats = (KERNEL_FLOATS[x.dtype], KERNEL_FLOATS[dtype])
    kernel = f"fusedops::cast_packs<{', '.join(floats)}, {width}, {str(len(axes) <= 1).lower()}>"
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _PACK_PARAMETERS,
        (_X, _VALUES),
        (count, *dims_constants(axes, "dimensions")),
        (blocks, 1),
    )


Split = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]


def _transpose_cast(x: Tensor, dtype: torch.dtype) -> Split:
    return (x, None, ABSENT), (dtype,)


def _transpose_quantize(x: Tensor, scale: Tensor | None, dtype: str, granularity: str) -> Split:
    return (x, scale, ABSENT), (dtype, granularity)


def _results(results: Sequence[Tensor], options: tuple[Any, ...]) -> list[Tensor]:
    """Values and scales; the largest magnitudes go."""
    return quantized_results(results[:2], options)


TRANSPOSE_CAST = Served(CudaCall(plan_transpose_cast), _transpose_cast, first_result)
TRANSPOSE_QUANTIZE = Served(CudaCall(plan_transpose_quantize), _transpose_quantize, _results)
