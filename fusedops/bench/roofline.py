"""Ceilings of this GPU, the floor that they set for a piece of work, and the wall a row stands at.

Ceilings are measured, not taken from a data sheet, and cached per process. A GPU whose ceilings
were once read with a tuned streaming kernel has them as published figures too; a floor then uses
the higher of the two, so that a slow measuring kernel cannot make our rows look good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Measurement
from fusedops.bench.runner import make_runner
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError, DeviceError

__all__ = [
    "PUBLISHED_CEILINGS",
    "Ceilings",
    "Floor",
    "Traffic",
    "Wall",
    "ceilings",
    "classify",
    "floor",
    "measure_ceilings",
    "row_ceilings",
]


@dataclass(frozen=True)
class Ceilings:
    """What a GPU reaches at best.

    Attributes:
        gpu: the device's name.
        read_bytes_per_s: streaming reads.
        read_write_bytes_per_s: streaming reads and writes, both counted.
        bf16_flops_per_s: dense bf16 products, multiply and add counted as two.
        launch_us: one nearly empty kernel inside a graph.
        details: how each figure was reached.
    """

    gpu: str
    read_bytes_per_s: float
    read_write_bytes_per_s: float
    bf16_flops_per_s: float
    launch_us: float
    details: tuple[str, ...] = ()


PUBLISHED_CEILINGS = {
    "NVIDIA H200": Ceilings(
        "NVIDIA H200",
        read_bytes_per_s=4.67e12,
        read_write_bytes_per_s=4.28e12,
        bf16_flops_per_s=700e12,
        launch_us=1.17,
        details=(
            "read: 4 GiB, 16-byte loads, 8 in flight a thread",
            "read + write: torch.mul(out=) over 2 GiB",
            "bf16: 8192^3 through cuBLAS; 700 to 810 TFLOP/s with the moment's clocks",
        ),
    )
}
"""Read once with tuned kernels, random data, CUDA-graph replay; by torch's name of the device."""


@dataclass(frozen=True)
class Traffic:
    """The least work of an operation: each input read once, each output written once.

    Attributes:
        read_bytes: bytes read from memory.
        write_bytes: bytes written to memory.
        flops: floating-point operations on tensor cores; 0 for memory-bound operations.
    """

    read_bytes: float
    write_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Floor:
    """The time under which no version of an operation can go.

    Attributes:
        us: the larger of the two below, microseconds.
        memory_us: bytes over the bandwidth.
        compute_us: FLOPs over the peak.
    """

    us: float
    memory_us: float
    compute_us: float

    def fraction(self, measured_us: float) -> float:
        """The floor over a measured time: 1 is the roof."""
        return self.us / measured_us


WRITE_SHARE = 0.1
"""Work that writes less than this share of its bytes is held to the read bandwidth, which is higher
because the memory does not turn round between reading and writing."""


def floor(traffic: Traffic, limits: Ceilings) -> Floor:
    """The floor of ``traffic`` under ``limits``.

    Raises:
        ConfigError: the operation moves no bytes and computes nothing.
    """
    moved = traffic.read_bytes + traffic.write_bytes
    if moved <= 0 and traffic.flops <= 0:
        raise ConfigError(f"floor: {traffic} moves nothing; give the bytes of inputs and outputs.")
    mostly_reads = traffic.write_bytes < WRITE_SHARE * moved
    bandwidth = limits.read_bytes_per_s if mostly_reads else limits.read_write_bytes_per_s
    memory_us = moved / bandwidth * 1e6
    compute_us = traffic.flops / limits.bf16_flops_per_s * 1e6
    return Floor(max(memory_us, compute_us), memory_us, compute_us)


class Wall(Enum):
    """What holds a row back, named by rule."""

    CACHE = "cache"
    LAUNCH = "launch"
    MEMORY = "memory"
    TENSOR_CORE = "tensor core"
    LATENCY = "latency"


NEAR_LAUNCH = 3.0
NEAR_ROOF = 0.6


def classify(row: Measurement, traffic: Traffic, limits: Ceilings) -> Wall:
    """The wall of a row.

    The rule, first match: a time under ``NEAR_LAUNCH`` empty kernels is the launch; a hot row
    faster than its memory floor lives in a cache; a row at ``NEAR_ROOF`` of its floor or better
    stands at the roof that sets the floor; anything else is latency (too little work in flight,
    or traffic and instructions beyond the least).
    """
    bound = floor(traffic, limits)
    if row.median_us < NEAR_LAUNCH * limits.launch_us:
        return Wall.LAUNCH
    if row.hot and row.median_us < bound.memory_us:
        return Wall.CACHE
    if bound.fraction(row.median_us) < NEAR_ROOF:
        return Wall.LATENCY
    return Wall.MEMORY if bound.memory_us >= bound.compute_us else Wall.TENSOR_CORE


def _best(
    names_and_runs: dict[str, Callable[[Buffers], Tensor | None]],
    make_buffers: Callable[[torch.Generator], Buffers],
    device: torch.device | str,
) -> tuple[str, float]:
    """Name and microseconds of the fastest of several ways to stream the same bytes."""

    def finite(results: tuple[Tensor, ...], _buffers: Buffers) -> str | None:
        return None if bool(results[0].flatten()[:1].isfinite().all()) else "not finite"

    contenders = [Contender(name, run, finite) for name, run in names_and_runs.items()]
    protocol = Protocol(samples=9, min_samples=3)
    outcomes = measure(contenders, make_buffers, device=device, protocol=protocol)
    times = {
        name: outcome.median_us
        for name, outcome in outcomes.items()
        if isinstance(outcome, Measurement)
    }
    if not times:
        raise DeviceError(f"measure_ceilings: no streaming kernel ran on {device}: {outcomes}")
    name = min(times, key=times.__getitem__)
    return name, times[name]


