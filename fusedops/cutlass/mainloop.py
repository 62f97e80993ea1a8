"""A warpgroup's products of one tile, from the ring of stages into its accumulators."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

__all__ = ["multiply"]


@cute.jit
def multiply(
    ring: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    frag_x: cute.Tensor,
    frag_w: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    iteration: Int32,
    k_tiles: Int32,
) -> Int32:
    """Issue a tile's products; the last stage's may still run. Returns that stage."""
    stage = iteration % ring.stages
    parity = (iteration // ring.stages) & 1
    cute.arch.mbarrier_wait(full + stage, parity)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
    _products(tiled_mma, acc, frag_x, frag_w, stage)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    last = stage
    stage, parity = ring.next(stage, parity)
    for _ in cutlass.range(1, k_tiles, unroll=1):
        cute.arch.mbarrier_wait(full + stage, parity)
        _products(tiled_mma, acc, frag_x, frag_w, stage)
        warpgroup.wait_group(1)
        ring.release(empty + last)
        last = stage
        stage, parity = ring.next(stage, parity)
    return last


def _products(tiled_mma: Any, acc: Any, frag_x: Any, frag_w: Any, stage: Any) -> None:
    """Issue one stage's products as one group."""
    warpgroup.fence()
    for block_k in range(cute.size(frag_x, mode=[2])):
        at = (None, None, block_k, stage)
        cute.gemm(tiled_mma, acc, frag_x[at], frag_w[at], acc)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
