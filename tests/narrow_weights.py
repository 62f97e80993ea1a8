"""Tilings of the kernel with narrow weights, for tests that have no whole problem."""

from __future__ import annotations

from fusedops.config import mixed_tiles
from fusedops.config.mixed import MixedConfig, NarrowWeight
from fusedops.config.mixed_tiles import mixed_config, predicted_us
from fusedops.errors import ConfigError


def mixed_configs(weight: NarrowWeight, m: int) -> list[MixedConfig]:
    """Every named tiling that can be compiled for ``m`` rows, in the file's order."""
    found = []
    for tile in mixed_tiles():
        try:
            found.append(mixed_config(weight, m, tile.rows, tile.k, tile.split, tile.trigger))
        except ConfigError:
            continue
    return found


def fastest_config(weight: NarrowWeight, m: int, n: int, k: int, sm_count: int) -> MixedConfig:
    """The one that is predicted fastest for x (m, k) and a weight (n, k)."""
    return min(mixed_configs(weight, m), key=lambda c: predicted_us(c, n, k, sm_count))