def measure_ceilings(
    device: torch.device | str = "cuda",
    *,
    stream_bytes: int = 4 << 30,
    product_size: int = 8192,
) -> Ceilings:
    """Measure the ceilings of a device (about 10 s and 20 GiB of memory on a GPU).

    Reads are timed as several reductions over ``stream_bytes``, of which the best counts; reads and
    writes as ``torch.mul(out=)`` over half of it; bf16 as one square product.

    Args:
        device: a CUDA device; on the CPU smaller sizes give host figures.
        stream_bytes: bytes that one read streams.
        product_size: rows and columns of the square product.
    """
    count = stream_bytes // 4

    def readable(generator: torch.Generator) -> Buffers:
        data = torch.empty(count, dtype=torch.float32, device=device).normal_(generator=generator)
        return Buffers((data,))

    def as_rows(buffers: Buffers) -> Tensor:
        return buffers.inputs[0].view(-1, 4096)

    read_name, read_us = _best(
        {
            "sum": lambda buffers: torch.sum(buffers.inputs[0]),
            "sum of int32": lambda buffers: torch.sum(
                buffers.inputs[0].view(torch.int32), dtype=torch.int64
            ),
            "max": lambda buffers: torch.amax(buffers.inputs[0]),
            "row sums": lambda buffers: torch.sum(as_rows(buffers), dim=1),
            "row maxima": lambda buffers: torch.amax(as_rows(buffers), dim=1),
        },
        readable,
        device,
    )

    def writable(generator: torch.Generator) -> Buffers:
        data = torch.empty(count // 2, dtype=torch.float32, device=device)
        return Buffers((data.normal_(generator=generator),), (torch.empty_like(data),))

    _, write_us = _best(
        {"mul": lambda buffers: torch.mul(buffers.inputs[0], 1.5, out=buffers.outputs[0])},
        writable,
        device,
    )

    def square(generator: torch.Generator) -> Buffers:
        shape = (product_size, product_size)
        pair = [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            for _ in range(2)
        ]
        return Buffers(tuple(pair), (torch.empty_like(pair[0]),))

    _, product_us = _best(
        {"mm": lambda buffers: torch.mm(*buffers.inputs, out=buffers.outputs[0])}, square, device
    )

    def tiny(generator: torch.Generator) -> Buffers:
        data = torch.empty(256, dtype=torch.float32, device=device).normal_(generator=generator)
        return Buffers((data,), (torch.empty_like(data),))

    launch = measure(
        [
            Contender(
                "tiny",
                lambda buffers: torch.neg(buffers.inputs[0], out=buffers.outputs[0]),
                lambda results, buffers: (
                    None if torch.equal(results[0], -buffers.inputs[0]) else "wrong"
                ),
            )
        ],
        tiny,
        device=device,
        hot=True,
        runner=make_runner(device),
    )["tiny"]
    if not isinstance(launch, Measurement):
        raise DeviceError(f"measure_ceilings: an empty kernel did not run on {device}: {launch}")
    is_gpu = torch.device(device).type == "cuda"
    return Ceilings(
        gpu=torch.cuda.get_device_name(device) if is_gpu else "cpu",
        read_bytes_per_s=count * 4 / read_us * 1e6,
        read_write_bytes_per_s=count * 4 / write_us * 1e6,
        bf16_flops_per_s=2.0 * product_size**3 / product_us * 1e6,
        launch_us=launch.median_us,
        details=(
            f"read: {read_name} over {count * 4 / 2**30:g} GiB",
            f"read + write: mul(out=) over {count * 2 / 2**30:g} GiB",
            f"bf16: {product_size}^3 through torch.mm",
            "launch: one kernel of 256 elements, hot",
        ),
    )


_measured: dict[str, Ceilings] = {}


def ceilings(device: torch.device | str = "cuda") -> Ceilings:
    """The ceilings that floors are computed with: measured once a process, or published if higher.

    Raises:
        DeviceError: the device is absent.
    """
    key = str(torch.device(device))
    if key not in _measured:
        _measured[key] = _higher(measure_ceilings(device))
    return _measured[key]


def _higher(found: Ceilings) -> Ceilings:
    published = PUBLISHED_CEILINGS.get(found.gpu)
    if published is None:
        return found
    return Ceilings(
        gpu=found.gpu,
        read_bytes_per_s=max(found.read_bytes_per_s, published.read_bytes_per_s),
        read_write_bytes_per_s=max(found.read_write_bytes_per_s, published.read_write_bytes_per_s),
        bf16_flops_per_s=max(found.bf16_flops_per_s, published.bf16_flops_per_s),
        launch_us=min(found.launch_us, published.launch_us),
        details=(*found.details, "each the better of this and the published figure"),
    )


def row_ceilings(device: torch.device | str) -> Ceilings:
    """Published ceilings where there are some: measuring them again takes ten seconds."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return PUBLISHED_CEILINGS.get(name) or ceilings(device)
