"""Argument checks shared by every operation: one wording, and no bad input ever reaches a kernel.

They read types, shapes, strides, dtypes and devices only, so they also run under FakeTensor with
symbolic sizes. ``op`` is the operation's name, ``name`` the argument's.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)

__all__ = [
    "ACTIVATION_DTYPES",
    "describe",
    "describe_value",
    "require_argument_types",
    "require_bool",
    "require_choice",
    "require_dim",
    "require_dtype",
    "require_finite",
    "require_integer",
    "require_last_dim_contiguous",
    "require_one_dtype",
    "require_same_device",
    "require_shape",
    "require_tensor",
    "require_updatable",
]

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations in every floating-point operation."""


def describe(tensor: Tensor) -> str:
    """``bfloat16 (4, 4096) on cuda:0``: how error messages name a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} on {tensor.device}"


def describe_value(value: object) -> str:
    """``2.0 (float)``: how error messages name an argument that is no tensor."""
    if isinstance(value, Tensor):
        if not _is_dense(value):  # a nested one has no shape to tell
            return f"a tensor of layout {_layout(value)}"
        return f"a tensor, {describe(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _layout(tensor: Tensor) -> str:
    name = str(tensor.layout).removeprefix("torch.")
    return f"{name}, nested" if tensor.is_nested else name


def _require_dense(op: str, name: str, tensor: Tensor) -> None:
    if not _is_dense(tensor):
        convert = "to_padded_tensor(padding)" if tensor.is_nested else "to_dense()"
        raise LayoutError(
            f"{op}: {name} is a tensor of layout {_layout(tensor)}; accepted: a torch.Tensor of "
            f"layout strided (dense), not nested. Call {name}.{convert} first."
        )


def require_tensor(op: str, name: str, value: object, optional: bool = False) -> None:
    """Check that ``value`` is a dense tensor (or None, where that is accepted).

    Raises:
        DTypeError: it is no tensor.
        LayoutError: it is sparse or nested.
    """
    if isinstance(value, Tensor):
        _require_dense(op, name, value)
    elif not (optional and value is None):
        accepted = "a torch.Tensor or None" if optional else "a torch.Tensor"
        raise DTypeError(f"{op}: {name} is {describe_value(value)}; accepted: {accepted}.")


def require_bool(op: str, **options: object) -> None:
    """Raise ConfigError unless every option is True or False."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{op}: {name} is {describe_value(value)}; accepted: True or False.")


def require_integer(op: str, name: str, value: object, minimum: int) -> None:
    """Raise ConfigError unless ``value`` is an integer of at least ``minimum``."""
    if not _is_integer(value) or not value >= minimum:  # type: ignore[operator]
        raise ConfigError(
            f"{op}: {name} is {describe_value(value)}; accepted are integers >= {minimum}."
        )


def require_finite(op: str, name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a finite number."""
    if not _is_number(value) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ConfigError(f"{op}: {name} is {describe_value(value)}; accepted are finite numbers.")


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_integer(value: object) -> bool:
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def _is_int64(value: object) -> bool:
    # A symbolic one has 64 bits, and comparing it would guard on its value.
    return _is_integer(value) and (
        isinstance(value, torch.SymInt) or -(2**63) <= value < 2**63  # type: ignore[operator]
    )


def _is_number(value: object) -> bool:
    return isinstance(value, torch.SymFloat) or (
        isinstance(value, (numbers.Real, torch.SymInt)) and not isinstance(value, bool)
    )


def _is_float64(value: object) -> bool:
    if not _is_number(value):
        return False
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            return False
    return True


def _is_list_of(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(kind, value))


def _or_none(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or kind(value)


_SCHEMA_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "Tensor": (_is_tensor, "a torch.Tensor"),
    "Optional[Tensor]": (_or_none(_is_tensor), "a torch.Tensor or None"),
    "List[Tensor]": (_is_list_of(_is_tensor), "a list of torch.Tensor"),
    "List[Optional[Tensor]]": (
        _is_list_of(_or_none(_is_tensor)),
        "a list of torch.Tensor and None",
    ),
    "str": (lambda value: isinstance(value, str), "a str"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (_is_int64, "an integer of 64 bits"),
    "float": (_is_float64, "a number that a float64 holds"),
    "Optional[List[int]]": (_or_none(_is_list_of(_is_int64)), "integers of 64 bits or None"),
    "Optional[List[float]]": (_or_none(_is_list_of(_is_float64)), "numbers or None"),
    "ScalarType": (lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
}
"""Each type in the operators' schemas: whether a value is of it, and what messages call it."""


def require_argument_types(op: str, schema: Any, args: Sequence[object]) -> None:
    """Raise for the first argument that is not of the type that a torch schema gives it.

    Torch looks at types first, but its message speaks of its own internals. So this is called only
    once torch has refused a call, which costs the other calls nothing.

    Raises:
        DTypeError: something that is no tensor stands for one.
        LayoutError: a tensor is sparse or nested.
        ConfigError: an option is of the wrong type.
    """
    for argument, value in zip(schema.arguments, args, strict=False):
        kind = str(argument.real_type)
        is_accepted, words = _SCHEMA_TYPES[kind]
        if not is_accepted(value):
            error = DTypeError if "Tensor" in kind else ConfigError
            raise error(
                f"{op}: {argument.name} is {describe_value(value)}; accepted: {words}."
            ) from None
        if isinstance(value, Tensor):
            _require_dense(op, argument.name, value)
        for index, tensor in enumerate(value if isinstance(value, (list, tuple)) else ()):
            if isinstance(tensor, Tensor):
                _require_dense(op, f"{argument.name}[{index}]", tensor)


def require_dtype(
    op: str, name: str, tensor: Tensor, accepted: Sequence[torch.dtype], why: str = ""
) -> None:
    """Raise DTypeError unless ``tensor`` has one of the accepted dtypes; ``why`` explains them."""
    if tensor.dtype not in accepted:
        names = ", ".join(str(d).removeprefix("torch.") for d in accepted)
        raise DTypeError(
            f"{op}: {name} is {describe(tensor)}; accepted dtypes: {names}"
            f"{f' ({why})' if why else ''}. Cast {name} first."
        )


def require_one_dtype(op: str, **tensors: Tensor | None) -> None:
    """Raise DTypeError unless all the tensors that are given have one dtype."""
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if len({tensor.dtype for tensor in named.values()}) > 1:
        dtypes = ", ".join(f"{n} is {str(t.dtype)[6:]}" for n, t in named.items())
        raise DTypeError(f"{op}: {dtypes}; accepted: one dtype for all of them. Cast them first.")


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
    names = " or ".join(dict.fromkeys(str(tuple(candidate)) for candidate in accepted))
    raise ShapeError(f"{op}: {name} is {describe(tensor)}; accepted shape: {names} ({why}).")


def require_updatable(op: str, name: str, tensor: Tensor) -> None:
    """Raise UnsupportedError where torch would let nothing write ``tensor``, which ``op`` writes.

    Torch itself says so only at the write, when other arguments have been written already.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UnsupportedError(
            f"{op}: {name} is {describe(tensor)} and was made under torch.inference_mode(); it is "
            "written in place, which is accepted only under torch.inference_mode(). Call "
            f"{op} under it, or make {name} outside of it (under torch.no_grad(), say)."
        )


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
