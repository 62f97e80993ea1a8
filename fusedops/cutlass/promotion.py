"""The main loop for scales a block of 128 along K: partial sums are promoted to float32 registers.

Each block's products are added up by wgmma from zero, in four instructions of 32, and then added to
the finished sums by float32 multiply-adds with the block's two scales::

    sum = sum + part * (x_scale * w_scale)

So what Hopper's Tensor Cores cut off an e4m3 sum (see ``products``) is that of four instructions on
one block's sum, however long K is. While a warpgroup promotes, another one's products run; the
blocks of one stage have partial sums of their own where registers allow it, so that the next
block's products run too.

Sources: DeepSeek-V3 Technical Report, 2024, 3.3.2 (promotion to CUDA cores every 128 of K);
CUTLASS, "fp8_accumulation.hpp" (partial sums in registers of their own).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from fusedops.config.elements import SCALE_BLOCK

__all__ = ["multiply_promoted"]

_INSTRUCTION_K = 32


@cute.jit
def multiply_promoted(
    ring: cutlass.Constexpr,
    scaling: cutlass.Constexpr,
    instructions: cutlass.Constexpr,
    acc: cute.Tensor,
    frag_a: cute.Tensor,
    frag_b: cute.Tensor,
    scales: Any,
    at: Any,
    barriers: Any,
    iteration: Int32,
    span: Any,
) -> None:
    """A tile's products with their scales into ``acc``; their stages are free when it returns.

    Args:
        ring: the kernel's.
        scaling: the ``SumScales`` of the operand order.
        instructions: makes the tiled instruction that the fragments belong to.
        acc: float32 sums; what they hold is replaced.
        frag_a, frag_b: fragments of the stages.
        scales: x's in the stages; the weight's.
        at: where the thread's scales lie, see ``scaling``.
        barriers: full and empty ones of the ring.
        iteration: of the ring that the tile begins with.
        span: the tile's first k-tile, and how many it has.
    """
    full, empty = barriers
    stages, weight = scales
    k_first, k_count = span
    blocks = cute.size(stages, mode=[0])
    # Two settings of one instruction: a loop must not change one.
    starting, adding = instructions(), instructions()
    starting.set(warpgroup.Field.ACCUMULATE, False)
    adding.set(warpgroup.Field.ACCUMULATE, True)
    count = blocks if const_expr(scaling.overlaps) else 1
    parts = [cute.make_rmem_tensor(acc.shape, Float32) for _ in range(count)]
    acc.fill(0.0)
    ahead = cute.make_rmem_tensor(blocks * scaling.weight_blocks, Float32)
    _read_weight_scales(scaling, weight, at, k_first * blocks, ahead, blocks)
    stage = iteration % ring.stages
    parity = (iteration // ring.stages) & 1
    for kt in cutlass.range(k_count, unroll=1):
        current = _by_block(ahead, blocks)
        _read_weight_scales(scaling, weight, at, (k_first + kt + 1) * blocks, ahead, blocks)
        cute.arch.mbarrier_wait(full + stage, parity)
        products = _StageProducts(starting, adding, frag_a, frag_b, stage)
        if const_expr(scaling.overlaps):
            for block in cutlass.range_constexpr(blocks):
                products.issue(parts[block], block)
            given = [scaling.activations(stages, at, stage, block) for block in range(blocks)]
            for block in cutlass.range_constexpr(blocks):
                warpgroup.wait_group(blocks - 1 - block)
                if const_expr(block == blocks - 1):
                    _release(ring, empty + stage)
                _promote(acc, parts[block], scaling, at, given[block], current[block])
        else:
            for block in cutlass.range_constexpr(blocks):
                products.issue(parts[0], block)
                warpgroup.wait_group(0)
                read = scaling.activations(stages, at, stage, block)
                _promote(acc, parts[0], scaling, at, read, current[block])
            _release(ring, empty + stage)
        stage, parity = ring.next(stage, parity)


@dataclass(frozen=True)
class _StageProducts:
    """The products of one stage.

    Attributes:
        starting, adding: the instruction that replaces its sums, and the one that adds to them.
        frag_a, frag_b: fragments of the stages.
        stage: index of the stage.
    """

    starting: Any
    adding: Any
    frag_a: Any
    frag_b: Any
    stage: Any

    def issue(self, part: Any, block: int) -> None:
        """Issue the products of one block of K as one group."""
        warpgroup.fence()
        steps = SCALE_BLOCK // _INSTRUCTION_K
        for step in range(steps):
            at = (None, None, block * steps + step, self.stage)
            instruction = self.adding if step else self.starting
            cute.gemm(instruction, part, self.frag_a[at], self.frag_b[at], part)
        warpgroup.commit_group()


def _release(ring: Any, empty: Any) -> None:
    """Free a stage whose products are complete, once all lanes have read its scales."""
    cute.arch.sync_warp()
    ring.release(empty)


def _promote(acc: Any, part: Any, scaling: Any, at: Any, read: Any, weight: Any) -> None:
    factor = scaling.factors(at, read, weight)
    for j in range(cute.size(acc)):
        acc[j] = acc[j] + part[j] * factor(j)


def _by_block(values: Any, blocks: int) -> list[list[Any]]:
    """The values of ``_read_weight_scales``, as they are now."""
    per_block = cute.size(values) // blocks
    return [[values[b * per_block + i] for i in range(per_block)] for b in range(blocks)]


def _read_weight_scales(
    scaling: Any, weight: Any, at: Any, block: Any, to: Any, blocks: int
) -> None:
    """The weight's scales of a stage that begins with a block of K."""
    values = [v for b in range(blocks) for v in scaling.weight_scales(weight, at, block + b)]
    for i, value in enumerate(values):
        to[i] = value
