"""An (M, N) operand of the prefill kernel's epilogue that comes by bulk tensor loads.

A chunk of it (the 64 rows and the columns of one staging buffer) lands in the buffer that the
chunk's results leave from. ldmatrix reads the fragments that stmatrix writes, so every warp finds
the operand where it then puts its results. Direct loads of neighbouring pairs, by contrast, touch
eight rows at a time.

Protocol, for the two buffers of a warpgroup, which chunks use in turn::

    first chunks of a tile:  before the products, warp 0 waits until the last stores have read both
                             buffers, announces the bytes and starts the loads
    chunk c:                 wait for its load -> read, compute, write -> ``Staging.publish``: the
                             store of chunk c - 1 has read the other buffer -> warp 0: load chunk
                             c + 1 there, store chunk c

``landed[b]`` takes one arrival a load, of buffer b; its phase is the number of loads before. The
later loads are not ahead of their use, which costs nothing while the other warpgroup multiplies:
the kernel has such an operand in ping-pong mode only.

Sources: PTX ISA, "cp.async.bulk.tensor", "ldmatrix", "mbarrier".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from fusedops.config.prefill import PrefillConfig
from fusedops.cutlass.staging import ROWS, Staging
from fusedops.cutlass.tile import halves_columns
from fusedops.epilogue.chain import Epilogue

__all__ = ["BulkLoads", "bulk_operand", "free_buffers", "result_operand"]


def bulk_operand(
    config: PrefillConfig,
    epilogue: Epilogue,
    operand_dtypes: tuple[torch.dtype | None, ...],
    staging: Staging,
    aligned: bool,
) -> str | None:
    """The operand that comes this way: the last one of the result's shape and 16-bit dtype."""
    if not (aligned and config.pingpong) or staging.dtype not in (torch.bfloat16, torch.float16):
        return None
    return result_operand(epilogue, operand_dtypes, staging.dtype)


def result_operand(
    epilogue: Epilogue, operand_dtypes: tuple[torch.dtype | None, ...], dtype: torch.dtype
) -> str | None:
    """The last operand that has the result's shape and ``dtype``, None for none."""
    dtypes = dict(zip((o.name for o in epilogue.operands), operand_dtypes, strict=True))
    found = None
    for node in epilogue:
        if halves_columns(node):
            found = None
        for operand in node.operands():
            if operand.axis == "mn" and dtypes[operand.name] == dtype:
                found = operand.name
    return found


@dataclass(frozen=True)
class BulkLoads:
    """The loads of one warpgroup, on a kernel's tensors.

    Attributes:
        staging: whose buffers they go to.
        atom, tensor: the load's copy atom and the operand's coordinates.
        s_out: the staging buffers.
        landed: a barrier a buffer.
    """

    staging: Staging
    atom: Any
    tensor: Any
    s_out: Any
    landed: Any

    @staticmethod
    def side(staging: Staging, tensor: Any) -> tuple[Any, Any]:
        """The operand as it is loaded: (atom, TMA tensor)."""
        buffer = cute.slice_(staging.layout(), (None, None, 0))
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, buffer, (ROWS, staging.columns)
        )
        return atom, coordinates

    @staticmethod
    def initialize(staging: Staging, landed: Any) -> None:
        """Set the barriers up; one thread calls this before the CTA synchronises."""
        for buffer in range(staging.buffers * staging.warpgroups):
            cute.arch.mbarrier_init(landed + buffer, 1)

    def start(self, box: tuple[Any, Any], buffer: Any, thread: Any) -> None:
        """Load a chunk, given by its index along M and N, into a free buffer; warp 0 does it."""
        tiles = cute.local_tile(self.tensor, (ROWS, self.staging.columns), (None, None))
        to, source = cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.s_out, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        _start(
            self.atom,
            source[(None, *box)],
            to[(None, buffer)],
            self.landed + buffer,
            ROWS * self.staging.width_bytes,
            thread,
        )

    def wait(self, buffer: Any, loads_before: Any) -> None:
        """Until the load that follows ``loads_before`` others into a buffer has landed."""
        cute.arch.mbarrier_wait(self.landed + buffer, loads_before & 1)


@cute.jit
def free_buffers(thread: Int32) -> None:
    """Warp 0 waits until its bulk stores have read every buffer."""
    if thread < 32:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _start(
    atom: cute.CopyAtom, source: Any, to: Any, barrier: Any, size_bytes: int, thread: Int32
) -> None:
    if thread < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size_bytes)
        cute.copy(atom, source, to, tma_bar_ptr=barrier)
