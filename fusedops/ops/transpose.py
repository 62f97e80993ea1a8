"""``transpose``: swap the last two dimensions into a contiguous tensor, and cast on the way."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES, require_dim, require_dtype
from fusedops.errors import DTypeError
from fusedops.ops.op import Op, entry

__all__ = ["TRANSPOSE_DTYPES", "check_transpose", "transpose"]

TRANSPOSE_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.uint32,
    torch.int32,
    torch.float32,
    torch.complex32,
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.complex64,
)
"""Dtypes of 1, 2, 4 or 8 bytes with one element in each (``float4_e2m1fn_x2`` holds two)."""

_QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)

# Elements are moved, never read as numbers: an integer of the same size keeps every bit (the
# payload of a NaN too) and exists for every dtype.
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def transpose(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x.transpose(-1, -2)`` as a new contiguous tensor.

    Args:
        x: (..., R, C), any strides and any batch dimensions; a dtype of 1, 2, 4 or 8 bytes with one
            element in each: bool, every integer, float8, float16, bfloat16, float32, float64,
            complex32 and complex64.
        dtype: of the result; None keeps that of ``x``. Another one is a cast between float32,
            bfloat16 and float16, rounded once to nearest even: values beyond its range become
            infinite, and NaN stays NaN. ``transpose_quantize`` has 8 bits.

    Returns:
        (..., C, R), contiguous, never a view of ``x``. Without a cast it has the elements of ``x``
        bit for bit.

    Raises:
        ShapeError: ``x`` has fewer than two dimensions.
        DTypeError: ``x`` has another dtype, or no cast leads from it to ``dtype``.
        UnsupportedError: ``x`` requires grad while grad mode is on.
    """
    if dtype is None or (isinstance(x, Tensor) and x.dtype is dtype):
        moved: Tensor = _OP_TRANSPOSE(x)
        return moved
    cast: Tensor = _OP_TRANSPOSE_CAST(x, dtype)
    return cast


def check_transpose(op: str, x: Tensor) -> None:
    """Check the argument of ``transpose``; ``op`` is named in errors."""
    require_dim(op, "x", x, 2)
    require_dtype(op, "x", x, TRANSPOSE_DTYPES)


def _reference(x: Tensor) -> Tensor:
    carried = x.view(_CARRIER[x.element_size()])
    # clone, not contiguous(): of a view that was transposed before, contiguous() is x itself.
    moved = carried.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    return moved.view(x.dtype)


def _fake(x: Tensor) -> Tensor:
    *batch, rows, columns = x.shape
    return x.new_empty((*batch, columns, rows))


def _check_cast(x: Tensor, dtype: torch.dtype) -> None:
    require_dim("transpose", "x", x, 2)
    require_dtype("transpose", "x", x, ACTIVATION_DTYPES, f"those of a cast, here to {dtype}")
    if dtype not in ACTIVATION_DTYPES:
        accepted = ", ".join(map(str, ACTIVATION_DTYPES))
        advice = " Call transpose_quantize for 8 bits." if dtype in _QUANTIZED_DTYPES else ""
        raise DTypeError(f"transpose: dtype={dtype}; accepted are {accepted}.{advice}")


def _reference_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The narrower tensor is the one that is moved.
    if dtype.itemsize < x.dtype.itemsize:
        return _reference(x.to(dtype))
    moved = _reference(x)
    return moved.to(dtype)


def _fake_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    *batch, rows, columns = x.shape
    return x.new_empty((*batch, columns, rows), dtype=dtype)


Op(
    "transpose(Tensor x) -> Tensor",
    check=partial(check_transpose, "transpose"),
    fake=_fake,
    reference=_reference,
)

Op(
    "transpose_cast(Tensor x, ScalarType dtype) -> Tensor",
    check=_check_cast,
    fake=_fake_cast,
    reference=_reference_cast,
    public="transpose",
)

_OP_TRANSPOSE = entry("transpose")
_OP_TRANSPOSE_CAST = entry("transpose_cast")
