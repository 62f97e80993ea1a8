"""Which tiling of ``fusedops.cutlass.sm90_mixed`` serves a product, and its program to compile.

The DSL is imported when a program is compiled, not before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fusedops.cutlass
from fusedops.config import m_bucket
from fusedops.config.mixed import MixedConfig, NarrowWeight, mixed_stages
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.spec import dtype_name
from fusedops.errors import ConfigError
from fusedops.jit.dsl import DslProgram
from fusedops.jit.sources import python_sources

__all__ = [
    "choose_mixed",
    "mixed_clusters",
    "mixed_config",
    "mixed_configs",
    "mixed_program",
    "predicted_us",
]

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
    m_pad = m_bucket(m)
    if split == 4:
        m_pad = max(m_pad, 16)
    config = MixedConfig(weight, rows, k, 0, split, m_pad, trigger, zero_products=zero_products)
    config = replace(config, stages=mixed_stages(config))
    if reason := config.illegal():
        raise ConfigError(f"{config}: {reason}.")
    return config


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


def mixed_configs(weight: NarrowWeight, m: int) -> list[MixedConfig]:
    """Every tiling that can be compiled for ``m`` rows, in a fixed order."""
    found = []
    for split in (1, 2, 4):
        for rows in range(16, 257, 16):
            for k in (128, 256):
                try:
                    found.append(mixed_config(weight, m, rows, k, split))
                except ConfigError:
                    continue
    return found


def choose_mixed(weight: NarrowWeight, m: int, n: int, k: int, sm_count: int) -> MixedConfig:
    """The tiling that is predicted fastest for x (m, k) and a weight (n, k).

    Raises:
        ConfigError: M is above 128.
    """
    m_bucket(m)
    return min(mixed_configs(weight, m), key=lambda c: predicted_us(c, n, k, sm_count))


def mixed_program(
    config: MixedConfig,
    epilogue: Epilogue,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
) -> DslProgram:
    """The program of a configuration, chain and dtypes; M, N and K are dynamic.

    Its kernel is called with ``(words, (scales[, zero points]), x, out, (operands and extra
    outputs, or out), n, clusters)``, see ``MixedGemm.__call__``.
    """

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.sm90_mixed import mixed_arguments

        return mixed_arguments(config, epilogue, x_dtype, out_dtype, operand_dtypes)

    names = ",".join("-" if d is None else dtype_name(d) for d in operand_dtypes)
    text = (
        f"{epilogue} > {dtype_name(out_dtype)} | x {dtype_name(x_dtype)} | operands {names} "
        f"| {config}"
    )
    nodes = {type(node) for node in epilogue}
    return DslProgram(
        "cutlass/sm90_mixed", text, python_sources(fusedops.cutlass, *nodes), arguments
    )
