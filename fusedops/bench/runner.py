"""How a program of launches is repeated and timed: CUDA graphs on a GPU, a host clock on the CPU.

A timed window is one replay of one program. On a GPU everything of a round is enqueued before the
first synchronisation, and each window is preceded by untimed work on the same stream. That work
keeps the GPU busy while the host launches the graph, so a window never holds host time, and it is
what sets the cache's state: a read of 4 x L2 for cold windows (a read, because written lines would
be flushed to memory inside the window), an untimed replay for hot ones.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fusedops.bench.data import ROTATION_FACTOR, l2_bytes
from fusedops.errors import DeviceError

__all__ = ["CpuRunner", "GraphRunner", "Replay", "Runner", "make_runner"]

Replay = Callable[[], None]
"""Runs one captured program again on the current stream."""


class Runner(Protocol):
    """What the timer needs from a device; tests bring one with a scripted clock."""

    mode: str
    """How a window is timed, for the tables."""

    cache_bytes: int
    """Bytes of the largest cache that rotation must exceed; 0 where nothing is rotated."""

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Record a program once, so that it can be replayed."""

    def time_round(self, replays: Sequence[Replay], *, hot: bool) -> list[float]:
        """Microseconds of one window of each program, in the order given."""

    def empty_window_us(self) -> float:
        """Microseconds of a window with nothing in it."""

    def synchronize(self) -> None:
        """Wait until everything enqueued has run."""


class GraphRunner:
    """Times CUDA-graph replays with device events on a stream of its own."""

    mode = "cuda graph"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "GraphRunner: torch sees no CUDA device; measure on a GPU, or pass device='cpu' "
                "for host timings."
            )
        self._device = torch.device(device)
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self.cache_bytes = l2_bytes(self._device)
        count = ROTATION_FACTOR * self.cache_bytes // 4 // 1024 * 1024
        generator = torch.Generator(self._device).manual_seed(0)
        self._flush_source = torch.randn(count, device=self._device, generator=generator)
        self._flush_source = self._flush_source.view(-1, 1024)
        self._flush_sink = torch.empty(self._flush_source.shape[0], device=self._device)
        self._empty: Replay | None = None

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Capture ``enqueue`` into a graph; its launches must have run once before."""
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would also collect garbage and empty torch's cache at every capture.
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            warnings.catch_warnings(),
        ):
            # The empty program, whose time is a figure of its own, is captured on purpose.
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            graph.capture_begin()
            try:
                enqueue()
                graph.capture_end()
            except BaseException:
                self._recover(graph)
                raise
        self.synchronize()
        return graph.replay

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave a capture that failed, so that later contenders find a clean device."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        self._stream = torch.cuda.Stream(self._device)
        # An abandoned capture leaves torch's generator waiting for its end.
        generator = torch.cuda.default_generators[self._device.index]
        generator.graphsafe_set_state(generator.clone_state())

    def _flush(self) -> None:
        torch.sum(self._flush_source, dim=1, out=self._flush_sink)

    def time_round(self, replays: Sequence[Replay], *, hot: bool) -> list[float]:
        """One window of each program; see the module's text for what precedes a window."""
        pairs = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for replay in replays:
                if hot:
                    replay()
                else:
                    self._flush()
                start = torch.cuda.Event(enable_timing=True)
                stop = torch.cuda.Event(enable_timing=True)
                start.record()
                replay()
                stop.record()
                pairs.append((start, stop))
        self._stream.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]

    def empty_window_us(self) -> float:
        """Median of 15 windows that hold an empty graph: what a window costs by itself."""
        if self._empty is None:
            self._empty = self.capture(lambda: None)
        times = sorted(self.time_round([self._empty] * 15, hot=False))
        return times[len(times) // 2]

    def synchronize(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self._device)


class CpuRunner:
    """Times calls with the host's monotonic clock; caches stay as they are, so rows are hot."""

    mode = "cpu"
    cache_bytes = 0

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Nothing is recorded: the program itself is called again."""
        return enqueue

    def time_round(self, replays: Sequence[Replay], *, hot: bool) -> list[float]:
        """One window of each program."""
        times = []
        for replay in replays:
            start = self._clock()
            replay()
            times.append((self._clock() - start) * 1e6)
        return times

    def empty_window_us(self) -> float:
        """Two readings of the clock cost well under a microsecond: counted as nothing."""
        return 0.0

    def synchronize(self) -> None:
        """Calls are synchronous."""


def make_runner(device: torch.device | str) -> Runner:
    """The runner of a device.

    Raises:
        DeviceError: the device is neither a CUDA device that torch sees nor the CPU.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return GraphRunner(device)
    if kind == "cpu":
        return CpuRunner()
    raise DeviceError(f"make_runner: device is {device}; accepted are cuda and cpu.")
