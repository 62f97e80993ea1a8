"""Plain Triton kernels, as contenders: what a competent afternoon with Triton reaches.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rms_norm"]


# Triton looks up the names in annotations as globals of the kernel, so only constexpr has one.
def _rms_norm_kernel(x, weight, out, columns, x_pitch, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(x + row * x_pitch + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / columns + eps)
    gains = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    result = (values * scale * gains).to(out.dtype.element_ty)
    tl.store(out + row * columns + offsets, result, mask=inside)


_rms_norm = triton.jit(_rms_norm_kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: one program a row, the whole row in registers."""
    rows, columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(columns)
    warps = min(16, max(1, block // 512))
    _rms_norm[(rows,)](x, weight, out, columns, x.stride(0), eps, BLOCK=block, num_warps=warps)
    return out
