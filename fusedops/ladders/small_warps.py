"""Figures of warps: divergent branches, and what occupancy depends on and is worth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import bitwise, within
from fusedops.errors import LaunchError
from fusedops.ladders.figures import Bench, Figure, FigureRow, Panel, outcome_row
from fusedops.ladders.model import FOLDER, LadderKernel, lesson_of
from fusedops.ladders.occupancy import (
    blocks_per_sm,
    carve_out,
    clusters_at_once,
    local_bytes,
    registers,
    warps_per_sm,
)

__all__ = ["divergence", "occupancy"]

THREADS = 256
_WARPS = THREADS // 32

# Divergence

PATHS = (1, 2, 4, 8, 16, 32)
_ROUNDS = 256
_THREADS_IN_ALL = 1 << 20
_BRANCH_FILE = f"{FOLDER}/small_divergence.cu"
_BRANCH = LadderKernel(
    _BRANCH_FILE, "small_divergence", ("pointer", "pointer", "int32", "int32", "int32", "int32")
)
_BY = {"by lane": 0, "by warp": 1}


def branch_contender(series: str, paths: int) -> Contender:
    """Every element takes one of ``paths`` paths, chosen by its lane or by its warp."""
    by_warp = _BY[series]

    def run(buffers: Buffers) -> None:
        (x,), (out,) = buffers.inputs, buffers.outputs
        count = x.numel()
        blocks = -(-count // THREADS)
        values = (x, out, paths, by_warp, _ROUNDS, count)
        _BRANCH.launch((blocks, 1, 1), (THREADS, 1, 1), values)

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        (x,) = buffers.inputs
        return within(results[0], branch_reference(x, paths, by_warp), 1e-5)

    return Contender(series, run, check)


def branch_reference(x: Tensor, paths: int, by_warp: int) -> Tensor:
    """What the rounds ``x = factor x + 1/4`` come to, as a geometric sum in float64."""
    index = torch.arange(x.numel(), device=x.device)
    if by_warp:
        index = index // 32
    factor = 0.5 + (index % paths).double() / 128
    power = factor**_ROUNDS
    return power * x.double() + 0.25 * (1 - power) / (1 - factor)


def make_branch(count: int, generator: torch.Generator) -> Buffers:
    """x and out of ``count`` float32."""
    x = torch.empty(count, device=generator.device).normal_(generator=generator)
    return Buffers((x,), (torch.empty_like(x),))


def _paths(bench: Bench) -> Iterator[FigureRow]:
    make = functools.partial(make_branch, _THREADS_IN_ALL)
    for paths in PATHS:
        contenders = [branch_contender(series, paths) for series in _BY]
        for series, outcome in bench.time(contenders, make).items():
            yield outcome_row(series, str(paths), paths, outcome, lambda us: {"us": us})


def _branch_probe(series: str, paths: int, device: torch.device) -> Callable[[], object]:
    buffers = make_branch(_THREADS_IN_ALL, torch.Generator(device).manual_seed(0))
    return functools.partial(branch_contender(series, paths).run, buffers)


def divergence(id: str, title: str) -> Figure:
    """Time of the same work on 1 to 32 paths, within warps and between them."""
    panel = Panel(
        "Time against paths",
        "paths",
        ("us",),
        ("us",),
        _paths,
        f"Each of {_THREADS_IN_ALL:,} threads does {_ROUNDS} multiply-adds whatever its path.",
        log_y=True,
        probes={
            f"{series}, {paths}": functools.partial(_branch_probe, series, paths)
            for series in _BY
            for paths in PATHS
        },
        counted={"active threads of 32": lambda counters: counters.active_threads},
    )
    return Figure(id, title, lesson_of(_BRANCH_FILE), (panel,), (_BRANCH,))


# Occupancy

_FILE = f"{FOLDER}/small_occupancy.cu"
LEAST_BLOCKS = (1, 2, 4, 6, 8)
VALUES = 48
_MIX_ROUNDS = 32
_MIX_COUNT = 1 << 18
_MIXES = {
    blocks: LadderKernel(
        _FILE, f"small_registers<{blocks}>", ("pointer", "pointer", "int32", "int32")
    )
    for blocks in LEAST_BLOCKS
}
_ONE_LOAD = LadderKernel(_FILE, "small_one_load", ("pointer", "pointer", "int64"))
_ONE_LOAD_COUNT = 1 << 26
_CLUSTER = LadderKernel(f"{FOLDER}/small_cluster.cu", "small_cluster", ("pointer",))

SHARED_KIB = (0, 24, 32, 48, 64, 100, 200)
CARVE_OUTS = (100, 75, 50, 25)
_CARVED_KIB = 16
CLUSTERS = (1, 2, 4, 8, 16)
_CLUSTER_KIB = 100
_WAVES = 2


def mix_contender(blocks: int) -> Contender:
    """48 values a thread that mix with their neighbours, at least ``blocks`` blocks asked for."""
    kernel = _MIXES[blocks]

    def run(buffers: Buffers) -> None:
        (x,), (out,) = buffers.inputs, buffers.outputs
        count = out.numel()
        grid = (-(-count // THREADS), 1, 1)
        kernel.launch(grid, (THREADS, 1, 1), (x, out, _MIX_ROUNDS, count))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return within(results[0], mix_reference(buffers.inputs[0]), 1e-3)

    return Contender(f"at least {blocks}", run, check)


def mix_reference(x: Tensor) -> Tensor:
    """Sums after the rounds, in float64."""
    values = list(x.double())
    for _ in range(_MIX_ROUNDS):
        for j in range(VALUES):
            values[j] = 0.5 * (values[j] + values[(j + 1) % VALUES])
    return torch.stack(values).sum(0)


def make_mix(count: int, generator: torch.Generator) -> Buffers:
    """x of (48, count), out of ``count`` float32."""
    x = torch.empty(VALUES, count, device=generator.device).normal_(generator=generator)
    return Buffers((x,), (torch.empty(count, device=x.device),))


def _launch_bounds(bench: Bench) -> Iterator[FigureRow]:
    contenders = {blocks: mix_contender(blocks) for blocks in LEAST_BLOCKS}
    outcomes = bench.time(list(contenders.values()), functools.partial(make_mix, _MIX_COUNT))
    for blocks, contender in contenders.items():
        kernel = _MIXES[blocks].loaded(bench.device)
        found = blocks_per_sm(kernel, bench.device, THREADS, 0)
        values = {
            "registers": registers(kernel, bench.device),
            "spilled bytes": local_bytes(kernel, bench.device),
            "blocks an SM": found,
            "warps of the most": found * _WARPS / warps_per_sm(bench.device),
        }
        yield outcome_row(
            "256 threads",
            contender.name,
            blocks,
            outcomes[contender.name],
            lambda us, values=values: {**values, "us": us},  # type: ignore[misc]
        )


def one_load_contender(shared_kib: int, blocks: int) -> Contender:
    """Sums with one load under way a thread, in a grid of ``blocks``."""

    def run(buffers: Buffers) -> Tensor:
        (x,), (out,) = buffers.inputs, buffers.outputs
        values = (x, out, x.numel())
        loaded = _ONE_LOAD.loaded(x.device)
        loaded.launch((blocks, 1, 1), (THREADS, 1, 1), values, shared_bytes=shared_kib << 10)
        return out[: blocks * THREADS]

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return within(results[0], strided_sums(buffers.inputs[0], results[0].numel()), 1e-2)

    return Contender(f"{shared_kib} KiB", run, check)


def strided_sums(x: Tensor, threads: int) -> Tensor:
    """Sum of each thread's elements, ``threads`` apart, in float64."""
    whole = x.numel() // threads * threads
    sums = x[:whole].view(-1, threads).double().sum(0)
    sums[: x.numel() - whole] += x[whole:].double()
    return sums


