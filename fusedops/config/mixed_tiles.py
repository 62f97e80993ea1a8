"""Tilings of the kernel with narrow weights by name, and the one that serves a product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from fusedops.config.decode import chain_refusal, m_bucket
from fusedops.config.files import choose_tile, load_tiles
from fusedops.config.mixed import Kind, MixedConfig, NarrowWeight, mixed_stages
from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem
from fusedops.weight import Fp8Weight, GroupedFormat, Int4, Int8Weight

__all__ = [
    "MIXED_FORMATS",
    "MixedTile",
    "choose_mixed",
    "mixed_clusters",
    "mixed_config",
    "mixed_tiles",
    "narrow_weight",
    "predicted_us",
]

MIXED_FORMATS: dict[str, Kind] = {
    Int4.spec_name: "int4",
    Int8Weight.spec_name: "int8",
    Fp8Weight.spec_name: "e4m3",
}
"""Formats that the kernel multiplies, by the names that specs have for them."""

_LAUNCH_US = 2.1
_MEMORY_BYTES_PER_US = 4.7e6
_L2_BYTES_PER_US = 6e6
_CYCLES_PER_US = 1755
_SLOTS_A_STEP = {(4, 16): 17, (8, 16): 23, (4, 8): 9}
"""Issue slots of a warp for 16 columns of its 16 rows, without those for sums of groups, by the
bits of a code and of an activation."""
_EXCHANGE_US = 0.15
_MANY_ROUNDS = 4
_GPC_SMS = 18
"""SMs of a whole GPC (NVIDIA H100 Tensor Core GPU Architecture, 2022)."""


def mixed_config(
    weight: NarrowWeight,
    m: int,
    rows: int,
    k: int,
    split: int,
    trigger: int = -1,
    zero_products: bool = False,
) -> MixedConfig:
    """The configuration of a tiling for ``m`` rows of activations, with all stages that fit.

    Raises:
        ConfigError: M is above 128, or no kernel can be compiled for the tiling; why.
    """
    config = replace(_any_config(weight, m, rows, k, split, trigger), zero_products=zero_products)
    if reason := config.illegal():
        raise ConfigError(f"{config}: {reason}.")
    return config


def _any_config(
    weight: NarrowWeight, m: int, rows: int, k: int, split: int, trigger: int
) -> MixedConfig:
    """Such a configuration, legal or not."""
    m_pad = m_bucket(m)
    if split == 4:
        m_pad = max(m_pad, 16)
    config = MixedConfig(weight, rows, k, 0, split, m_pad, trigger)
    return replace(config, stages=mixed_stages(config))


def mixed_clusters(config: MixedConfig, n: int, sm_count: int) -> int:
    """Clusters to launch: as few as give every one of them the same number of tiles.

    With many tiles a cluster, the last round weighs less than SMs that stay idle. No more than run
    at once: a cluster of 4 lies in one GPC, and GPCs of 18 SMs leave two of them idle.
    """
    slots = sm_count // config.split
    if config.split > 2 and sm_count > _GPC_SMS:
        slots -= 1
    tiles = -(-n // config.rows)
    rounds = -(-tiles // slots)
    return slots if rounds > _MANY_ROUNDS else -(-tiles // rounds)


def predicted_us(config: MixedConfig, n: int, k: int, sm_count: int) -> float:
    """Time by an analytic model: the slowest of memory, L2, issue and tensor cores, and the rest.

    Its constants are the machine's (132 SMs of an H200) and counts of instructions.
    """
    bits = config.weight.bits
    clusters = mixed_clusters(config, n, sm_count)
    tiles = -(-n // config.rows)
    rounds = -(-tiles // clusters)
    steps = rounds * -(-k // (16 * config.split))
    weights = n * k * bits / 8
    scales = n * k / config.weight.group * 2 if config.weight.group else 0
    of_x = clusters * config.split * steps * 16 * config.m_pad * config.weight.x_bits / 8
    sums = config.m_pad * 8 / (config.weight.sum_group or k)
    slots = config.warpgroups * (_SLOTS_A_STEP[bits, config.weight.x_bits] + sums)
    busiest = rounds * config.rows * k / config.split / (n * k / sm_count)
    overlapping = (
        (weights + scales) / _MEMORY_BYTES_PER_US * max(1.0, busiest),
        (weights + of_x) / _L2_BYTES_PER_US,
        steps * slots / _CYCLES_PER_US,
        steps * config.warpgroups * config.m_pad / 2 / _CYCLES_PER_US,
    )
    joined: float = sum(float(part) ** 4 for part in overlapping) ** 0.25
    stages = steps * 16 / config.k
    return _LAUNCH_US + joined + _EXCHANGE_US * (config.split - 1) + 0.02 * stages


def narrow_weight(problem: GemmProblem) -> NarrowWeight:
    """What a kernel is compiled for of a problem's weight, which has one of ``MIXED_FORMATS``."""
    weight = problem.spec.weight
    before = len(problem.spec.prologue.operands())
    scale_dtype = problem.operand_dtypes[before]
    if not isinstance(weight, GroupedFormat) or scale_dtype is None:
        raise ConfigError(f"the kernel for weights of 4 and 8 bits does not multiply {weight}.")
    return NarrowWeight(
        MIXED_FORMATS[weight.spec_name],
        weight.group,
        isinstance(weight, Int4) and weight.zero != "none",
        scale_dtype,
        8 if problem.x_dtype == torch.float8_e4m3fn else 16,
    )


@dataclass(frozen=True)
class MixedTile:
    """A named tiling: ``rows``, ``k``, ``split`` and ``trigger`` as of ``MixedConfig``."""

    name: str
    rows: int
    k: int
    split: int
    trigger: int = -1

    @property
    def size(self) -> int:
        """Weight rows of a tile."""
        return self.rows

    def problem_config(self, problem: GemmProblem) -> MixedConfig:
        """The compiled configuration that serves ``problem``, legal or not."""
        weight = narrow_weight(problem)
        return _any_config(weight, problem.m, self.rows, self.k, self.split, self.trigger)

    def clusters(self, problem: GemmProblem) -> int:
        """Clusters to launch."""
        return mixed_clusters(self.problem_config(problem), problem.spec.n, problem.sm_count)

    def legal(self, problem: GemmProblem) -> str | None:
        """Why the tiling cannot serve ``problem``, or None if it can."""
        if problem.spec.batch_invariant and self.split > 1:
            return "K is split over CTAs, which is not batch invariant"
        reason = self.problem_config(problem).illegal()
        return reason or chain_refusal(problem, self.clusters(problem))

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model."""
        spec = problem.spec
        return predicted_us(self.problem_config(problem), spec.n, spec.k, problem.sm_count)


@cache
def mixed_tiles() -> tuple[MixedTile, ...]:
    """Every named tiling, in the file's order; ConfigError if the file is malformed."""
    return load_tiles("mixed", MixedTile)


def choose_mixed(problem: GemmProblem, gpu: str) -> MixedTile:
    """The tiling for a problem with M <= 128: measured, else predicted fastest.

    Raises:
        ConfigError: no named tiling is legal; the message lists why.
    """
    return choose_tile("mixed", mixed_tiles(), problem, gpu)
