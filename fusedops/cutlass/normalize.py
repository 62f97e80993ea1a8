"""RMSNorm of the activations inside a kernel: stages of x are normalised in shared memory.

Warps of their own stand between the loading warp and the multiplying warpgroups. They wait for a
stage's bytes, replace x by its normalised value at the model's rounding points and hand the stage
on. A stage's way through a warp is mostly latency, so the warps form groups that take stages in
turn. A row's mean of squares comes from the producer's partial sums (``RowStat``), so no CTA has to
read a whole row; they are added in a fixed order.

Sources: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019; PTX ISA, "fence.proxy"
(wgmma and TMA read shared memory through the async proxy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, const_expr, cute

from fusedops.config import DecodeConfig
from fusedops.cutlass.arguments import fake_tensor
from fusedops.cutlass.math import CUTE_DTYPES, packed_pair, packed_product, round_to
from fusedops.prologue import Prologue, RmsNormPrologue

__all__ = ["NormalizeStages", "prologue_tensors", "stages_of"]

_VECTOR = 8
"""Elements of x in 16 bytes."""
_ATOM_COLUMNS = 64
_CHUNKS = _ATOM_COLUMNS // _VECTOR
_CHUNKS_PER_LANE = 4
"""Chunks of a stage that a lane keeps in flight, where a group of at most four warps allows it."""
_PARTS_AT_ONCE = 12
"""Partial sums that a thread has under way: with 132 parts and 16 rows, all of its own."""
_NAMED_BARRIER = 2


@dataclass(frozen=True)
class NormalizeStages:
    """The eight warps that normalise the stages of x.

    A lane has one 16-byte chunk of every 64 columns, in every ``group_rows``-th row.

    Attributes:
        prologue: eps, rounding order and weight offset.
        dtype: of x, bfloat16 or float16.
        weight_dtype: of the norm's weight.
        m_pad: rows of a stage, 8, 16 or 32.
        k: columns of a stage, a multiple of 64.
        stages: of the ring.
        weight_bytes: shared memory for the norm's weight along the CTA's part of K.
    """

    prologue: RmsNormPrologue
    dtype: torch.dtype
    weight_dtype: torch.dtype
    m_pad: int
    k: int
    stages: int
    weight_bytes: int

    threads = 256

    @property
    def group_warps(self) -> int:
        """Warps that share a stage, each of which hands it on by an arrival."""
        chunks = self.m_pad * self.k // _VECTOR
        return min(4, max(1, chunks // (32 * _CHUNKS_PER_LANE)))

    @property
    def groups(self) -> int:
        """Groups of warps; group g has the stages of the ring that are g modulo their number.

        So a group waits for every round of its stages: a barrier tells a round from the one
        before, but not from the one before that.
        """
        return self.threads // (32 * self.group_warps)

    @property
    def group_rows(self) -> int:
        """Rows that the lanes of a group cover at once."""
        return 32 * self.group_warps // _CHUNKS

    @property
    def lane_rows(self) -> int:
        """Rows of a lane."""
        return self.m_pad // self.group_rows

    def buffers(self, smem: Any) -> tuple[Any, Any]:
        """Partial sums of squares (row, warp), and the weight along the CTA's part of K."""
        layout = cute.make_layout((self.m_pad, self.threads // 32))
        sums = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        columns = self.weight_bytes // self.weight_dtype.itemsize
        weight = smem.allocate_tensor(
            CUTE_DTYPES[self.weight_dtype], cute.make_layout(columns), byte_alignment=16
        )
        return sums, weight

    @cute.jit
    def run(
        self,
        s_x: cute.Tensor,
        weight: cute.Tensor,
        sumsq: cute.Tensor,
        buffers: Any,
        full: cute.Pointer,
        ready: cute.Pointer,
        thread: Int32,
        sizes: Any,
        span: Any,
        pdl: cutlass.Constexpr,
    ) -> None:
        """Normalise ``total`` stages in the ring's order.

        Args:
            s_x: (m_pad, k, stages) in shared memory.
            weight: (K,), never written by another kernel, so it is read before the wait for one.
            sumsq: (parts, M) float32.
            buffers: see ``buffers``.
            full, ready: barriers of the stages as they come and as they are handed on.
            thread: 0 to ``threads`` - 1.
            sizes: (M, K).
            span: (first k-tile, k-tiles of a tile, stages in total).
        """
        _, k_size = sizes
        k_first, k_count, total = span
        sums, s_weight = buffers
        self._stage_weight(s_weight, weight, thread, k_first * self.k, k_count * self.k, k_size)
        if const_expr(pdl):
            cute.arch.griddepcontrol_wait()
        self._add_parts(sumsq, sums, thread, sizes)

        lane = thread % (32 * self.group_warps)
        row, chunk = lane // _CHUNKS, lane % _CHUNKS
        scales = self._scales(sums, row, sizes)
        copy = cute.make_tiled_copy_tv(
            cute.make_copy_atom(
                cute.nvgpu.CopyUniversalOp(), CUTE_DTYPES[self.dtype], num_bits_per_copy=128
            ),
            cute.make_layout((self.group_rows, _CHUNKS), stride=(_CHUNKS, 1)),
            cute.make_layout((1, _VECTOR)),
        ).get_slice(lane)
        mine = copy.partition_S(s_x)
        group = thread // (32 * self.group_warps)
        stage, parity = group, Int32(0)
        i = cutlass.select_(group < self.stages, group, total)
        while i < total:
            cute.arch.mbarrier_wait(full + stage, parity)
            first = (i % k_count) * (self.k // _VECTOR) + chunk
            self._normalize(mine[(None, None, None, stage)], s_weight, first, scales)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ready + stage)
            following = stage + self.groups
            wraps = following >= self.stages
            i += cutlass.select_(wraps, self.stages - stage + group, Int32(self.groups))
            stage = cutlass.select_(wraps, group, following)
            parity = cutlass.select_(wraps, parity ^ 1, parity)

    @cute.jit
    def _stage_weight(
        self,
        s_weight: cute.Tensor,
        weight: cute.Tensor,
        thread: Int32,
        first: Int32,
        columns: Int32,
        k_size: Int32,
    ) -> None:
        """Copy ``columns`` of the weight to shared memory; 0 beyond K."""
        for v in cutlass.range(thread, columns // _VECTOR, self.threads, unroll=2):
            given = cute.make_rmem_tensor(cute.make_layout(_VECTOR), weight.element_type)
            given.fill(0.0)
            if first + v * _VECTOR < k_size:
                source = cute.local_tile(weight, (_VECTOR,), (first // _VECTOR + v,))
                cute.autovec_copy(source, given)
            cute.autovec_copy(given, cute.local_tile(s_weight, (_VECTOR,), (v,)))

    @cute.jit
    def _add_parts(self, sumsq: cute.Tensor, sums: cute.Tensor, thread: Int32, sizes: Any) -> None:
        """Add up every row's parts, in shares: thread by thread, then over a warp's lanes."""
        m_size, _ = sizes
        row, share = thread % self.m_pad, thread // self.m_pad
        parts = cute.size(sumsq, mode=[0])
        shares = self.threads // self.m_pad
        at_row = cutlass.select_(row < m_size, row, 0)
        partial = Float32(0.0)
        for base in cutlass.range(share, parts, shares * _PARTS_AT_ONCE, unroll=1):
            # Without a branch, so that the loads wait for memory together.
            given = cute.make_rmem_tensor(cute.make_layout(_PARTS_AT_ONCE), Float32)
            for p in cutlass.range_constexpr(_PARTS_AT_ONCE):
                given[p] = sumsq[cutlass.min(base + p * shares, parts - 1), at_row]
            for p in cutlass.range_constexpr(_PARTS_AT_ONCE):
                inside = base + p * shares < parts
                partial += cutlass.select_(inside, given[p], Float32(0.0))
        for offset in (16, 8):
            if const_expr(offset >= self.m_pad):
                partial += cute.arch.shuffle_sync_bfly(partial, offset)
        sums[row, share // (32 // self.m_pad)] = partial
        cute.arch.barrier(barrier_id=_NAMED_BARRIER, number_of_threads=self.threads)

    @cute.jit
    def _scales(self, sums: cute.Tensor, row: Int32, sizes: Any) -> cute.Tensor:
        """1 / rms of the lane's rows; 0 for those beyond M, which must stay finite."""
        m_size, k_size = sizes
        scales = cute.make_rmem_tensor(cute.make_layout(self.lane_rows), Float32)
        for j in cutlass.range_constexpr(self.lane_rows):
            at = row + j * self.group_rows
            total = sums[at, 0]
            for share in cutlass.range_constexpr(1, sums.shape[1]):
                total += sums[at, share]
            scale = cute.math.rsqrt(total / Float32(k_size) + Float32(self.prologue.eps))
            scales[j] = cutlass.select_(at < m_size, scale, Float32(0.0))
        return scales

    @cute.jit
    def _normalize(
        self, chunks: cute.Tensor, s_weight: cute.Tensor, first: Int32, scales: cute.Tensor
    ) -> None:
        """Normalise the lane's chunks (element, row, block of 64 columns) of a stage."""
        blocks = self.k // _ATOM_COLUMNS
        values = cute.make_rmem_tensor(
            cute.make_layout((_VECTOR, self.lane_rows, blocks)), chunks.element_type
        )
        weights = cute.make_rmem_tensor(cute.make_layout((_VECTOR, blocks)), s_weight.element_type)
        # Every load before the first store, so that their latencies overlap.
        for b in cutlass.range_constexpr(blocks):
            source = cute.local_tile(s_weight, (_VECTOR,), (first + b * _CHUNKS,))
            cute.autovec_copy(source, weights[(None, b)])
            for j in cutlass.range_constexpr(self.lane_rows):
                cute.autovec_copy(chunks[(None, j, b)], values[(None, j, b)])
        for b in cutlass.range_constexpr(blocks):
            for j in cutlass.range_constexpr(self.lane_rows):
                self._scale_chunk(values[(None, j, b)], weights[(None, b)], scales[j])
        for b in cutlass.range_constexpr(blocks):
            for j in cutlass.range_constexpr(self.lane_rows):
                cute.autovec_copy(values[(None, j, b)], chunks[(None, j, b)])

    def _scale_chunk(self, values: Any, weights: Any, scale: Any) -> None:
        pairs = cute.recast_tensor(values, Int32)
        prologue = self.prologue
        rounds_first = prologue.order == "llama"
        # A product of two 16-bit floats is exact in float32: one packed multiplication rounds it
        # as two steps would.
        packed = rounds_first and prologue.weight_offset == 0 and self.weight_dtype == self.dtype
        weight_pairs = cute.recast_tensor(weights, Int32) if packed else weights
        for p in range(_VECTOR // 2):
            low, high = (values[2 * p + half].to(Float32) * scale for half in range(2))
            if packed:
                normal = packed_pair(low, high, self.dtype)
                pairs[p] = packed_product(normal, weight_pairs[p], self.dtype)
                continue
            if rounds_first:
                low, high = round_to(low, self.dtype), round_to(high, self.dtype)
            offset = Float32(prologue.weight_offset)
            low *= weights[2 * p].to(Float32) + offset
            high *= weights[2 * p + 1].to(Float32) + offset
            pairs[p] = packed_pair(low, high, self.dtype)


def prologue_tensors(operand_dtypes: tuple[torch.dtype | None, ...]) -> tuple[Any, ...]:
    """Fake tensors of the prologue's operands: the weight (K,) and the sums of squares."""
    weight = operand_dtypes[0]
    assert weight is not None
    return fake_tensor(CUTE_DTYPES[weight], 1, aligned=True), fake_tensor(Float32, 2)


def stages_of(
    prologue: Prologue, config: DecodeConfig, dtype: torch.dtype, weight_dtype: torch.dtype
) -> NormalizeStages | None:
    """What normalises the stages of a kernel, or None without an RMSNorm in front."""
    if not isinstance(prologue, RmsNormPrologue):
        return None
    return NormalizeStages(
        prologue,
        dtype,
        weight_dtype,
        config.m_pad,
        config.k,
        config.stages,
        config.norm_bytes,
    )
