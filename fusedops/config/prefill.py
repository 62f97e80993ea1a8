"""Tile configurations of the prefill kernel (``fusedops/cutlass/sm90_prefill.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd

from fusedops.config.elements import (
    SCALE_BLOCK,
    is_block_scaled,
    is_interleaved,
    scale_bytes,
    tensor_rate,
)
from fusedops.config.files import SHARED_BYTES, choose_tile, load_tiles
from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem
from fusedops.prologue import NO_PROLOGUE

__all__ = [
    "PrefillConfig",
    "PrefillTile",
    "choose_prefill",
    "prefill_tiles",
    "store_columns",
]

_STAGE_ROW_BYTES = 128
"""A stage's part of a row of x or the weight: what TMA swizzles at most."""

STORE_BUFFERS = 2
"""Staging buffers of a warpgroup: one is stored while the next is filled."""

CONSUMERS = 2
"""Consumer warpgroups of a CTA."""

_MODES = ("cooperative", "pingpong")
_WGMMA_ROWS = 64
MIN_STEP_COLUMNS = 16
"""Columns that an epilogue treats at least at a time: two 8 x 8 matrices of a store to shared
memory, of the result too."""
# 128 x 192 a warpgroup is the largest accumulator that leaves registers for an epilogue.
_MAX_ACCUMULATORS = 192
_MAX_PROMOTED = 96
"""Promoted sums take a second register for the part of a block of K."""

# Constants of the analytic model, for an H200; see PrefillTile.predicted_us.
_TENSOR_FLOPS_PER_US = 800e6
_MEMORY_BYTES_PER_US = 4.0e6
_SM_BYTES_PER_US = 112e3
"""What an SM takes in through its port, 64 bytes a cycle: multicast saves L2's reads, not these."""
_L2_BYTES_PER_US = 12e6
"""What all SMs together take out of the L2; a multicast counts once."""
_SHARED_BYTES_PER_CYCLE = 118
_LAUNCH_US = 3.0
_EXCHANGE_US = 1.5
_PROMOTION = {"cooperative": 1.2, "pingpong": 1.6}
"""Time of a main loop that promotes, against one that does not. CUTLASS's kernels took 1.17 to 1.21
times as long on an H200 at M = 4096; where main loops take turns, nothing hides the promotion,
which is an estimate."""
_RESIDENT_CLUSTERS = {4: 26, 8: 12}
"""Estimates of how many clusters of four and eight run at once. They do not fill every group of
SMs: on an H200 32 of four took two rounds."""


def store_columns(out_columns: int, element_bytes: int) -> int:
    """Columns of a staged sub-tile of the result: at most 128 bytes, and it divides the tile."""
    for width_bytes in (128, 64, 32, 16):
        columns = width_bytes // element_bytes
        if out_columns % columns == 0:
            return columns
    raise ConfigError(f"a tile of {out_columns} result columns has no whole 16-byte units.")


