"""The operands of a narrow weight: codes, scales and zero points, from global memory to a thread.

Codes are the packed int64 words of ``fusedops.weight.fragments``; scales and zero points are
(groups, N), N contiguous. With groups along K all of them have a place in every stage of the ring;
where all of K is one group a thread reads its two rows' from global memory, once a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Numeric, Uint8, cute
from cutlass.cute.nvgpu import cpasync

from fusedops.config.mixed import NarrowTile, aligned
from fusedops.cutlass.math import CUTE_DTYPES

__all__ = ["StageAddresses", "WeightOperands"]

ROW_HALF = 8
"""Rows between a thread's two rows."""


@dataclass(frozen=True)
class StageAddresses:
    """Shared memory addresses of what a thread reads of a stage; None for what is not there.

    Attributes:
        codes: its 16 bytes of the first piece.
        scales, zeros: of its first row and the stage's first group.
    """

    codes: Any
    scales: Any = None
    zeros: Any = None


@dataclass(frozen=True)
class WeightOperands:
    """The operands of a weight in one configuration.

    Attributes:
        config: the tiling.
    """

    config: NarrowTile

    @property
    def elements(self) -> list[type[Numeric]]:
        """Element types of the operands that the ring takes."""
        weight = self.config.weight
        if not weight.group:
            return [Int64]
        return [Int64, CUTE_DTYPES[weight.scale_dtype], *([Uint8] if weight.zeros else [])]

    def layouts(self) -> list[Any]:
        """Shared memory layouts (of a tile, stages): codes row by row, others by group."""
        cfg = self.config
        tile = cfg.strips * cfg.strip_words
        layouts = [
            cute.make_layout(
                (cfg.strips, cfg.strip_words, cfg.stages), stride=(cfg.strip_words, 1, tile)
            )
        ]
        for element in self.elements[1:]:
            element_bytes = element.width // 8
            stage = aligned(cfg.groups * cfg.rows * element_bytes) // element_bytes
            layouts.append(
                cute.make_layout((cfg.rows, cfg.groups, cfg.stages), stride=(1, cfg.rows, stage))
            )
        return layouts

    def load_atoms(self, w: Any, quantization: Any, layouts: Any) -> list[tuple[Any, Any]]:
        """The TMA load of each operand and its coordinates, indexed (rows or strips, along K)."""
        sources = [w, *map(_transposed, quantization)][: len(layouts)]
        load = cpasync.CopyBulkTensorTileG2SOp()
        return [
            cpasync.make_tiled_tma_atom(
                load, source, cute.slice_(layout, (None, None, 0)), layout.shape[:2]
            )
            for source, layout in zip(sources, layouts, strict=True)
        ]

    def allocate(self, smem: Any, layouts: Any) -> list[Any]:
        """The operands' places in shared memory."""
        return [
            smem.allocate_tensor(element, layout, byte_alignment=128)
            for element, layout in zip(self.elements, layouts, strict=True)
        ]

    def partition(self, atoms: Any, tensors: Any, shared: Any) -> tuple[tuple[Any, ...], ...]:
        """(TMA atom, its global side, its shared side) of each, as ``DecodeLoads`` takes them."""
        one = cute.make_layout(1)
        triples = []
        for atom, tensor, to in zip(atoms, tensors, shared, strict=True):
            tiles = cute.local_tile(tensor, to.shape[:2], (None, None))
            target, source = cpasync.tma_partition(
                atom, 0, one, cute.group_modes(to, 0, 2), cute.group_modes(tiles, 0, 2)
            )
            triples.append((atom, source, target))
        return tuple(triples)

    def first_stage(self, shared: Any, strip: Any, lane: Any) -> StageAddresses:
        """Where a thread reads stage 0.

        Args:
            shared: the operands' places.
            strip: of the tile, that the thread's warp multiplies.
            lane: of the thread.
        """
        cfg = self.config
        base = [Int32(tensor.iterator.toint()) for tensor in shared]
        codes = base[0] + strip * (cfg.strip_words * 8) + lane * 16
        if not cfg.groups:
            return StageAddresses(codes)
        row = strip * 16 + lane // 4
        scales = base[1] + row * cfg.weight.scale_dtype.itemsize
        return StageAddresses(codes, scales, base[2] + row if cfg.weight.zeros else None)

    def stage(self, first: StageAddresses, stage: Any) -> StageAddresses:
        """Where the thread reads a stage."""
        cfg = self.config
        codes = first.codes + stage * cfg.weight_bytes
        if not cfg.groups:
            return StageAddresses(codes)
        scales = first.scales + stage * aligned(cfg.scale_bytes)
        zeros = first.zeros
        return StageAddresses(
            codes, scales, None if zeros is None else zeros + stage * aligned(cfg.zero_bytes)
        )

    def whole_rows(self, quantization: Any, row: Any, n_size: Any) -> tuple[Any, Any]:
        """Scales, float32, and zero points of a thread's two rows, where all of K has one.

        Args:
            quantization: the tensors, each (1, N).
            row: the first of the two.
            n_size: N; what belongs to rows beyond is not used.
        """
        if self.config.groups:
            return None, None
        rows = [cutlass.min(row + half, n_size - 1) for half in (0, ROW_HALF)]
        scales = [quantization[0][0, at].to(Float32) for at in rows]
        if not self.config.weight.zeros:
            return scales, None
        return scales, [quantization[1][0, at].to(Int32) for at in rows]


def _transposed(tensor: Any) -> Any:
    shape, stride = tensor.layout.shape, tensor.layout.stride
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape[::-1], stride=stride[::-1]))
