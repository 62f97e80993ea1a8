"""A warpgroup's products of one tile, from the ring of stages into its accumulators."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

__all__ = ["accumulate", "multiply"]


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
    """Issue one stage's products as one group; all but the first instruction add to ``acc``."""
    warpgroup.fence()
    for block_k in range(cute.size(frag_x, mode=[2])):
        at = (None, None, block_k, stage)
        cute.gemm(tiled_mma, acc, frag_x[at], frag_w[at], acc)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def _issue(tiled_mma: Any, acc: Any, frag_a: Any, frag_b: Any, stage: Any) -> None:
    """Issue one stage's products as one group, by instructions that all do as ``tiled_mma`` is set.

    In code that stands in a branch, the tracer does not see a setting that a function changes.
    """
    warpgroup.fence()
    for block_k in range(cute.size(frag_a, mode=[2])):
        at = (None, None, block_k, stage)
        cute.gemm(tiled_mma, acc, frag_a[at], frag_b[at], acc)
    warpgroup.commit_group()


@cute.jit
def accumulate(
    config: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    frag_w: cute.Tensor,
    frag_x: cute.Tensor,
    barriers: Any,
    base: Int32,
    k_count: Int32,
    normalized: cutlass.Constexpr,
) -> None:
    """A decode tile's products; all are complete and their stages free when it returns.

    Args:
        config: the decode kernel's.
        tiled_mma: set to accumulate.
        barriers: full and empty ones of the ring; those of stages that are normalised.
        base: iteration of the CTA that the tile begins with; it has ``k_count``, which may be 0.
        normalized: whether stages pass through warps that normalise them.
    """
    full, empty, ready = barriers
    stages = config.stages
    acc.fill(0)
    for kt in cutlass.range(k_count, unroll=1):
        i = base + kt
        stage = i % stages
        cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
        if const_expr(normalized):
            cute.arch.mbarrier_wait(ready + stage, (i // stages) & 1)
        _issue(tiled_mma, acc, frag_w, frag_x, stage)
        warpgroup.wait_group(1)
        if kt > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + (i - 1) % stages)
    warpgroup.wait_group(0)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + (base + k_count - 1) % stages)
