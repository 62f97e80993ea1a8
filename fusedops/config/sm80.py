"""Tile configurations of the Ampere-style kernel: which are legal on a device, and which is chosen.

The kernel sums K in steps of 16 in ascending order in every tiling, so a result does not depend on
the choice, nor on how many rows stand beside a row.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from fusedops.config.files import choose_tile
from fusedops.epilogue.base import Node
from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem

__all__ = [
    "DEVICES",
    "LARGEST_SIZE",
    "Device",
    "MmaConfig",
    "MmaTile",
    "choose_mma",
    "mma_tiles",
]

LARGEST_SIZE = 2**31 - 512
"""Largest M, N and K: coordinates are 32-bit, and the last tile may reach beyond by a tile."""

_PACKAGE = Path(__file__).resolve().parents[1]
_KIB = 1024
_SM_REGISTERS = 65536


@dataclass(frozen=True)
class Device:
    """What the choice needs to know of an architecture.

    Attributes:
        build: architecture that the kernel is compiled for; a cubin runs on later minor versions.
        table: file of its tilings in ``cutlass_configs``.
        shared_bytes: shared memory that a CTA can have; an SM has 1 KiB more a CTA.
        sm_flops_us: dense bf16 operations of an SM in a microsecond through mma.sync.
        sm_bytes_us: an SM's share of the memory bandwidth, bytes a microsecond.
    """

    build: str
    table: str
    shared_bytes: int
    sm_flops_us: float
    sm_bytes_us: float

    @property
    def pdl(self) -> bool:
        """Whether it has programmatic dependent launch (griddepcontrol: sm_90 and later)."""
        return self.build.startswith(("sm_9", "sm_10"))

    @property
    def converts_e4m3(self) -> bool:
        """Whether it has the conversion to e4m3 (PTX ISA, "cvt": sm_89 and later)."""
        return self.build != "sm_80"


# Shared memory: CUDA C++ Programming Guide, technical specifications per compute capability. Rates:
# data sheets of A100 SXM, RTX A6000, L40S, H200 SXM and B200, divided by their SMs; on sm_90 and
# sm_100 mma.sync is taken to reach 62 % and 25 % of the peak, which other instructions set.
DEVICES = {
    "sm_80": Device("sm_80", "sm80.toml", 163 * _KIB, 2.89e6, 1.89e4),
    "sm_86": Device("sm_80", "sm80.toml", 99 * _KIB, 1.84e6, 9.1e3),
    "sm_89": Device("sm_89", "sm80.toml", 99 * _KIB, 2.55e6, 6.1e3),
    "sm_90a": Device("sm_90", "sm80.toml", 227 * _KIB, 4.65e6, 3.5e4),
    "sm_100a": Device("sm_100a", "sm100.toml", 227 * _KIB, 3.8e6, 5.2e4),
}
"""By a device's architecture, as ``fusedops.jit.launch.device_arch`` names it."""


@dataclass(frozen=True)
class MmaConfig:
    """A compiled tiling.

    Attributes:
        tile_m, tile_n: rows and columns of the accumulator that a CTA computes.
        tile_k: columns of K in a stage.
        stages: of the cp.async ring.
        warps_m, warps_n: warps along each side.
        align_bytes: what divides the address and the row pitch of x and w: 2, 4, 8 or 16.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int
    align_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.tile_m * self.tile_n // self.threads

    @property
    def warp_m(self) -> int:
        """Rows of a warp's part."""
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of a warp's part."""
        return self.tile_n // self.warps_n

    @property
    def registers(self) -> int:
        """About the registers of a thread: accumulators, fragments of two K steps, the rest."""
        return self.accumulators + (self.warp_m + self.warp_n) // 2 + 64

    def ring_bytes(self, element_bytes: int) -> int:
        """Bytes of the ring: x and w of every stage."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * element_bytes

    def output_pitch_bytes(self, columns: int, out_bytes: int) -> int:
        """Row pitch of the result in shared memory: 16 bytes keep eight rows on other banks."""
        return columns * out_bytes + 16

    def shared_bytes(self, element_bytes: int, columns: int, out_bytes: int, stats: int) -> int:
        """Bytes of shared memory: the ring, later the result in its place; row statistics.

        Args:
            element_bytes: of x and w.
            columns: of the tile's result: ``tile_n``, or half of it under a gate.
            out_bytes: of an element of the result.
            stats: number of row statistics.
        """
        output = self.tile_m * self.output_pitch_bytes(columns, out_bytes)
        return max(self.ring_bytes(element_bytes), output) + stats * self.warps_n * self.tile_m * 4


def _writes_matrix(node: Node) -> bool:
    """Whether a node writes a second output of the result's size."""
    small = hasattr(node, "parts") or node.group_columns() > 1
    return bool(node.extra_outputs()) and not small


