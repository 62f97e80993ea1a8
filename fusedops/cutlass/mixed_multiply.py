"""A warpgroup's products of one stage: codes to registers, wgmma, scales on the sums of a group.

Between barriers a stage is one unrolled sequence: units of ``NarrowWeight.unit`` columns are
converted into two sets of A registers in turn, so a unit's conversion runs beside the products of
the one before it. A group's products are summed apart and multiplied by the scale into the float32
sums of the tile: products of codes and activations are exact, and the scale costs one fused
multiply-add for each sum and group instead of one for each weight.

Sources: PTX ISA, "wgmma.mma_async" (A in registers), "wgmma.fence", "wgmma.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fusedops.cutlass.math import CUTE_DTYPES
from fusedops.cutlass.mixed_config import MixedConfig
from fusedops.cutlass.mixed_convert import fragment, zero_constants
from fusedops.cutlass.mixed_layout import PIECE_BYTES

__all__ = ["StageProducts", "a_registers", "scale_pair", "zero_pair"]

_STEP = 16
"""Columns of one wgmma of 16-bit operands."""


def scale_pair(address: Any, dtype: torch.dtype, space: str) -> Any:
    """Two neighbouring scales at a byte address of ``space`` (shared or global), as float32."""
    if dtype == torch.float32:
        code = f"ld.{space}.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}];"
    elif dtype == torch.bfloat16:
        code = (
            f"{{ .reg .b32 pair; ld.{space}.b32 pair, [{{$r0}}]; .reg .b32 low, high; "
            "shl.b32 low, pair, 16; and.b32 high, pair, 0xffff0000; "
            "mov.b32 {$w0}, low; mov.b32 {$w1}, high; }"
        )
    else:
        code = (
            f"{{ .reg .b16 low, high; ld.{space}.v2.b16 {{low, high}}, [{{$r0}}]; "
            "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        )
    return cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[address])


def zero_pair(address: Any, space: str) -> Any:
    """Two neighbouring zero points at a byte address, in the lower bytes of a register."""
    return cute.arch.inline_ptx(
        f"ld.{space}.u16 {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address]
    )


def _read_words(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@dataclass(frozen=True)
class StageProducts:
    """The products of a stage, for one configuration.

    Attributes:
        config: the tiling.
        dtype: of the activations.
        scale_dtype: of the scales.
    """

    config: MixedConfig
    dtype: torch.dtype
    scale_dtype: torch.dtype

    def run(
        self,
        multiply: tuple[Any, Any],
        acc: cute.Tensor,
        sums: Any,
        registers: Any,
        frag_x: cute.Tensor,
        addresses: Any,
        stage: Int32,
        constants: Any,
    ) -> None:
        """Multiply a stage that has arrived; all products have ended on return.

        Args:
            multiply: the tiled MMA that adds to its accumulators, the one that starts them anew.
            acc: float32 sums of the tile.
            sums: ``config.group_sums`` sets of sums of a group.
            registers: two sets of A fragments of a unit.
            frag_x: descriptors of the activations.
            addresses: shared memory addresses, of the stage and this thread, of its codes, scales
                and zero points; the latter two None where there are none.
            stage: index in the ring.
            constants: of the zero points where all of K has one; else None.
        """
        cfg, weight = self.config, self.config.weight
        codes, scales, zeros = addresses
        words: list[Any] = []
        for piece in range(cfg.strip_words * 8 // PIECE_BYTES):
            words += _read_words(codes + piece * PIECE_BYTES)
        pairs = [
            scale_pair(scales + g * cfg.rows * weight.scale_bytes, self.scale_dtype, "shared")
            for g in range(cfg.groups)
        ]
        by_group = [constants]
        if zeros is not None:
            by_group = [
                zero_constants(zero_pair(zeros + g * cfg.rows, "shared"), self.dtype)
                for g in range(cfg.groups)
            ]
        words_a_step = weight.bits // 4
        steps = weight.unit // _STEP
        group = weight.group or cfg.k
        for unit in range(cfg.k // weight.unit):
            first_step = unit * steps
            of_group = first_step * _STEP // group
            a = registers[unit % 2]
            packed = cute.recast_tensor(a, Int32)
            for s in range(steps):
                at = (first_step + s) * words_a_step
                four = fragment(
                    words[at : at + words_a_step],
                    weight,
                    self.dtype,
                    by_group[of_group % len(by_group)],
                )
                for r in range(4):
                    packed[4 * s + r] = four[r]
            target = acc
            fresh = False
            if cfg.group_sums > 0:
                target = sums[of_group % cfg.group_sums]
                fresh = first_step * _STEP % group == 0
            warpgroup.fence()
            for s in range(steps):
                cute.gemm(
                    multiply[fresh and s == 0],
                    target,
                    a[(None, None, s)],
                    frag_x[(None, None, first_step + s, stage)],
                    target,
                )
            warpgroup.commit_group()
            ends = (first_step + steps) * _STEP % group == 0
            if cfg.group_sums == 1 and ends:
                warpgroup.wait_group(0)
                self._scale(acc, target, pairs[of_group])
            else:
                warpgroup.wait_group(1)
                if cfg.group_sums == 2 and fresh and unit > 0:
                    self._scale(acc, sums[(of_group - 1) % 2], pairs[of_group - 1])
        warpgroup.wait_group(0)
        if cfg.group_sums == 2:
            self._scale(acc, sums[(cfg.groups - 1) % 2], pairs[cfg.groups - 1])

    def _scale(self, acc: Any, sums: Any, pair: Any) -> None:
        for j in range(self.config.m_pad // 2):
            acc[j] = acc[j] + sums[j] * pair[(j >> 1) & 1]


def a_registers(config: MixedConfig, dtype: torch.dtype) -> Any:
    """A unit's A fragments: ((column parity, row half, K half), 1, k16 steps)."""
    layout = cute.make_layout(((2, 2, 2), 1, config.weight.unit // _STEP), stride=((1, 2, 4), 0, 8))
    return cute.make_rmem_tensor(layout, CUTE_DTYPES[dtype])
