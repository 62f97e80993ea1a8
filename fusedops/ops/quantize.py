"""``quantize``, ``quantize_static`` and ``dequantize``: 8-bit values with float32 scales.

A stored value stands for ``q * scale``. Both directions compute in float32 and round once, and
every step is an exactly rounded float32 operation, so that the CPU, torch on a GPU and a kernel
give the same bits: ``scale = absmax / largest``, ``inverse = 1 / scale``,
``q = round(x * inverse)``, each of the three rounded to nearest even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_choice,
    require_dim,
    require_dtype,
    require_same_device,
    require_shape,
    require_tensor,
)
from fusedops.epilogue.base import E4M3_MAX
from fusedops.epilogue.outputs import GROUP
from fusedops.errors import ConfigError, DTypeError
from fusedops.ops.op import Op, entry

__all__ = [
    "FORMATS",
    "GRANULARITIES",
    "SCALE_ROW_ALIGNMENT",
    "SMALLEST_SCALE",
    "QuantFormat",
    "dequantize",
    "quantize",
    "require_scale_values",
]


@dataclass(frozen=True)
class QuantFormat:
    """An 8-bit storage format.

    Attributes:
        name: the word used in arguments and specs.
        dtype: the torch dtype of stored values.
        largest: the largest magnitude stored; values beyond it saturate.
    """

    name: str
    dtype: torch.dtype
    largest: float


FORMATS = {
    fmt.name: fmt
    for fmt in (
        QuantFormat("e4m3", torch.float8_e4m3fn, E4M3_MAX),
        QuantFormat("int8", torch.int8, 127.0),
    )
}
"""Storage formats by name: FP8 E4M3 (Micikevicius et al., 2022) and symmetric int8."""

GRANULARITIES = ("token", "tensor", "block128")
"""What shares a scale: a row, the whole tensor, or 128 consecutive values of a row (DeepSeek-V3
technical report, 2024, section 3.3)."""

SCALE_ROW_ALIGNMENT = 4
"""Rows of ``block128`` scales start at multiples of this many floats: 16 bytes, one TMA unit."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales are at least this, 2^-126: the smallest normal float32, whose inverse is finite. That of a
scale below 2^-128 would be infinite, and zeros would be stored as NaN."""

_STATIC_GRANULARITIES = ("token", "tensor")


def quantize(
    x: Tensor,
    dtype: str = "e4m3",
    *,
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise activations to 8 bits; ``q * scale`` approximates ``x``.

    Args:
        x: (..., K), float32, bfloat16 or float16, any strides; M is the product of the leading
            sizes.
        dtype: ``"e4m3"`` (FP8, saturates at +-448) or ``"int8"`` (symmetric, +-127).
        granularity: ``"token"`` (a scale a row), ``"tensor"`` (one scale) or ``"block128"`` (a
            scale for 128 consecutive values of a row; the last group may be shorter).
        scale: float32 scale to use instead of a dynamic one: () for ``"tensor"``, (M,) or
            ``x.shape[:-1]`` for ``"token"``. It must be finite and at least ``SMALLEST_SCALE``
            (2^-126, about 1.18e-38), which is checked on the CPU only, because reading it on a GPU
            would synchronise.

    Returns:
        q: contiguous, shape of ``x``, float8_e4m3fn or int8.
        scale: float32; ``x.shape[:-1]`` for ``"token"``, () for ``"tensor"``. For ``"block128"``
            it is (ceil(K/128), M) with strides (M_padded, 1), where M_padded is M rounded up to a
            multiple of 4 and the padding holds 1. A ``scale`` given is returned as it is.

    Numerics:
        scale = absmax / 448 (e4m3) or absmax / 127 (int8), q = round(x * (1 / scale)), ties to
        even, all in float32; identical bits on every device (a NaN scale's payload excepted).

        - An all-zero row, tensor or group, or one without elements, has scale 1.
        - A scale is never below ``SMALLEST_SCALE``, the smallest normal float32, so a row of
          denormals keeps a finite scale above zero and quantises to small values or zero.
        - NaN stays NaN in e4m3 (byte 0x7f) and becomes 0 in int8.
        - NaN in a row (tensor, group) makes its dynamic scale NaN: e4m3 stores NaN throughout,
          int8 stores 0 throughout, and both dequantise to NaN throughout.
        - An infinity and no NaN makes its dynamic scale inf: finite values are stored as 0,
          infinities as NaN (e4m3) or 0 (int8), and all of them dequantise to NaN.
        - With a given scale an infinity saturates like any large value, to +-448 or +-127.

    Raises:
        ConfigError: unknown ``dtype`` or ``granularity``; ``scale`` with ``"block128"``; a scale
            that is not finite or below ``SMALLEST_SCALE`` (CPU).
        DTypeError: ``x`` is no activation dtype, ``scale`` is not float32.
        ShapeError: ``x`` has no dimension, ``scale`` has another shape.
        DeviceError: ``scale`` is on another device.
        UnsupportedError: ``x`` requires grad while grad mode is on.
    """
    require_choice("quantize", "dtype", dtype, tuple(FORMATS))
    require_choice("quantize", "granularity", granularity, GRANULARITIES)
    if scale is None:
        dynamic: tuple[Tensor, Tensor] = _OP_QUANTIZE(x, dtype, granularity)
        return dynamic
    if granularity not in _STATIC_GRANULARITIES:
        raise ConfigError(
            f"quantize: granularity={granularity!r} takes no given scale; leave out scale for "
            f"dynamic groups, or use granularity {' or '.join(_STATIC_GRANULARITIES)}."
        )
    require_tensor("quantize", "x", x)
    require_tensor("quantize", "scale", scale)
    # The operator tells tensor from token by the scale's shape; a mismatch must not pass as the
    # other one.
    if granularity == "tensor":
        require_shape("quantize", "scale", scale, [()], "one scale for granularity='tensor'")
    else:
        _require_token_scale("quantize", "x", x, scale)
    q: Tensor = _OP_QUANTIZE_STATIC(x, scale, dtype)
    return q, scale


