"""Figures of the host's side: copies, clocks, and what N launches cost."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Measurement
from fusedops.bench.oracles import bitwise
from fusedops.errors import LaunchError
from fusedops.ladders.figures import Bench, Figure, FigureRow, Panel
from fusedops.ladders.model import FOLDER, LadderKernel, Lesson, lesson_of

__all__ = ["CHAIN", "chain_reference", "clocks", "copies", "launches"]

_SPIN_FILE = f"{FOLDER}/small_spin.cu"
SPIN = LadderKernel(_SPIN_FILE, "small_spin", ("pointer", "int64"))
_CHAIN_FILE = f"{FOLDER}/small_chain.cu"
CHAIN = LadderKernel(_CHAIN_FILE, "small_chain", ("pointer", "int32", "int32"))
THREADS = 256


def spin_of(out: Tensor, cycles: int) -> Callable[[], None]:
    """A launch that spins, and writes how long it did; looking up its kernel is not part of it."""
    kernel, grid, block = SPIN.loaded(out.device), (1, 1, 1), (32, 1, 1)
    return lambda: kernel.launch(grid, block, (out, cycles))


def host_us(call: Callable[[], object], wait: bool, samples: int) -> float:
    """Median of a call by the host's clock in us, which does or does not wait for the GPU."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if wait:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def event_us(call: Callable[[], object], samples: int) -> float:
    """Median of what lies between two events around a call, in us."""
    times: list[float] = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) * 1e3)
    return statistics.median(times)


# Copies

COPY_BYTES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 27)
_COPY_SAMPLES = 7
_OVERLAP_BYTES = 1 << 26
_OVERLAP_CYCLES = 2_000_000


