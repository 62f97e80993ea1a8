"""Adding the partial sums of a cluster's two CTAs through distributed shared memory.

A CTA has received all that its peer sends before it ends, so the cluster need not meet once more.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from fusedops.cutlass.distributed import mapped, read, send

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
    """Send the peer its half of the partial sums and add the half it sends.

    Args:
        acc: a consumer thread's partial sums; the CTA of rank r owns every second one from r on.
        mine: the sums that the thread owns.
        exchange: (consumer threads, owned) of shared memory, 16-byte aligned: an owned vector of
            four (two where there are no more) lies beside those of the neighbouring threads.
        received: barrier of one arrival; its transactions are the peer's stores.
        drained: barrier that the peer's consumer threads arrive at when they have read a step's
            sums.
        step: tiles that the CTA has finished.
    """
    threads, owned = exchange.shape
    vector = 4 if owned % 4 == 0 else 2
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(received, threads * owned * 4)
    if step > 0:
        cute.arch.mbarrier_wait(drained, (step - 1) & 1)
    base = Int32(exchange.iterator.toint()) + thread * (4 * vector)
    for own in cutlass.range_constexpr(2):
        if rank == own:
            remote, barrier = mapped(base, 1 - own), mapped(received.toint(), 1 - own)
            for first in cutlass.range_constexpr(0, owned, vector):
                sent = [acc[_source(first + e, 1 - own)] for e in range(vector)]
                send(remote + first * (4 * threads), sent, barrier)
                for e in cutlass.range_constexpr(vector):
                    mine[first + e] = acc[_source(first + e, own)]
    cute.arch.mbarrier_wait(received, step & 1)
    # Two terms: their sum does not depend on the order, and one CTA alone computes it.
    for first in cutlass.range_constexpr(0, owned, vector):
        given = read(base + first * (4 * threads), vector, mine.element_type)
        for e in cutlass.range_constexpr(vector):
            mine[first + e] = mine[first + e] + given[e]


def _source(j: int, rank: int) -> int:
    """Accumulator of owned value ``j`` of a rank: of each pair of columns it has one."""
    return (j >> 1) * 4 + (j & 1) * 2 + rank
