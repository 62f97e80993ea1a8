"""Norms against torch, torch.compile, FlashInfer and QuACK: large, and quantized."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_quantized import per_token, quantized_error
from fusedops.bench.goals.cuda_rows import COVERS, MINE, measured, reading
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import within
from fusedops.bench.peers import (
    add_rms_norm_peers,
    compiled_peers,
    layer_norm_peers,
    rms_norm_peers,
)
from fusedops.ops.fused_quantize import (
    fused_add_rms_norm_quantize,
    layer_norm_quantize,
    rms_norm_quantize,
)
from fusedops.ops.norm import fused_add_rms_norm, layer_norm, rms_norm

__all__ = [
    "COLUMNS",
    "NORM_COVERS",
    "QUANTIZED",
    "add_rms_norm_outcomes",
    "layer_norm_outcomes",
    "quantized_outcomes",
    "rms_norm_outcomes",
]

NORM_COVERS = (*COVERS, "csrc/norm.cu")
_EPS = 1e-6
_ROWS = 16384
COLUMNS = 4096
"""Of every row of these goals."""

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
    found = [Contender(MINE, ours, check), *rms_norm_peers(check, _EPS)]
    return measured(run, key, found, make, hot=hot)


def add_rms_norm_outcomes(
    run: GoalRun, rows: int, columns: int, *, hot: bool = False
) -> dict[str, Outcome]:
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
    return measured(run, key, [ours, *add_rms_norm_peers(check, _EPS)], make, hot=hot)


def _exact_layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """float64: LayerNorm, and the sum of magnitudes that its rounding errors follow."""
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    scaled = centered * (centered.square().mean(-1, keepdim=True) + _EPS).rsqrt_() * weight.double()
    return scaled + bias.double(), scaled.abs() + bias.double().abs()


def layer_norm_outcomes(
    run: GoalRun, rows: int, columns: int, *, hot: bool = False
) -> dict[str, Outcome]:
    """LayerNorm of bfloat16 rows with float32 parameters, of values that bfloat16 holds, too."""

    def make(generator: torch.Generator) -> Buffers:
        parameters = (_normal(run, generator, columns).float() for _ in range(2))
        return Buffers((_normal(run, generator, rows, columns), *parameters))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        exact, magnitude = _exact_layer(*buffers.inputs)
        return within(results[0], exact, _ERROR * magnitude)

    def normed(buffers: Buffers) -> Tensor:
        x, weight, bias = buffers.inputs
        return layer_norm(x, weight, bias, _EPS)

    ours = Contender(MINE, normed, check)
    found = [ours, *layer_norm_peers(check, _EPS)]
    return measured(run, f"layer_norm {rows}x{columns}", found, make, hot=hot)


def _rms_exactly(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    exact = _exact(x, weight)
    return exact, exact.abs()


def _sum_exactly(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _rms_exactly(x + residual, weight)


def _torch_rms(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return per_token(F.rms_norm(x, (x.shape[-1],), weight, _EPS))


def _torch_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    added = x + residual
    q, scale = _torch_rms(added, weight)
    return q, added, scale


def _torch_layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return per_token(F.layer_norm(x, (x.shape[-1],), weight, bias, _EPS))


Exactly = Callable[..., tuple[Tensor, Tensor]]

Quantizing = Callable[..., tuple[Tensor, ...]]

QUANTIZED: dict[str, tuple[tuple[int, int], Quantizing, Quantizing, Exactly]] = {
    "rms_norm_quantize": ((1, 1), rms_norm_quantize, _torch_rms, _rms_exactly),
    "fused_add_rms_norm_quantize": (
        (2, 1),
        fused_add_rms_norm_quantize,
        _torch_sum,
        _sum_exactly,
    ),
    "layer_norm_quantize": ((1, 2), layer_norm_quantize, _torch_layer, _exact_layer),
}
"""Norms to e4m3 with a scale a row: how many matrices and vectors they take, ours, torch's, and
the values in float64. Results are q first and the scales last."""


def quantized_outcomes(
    run: GoalRun, rows: int, columns: int, name: str = "rms_norm_quantize", *, hot: bool = False
) -> dict[str, Outcome]:
    """A norm of ``QUANTIZED`` of bfloat16 rows."""
    (matrices, vectors), ours, torchs, exactly = QUANTIZED[name]

    def make(generator: torch.Generator) -> Buffers:
        shapes = [(rows, columns)] * matrices + [(columns,)] * vectors
        return Buffers(tuple(_normal(run, generator, *shape) for shape in shapes))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        exact, magnitude = exactly(*buffers.inputs)
        return quantized_error(results[0], results[-1], exact, _ERROR * magnitude)

    found = [
        Contender(MINE, lambda buffers: ours(*buffers.inputs, _EPS), check),
        Contender("torch", lambda buffers: torchs(*buffers.inputs), check),
        *compiled_peers(torchs, check),
    ]
    return measured(run, f"{name} {rows}x{columns}", found, make, hot=hot, reasons=_ONE_SCALE)


_ONE_SCALE = {"flashinfer": "its quantizing norms take one given scale for all rows"}


@goal("cuda.rms_norm", provider="cuda", covers=NORM_COVERS)
def large(run: GoalRun) -> Reading:
    """Every row of a long prefill."""
    return reading(run, rms_norm_outcomes(run, _ROWS, COLUMNS))


@goal("cuda.add_rms_norm", provider="cuda", covers=NORM_COVERS)
def large_with_residual(run: GoalRun) -> Reading:
    """The same with the residual's sum."""
    return reading(run, add_rms_norm_outcomes(run, _ROWS, COLUMNS))


@goal("cuda.rms_norm_fp8", provider="cuda", covers=NORM_COVERS)
def large_quantized(run: GoalRun) -> Reading:
    """The same as e4m3 with a scale a row."""
    return reading(run, quantized_outcomes(run, _ROWS, COLUMNS))