@dataclass(frozen=True)
class PrefillConfig:
    """A tiling of the prefill kernel.

    Attributes:
        tile_m: rows of x of a tile, a multiple of 64 (of 128 when cooperative).
        tile_n: rows of the weight of a tile, a multiple of 16, at most 256.
        stages: TMA stages of the ring.
        cluster_m, cluster_n: CTAs of a cluster along M (they share the weight tile) and N (they
            share the x tile); at most two together.
        pingpong: each warpgroup has a tile of its own; otherwise two warpgroups share one.
        group: tiles of a cluster along M that are walked before the next column of tiles.
        split: CTAs of a cluster that share a tile's K instead; then it has one tile.
        k: columns of K in a stage, 128 bytes.
        block_scaled: x and the weight have scales a block of 128 along K.
        interleaved: two of the weight's blocks alternate every 8 of their 256 rows.
    """

    tile_m: int
    tile_n: int
    stages: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    group: int
    split: int = 1
    k: int = 64
    block_scaled: bool = False
    interleaved: bool = False

    @property
    def cluster(self) -> int:
        """CTAs of a cluster that share what they load."""
        return self.cluster_m * self.cluster_n

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster * self.split

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.pingpong else CONSUMERS

    @property
    def blocks(self) -> int:
        """64-row blocks of a tile that one warpgroup holds."""
        return self.tile_m // (_WGMMA_ROWS * self.sharing)

    @property
    def accumulators(self) -> int:
        """float32 accumulators of a thread."""
        return self.blocks * self.tile_n // 2

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread: what 384 threads of 168 leave beside the producer's."""
        return 240 if self.accumulators > 128 else 232

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread; two consumer warpgroups and one producer make 504."""
        return 504 - CONSUMERS * self.consumer_registers


@dataclass(frozen=True)
class PrefillTile:
    """A named tiling of the prefill kernel, see ``cutlass_configs/sm90.toml``."""

    name: str
    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    mode: str
    group: int
    split: int = 1

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ConfigError(f"{self.name}: mode {self.mode!r}; accepted: {', '.join(_MODES)}.")
        rows = _WGMMA_ROWS * (1 if self.mode == "pingpong" else CONSUMERS)
        if self.tile_m % rows or self.tile_m < rows:
            raise ConfigError(f"{self.name}: tile_m={self.tile_m} is no multiple of {rows}.")
        step = MIN_STEP_COLUMNS * self.cluster_m
        if self.tile_n % step or not 32 <= self.tile_n <= 256:
            raise ConfigError(
                f"{self.name}: tile_n={self.tile_n}; accepted: multiples of {step}, of which "
                f"each CTA loads {MIN_STEP_COLUMNS} or more rows, from 32 to 256."
            )
        if self.cluster_m * self.cluster_n not in (1, 2):
            raise ConfigError(f"{self.name}: a cluster has one or two CTAs.")
        if self.split > 1:
            self._check_split()
        if self.config(2, 2, self.tile_n // self.split).accumulators > _MAX_ACCUMULATORS:
            raise ConfigError(f"{self.name}: more than {_MAX_ACCUMULATORS} accumulators a thread.")

    @property
    def size(self) -> int:
        """Accumulators of a tile."""
        return self.tile_m * self.tile_n

    def _check_split(self) -> None:
        if self.split not in (2, 4, 8):
            raise ConfigError(f"{self.name}: split={self.split}; accepted: 1, 2, 4, 8.")
        one_block = self.mode == "cooperative" and self.tile_m == CONSUMERS * _WGMMA_ROWS
        if not one_block or self.cluster_m * self.cluster_n > 1:
            raise ConfigError(
                f"{self.name}: K is split over the CTAs of a cooperative tile of 128 rows, which "
                "share nothing else."
            )
        if self.tile_n % (self.split * MIN_STEP_COLUMNS):
            raise ConfigError(
                f"{self.name}: each of {self.split} CTAs finishes a multiple of {MIN_STEP_COLUMNS} "
                f"columns; tile_n={self.tile_n}."
            )

    def stages(self, out_bytes: int, out_columns: int, block_scaled: bool = False) -> int:
        """TMA stages that fit beside the staging buffers and the barriers."""
        width_bytes = store_columns(out_columns, out_bytes) * out_bytes
        staging = CONSUMERS * STORE_BUFFERS * _WGMMA_ROWS * width_bytes
        stage = (self.tile_m + self.tile_n) * _STAGE_ROW_BYTES
        stage += scale_bytes(self.tile_m, _STAGE_ROW_BYTES) if block_scaled else 0
        return min(8, (SHARED_BYTES - staging - 2048) // stage)

    def config(
        self, element_bytes: int, out_bytes: int, out_columns: int, block_scaled: bool = False
    ) -> PrefillConfig:
        """The compiled configuration for an x, and a result whose tile has ``out_columns``."""
        return PrefillConfig(
            self.tile_m,
            self.tile_n,
            self.stages(out_bytes, out_columns, block_scaled),
            self.cluster_m,
            self.cluster_n,
            self.mode == "pingpong",
            self.group,
            self.split,
            _STAGE_ROW_BYTES // element_bytes,
            block_scaled,
        )

    def out_columns(self, problem: GemmProblem) -> int:
        """Columns of the result that a CTA gives."""
        return self.tile_n // self.split * problem.spec.out_n // problem.spec.n

    def problem_config(self, problem: GemmProblem) -> PrefillConfig:
        """The compiled configuration that serves ``problem``."""
        out_bytes = problem.spec.out_dtype.itemsize
        element_bytes, columns = problem.x_dtype.itemsize, self.out_columns(problem)
        config = self.config(element_bytes, out_bytes, columns, is_block_scaled(problem.spec))
        return replace(config, interleaved=is_interleaved(problem.spec))

    def cluster_tiles(self, m: int, n: int) -> int:
        """Tiles of a whole cluster that cover an (M, N) accumulator."""
        rows, columns = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        return -(-m // rows) * -(-n // columns)

    def clusters(self, m: int, n: int, sm_count: int) -> int:
        """Clusters to launch: one CTA an SM, and no cluster without a tile."""
        return min(self._capacity(sm_count), self.cluster_tiles(m, n))

    def _capacity(self, sm_count: int) -> int:
        return sm_count // (self.cluster_m * self.cluster_n * self.split)

    def legal(self, problem: GemmProblem) -> str | None:
        """Why the tiling cannot serve ``problem``, or None if it can."""
        if problem.spec.batch_invariant and self.split > 1:
            return "K is split over CTAs, which is not batch invariant"
        spec = problem.spec
        if spec.prologue != NO_PROLOGUE:
            return f"no kernel has {spec.prologue} inside"
        if spec.out_n not in (spec.n, spec.n // 2):
            return "the chain changes the number of columns other than by one gate"
        columns = self.out_columns(problem)
        if columns % MIN_STEP_COLUMNS:
            return f"a CTA finishes {columns} columns, no multiple of {MIN_STEP_COLUMNS}"
        if is_block_scaled(problem.spec) and (refusal := self._block_refusal()):
            return refusal
        if self.problem_config(problem).stages < 3:
            return "fewer than 3 stages fit the shared memory"
        capacity = self._capacity(problem.sm_count)
        if capacity == 0:
            return f"a cluster needs more SMs than {problem.sm_count}"
        if self.split > 1 and self.cluster_tiles(problem.m, spec.n) > capacity:
            return f"there are more tiles than {capacity} clusters, which have one tile each"
        if self.split > -(-spec.k // self.problem_config(problem).k):
            return f"K={spec.k} has fewer k-tiles than CTAs that share them"
        for node in spec.epilogue:
            parts = getattr(node, "parts", None)
            tile_n = self.tile_n // self.split
            if parts is not None and parts < -(-spec.n // tile_n):
                return f"{node} has too few parts for one a tile of {tile_n} columns"
            if columns % node.group_columns():
                return f"{node} needs whole groups of {node.group_columns()} columns in a tile"
        return None

    def _block_refusal(self) -> str | None:
        """Why a main loop with scales a block of K cannot have the tiling, or None if it can."""
        accumulators = self.config(1, 2, self.tile_n // self.split).accumulators
        if accumulators > _MAX_PROMOTED:
            return (
                f"a thread has {accumulators} accumulators, promoted ones at most {_MAX_PROMOTED}"
            )
        # Tiles start at multiples of this in a block.
        step = gcd(self.tile_n, SCALE_BLOCK)
        if SCALE_BLOCK - step + self.tile_n > 2 * SCALE_BLOCK:
            return f"tiles of {self.tile_n} columns meet more than two blocks of the weight"
        return None

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model: the largest of memory's and the L2's traffic and the busiest
        CTA's tiles.

        A tile takes the longest of its wgmma time (which shared memory bounds for small N: a
        64 x N instruction over 32 bytes of K reads 2048 + 32 N bytes in N / 2 cycles), and what its
        SM takes in.
        The epilogue runs beside the other warpgroup's main loop in ping-pong mode, else after it.
        """
        spec = problem.spec
        element = problem.x_dtype.itemsize
        sms = max(1, problem.sm_count)
        resident = min(self._capacity(sms), _RESIDENT_CLUSTERS.get(self.split, sms))
        waves = -(-self.cluster_tiles(problem.m, spec.n) // max(1, resident))
        k = spec.k / self.split
        rate = min(1.0, _SHARED_BYTES_PER_CYCLE / (4096 / self.tile_n + 64))
        rate *= tensor_rate(element)
        wgmma_us = 2 * self.tile_m * self.tile_n * k / (_TENSOR_FLOPS_PER_US / sms * rate)
        taken = (self.tile_m + self.tile_n) * k * element
        if is_block_scaled(problem.spec):
            wgmma_us *= _PROMOTION[self.mode]
        main_us = max(wgmma_us, taken / _SM_BYTES_PER_US)
        # About 4 bytes a cycle and thread at 1.6 GHz through the chain, staging and the store.
        epilogue_us = self.tile_m * self.tile_n / self.split / (2 * 128) / 100
        if self.split > 1:
            epilogue_us += _EXCHANGE_US
        if self.mode == "pingpong":
            tiles_us = max(waves * main_us + 2 * epilogue_us, waves * epilogue_us)
        else:
            tiles_us = waves * (main_us + epilogue_us)
        loaded = problem.m * -(-spec.n // (self.tile_n * self.cluster_n))
        loaded += spec.n * -(-problem.m // (self.tile_m * self.cluster_m))
        loaded *= spec.k * element
        traffic_us = max(loaded / _L2_BYTES_PER_US, problem.minimum_bytes / _MEMORY_BYTES_PER_US)
        return max(tiles_us, traffic_us) + _LAUNCH_US


@cache
def prefill_tiles() -> tuple[PrefillTile, ...]:
    """Every named prefill tiling, in the file's order; ConfigError if the file is malformed."""
    return load_tiles("prefill", PrefillTile)


def choose_prefill(problem: GemmProblem, gpu: str) -> PrefillTile:
    """The prefill tiling for a problem with any M > 0: measured, else predicted fastest.

    Raises:
        ConfigError: no named tiling is legal; the message lists why.
    """
    return choose_tile("prefill", prefill_tiles(), problem, gpu)