def make_one_load(count: int, threads: int, generator: torch.Generator) -> Buffers:
    """x of ``count`` and out of ``threads`` float32."""
    x = torch.empty(count, device=generator.device).normal_(generator=generator)
    return Buffers((x,), (torch.empty(threads, device=x.device),))


def _one_load(bench: Bench, shared_kib: int) -> tuple[int, Outcome]:
    """Blocks a multiprocessor by the query, and the time of a grid of exactly as many."""
    kernel = _ONE_LOAD.loaded(bench.device)
    found = blocks_per_sm(kernel, bench.device, THREADS, shared_kib << 10)
    grid = found * bench.sms
    make = functools.partial(make_one_load, _ONE_LOAD_COUNT, grid * THREADS)
    (outcome,) = bench.time([one_load_contender(shared_kib, grid)], make).values()
    return found, outcome


def _one_load_values(found: int, device: torch.device, us: float) -> dict[str, float]:
    return {
        "blocks an SM": found,
        "warps of the most": found * _WARPS / warps_per_sm(device),
        "us": us,
        "TB/s": 4 * _ONE_LOAD_COUNT / us / 1e6,
    }


def _shared_memory(bench: Bench) -> Iterator[FigureRow]:
    for kib in SHARED_KIB:
        series, x = "one load a thread", f"{kib} KiB a block"
        try:
            found, outcome = _one_load(bench, kib)
        except LaunchError as error:  # smaller GPUs have no room for the largest blocks
            yield FigureRow(series, x, kib, absent=str(error))
            continue
        values = functools.partial(_one_load_values, found, bench.device)
        yield outcome_row(series, x, kib, outcome, values)


