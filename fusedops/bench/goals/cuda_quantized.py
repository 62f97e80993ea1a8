"""What goals of kernels that quantize share: torch's way to do it, and how results are judged."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.bench.oracles import within
from fusedops.epilogue.base import E4M3_MAX
from fusedops.epilogue.outputs import GROUP

__all__ = ["per_group", "per_token", "quantized_error"]

_E4M3_ROUNDING = 2.0**-4
"""Half a unit of e4m3's three mantissa bits, relative."""

_E4M3_SMALLEST = 2.0**-10
"""Half of the smallest number, which is what rounding costs below the normal ones."""


def per_token(y: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale a row, by torch: (q, scale)."""
    scale = y.abs().amax(-1).float() / E4M3_MAX
    q = (y.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return q.to(torch.float8_e4m3fn), scale


def per_group(y: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for 128 neighbouring elements, by torch: (q, scales (columns / 128, M))."""
    groups = y.view(y.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1).float() / E4M3_MAX
    q = (groups.float() / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return q.to(torch.float8_e4m3fn).view(y.shape), scale.t()


def quantized_error(q: Tensor, scale: Tensor, exact: Tensor, error: Tensor) -> str | None:
    """What is wrong with e4m3 values and their scales, or None.

    Args:
        q: (M, N) float8_e4m3fn.
        scale: (M,) or (N / 128, M) float32.
        exact: (M, N) float64: the values.
        error: (M, N): how far the values may lie off before they are quantized.
    """
    spread = scale[:, None] if scale.dim() == 1 else scale.t().repeat_interleave(GROUP, dim=1)
    wide = spread.double()
    bound = error + (exact.abs() + error) * _E4M3_ROUNDING + wide * _E4M3_SMALLEST
    wrong = within(q.double() * wide, exact, bound * (1.0 + 2.0**-16))
    if wrong is not None:
        return wrong
    # A scale that is too large stays within the bound of small values; the largest one shows it.
    shared = exact.abs() + error
    if scale.dim() == 1:
        most = shared.amax(-1)
    else:
        most = shared.view(exact.shape[0], -1, GROUP).amax(-1).t()
    return within(scale, scale.double().clamp(max=most / E4M3_MAX * (1.0 + 2.0**-20)), 0.0)
