"""Configurations of the kernel with narrow weights (``fusedops/cutlass/sm90_mixed.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fusedops.config.files import SHARED_BYTES
from fusedops.weight.fragments import (
    PIECE_BYTES,
    STRIP_ROWS,
    ActivationBits,
    CodeBits,
    piece_columns,
)

__all__ = ["MixedConfig", "NarrowTile", "NarrowWeight", "aligned", "mixed_stages"]

WGMMA_ROWS = 64
_TMA_ALIGNMENT = 128
_OTHERS_BYTES = 3072
"""Shared memory for barriers and for the alignment of what stands before the ring."""
_MAX_BOX = 256
"""Elements of a TMA box along one dimension (PTX ISA, "Tensors: bounding box")."""
_MOST_SUMS = {1: 128, 2: 128, 3: 96, 4: 64}
"""Padded M times warpgroups for which the kernel has registers enough, by the warpgroups."""

Kind = Literal["int4", "int8", "e4m3"]


@dataclass(frozen=True)
class NarrowWeight:
    """What a kernel is compiled for of a weight's format.

    Attributes:
        kind: the codes.
        group: columns of K that share a scale: 32, 64 or 128; 0: all of K.
        zeros: whether int4 codes have zero points (uint8, at most 16); else they are stored plus 8.
        scale_dtype: float32, bfloat16 or float16.
        x_bits: 16 beside bfloat16 or float16 activations, 8 beside e4m3 ones (int4 only).
    """

    kind: Kind
    group: int = 0
    zeros: bool = False
    scale_dtype: torch.dtype = torch.bfloat16
    x_bits: ActivationBits = 16

    @property
    def bits(self) -> CodeBits:
        """Bits of a code."""
        return 4 if self.kind == "int4" else 8

    @property
    def unit(self) -> int:
        """Columns that are converted at a time, into at most 16 registers."""
        return min(self.group or 64, 64)

    @property
    def step(self) -> int:
        """Columns of one wgmma."""
        return 32 if self.x_bits == 8 else 16

    @property
    def sum_group(self) -> int:
        """Columns whose products are summed apart; 0: all of K.

        The tensor cores keep about 14 bits of sums of e4m3 products (DeepSeek-V3 technical report,
        2024, section 3.5.2), so with those the groups end where there is no scale too.
        """
        return self.group or (128 if self.x_bits == 8 else 0)


@dataclass(frozen=True)
class NarrowTile:
    """A stage of a narrow weight: what a tile's rows have of it.

    Attributes:
        weight: the format.
        rows: weight rows (output columns) of a tile, a multiple of 16 up to 256.
        k: columns of K in a stage, a multiple of 64 and of the group.
        stages: TMA stages of the ring.
    """

    weight: NarrowWeight
    rows: int
    k: int
    stages: int

    @property
    def strips(self) -> int:
        """Strips of 16 weight rows in a tile."""
        return self.rows // STRIP_ROWS

    @property
    def strip_words(self) -> int:
        """int64 words of a strip in a stage."""
        return self.k // piece_columns(self.weight.bits) * PIECE_BYTES // 8

    @property
    def groups(self) -> int:
        """Groups of K in a stage; 0 where all of K is one."""
        return self.k // self.weight.group if self.weight.group else 0

    @property
    def sum_groups(self) -> int:
        """Groups of a stage whose products are summed apart; 1 where all of K is one."""
        return self.k // (self.weight.sum_group or self.k)

    @property
    def weight_bytes(self) -> int:
        """Codes of a stage."""
        return self.strips * self.strip_words * 8

    @property
    def scale_bytes(self) -> int:
        """Scales of a stage."""
        return self.groups * self.rows * self.weight.scale_dtype.itemsize

    @property
    def zero_bytes(self) -> int:
        """Zero points of a stage."""
        return self.groups * self.rows if self.weight.zeros else 0

    def illegal_stage(self) -> str | None:
        """Why no kernel can load such stages, or None if one can."""
        weight = self.weight
        if weight.group not in (0, 32, 64, 128):
            return f"group={weight.group}: 32, 64, 128, or 0 for all of K"
        if (weight.zeros or weight.x_bits == 8) and weight.kind != "int4":
            return f"{weight.kind} with zero points or e4m3 activations: only int4 has them"
        if self.rows % STRIP_ROWS or not STRIP_ROWS <= self.rows <= 4 * WGMMA_ROWS:
            return f"rows={self.rows} is no multiple of {STRIP_ROWS} up to {4 * WGMMA_ROWS}"
        if self.k % max(64, weight.sum_group) or self.k == 0:
            return f"k={self.k} is no multiple of 64 and of the group"
        if self.strip_words > _MAX_BOX:
            return f"k={self.k}: a strip of a stage is more than one load takes"
        return None


@dataclass(frozen=True)
class MixedConfig(NarrowTile):
    """A tiling of the kernel for few rows with narrow weights.

    Attributes:
        split: CTAs that share a tile's K (a cluster): 1, 2, or 4 with at least 16 padded rows.
        m_pad: padded M, the wgmma N: a multiple of 8.
        trigger, prefetch: as of ``fusedops.config.DecodeConfig``.
        zero_products: int4's zero points are subtracted by products of their own, which saves
            instructions and takes twice the products; always so beside e4m3 activations. With
            bfloat16 ones sums of 128 + q are subtracted from each other, so about 5 bits of
            float32's 24 are lost.
    """

    split: int
    m_pad: int
    trigger: int = -1
    prefetch: int = 0
    zero_products: bool = False

    @property
    def multiplies_zeros(self) -> bool:
        """Whether zero points are subtracted by products of their own."""
        return self.zero_products or self.weight.x_bits == 8

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups: each multiplies 64 weight rows."""
        return -(-self.rows // WGMMA_ROWS)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and one producer warp."""
        return self.warpgroups * 128 + 32

    @property
    def x_bytes(self) -> int:
        """Activations of a stage."""
        return self.m_pad * self.k * self.weight.x_bits // 8

    @property
    def group_sums(self) -> int:
        """Sets of accumulators that take groups in turn; 0 where the sums need no scale.

        A second set, for the tensor cores to run on while the first is scaled, needs registers.
        """
        if self.weight.sum_group == 0:
            return 0
        return 2 if self.m_pad <= (64 if self.weight.sum_group == 128 else 48) else 1

    def illegal(self) -> str | None:
        """Why no kernel can be compiled, or None if one can."""
        if reason := self.illegal_stage():
            return reason
        if self.zero_products and self.weight.kind != "int4":
            return f"{self.weight.kind} has no zero points"
        if self.m_pad % 8 or not 8 <= self.m_pad <= 128:
            return f"m_pad={self.m_pad} is no multiple of 8 up to 128"
        if self.warpgroups * self.m_pad > _MOST_SUMS[self.warpgroups]:
            return f"m_pad={self.m_pad} with rows={self.rows} takes more registers than there are"
        if self.split not in (1, 2, 4) or self.m_pad % (4 * self.split):
            return f"split={self.split}: 1, 2 or 4, each with whole columns of m_pad={self.m_pad}"
        if not 2 <= self.stages <= mixed_stages(self):
            return f"stages={self.stages}: 2 to {mixed_stages(self)} fit"
        return None


def mixed_stages(config: MixedConfig) -> int:
    """TMA stages that fit the shared memory beside exchange, statistics and barriers.

    ``config.stages`` is not read.
    """
    consumers = config.warpgroups * 128
    exchange = (config.split - 1) * consumers * (config.m_pad // (2 * config.split)) * 4
    statistics = 2 * (config.warpgroups * 4 + 1) * config.m_pad * 4
    parts = (
        config.weight_bytes,
        config.x_bytes,
        aligned(config.scale_bytes),
        aligned(config.zero_bytes),
        16,
    )
    return min(24, (SHARED_BYTES - exchange - statistics - _OTHERS_BYTES) // sum(parts))


def aligned(size: int) -> int:
    """``size`` bytes in whole units that a tensor load's place in shared memory is aligned to."""
    return -(-size // _TMA_ALIGNMENT) * _TMA_ALIGNMENT
