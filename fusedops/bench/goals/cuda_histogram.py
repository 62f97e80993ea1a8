"""Histograms against torch and CUB: uniform values, and how much slower any skew is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_lookup import expert_outcomes
from fusedops.bench.goals.cuda_rows import (
    COVERS,
    MINE,
    best_peer,
    measured,
    reading,
    rows_beside,
)
from fusedops.bench.measurement import Outcome, speedup
from fusedops.bench.oracles import bitwise
from fusedops.bench.peers import Available, _Stream, compiled_peers, peer_status
from fusedops.ops.histogram import bincount

__all__ = ["SKEWS", "histogram_outcomes", "skew_outcomes"]

_COVERS = (*COVERS, "csrc/histogram.cu", "csrc/experts.cu")
_ELEMENTS = {torch.uint8: 1 << 28, torch.int32: 1 << 26, torch.int64: 1 << 25}
"""Elements by dtype: 268 MB each."""

EXPERTS = 128
EXPERT_IDS = (64 * 8, 4096 * 8)
"""Ids of a decode step and of a prefill, eight a token."""

_TWO_VALUES = 2
_BANKS = 32
_STEEPNESS = 4


def _uniform(generator: torch.Generator, count: int, bins: int) -> Tensor:
    options = {"generator": generator, "device": generator.device, "dtype": torch.int32}
    return torch.randint(0, bins, (count,), **options)  # type: ignore[call-overload, no-any-return]


SKEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "one value": lambda x, bins: torch.full_like(x, bins // 3),
    "two values": lambda x, bins: x % _TWO_VALUES,
    "one bank": lambda x, bins: x // _BANKS * _BANKS,
    "steep": lambda x, bins: (bins * (x.float() / bins) ** _STEEPNESS).to(x.dtype),
}
"""What is made of uniform values in [0, bins), by name: other skews of the same range."""


def _check(results: tuple[Tensor, ...], x: Tensor, bins: int) -> str | None:
    expected = torch.zeros(bins, dtype=torch.int64, device=x.device)
    for part in x.split(1 << 26):
        expected += torch.bincount(part.int(), minlength=bins)
    return bitwise(results[0].to(torch.int64), expected)


def cub_contender(bins: int, check: Callable[..., str | None]) -> Contender:
    """CUB's even histogram, with its temporary storage allocated before it is timed."""
    import numpy as np

    compute = importlib.import_module("cuda.compute")

    def prepare(buffers: Buffers) -> tuple[Any, Any, tuple[Any, ...], Tensor]:
        (x,) = buffers.inputs
        counts = torch.empty(bins, dtype=torch.int32, device=x.device)
        levels = [np.array([number], dtype=np.int32) for number in (bins + 1, 0, bins)]
        call = (x, counts, *levels, x.numel())
        histogram = compute.make_histogram_even(*call)
        size = histogram(None, *call, _Stream())
        storage = torch.empty(max(int(size), 1), dtype=torch.uint8, device=x.device)
        return histogram, storage, call, counts

    def run(state: tuple[Any, Any, tuple[Any, ...], Tensor]) -> Tensor:
        histogram, storage, call, counts = state
        histogram(storage, *call, _Stream())
        return counts

    return Contender("cub", run, check, prepare=prepare)


