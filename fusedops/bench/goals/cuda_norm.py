"""Norms against torch, torch.compile, FlashInfer and QuACK: large, small, and quantized."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_quantized import per_token, quantized_error
from fusedops.bench.goals.cuda_rows import COVERS, MINE, reading
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import within
from fusedops.bench.peers import (
    Available,
    add_rms_norm_peers,
    fresh_compile,
    peer_status,
    rms_norm_peers,
)
from fusedops.ops.fused_quantize import rms_norm_quantize
from fusedops.ops.norm import fused_add_rms_norm, rms_norm

__all__ = ["SMALL_ROWS", "add_rms_norm_outcomes", "rms_norm_fp8_outcomes", "rms_norm_outcomes"]

_COVERS = (*COVERS, "csrc/norm.cu", "fusedops/ops/norm.py", "fusedops/bench/peers.py")
_EPS = 1e-6
_ROWS, _COLUMNS = 16384, 4096
SMALL_ROWS = (1, 4, 16, 64)
"""Rows of a decode step."""

_ERROR = 2.0**-7
"""Relative error of bfloat16 results: two roundings of 2^-9 each, and one more of a peer's sum."""


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt_() * weight.double()


def _judge(normed: Tensor, x: Tensor, weight: Tensor) -> str | None:
    exact = _exact(x, weight)
    return within(normed, exact, _ERROR * exact.abs())


def _normal(run: GoalRun, generator: torch.Generator, *shape: int) -> Tensor:
    x = torch.empty(shape, dtype=torch.bfloat16, device=run.device)
    return x.normal_(generator=generator)


def rms_norm_outcomes(
    run: GoalRun, rows: int, columns: int, *, hot: bool = False
) -> dict[str, Outcome]:
    """RMSNorm of bfloat16 rows."""

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((_normal(run, generator, rows, columns), _normal(run, generator, columns)))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return _judge(results[0], *buffers.inputs)

    def ours(buffers: Buffers) -> Tensor:
        x, weight = buffers.inputs
        return rms_norm(x, weight, _EPS)

    key = f"rms_norm {rows}x{columns}"
    return run.measure(
        key, [Contender(MINE, ours, check), *rms_norm_peers(check, _EPS)], make, hot=hot
    )


def add_rms_norm_outcomes(run: GoalRun, rows: int, columns: int) -> dict[str, Outcome]:
    """Residual add and RMSNorm of bfloat16 rows."""

    def make(generator: torch.Generator) -> Buffers:
        x, residual = (_normal(run, generator, rows, columns) for _ in range(2))
        return Buffers((x, residual, _normal(run, generator, columns)))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x, residual, weight = buffers.inputs
        total = x + residual
        wrong = within(results[1], total.double(), 0.0)
        # FlashInfer normalises the sum before it is rounded, which may cost another 2^-9 of it.
        return wrong or _judge(results[0], total, weight)

    def fused(buffers: Buffers) -> tuple[Tensor, Tensor]:
        x, residual, weight = buffers.inputs
        return fused_add_rms_norm(x, residual, weight, _EPS)

    ours = Contender(MINE, fused, check)
    key = f"fused_add_rms_norm {rows}x{columns}"
    return run.measure(key, [ours, *add_rms_norm_peers(check, _EPS)], make)


def rms_norm_fp8_outcomes(run: GoalRun, rows: int, columns: int) -> dict[str, Outcome]:
    """RMSNorm of bfloat16 rows to e4m3 with a scale a row."""

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((_normal(run, generator, rows, columns), _normal(run, generator, columns)))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        exact = _exact(*buffers.inputs)
        return quantized_error(results[0], results[1], exact, _ERROR * exact.abs())

    def torchs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return per_token(F.rms_norm(x, (x.shape[-1],), weight, _EPS))

    def ours(buffers: Buffers) -> tuple[Tensor, Tensor]:
        x, weight = buffers.inputs
        return rms_norm_quantize(x, weight, _EPS)

    found = [
        Contender(MINE, ours, check),
        Contender("torch", lambda buffers: torchs(*buffers.inputs), check),
    ]
    if isinstance(peer_status(["torch.compile"])["torch.compile"], Available):
        compiled = fresh_compile(torchs)
        found.append(Contender("torch.compile", lambda b: compiled(*b.inputs), check))
    return run.measure(f"rms_norm_quantize {rows}x{columns}", found, make)


@goal("cuda.rms_norm", provider="cuda", covers=_COVERS)
def large(run: GoalRun) -> Reading:
    """Every row of a long prefill."""
    return reading(run, rms_norm_outcomes(run, _ROWS, _COLUMNS))


@goal("cuda.add_rms_norm", provider="cuda", covers=_COVERS)
def large_with_residual(run: GoalRun) -> Reading:
    """The same with the residual's sum."""
    return reading(run, add_rms_norm_outcomes(run, _ROWS, _COLUMNS))


@goal(
    "cuda.rms_norm_fp8",
    provider="cuda",
    covers=(*_COVERS, "fusedops/ops/fused_quantize.py", "fusedops/ops/quantize.py"),
)
def large_quantized(run: GoalRun) -> Reading:
    """The same as e4m3 with a scale a row."""
    return reading(run, rms_norm_fp8_outcomes(run, _ROWS, _COLUMNS))


@goal("cuda.rms_norm_small", provider="cuda", covers=_COVERS)
def small(run: GoalRun) -> Reading:
    """The slowest of some numbers of rows, whose data lies in the L2 as in a decode step."""
    found = {
        rows: reading(run, rms_norm_outcomes(run, rows, _COLUMNS, hot=True)) for rows in SMALL_ROWS
    }
    slowest = max(found.values(), key=lambda each: each.value)
    note = ", ".join(
        f"{rows} rows {each.value:.2f} us ({each.peer})" for rows, each in found.items()
    )
    return Reading(slowest.value, slowest.low, slowest.high, peer=slowest.peer, note=note)
