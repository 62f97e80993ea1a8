"""Norms, gated activations and transposes that quantize their result, in kernels of their own.

Each is the composition of the two operations, bit for bit: ``rms_norm_quantize`` is ``quantize`` of
what ``rms_norm`` returns, rounded to the dtype of ``x`` in between, as a model's own order has it.
Where no provider has a kernel, the two run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    require_choice,
    require_dtype,
    require_same_device,
    require_shape,
)
from fusedops.epilogue.outputs import group_scale_empty
from fusedops.errors import ConfigError
from fusedops.ops.activation import check_act_and_mul
from fusedops.ops.norm import check_fused_add_rms_norm, check_layer_norm, check_rms_norm
from fusedops.ops.op import Op, entry
from fusedops.ops.quantize import FORMATS, SCALE_ADVICE, require_scale_values
from fusedops.ops.transpose import check_transpose

__all__ = [
    "act_and_mul_quantize",
    "fused_add_rms_norm_quantize",
    "layer_norm_quantize",
    "rms_norm_quantize",
    "transpose_quantize",
]

_DYNAMIC = ("token", "block128")
_GIVEN = ("token", "tensor")

_QUANTIZE = entry("quantize")
_QUANTIZE_STATIC = entry("quantize_static")


def _check_storage(
    op: str, x: Tensor, shape: tuple[int, ...], scale: Tensor | None, dtype: str, granularity: str
) -> None:
    """Check how a result of ``shape`` is to be stored."""
    require_choice(op, "dtype", dtype, tuple(FORMATS))
    if scale is None:
        if granularity == "tensor":
            raise ConfigError(
                f"{op}: granularity='tensor' needs a given scale, because a dynamic one follows "
                "from the whole result. Pass scale, use granularity token or block128, or call "
                "quantize() on the result."
            )
        require_choice(op, "granularity", granularity, _DYNAMIC)
        return
    require_choice(op, "granularity of a given scale", granularity, _GIVEN)
    require_dtype(op, "scale", scale, (torch.float32,))
    require_same_device(op, "x", x, scale=scale)
    if granularity == "tensor":
        require_shape(op, "scale", scale, [()], "one scale for granularity='tensor'")
    else:
        rows = math.prod(shape[:-1])
        require_shape(
            op, "scale", scale, [(rows,), shape[:-1]], "one scale for each row of the result"
        )


def _stored(y: Tensor, scale: Tensor | None, dtype: str, granularity: str) -> list[Tensor]:
    if scale is not None:
        return [_QUANTIZE_STATIC(y, scale, dtype)]
    return list(_QUANTIZE(y, dtype, granularity))


def _fake_stored(y: Tensor, scale: Tensor | None, dtype: str, granularity: str) -> list[Tensor]:
    q = y.new_empty(y.shape, dtype=FORMATS[dtype].dtype)
    if scale is not None:
        return [q]
    if granularity == "token":
        return [q, y.new_empty(y.shape[:-1], dtype=torch.float32)]
    return [q, group_scale_empty(y.shape[:-1], y.shape[-1], torch.float32, y.device)]


Shape = tuple[int, ...]


def _same_shape(shape: Shape) -> Shape:
    return shape


def _halved(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-1] // 2)


def _turned(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _define(
    plain: str,
    check_plain: Callable[..., None],
    tensors: str,
    options: str = "",
    stored_shape: Callable[[Shape], Shape] = _same_shape,
) -> Callable[..., Any]:
    """Define ``<plain>_quantize``: the arguments of ``plain``, and how its result is stored.

    The results are q, the other results of ``plain``, and the scale where it is computed.

    Args:
        plain: the operation whose first result is quantized.
        check_plain: checks its arguments, behind the name for errors.
        tensors: its tensors as in its schema; the scale follows them.
        options: its other arguments; the storage follows them.
        stored_shape: the shape of what is quantized, of that of x.
    """
    count = len(tensors.split(","))
    name = f"{plain}_quantize"
    run_plain = entry(plain)

    def split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | None, str, str]:
        """The arguments of ``plain``, and how the result is stored."""
        *front, dtype, granularity = args
        return (*front[:count], *front[count + 1 :]), front[count], dtype, granularity

    def check(*args: Any) -> None:
        plain_args, scale, dtype, granularity = split(args)
        x = args[0]
        check_plain(name, *plain_args)
        require_dtype(name, "x", x, ACTIVATION_DTYPES)
        _check_storage(name, x, stored_shape(x.shape), scale, dtype, granularity)

    def check_values(*args: Any) -> None:
        scale = split(args)[1]
        if scale is not None:
            require_scale_values(name, "scale", scale, SCALE_ADVICE)

    def compose(
        results: Any, store: Callable[..., list[Tensor]], storage: list[Any]
    ) -> list[Tensor]:
        first, *others = results if isinstance(results, tuple) else (results,)
        q, *scale = store(first, *storage)
        return [q, *others, *scale]

    def reference(*args: Any) -> list[Tensor]:
        plain_args, *storage = split(args)
        return compose(run_plain(*plain_args), _stored, storage)

    def fake(*args: Any) -> list[Tensor]:
        plain_args, *storage = split(args)
        return compose(run_plain(*plain_args), _fake_stored, storage)

    arguments = [tensors, "Tensor? scale", options, "str dtype", "str granularity"]
    Op(
        f"{name}({', '.join(filter(None, arguments))}) -> Tensor[]",
        check=check,
        check_values=check_values,
        fake=fake,
        reference=reference,
    )
    return entry(name)


_RMS = "float eps, float weight_offset, bool round_before_weight"
_OP_RMS_NORM = _define("rms_norm", check_rms_norm, "Tensor x, Tensor weight", _RMS)
_OP_FUSED_ADD_RMS_NORM = _define(
    "fused_add_rms_norm",
    check_fused_add_rms_norm,
    "Tensor x, Tensor residual, Tensor weight",
    _RMS,
)
_OP_LAYER_NORM = _define(
    "layer_norm", check_layer_norm, "Tensor x, Tensor? weight, Tensor? bias", "float eps"
)
_OP_ACT_AND_MUL = _define("act_and_mul", check_act_and_mul, "Tensor x", "str act", _halved)
_OP_TRANSPOSE = _define("transpose", check_transpose, "Tensor x", stored_shape=_turned)


def _with_scale(results: list[Tensor], scale: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(results) if scale is None else (*results, scale)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    dtype: str = "e4m3",
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``quantize(rms_norm(x))``: what an 8-bit linear layer behind a norm takes.

    Args:
        x, weight, eps, weight_offset, round_before_weight: as in ``rms_norm``.
        dtype: ``"e4m3"`` or ``"int8"``.
        granularity: ``"token"`` or ``"block128"``; with a given scale ``"token"`` or ``"tensor"``.
        scale: as in ``quantize``; None computes it.

    Returns:
        (q, scale), as ``quantize`` returns them.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.
    """
    options = (eps, weight_offset, round_before_weight, dtype, granularity)
    q, scale = _with_scale(_OP_RMS_NORM(x, weight, scale, *options), scale)
    return q, scale


