"""8-bit paged KV caches: the checks of their scales, and the way into and out of their codes.

A stored code q stands for ``q * scale``. Values are stored as ``quantize_static`` stores them, so
that a cache holds the same bits whether its tokens were quantised on the way in or before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.check import (
    describe,
    require_dtype,
    require_same_device,
    require_shape,
)
from fusedops.epilogue.base import to_dtype
from fusedops.errors import ConfigError
from fusedops.ops.quantize import FORMATS, require_scale_values

__all__ = [
    "CODE_DTYPES",
    "as_stored",
    "check_cache_scales",
    "codes",
    "from_codes",
    "require_positive_scales",
]

CODE_DTYPES = tuple(fmt.dtype for fmt in FORMATS.values())
"""Dtypes of caches that need scales."""


def check_cache_scales(
    op: str, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, heads: int
) -> None:
    """Check everything but values of the scales of two caches of one dtype and of ``heads``."""
    is_coded = k_cache.dtype in CODE_DTYPES
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if is_coded:
                raise ConfigError(
                    f"{op}: k_cache is {describe(k_cache)} but {name} is None; an 8-bit cache "
                    f"needs both scales. Pass {name}, float32 of shape () or ({heads},)."
                )
            continue
        if not is_coded:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODE_DTYPES)
            raise ConfigError(
                f"{op}: {name} is {describe(scale)} but k_cache is {describe(k_cache)}; scales "
                f"belong to caches of dtype {accepted}. Leave out {name}, or make such a cache."
            )
        if scale.dtype is not torch.float32:
            require_dtype(op, name, scale, (torch.float32,))
        if scale.dim() != 0:
            require_shape(op, name, scale, [(), (heads,)], "one scale, or one for each KV head")
        if scale.device != k_cache.device:
            require_same_device(op, "k_cache", k_cache, **{name: scale})


def require_positive_scales(op: str, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """``require_scale_values`` of the scales that are given; for CPU tensors."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            require_scale_values(op, name, scale, _ADVICE)


_ADVICE = "Use the largest magnitude expected over 448 (float8_e4m3fn) or 127 (int8)."


def codes(cache: Tensor) -> Tensor:
    """An 8-bit cache as int8, a view: torch copies and gathers few other types everywhere."""
    return cache.view(torch.int8) if cache.dtype in CODE_DTYPES else cache


def _over_heads(scale: Tensor) -> Tensor:
    """A scale that broadcasts over (..., Hkv, D)."""
    return scale[:, None] if scale.dim() else scale


def _coded(new: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Tokens (T, Hkv, D) as a cache of ``dtype`` stores them, viewed as int8."""
    return codes(to_dtype(new.float() * _over_heads(scale.reciprocal()), dtype))


def as_stored(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, then caches: copying the former into the latter stores them, whatever the dtype."""
    if k_scale is None or v_scale is None:
        return k, v, k_cache, v_cache
    k, v = _coded(k, k_cache.dtype, k_scale), _coded(v, v_cache.dtype, v_scale)
    return k, v, codes(k_cache), codes(v_cache)


def from_codes(slots: Tensor, scale: Tensor | None) -> Tensor:
    """Float32 values of what slots (..., Hkv, D) of a cache hold."""
    return slots.float() if scale is None else slots.float() * _over_heads(scale)
