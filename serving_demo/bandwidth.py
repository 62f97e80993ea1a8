"""The read bandwidth of this machine, measured: the roof of a decode step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ReadBandwidth", "measure_read_bandwidth"]

_GIB = 1 << 30
_BUFFER_BYTES = {"cpu": 1 * _GIB, "cuda": 4 * _GIB}
"""Well beyond the caches: 300 MB of L3 is the largest a CPU had here, 60 MB of L2 an H200 has."""

_COLUMNS = 4096
_PASSES = 5


@dataclass(frozen=True)
class ReadBandwidth:
    """Attributes: ``gb_per_s`` (10^9 bytes a second) and ``how`` it was measured."""

    gb_per_s: float
    how: str


def measure_read_bandwidth(device: torch.device) -> ReadBandwidth:
    """Stream a buffer of float32 through two reductions and take the fastest pass of both.

    ``torch.sum`` is the plain reduction; ``torch.mv`` (the dot product of each row with a vector
    that stays in the cache) reads faster on a CPU, where a sum waits for its own additions. On the
    CPU all of torch's threads take part.
    """
    n_bytes = _BUFFER_BYTES[device.type]
    rows = torch.ones(n_bytes // 4 // _COLUMNS, _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    readers: dict[str, Callable[[], Tensor]] = {
        "torch.sum": rows.sum,
        "torch.mv": lambda: torch.mv(rows, vector),
    }
    with torch.inference_mode():
        best = {name: _fastest_seconds(read, device) for name, read in readers.items()}
    fastest = min(best, key=lambda name: best[name])
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else "one kernel"
    how = f"fastest of {_PASSES} passes of {fastest} over {n_bytes // _GIB} GiB, {where}"
    return ReadBandwidth(n_bytes / best[fastest] / 1e9, how)


def _fastest_seconds(read: Callable[[], Tensor], device: torch.device) -> float:
    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    read()
    seconds: list[float] = []
    for _ in range(_PASSES):
        finish()
        started = time.perf_counter()
        read()
        finish()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
