"""Figure of attention: elements moved by materialised scores and by the online softmax, counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.oracles import within
from fusedops.ladders.figures import Bench, Figure, FigureRow, Panel, outcome_row
from fusedops.ladders.model import FOLDER, LadderKernel, lesson_of

__all__ = [
    "attention",
    "hidden_constant",
    "materialised_terms",
    "on_chip_elements",
    "online_terms",
]

DIM = 64
KEYS = 32
HEADS = 4
ROWS = (16, 32, 64, 128)
LENGTHS = (256, 512, 1024, 2048, 4096)
_PITCH = DIM + 1
_THREADS = 256
_LENGTH = 2048
_SERIES = ("materialised", "online, 16 rows", "online, 128 rows")
_WRITTEN = 64
"""Rows a block of the kernels that materialise."""

_FILE = f"{FOLDER}/small_attention.cu"
_PTR, _INT = "pointer", "int32"
_ONLINE = {
    rows: LadderKernel(
        _FILE, f"small_attention_online<{rows}>", (_PTR, _PTR, _PTR, _PTR, _PTR, "float32", _INT)
    )
    for rows in ROWS
}
_SCORES = LadderKernel(
    _FILE, f"small_attention_scores<{_WRITTEN}>", (_PTR, _PTR, _PTR, _PTR, "float32", _INT)
)
_SOFTMAX = LadderKernel(_FILE, "small_attention_softmax", (_PTR, _PTR, _INT))
_VALUES = LadderKernel(_FILE, f"small_attention_values<{_WRITTEN}>", (_PTR, _PTR, _PTR, _PTR, _INT))


def materialised_terms(length: int) -> float:
    """N d + N^2 of one head: what O(N d + N^2) bounds."""
    return float(length * DIM + length * length)


def online_terms(length: int, rows: int) -> float:
    """N^2 d^2 / M of one head, M being ``on_chip_elements``."""
    return length * length * DIM * DIM / on_chip_elements(rows)


def on_chip_elements(rows: int) -> int:
    """Float32 that a block of the online form holds: rows, a tile of keys or values, results."""
    return (rows + KEYS) * _PITCH + rows * DIM


def hidden_constant(name: str) -> float:
    """What counted elements over the formula tend to as N grows, for a name of ``RUNS``.

    Materialised, each score is written, read and written by the softmax, and read again, and each
    block of rows reads keys, and another values; online, each block of rows reads both.
    """
    if name == "materialised":
        return 4 + 2 * DIM / _WRITTEN
    rows = _rows_of(name)
    return 2 * on_chip_elements(rows) / (rows * DIM)


def _scale() -> float:
    return 1 / math.sqrt(DIM)


def _online(rows: int, buffers: Buffers) -> None:
    (q, k, v), (out,), (moved, *_) = buffers.inputs, buffers.outputs, buffers.indices
    heads, length, _ = q.shape
    _ONLINE[rows].launch(
        (length // rows, heads, 1),
        (_THREADS, 1, 1),
        (q, k, v, out, moved, _scale(), length),
        shared_bytes=4 * (rows + KEYS) * _PITCH,
    )


def _materialised(buffers: Buffers) -> None:
    (q, k, v), (out,), (moved, scores) = buffers.inputs, buffers.outputs, buffers.indices
    heads, length, _ = q.shape
    grid, block = (length // _WRITTEN, heads, 1), (_THREADS, 1, 1)
    tile_bytes = 4 * KEYS * _PITCH
    _SCORES.launch(
        grid,
        block,
        (q, k, scores, moved, _scale(), length),
        shared_bytes=tile_bytes + 4 * _WRITTEN * _PITCH,
    )
    _SOFTMAX.launch((heads * length, 1, 1), block, (scores, moved, length), shared_bytes=4 * length)
    _VALUES.launch(grid, block, (scores, v, out, moved, length), shared_bytes=tile_bytes)


def check_attention(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
    """Against softmax(q k^T / sqrt(d)) v in float64, a head at a time."""
    q, k, v = (tensor.double() for tensor in buffers.inputs)
    heads = [
        torch.softmax(q[head] @ k[head].t() * _scale(), -1) @ v[head] for head in range(len(q))
    ]
    return within(results[0], torch.stack(heads), 1e-4)


RUNS: dict[str, Callable[[Buffers], None]] = {
    "materialised": _materialised,
    **{f"online, {rows} rows": functools.partial(_online, rows) for rows in ROWS},
}


def make_attention(length: int, generator: torch.Generator) -> Buffers:
    """q, k, v and out of (heads, length, 64) float32, the counter, and room for the scores."""
    shape = (HEADS, length, DIM)
    inputs = [torch.empty(shape, device=generator.device) for _ in range(3)]
    for tensor in inputs:
        tensor.normal_(generator=generator)
    moved = torch.zeros(1, dtype=torch.int64, device=generator.device)
    scores = torch.empty(HEADS, length, length, device=generator.device)
    return Buffers(tuple(inputs), (torch.empty_like(inputs[0]),), (moved, scores))


def counted_elements(name: str, buffers: Buffers) -> int:
    """Elements that one run moves to and from global memory, counted by its threads."""
    moved = buffers.indices[0]
    moved.zero_()
    RUNS[name](buffers)
    return int(moved)


def _rows_of(name: str) -> int:
    return int(name.removeprefix("online, ").removesuffix(" rows"))


def _values(name: str, buffers: Buffers, formula: float, us: float) -> dict[str, float]:
    counted = counted_elements(name, buffers)
    return {
        "us": us,
        "counted MB": 4 * counted / 1e6,
        "formula MB": 4 * formula / 1e6,
        "counted / formula": counted / formula,
        "its limit": hidden_constant(name),
    }


def _measured(
    bench: Bench, length: int, series: dict[str, str], x: str, at: float
) -> Iterator[FigureRow]:
    """A row for each of ``series``: its name in the panel -> its name in ``RUNS``."""
    contenders = [Contender(name, RUNS[run], check_attention) for name, run in series.items()]
    outcomes = bench.time(contenders, functools.partial(make_attention, length))
    buffers = make_attention(length, bench.generator())
    for name, outcome in outcomes.items():
        run = series[name]
        is_online = run.startswith("online")
        terms = online_terms(length, _rows_of(run)) if is_online else materialised_terms(length)
        values = functools.partial(_values, run, buffers, HEADS * terms)
        yield outcome_row(name, x, at, outcome, values)


def _lengths(bench: Bench) -> Iterator[FigureRow]:
    for length in LENGTHS:
        yield from _measured(bench, length, {name: name for name in _SERIES}, str(length), length)


def _memories(bench: Bench) -> Iterator[FigureRow]:
    for rows in ROWS:
        elements = on_chip_elements(rows)
        series = {"online": f"online, {rows} rows"}
        yield from _measured(bench, _LENGTH, series, f"{elements:,}", elements)


def _probe(name: str, length: int, device: torch.device) -> Callable[[], object]:
    buffers = make_attention(length, torch.Generator(device).manual_seed(0))
    return functools.partial(RUNS[name], buffers)


_COLUMNS = ("us", "counted MB", "formula MB", "counted / formula", "its limit")


def attention(id: str, title: str) -> Figure:
    """Elements moved against the length and against the memory on chip."""
    panels = (
        Panel(
            "Traffic against length",
            "N, rows of queries and keys",
            _COLUMNS,
            ("counted MB",),
            _lengths,
            f"float32, {HEADS} heads, d = {DIM}. Every thread counts what it moves to and from "
            "global memory; both columns of MB are elements times 4 bytes. The formulas are N d + "
            "N^2 and N^2 d^2 / M; what is counted over the formula is the constant that O() hides. "
            "It does not grow with N but tends to its limit, which follows from the kernels: "
            "materialised 4 + 2 d / 64, online 2 M / (rows d). DRAM moves less than is counted, "
            "because the L2 serves what is read again.",
            log_y=True,
            probes={
                f"{name}, {length}": functools.partial(_probe, name, length)
                for name in _SERIES
                for length in LENGTHS[-2:]
            },
            counted={
                "DRAM MB, longest kernel": lambda counters: (
                    None if counters.dram_bytes is None else counters.dram_bytes / 1e6
                )
            },
        ),
        Panel(
            "Traffic against memory on chip",
            "M, elements",
            _COLUMNS,
            ("counted MB",),
            _memories,
            f"N = {_LENGTH}; blocks of {', '.join(map(str, ROWS))} rows. Twice the rows read keys "
            "and values half as often. A tile of keys takes a part of M that does not grow, "
            "so that counted over formula falls with M, towards 2 (2 d + 1) / d.",
            log_y=True,
        ),
    )
    kernels = (*_ONLINE.values(), _SCORES, _SOFTMAX, _VALUES)
    return Figure(id, title, lesson_of(_FILE), panels, kernels)
