"""Argument checks shared by every operation: one wording, and no bad input ever reaches a kernel.

They read shapes, strides, dtypes and devices only, so they also run under FakeTensor with symbolic
sizes. ``op`` is the operation's name, ``name`` the argument's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.errors import ConfigError, DeviceError, DTypeError, LayoutError, ShapeError

__all__ = [
    "ACTIVATION_DTYPES",
    "describe",
    "require_choice",
    "require_dim",
    "require_dtype",
    "require_last_dim_contiguous",
    "require_same_device",
    "require_shape",
]

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations in every floating-point operation."""


def describe(tensor: Tensor) -> str:
    """``bfloat16 (4, 4096) on cuda:0``: how error messages name a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} on {tensor.device}"


def require_dtype(op: str, name: str, tensor: Tensor, accepted: Sequence[torch.dtype]) -> None:
    """Raise DTypeError unless ``tensor`` has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        names = ", ".join(str(d).removeprefix("torch.") for d in accepted)
        raise DTypeError(
            f"{op}: {name} is {describe(tensor)}; accepted dtypes: {names}. Cast {name} first."
        )


def require_dim(op: str, name: str, tensor: Tensor, minimum: int, exactly: bool = False) -> None:
    """Raise ShapeError unless ``tensor`` has at least (or exactly) ``minimum`` dimensions."""
    if tensor.dim() < minimum or (exactly and tensor.dim() != minimum):
        bound = "exactly" if exactly else "at least"
        raise ShapeError(
            f"{op}: {name} is {describe(tensor)}; it needs {bound} {minimum} dimension(s)."
        )


def require_shape(
    op: str, name: str, tensor: Tensor, accepted: Sequence[Sequence[int]], why: str
) -> None:
    """Raise ShapeError unless ``tensor`` has one of the accepted shapes; ``why`` explains them."""
    shape = tuple(tensor.shape)
    for candidate in accepted:
        if len(shape) == len(candidate) and all(
            a == b for a, b in zip(shape, candidate, strict=True)
        ):
            return
    names = " or ".join(str(tuple(candidate)) for candidate in accepted)
    raise ShapeError(f"{op}: {name} is {describe(tensor)}; accepted shape: {names} ({why}).")


def require_same_device(op: str, first: str, anchor: Tensor, **others: Tensor | None) -> None:
    """Raise DeviceError unless every tensor lives on ``anchor``'s device."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != anchor.device:
            raise DeviceError(
                f"{op}: {first} is on {anchor.device} but {name} is on {tensor.device}; "
                "move both to one device."
            )


def require_last_dim_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Raise LayoutError unless consecutive elements of a row are consecutive in memory."""
    if tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise LayoutError(
            f"{op}: {name} is {describe(tensor)} with strides {tuple(tensor.stride())}; its last "
            f"dimension must have stride 1. Call {name}.contiguous() first."
        )


def require_choice(op: str, name: str, value: str, accepted: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of the accepted words."""
    if value not in accepted:
        raise ConfigError(f"{op}: {name}={value!r}; accepted are {', '.join(accepted)}.")
