"""``act_and_mul`` by csrc/activation.cu, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import DIMS_PARAMETERS, Gpu, View, dims_constants
from fusedops.providers.cuda_rows import KERNEL_FLOATS, access_width, row_layout, rows_of
from fusedops.providers.cuda_sinks import (
    ABSENT,
    Served,
    first_result,
    given_stride,
    quantized_results,
    sink_of,
)

__all__ = ["ACT_AND_MUL", "ACT_AND_MUL_QUANTIZE", "KERNEL_ACTIVATIONS", "plan_act_and_mul"]

_SOURCE = "activation.cu"
_X, _GIVEN, _ABSENT = range(3)
_RESULTS = 3
_PARAMETERS = (
    *("pointer",) * 4,
    *("int64", "int32", "uint32", "int64", "int64", "int64"),
    *DIMS_PARAMETERS,
)
_PACKS = 2
"""Packs a thread, each of which takes two loads."""

KERNEL_ACTIVATIONS = {
    "identity": "Identity",
    "relu": "Relu",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "silu": "Silu",
    "quick_gelu": "QuickGelu",
    "relu2": "Relu2",
    "sigmoid": "Sigmoid",
}
"""Activations by name, and their structs in csrc/include/activations.cuh."""


def plan_act_and_mul(
    views: Sequence[View | None], gpu: Gpu, act: str, dtype: str | None, granularity: str | None
) -> CallPlan:
    """How ``act_and_mul`` computes its result; the arguments were checked.

    Args:
        views: x, given scale, and one that is always absent.
        gpu: where to run.
        act: as the operation.
        dtype, granularity: of ``quantize``; None stores the product as it is.

    Raises:
        UnsupportedError: rows that share a scale are too long, or x lies in too many dimensions.
    """
    x, given, _ = views
    if x is None:
        raise UnsupportedError("activates x, which is absent")
    sink = sink_of(dtype, granularity, given is not None)
    rows = rows_of(x)
    columns = rows.columns // 2
    width = access_width([rows], [], columns)
    layout = row_layout(
        rows.count,
        columns,
        width,
        gpu,
        element_bytes=x.dtype.itemsize,
        joins=sink.joins,
        groups=sink.groups,
        packs_at_most=_PACKS,
    )
    results = sink.results((*x.shape[:-1], columns), x.dtype)
    scales = _RESULTS + 1 if len(results) == 2 else _ABSENT
    act_struct = f"fusedops::{KERNEL_ACTIVATIONS[act]}"
    flag = str(len(rows.axes) <= 1).lower()
    arguments = (
        layout.name(columns // width),
        act_struct,
        sink.name,
        KERNEL_FLOATS[x.dtype],
        str(width),
        flag,
    )
    kernel = f"fusedops::act_and_mul<{', '.join(arguments)}>"
    grid_rows = sink.grid_rows(rows)
    constants = (
        *(rows.count, columns // width, layout.parts, given_stride(given), grid_rows, rows.inner),
        *dims_constants(rows.axes, "dimensions"),
    )
    if rows.count == 0 or (columns == 0 and scales == _ABSENT):
        return CallPlan(results)
    tensors = (_X, _GIVEN, _RESULTS, scales)
    launch = layout.launch(_SOURCE, kernel, _PARAMETERS, tensors, constants, grid_rows)
    return CallPlan(results, (launch,))


_CALL = CudaCall(plan_act_and_mul)

Split = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]


def _act_and_mul(x: Tensor, act: str) -> Split:
    return (x, None, ABSENT), (act, None, None)


def _act_and_mul_quantize(
    x: Tensor, scale: Tensor | None, act: str, dtype: str, granularity: str
) -> Split:
    return (x, scale, ABSENT), (act, dtype, granularity)


ACT_AND_MUL = Served(_CALL, _act_and_mul, first_result)
ACT_AND_MUL_QUANTIZE = Served(_CALL, _act_and_mul_quantize, quantized_results)
