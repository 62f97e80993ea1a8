"""Tile configurations of the decode kernel (``fusedops/cutlass/sm90_decode.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fusedops.config.elements import (
    SCALE_BLOCK,
    is_block_scaled,
    is_interleaved,
    scale_bytes,
    tensor_rate,
)
from fusedops.config.files import DECODE_BUCKETS, SHARED_BYTES, choose_tile, load_tiles
from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem
from fusedops.prologue import NO_PROLOGUE, RmsNormPrologue

__all__ = [
    "DecodeConfig",
    "DecodeTile",
    "chain_groups_refusal",
    "chain_refusal",
    "choose_decode",
    "decode_tiles",
    "m_bucket",
]

_WGMMA_ROWS = 64
_MANY_ROUNDS = 4
_LAUNCH_US = 2.1
_MEMORY_BYTES_PER_US = 5.3e6
_SM_BYTES_PER_US = 140e3
_SM_PRODUCTS_PER_US = 56e3
"""Columns of K times padded M times 64-row blocks: m64n8k16 takes 4 cycles of 1755 MHz."""
_PROMOTION_US = 0.05
_PROMOTION_COLUMN_US = 0.0015
"""Estimates, from instructions counted at 1755 MHz, of what a block of K takes a warpgroup whose
sums are promoted: for the latency of its products, and for each column of the padded M."""
_OVERLAP = 1.7
"""Exponent of the norm that joins what overlaps: 1 would add it up, infinity take the largest."""
_NORM_BYTES = 1280
"""Shared memory of an RMSNorm in front: 1 KiB of partial sums and a barrier a stage."""
_NORM_ROWS = 32
"""Rows up to which a norm inside is worth its repetition by every CTA: on an H200 it adds 0.8 us to
a product of one row, 2 us at 16 and 32 rows, 10 us at 64. Padded M up to here are powers of two,
for the threads that add up a row's statistics share a warp evenly."""
_NORM_STEP_BYTES = 2048
_RESERVED_BYTES = 1024
"""Shared memory that the system takes of each CTA (CUDA C++ Programming Guide, 9.0)."""


@dataclass(frozen=True)
class DecodeConfig:
    """A tiling of the decode kernel.

    Attributes:
        rows: weight rows (output columns) of a tile, a multiple of 16 up to 256.
        k: columns of K in a stage, a multiple of 128 bytes.
        stages: TMA stages of the ring.
        split: CTAs that share a tile's K, 1 or 2 (a cluster).
        m_pad: padded M, the wgmma N: one of ``DECODE_BUCKETS``.
        trigger: the producer allows the next kernel to start once it has at most this many k-tiles
            left to load; -1 does so at once.
        prefetch: k-tiles of the weight that are fetched into L2 behind those that the ring takes,
            before the kernel waits for the one before it.
        resident: CTAs that share an SM, and so its registers and shared memory.
        norm_bytes: shared memory for an RMSNorm's weight along a CTA's part of K; 0 without one.
        block_scaled: x and the weight have scales a block of 128 along K.
        interleaved: two of the weight's blocks alternate every 8 of their 256 rows.
    """

    rows: int
    k: int
    stages: int
    split: int
    m_pad: int
    trigger: int = -1
    prefetch: int = 0
    resident: int = 1
    norm_bytes: int = 0
    block_scaled: bool = False
    interleaved: bool = False

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups: each multiplies 64 weight rows."""
        return -(-self.rows // _WGMMA_ROWS)

    @property
    def operands_late(self) -> bool:
        """Whether the chain's operands are read behind the main loop, which needs the registers.

        Promoted sums take those of their parts besides, twice with two blocks in a stage.
        """
        return self.block_scaled and (self.m_pad > _WGMMA_ROWS or self.rows > _WGMMA_ROWS)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and one producer warp."""
        return self.warpgroups * 128 + 32


