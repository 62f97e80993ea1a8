"""Checks and fakes that several operation families share.

Only ``require_within`` reads values, so it is for CPU tensors; on a GPU it would synchronise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_dim,
    require_dtype,
    require_same_device,
    require_shape,
)
from fusedops.errors import LayoutError, PositionError
from fusedops.ops.overlap import overlaps_itself

__all__ = [
    "INDEX_DTYPES",
    "empty_contiguous",
    "require_per_token",
    "require_tokens",
    "require_within",
    "require_writable",
]

INDEX_DTYPES = (torch.int32, torch.int64)
"""Dtypes of token ids and positions."""

_LIST_LIMIT = 64
"""Up to this many values a Python loop over ``tolist()`` is quicker than a reduction and a read."""


def empty_contiguous(x: Tensor) -> Tensor:
    """An empty contiguous tensor with the shape, dtype and device of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _first_outside(values: Tensor, low: int, high: int) -> int | None:
    if values.numel() <= _LIST_LIMIT:
        for value in values.flatten().tolist():
            if not low <= value < high:
                return int(value)
        return None
    smallest, largest = (int(v) for v in torch.aminmax(values))
    if smallest < low:
        return smallest
    return largest if largest >= high else None


def require_within(op: str, name: str, values: Tensor, low: int, high: int, table: str) -> None:
    """Raise PositionError unless every value lies in [low, high); ``table`` says what sets it."""
    outside = _first_outside(values, low, high)
    if outside is not None:
        raise PositionError(
            f"{op}: {name} holds {outside}; accepted are {low} to {high - 1} ({table})."
        )


def require_writable(op: str, name: str, tensor: Tensor) -> None:
    """Raise LayoutError where several elements of an in-place argument share one memory cell."""
    if tensor.is_contiguous():
        return
    shape, stride = tensor.shape, tensor.stride()
    repeated = any(n > 1 and step == 0 for n, step in zip(shape, stride, strict=True))
    # Symbolic sizes are looked at again when the compiled code runs, as plain ones.
    if repeated or (
        all(type(n) is int for n in (*shape, *stride)) and overlaps_itself(shape, stride)
    ):
        raise LayoutError(
            f"{op}: {name} is {describe(tensor)} with strides {tuple(tensor.stride())}: it is "
            f"written in place, so its elements may not share memory. Pass {name}.contiguous()."
        )


def require_tokens(op: str, first: str, x: Tensor, second: str, other: Tensor) -> None:
    """Check two (T, heads, D) activations: dimensions, dtype and device; not yet their sizes."""
    if x.dtype not in ACTIVATION_DTYPES:
        require_dtype(op, first, x, ACTIVATION_DTYPES)
    if x.dim() != 3:
        require_dim(op, first, x, 3, exactly=True)
    if other.dim() != 3:
        require_dim(op, second, other, 3, exactly=True)
    if other.dtype is not x.dtype:
        require_dtype(op, second, other, (x.dtype,), f"that of {first}")
    if other.device != x.device:
        require_same_device(op, first, x, **{second: other})


def require_per_token(op: str, name: str, values: Tensor, x: Tensor) -> None:
    """Check that ``values`` holds one value for each of the T tokens of ``x`` (T, ...)."""
    if values.dim() != 1 or values.shape[0] != x.shape[0]:
        require_shape(op, name, values, [(x.shape[0],)], "one value for each token")
    if values.device != x.device:
        require_same_device(op, "the tokens' tensor", x, **{name: values})