def histogram_outcomes(
    run: GoalRun, dtype: torch.dtype, bins: int, count: int
) -> dict[str, Outcome]:
    """Uniform values counted by us, by torch in two ways, and by CUB where it is here."""

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((_uniform(generator, count, bins).to(dtype),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return _check(results, buffers.inputs[0], bins)

    def on_input(name: str, function: Callable[[Tensor], Tensor]) -> Contender:
        return Contender(name, lambda buffers: function(buffers.inputs[0]), check)

    def scattered(x: Tensor) -> Tensor:
        one = torch.ones((), dtype=torch.int32, device=x.device)
        counts = torch.zeros(bins, dtype=torch.int32, device=x.device)
        return counts.scatter_add_(0, x.long(), one.expand(x.shape))

    found = [
        on_input(MINE, lambda x: bincount(x, bins)),
        on_input("torch.bincount", lambda x: torch.bincount(x, minlength=bins)),
        on_input("torch.scatter_add", scattered),
        # The length of a bincount depends on its data, which torch.compile refuses.
        *compiled_peers(scattered, check),
    ]
    if isinstance(peer_status(["cub"])["cub"], Available):
        found.append(cub_contender(bins, check))
    name = str(dtype).removeprefix("torch.")
    return measured(run, f"{count} {name} into {bins}", found, make)


@goal("cuda.hist.int32", provider="cuda", covers=_COVERS)
def int32(run: GoalRun) -> Reading:
    """The slower of 256 and 4096 bins; the note holds both. Beside: 65,536 bins, and experts."""
    dtype = torch.int32
    found = {
        bins: reading(run, histogram_outcomes(run, dtype, bins, _ELEMENTS[dtype]))
        for bins in (256, 4096)
    }
    slower = max(found.values(), key=lambda each: each.value)
    note = ", ".join(f"{bins} bins {each.value:.1f} us" for bins, each in found.items())
    beside: dict[str, Callable[[], dict[str, Outcome]]] = {
        "65536 bins": lambda: histogram_outcomes(run, dtype, 65536, _ELEMENTS[dtype]),
        **{
            f"experts of {ids} ids": partial(expert_outcomes, run, ids, EXPERTS)
            for ids in EXPERT_IDS
        },
    }
    note = f"{note}; {rows_beside(beside)}"
    return Reading(slower.value, slower.low, slower.high, peer=slower.peer, note=note)


@goal("cuda.hist.uint8", provider="cuda", covers=_COVERS)
def uint8(run: GoalRun) -> Reading:
    """All values of a byte, each as often."""
    dtype = torch.uint8
    rows = histogram_outcomes(run, dtype, 256, _ELEMENTS[dtype])
    return Reading.of(run.mine(rows, MINE), run.goal.unit, peer=best_peer(rows))


def skew_outcomes(run: GoalRun, dtype: torch.dtype, bins: int, count: int) -> dict[str, Outcome]:
    """Our counts of uniform values and of each skew, alternated; all of one set of buffers."""
    names = ("uniform", *SKEWS)

    def make(generator: torch.Generator) -> Buffers:
        uniform = _uniform(generator, count, bins)
        skewed = [skew(uniform, bins).to(dtype) for skew in SKEWS.values()]
        # One value everywhere would be refused as data; here it is what is asked about.
        return Buffers((), indices=(uniform.to(dtype), *skewed))

    def contender(place: int) -> Contender:
        return Contender(
            f"{MINE} {names[place]}",
            lambda buffers: bincount(buffers.indices[place], bins),
            lambda results, buffers: _check(results, buffers.indices[place], bins),
        )

    key = f"skew of {str(dtype).removeprefix('torch.')} into {bins}"
    return run.measure(key, [contender(place) for place in range(len(names))], make)


@goal("cuda.hist.skew", provider="cuda", covers=_COVERS)
def skew(run: GoalRun) -> Reading:
    """The worst time of a skew over that of uniform values, of every dtype."""
    ratios = {}
    for dtype, bins in (
        (torch.uint8, 256),
        (torch.int32, 256),
        (torch.int32, 4096),
        (torch.int64, 4096),
    ):
        rows = skew_outcomes(run, dtype, bins, _ELEMENTS[dtype])
        uniform = run.mine(rows, f"{MINE} uniform")
        for name in SKEWS:
            key = f"{str(dtype).removeprefix('torch.')} {bins} {name}"
            ratios[key] = speedup(uniform, run.mine(rows, f"{MINE} {name}"))
    worst = max(ratios, key=lambda key: ratios[key].median)
    note = ", ".join(f"{key} {ratio.median:.2f}" for key, ratio in ratios.items())
    ratio = ratios[worst]
    return Reading(ratio.median, ratio.low, ratio.high, note=f"worst {worst}; {note}")
