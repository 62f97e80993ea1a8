"""The loading warp of the decode kernels: weights ahead of the kernel before, then the ring.

Sources: PTX ISA, "cp.async.bulk.tensor", "cp.async.bulk.prefetch.tensor", "griddepcontrol".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

__all__ = ["DecodeLoads"]

# Cache policies of createpolicy.fractional, fraction 1.0 (CUTLASS, TMA::CacheHintSm90). A weight is
# read once; x is read by every CTA.
_EVICT_FIRST = 0x12F0000000000000
_EVICT_LAST = 0x14F0000000000000


@dataclass(frozen=True)
class DecodeLoads:
    """The loads of a CTA. Operands are triples: TMA atom, its global and its shared side.

    The weight is a tuple of operands: itself and, of a quantized one, its scales and zero points;
    ``activations`` are x and, where it has them, its scales.

    A span is (first tile, first k-tile, k-tiles of a tile, iterations in total).

    Attributes:
        config: the kernel's; ``stages``, ``trigger`` and ``prefetch`` are read.
        pdl: whether the next kernel may be allowed to start.
        stage_bytes: that a stage takes of all operands.
    """

    config: Any
    pdl: bool
    stage_bytes: int

    @cute.jit
    def start(self, weights: Any, x_atom: Any, full: cute.Pointer, span: Any) -> None:
        """Ask for the weights of every stage, before the other warps have started.

        x's descriptor is fetched meanwhile: its first load stands between the kernel before and all
        that needs x. The ring is full before x can be read, so that memory would idle: L2 takes
        some more.
        """
        first, k_first, k_count, total = span
        ahead = cutlass.min(total, Int32(self.config.stages))
        for i in cutlass.range(ahead, unroll=1):
            self._weights(weights, full + i, i, i, span)
        cpasync.prefetch_descriptor(x_atom)
        beyond = cutlass.min(total, ahead + self.config.prefetch)
        for i in cutlass.range(ahead, beyond, unroll=1):
            for w_atom, t_wg, _ in weights:
                cute.prefetch(w_atom, t_wg[(None, first + i // k_count, k_first + i % k_count)])

    @cute.jit
    def stream(self, weights: Any, activations: Any, barriers: Any, span: Any) -> None:
        """Load x for the stages that have their weights, then both as stages become free."""
        full, empty = barriers
        total = span[3]
        stages, trigger = self.config.stages, self.config.trigger
        ahead = cutlass.min(total, Int32(stages))
        for i in cutlass.range(ahead, unroll=1):
            self._activations(activations, full + i, i, i, span)
        if const_expr(self.pdl and trigger >= 0):
            if total - ahead <= trigger:
                cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range(ahead, total, unroll=1):
            stage = i % stages
            cute.arch.mbarrier_wait(empty + stage, (i // stages - 1) & 1)
            self._weights(weights, full + stage, stage, i, span)
            self._activations(activations, full + stage, stage, i, span)
            if const_expr(self.pdl and trigger >= 0):
                if total - i == trigger + 1:
                    cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _weights(
        self, weights: Any, barrier: cute.Pointer, stage: Int32, i: Int32, span: Any
    ) -> None:
        """Announce a stage's bytes of all operands and load iteration ``i``'s weights."""
        first, k_first, k_count, _ = span
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
        for w_atom, t_wg, t_ws in weights:
            cute.copy(
                w_atom,
                t_wg[(None, first + i // k_count, k_first + i % k_count)],
                t_ws[(None, stage)],
                tma_bar_ptr=barrier,
                cache_policy=Int64(_EVICT_FIRST),
            )

    def _activations(self, activations: Any, barrier: Any, stage: Any, i: Any, span: Any) -> None:
        """Load iteration ``i``'s columns of x and their scales."""
        _, k_first, k_count, _ = span
        k_tile = k_first + i % k_count
        for atom, source, to in activations:
            cute.copy(
                atom,
                source[(None, k_tile)],
                to[(None, stage)],
                tma_bar_ptr=barrier,
                cache_policy=Int64(_EVICT_LAST),
            )
