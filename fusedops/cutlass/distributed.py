"""Stores to the shared memory of another CTA of the cluster, counted by a barrier there.

What a receiver waits for is one way through the cluster: neither a fence nor an arrival stands
behind the data, as with plain remote stores. It waits as for bulk tensor loads that another CTA
multicasts: to acquire at cluster scope would invalidate the L1 besides, which these stores never
pass.

Sources: PTX ISA, "mapa", "st.async", "mbarrier" (expect-tx and complete-tx operations).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Numeric, cute

__all__ = ["mapped", "read", "send"]


_PTX_TYPES: dict[type[Numeric], str] = {Float32: "f32", Int32: "s32"}


def mapped(address: Any, rank: int | Int32) -> Any:
    """The address in the shared memory of the cluster's CTA ``rank``."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(rank)],
    )


def send(address: Any, values: Sequence[Any], barrier: Any) -> None:
    """Store two or four values of 32 bits; both addresses are ``mapped`` to the same CTA."""
    registers = ", ".join(f"{{$r{e + 2}}}" for e in range(len(values)))
    cute.arch.inline_ptx(
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{len(values)}."
        f"{_PTX_TYPES[type(values[0])]} "
        f"[{{$r0}}], {{{registers}}}, [{{$r1}}];",
        read_only_args=[Int32(address), Int32(barrier), *values],
    )


def read(address: Any, count: int, element: type[Numeric]) -> Any:
    """Two or four values, float32 or int32, of this CTA's shared memory."""
    registers = ", ".join(f"{{$w{e}}}" for e in range(count))
    return cute.arch.inline_ptx(
        f"ld.shared.v{count}.{_PTX_TYPES[element]} {{{registers}}}, [{{$r0}}];",
        write_only_types=[element] * count,
        read_only_args=[Int32(address)],
    )
