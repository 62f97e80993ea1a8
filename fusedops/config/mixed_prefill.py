"""Configurations of the kernel for many rows with narrow weights (``sm90_mixed_prefill``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fusedops.config.decode import chain_groups_refusal
from fusedops.config.files import SHARED_BYTES, choose_tile, load_tiles
from fusedops.config.mixed import NarrowTile, NarrowWeight, aligned
from fusedops.config.mixed_tiles import narrow_weight
from fusedops.epilogue.outputs import RowStat
from fusedops.problem import GemmProblem

__all__ = [
    "STATISTIC_ROWS",
    "MixedPrefillConfig",
    "MixedPrefillTile",
    "choose_mixed_prefill",
    "mixed_prefill_config",
    "mixed_prefill_tiles",
]

WARPGROUPS = 2
"""Consumer warpgroups of a CTA; each multiplies 64 weight rows."""

ROWS = WARPGROUPS * 64
"""Weight rows of a tile."""

CHUNK = 64
"""Rows of x whose results leave together."""

BUFFERS = 2
"""Staging buffers of a warpgroup."""

STATISTIC_ROWS = 64
"""Weight rows for each part of a row statistic: those of one warpgroup."""

_X_ROW_BYTES = 128
"""A row of x in one load: what TMA swizzles at most."""
_OTHERS_BYTES = 3072
_MOST_ACCUMULATORS = 192
"""Of a thread's 240 registers, for sums; the rest are fragments, codes and addresses."""

# Constants of the analytic model, for an H200; see MixedPrefillTile.predicted_us.
_LAUNCH_US = 3.0
_CYCLES_PER_US = 1550
"""What the clock falls to under a load of products."""
_TENSOR_SHARE = 0.9
_SHARED_BYTES_PER_CYCLE = 118
_SM_BYTES_PER_CYCLE = 64
_L2_BYTES_PER_US = 5.5e6
"""What all SMs together take out of the L2; a multicast counts once."""
_MEMORY_BYTES_PER_US = 4.0e6
_SLOTS = {(4, 16): 17, (8, 16): 23, (4, 8): 9}
"""Issue slots of a warp to convert 16 columns of its 16 rows, by bits of code and activation."""


