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

from fusedops.config.mixed import MixedConfig
from fusedops.cutlass.mixed_convert import code_scales, fragment, zero_constants
from fusedops.cutlass.mixed_operands import ROW_HALF, StageAddresses
from fusedops.weight.fragments import PIECE_BYTES

__all__ = ["WORD_STRIDE", "StageProducts", "a_registers", "read_words", "scale_pair", "zero_pair"]

WORD_STRIDE = PIECE_BYTES // 4
"""Bytes from one to the next 32-bit word of a thread, over whole reads of four words."""


def scale_pair(address: Any, dtype: torch.dtype) -> Any:
    """The scales of a thread's two rows, float32; at the first one's byte address."""
    apart = ROW_HALF * dtype.itemsize
    if dtype == torch.float32:
        code = f"ld.shared.f32 {{$w0}}, [{{$r0}}]; ld.shared.f32 {{$w1}}, [{{$r0}}+{apart}];"
    else:
        # A bfloat16 is the upper half of a float32.
        moves = (
            "mov.b32 {$w0}, {zero, low}; mov.b32 {$w1}, {zero, high}; "
            if dtype == torch.bfloat16
            else "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; "
        )
        code = (
            "{ .reg .b16 low, high, zero; mov.b16 zero, 0; "
            f"ld.shared.b16 low, [{{$r0}}]; ld.shared.b16 high, [{{$r0}}+{apart}]; {moves}}}"
        )
    return cute.arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[address])


def zero_pair(address: Any) -> Any:
    """The zero points of a thread's two rows; at the first one's byte address."""
    code = f"ld.shared.u8 {{$w0}}, [{{$r0}}]; ld.shared.u8 {{$w1}}, [{{$r0}}+{ROW_HALF}];"
    return cute.arch.inline_ptx(code, write_only_types=[Int32] * 2, read_only_args=[address])


def read_words(address: Any) -> Any:
    """A thread's four words of a piece, at their byte address."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


class _Reader:
    """What a thread has read of a stage, while the stage's code is traced.

    Attributes:
        words: of codes, in the order of K.
        scales: what sums of a group are multiplied by, each of both rows; None for 1.
        constants: of the groups' zero points; of all groups, where the stage holds none.
    """

    def __init__(
        self, config: MixedConfig, dtype: torch.dtype, at: StageAddresses, constants: Any
    ) -> None:
        self._config, self._dtype, self._at = config, dtype, at
        self.words: list[Any] = []
        self.scales: list[Any] = []
        self.constants: list[Any] = []
        if at.zeros is None:
            self.constants = [constants] * config.sum_groups
        if not config.groups:
            self.scales = [None] * config.sum_groups

    def read(self, columns: int) -> None:
        """Read what the first ``columns`` of the stage need and is not there yet."""
        cfg, at = self._config, self._at
        while len(self.words) < columns * cfg.weight.bits // 64:
            self.words += read_words(at.codes + len(self.words) * WORD_STRIDE)
        if not cfg.groups:
            return
        scale_bytes = cfg.rows * cfg.weight.scale_dtype.itemsize
        for group in range(len(self.scales), -(-columns // cfg.weight.group)):
            pair = scale_pair(at.scales + group * scale_bytes, cfg.weight.scale_dtype)
            units = code_scales(self._dtype, cfg.multiplies_zeros)
            self.scales.append([scale * unit for scale, unit in zip(pair, units, strict=True)])
            if at.zeros is not None:
                zeros = zero_pair(at.zeros + group * cfg.rows)
                self.constants.append(zero_constants(zeros, self._dtype, cfg.multiplies_zeros))


@dataclass(frozen=True)
class StageProducts:
    """The products of a stage, for one configuration.

    Attributes:
        config: the tiling.
        dtype: of the activations.
    """

    config: MixedConfig
    dtype: torch.dtype

    def run(
        self,
        multiply: tuple[Any, Any],
        acc: cute.Tensor,
        sums: Any,
        registers: Any,
        frag_x: cute.Tensor,
        addresses: StageAddresses,
        stage: Int32,
        constants: Any,
    ) -> None:
        """Multiply a stage that has arrived; all products have ended on return.

        Args:
            multiply: the tiled MMA that adds to its accumulators, the one that starts them anew.
            acc: float32 sums of the tile.
            sums: ``config.group_sums`` sets of sums of a group.
            registers: two sets of A fragments of a unit, with one more step where zero points are
                multiplied.
            frag_x: descriptors of the activations.
            addresses: where this thread reads the stage.
            stage: index in the ring.
            constants: of the zero points, where the stage does not hold them.
        """
        cfg, weight = self.config, self.config.weight
        group = weight.sum_group or cfg.k
        reader = _Reader(cfg, self.dtype, addresses, constants)
        for first in range(0, cfg.k, weight.unit):
            # The next unit's words come while this one's are converted.
            reader.read(min(first + 2 * weight.unit, cfg.k))
            of_group, in_group = divmod(first, group)
            a = registers[first // weight.unit % 2]
            self._convert(a, reader, first, reader.constants[of_group])
            target, starts = acc, False
            if cfg.group_sums > 0:
                target, starts = sums[of_group % cfg.group_sums], in_group == 0
            warpgroup.fence()
            for s in range(weight.unit // weight.step):
                x = frag_x[(None, None, first // weight.step + s, stage)]
                mma = multiply[starts and s == 0]
                cute.gemm(mma, target, a[(None, None, s)], x, target)
                if cfg.multiplies_zeros:
                    offsets = a[(None, None, weight.unit // weight.step)]
                    cute.gemm(multiply[False], target, offsets, x, target)
            warpgroup.commit_group()
            if cfg.group_sums == 1 and in_group + weight.unit == group:
                warpgroup.wait_group(0)
                self._scale(acc, target, reader.scales[of_group])
            else:
                warpgroup.wait_group(1)
                if cfg.group_sums == 2 and starts and first > 0:
                    self._scale(acc, sums[(of_group - 1) % 2], reader.scales[of_group - 1])
        warpgroup.wait_group(0)
        if cfg.group_sums == 2:
            self._scale(acc, sums[(cfg.sum_groups - 1) % 2], reader.scales[-1])

    def _convert(self, a: Any, reader: _Reader, first: int, constants: Any) -> None:
        """Convert the unit that starts at column ``first`` of the stage."""
        weight = self.config.weight
        packed = cute.recast_tensor(a, Int32)
        steps = weight.unit // weight.step
        words = weight.step * weight.bits // 64
        for s in range(steps):
            at = (first // weight.step + s) * words
            taken = None if self.config.multiplies_zeros else constants
            four = fragment(reader.words[at : at + words], weight, self.dtype, taken)
            for r in range(4):
                packed[4 * s + r] = four[r]
        if self.config.multiplies_zeros:
            for r in range(4):
                packed[4 * steps + r] = constants[r]

    def _scale(self, acc: Any, sums: Any, pair: Any) -> None:
        for j in range(self.config.m_pad // 2):
            scaled = sums[j] if pair is None else sums[j] * pair[(j >> 1) & 1]
            acc[j] = acc[j] + scaled


def a_registers(steps: int, element: Any) -> Any:
    """A fragments of wgmma steps: ((neighbours in K, row half, K half), 1, steps)."""
    pack = 32 // element.width
    layout = cute.make_layout(((pack, 2, 2), 1, steps), stride=((1, pack, 2 * pack), 0, 4 * pack))
    return cute.make_rmem_tensor(layout, element)
