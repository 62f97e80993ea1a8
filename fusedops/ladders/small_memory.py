"""Figures of memory: SAXPY with narrow and wide accesses, and what strides cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.oracles import bitwise, within
from fusedops.ladders.figures import Bench, Figure, FigureRow, Panel, outcome_row
from fusedops.ladders.model import FOLDER, LadderKernel, lesson_of

__all__ = ["coalescing", "saxpy", "sectors_a_request"]

THREADS = 256
_BLOCKS_PER_SM = 8

# SAXPY

_FACTOR = 1.5
_COUNTS = (1 << 16, 1 << 19, 1 << 22, 1 << 25)
_ODD = (1 << 25) + 3
_SAXPY_FILE = f"{FOLDER}/small_saxpy.cu"
_SAXPY_TYPES = ("pointer", "pointer", "pointer", "float32", "int64")
_SCALAR = LadderKernel(_SAXPY_FILE, "small_saxpy_scalar", _SAXPY_TYPES)
_VECTOR = LadderKernel(_SAXPY_FILE, "small_saxpy_vector", _SAXPY_TYPES)


def _run_saxpy(kernel: LadderKernel, per_thread: int, buffers: Buffers) -> None:
    (x, y), (out,) = buffers.inputs, buffers.outputs
    count = x.numel()
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = max(1, min(-(-count // (THREADS * per_thread)), _BLOCKS_PER_SM * sms))
    kernel.launch((blocks, 1, 1), (THREADS, 1, 1), (x, y, out, _FACTOR, count))


def _torch_saxpy(buffers: Buffers) -> None:
    (x, y), (out,) = buffers.inputs, buffers.outputs
    torch.add(y, x, alpha=_FACTOR, out=out)


def check_saxpy(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
    """Within the rounding of a product and a sum."""
    x, y = (tensor.double() for tensor in buffers.inputs)
    product = _FACTOR * x
    bound = 1.2e-7 * (product.abs() + y.abs())
    return within(results[0], product + y, bound)


SAXPY_RUNS: dict[str, Callable[[Buffers], None]] = {
    "scalar": functools.partial(_run_saxpy, _SCALAR, 1),
    "16 bytes": functools.partial(_run_saxpy, _VECTOR, 4),
    "torch": _torch_saxpy,
}


def make_saxpy(count: int, shift: int, generator: torch.Generator) -> Buffers:
    """x, y and out of ``count`` float32, each ``shift`` elements behind an aligned address."""
    x, y, out = (torch.empty(count + shift, device=generator.device)[shift:] for _ in range(3))
    return Buffers((x.normal_(generator=generator), y.normal_(generator=generator)), (out,))


def _saxpy_rows(
    bench: Bench, x: str, at: float | None, count: int, shift: int = 0
) -> Iterator[FigureRow]:
    # A result goes to a vector of its own: the bytes are the same, and every launch can be checked.
    contenders = [Contender(name, run, check_saxpy) for name, run in SAXPY_RUNS.items()]
    outcomes = bench.time(contenders, functools.partial(make_saxpy, count, shift))
    for name, outcome in outcomes.items():
        yield outcome_row(
            name, x, at, outcome, lambda us: {"us": us, "TB/s": 12 * count / us / 1e6}
        )


def _lengths(bench: Bench) -> Iterator[FigureRow]:
    for count in _COUNTS:
        yield from _saxpy_rows(bench, f"{count:,}", count, count)


def _tails(bench: Bench) -> Iterator[FigureRow]:
    yield from _saxpy_rows(bench, "aligned, no tail", None, _COUNTS[-1])
    yield from _saxpy_rows(bench, "aligned, tail of 3", None, _ODD)
    yield from _saxpy_rows(bench, "4 bytes off", None, _ODD, shift=1)


def saxpy(id: str, title: str) -> Figure:
    """Rate of SAXPY against the length, with scalar and 16-byte accesses."""
    kernels = (_SCALAR, _VECTOR)
    panels = (
        Panel(
            "Rate against length",
            "elements",
            ("us", "TB/s"),
            ("TB/s",),
            _lengths,
            "12 bytes an element: two reads and one write, to a vector of its own.",
        ),
        Panel(
            "Tail and alignment",
            "vectors",
            ("us", "TB/s"),
            ("TB/s",),
            _tails,
            "The kernel looks at the addresses: what 16 bytes do not divide goes element by "
            "element, at the scalar kernel's rate.",
        ),
    )
    return Figure(id, title, lesson_of(_SAXPY_FILE), panels, kernels)


# Coalescing

STRIDES = (1, 2, 4, 8, 16, 32)
_ACCESSES = 1 << 22
_SECTOR_BYTES = 32
_STRIDED_FILE = f"{FOLDER}/small_coalescing.cu"
_STRIDED_TYPES = ("pointer", "pointer", "int32", "int32")
_READ = LadderKernel(_STRIDED_FILE, "small_strided_read", _STRIDED_TYPES)
_WRITE = LadderKernel(_STRIDED_FILE, "small_strided_write", _STRIDED_TYPES)


def sectors_a_request(stride: int) -> int:
    """Sectors that a warp's request for 32 floats touches, ``stride`` elements apart."""
    return min(32, 32 * 4 * stride // _SECTOR_BYTES)


def _launch_strided(kernel: LadderKernel, stride: int, x: Tensor, out: Tensor, count: int) -> None:
    blocks = -(-count // THREADS)
    kernel.launch((blocks, 1, 1), (THREADS, 1, 1), (x, out, stride, count))


def strided_contender(series: str, stride: int, count: int) -> Contender:
    """Reads or writes ``count`` elements, ``stride`` apart."""
    kernel = _READ if series == "read" else _WRITE

    def run(buffers: Buffers) -> Tensor:
        (x,), (out,) = buffers.inputs, buffers.outputs
        _launch_strided(kernel, stride, x, out, count)
        return out[::stride] if series == "write" else out

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        (x,) = buffers.inputs
        return bitwise(results[0], x[::stride] if series == "read" else x)

    return Contender(series, run, check)


def make_strided(series: str, stride: int, count: int, generator: torch.Generator) -> Buffers:
    """x and out, the strided one ``stride`` times as long."""
    long, short = count * stride, count
    sizes = (long, short) if series == "read" else (short, long)
    x, out = (torch.empty(size, device=generator.device) for size in sizes)
    return Buffers((x.normal_(generator=generator),), (out,))


def _strides(bench: Bench) -> Iterator[FigureRow]:
    for series in ("read", "write"):
        for stride in STRIDES:
            contender = strided_contender(series, stride, _ACCESSES)
            make = functools.partial(make_strided, series, stride, _ACCESSES)
            (outcome,) = bench.time([contender], make).values()
            yield outcome_row(
                series,
                str(stride),
                stride,
                outcome,
                lambda us, stride=stride: {  # type: ignore[misc]
                    "us": us,
                    "useful TB/s": 8 * _ACCESSES / us / 1e6,
                    "sectors a request": sectors_a_request(stride),
                },
            )


def _strided_probe(series: str, stride: int, device: torch.device) -> Callable[[], object]:
    generator = torch.Generator(device).manual_seed(0)
    buffers = make_strided(series, stride, _ACCESSES, generator)
    return functools.partial(strided_contender(series, stride, _ACCESSES).run, buffers)


def coalescing(id: str, title: str) -> Figure:
    """Useful bandwidth of reads and writes against their stride."""
    panel = Panel(
        "Useful rate against stride",
        "stride, elements",
        ("us", "useful TB/s", "sectors a request"),
        ("useful TB/s",),
        _strides,
        "8 useful bytes an access: the strided one and its contiguous partner. Sectors a request "
        "are predicted: 32 floats of 4 bytes over sectors of 32 bytes.",
        probes={
            f"{series}, {stride}": functools.partial(_strided_probe, series, stride)
            for series in ("read", "write")
            for stride in STRIDES
        },
        counted={
            "sectors counted": lambda counters: counters.sectors,
            "excess sectors": lambda counters: counters.excess_sectors,
        },
    )
    return Figure(id, title, lesson_of(_STRIDED_FILE), (panel,), (_READ, _WRITE))
