"""Fragments of mma.sync m16n8k16: reading them with ldmatrix, multiplying, and where they lie.

A thread's accumulators of one 16 x 8 tile are (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1) with
r = lane / 4 and c = 2 (lane % 4) (PTX ISA, "Matrix Fragments for mma.m16n8k16"). Neighbouring
16 x 8 tiles thus give a thread columns 8 apart: the partners of a packed gate/up weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Numeric, cute
from cutlass.cute.nvgpu.warp import MmaF16BF16Op

from fusedops.config.sm80 import MmaConfig
from fusedops.cutlass.sm80_copy import ELEMENT_BYTES, UNIT_BYTES, unit_swizzle
from fusedops.cutlass.tile import Coordinates, Slot

__all__ = ["MMA_K", "WarpTile"]

MMA_M = 16
MMA_N = 8
MMA_K = 16

_EPILOGUE_BLOCKS = 2
"""8-column blocks of a part of the epilogue, even: a gate's partners are neighbours."""

Part = tuple[int, int, int]
"""A row block of 16, the first of its 8-column blocks, their number."""


@dataclass(frozen=True)
class WarpTile:
    """A warp's part of a CTA's tile: ``blocks_m`` x ``blocks_n`` accumulator tiles of 16 x 8.

    Attributes:
        config: the tiling.
        element: type of x and w.
    """

    config: MmaConfig
    element: type[Numeric]

    @property
    def blocks_m(self) -> int:
        """Accumulator tiles along M."""
        return self.config.warp_m // MMA_M

    @property
    def blocks_n(self) -> int:
        """Accumulator tiles along N."""
        return self.config.warp_n // MMA_N

    def accumulators(self) -> Any:
        """Zeroed accumulators: ((column parity, row half), blocks_m, blocks_n)."""
        acc = cute.make_rmem_tensor(
            cute.make_layout(((2, 2), self.blocks_m, self.blocks_n)), Float32
        )
        acc.fill(0.0)
        return acc

    def origin(self, thread: Any) -> tuple[Any, Any]:
        """First row and first column of the thread's warp in the CTA's tile."""
        warp = cute.arch.make_warp_uniform(thread // 32)
        return (
            (warp % self.config.warps_m) * self.config.warp_m,
            (warp // self.config.warps_m) * self.config.warp_n,
        )

    def load_x(self, base: Any, first_row: Any, thread: Any, step: int) -> list[Any]:
        """Read a K step of the warp's rows of x, 4 registers for each block of 16 rows.

        ldmatrix.x4 takes row i of matrix j from lane 8 j + i. The order of an A fragment is (rows
        0-7, K 0-7), (rows 8-15, K 0-7), (rows 0-7, K 8-15), (rows 8-15, K 8-15).

        Args:
            base: shared memory address of the tile.
            first_row: of the warp's part, a multiple of 16.
            thread: index in the CTA.
            step: which 16 columns of the tile.
        """
        lane = thread % 32
        return self._load(base, first_row + lane % 16, lane // 16, self.blocks_m, step)

    def load_w(self, base: Any, first_row: Any, thread: Any, step: int) -> list[Any]:
        """Read a K step of the warp's rows of w, 4 registers for each block of 16 rows.

        As ``load_x``, in the order of two B fragments: rows 0-7, then rows 8-15, each K 0-7 first.
        """
        lane = thread % 32
        row = first_row + (lane // 16) * 8 + lane % 8
        return self._load(base, row, (lane // 8) % 2, self.blocks_n // 2, step)

    def _load(self, base: Any, row: Any, k_half: Any, blocks: int, step: int) -> list[Any]:
        unit = (2 * step + k_half) ^ unit_swizzle(row, self.config.tile_k)
        pitch = self.config.tile_k * ELEMENT_BYTES
        address = base + row * pitch + unit * UNIT_BYTES
        return [
            cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[Int32(address + block * 16 * pitch)],
            )
            for block in range(blocks)
        ]

    def multiply(self, acc: Any, x: list[Any], w: list[Any]) -> None:
        """Add the products of x's and w's 16 x 16 matrices to the accumulators."""
        a = cute.make_rmem_tensor(cute.make_layout((8, self.blocks_m)), self.element)
        b = cute.make_rmem_tensor(cute.make_layout((4, self.blocks_n)), self.element)
        a_words, b_words = cute.recast_tensor(a, Int32), cute.recast_tensor(b, Int32)
        for block, registers in enumerate(x):
            for i in range(4):
                a_words[i, block] = registers[i]
        for block, registers in enumerate(w):
            for i in range(4):
                b_words[i % 2, 2 * block + i // 2] = registers[i]
        atom = cute.make_mma_atom(MmaF16BF16Op(self.element, Float32, (MMA_M, MMA_N, MMA_K)))
        cute.gemm(atom, acc, a, b, acc)

    def parts(self, group_columns: int) -> list[Part]:
        """The parts on which the epilogue runs one after the other.

        Few columns each, so that a chain with many operands finds registers; where a node needs
        whole groups of columns, the warp's whole width, which then is one group
        (``MmaTile.legal``). Row blocks run fastest: what depends on the columns alone is then
        needed for a short while only.
        """
        count = self.blocks_n if group_columns > 1 else min(_EPILOGUE_BLOCKS, self.blocks_n)
        return [
            (row_block, first, min(count, self.blocks_n - first))
            for first in range(0, self.blocks_n, count)
            for row_block in range(self.blocks_m)
        ]

    def values(self, acc: Any, part: Part) -> dict[Slot, Any]:
        """The accumulators of a part by (m slot, n slot)."""
        row_block, first, count = part
        return {
            (half, 2 * j + parity): acc[(parity, half), row_block, first + j]
            for half in range(2)
            for j in range(count)
            for parity in range(2)
        }

    def coordinates(
        self,
        row: Any,
        column: Any,
        part: Part,
        thread: Any,
        sizes: tuple[Any, Any],
    ) -> Coordinates:
        """Where the ``values`` of a part lie in the result.

        Args:
            row, column: of the warp's tile in the result.
            part: one of ``parts``.
            thread: index in the CTA.
            sizes: (M, N).
        """
        row_block, first, count = part
        lane = thread % 32
        first_row = row + (row_block * MMA_M + lane // 4)
        first_column = column + (first * MMA_N + 2 * (lane % 4))
        n = tuple(first_column + (j * MMA_N + parity) for j in range(count) for parity in range(2))
        pairs = tuple(
            (4 * j + parity, 4 * j + 2 + parity) for j in range(count // 2) for parity in range(2)
        )
        return Coordinates((first_row, first_row + 8), n, pairs, *sizes)
