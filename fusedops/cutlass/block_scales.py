"""Scales of e4m3 blocks: x's through the ring, the weight's from memory, both to the sums.

x has a float32 scale for every row and 128 columns of K, (ceil(K / 128), M) with M contiguous; the
weight one for every 128 x 128 elements, (ceil(N / 128), ceil(K / 128)), or for every 256 rows two
that alternate every 8 rows (``interleaved``, see ``fusedops.weight.BlockFp8``). A tile's scales of
x come with its elements by one more bulk copy a stage. The weight's are few: every thread loads
those of the next stage while it works on one, 32 stages out of one line of the L1.

``WeightRows`` and ``ActivationRows`` say which scales a thread's sums take, for the two operand
orders; a thread's accumulators lie as in ``accumulators``.

Sources: PTX ISA, "cp.async.bulk.tensor", "Register Fragments for wgmma.mma_async"; the format is
that of DeepSeek-V3's checkpoints (DeepSeek-V3 Technical Report, 2024, 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import cutlass
from cutlass import Float32, Int32, cute, select_

from fusedops.config.elements import SCALE_BLOCK, scale_bytes
from fusedops.cutlass.arguments import fake_tensor
from fusedops.cutlass.distributed import read
from fusedops.cutlass.ring import load_atom
from fusedops.epilogue.nodes import PACK

__all__ = ["ActivationRows", "ScaleStages", "SumScales", "WeightRows", "fake_scales"]

_MOST_OVERLAPPED = 64
"""Padded M up to which a thread's registers hold the parts of two blocks beside the sums."""


def fake_scales() -> tuple[Any, Any]:
    """x's scales and the weight's to trace a kernel on; rows of x's start at 16 bytes."""
    return fake_tensor(Float32, 2, aligned=True), fake_tensor(Float32, 2)


@dataclass(frozen=True)
class ScaleStages:
    """The scales of x in a ring's stages.

    Attributes:
        rows: of x in a tile.
        k: columns of K in a stage, a multiple of 128.
        stages: of the ring.
    """

    rows: int
    k: int
    stages: int

    @property
    def blocks(self) -> int:
        """Scales of a row in a stage."""
        return self.k // SCALE_BLOCK

    @property
    def loaded_bytes(self) -> int:
        """Bytes that a stage's copy brings."""
        return self.blocks * self.rows * 4

    @property
    def tile(self) -> tuple[int, int]:
        """(blocks, rows) of one copy."""
        return self.blocks, self.rows

    @property
    def pitch(self) -> int:
        """Elements from stage to stage: bulk tensor copies write to multiples of 128 bytes."""
        return scale_bytes(self.rows, self.k) // 4

    def _layout(self) -> Any:
        shape = (self.blocks, self.rows, self.stages)
        return cute.make_layout(shape, stride=(self.rows, 1, self.pitch))

    def atom(self, scales: Any) -> tuple[Any, Any]:
        """The bulk copy of a tile's scales, and the tensor to copy from."""
        return load_atom(scales, self._layout(), self.tile, 1)

    def buffer(self, smem: Any) -> Any:
        """Shared memory (blocks, rows, stages)."""
        return smem.allocate_tensor(Float32, self._layout(), byte_alignment=128)


class SumScales(Protocol):
    """Which scales a thread's sums take; ``at`` says where they lie."""

    @property
    def weight_blocks(self) -> int:
        """Blocks of the weight's rows that the thread's sums lie in."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether registers hold a stage's scales, and parts of all its blocks, beside the sums."""
        ...

    def weight_scales(self, scales: Any, at: Any, block: Any) -> list[Any]:
        """The weight's scales of one block of K."""
        ...

    def activations(self, stages: Any, at: Any, stage: Any, block: int) -> Any:
        """x's scales of one block of a stage."""
        ...

    def factors(self, at: Any, activations: Any, weight: list[Any]) -> Callable[[int], Any]:
        """The product of its two scales for each accumulator, made when it is asked for."""
        ...


def _first_block(row: Any, interleaved: bool) -> Any:
    """The block of a row of the weight; interleaved the first of the two that alternate there."""
    return row // (2 * SCALE_BLOCK) * 2 if interleaved else row // SCALE_BLOCK


