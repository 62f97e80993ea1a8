"""Normalisation over the last dimension: RMSNorm, residual add + RMSNorm, LayerNorm.

Rounding points of RMSNorm (statistics are float32 always):

* ``round_before_weight=True`` (Llama, Qwen, Mistral): the normalised value is rounded to the dtype
  of ``x``, then multiplied by the weight with a second rounding. With a float32 weight under a half
  precision ``x``, or with a ``weight_offset``, that product is float32 before it is rounded.
* ``round_before_weight=False`` (Gemma, with ``weight_offset=1.0``): ``weight + weight_offset`` and
  the product are float32 and the result is rounded once.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_dim,
    require_dtype,
    require_finite,
    require_same_device,
    require_shape,
)
from fusedops.errors import ConfigError, DTypeError
from fusedops.ops.guards import empty_contiguous, require_writable
from fusedops.ops.op import Op, entry
from fusedops.ops.overlap import require_apart
from fusedops.prologue import rms_normalize

__all__ = [
    "check_fused_add_rms_norm",
    "check_layer_norm",
    "check_rms_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "layer_norm",
    "rms_norm",
]


def _check_parameter(op: str, name: str, parameter: Tensor, x: Tensor) -> None:
    if parameter.dim() != 1 or parameter.shape[0] != x.shape[-1]:
        accepted = [(x.shape[-1],)]
        require_shape(op, name, parameter, accepted, "one value for each element of x's last dim")
    if parameter.dtype is not x.dtype and parameter.dtype is not torch.float32:
        raise DTypeError(
            f"{op}: {name} is {describe(parameter)} but x is {describe(x)}; accepted dtypes of "
            f"{name}: that of x, or float32. Cast {name} first."
        )
    if parameter.device != x.device:
        require_same_device(op, "x", x, **{name: parameter})


def _check_eps(op: str, eps: float) -> None:
    if not 0.0 <= eps < math.inf:
        raise ConfigError(f"{op}: eps is {eps}; accepted are finite values >= 0.")


def _check_constants(op: str, eps: float, weight_offset: float) -> None:
    _check_eps(op, eps)
    require_finite(op, "weight_offset", weight_offset)


def _check_x(op: str, x: Tensor) -> None:
    if x.dtype not in ACTIVATION_DTYPES:
        require_dtype(op, "x", x, ACTIVATION_DTYPES)
    if x.dim() == 0:
        require_dim(op, "x", x, 1)


def _check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        require_shape(op, "residual", residual, [tuple(x.shape)], "the shape of x")
    if residual.dtype is not x.dtype:
        require_dtype(op, "residual", residual, (x.dtype,), "that of x")
    if residual.device != x.device:
        require_same_device(op, "x", x, residual=residual)


def check_rms_norm(
    op: str, x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool
) -> None:
    """Check the arguments of ``rms_norm``; ``op`` is named in errors."""
    _check_constants(op, eps, weight_offset)
    _check_x(op, x)
    _check_parameter(op, "weight", weight, x)


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool
) -> Tensor:
    if x.is_cpu or x.dtype is torch.float32 or x.numel() == 0:
        return rms_normalize(x, weight, eps, weight_offset, round_before_weight)
    if not round_before_weight or weight_offset != 0.0 or weight.dtype is not x.dtype:
        return rms_normalize(x, weight, eps, weight_offset, round_before_weight)
    return _rms_norm_in_two_kernels(x, weight, eps)


def _rms_norm_in_two_kernels(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's order: ``rms_normalize`` takes eight kernels, each a microsecond or two on a GPU.

    torch's norm without a weight is float32 inside and rounds once, the first of the two roundings;
    with the weight it would leave that one out.
    """
    normalized = F.rms_norm(x, (x.shape[-1],), None, eps)
    return normalized.mul_(weight).contiguous()


Op(
    "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset, bool round_before_weight)"
    " -> Tensor",
    check=partial(check_rms_norm, "rms_norm"),
    fake=lambda x, *_rest: empty_contiguous(x),
    reference=_rms_norm,
)


