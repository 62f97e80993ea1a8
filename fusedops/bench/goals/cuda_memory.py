"""Transposes and the plain copy against torch: the memory's read + write roof.

Transposes that cast or quantize stand beside one of the plain ones, without counting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_quantized import per_group, per_token, quantized_error
from fusedops.bench.goals.cuda_rows import (
    COVERS,
    MINE,
    contenders,
    measured,
    reading,
    rows_beside,
)
from fusedops.bench.measurement import Measurement, Outcome, speedup
from fusedops.bench.oracles import bitwise
from fusedops.bench.peers import compiled_peers
from fusedops.ops.fused_quantize import transpose_quantize
from fusedops.ops.quantize import quantize
from fusedops.ops.transpose import transpose
from fusedops.providers.cuda_copy import UNROLLS, copy

__all__ = [
    "CASTS",
    "COPY_BYTES",
    "STORAGES",
    "TRANSPOSES",
    "cast_outcomes",
    "copy_outcomes",
    "quantize_outcomes",
    "transpose_outcomes",
]

TRANSPOSES: dict[str, tuple[int, int, torch.dtype]] = {
    "8192_fp32": (8192, 8192, torch.float32),
    "16384_bf16": (16384, 16384, torch.bfloat16),
    "16384_int8": (16384, 16384, torch.int8),
    "odd_fp32": (8191, 8193, torch.float32),
}
"""Rows, columns and dtype of each transpose goal, by the end of its id."""

STORAGES = {"block128": per_group, "token": per_token}
"""Granularities of the rows beside that quantize bfloat16 to e4m3, and how torch does it."""

CASTS = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
"""From and to: the rows beside that cast."""

_BESIDE = "16384_bf16"
_BESIDE_SIZE = 8192

COPY_BYTES = 2 << 30


def transpose_outcomes(
    run: GoalRun, rows: int, columns: int, dtype: torch.dtype
) -> dict[str, Outcome]:
    """One matrix turned by us and by torch; every element must be the same."""

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(rows, columns, dtype=dtype, device=run.device)
        if dtype.is_floating_point:
            return Buffers((x.normal_(generator=generator),))
        return Buffers((x.random_(-128, 128, generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0].t())

    def torchs(x: Tensor) -> Tensor:
        return x.t().contiguous()

    key = f"{rows}x{columns} {str(dtype).removeprefix('torch.')}"
    return measured(run, key, contenders(transpose, torchs, check), make)


def quantize_outcomes(
    run: GoalRun, rows: int, columns: int, granularity: str
) -> dict[str, Outcome]:
    """One bfloat16 matrix turned and quantized to e4m3: at once, by our two kernels, by torch."""

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device=run.device)
        return Buffers((x.normal_(generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        exact = buffers.inputs[0].t().double()
        return quantized_error(results[0], results[1], exact, torch.zeros_like(exact))

    def on_input(name: str, call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Contender:
        return Contender(name, lambda buffers: call(buffers.inputs[0]), check)

    def in_two(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(transpose(x), granularity=granularity)

    def by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
        return STORAGES[granularity](x.t().contiguous())

    found = [
        on_input(MINE, partial(transpose_quantize, granularity=granularity)),
        on_input(f"{MINE} transpose, quantize", in_two),
        on_input(
            "torch.t, quantize", lambda x: quantize(x.t().contiguous(), granularity=granularity)
        ),
        on_input("torch", by_torch),
        *compiled_peers(by_torch, check),
    ]
    return measured(run, f"{rows}x{columns} bfloat16 to e4m3 {granularity}", found, make)


def cast_outcomes(
    run: GoalRun, rows: int, columns: int, source: torch.dtype, target: torch.dtype
) -> dict[str, Outcome]:
    """One matrix turned and cast; every element must be the same as torch's."""

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(rows, columns, dtype=source, device=run.device)
        return Buffers((x.normal_(generator=generator),))

    def torchs(x: Tensor) -> Tensor:
        return x.t().to(target, memory_format=torch.contiguous_format)

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0].t().to(target))

    names = [str(dtype).removeprefix("torch.") for dtype in (source, target)]
    found = contenders(partial(transpose, dtype=target), torchs, check)
    return measured(run, f"{rows}x{columns} {' to '.join(names)}", found, make)


def _beside(run: GoalRun) -> str:
    """The rows of transposes that convert, for the note of a goal."""
    size = _BESIDE_SIZE
    rows = {
        f"e4m3 {granularity}": partial(quantize_outcomes, run, size, size, granularity)
        for granularity in STORAGES
    }
    rows |= {
        f"to {target}": partial(cast_outcomes, run, size, size, source, target)
        for source, target in CASTS
    }
    return rows_beside(rows)


def _register(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    covers = (*COVERS, "csrc/transpose.cu", "fusedops/ops/transpose.py")
    if name == _BESIDE:
        others = ("csrc/transpose_quantize.cu", "csrc/reduce.cu", "csrc/quantize.cu")
        covers = (*covers, *others, "fusedops/ops/fused_quantize.py")

    @goal(f"cuda.transpose.{name}", provider="cuda", covers=covers)
    def turned(run: GoalRun) -> Reading:
        outcomes = transpose_outcomes(run, rows, columns, dtype)
        run.mine(outcomes, MINE)
        return reading(run, outcomes, note=_beside(run) if name == _BESIDE else "")


for _name, _case in TRANSPOSES.items():
    _register(_name, *_case)


def copy_outcomes(run: GoalRun, total_bytes: int) -> dict[str, Outcome]:
    """Our copy with each number of vectors a thread; torch's product with a number and its copy."""

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(total_bytes // 4, device=run.device).normal_(generator=generator)
        return Buffers((x,), (torch.empty_like(x),))

    def ours(unroll: int) -> Contender:
        def launch(buffers: Buffers) -> None:
            copy(buffers.inputs[0], buffers.outputs[0], unroll)

        return Contender(
            MINE if unroll == UNROLLS[0] else f"{MINE} {unroll}",
            launch,
            lambda results, buffers: bitwise(results[0], buffers.inputs[0]),
        )

    def product(buffers: Buffers) -> None:
        torch.mul(buffers.inputs[0], 1.5, out=buffers.outputs[0])

    def check_product(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0] * 1.5)

    def check_copy(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0])

    def copied(buffers: Buffers) -> None:
        buffers.outputs[0].copy_(buffers.inputs[0])

    found = [
        *map(ours, UNROLLS),
        Contender("torch.mul", product, check_product),
        Contender("torch.copy_", copied, check_copy),
        *compiled_peers(lambda x: x * 1.5, check_product),
    ]
    return measured(run, f"{total_bytes} bytes", found, make)


@goal("cuda.copy_over_torch_mul", provider="cuda", covers=(*COVERS, "csrc/copy.cu"))
def copy_over_torch_mul(run: GoalRun) -> Reading:
    """The bandwidth of the copy that is the default over that of torch's product."""
    rows = copy_outcomes(run, COPY_BYTES)
    name, peer = run.best(rows, ["torch.mul"])
    ratio = speedup(run.mine(rows, MINE), peer)
    times = [
        f"{key} {row.median_us:.0f}" for key, row in rows.items() if isinstance(row, Measurement)
    ]
    return Reading(
        ratio.median,
        ratio.low,
        ratio.high,
        peer=f"{name} {peer.median_us:.0f} us",
        note=f"us: {', '.join(times)}",
    )