@dataclass(frozen=True)
class MixedPrefillConfig(NarrowTile):
    """A tiling of the kernel.

    Attributes:
        tile_m: rows of x of a tile, the wgmma N: a multiple of 64 up to 256.
        cluster: CTAs, with neighbouring rows of the weight, that share the loads of x: 1 or 2.
        group: tiles along M that are walked before the next column of tiles.
    """

    tile_m: int
    cluster: int
    group: int

    @property
    def x_columns(self) -> int:
        """Columns of x in one load."""
        return _X_ROW_BYTES * 8 // self.weight.x_bits

    @property
    def x_loads(self) -> int:
        """Loads of x in a stage."""
        return self.k // self.x_columns

    @property
    def x_bytes(self) -> int:
        """Activations of a stage."""
        return self.tile_m * self.k * self.weight.x_bits // 8

    @property
    def stage_bytes(self) -> int:
        """What is loaded for a stage."""
        return self.weight_bytes + self.scale_bytes + self.zero_bytes + self.x_bytes

    @property
    def accumulators(self) -> int:
        """float32 sums of a thread."""
        return self.tile_m // 2

    @property
    def group_sums(self) -> int:
        """Sets of accumulators that take groups in turn; 0 where the sums need no scale.

        With two, the tensor cores have a group of this warpgroup to run on while the group before
        is scaled; one leaves them to the other warpgroup meanwhile.
        """
        weight = self.weight
        if weight.sum_group == 0:
            return 0
        if self.multiplies_zeros and not weight.group:
            # A tile's zero points, in registers of their own, are too many beside two.
            return 1
        return min(2, _MOST_ACCUMULATORS // self.accumulators - 1)

    @property
    def multiplies_zeros(self) -> bool:
        """Whether zero points are subtracted by products of their own: beside e4m3 ones."""
        return self.weight.x_bits == 8

    @property
    def unit(self) -> int:
        """Columns that are converted at a time: two products, of no more than a group."""
        steps = 1 if self.multiplies_zeros else 2
        return min(steps * self.weight.step, self.weight.sum_group or 128)

    @property
    def span(self) -> int:
        """Stages after which the sets of group sums stand as before."""
        return 2 if self.group_sums == 2 and self.sum_groups % 2 else 1

    @property
    def skew(self) -> int:
        """Stages that the first warpgroup is ahead of the second at the start.

        So one's products run beside the other's epilogue: tensor cores do not wait for either.
        It is more than half of the ring, so that the first one cannot be twice as far ahead before
        the second has started.
        """
        return self.stages // 2 + 1

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread."""
        return 240

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread; all together have 504 for three warpgroups."""
        return 504 - WARPGROUPS * self.consumer_registers

    def k_stages(self, k: int) -> int:
        """Stages of a tile, in whole spans; those beyond K are zeros."""
        return -(-k // (self.k * self.span)) * self.span

    def illegal(self) -> str | None:
        """Why no kernel can be compiled, or None if one can."""
        if reason := self.illegal_stage():
            return reason
        if self.rows != ROWS:
            return f"rows={self.rows}: the kernel has tiles of {ROWS}"
        if self.tile_m % CHUNK or not CHUNK <= self.tile_m <= 256:
            return f"tile_m={self.tile_m} is no multiple of {CHUNK} up to 256"
        sets = 1 if self.weight.sum_group == 0 else 2
        if sets * self.accumulators > _MOST_ACCUMULATORS:
            return f"tile_m={self.tile_m} with scales of groups takes more registers than there are"
        if self.k % max(self.x_columns, 2 * self.unit):
            return f"k={self.k} is no multiple of {max(self.x_columns, 2 * self.unit)}"
        if self.cluster not in (1, 2):
            return f"cluster={self.cluster}: 1 or 2"
        if self.stages < 3:
            return "fewer than 3 stages fit the shared memory"
        return None


def mixed_prefill_config(
    weight: NarrowWeight, tile_m: int, k: int, cluster: int, group: int, statistics: int = 0
) -> MixedPrefillConfig:
    """The configuration of a tiling with all stages that fit, legal or not.

    Args:
        statistics: row statistics of the chain.
    """
    config = MixedPrefillConfig(weight, ROWS, k, 0, tile_m, cluster, group)
    staging = WARPGROUPS * BUFFERS * CHUNK * 128
    staging += statistics * WARPGROUPS * 4 * tile_m * 4
    parts = (config.weight_bytes, config.scale_bytes, config.zero_bytes, config.x_bytes, 16)
    stages = (SHARED_BYTES - staging - _OTHERS_BYTES) // sum(map(aligned, parts))
    return replace(config, stages=min(8, stages))


@dataclass(frozen=True)
class MixedPrefillTile:
    """A named tiling: ``tile_m``, ``k``, ``cluster`` and ``group`` of ``MixedPrefillConfig``."""

    name: str
    tile_m: int
    k: int
    cluster: int
    group: int

    @property
    def size(self) -> int:
        """Accumulators of a tile."""
        return self.tile_m * ROWS

    def problem_config(self, problem: GemmProblem) -> MixedPrefillConfig:
        """The compiled configuration that serves ``problem``, legal or not."""
        statistics = sum(isinstance(node, RowStat) for node in problem.spec.epilogue)
        weight = narrow_weight(problem)
        return mixed_prefill_config(
            weight, self.tile_m, self.k, self.cluster, self.group, statistics
        )

    def cluster_tiles(self, m: int, n: int) -> int:
        """Tiles of a whole cluster that cover an (M, N) accumulator."""
        return -(-m // self.tile_m) * -(-n // (ROWS * self.cluster))

    def clusters(self, problem: GemmProblem) -> int:
        """Clusters to launch: one CTA an SM, and no cluster without a tile."""
        tiles = self.cluster_tiles(problem.m, problem.spec.n)
        return min(problem.sm_count // self.cluster, tiles)

    def legal(self, problem: GemmProblem) -> str | None:
        """Why the tiling cannot serve ``problem``, or None if it can."""
        spec = problem.spec
        if reason := self.problem_config(problem).illegal():
            return reason
        if spec.out_n not in (spec.n, spec.n // 2):
            return "the chain changes the number of columns other than by one gate"
        if self.cluster > problem.sm_count:
            return f"a cluster needs more SMs than {problem.sm_count}"
        for node in spec.epilogue:
            parts = getattr(node, "parts", None)
            if parts is not None and parts < -(-spec.n // STATISTIC_ROWS):
                return f"{node} has too few parts for one for {STATISTIC_ROWS} columns"
        return chain_groups_refusal(problem)

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model: memory's and the L2's traffic, and the busiest SM's tiles.

        A stage takes the longest of wgmma (tile_m / 2 cycles for 64 rows and a step, while 32 bytes
        of shared memory are read for each row of x), what the SM takes in, and half of the issue
        slots of converting and scaling, which wait for each other's results.
        """
        spec, config = problem.spec, self.problem_config(problem)
        weight = config.weight
        steps = config.k_stages(spec.k) * config.k // weight.step
        products = 1 + config.multiplies_zeros
        taken = config.stage_bytes * weight.step / config.k
        cycles = WARPGROUPS * products * self.tile_m / 2 / _TENSOR_SHARE
        shared = WARPGROUPS * products * self.tile_m * 32 + 2 * taken
        slots = _SLOTS[weight.bits, weight.x_bits] * weight.step / 16
        if weight.sum_group:
            slots += config.accumulators * weight.step / weight.sum_group
        step_cycles = max(
            cycles,
            shared / _SHARED_BYTES_PER_CYCLE,
            taken / _SM_BYTES_PER_CYCLE,
            WARPGROUPS * slots * 2,
        )
        # The first stages of the first tile arrive; of the last tile an epilogue is left over.
        tile_us = steps * step_cycles / _CYCLES_PER_US
        epilogue_us = self.size / 2e4
        clusters = max(1, self.clusters(problem))
        waves = -(-self.cluster_tiles(problem.m, spec.n) // clusters)
        tiles_us = waves * tile_us + epilogue_us * (1 + 0.3 * (waves - 1))
        of_x = problem.m * spec.k * problem.x_dtype.itemsize
        loaded = of_x * -(-spec.n // (ROWS * self.cluster))
        loaded += spec.weight.stored_bytes(problem.x_dtype) * -(-problem.m // self.tile_m)
        traffic_us = max(loaded / _L2_BYTES_PER_US, problem.minimum_bytes / _MEMORY_BYTES_PER_US)
        return max(tiles_us, traffic_us) + _LAUNCH_US


@cache
def mixed_prefill_tiles() -> tuple[MixedPrefillTile, ...]:
    """Every named tiling, in the file's order; ConfigError if the file is malformed."""
    return load_tiles("mixed_prefill", MixedPrefillTile)


def choose_mixed_prefill(problem: GemmProblem, gpu: str) -> MixedPrefillTile:
    """The tiling for a problem with any M > 0: measured, else predicted fastest.

    Raises:
        ConfigError: no named tiling is legal; the message lists why.
    """
    return choose_tile("mixed_prefill", mixed_prefill_tiles(), problem, gpu)
