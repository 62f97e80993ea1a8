"""Adding the partial sums of a cluster's two CTAs through distributed shared memory.

Sources: PTX ISA, "mapa", "st" (.shared::cluster), "mbarrier.arrive".
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

__all__ = ["exchange_halves"]


@cute.jit
def exchange_halves(
    acc: cute.Tensor,
    mine: cute.Tensor,
    exchange: cute.Tensor,
    received: cute.Pointer,
    drained: cute.Pointer,
    rank: Int32,
    thread: Int32,
    step: Int32,
) -> None:
    """Send the peer its half of the partial sums and add the half it sends."""
    consumers, owned = exchange.shape
    if step > 0:
        cute.arch.mbarrier_wait(drained, (step - 1) & 1)
    for mine_rank in cutlass.range_constexpr(2):
        if rank == mine_rank:
            remote = cute.arch.inline_ptx(
                "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Int32],
                read_only_args=[
                    Int32((exchange.iterator + exchange.layout((thread, 0))).toint()),
                    Int32(1 - mine_rank),
                ],
            )
            for j in cutlass.range_constexpr(owned):
                source = (j >> 1) * 4 + (j & 1) * 2
                mine[j] = acc[source + mine_rank]
                cute.arch.inline_ptx(
                    "st.shared::cluster.f32 [{$r0}], {$r1};",
                    read_only_args=[
                        Int32(remote + j * consumers * 4),
                        acc[source + 1 - mine_rank],
                    ],
                )
    cute.arch.mbarrier_arrive(received, 1 - rank, scope=MemScopeKind.CLUSTER)
    cute.arch.mbarrier_wait(received, step & 1)
    cute.arch.fence_acq_rel_cluster()
    # Two terms: their sum does not depend on the order, and one CTA alone computes it.
    for j in cutlass.range_constexpr(owned):
        mine[j] = mine[j] + exchange[thread, j]