def dequantize(
    q: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    granularity: str = "token",
) -> Tensor:
    """Turn quantised values back: ``float32(q) * scale``, rounded once to ``dtype``.

    Args:
        q: (..., K), float8_e4m3fn or int8, any strides.
        scale: float32, as ``quantize`` returns it for this ``granularity`` (any strides; (M,) is
            also accepted for ``"token"``).
        dtype: float32, bfloat16 or float16.
        granularity: ``"token"``, ``"tensor"`` or ``"block128"``.

    Returns:
        contiguous, shape of ``q``, of ``dtype``. The product of the largest q and the scale of a
        row near the largest finite value of ``dtype`` may round to infinity.

    Raises:
        ConfigError: unknown ``granularity``.
        DTypeError: ``q``, ``scale`` or ``dtype`` is of no accepted dtype.
        ShapeError: ``scale`` has another shape than the granularity asks for.
        DeviceError: ``q`` and ``scale`` are on different devices.
        UnsupportedError: ``scale`` requires grad while grad mode is on.
    """
    result: Tensor = _OP_DEQUANTIZE(q, scale, dtype, granularity)
    return result


def _require_token_scale(op: str, name: str, x: Tensor, scale: Tensor) -> None:
    require_dim(op, name, x, 1)
    rows = math.prod(x.shape[:-1])
    require_shape(op, "scale", scale, [(rows,), x.shape[:-1]], f"one scale for each row of {name}")


def _check_quantize(x: Tensor, dtype: str, granularity: str) -> None:
    require_choice("quantize", "dtype", dtype, tuple(FORMATS))
    require_choice("quantize", "granularity", granularity, GRANULARITIES)
    require_dtype("quantize", "x", x, ACTIVATION_DTYPES)
    require_dim("quantize", "x", x, 1)


