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

    def load(self, base: Any, first_row: Any, blocks: int, thread: Any, step: int) -> list[Any]:
        """Read the 16 x 16 matrices of ``blocks`` row blocks at K step ``step``, 4 registers each.

        Lane l gives ldmatrix.x4 the address of row l % 16, K half l / 16 of each matrix.

        Args:
            base: shared memory address of the tile.
            first_row: of the first block, a multiple of 16.
            blocks: 16-row blocks.
            thread: index in the CTA.
            step: which 16 columns of the tile.
        """
        lane = thread % 32
        row = first_row + lane % 16
        unit = (2 * step + lane // 16) ^ unit_swizzle(row, self.config.tile_k)
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
                # Matrices (rows 0-7, rows 8-15) x (K 0-7, K 8-15): each 8 rows are one B fragment.
                b_words[i // 2, 2 * block + i % 2] = registers[i]
        atom = cute.make_mma_atom(MmaF16BF16Op(self.element, Float32, (MMA_M, MMA_N, MMA_K)))
        cute.gemm(atom, acc, a, b, acc)

    def values(self, acc: Any, block: int) -> dict[Slot, Any]:
        """The accumulators of one row block by (m slot, n slot)."""
        return {
            (half, 2 * j + parity): acc[(parity, half), block, j]
            for half in range(2)
            for j in range(self.blocks_n)
            for parity in range(2)
        }

    def coordinates(
        self, row: Any, column: Any, block: int, thread: Any, sizes: tuple[Any, Any]
    ) -> Coordinates:
        """Where the values of one row block lie in the result.

        Args:
            row, column: of the warp's part in the result.
            block: row block.
            thread: index in the CTA.
            sizes: (M, N).
        """
        lane = thread % 32
        first_row = row + (block * MMA_M + lane // 4)
        first_column = column + 2 * (lane % 4)
        n = tuple(
            first_column + (j * MMA_N + parity) for j in range(self.blocks_n) for parity in range(2)
        )
        pairs = tuple(
            (4 * j + parity, 4 * j + 2 + parity)
            for j in range(self.blocks_n // 2)
            for parity in range(2)
        )
        return Coordinates((first_row, first_row + 8), n, pairs, *sizes)
