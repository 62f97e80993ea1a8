"""``quantize`` and ``quantize_static`` by csrc/quantize.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import (
    DIMS_PARAMETERS,
    THREADS,
    Gpu,
    Launch,
    View,
    ceil_div,
    coalesce,
    dims_constants,
    element_count,
)
from fusedops.providers.cuda_rows import KERNEL_FLOATS, access_width, row_layout, rows_of
from fusedops.providers.cuda_sinks import (
    ABSENT,
    FORMATS,
    Served,
    first_result,
    given_stride,
    quantized_result,
    sink_of,
)

__all__ = ["QUANTIZE", "QUANTIZE_STATIC", "plan_quantize"]

_SOURCE = "quantize.cu"
_X, _GIVEN, _ABSENT = range(3)
_RESULTS = 3
_ROWS_PARAMETERS = (
    *("pointer",) * 4,
    *("int64", "int32", "uint32", "int64", "int64", "int64"),
    *DIMS_PARAMETERS,
)
_PARTS_PARAMETERS = ("pointer", "pointer", "int64", *DIMS_PARAMETERS)
_TENSOR_PARAMETERS = (*("pointer",) * 4, "int64", "int32", *DIMS_PARAMETERS)

_IN_FLIGHT = 4
"""``kInFlight`` of csrc/quantize.cu."""

_BLOCKS_PER_SM = 4
"""Blocks that fit an SM at once: each first reads what all of them found."""


def plan_quantize(
    views: Sequence[View | None], gpu: Gpu, dtype: str, granularity: str | None
) -> CallPlan:
    """How ``quantize`` computes its results; the arguments were checked.

    Args:
        views: x, given scale, and one that is always absent.
        gpu: where to run.
        dtype: as the operation.
        granularity: as the operation; None with a given scale.

    Raises:
        UnsupportedError: rows that share a scale are too long, or tensors lie in too many
            dimensions.
    """
    x, given, _ = views
    if x is None:
        raise UnsupportedError("quantizes x, which is absent")
    if granularity == "tensor":
        return _plan_tensor(x, gpu, dtype)
    sink = sink_of(dtype, granularity, given is not None)
    rows = rows_of(x)
    width = access_width([rows], [], rows.columns)
    layout = row_layout(
        rows.count,
        rows.columns,
        width,
        gpu,
        element_bytes=x.dtype.itemsize,
        joins=sink.joins,
        groups=sink.groups,
    )
    results = sink.results(x.shape, x.dtype)
    scales = _RESULTS + 1 if len(results) == 2 else _ABSENT
    flag = str(len(rows.axes) <= 1).lower()
    arguments = (
        layout.name(rows.columns // width),
        sink.name,
        KERNEL_FLOATS[x.dtype],
        str(width),
        flag,
    )
    kernel = f"fusedops::quantize_rows<{', '.join(arguments)}>"
    grid_rows = sink.grid_rows(rows)
    constants = (
        *(rows.count, rows.columns // width, layout.parts, given_stride(given), grid_rows),
        *(rows.inner, *dims_constants(rows.axes, "dimensions")),
    )
    if rows.count == 0 or (rows.columns == 0 and scales == _ABSENT):
        return CallPlan(results)
    tensors = (_X, _GIVEN, _RESULTS, scales)
    launch = layout.launch(_SOURCE, kernel, _ROWS_PARAMETERS, tensors, constants, grid_rows)
    return CallPlan(results, (launch,))


def _plan_tensor(x: View, gpu: Gpu, dtype: str) -> CallPlan:
    """One scale: every block's largest magnitude, then all blocks join these."""
    struct_name, torch_dtype = FORMATS[dtype]
    rows = rows_of(x)
    width = access_width([rows], [], rows.columns)
    # Packs as the innermost dimension: a contiguous tensor then has no other.
    axes = coalesce([*x.axes[:-1], (rows.columns // width, rows.inner * width)])
    count = element_count(axes)
    dims = dims_constants(axes, "dimensions")
    blocks = ceil_div(count, THREADS * _IN_FLIGHT)
    blocks = min(max(blocks, 1), _BLOCKS_PER_SM * gpu.sms)
    element = f"{KERNEL_FLOATS[x.dtype]}, {width}, {str(len(axes) <= 1).lower()}"
    largest = f"fusedops::largest_parts<{element}>"
    quantize = f"fusedops::quantize_tensor<fusedops::{struct_name}, {element}>"
    work = _RESULTS + 2
    launches = (
        Launch(
            CudaProgram(_SOURCE, (largest,)),
            largest,
            _PARTS_PARAMETERS,
            (_X, work),
            (count, *dims),
            (blocks, 1),
        ),
        Launch(
            CudaProgram(_SOURCE, (quantize,)),
            quantize,
            _TENSOR_PARAMETERS,
            (_X, work, _RESULTS, _RESULTS + 1),
            (count, blocks, *dims),
            (blocks, 1),
        ),
    )
    return CallPlan(((x.shape, torch_dtype), ((), torch.float32)), launches, 4 * blocks)


_CALL = CudaCall(plan_quantize)

Split = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]


def _quantize(x: Tensor, dtype: str, granularity: str) -> Split:
    return (x, None, ABSENT), (dtype, granularity)


def _quantize_static(x: Tensor, scale: Tensor, dtype: str) -> Split:
    return (x, scale, ABSENT), (dtype, None)


def _two(results: Sequence[Tensor], options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    dtype, granularity = options
    if granularity == "tensor":
        return results[0], results[1]
    q, scale = quantized_result(results, sink_of(dtype, granularity, False))
    return q, scale


QUANTIZE = Served(_CALL, _quantize, _two)
QUANTIZE_STATIC = Served(_CALL, _quantize_static, first_result)