@dataclass(frozen=True)
class MmaTile:
    """A named tiling, see ``cutlass_configs/sm80.toml``."""

    name: str
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int

    @property
    def size(self) -> int:
        """Weight rows of a tile: more rows of x than there are cost products, not bytes."""
        return self.tile_n

    def __post_init__(self) -> None:
        threads = 32 * self.warps_m * self.warps_n
        per_row = max(1, self.tile_k // 8)
        legal = (
            self.tile_k in (32, 64, 128)
            and self.stages >= 2
            and self.tile_m % (16 * self.warps_m) == 0
            and self.tile_n % (16 * self.warps_n) == 0
            and threads % (8 * per_row) == 0
            and self.tile_m * per_row % threads == 0
            and self.tile_n * per_row % threads == 0
        )
        if not legal:
            raise ConfigError(
                f"tiling {self}: tile_k must be 32, 64 or 128, stages at least 2, a warp's part of "
                "tile_m x tile_n a multiple of 16 x 16, and the CTA's threads must copy whole "
                "multiples of 8 rows, 8 columns of K each, at once and so divide both tiles."
            )

    def config(self, align_bytes: int) -> MmaConfig:
        """The compiled configuration for x and w of that alignment."""
        return MmaConfig(
            self.tile_m,
            self.tile_n,
            self.tile_k,
            self.stages,
            self.warps_m,
            self.warps_n,
            align_bytes,
        )

    def tiles_n(self, n: int) -> int:
        """Tiles along N: the parts of a row statistic that are written."""
        return -(-n // self.tile_n)

    def shared_bytes(self, problem: GemmProblem) -> int:
        """Bytes of shared memory that a CTA takes for ``problem``."""
        spec = problem.spec
        columns = spec.epilogue.widths(self.tile_n)[-1]
        stats = sum(hasattr(node, "parts") for node in spec.epilogue)
        return self.config(16).shared_bytes(
            problem.x_dtype.itemsize, columns, spec.out_dtype.itemsize, stats
        )

    def legal(self, problem: GemmProblem) -> str | None:
        """Why the tiling cannot serve ``problem``, or None if it can."""
        epilogue = problem.spec.epilogue
        limit = DEVICES[problem.arch].shared_bytes
        needed = self.shared_bytes(problem)
        if needed > limit:
            return f"needs {needed} bytes of shared memory, {problem.arch} has {limit}"
        if self.config(16).accumulators > 64:
            # Found by compiling: what spills registers to local memory.
            if problem.aligned_bytes < 4:
                return "leaves no registers for copies of single elements"
            if any(_writes_matrix(node) for node in epilogue):
                return "leaves no registers for a second output"
        warp_columns = epilogue.widths(self.tile_n // self.warps_n)
        for node, width in zip(epilogue, warp_columns, strict=False):
            parts = getattr(node, "parts", None)
            if parts is not None and parts < self.tiles_n(problem.spec.n):
                return f"{node} has fewer parts than the {self.tiles_n(problem.spec.n)} N tiles"
            if node.group_columns() not in (1, width):
                return f"{node} needs warps that hold one group of {node.group_columns()} columns"
        return None

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time by the analytic model: rounds of CTAs, each bound by what takes it longest.

        A CTA's k-tile costs the tensor cores' time, that of reading fragments from shared memory
        (128 bytes a clock at about 1.7 GHz), that of its loads at an SM's share of three times the
        memory bandwidth (L2), and, alone on its SM, the latency of memory (about 0.8 us) over the
        stages in flight. No time is less than what the memory's bandwidth asks for.
        """
        spec, device, element = problem.spec, DEVICES[problem.arch], problem.x_dtype.itemsize
        sms = max(problem.sm_count, 1)
        ctas = -(-problem.m // self.tile_m) * self.tiles_n(spec.n)
        config = self.config(problem.aligned_bytes)
        resident = min(
            max(1, (device.shared_bytes + _KIB) // (self.shared_bytes(problem) + _KIB)),
            max(1, _SM_REGISTERS // (config.threads * config.registers)),
            -(-ctas // sms),
        )
        k_tiles = max(1, -(-spec.k // self.tile_k))
        multiply = 2 * self.tile_m * self.tile_n * self.tile_k / device.sm_flops_us
        warps = self.warps_m * self.warps_n
        fragments = warps * (config.warp_m + config.warp_n) * self.tile_k * element
        load = (self.tile_m + self.tile_n) * self.tile_k * element / (3 * device.sm_bytes_us)
        # Narrow copies cost an instruction each: the slower legal path.
        load *= max(1.0, 8 / problem.aligned_bytes)
        busy = max(multiply, fragments / (128 * 1700), load)
        step = max(busy * resident, 0.8 / (self.stages - 1))
        output = self.tile_m * self.tile_n * spec.out_dtype.itemsize / device.sm_bytes_us
        rounds = -(-ctas // (sms * resident))
        floor = problem.minimum_bytes / (device.sm_bytes_us * sms)
        return max(rounds * (k_tiles * step + output * resident + 1.0), floor) + 2.0


@cache
def mma_tiles(table: str) -> tuple[MmaTile, ...]:
    """Every named tiling of a file of ``cutlass_configs``, in the file's order.

    Raises:
        ConfigError: the file is absent or malformed.
    """
    for folder in (_PACKAGE / "cutlass_configs", _PACKAGE.parent / "cutlass_configs"):
        path = folder / table
        if path.is_file():
            break
    else:
        raise ConfigError(
            f"cutlass_configs/{table} lies neither in {_PACKAGE} nor beside it; install fusedops "
            "from its wheel, or run it from a complete checkout."
        )
    known = {field.name for field in fields(MmaTile)} - {"name"}
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["gemm"]
        wrong = [name for name, values in rows.items() if values.keys() != known]
        if wrong:
            raise ConfigError(f"{table}: {', '.join(wrong)} must have {', '.join(sorted(known))}.")
        return tuple(MmaTile(name, **values) for name, values in rows.items())
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{table} is malformed: {error}") from error


def choose_mma(problem: GemmProblem) -> MmaTile:
    """The tiling for a problem with any M > 0: measured, else predicted fastest.

    Raises:
        ConfigError: no named tiling is legal; the message lists why.
    """
    return choose_tile("mma", mma_tiles(DEVICES[problem.arch].table), problem, problem.gpu)
