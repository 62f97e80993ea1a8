"""Tile configurations: loading them by name, which are legal, and which one a problem gets.

The choice is the measured one of ``cutlass_configs/tuned/<gpu>.json`` where there is one, else the
analytic model's; both are deterministic, so two processes never disagree.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem

__all__ = [
    "DecodeConfig",
    "DecodeTile",
    "choose_decode",
    "decode_tiles",
    "m_bucket",
    "tuned_choices",
]

DECODE_BUCKETS = (8, 16, 32, 64)
"""Padded M of the decode kernels: the wgmma N they are compiled for."""

# An SM's shared memory a CTA can have (CUDA C++ Programming Guide, compute capability 9.0).
_SHARED_BYTES = 227 * 1024
_WGMMA_ROWS = 64
_PACKAGE = Path(__file__).resolve().parent


def _folder() -> Path:
    """``cutlass_configs``: inside the installed package, or beside it in a checkout."""
    for candidate in (_PACKAGE / "cutlass_configs", _PACKAGE.parent / "cutlass_configs"):
        if (candidate / "sm90.toml").is_file():
            return candidate
    raise ConfigError(
        f"cutlass_configs/sm90.toml lies neither in {_PACKAGE} nor beside it; install fusedops "
        "from its wheel, or run it from a complete checkout."
    )


@dataclass(frozen=True)
class DecodeConfig:
    """A tiling of the decode kernel.

    Attributes:
        rows: weight rows (output columns) of a tile, a multiple of 8 (16 under a gate).
        k: columns of K in a stage, a multiple of 64.
        stages: TMA stages of the ring.
        split: CTAs that share a tile's K, 1 or 2 (a cluster).
        m_pad: padded M, the wgmma N: 8, 16, 32 or 64.
        trigger: the producer allows the next kernel to start once it has at most this many k-tiles
            left to load; -1 does so at once.
    """

    rows: int
    k: int
    stages: int
    split: int
    m_pad: int
    trigger: int = -1

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups: each multiplies 64 weight rows."""
        return -(-self.rows // _WGMMA_ROWS)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and one producer warp."""
        return self.warpgroups * 128 + 32


@dataclass(frozen=True)
class DecodeTile:
    """A named tiling of the decode kernel, see ``cutlass_configs/sm90.toml``."""

    name: str
    rows: int
    k: int
    split: int
    trigger: int

    def stages(self, m_pad: int, element_bytes: int) -> int:
        """TMA stages that fit beside the reduction buffer, the statistics and the barriers."""
        warps = -(-self.rows // 64) * 4
        exchange = (self.split - 1) * warps * 32 * (m_pad // 4) * 4
        statistics = 2 * (warps + 1) * m_pad * 4
        stage = (self.rows + m_pad) * self.k * element_bytes + 16
        return min(24, (_SHARED_BYTES - exchange - statistics - 2048) // stage)

    def config(self, m: int, element_bytes: int) -> DecodeConfig:
        """The compiled configuration that serves ``m`` rows."""
        bucket = m_bucket(m)
        stages = self.stages(bucket, element_bytes)
        return DecodeConfig(self.rows, self.k, stages, self.split, bucket, self.trigger)

    def clusters(self, n: int, sm_count: int) -> int:
        """Clusters to launch: as few as give every one of them the same number of tiles."""
        tiles = -(-n // self.rows)
        waves = -(-tiles // (sm_count // self.split))
        return -(-tiles // waves)

    def legal(self, problem: GemmProblem) -> str | None:
        """Why the tiling cannot serve ``problem``, or None if it can."""
        gated = problem.spec.out_n != problem.spec.n
        if gated and self.rows % 16:
            return f"rows={self.rows} cuts gate/up blocks of 16"
        k_tiles = -(-problem.spec.k // self.k)
        if k_tiles < self.split:
            return f"K={problem.spec.k} has fewer k-tiles than CTAs that share them"
        if self.stages(m_bucket(problem.m), problem.x_dtype.itemsize) < 3:
            return "fewer than 3 stages fit the shared memory"
        for node in problem.spec.epilogue:
            parts = getattr(node, "parts", None)
            if parts is not None and parts < self.clusters(problem.spec.n, problem.sm_count):
                return f"{node} has too few parts for one a cluster"
        return None

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model: the busiest SM's bytes over an SM's share of the bandwidth.

        The weight comes from memory at 4.5 TB/s over all SMs; x comes from L2, about three times as
        fast; a kernel's own cost is about 1 us, and a split adds its exchange.
        """
        spec = problem.spec
        element = problem.x_dtype.itemsize
        clusters = self.clusters(spec.n, problem.sm_count)
        tiles = -(-spec.n // self.rows)
        waves = -(-tiles // clusters)
        k = -(-spec.k // self.split)
        weight = waves * self.rows * k * element
        x = waves * m_bucket(problem.m) * k * element
        per_sm_bytes_us = 4.5e6 / problem.sm_count
        # Short k-tiles cost more barrier round trips for the same bytes.
        stage_bytes = self.rows * self.k * element
        latency = 0.02 * waves * k / self.k * max(0.0, 1.0 - stage_bytes / 16384)
        return (weight + x / 3) / per_sm_bytes_us + 1.0 + 0.3 * (self.split - 1) * waves + latency


def m_bucket(m: int) -> int:
    """The padded M that serves ``m`` rows; ConfigError beyond the largest bucket."""
    for bucket in DECODE_BUCKETS:
        if m <= bucket:
            return bucket
    raise ConfigError(f"M={m}: the decode kernel serves at most {DECODE_BUCKETS[-1]} rows.")


@cache
def decode_tiles() -> tuple[DecodeTile, ...]:
    """Every named decode tiling, in the file's order.

    Raises:
        ConfigError: the file is malformed.
    """
    path = _folder() / "sm90.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(DecodeTile(name, **values) for name, values in table["decode"].items())
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path.name} is malformed: {error}") from error


@cache
def tuned_choices(gpu: str) -> dict[str, Any]:
    """Measured choices for a GPU by problem key; empty where none were committed."""
    path = _folder() / "tuned" / f"{gpu}.json"
    if not path.is_file():
        return {}
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["choices"]
    return loaded


def tuning_key(problem: GemmProblem) -> str:
    """What a measured choice is filed under: sizes, M bucket, dtype and whether columns pair."""
    spec = problem.spec
    gated = "gated" if spec.out_n != spec.n else "plain"
    dtype = str(problem.x_dtype).removeprefix("torch.")
    return f"n{spec.n} k{spec.k} m{m_bucket(problem.m)} {dtype} {gated}"


def choose_decode(problem: GemmProblem, gpu: str) -> DecodeTile:
    """The tiling for a problem with M <= 64: measured, else predicted fastest.

    Raises:
        ConfigError: no named tiling is legal; the message lists why.
    """
    tiles = decode_tiles()
    reasons = {tile.name: tile.legal(problem) for tile in tiles}
    legal = [tile for tile in tiles if reasons[tile.name] is None]
    if not legal:
        lines = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(f"no decode configuration fits {problem.spec}: {lines}")
    tuned = tuned_choices(gpu).get(tuning_key(problem))
    for tile in legal:
        if tuned is not None and tile.name == tuned["config"]:
            return tile
    return min(legal, key=lambda tile: (tile.predicted_us(problem), tile.name))