def check_fused_add_rms_norm(
    op: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> None:
    """Check the arguments of ``fused_add_rms_norm``; ``op`` is named in errors."""
    _check_constants(op, eps, weight_offset)
    _check_x(op, x)
    _check_residual(op, x, residual)
    _check_parameter(op, "weight", weight, x)


def _fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    total = (x + residual).contiguous()
    return rms_normalize(total, weight, eps, weight_offset, round_before_weight), total


Op(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset,"
    " bool round_before_weight) -> (Tensor, Tensor)",
    check=partial(check_fused_add_rms_norm, "fused_add_rms_norm"),
    fake=lambda x, *_rest: (empty_contiguous(x), empty_contiguous(x)),
    reference=_fused_add_rms_norm,
)


def _check_fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> None:
    op = "fused_add_rms_norm_"
    check_fused_add_rms_norm(op, x, residual, weight, eps, weight_offset, round_before_weight)
    require_writable(op, "x", x)
    require_writable(op, "residual", residual)


def _check_apart(x: Tensor, residual: Tensor, weight: Tensor, *_options: object) -> None:
    require_apart("fused_add_rms_norm_", {"x": x, "residual": residual}, {"weight": weight})


def _fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> None:
    residual.add_(x)
    x.copy_(rms_normalize(residual, weight, eps, weight_offset, round_before_weight))


Op(
    "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps,"
    " float weight_offset, bool round_before_weight) -> ()",
    check=_check_fused_add_rms_norm_,
    check_aliases=_check_apart,
    fake=lambda *_args: None,
    reference=_fused_add_rms_norm_,
)


def check_layer_norm(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    """Check the arguments of ``layer_norm``; ``op`` is named in errors."""
    _check_eps(op, eps)
    _check_x(op, x)
    if weight is not None:
        _check_parameter(op, "weight", weight, x)
    if bias is not None:
        _check_parameter(op, "bias", bias, x)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    shape = (x.shape[-1],)
    if all(p is None or p.dtype is x.dtype for p in (weight, bias)):
        return F.layer_norm(x, shape, weight, bias, eps).contiguous()
    wide = F.layer_norm(
        x.float(),
        shape,
        None if weight is None else weight.float(),
        None if bias is None else bias.float(),
        eps,
    )
    return wide.to(x.dtype).contiguous()


Op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    check=partial(check_layer_norm, "layer_norm"),
    fake=lambda x, *_rest: empty_contiguous(x),
    reference=_layer_norm,
)

# Looked up once: the three attribute reads would cost a tenth of a small call.
_OP_RMS_NORM = entry("rms_norm")
_OP_FUSED_ADD_RMS_NORM = entry("fused_add_rms_norm")
_OP_FUSED_ADD_RMS_NORM_ = entry("fused_add_rms_norm_")
_OP_LAYER_NORM = entry("layer_norm")


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
) -> Tensor:
    """RMSNorm: ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension.

    Statistics are float32. The module's docstring says where values are rounded.

    Args:
        x: (..., H), float32, bfloat16 or float16, any strides.
        weight: (H,), dtype of ``x`` or float32.
        eps: added to the mean square.
        weight_offset: added to the weight in float32 (Gemma: 1.0).
        round_before_weight: Llama's rounding order; False keeps float32 to the end (Gemma).

    Returns:
        a contiguous tensor with the shape and dtype of ``x``.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    y: Tensor = _OP_RMS_NORM(x, weight, eps, weight_offset, round_before_weight)
    return y


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm of the sum: the step between two blocks of a decoder layer.

    Args:
        x: (..., H), float32, bfloat16 or float16: a block's output.
        residual: as ``x``: the residual stream.
        weight, eps, weight_offset, round_before_weight: as in ``rms_norm``.

    Returns:
        (y, new_residual): ``new_residual`` is ``x + residual`` rounded to the dtype, ``y`` is
        ``rms_norm`` of that rounded sum, as a model computes it. Both are contiguous.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.
    """
    y, total = _OP_FUSED_ADD_RMS_NORM(x, residual, weight, eps, weight_offset, round_before_weight)
    return y, total


def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
) -> None:
    """In-place ``fused_add_rms_norm``: ``x`` becomes y, ``residual`` becomes the rounded sum.

    Both may be strided views; only their own elements are written. They must not overlap.

    Args:
        x, residual, weight, eps, weight_offset, round_before_weight: as in ``fused_add_rms_norm``.

    Raises:
        LayoutError: x or residual repeats a memory cell (an expanded tensor), or shares one with
            the other or with weight.
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on; x or residual was made under
            ``torch.inference_mode()`` and is used outside of it.
    """
    _OP_FUSED_ADD_RMS_NORM_(x, residual, weight, eps, weight_offset, round_before_weight)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm: ``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension.

    Everything is float32 until one rounding at the end; the variance is the biased one.

    Args:
        x: (..., H), float32, bfloat16 or float16, any strides.
        weight, bias: (H,), dtype of ``x`` or float32; None means 1 and 0.
        eps: added to the variance.

    Returns:
        a contiguous tensor with the shape and dtype of ``x``.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    y: Tensor = _OP_LAYER_NORM(x, weight, bias, eps)
    return y