def copy_pair(direction: str, kind: str, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Source, of random bytes, and destination of a copy."""
    generator = torch.Generator(device).manual_seed(size)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    there.random_(0, 256, generator=generator)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
    if direction == "from GPU":
        return there, here.zero_()
    here.copy_(there)
    return here, there.zero_()


def _rates(bench: Bench) -> Iterator[FigureRow]:
    for direction in ("to GPU", "from GPU"):
        for kind in ("pinned", "pageable"):
            for size in COPY_BYTES:
                source, target = copy_pair(direction, kind, size, bench.device)
                copy = functools.partial(target.copy_, source, non_blocking=True)
                copy()
                us = host_us(copy, True, _COPY_SAMPLES)
                series, x = f"{direction}, {kind}", f"{size:,}"
                if not torch.equal(target.cpu(), source.cpu()):
                    yield FigureRow(series, x, size, failed="the copy differs from its source")
                    continue
                yield FigureRow(series, x, size, {"us": us, "GB/s": size / us / 1e3})


def overlap_ways(
    copy: Callable[[], object], spin: Callable[[], object], side: torch.cuda.Stream
) -> dict[str, Callable[[], object]]:
    """Ways to do a copy and a kernel, the copy first."""

    def one_stream() -> None:
        copy()
        spin()

    def two_streams() -> None:
        with torch.cuda.stream(side):
            copy()
        spin()

    return {
        "copy alone": copy,
        "kernel alone": spin,
        "one stream": one_stream,
        "two streams": two_streams,
    }


def _overlaps(bench: Bench) -> Iterator[FigureRow]:
    out = torch.zeros(1, dtype=torch.int64, device=bench.device)
    spin = spin_of(out, _OVERLAP_CYCLES)
    side = torch.cuda.Stream(bench.device)
    for kind in ("pinned", "pageable"):
        source, target = copy_pair("to GPU", kind, _OVERLAP_BYTES, bench.device)
        copy = functools.partial(target.copy_, source, non_blocking=True)
        for way, call in overlap_ways(copy, spin, side).items():
            call()
            values = {
                "us": host_us(call, True, _COPY_SAMPLES),
                "host us": host_us(call, False, _COPY_SAMPLES),
            }
            yield FigureRow(kind, way, None, values)
        if not torch.equal(target.cpu(), source):
            yield FigureRow(kind, "check", None, failed="the copy differs from its source")


def copies(id: str, title: str) -> Figure:
    """Rates of copies between host and GPU, and what overlaps."""
    lesson = Lesson(
        "Copies from pinned memory are read by the GPU itself; those from pageable memory go "
        "through a pinned buffer of the driver, which the host fills.",
        "latency. The link is the roof for large copies and the call for small ones; a pageable "
        "copy keeps the host until it is done, so that nothing launched behind it can overlap.",
        "Pin what is copied often, give copies a stream of their own, and send few large ones.",
    )
    panels = (
        Panel(
            "Rate against size",
            "bytes",
            ("us", "GB/s"),
            ("GB/s",),
            _rates,
            "One copy at a time, by a host clock that waits: the call is part of the time.",
            log_y=True,
        ),
        Panel(
            "Overlap with a kernel",
            "way",
            ("us", "host us"),
            ("us",),
            _overlaps,
            f"A copy of {_OVERLAP_BYTES >> 20} MiB to the GPU, then a kernel that only spins. Host "
            "us is how long the calls keep the host.",
        ),
    )
    return Figure(id, title, lesson, panels, files=(_SPIN_FILE,))


# Clocks

CYCLES = (2_000, 20_000, 200_000, 2_000_000)
_CLOCK_SAMPLES = 15
_MANY_CYCLES = 20_000_000
"""Launches inside of one pair of events add up to at most so many."""


def _spin_contender(cycles: int) -> Contender:
    def check(results: tuple[Tensor, ...], _buffers: Buffers) -> str | None:
        spun = int(results[0])
        return None if cycles <= spun < 1 << 40 else f"{spun} cycles instead of {cycles}"

    return Contender("graph", lambda buffers: spin_of(buffers.outputs[0], cycles)(), check)


def _clock_rows(bench: Bench) -> Iterator[FigureRow]:
    out = torch.zeros(1, dtype=torch.int64, device=bench.device)
    buffers = Buffers((), (out,))
    for cycles in CYCLES:
        x = f"{cycles:,}"
        (outcome,) = bench.time([_spin_contender(cycles)], lambda _: buffers, hot=True).values()
        if not isinstance(outcome, Measurement):
            yield FigureRow("graph of many", x, cycles, failed=outcome.reason)
            continue
        truth_us = outcome.median_us
        many = max(2, min(100, _MANY_CYCLES // cycles))
        call = spin_of(out, cycles)

        def repeat(call: Callable[[], object] = call, many: int = many) -> None:
            for _ in range(many):
                call()

        found = {
            "graph of many": truth_us,
            "host, not waiting": host_us(call, False, _CLOCK_SAMPLES),
            "host, waiting": host_us(call, True, _CLOCK_SAMPLES),
            "events around one": event_us(call, _CLOCK_SAMPLES),
            "events around many": event_us(repeat, _CLOCK_SAMPLES // 3) / many,
        }
        for series, us in found.items():
            values = {"us": us, "error us": us - truth_us, "error %": 100 * (us / truth_us - 1)}
            yield FigureRow(series, x, cycles, values)


def clocks(id: str, title: str) -> Figure:
    """One kernel's time by host clocks and by events, against a graph of many launches."""
    panel = Panel(
        "What each clock says of one kernel",
        "length of the kernel, cycles",
        ("us", "error us", "error %"),
        ("us",),
        _clock_rows,
        "The error is against events around a graph of many launches, over their number.",
        log_y=True,
    )
    return Figure(id, title, lesson_of(_SPIN_FILE), (panel,), (SPIN,))


# Launches

NUMBERS = (1, 4, 16, 64, 256)
_ELEMENTS = 8192
_LAUNCH_SAMPLES = 11


def chain_reference(x: Tensor, steps: int) -> Tensor:
    """``x = x / 2 + 1``, ``steps`` times; a half is exact, so that rounding is the kernel's."""
    for _ in range(steps):
        x = 0.5 * x + 1
    return x


def _in_turn(x: Tensor, launches: int, rounds: int, pdl: bool) -> Callable[[], None]:
    count = x.numel()
    grid, block = (-(-count // THREADS), 1, 1), (THREADS, 1, 1)
    kernel = CHAIN.loaded(x.device)

    def call() -> None:
        for _ in range(launches):
            kernel.launch(grid, block, (x, rounds, count), pdl=pdl)

    return call


def _torch_in_turn(x: Tensor, one: Tensor, steps: int) -> None:
    for _ in range(steps):
        torch.add(one, x, alpha=0.5, out=x)


def graph_of(call: Callable[[], None]) -> Callable[[], None]:
    """A graph of a call that has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def launch_ways(x: Tensor, steps: int) -> dict[str, Callable[[], None]]:
    """Ways to do ``steps`` steps on x in place."""
    one = torch.ones((), device=x.device)
    plain = _in_turn(x, steps, 1, False)
    dependent = _in_turn(x, steps, 1, True)
    for call in (plain, dependent):
        call()
    return {
        "torch, eager": functools.partial(_torch_in_turn, x, one, steps),
        "eager": plain,
        "eager, dependent": dependent,
        "graph": graph_of(plain),
        "graph, dependent": graph_of(dependent),
        "one kernel": _in_turn(x, 1, steps, False),
    }


def check_way(call: Callable[[], None], x: Tensor, steps: int) -> None:
    """Run a way on random data.

    Raises:
        LaunchError: its result is not that of the steps.
    """
    x.normal_()
    expected = chain_reference(x.clone(), steps)
    call()
    found = bitwise(x, expected)
    if found is not None:
        raise LaunchError(f"{steps} launches: {found}")


def _launch_rows(bench: Bench) -> Iterator[FigureRow]:
    for steps in NUMBERS:
        x = torch.empty(_ELEMENTS, device=bench.device).normal_()
        for series, call in launch_ways(x, steps).items():
            try:
                check_way(call, x, steps)
            except LaunchError as error:
                yield FigureRow(series, str(steps), steps, failed=str(error))
                continue
            us = event_us(call, _LAUNCH_SAMPLES)
            yield FigureRow(series, str(steps), steps, {"us": us, "us a step": us / steps})


def launches(id: str, title: str) -> Figure:
    """Time of N dependent small kernels, launched in six ways."""
    panel = Panel(
        "Time against N",
        "N, steps",
        ("us", "us a step"),
        ("us",),
        _launch_rows,
        f"Each step halves and adds one on {_ELEMENTS:,} float32. Events around all of them: "
        "where the host is slower than the GPU, its time is what they see.",
        log_y=True,
    )
    return Figure(id, title, lesson_of(_CHAIN_FILE), (panel,), (CHAIN,))