def _check_quantize_static(x: Tensor, scale: Tensor, dtype: str) -> None:
    require_choice("quantize", "dtype", dtype, tuple(FORMATS))
    require_dtype("quantize", "x", x, ACTIVATION_DTYPES)
    require_dim("quantize", "x", x, 1)
    require_dtype("quantize", "scale", scale, (torch.float32,))
    require_same_device("quantize", "x", x, scale=scale)
    if scale.dim() != 0:
        _require_token_scale("quantize", "x", x, scale)


def require_scale_values(op: str, name: str, scale: Tensor, advice: str) -> None:
    """Raise ConfigError unless every scale is finite and at least ``SMALLEST_SCALE``; CPU tensors.

    Args:
        op: the operation's name.
        name: the argument's.
        scale: float32.
        advice: the message's last sentence, what to give instead.
    """
    if scale.numel() == 0:
        return
    low, high = (float(bound) for bound in torch.aminmax(scale))
    # A NaN makes both of them NaN.
    if low >= SMALLEST_SCALE and high < math.inf:
        return
    refused = scale[~((scale >= SMALLEST_SCALE) & (scale < math.inf))].flatten()[0].item()
    raise ConfigError(
        f"{op}: {name} is {describe(scale)} and holds {refused}; a scale must be finite and "
        f"above zero, at least {SMALLEST_SCALE:.8g} (2^-126, the smallest normal float32). {advice}"
    )


SCALE_ADVICE = "Give an all-zero row scale 1, or leave out scale."
"""What to give in the place of a scale that is refused, where leaving it out computes one."""


def _check_static_values(x: Tensor, scale: Tensor, dtype: str) -> None:
    require_scale_values("quantize", "scale", scale, SCALE_ADVICE)


def _check_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype, granularity: str) -> None:
    op = "dequantize"
    require_choice(op, "granularity", granularity, GRANULARITIES)
    require_dtype(op, "q", q, tuple(fmt.dtype for fmt in FORMATS.values()))
    require_dim(op, "q", q, 1)
    require_dtype(op, "scale", scale, (torch.float32,))
    require_same_device(op, "q", q, scale=scale)
    if dtype not in ACTIVATION_DTYPES:
        raise DTypeError(
            f"{op}: dtype={dtype}; accepted are {', '.join(map(str, ACTIVATION_DTYPES))}."
        )
    if granularity == "token":
        _require_token_scale(op, "q", q, scale)
    elif granularity == "tensor":
        require_shape(op, "scale", scale, [()], "one scale for granularity='tensor'")
    else:
        rows, groups = _rows_and_groups(q)
        require_shape(op, "scale", scale, [(groups, rows)], "(ceil(K/128), M) of q (..., K)")