def fused_add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    dtype: str = "e4m3",
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_add_rms_norm`` whose normalised result is quantized; the new residual is not.

    Args:
        x, residual, weight, eps, weight_offset, round_before_weight: as in ``fused_add_rms_norm``.
        dtype, granularity, scale: as in ``rms_norm_quantize``.

    Returns:
        (q, new_residual, scale).

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.
    """
    options = (eps, weight_offset, round_before_weight, dtype, granularity)
    results = _OP_FUSED_ADD_RMS_NORM(x, residual, weight, scale, *options)
    q, total, scale = _with_scale(results, scale)
    return q, total, scale


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: str = "e4m3",
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``quantize(layer_norm(x))``.

    Args:
        x, weight, bias, eps: as in ``layer_norm``.
        dtype, granularity, scale: as in ``rms_norm_quantize``.

    Returns:
        (q, scale), as ``quantize`` returns them.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.
    """
    results = _OP_LAYER_NORM(x, weight, bias, scale, eps, dtype, granularity)
    q, scale = _with_scale(results, scale)
    return q, scale


def act_and_mul_quantize(
    x: Tensor,
    act: str = "silu",
    *,
    dtype: str = "e4m3",
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``quantize(act_and_mul(x))``: what the down projection of an 8-bit MLP takes.

    Args:
        x, act: as in ``act_and_mul``.
        dtype, granularity, scale: as in ``rms_norm_quantize``, of the (..., D) result.

    Returns:
        (q, scale), as ``quantize`` returns them.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: x requires grad while grad mode is on.
    """
    q, scale = _with_scale(_OP_ACT_AND_MUL(x, scale, act, dtype, granularity), scale)
    return q, scale


def transpose_quantize(
    x: Tensor,
    *,
    dtype: str = "e4m3",
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``quantize(transpose(x))``: an 8-bit operand whose other dimension is multiplied over.

    Args:
        x: (..., R, C), float32, bfloat16 or float16, any strides and any batch dimensions.
        dtype, granularity: as in ``rms_norm_quantize``. A row of the result is a column of ``x``:
            ``"token"`` is a scale for each column, ``"block128"`` one for 128 consecutive rows of a
            column.
        scale: as in ``quantize``, of the (..., C, R) result; None computes it.

    Returns:
        (q, scale): q is (..., C, R), contiguous; both are as ``quantize`` returns them.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: x requires grad while grad mode is on.
    """
    q, scale = _with_scale(_OP_TRANSPOSE(x, scale, dtype, granularity), scale)
    return q, scale
