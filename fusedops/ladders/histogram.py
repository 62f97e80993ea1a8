"""The ladder of histograms: contention, global, in shared memory, within a warp, and none."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusedops.bench.data import Buffers
from fusedops.bench.goals.cuda_histogram import cub_contender
from fusedops.bench.oracles import bitwise
from fusedops.bench.roofline import Traffic
from fusedops.ladders.catalog import specified
from fusedops.ladders.model import (
    FOLDER,
    Ladder,
    LadderKernel,
    Lesson,
    Problem,
    Step,
    own_step,
    peer_step,
)
from fusedops.ops.histogram import bincount

__all__ = ["LADDER"]

NAME = "histogram"
SIZE = 1 << 28
BINS = 256
_THREADS = 256
_BLOCKS_PER_SM = 8
_CENTRE, _DEVIATION = 128.0, 4.0
_ONE_VALUE = 97
_CHUNK = 1 << 26
PRIVATE_THREADS = 384
_PRIVATE_BYTES = BINS * PRIVATE_THREADS * 2
"""256 counters of 16 bits a thread: most of the shared memory of a multiprocessor of sm_90."""
_MOST_COUNTED = (1 << 16) - 1
_VECTOR = 16

_TITLES = specified()[NAME].steps


def _kernel(version: str) -> LadderKernel:
    name = f"{NAME}_{version}"
    return LadderKernel(f"{FOLDER}/{name}.cu", name, ("pointer", "pointer", "int64"))


def _values(buffers: Buffers) -> Tensor:
    """The bytes to count; those that are all the same are no random data."""
    return (*buffers.inputs, *buffers.indices)[0]


def _uniform(x: Tensor, generator: torch.Generator) -> None:
    x.random_(0, BINS, generator=generator)


def _skewed(x: Tensor, generator: torch.Generator) -> None:
    for part in x.split(_CHUNK):
        normal = torch.empty(part.shape, device=x.device).normal_(
            _CENTRE, _DEVIATION, generator=generator
        )
        part.copy_(normal.clamp_(0, BINS - 1))


def _one_value(x: Tensor, generator: torch.Generator) -> None:
    x.fill_(_ONE_VALUE)


_FILLS = {"uniform": _uniform, "skewed": _skewed, "one value": _one_value}


def _problem(name: str, size: int) -> Problem:
    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(size, dtype=torch.uint8, device=generator.device)
        _FILLS[name](x, generator)
        counts = torch.empty(BINS, dtype=torch.int32, device=x.device)
        # One value everywhere would be refused as data; here it is what is asked about.
        is_data = _FILLS[name] is not _one_value
        return Buffers((x,) if is_data else (), (counts,), () if is_data else (x,))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x = _values(buffers)
        expected = torch.zeros(BINS, dtype=torch.int64, device=x.device)
        for part in x.split(_CHUNK):
            expected += torch.bincount(part.int(), minlength=BINS)
        return bitwise(results[0].long(), expected)

    return Problem(f"{size} bytes, {name}", make, check, Traffic(float(size)), size, "counts")


def _problems(size: int) -> tuple[Problem, ...]:
    return tuple(_problem(name, size) for name in _FILLS)


def _run(kernel: LadderKernel, one_thread_each: bool, buffers: Buffers) -> None:
    x, (counts,) = _values(buffers), buffers.outputs
    count = x.numel()
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = -(-count // _THREADS)
    if not one_thread_each:
        blocks = min(blocks, _BLOCKS_PER_SM * sms)
    counts.zero_()
    kernel.launch((blocks, 1, 1), (_THREADS, 1, 1), (x, counts, count))


def private_blocks(count: int, sms: int) -> int:
    """Blocks of ``histogram.v7``: one a multiprocessor, and more where one of their threads would
    meet more elements than its counters of 16 bits hold, whatever their values."""
    # Threads take vectors in turn; one of them more than others, and an element of the tail.
    most = PRIVATE_THREADS * (_MOST_COUNTED - 1 - _VECTOR)
    return max(sms, -(-count // most))


def _run_private(kernel: LadderKernel, buffers: Buffers) -> None:
    x, (counts,) = _values(buffers), buffers.outputs
    count = x.numel()
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    counts.zero_()
    launch_private(kernel, x, counts, private_blocks(count, sms))


def launch_private(kernel: LadderKernel, x: Tensor, counts: Tensor, blocks: int) -> None:
    """Launch ``histogram.v7`` on ``counts`` that are zero."""
    arguments = (x, counts, x.numel())
    kernel.launch((blocks, 1, 1), (PRIVATE_THREADS, 1, 1), arguments, shared_bytes=_PRIVATE_BYTES)


def _step(version: str, one_thread_each: bool = False) -> Step:
    name = f"{NAME}.{version}"
    kernel = _kernel(version)
    run = functools.partial(_run, kernel, one_thread_each)
    return own_step(name, _TITLES[name], kernel, run)


def _private_step() -> Step:
    name = f"{NAME}.v7"
    kernel = _kernel("v7")
    run = functools.partial(_run_private, kernel)
    return own_step(name, _TITLES[name], kernel, run, capability=(9, 0))


def _scattered(buffers: Buffers) -> None:
    x, (counts,) = _values(buffers), buffers.outputs
    one = torch.ones((), dtype=torch.int32, device=x.device)
    counts.zero_().scatter_add_(0, x.long(), one.expand(x.shape))


_TORCH = Step(
    f"{NAME}.torch",
    _TITLES[f"{NAME}.torch"],
    Lesson(
        "An int64 index for every byte, and one atomic addition each; torch.bincount, which asks "
        "the GPU for the largest value first, cannot be captured in a graph.",
        "global atomics. And eight bytes are written and read again for each one counted.",
        "Count the bytes where they are.",
    ),
    _scattered,
    peer="torch",
)

_CUB_STEP = peer_step(
    f"{NAME}.cub",
    _TITLES[f"{NAME}.cub"],
    Lesson(
        "NVIDIA's own device-wide histogram, privatised in shared memory.",
        "shared atomics. It counts values one by one.",
        "None: the peer to measure up to.",
    ),
    "cub",
    lambda: cub_contender(BINS, lambda results, buffers: None),
    lambda buffers: Buffers((_values(buffers),)),
)

_LIBRARY = Step(
    f"{NAME}.library",
    _TITLES[f"{NAME}.library"],
    Lesson(
        "Each thread counts in 16-bit counters of its own, all in the bank of shared memory that "
        "belongs to its lane: no atomics, and no value is slower than another. With skewed data "
        "atomic additions of one are faster (v3), but with uniform data they are slower: the "
        "library, which does not know the data, takes what is best at worst.",
        "load units. A load and a store of shared memory for each byte are half the bandwidth of "
        "a streaming read, uniform or skewed.",
        "None: count while the data is written.",
    ),
    lambda buffers: bincount(_values(buffers), BINS),
    files=("histogram.cu",),
    operation="bincount",
)

LADDER = Ladder(
    NAME,
    specified()[NAME].title,
    "One count for every byte read: the read bandwidth is the roof, and contention is what keeps "
    "from it. Uniform data spreads over the bins; skewed data does not, and one value everywhere "
    "is the worst case. A step that only suits one of them is no step up.",
    SIZE,
    _problems,
    (
        _TORCH,
        _step("v1", one_thread_each=True),
        *(_step(f"v{number}") for number in range(2, 7)),
        _private_step(),
        _LIBRARY,
        _CUB_STEP,
    ),
)
"""Bytes counted in 256 bins, of three distributions."""