def _rows_and_groups(x: Tensor) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), -(-x.shape[-1] // GROUP)


def _scale_buffer(x: Tensor, granularity: str) -> Tensor:
    """A float32 buffer of ones with the scale's shape and strides."""
    if granularity == "token":
        return x.new_ones(x.shape[:-1], dtype=torch.float32)
    if granularity == "tensor":
        return x.new_ones((), dtype=torch.float32)
    rows, groups = _rows_and_groups(x)
    padded = -(-rows // SCALE_ROW_ALIGNMENT) * SCALE_ROW_ALIGNMENT
    return x.new_ones((groups, padded), dtype=torch.float32)[:, :rows]


def _absmax(x: Tensor, granularity: str) -> Tensor:
    """Largest magnitude for each scale, in the scale's shape; ``x`` has elements."""
    if granularity == "token":
        return x.abs().amax(-1)
    if granularity == "tensor":
        return x.abs().amax()
    rows, groups = _rows_and_groups(x)
    magnitudes = x.reshape(rows, x.shape[-1]).abs()
    whole_groups = x.shape[-1] // GROUP
    whole = magnitudes[:, : whole_groups * GROUP]
    parts = [whole.reshape(rows, whole_groups, GROUP).amax(-1)]
    if whole_groups < groups:
        parts.append(magnitudes[:, whole_groups * GROUP :].amax(-1, keepdim=True))
    return torch.cat(parts, dim=1).t()


def _dynamic_scale(x: Tensor, largest: float, granularity: str) -> Tensor:
    buffer = _scale_buffer(x, granularity)
    if x.numel() == 0:
        return buffer
    absmax = _absmax(x, granularity).float()
    # A tensor as divisor: torch on CUDA multiplies by the rounded reciprocal of a number instead.
    scale = (absmax / absmax.new_full((), largest)).clamp_(min=SMALLEST_SCALE)
    return buffer.copy_(scale.masked_fill_(absmax == 0, 1.0))


def _over_elements(scale: Tensor, x: Tensor, granularity: str) -> Tensor:
    """``scale`` in a shape that broadcasts over ``x``."""
    if granularity == "token":
        return scale.reshape(x.shape[:-1]).unsqueeze(-1)
    if granularity == "tensor":
        return scale
    return scale.t().repeat_interleave(GROUP, dim=1)[:, : x.shape[-1]].reshape(x.shape)


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """``result`` with the strides of a new tensor, also along dimensions of size 1."""
    return result.reshape(-1).view(like.shape)


def _stored(x: Tensor, scale: Tensor, fmt: QuantFormat, granularity: str) -> Tensor:
    value = x.float() * _over_elements(scale.reciprocal(), x, granularity)
    nan = value.isnan()
    value.clamp_(-fmt.largest, fmt.largest)
    if fmt.dtype == torch.int8:
        value.round_().masked_fill_(nan, 0.0)
    else:
        # One NaN: x86 and the GPU give the NaN of inf * 0 different signs, and e4m3 keeps signs.
        value.masked_fill_(nan, math.nan)
    return _laid_out(value.to(fmt.dtype), x)


def _quantize_reference(x: Tensor, dtype: str, granularity: str) -> tuple[Tensor, Tensor]:
    fmt = FORMATS[dtype]
    scale = _dynamic_scale(x, fmt.largest, granularity)
    return _stored(x, scale, fmt, granularity), scale


def _quantize_static_reference(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return _stored(x, scale, FORMATS[dtype], "tensor" if scale.dim() == 0 else "token")


def _dequantize_reference(q: Tensor, scale: Tensor, dtype: torch.dtype, granularity: str) -> Tensor:
    value = q.float() * _over_elements(scale, q, granularity)
    return _laid_out(value.to(dtype), q)


def _quantize_fake(x: Tensor, dtype: str, granularity: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FORMATS[dtype].dtype), _scale_buffer(x, granularity)


def _quantize_static_fake(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return x.new_empty(x.shape, dtype=FORMATS[dtype].dtype)


def _dequantize_fake(q: Tensor, scale: Tensor, dtype: torch.dtype, granularity: str) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


Op(
    "quantize(Tensor x, str dtype, str granularity) -> (Tensor, Tensor)",
    check=_check_quantize,
    fake=_quantize_fake,
    reference=_quantize_reference,
)

Op(
    "quantize_static(Tensor x, Tensor scale, str dtype) -> Tensor",
    check=_check_quantize_static,
    fake=_quantize_static_fake,
    reference=_quantize_static_reference,
    check_values=_check_static_values,
    public="quantize",
)

Op(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype, str granularity) -> Tensor",
    check=_check_dequantize,
    fake=_dequantize_fake,
    reference=_dequantize_reference,
)

_OP_QUANTIZE = entry("quantize")
_OP_QUANTIZE_STATIC = entry("quantize_static")
_OP_DEQUANTIZE = entry("dequantize")
