"""Reductions against torch and CUB: whole tensors, rows, columns, logsumexp and argmax.

Beside the sum of 2^28 floats stand rows of integers and of maxima.
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
from fusedops.bench.goals.cuda_rows import (
    COVERS,
    MINE,
    best_peer,
    contenders,
    measured,
    reading,
    rows_beside,
)
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import bitwise, within
from fusedops.bench.peers import Check, sum_peers
from fusedops.ops.reduce import reduce

__all__ = ["BESIDE", "reduce_outcomes", "reduce_row"]

_COVERS = (*COVERS, "csrc/reduce.cu")
_ACCUMULATION = 2.0**-18
"""Error of a float32 sum relative to the sum of magnitudes that a right result stays within."""

TorchCall = Callable[[Tensor], Tensor]


def _exact(x: Tensor, op: str, dim: int | None) -> tuple[Tensor, Tensor]:
    """float64: the result, and the allowed distance from it."""
    wide = x.double()
    dims = list(range(x.dim())) if dim is None else [dim]
    if op == "logsumexp":
        exact = torch.logsumexp(wide, dims)
        return exact, _ACCUMULATION * (1.0 + exact.abs())
    return wide.sum(dims), _ACCUMULATION * wide.abs_().sum(dims)


def _kept(x: Tensor, dim: int | None) -> tuple[int, ...]:
    """The shape of a result."""
    return () if dim is None else tuple(n for d, n in enumerate(x.shape) if d != dim % x.dim())


def _by_torch(op: str, dim: int | None) -> TorchCall:
    """torch's reduction of all elements or of one dimension."""
    if op == "max":
        return torch.amax if dim is None else partial(torch.amax, dim=dim)
    return torch.sum if dim is None else partial(torch.sum, dim=dim)


def _check(op: str, dim: int | None) -> Check:
    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x = buffers.inputs[0]
        if op == "argmax":
            dims = list(range(x.dim())) if dim is None else [dim]
            largest = x.amax(dims, keepdim=True)
            first = (x == largest).to(torch.int8).argmax(dim)
            return bitwise(results[0], first)
        if op == "max":
            return bitwise(results[0].reshape(_kept(x, dim)), _by_torch(op, dim)(x))
        if not x.is_floating_point():
            # CUB adds in 32 bits, which hold these sums.
            return bitwise(results[0].long().reshape(_kept(x, dim)), _by_torch(op, dim)(x))
        exact, bound = _exact(x, op, dim)
        return within(results[0].reshape(exact.shape), exact, bound)

    return check


def reduce_row(op: str, dim: int | None, torchs: TorchCall) -> list[Contender]:
    """Our reduction of a row's one input, torch's, and CUB's where it has one."""
    check = _check(op, dim)
    ours: TorchCall = partial(reduce, op=op, dim=dim)
    found = contenders(ours, torchs, check)
    if op in ("sum", "max") and dim is None:
        found += [peer for peer in sum_peers(check, op) if peer.name == "cub"]
    return found


_NOT_CUB = {"cub": "left out: its segmented reductions read an offset for each row"}


def reduce_outcomes(
    run: GoalRun,
    shape: tuple[int, ...],
    op: str,
    dim: int | None,
    torchs: TorchCall,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Outcome]:
    """One reduction of a tensor of normal values, or of integers from -8 to 8."""

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(shape, dtype=dtype, device=run.device)
        if dtype.is_floating_point:
            return Buffers((x.normal_(generator=generator),))
        return Buffers((x.random_(-8, 9, generator=generator),))

    size = "x".join(map(str, shape))
    key = f"{op} {size} over {'all' if dim is None else dim}"
    if dtype is not torch.float32:
        key = f"{key} {str(dtype).removeprefix('torch.')}"
    reasons = _NOT_CUB if dim == 1 and op in ("sum", "max") else None
    return measured(run, key, reduce_row(op, dim, torchs), make, reasons=reasons)


BESIDE: tuple[tuple[str, tuple[int, ...], int | None, torch.dtype], ...] = (
    ("sum", (2**28,), None, torch.int32),
    ("max", (2**28,), None, torch.float32),
    ("max", (2**28,), None, torch.int32),
    ("max", (16384, 16384), 1, torch.float32),
    ("sum", (16384, 16384), 1, torch.int32),
)
"""Rows beside the sum of 2^28 floats: operation, shape, dimension, dtype."""


def _register(name: str, shape: tuple[int, ...], op: str, dim: int | None, call: TorchCall) -> None:
    @goal(f"cuda.{name}", provider="cuda", covers=_COVERS)
    def reduced(run: GoalRun) -> Reading:
        return reading(run, reduce_outcomes(run, shape, op, dim, call))


@goal("cuda.reduce.sum_2p28", provider="cuda", covers=_COVERS)
def sum_of_all(run: GoalRun) -> Reading:
    """The sum of floats; ``BESIDE`` are kept with it."""
    outcomes = reduce_outcomes(run, (2**28,), "sum", None, torch.sum)
    mine = run.mine(outcomes, MINE)
    beside = {
        f"{op} {str(dtype).removeprefix('torch.')} {len(shape)}D": partial(
            reduce_outcomes, run, shape, op, dim, _by_torch(op, dim), dtype
        )
        for op, shape, dim, dtype in BESIDE
    }
    note = rows_beside(beside)
    return Reading.of(mine, run.goal.unit, peer=best_peer(outcomes), note=note)


_register("reduce.sum_2p16", (2**16,), "sum", None, torch.sum)
_register(
    "reduce.logsumexp",
    (16384, 16384),
    "logsumexp",
    1,
    lambda x: torch.logsumexp(x, 1),
)
_register("argmax", (64, 128256), "argmax", 1, lambda x: torch.argmax(x, 1))


@goal("cuda.reduce.rows", provider="cuda", covers=_COVERS)
def rows(run: GoalRun) -> Reading:
    """The slower of sums over rows and over columns; the note holds both."""
    found = [
        reading(
            run,
            reduce_outcomes(run, (16384, 16384), "sum", dim, partial(torch.sum, dim=dim)),
        )
        for dim in (1, 0)
    ]
    slower = max(found, key=lambda each: each.value)
    note = ", ".join(
        f"{name} {each.value:.1f} us ({each.peer})"
        for name, each in zip(("rows", "columns"), found, strict=True)
    )
    return Reading(slower.value, slower.low, slower.high, peer=slower.peer, note=note)
