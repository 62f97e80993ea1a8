"""Reductions against torch and CUB: whole tensors, rows, columns, logsumexp and argmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_rows import COVERS, contenders, reading
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import bitwise, within
from fusedops.bench.peers import Check, sum_peers
from fusedops.ops.reduce import reduce

__all__ = ["reduce_outcomes", "reduce_row"]

_COVERS = (*COVERS, "csrc/reduce.cu", "fusedops/ops/reduce.py")
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


def _check(op: str, dim: int | None) -> Check:
    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x = buffers.inputs[0]
        if op == "argmax":
            dims = list(range(x.dim())) if dim is None else [dim]
            largest = x.amax(dims, keepdim=True)
            first = (x == largest).to(torch.int8).argmax(dim)
            return bitwise(results[0], first)
        exact, bound = _exact(x, op, dim)
        return within(results[0].reshape(exact.shape), exact, bound)

    return check


def reduce_row(op: str, dim: int | None, torchs: TorchCall) -> list[Contender]:
    """Our reduction of a row's one input, torch's, and CUB's where it has one."""
    check = _check(op, dim)
    found = contenders(partial(reduce, op=op, dim=dim), torchs, check)
    if op == "sum" and dim is None:
        found += [peer for peer in sum_peers(check) if peer.name == "cub"]
    return found


def reduce_outcomes(
    run: GoalRun, shape: tuple[int, ...], op: str, dim: int | None, torchs: TorchCall
) -> dict[str, Outcome]:
    """One reduction of a float32 tensor of normal values."""

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((torch.empty(shape, device=run.device).normal_(generator=generator),))

    size = "x".join(map(str, shape))
    key = f"{op} {size} over {'all' if dim is None else dim}"
    return run.measure(key, reduce_row(op, dim, torchs), make)


def _register(name: str, shape: tuple[int, ...], op: str, dim: int | None, call: TorchCall) -> None:
    @goal(f"cuda.{name}", provider="cuda", covers=_COVERS)
    def reduced(run: GoalRun) -> Reading:
        return reading(run, reduce_outcomes(run, shape, op, dim, call))


_register("reduce.sum_2p28", (2**28,), "sum", None, torch.sum)
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
