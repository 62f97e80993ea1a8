"""RMSNorm, residual add + RMSNorm and LayerNorm by csrc/norm.cu, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import DIMS_PARAMETERS, Gpu, View, dims_constants
from fusedops.providers.cuda_rows import KERNEL_FLOATS, access_width, row_layout, rows_of
from fusedops.providers.cuda_sinks import (
    ABSENT,
    Served,
    first_result,
    float32_bits,
    given_stride,
    quantized_results,
    sink_of,
)

__all__ = [
    "FUSED_ADD_RMS_NORM",
    "FUSED_ADD_RMS_NORM_",
    "FUSED_ADD_RMS_NORM_QUANTIZE",
    "LAYER_NORM",
    "LAYER_NORM_QUANTIZE",
    "RMS_NORM",
    "RMS_NORM_QUANTIZE",
    "plan_norm",
]

_SOURCE = "norm.cu"
_X, _RESIDUAL, _WEIGHT, _BIAS, _GIVEN, _ABSENT = range(6)
_RESULTS = 6
"""Place of the first result among the tensors of a launch."""

_PARAMETERS = (
    *("pointer",) * 8,
    *("int64", "int32", "uint32", "uint32", "uint32", "int32", "int64", "int64", "int64", "int64"),
    *DIMS_PARAMETERS,
    *DIMS_PARAMETERS,
)

_ROUND_TWICE, _ROUND_FIRST, _ROUND_ONCE = range(3)
"""``Order`` of csrc/norm.cu."""


def _order(x: View, weight: View, weight_offset: float, round_before_weight: bool) -> int:
    if x.dtype is torch.float32 or not round_before_weight:
        return _ROUND_ONCE
    return _ROUND_TWICE if weight.dtype is x.dtype and weight_offset == 0 else _ROUND_FIRST


def _packs_at_least(adds: bool, is_centered: bool, is_plain: bool) -> int:
    """Packs a thread of many rows.

    Threads that go through a row once more, or store their results bit by bit, want several packs
    at a time; where memory is all that is waited for, more threads have more in flight. 16384 x
    4096 bfloat16 on an H200 with 4, 2 and 1 packs: 66.2, 65.4 and 70.1 us; with a residual 132.7,
    132.1 and 131.0; LayerNorm 67.1, 81.7 and 83.2; RMSNorm to e4m3 48.7, 53.1 and 68.0.
    """
    if is_centered or not is_plain:
        return 4
    return 1 if adds else 2


def plan_norm(
    views: Sequence[View | None],
    gpu: Gpu,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    is_centered: bool,
    in_place: bool,
    dtype: str | None,
    granularity: str | None,
) -> CallPlan:
    """How a norm computes its results; the arguments were checked.

    Args:
        views: x, residual, weight, bias, given scale, and one that is always absent.
        gpu: where to run.
        eps, weight_offset, round_before_weight: as ``rms_norm``.
        is_centered: LayerNorm.
        in_place: y replaces x and the sum the residual.
        dtype, granularity: of ``quantize``; None stores y as it is.

    Returns:
        a plan with the results y or q; scales, where they are computed; the sum, where there is a
        residual. None of them where they replace arguments.

    Raises:
        UnsupportedError: rows are too long for registers, or tensors lie in too many dimensions.
    """
    x, residual, weight, bias, given, _ = views
    if x is None:
        raise UnsupportedError("normalises x, which is absent")
    sink = sink_of(dtype, granularity, given is not None)
    walked = [rows_of(view) for view in (x, residual) if view is not None]
    rows = walked[0]
    vectors = [view for view in (weight, bias) if view is not None]
    for view in vectors:
        if view.shape[0] > 1 and view.strides[0] != 1:
            raise UnsupportedError(
                f"reads a contiguous weight and bias, got one with stride {view.strides[0]}"
            )
    width = access_width(walked, vectors, rows.columns)
    layout = row_layout(
        rows.count,
        rows.columns,
        width,
        gpu,
        element_bytes=x.dtype.itemsize,
        joins=True,
        groups=sink.groups,
        packs_at_least=_packs_at_least(residual is not None, is_centered, dtype is None),
    )
    results = () if in_place else sink.results(x.shape, x.dtype)
    scales = _RESULTS + 1 if len(results) == 2 else _ABSENT
    out, total = (_X, _RESIDUAL) if in_place else (_RESULTS, _RESULTS + len(results))
    if residual is None:
        total = _ABSENT
    elif not in_place:
        results = (*results, (x.shape, x.dtype))
    element = KERNEL_FLOATS[x.dtype]
    weight_element = element if weight is None else KERNEL_FLOATS[weight.dtype]
    bias_element = weight_element if bias is None else KERNEL_FLOATS[bias.dtype]
    flag = str(all(len(each.axes) <= 1 for each in walked)).lower()
    if is_centered:
        norm = "fusedops::Layer"
    else:
        order = _order(x, weight or x, weight_offset, round_before_weight)
        norm = f"fusedops::Rms<{str(residual is not None).lower()}, {order}>"
    arguments = (
        layout.name(rows.columns // width),
        norm,
        sink.name,
        element,
        weight_element,
        bias_element,
        str(width),
        flag,
    )
    kernel = f"fusedops::norm<{', '.join(arguments)}>"
    grid_rows = sink.grid_rows(rows)
    constants = (
        *(rows.count, rows.columns // width, float32_bits(1.0 / max(rows.columns, 1))),
        *(float32_bits(eps), float32_bits(weight_offset)),
        *(int(in_place), given_stride(given), grid_rows, rows.inner, walked[-1].inner),
        *dims_constants(rows.axes, "dimensions of x"),
        *dims_constants(walked[-1].axes, "dimensions of the residual"),
    )
    if rows.count == 0 or (rows.columns == 0 and scales == _ABSENT):
        return CallPlan(results)
    tensors = (_X, _RESIDUAL, _WEIGHT, _BIAS, _GIVEN, out, total, scales)
    launch = layout.launch(_SOURCE, kernel, _PARAMETERS, tensors, constants, grid_rows)
    return CallPlan(results, (launch,))


_NORM = CudaCall(plan_norm)

Tensors = tuple[Tensor | None, ...]
Options = tuple[Any, ...]


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool
) -> tuple[Tensors, Options]:
    tensors = (x, None, weight, None, None, ABSENT)
    return tensors, (eps, offset, rounds, False, False, None, None)


def _rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounds: bool,
    dtype: str,
    granularity: str,
) -> tuple[Tensors, Options]:
    tensors = (x, None, weight, None, scale, ABSENT)
    return tensors, (eps, offset, rounds, False, False, dtype, granularity)


def _fused_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    rounds: bool,
    in_place: bool = False,
) -> tuple[Tensors, Options]:
    tensors = (x, residual, weight, None, None, ABSENT)
    return tensors, (eps, offset, rounds, False, in_place, None, None)


def _fused_add_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    eps: float,
    offset: float,
    rounds: bool,
    dtype: str,
    granularity: str,
) -> tuple[Tensors, Options]:
    tensors = (x, residual, weight, None, scale, ABSENT)
    return tensors, (eps, offset, rounds, False, False, dtype, granularity)


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensors, Options]:
    return (x, None, weight, bias, None, ABSENT), (eps, 0.0, False, True, False, None, None)


def _layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    dtype: str,
    granularity: str,
) -> tuple[Tensors, Options]:
    tensors = (x, None, weight, bias, scale, ABSENT)
    return tensors, (eps, 0.0, False, True, False, dtype, granularity)


def _two(results: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor]:
    return results[0], results[1]


def _none(results: Sequence[Tensor], options: Options) -> None:
    return None


def _quantized_with_sum(results: Sequence[Tensor], options: Options) -> list[Tensor]:
    *stored, total = results
    q, *scale = quantized_results(stored, options)
    return [q, total, *scale]


RMS_NORM = Served(_NORM, _rms_norm, first_result)
RMS_NORM_QUANTIZE = Served(_NORM, _rms_norm_quantize, quantized_results)
FUSED_ADD_RMS_NORM = Served(_NORM, _fused_add, _two)
FUSED_ADD_RMS_NORM_ = Served(_NORM, partial(_fused_add, in_place=True), _none)
FUSED_ADD_RMS_NORM_QUANTIZE = Served(_NORM, _fused_add_quantize, _quantized_with_sum)
LAYER_NORM = Served(_NORM, _layer_norm, first_result)
LAYER_NORM_QUANTIZE = Served(_NORM, _layer_norm_quantize, quantized_results)
