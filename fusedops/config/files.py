"""Where tile configurations and measured choices are kept, and the one rule by which one is chosen.

The choice is the measured one of ``cutlass_configs/tuned/<gpu>.json`` where there is one, else the
analytic model's; both are deterministic, so two processes never disagree.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem
from fusedops.weight import Dense

__all__ = [
    "DECODE_BUCKETS",
    "SHARED_BYTES",
    "TUNED_SCHEMA",
    "NamedTile",
    "choose_tile",
    "load_tiles",
    "rank",
    "tuned_choices",
    "tuned_path",
    "tuning_key",
    "tuning_m",
    "winners",
]

SHARED_BYTES = 227 * 1024
"""Shared memory that a CTA can have (CUDA C++ Programming Guide, compute capability 9.0)."""

TUNED_SCHEMA = 1
"""Version of the layout of ``cutlass_configs/tuned/<gpu>.json``."""

DECODE_BUCKETS = (8, 16, 32, 48, 64, 80, 96, 112, 128)
"""Padded M of the decode kernels: the wgmma N they are compiled for, and what choices are filed
under. They lie close together since rows of a tile beyond x are dear to load (o of Llama-3-8B took
15.0 us at M = 65 padded to 96, and 11.5 us at M = 96). CuTe DSL 4.8 aborts on other multiples of 8
than the first and those of 16."""

_PACKAGE = Path(__file__).resolve().parents[1]


class NamedTile(Protocol):
    """A named tile configuration of one kernel family."""

    @property
    def name(self) -> str:
        """Its name in ``cutlass_configs``."""
        ...

    @property
    def size(self) -> int:
        """Rows of the weight in a tile, times rows of x where tiles share M."""
        ...

    def legal(self, problem: GemmProblem) -> str | None:
        """Why it cannot serve ``problem``, or None if it can."""
        ...

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model."""
        ...


Tile = TypeVar("Tile", bound=NamedTile)


def _folder() -> Path:
    """``cutlass_configs``: inside the installed package, or beside it in a checkout."""
    for candidate in (_PACKAGE / "cutlass_configs", _PACKAGE.parent / "cutlass_configs"):
        if (candidate / "sm90.toml").is_file():
            return candidate
    raise ConfigError(
        f"cutlass_configs/sm90.toml lies neither in {_PACKAGE} nor beside it; install fusedops "
        "from its wheel, or run it from a complete checkout."
    )


def load_tiles(family: str, make: Callable[..., Tile]) -> tuple[Tile, ...]:
    """Every named tile of a kernel family for sm_90a, in the file's order.

    Args:
        family: the table's name in ``sm90.toml``.
        make: called with the name and the values of each entry.

    Raises:
        ConfigError: the file is malformed.
    """
    path = _folder() / "sm90.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(make(name, **values) for name, values in table[family].items())
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"{path.name} is malformed: {error}") from error


def tuned_path(gpu: str) -> Path:
    """Where the measured choices for a GPU are kept: ``NVIDIA H200`` -> ``nvidia_h200.json``."""
    return _folder() / "tuned" / f"{'_'.join(gpu.lower().split())}.json"


@cache
def _tile_names() -> frozenset[str]:
    """Names of all tiles of all kernel families and architectures."""
    names: set[str] = set()
    for path in sorted(_folder().glob("sm*.toml")):
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8")).values()
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path.name} is malformed: {error}") from error
        names.update(*(table for table in tables if isinstance(table, dict)))
    return frozenset(names)


@cache
def tuned_choices(gpu: str) -> dict[str, Any]:
    """Measured choices for a GPU by problem key; empty where none were committed.

    Raises:
        ConfigError: the file is malformed, is another GPU's, or names an unknown configuration.
    """
    path = tuned_path(gpu)
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        _check_tuned(data, gpu)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{path} is malformed: {what}. Write it with `fusedops tune`, or remove it to choose "
            "by the analytic model."
        ) from error
    choices: dict[str, Any] = data["choices"]
    return choices


def _check_tuned(data: Any, gpu: str) -> None:
    """ValueError, KeyError, TypeError or AttributeError unless ``data`` has the right layout."""
    if data["schema"] != TUNED_SCHEMA:
        raise ValueError(f"schema {data['schema']!r}; this version reads {TUNED_SCHEMA}")
    if data["gpu"] != gpu:
        raise ValueError(f"it was measured on {data['gpu']!r}, not on {gpu!r}")
    for key, row in data["choices"].items():
        if row["config"] not in _tile_names():
            raise ValueError(f"{key!r} names the unknown configuration {row['config']!r}")


def tuning_m(m: int) -> int:
    """The M that a measured choice is filed under: the decode buckets, then 2^i and 3 * 2^i."""
    for bucket in DECODE_BUCKETS:
        if m <= bucket:
            return bucket
    bucket = DECODE_BUCKETS[-1]
    while bucket < m and bucket < 16384:
        bucket *= 2
    return bucket * 3 // 4 if m <= bucket * 3 // 4 else bucket


def tuning_key(problem: GemmProblem) -> str:
    """What a measured choice is filed under: sizes, M bucket, dtype and whether columns pair.

    Formats other than dense stand behind that, with their options.
    """
    spec = problem.spec
    gated = "gated" if spec.out_n != spec.n else "plain"
    dtype = str(problem.x_dtype).removeprefix("torch.")
    key = f"n{spec.n} k{spec.k} m{tuning_m(problem.m)} {dtype} {gated}"
    weight = spec.weight
    if weight.spec_name == Dense.spec_name:
        return key
    values = ((f.name, getattr(weight, f.name), f.default) for f in fields(weight)[2:])
    options = (f"{name}={value}" for name, value, default in values if value != default)
    return " ".join((key, weight.spec_name, *options))


def winners(problem: GemmProblem, gpu: str) -> set[str]:
    """Tiles that were measured fastest for the problem's product at any M."""

    def product(key: str) -> list[str]:
        sizes = key.split()
        return sizes[:2] + sizes[3:]

    wanted = product(tuning_key(problem))
    choices = tuned_choices(gpu)
    return {row["config"] for key, row in choices.items() if product(key) == wanted}


def choose_tile(family: str, tiles: Sequence[Tile], problem: GemmProblem, gpu: str) -> Tile:
    """The tile of a family for a problem: measured, else predicted fastest.

    Raises:
        ConfigError: no tile is legal; the message lists why.
    """
    reasons = {tile.name: tile.legal(problem) for tile in tiles}
    legal = [tile for tile in tiles if reasons[tile.name] is None]
    if not legal:
        by_reason: dict[str | None, list[str]] = {}
        for name, reason in reasons.items():
            by_reason.setdefault(reason, []).append(name)
        lines = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
        raise ConfigError(f"no {family} configuration fits {problem.spec}: {lines}")
    tuned = tuned_choices(gpu).get(tuning_key(problem))
    for tile in legal:
        if tuned is not None and tile.name == tuned["config"]:
            return tile
    return min(legal, key=lambda tile: rank(tile, problem))


def rank(tile: NamedTile, problem: GemmProblem) -> tuple[float, int, str]:
    """What tilings are ordered by: predicted time, then the larger tile, which loads less."""
    return tile.predicted_us(problem), -tile.size, tile.name
