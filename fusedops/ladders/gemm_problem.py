"""What the steps of the ladder of products solve, and how many loads a tile should take."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.data import Buffers
from fusedops.bench.oracles import within
from fusedops.bench.roofline import Traffic
from fusedops.ladders.model import Problem
from fusedops.ladders.walls import Wall

__all__ = ["BF16", "BF16_FUSED", "FLOAT32", "expected", "predicted_loads", "product_problem"]

FLOAT32 = "float32"
BF16 = "bfloat16"
BF16_FUSED = "bfloat16, bias and GELU"

_SUM_ERROR = 2.0**-18
"""Error of a float32 sum of products, relative to the sum of their magnitudes."""

_ROUNDING = 2.0**-8
"""Of one rounding to bfloat16, relative: half a unit of its 8 bits, where a binade begins."""

_GELU_SLOPE = 1.13
"""The largest slope of GELU, by which it passes on an error of its argument."""

_GELU_ERROR = 2.0**-11
"""Error of GELU by an approximate tanh, relative to its argument: half of it times a tanh within
2^-11 (PTX ISA, "tanh.approx"), and its own rounding."""


def predicted_loads(m: int, n: int, k: int, tile_m: int, tile_n: int) -> float:
    """Elements that a product loads where blocks of threads share tiles of the result.

    A block needs ``tile_m + tile_n`` elements for each of the ``k`` steps of its
    ``tile_m * tile_n`` results. One thread an element is a tile of 1 x 1.
    """
    return m * n * k * (tile_m + tile_n) / (tile_m * tile_n)


def _make(kind: str, m: int, n: int, k: int, generator: torch.Generator) -> Buffers:
    dtype = torch.float32 if kind == FLOAT32 else torch.bfloat16

    def normal(*shape: int) -> Tensor:
        drawn = torch.empty(shape, device=generator.device).normal_(generator=generator)
        return drawn.to(dtype)

    # Products of about 1, where GELU is neither zero nor its argument.
    inputs = [normal(m, k), normal(n, k).mul_(k**-0.5)]
    if kind == BF16_FUSED:
        inputs.append(normal(n))
    return Buffers(tuple(inputs), (torch.empty(m, n, dtype=dtype, device=generator.device),))


def expected(kind: str, is_apart: bool, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """The exact result of a kind of product, and how far a right result may lie from it.

    A fused result is rounded once, at its end; apart, the product and its sum with the bias are
    rounded as well, and GELU passes their errors on.
    """

    def rounded(value: Tensor, bound: Tensor) -> Tensor:
        return bound + _ROUNDING * (value.abs() + bound)

    x, w, *bias = (tensor.double() for tensor in buffers.inputs)
    exact = x @ w.t()
    bound = _SUM_ERROR * (x.abs() @ w.abs().t())
    if bias:
        bound = rounded(exact, bound) if is_apart else bound
        summed = exact + bias[0]
        bound = rounded(summed, bound) if is_apart else bound
        exact = F.gelu(summed, approximate="tanh")
        bound = _GELU_SLOPE * bound + _GELU_ERROR * summed.abs()
    return exact, bound if kind == FLOAT32 else rounded(exact, bound)


def _check(kind: str, is_apart: bool, results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
    if results[0].dtype != buffers.outputs[0].dtype:
        return f"the result is {results[0].dtype}, expected {buffers.outputs[0].dtype}"
    return within(results[0], *expected(kind, is_apart, buffers))


def product_problem(kind: str, m: int, n: int, k: int) -> Problem:
    """x (m, k) times the transpose of w (n, k), as a linear layer stores it; then what the kind
    says.

    Float32 products are held to the peak of the CUDA cores, the others to the tensor cores'.
    """
    size = 4 if kind == FLOAT32 else 2
    vectors = n if kind == BF16_FUSED else 0
    flops = 2.0 * m * n * k
    return Problem(
        f"{m} x {n} x {k} {kind}",
        functools.partial(_make, kind, m, n, k),
        functools.partial(_check, kind, False),
        Traffic(size * float(m * k + n * k + vectors), size * float(m * n), flops),
        flops,
        "FLOP",
        kind,
        Wall.FMA_PIPE if kind == FLOAT32 else Wall.TENSOR_PIPE,
        functools.partial(_check, kind, True),
    )