@dataclass(frozen=True)
class DecodeTile:
    """A named tiling of the decode kernel, see ``cutlass_configs/sm90.toml``.

    ``k`` counts columns of 16-bit elements; a stage has as many bytes of 8-bit ones.
    """

    name: str
    rows: int
    k: int
    split: int
    trigger: int
    prefetch: int = 0
    resident: int = 1

    @property
    def size(self) -> int:
        """Weight rows of a tile."""
        return self.rows

    def columns(self, element_bytes: int) -> int:
        """Columns of K in a stage."""
        return self.k * 2 // element_bytes

    def stages(
        self, m_pad: int, element_bytes: int, norm_bytes: int = 0, block_scaled: bool = False
    ) -> int:
        """TMA stages that fit beside the reduction buffer, the statistics and the barriers."""
        warps = -(-self.rows // 64) * 4
        exchange = (self.split - 1) * warps * 32 * (m_pad // 4) * 4
        statistics = 2 * (warps + 1) * m_pad * 4
        k = self.columns(element_bytes)
        stage = (self.rows + m_pad) * k * element_bytes + 16
        stage += scale_bytes(m_pad, k) if block_scaled else 0
        shared = (SHARED_BYTES - (self.resident - 1) * _RESERVED_BYTES) // self.resident
        others = exchange + statistics + 2048 + (norm_bytes and norm_bytes + _NORM_BYTES)
        return min(24, (shared - others) // stage)

    def norm_bytes(self, problem: GemmProblem) -> int:
        """Shared memory for the norm's weight along a CTA's part of K; 0 without a norm."""
        weight = problem.operand_dtypes[0] if problem.spec.prologue != NO_PROLOGUE else None
        if weight is None:
            return 0
        columns = -(-problem.spec.k // (self.k * self.split)) * self.k
        return -(-columns * weight.itemsize // _NORM_STEP_BYTES) * _NORM_STEP_BYTES

    def config(
        self, m: int, element_bytes: int, norm_bytes: int = 0, block_scaled: bool = False
    ) -> DecodeConfig:
        """The compiled configuration that serves ``m`` rows, with or without a norm in front."""
        bucket = m_bucket(m)
        stages = self.stages(bucket, element_bytes, norm_bytes, block_scaled)
        return DecodeConfig(
            self.rows,
            self.columns(element_bytes),
            stages,
            self.split,
            bucket,
            self.trigger,
            self.prefetch,
            self.resident,
            norm_bytes,
            block_scaled,
        )

    def problem_config(self, problem: GemmProblem) -> DecodeConfig:
        """The compiled configuration that serves ``problem``."""
        element_bytes = problem.x_dtype.itemsize
        config = self.config(
            problem.m, element_bytes, self.norm_bytes(problem), is_block_scaled(problem.spec)
        )
        return replace(config, interleaved=is_interleaved(problem.spec))

    def clusters(self, n: int, sm_count: int) -> int:
        """Clusters to launch: as few as give every one of them the same number of tiles.

        With many tiles a cluster, the last round weighs less than SMs that stay idle.
        """
        slots = self.resident * sm_count // self.split
        tiles = -(-n // self.rows)
        rounds = -(-tiles // slots)
        return slots if rounds > _MANY_ROUNDS else -(-tiles // rounds)

    def legal(self, problem: GemmProblem) -> str | None:
        """Why the tiling cannot serve ``problem``, or None if it can."""
        if problem.spec.batch_invariant and self.split > 1:
            return "K is split over CTAs, which is not batch invariant"
        if self.rows % 16 or not 16 <= self.rows <= 256:
            # Gate/up blocks are 16 rows; for the DSL see DECODE_BUCKETS.
            return f"rows={self.rows} is no multiple of 16 up to 256"
        if m_bucket(problem.m) > _WGMMA_ROWS and self.rows > 2 * _WGMMA_ROWS:
            return (
                f"M={problem.m} with more than 128 weight rows takes more registers than there are"
            )
        k_tiles = -(-problem.spec.k // self.columns(problem.x_dtype.itemsize))
        if k_tiles < self.split:
            return f"K={problem.spec.k} has fewer k-tiles than CTAs that share them"
        if problem.spec.prologue != NO_PROLOGUE and (refusal := _prologue_refusal(problem)):
            return refusal
        if self.problem_config(problem).stages < 3:
            return "fewer than 3 stages fit the shared memory"
        return chain_refusal(problem, self.clusters(problem.spec.n, problem.sm_count))

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model: memory, the busiest SM's loads and its products overlap.

        Fitted to the pairs of product and tiling in ``tuned/nvidia_h200.json`` (8 to 128 rows),
        within 9 % (root mean square); the tiling that it picks is on average 1 % slower than the
        fastest measured one of its product.
        """
        spec, m_pad = problem.spec, m_bucket(problem.m)
        element = problem.x_dtype.itemsize
        k = -(-spec.k // self.split)
        tiles = -(-spec.n // self.rows)
        rounds = -(-tiles // self.clusters(spec.n, problem.sm_count))
        steps = rounds * k
        blocks = -(-self.rows // _WGMMA_ROWS)
        memory = (spec.n * spec.k + problem.m * spec.k) * element
        memory += problem.m * spec.n * spec.out_dtype.itemsize
        overlapping: tuple[float, ...] = (
            memory / _MEMORY_BYTES_PER_US,
            steps * self.rows * element * self.resident / _SM_BYTES_PER_US,
            steps * blocks * m_pad * self.resident / (_SM_PRODUCTS_PER_US * tensor_rate(element)),
        )
        if is_block_scaled(spec):
            promotion_us = _PROMOTION_US + m_pad * _PROMOTION_COLUMN_US
            overlapping = (*overlapping, steps / SCALE_BLOCK * promotion_us)
        busy: float = sum(share**_OVERLAP for share in overlapping) ** (1 / _OVERLAP)
        # All but the last tile's epilogue, the exchange of a split, and barriers of short stages.
        epilogues = (rounds - 1) * m_pad * self.rows / 4096 / self.resident
        exchange = 0.12 * (self.split - 1) * (1 + m_pad / 64)
        stage_bytes = self.rows * self.columns(element) * element
        barriers = 0.09 * steps / self.columns(element) * max(0.0, 1.0 - stage_bytes / 16384)
        return _LAUNCH_US + busy + epilogues + exchange + barriers


def chain_refusal(problem: GemmProblem, clusters: int) -> str | None:
    """Why decode kernels cannot run the problem's chain on ``clusters`` clusters, or None."""
    for node in problem.spec.epilogue:
        parts = getattr(node, "parts", None)
        if parts is not None and parts < clusters:
            return f"{node} has too few parts for one a cluster"
    return chain_groups_refusal(problem)


def chain_groups_refusal(problem: GemmProblem) -> str | None:
    """Why kernels with the weight on wgmma's row side cannot run the chain, or None if they can."""
    for node in problem.spec.epilogue:
        if node.group_columns() > 1:
            return f"{node}: no warpgroup of the kernel holds whole groups of columns"
    return None


def _prologue_refusal(problem: GemmProblem) -> str | None:
    """Why the kernel cannot have the problem's prologue inside, or None if it can."""
    prologue = problem.spec.prologue
    if not isinstance(prologue, RmsNormPrologue):
        return f"no kernel has {prologue} inside"
    if problem.x_dtype.itemsize == 1:
        return f"{prologue} is inside for bfloat16 and float16 only, got {problem.x_dtype}"
    if problem.m > _NORM_ROWS:
        return f"M={problem.m} > {_NORM_ROWS}: every CTA would normalise all of x"
    if problem.operand_dtypes[1] is None:
        return f"{prologue} is inside with its operand norm_sumsq only: no CTA reads whole rows"
    if problem.spec.k % 8:
        return f"K={problem.spec.k} is no multiple of 8, which {prologue} inside needs"
    return None


def m_bucket(m: int) -> int:
    """The padded M that serves ``m`` rows; ConfigError beyond the largest bucket."""
    for bucket in DECODE_BUCKETS:
        if m <= bucket:
            return bucket
    raise ConfigError(f"M={m}: the decode kernel serves at most {DECODE_BUCKETS[-1]} rows.")


@cache
def decode_tiles() -> tuple[DecodeTile, ...]:
    """Every named decode tiling, in the file's order; ConfigError if the file is malformed."""
    return load_tiles("decode", DecodeTile)


def choose_decode(problem: GemmProblem, gpu: str) -> DecodeTile:
    """The tiling for a problem with M <= 128: measured, else predicted fastest.

    Raises:
        ConfigError: no named tiling is legal; the message lists why.
    """
    return choose_tile("decode", decode_tiles(), problem, gpu)
