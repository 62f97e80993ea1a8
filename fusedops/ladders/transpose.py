"""The ladder of transposes: coalescing, shared memory, bank conflicts, copy engine, vectors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.data import Buffers
from fusedops.bench.oracles import bitwise
from fusedops.bench.roofline import Traffic
from fusedops.errors import ShapeError
from fusedops.ladders.catalog import specified
from fusedops.ladders.model import FOLDER, Ladder, LadderKernel, Lesson, Problem, Step, own_step
from fusedops.ladders.tensor_map import tiled_map
from fusedops.ladders.transpose_findings import findings
from fusedops.ops.transpose import transpose

__all__ = ["LADDER"]

NAME = "transpose"
SIZE = 8192
_THREADS = 256
_TILE_BYTES = 64 * 64 * 4
_STAGES = 3
_SWIZZLE_ALIGNMENT = 1024
_BLOCKS_PER_SM = 4
"""Rings of three tiles that the shared memory of a multiprocessor of sm_90 holds."""

_TITLES = specified()[NAME].steps
_PLAIN = ("pointer", "pointer", "int32", "int32")


def _kernel(version: str, parameters: tuple[str, ...] = _PLAIN) -> LadderKernel:
    name = f"{NAME}_{version}"
    return LadderKernel(f"{FOLDER}/{name}.cu", name, parameters)


def _require_multiple(x: Tensor, tile: int) -> None:
    if x.shape[0] % tile or x.shape[1] % tile:
        raise ShapeError(
            f"ladder {NAME}: x is {tuple(x.shape)}; this step takes rows and columns that are "
            f"multiples of {tile}."
        )


def _run_rows(kernel: LadderKernel, buffers: Buffers) -> None:
    (x,), (out,) = buffers.inputs, buffers.outputs
    rows, columns = x.shape
    kernel.launch((rows, 1, 1), (_THREADS, 1, 1), (x, out, rows, columns))


def _run_tiles(kernel: LadderKernel, buffers: Buffers) -> None:
    (x,), (out,) = buffers.inputs, buffers.outputs
    _require_multiple(x, 32)
    rows, columns = x.shape
    kernel.launch((columns // 32, rows // 32, 1), (32, 8, 1), (x, out, rows, columns))


def _run_vectors(kernel: LadderKernel, buffers: Buffers) -> None:
    (x,), (out,) = buffers.inputs, buffers.outputs
    _require_multiple(x, 64)
    rows, columns = x.shape
    kernel.launch((rows // 64, columns // 64, 1), (_THREADS, 1, 1), (x, out, rows, columns))


def _with_map(buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
    """x, out, and the description of x that the copy engine reads."""
    (x,), (out,) = buffers.inputs, buffers.outputs
    _require_multiple(x, 64)
    return x, out, tiled_map(x, box=(64, 32))


def _run_bulk(kernel: LadderKernel, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, out, described = state
    rows, columns = x.shape
    kernel.launch((rows // 64, columns // 64, 1), (_THREADS, 1, 1), (described, out, rows))
    return out


def _run_persistent(kernel: LadderKernel, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, out, described = state
    tile_rows, tile_columns = x.shape[0] // 64, x.shape[1] // 64
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    kernel.launch(
        (min(_BLOCKS_PER_SM * sms, tile_rows * tile_columns), 1, 1),
        (_THREADS, 1, 1),
        (described, out, x.shape[0], tile_rows, tile_columns),
        shared_bytes=_STAGES * _TILE_BYTES + _SWIZZLE_ALIGNMENT,
    )
    return out


def _step(version: str, kernel: LadderKernel, run: Any, prepare: Any = None) -> Step:
    name = f"{NAME}.{version}"
    capability = (9, 0) if prepare is not None else (8, 0)
    launch = functools.partial(run, kernel)
    return own_step(name, _TITLES[name], kernel, launch, prepare, capability)


def _problems(size: int) -> tuple[Problem, ...]:
    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(size, size, device=generator.device).normal_(generator=generator)
        return Buffers((x,), (torch.empty_like(x),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0].t())

    moved = size * size
    traffic = Traffic(read_bytes=4.0 * moved, write_bytes=4.0 * moved)
    return (Problem(f"{size} x {size} float32", make, check, traffic, moved, "elements"),)


_TORCH = Step(
    f"{NAME}.torch",
    _TITLES[f"{NAME}.torch"],
    Lesson(
        "A copy between strided views by torch's general kernel.",
        "excess sectors. A general copy walks one of the two sides across its rows.",
        "A kernel that knows that it transposes.",
    ),
    lambda buffers: buffers.inputs[0].t().contiguous(),
    peer="torch",
)

_LIBRARY = Step(
    f"{NAME}.library",
    _TITLES[f"{NAME}.library"],
    Lesson(
        "Squares turned in registers, swizzled tiles, and blocks in an order that writes whole "
        "rows of the result together; any shape, stride and dtype.",
        "memory. It stands near the bandwidth of a copy.",
        "None: fuse the transpose into what reads its result.",
    ),
    lambda buffers: transpose(buffers.inputs[0]),
    files=("transpose.cu",),
    operation="transpose",
)

LADDER = Ladder(
    NAME,
    specified()[NAME].title,
    "Every element is read once and written once, 8 bytes with nothing to compute: the memory's "
    "read and write bandwidth is the only roof. What is lost is lost in how addresses meet sectors "
    "of 32 bytes, banks of shared memory, and how many bytes are under way.",
    SIZE,
    _problems,
    (
        _TORCH,
        _step("v1", _kernel("v1"), _run_rows),
        _step("v2", _kernel("v2"), _run_rows),
        _step("v3", _kernel("v3"), _run_tiles),
        _step("v4", _kernel("v4"), _run_tiles),
        _step("v5", _kernel("v5", ("pointer", "pointer", "int32")), _run_bulk, _with_map),
        _step(
            "v6",
            _kernel("v6", ("pointer", "pointer", "int32", "int32", "int32")),
            _run_persistent,
            _with_map,
        ),
        _step("v7", _kernel("v7"), _run_vectors),
        _step("v8", _kernel("v8"), _run_vectors),
        _LIBRARY,
    ),
    findings,
)
"""Transposes of a square float32 matrix."""
