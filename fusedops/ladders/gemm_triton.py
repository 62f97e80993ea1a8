"""A product as a plain Triton kernel, with bias and GELU where they are wanted.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["TILE", "product"]

TILE = 128
_GROUP = 8
_WARPS = 8
_SETTINGS = {torch.float32: (16, 3), torch.bfloat16: (64, 4)}
"""Elements of K a step, and steps under way."""


# Triton looks up the names in annotations as globals of the kernel, so only constexpr has one.
def _product_kernel(  # type: ignore[no-untyped-def]
    x,
    w,
    bias,
    out,
    m,
    n,
    k,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    FUSED: tl.constexpr,
):
    # Programs that run together share rows and columns, so that the L2 serves most loads.
    place = tl.program_id(0)
    in_group = GROUP * (n // TILE)
    first = place // in_group * GROUP
    height = min(m // TILE - first, GROUP)
    rows = (first + place % in_group % height) * TILE + tl.arange(0, TILE)
    columns = place % in_group // height * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for begin in range(0, k, DEPTH):
        a = tl.load(x + rows[:, None] * k + begin + depth[None, :])
        b = tl.load(w + columns[None, :] * k + begin + depth[:, None])
        total = tl.dot(a, b, total, input_precision="ieee")
    if FUSED:
        total += tl.load(bias + columns)[None, :].to(tl.float32)
        twice = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total *= tl.sigmoid(twice)  # GELU by the tanh formula: (1 + tanh u) / 2 is sigmoid of 2 u
    place_out = out + rows[:, None] * n + columns[None, :]
    tl.store(place_out, total.to(out.dtype.element_ty))


_product = triton.jit(_product_kernel)


def product(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x @ w.t()``, with ``bias`` followed by GELU; sizes are multiples of the tile."""
    (m, k), n = x.shape, w.shape[0]
    depth, stages = _SETTINGS[x.dtype]
    _product[((m // TILE) * (n // TILE),)](
        *(x, w, x if bias is None else bias, out, m, n, k),
        TILE=TILE,
        DEPTH=depth,
        GROUP=_GROUP,
        FUSED=bias is not None,
        num_warps=_WARPS,
        num_stages=stages,
    )
