"""A warpgroup's products of a tile of many rows: codes to registers, wgmma, scales on group sums.

The products of a tile are one sequence of units of ``MixedPrefillConfig.unit`` columns, across the
stages of the ring; while one runs, the next is made ready::

    issue unit u -> wait for unit u - 1 -> scale a part of the last group's sums -> read the codes
    of unit u + 2 -> convert unit u + 1 into the registers that unit u - 1 had

Once in a turn of the loop (one or two stages) all products are waited for: ptxas serializes those
whose sums are read in a later turn than they are issued in. The other warpgroup's run meanwhile.

A group's products are summed apart and multiplied by the scale into the float32 sums of the tile,
as in ``fusedops.cutlass.mixed_multiply``, in the same order: a row's result does not depend on
which of the kernels computes it. With two sets of group sums the next group's products run
meanwhile.

Sources: PTX ISA, "wgmma.mma_async" (A in registers), "wgmma.fence", "wgmma.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from fusedops.config.mixed_prefill import MixedPrefillConfig
from fusedops.cutlass.mixed_convert import code_scales, fragment, zero_constants
from fusedops.cutlass.mixed_multiply import WORD_STRIDE, read_words, scale_pair, zero_pair
from fusedops.cutlass.mixed_operands import StageAddresses, WeightOperands
from fusedops.weight.fragments import piece_columns

__all__ = ["TileProducts"]


@dataclass
class _Codes:
    """What a thread has read ahead of conversion, while the code is traced.

    Attributes:
        words: of codes, in the order of K.
        constants: of the zero points of the unit that they begin with.
    """

    words: list[Any]
    constants: Any


@dataclass(frozen=True)
class TileProducts:
    """The products of a tile, for one configuration.

    Attributes:
        config: the tiling.
        dtype: of the activations.
        operands: the weight's.
    """

    config: MixedPrefillConfig
    dtype: torch.dtype
    operands: WeightOperands

    @property
    def units(self) -> int:
        """Units of a stage."""
        return self.config.k // self.config.unit

    @property
    def unit_words(self) -> int:
        """Words of codes that a thread has of a unit."""
        return self.config.unit * self.config.weight.bits // 64

    @property
    def steps(self) -> int:
        """Fragments of a unit's codes."""
        return self.config.unit // self.config.weight.step

    @property
    def carried(self) -> int:
        """Registers from one turn of the loop to the next: a unit's codes and constants."""
        return self.unit_words + self._constants

    @property
    def _constants(self) -> int:
        """Constants of zero points that lie in the stages."""
        if not (self.config.weight.zeros and self.config.groups):
            return 0
        return 4 if self.config.multiplies_zeros else 2

    @cute.jit
    def run(
        self,
        ring: cutlass.Constexpr,
        instructions: Any,
        acc: cute.Tensor,
        sums: Any,
        registers: Any,
        state: Any,
        frag_x: cute.Tensor,
        first: Any,
        barriers: Any,
        iteration: Int32,
        stages: Int32,
        constants: Any,
    ) -> None:
        """Multiply a tile; ``finish`` adds the last group.

        Args:
            ring: of the kernel.
            instructions: the tiled MMA that adds to its accumulators, the one that starts them
                anew.
            acc: float32 sums of the tile.
            sums: ``config.group_sums`` sets of sums of a group.
            registers: two sets of A fragments of a unit.
            state: ``carried`` Int32, and two float32 for the scales of a group.
            frag_x: descriptors of the activations.
            first: addresses of what the thread reads of stage 0: codes, scales, zero points.
            barriers: full and empty ones, and the one that counts the stages left behind.
            iteration: of the ring that the tile begins with.
            stages: of the tile, whole spans.
            constants: of zero points, where the stages do not hold them.
        """
        full, empty, ahead = barriers
        carried, held = state
        span = self.config.span
        acc.fill(0.0)
        held.fill(0.0)
        if const_expr(self.config.group_sums == 2):
            # The first group finds sums before it that add nothing.
            sums[1].fill(0.0)
        stage = iteration % ring.stages
        parity = (iteration // ring.stages) & 1
        cute.arch.mbarrier_wait(full + stage, parity)
        self._start(registers, carried, first, stage, constants)
        before = stage
        for kt in cutlass.range(0, stages, span, unroll=1):
            for part in cutlass.range_constexpr(span):
                following, its_parity = ring.next(stage, parity)
                # The last stage is followed by itself: what is converted then is not used.
                more = kt + part + 1 < stages
                awaited = cutlass.select_(more, following, stage)
                awaited_parity = cutlass.select_(more, its_parity, parity)
                codes = self._unpack(carried, constants)
                for unit in cutlass.range_constexpr(self.units):
                    self._issue(instructions, acc, sums, registers, frag_x, stage, part, unit)
                    if const_expr(unit == 0 and part > 0):
                        _leave(ring, empty + before, ahead)
                    self._scale_slice(acc, sums, held, part, unit)
                    if const_expr(unit == self.units - 2):
                        cute.arch.mbarrier_wait(full + awaited, awaited_parity)
                    self._read_scales(held, first, stage, unit)
                    self._convert_next(codes, registers, first, (stage, awaited), unit, constants)
                    self._scale_all(acc, sums, held, unit)
                self._pack(carried, codes)
                before, stage, parity = stage, following, its_parity
            warpgroup.wait_group(0)
            _leave(ring, empty + before, ahead)

    def finish(self, acc: Any, sums: Any, held: Any) -> None:
        """Add the sums of a tile's last group."""
        if self.config.group_sums == 2:
            self._promote(acc, sums[1], held, range(self.config.accumulators))

    def _addresses(self, first: Any, stage: Any) -> StageAddresses:
        return self.operands.stage(StageAddresses(*first), stage)

    def _start(self, registers: Any, carried: Any, first: Any, stage: Any, constants: Any) -> None:
        """Convert the tile's first unit and read the second's codes."""
        at = self._addresses(first, stage)
        codes = self._read(None, at, 0, constants)
        self._convert(registers[0], codes)
        self._pack(carried, self._read(codes, at, 1, constants))

    def _issue(
        self,
        instructions: Any,
        acc: Any,
        sums: Any,
        registers: Any,
        frag_x: Any,
        stage: Any,
        part: int,
        unit: int,
    ) -> None:
        """Issue a unit's products as one group; wait for all before it."""
        cfg = self.config
        adding, starting = instructions
        target, starts = acc, False
        if cfg.group_sums:
            target = sums[self._group(part, unit) % cfg.group_sums]
            starts = unit * cfg.unit % cfg.weight.sum_group == 0
        a = registers[unit % 2]
        per_load = cfg.x_columns // cfg.weight.step
        warpgroup.fence()
        for s in range(self.steps):
            load, step = divmod(unit * self.steps + s, per_load)
            x = frag_x[(None, None, step, stage * cfg.x_loads + load)]
            instruction = starting if starts and s == 0 else adding
            cute.gemm(instruction, target, a[(None, None, s)], x, target)
            if cfg.multiplies_zeros:
                cute.gemm(adding, target, a[(None, None, self.steps)], x, target)
        warpgroup.commit_group()
        warpgroup.wait_group(1)

    def _group(self, part: int, unit: int) -> int:
        """Index of a unit's group in a span."""
        cfg = self.config
        return part * cfg.sum_groups + unit * cfg.unit // cfg.weight.sum_group

    def _convert_next(
        self,
        codes: _Codes,
        registers: Any,
        first: Any,
        stages: tuple[Any, Any],
        unit: int,
        constants: Any,
    ) -> None:
        """Read the codes of the unit after the next, and convert the next.

        Args:
            codes: of the next unit; those read on return.
            stages: the current one and the one after it.
        """
        stage = stages[(unit + 2) // self.units]
        at = self._addresses(first, stage)
        following = self._read(codes, at, (unit + 2) % self.units, constants)
        self._convert(registers[(unit + 1) % 2], codes)
        codes.words, codes.constants = following.words, following.constants

    def _read(self, before: _Codes | None, at: StageAddresses, unit: int, constants: Any) -> _Codes:
        """The codes of a unit of a stage, after those of the unit before."""
        cfg = self.config
        piece, within = divmod(unit * cfg.unit, piece_columns(cfg.weight.bits))
        if within == 0:
            pieces = max(1, self.unit_words // 4)
            words = [
                word
                for p in range(pieces)
                for word in read_words(at.codes + (piece + p) * 4 * WORD_STRIDE)
            ]
        else:
            assert before is not None
            words = before.words[self.unit_words :]
        if self._constants:
            group, in_group = divmod(unit * cfg.unit, cfg.weight.group)
            if in_group == 0:
                zeros = zero_pair(at.zeros + group * cfg.rows)
                constants = zero_constants(zeros, self.dtype, cfg.multiplies_zeros)
            else:
                assert before is not None
                constants = before.constants
        return _Codes(words, constants)

    def _convert(self, a: Any, codes: _Codes) -> None:
        """Convert a unit's codes into A fragments."""
        cfg = self.config
        packed = cute.recast_tensor(a, Int32)
        words = self.unit_words // self.steps
        taken = None if cfg.multiplies_zeros else codes.constants
        for s in range(self.steps):
            four = fragment(codes.words[s * words : (s + 1) * words], cfg.weight, self.dtype, taken)
            for r in range(4):
                packed[4 * s + r] = four[r]
        if cfg.multiplies_zeros:
            for r in range(4):
                packed[4 * self.steps + r] = codes.constants[r]

    def _pack(self, carried: Any, codes: _Codes) -> None:
        """Keep a unit's codes for the next turn of the loop."""
        kept = codes.words[: self.unit_words]
        kept += list(codes.constants or ())[: self._constants]
        for i, value in enumerate(kept):
            carried[i] = value

    def _unpack(self, carried: Any, constants: Any) -> _Codes:
        words = [carried[i] for i in range(self.unit_words)]
        if self._constants:
            constants = tuple(carried[self.unit_words + i] for i in range(self._constants))
        return _Codes(words, constants)

    def _read_scales(self, held: Any, first: Any, stage: Any, unit: int) -> None:
        """Read the scales of the group that ends with a unit."""
        cfg = self.config
        if not cfg.groups or (unit + 1) * cfg.unit % cfg.weight.group:
            return
        units = code_scales(self.dtype, cfg.multiplies_zeros)
        at = self._addresses(first, stage)
        group = unit * cfg.unit // cfg.weight.group
        scale_bytes = cfg.rows * cfg.weight.scale_dtype.itemsize
        pair = scale_pair(at.scales + group * scale_bytes, cfg.weight.scale_dtype)
        for half in range(2):
            held[half] = pair[half] * units[half]

    def _scale_slice(self, acc: Any, sums: Any, held: Any, part: int, unit: int) -> None:
        """Add a part of the sums of the group before, a part in each unit of this one."""
        cfg = self.config
        if cfg.group_sums != 2:
            return
        per_group = cfg.weight.sum_group // cfg.unit
        size = cfg.accumulators // per_group
        place = unit % per_group
        before = sums[(self._group(part, unit) + 1) % 2]
        self._promote(acc, before, held, range(place * size, (place + 1) * size))

    def _scale_all(self, acc: Any, sums: Any, held: Any, unit: int) -> None:
        """Where there is one set of group sums: at the group's end add it."""
        cfg = self.config
        if cfg.group_sums == 1 and (unit + 1) * cfg.unit % cfg.weight.sum_group == 0:
            warpgroup.wait_group(0)
            self._promote(acc, sums[0], held, range(cfg.accumulators))

    def _promote(self, acc: Any, part: Any, held: Any, which: range) -> None:
        scaled = self.config.groups > 0
        for j in which:
            acc[j] = acc[j] + (part[j] * held[(j >> 1) & 1] if scaled else part[j])


@cute.jit
def _leave(ring: cutlass.Constexpr, empty: cute.Pointer, ahead: cute.Pointer) -> None:
    """Free a stage whose products are complete, once all lanes have read their part; count it."""
    cute.arch.sync_warp()
    ring.release(empty)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ahead)
