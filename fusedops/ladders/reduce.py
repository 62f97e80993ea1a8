"""The ladder of sums: divergence, bank conflicts, barriers, elements a thread, joining blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.oracles import within
from fusedops.bench.peers import sum_peers
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
from fusedops.ops.reduce import reduce

__all__ = ["LADDER"]

NAME = "reduce"
SIZE = 1 << 28
_THREADS = 256
_TREE_THREADS = 1024
_TREE_BLOCKS_PER_SM = 2
_BLOCKS_PER_SM = 8
_SHUFFLE_ELEMENTS = 8
_ERROR = 2.0**-18
"""Error of a float32 sum, relative to the sum of magnitudes, that a right result stays within."""

_TITLES = specified()[NAME].steps
_PARAMETERS = ("pointer", "pointer", "int64")

State = list[tuple[Tensor, Tensor, int, int]]
"""Launches in order: input, partial sums, elements, blocks."""


def _kernel(version: str, template: str = "") -> LadderKernel:
    name = f"{NAME}_{version}"
    return LadderKernel(f"{FOLDER}/{name}.cu", name + template, _PARAMETERS)


def passes(x: Tensor, blocks_for: Callable[[int], int]) -> State:
    """The launches that bring ``x`` down to one sum, each of as many blocks as it has results.

    Args:
        x: one dimension, at least one element.
        blocks_for: blocks for a number of elements.
    """
    launches: State = []
    source = x
    while True:
        count = source.numel()
        blocks = blocks_for(count)
        partial = torch.empty(blocks, device=x.device)
        launches.append((source, partial, count, blocks))
        if blocks == 1:
            return launches
        source = partial


def _prepare_blocks(elements: int, buffers: Buffers) -> State:
    """Blocks of so many elements each."""
    return passes(buffers.inputs[0], lambda count: -(-count // elements))


def _prepare_grid(threads: int, width: int, per_sm: int, buffers: Buffers) -> State:
    """A grid that fits the GPU, then one block."""
    x = buffers.inputs[0]
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    most = per_sm * sms
    return passes(
        x, lambda count: 1 if count <= most else min(most, -(-count // (threads * width)))
    )


def _run(kernel: LadderKernel, threads: int, state: State, pdl: bool = False) -> Tensor:
    """Launch after launch; with ``pdl`` one that follows another is set up while that one runs."""
    for number, (source, partial, count, blocks) in enumerate(state):
        args = (source, partial, count)
        kernel.launch((blocks, 1, 1), (threads, 1, 1), args, pdl=pdl and number > 0)
    return state[-1][1]


def _blocks_step(version: str, elements: int, kernel: LadderKernel) -> Step:
    name = f"{NAME}.{version}"
    prepare = functools.partial(_prepare_blocks, elements * _THREADS)
    run = functools.partial(_run, kernel, _THREADS)
    return own_step(name, _TITLES[name], kernel, run, prepare)


def _grid_step(version: str, threads: int, width: int, per_sm: int, pdl: bool = False) -> Step:
    name = f"{NAME}.{version}"
    kernel = _kernel(version)
    prepare = functools.partial(_prepare_grid, threads, width, per_sm)
    run = functools.partial(_run, kernel, threads, pdl=pdl)
    return own_step(name, _TITLES[name], kernel, run, prepare)


def _run_atomic(kernel: LadderKernel, state: State) -> Tensor:
    x, _, count, blocks = state[0]
    out = torch.zeros(1, device=x.device)
    kernel.launch((blocks, 1, 1), (_THREADS, 1, 1), (x, out, count))
    return out


def _atomic_step() -> Step:
    name = f"{NAME}.v7"
    kernel = _kernel("v7")
    prepare = functools.partial(_prepare_grid, _THREADS, 4, _BLOCKS_PER_SM)
    return own_step(name, _TITLES[name], kernel, functools.partial(_run_atomic, kernel), prepare)


def _problems(size: int) -> tuple[Problem, ...]:
    def make(generator: torch.Generator) -> Buffers:
        return Buffers((torch.empty(size, device=generator.device).normal_(generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        exact = torch.zeros((), dtype=torch.float64, device=buffers.inputs[0].device)
        magnitude = exact.clone()
        for part in buffers.inputs[0].split(1 << 26):
            exact += part.sum(dtype=torch.float64)
            magnitude += part.abs().sum(dtype=torch.float64)
        return within(results[0].reshape(()), exact, _ERROR * magnitude)

    traffic = Traffic(read_bytes=4.0 * size)
    return (Problem(f"{size} float32", make, check, traffic, size, "additions"),)


def _cub() -> Contender:
    return next(peer for peer in sum_peers(lambda results, buffers: None) if peer.name == "cub")


_PEERS = {
    "torch": Step(
        f"{NAME}.torch",
        _TITLES[f"{NAME}.torch"],
        Lesson(
            "torch's reduction: vectors of 16 bytes, several a thread, then a tree.",
            "memory. A mature kernel, here for comparison.",
            "Climb to it, and past it.",
        ),
        lambda buffers: torch.sum(buffers.inputs[0]),
        peer="torch",
    ),
    "cub": peer_step(
        f"{NAME}.cub",
        _TITLES[f"{NAME}.cub"],
        Lesson(
            "NVIDIA's own device-wide reduction, tuned for each architecture.",
            "memory. It reads as fast as the memory gives.",
            "None: the peer to measure up to.",
        ),
        "cub",
        _cub,
    ),
}

_LIBRARY = Step(
    f"{NAME}.library",
    _TITLES[f"{NAME}.library"],
    Lesson(
        "Loads of 16 bytes past the L1, many more pieces than run at once, joined in one fixed "
        "order.",
        "memory. It stands at the bandwidth of a streaming read.",
        "None: fuse the sum into what writes its input.",
    ),
    lambda buffers: reduce(buffers.inputs[0], "sum"),
    files=("reduce.cu",),
    operation="reduce",
)

LADDER = Ladder(
    NAME,
    specified()[NAME].title,
    "One addition for every 4 bytes: far below the ridge point, so the read bandwidth is the roof. "
    "What is lost is lost in idle lanes, bank conflicts, barriers, and too few bytes under way.",
    SIZE,
    _problems,
    (
        _PEERS["torch"],
        _blocks_step("v1", 1, _kernel("v1")),
        _blocks_step("v2", 1, _kernel("v2")),
        _blocks_step("v3", 1, _kernel("v3")),
        _blocks_step("v4", 2, _kernel("v4")),
        *(_blocks_step(f"v5_{n}", n, _kernel("v5", f"<{n}>")) for n in (8, 64, 8192)),
        _grid_step("tree", _TREE_THREADS, 1, _TREE_BLOCKS_PER_SM),
        _blocks_step("v6", _SHUFFLE_ELEMENTS, _kernel("v6")),
        _atomic_step(),
        _grid_step("v8", _THREADS, 4, _BLOCKS_PER_SM, pdl=True),
        _LIBRARY,
        _PEERS["cub"],
    ),
)
"""Sums of normal float32 values."""