def _carve_outs(bench: Bench) -> Iterator[FigureRow]:
    kernel = _ONE_LOAD.loaded(bench.device)
    for percent in CARVE_OUTS:
        with carve_out(kernel, bench.device, percent):
            found, outcome = _one_load(bench, _CARVED_KIB)
        values = functools.partial(_one_load_values, found, bench.device)
        yield outcome_row(f"{_CARVED_KIB} KiB a block", f"{percent} %", percent, outcome, values)


def cluster_contender(blocks: int, grid: int) -> Contender:
    """Every block reads the number of the next one of its cluster."""

    def run(buffers: Buffers) -> None:
        (out,) = buffers.outputs
        _CLUSTER.loaded(out.device).launch(
            (grid, 1, 1),
            (THREADS, 1, 1),
            (out,),
            shared_bytes=_CLUSTER_KIB << 10,
            cluster=(blocks, 1, 1),
        )

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        index = torch.arange(grid, dtype=torch.int32, device=results[0].device)
        return bitwise(results[0], index // blocks * blocks + (index + 1) % blocks)

    return Contender(str(blocks), run, check)


def _clusters(bench: Bench) -> Iterator[FigureRow]:
    for blocks in CLUSTERS:
        x = f"{blocks} blocks"
        if torch.cuda.get_device_capability(bench.device) < (9, 0):
            yield FigureRow("clusters", x, blocks, absent="needs compute capability 9.0")
            continue
        try:
            found = clusters_at_once(
                _CLUSTER.loaded(bench.device), bench.device, THREADS, _CLUSTER_KIB << 10, blocks
            )
        except LaunchError as error:
            yield FigureRow("clusters", x, blocks, absent=str(error))
            continue
        if not found:
            yield FigureRow("clusters", x, blocks, absent="no cluster of that size fits this GPU")
            continue
        grid = blocks * (_WAVES * bench.sms // blocks)
        outputs = Buffers((), (torch.empty(grid, dtype=torch.int32, device=bench.device),))
        contender = cluster_contender(blocks, grid)
        # Hot, because next to nothing is moved: there are no buffers worth rotating.
        (outcome,) = bench.time([contender], lambda _, made=outputs: made, hot=True).values()  # type: ignore[misc]
        values = {
            "clusters at once": found,
            "blocks at once": found * blocks,
            "blocks an SM": found * blocks / bench.sms,
        }
        yield outcome_row(
            "not portable" if blocks > 8 else "portable",
            x,
            blocks,
            outcome,
            lambda us, values=values: {**values, "us": us},  # type: ignore[misc]
        )


def occupancy(id: str, title: str) -> Figure:
    """Warps a multiprocessor against registers, shared memory, carve-out and clusters."""
    panels = (
        Panel(
            "Registers: __launch_bounds__(256, blocks)",
            "blocks asked for",
            ("registers", "spilled bytes", "blocks an SM", "warps of the most", "us"),
            ("us",),
            _launch_bounds,
            f"{VALUES} values alive in each thread, {_MIX_ROUNDS} rounds.",
        ),
        Panel(
            "Shared memory and the rate of one load a thread",
            "shared memory, KiB a block",
            ("blocks an SM", "warps of the most", "us", "TB/s"),
            ("TB/s",),
            _shared_memory,
            "The grid is what fits at once, so the warps alone set how many bytes are under way.",
        ),
        Panel(
            "Carve-out",
            "preferred shared memory, % of the most",
            ("blocks an SM", "warps of the most", "us", "TB/s"),
            ("TB/s",),
            _carve_outs,
            "The carve-out is a wish: the driver takes the next split that holds at least a block.",
        ),
        Panel(
            "Clusters",
            "blocks a cluster",
            ("clusters at once", "blocks at once", "blocks an SM", "us"),
            ("blocks at once",),
            _clusters,
            f"{_CLUSTER_KIB} KiB a block, so two blocks a multiprocessor; the query is "
            "cuOccupancyMaxActiveClusters. More than 8 blocks need the attribute for sizes that "
            "are not portable.",
        ),
    )
    kernels = (*_MIXES.values(), _ONE_LOAD, _CLUSTER)
    return Figure(id, title, lesson_of(_FILE), panels, kernels)