def _element(scales: Any, row: Any, column: Any) -> Any:
    rows, columns = cute.size(scales, mode=[0]), cute.size(scales, mode=[1])
    return scales[cutlass.min(row, rows - 1), cutlass.min(column, columns - 1)]


@dataclass(frozen=True)
class WeightRows:
    """The weight on wgmma's row side: ``at`` is (a row of the thread's, its first column).

    Its two rows lie 8 apart in 16 that never cross a block, so they share the weight's scale;
    interleaved each has its own.

    Attributes:
        m_pad: columns of the accumulator.
        interleaved: of the weight's blocks.
    """

    m_pad: int
    interleaved: bool = False

    @property
    def weight_blocks(self) -> int:
        return 2 if self.interleaved else 1

    @property
    def overlaps(self) -> bool:
        return self.m_pad <= _MOST_OVERLAPPED

    def weight_scales(self, scales: Any, at: Any, block: Any) -> list[Any]:
        first = _first_block(at[0], self.interleaved)
        return [_element(scales, first + i, block) for i in range(self.weight_blocks)]

    def activations(self, stages: Any, at: Any, stage: Any, block: int) -> list[Any]:
        rows, pitch = self.m_pad, stages.stride[2]
        first = Int32(stages.iterator.toint()) + (stage * pitch + block * rows + at[1]) * 4
        pairs = [read(first + 32 * group, 2, Float32) for group in range(rows // 8)]
        return [pair[p] for pair in pairs for p in range(2)]

    def factors(self, at: Any, activations: Any, weight: list[Any]) -> Callable[[int], Any]:
        @cache
        def of(column: int, block: int) -> Any:
            return activations[column] * weight[block]

        last = self.weight_blocks - 1
        return lambda j: of((j >> 2) * 2 + (j & 1), (j >> 1) & last)


@dataclass(frozen=True)
class ActivationRows:
    """x on wgmma's row side: ``at`` is (the thread's first row of the tile, the tile's column).

    Attributes:
        tile_n: columns of a tile; they meet one or two blocks of the weight.
        blocks: 64-row blocks of a thread.
        step: rows from one of them to the next.
        interleaved: of the weight's blocks; tiles then start at multiples of 16 columns.
    """

    tile_n: int
    blocks: int
    step: int
    interleaved: bool = False

    @property
    def weight_blocks(self) -> int:
        if self.interleaved:
            return 2 if 2 * SCALE_BLOCK % self.tile_n == 0 else 4
        return 1 if SCALE_BLOCK % self.tile_n == 0 else 2

    @property
    def overlaps(self) -> bool:
        return True

    def weight_scales(self, scales: Any, at: Any, block: Any) -> list[Any]:
        first = _first_block(at[1], self.interleaved)
        return [_element(scales, first + i, block) for i in range(self.weight_blocks)]

    def activations(self, stages: Any, at: Any, stage: Any, block: int) -> list[Any]:
        return [
            [stages[block, at[0] + b * self.step + 8 * half, stage] for half in range(2)]
            for b in range(self.blocks)
        ]

    def factors(self, at: Any, activations: Any, weight: list[Any]) -> Callable[[int], Any]:
        products = [[[x * w for w in weight] for x in halves] for halves in activations]

        @cache
        def of(block: int, group: int, half: int) -> Any:
            return self._of(products[block][half], at[1], 8 * group)

        per_block = self.tile_n // 2
        return lambda j: of(j // per_block, j % per_block // 4, (j >> 1) & 1)

    def _of(self, products: list[Any], tile_column: Any, column: int) -> Any:
        """The product for a column of the tile, by the block of the weight that it lies in."""
        span = SCALE_BLOCK
        if self.interleaved:
            span, products = 2 * SCALE_BLOCK, products[column // PACK % 2 :: 2]
        if len(products) == 1:
            return products[0]
        if self.tile_n % span == 0:
            return products[column // span]
        in_first = tile_column % span + column < span
        return select_(in_first, products[0], products[1])
