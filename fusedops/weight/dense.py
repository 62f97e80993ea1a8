"""The dense weight: activations and weight of one dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.epilogue.base import FLOAT_DTYPES, Context
from fusedops.errors import DTypeError, LayoutError, ShapeError
from fusedops.weight.base import WeightFormat

__all__ = ["DENSE_DTYPES", "Dense", "float_product", "in_blocks"]

_BLOCK_ROWS = 32
_LEAST_IN_BLOCKS = 1 << 18
"""Elements of a weight from which a batch of products is worth its 10 us."""


def in_blocks(rows: int, n: int, k: int) -> bool:
    """Whether a CPU product of ``rows`` rows is faster as a batch, see ``float_product``."""
    whole = n % _BLOCK_ROWS == 0 and n > _BLOCK_ROWS
    return 4 <= rows <= 12 and whole and n * k >= _LEAST_IN_BLOCKS


def float_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float32: (M, K) and (N, K) give (M, N).

    On a CPU, MKL's sgemm loses up to a half on 4 to 12 rows (2 cores, AVX-512, weights from memory;
    M=4: 2048 x 2048 885 us, as a batch of 32-row products 573 us; 3072 x 576 475 and 361 us).
    """
    rows, n = x.shape[0], weight.shape[0]
    if x.is_cuda or not in_blocks(rows, *weight.shape):
        return F.linear(x, weight)
    blocks = n // _BLOCK_ROWS
    batch = weight.view(blocks, _BLOCK_ROWS, weight.shape[1]).transpose(1, 2)
    product = torch.bmm(x.expand(blocks, -1, -1), batch)
    return product.transpose(0, 1).reshape(rows, n)


DENSE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.int8)
"""Dtypes of activations and dense weights."""


@dataclass(frozen=True)
class Dense(WeightFormat):
    """A plain (N, K) weight of the activations' dtype: float32, bf16, fp16, e4m3 or int8."""

    spec_name: ClassVar[str] = "dense"

    def stored_bytes(self, x_dtype: torch.dtype) -> int:
        return self.n * self.k * x_dtype.itemsize

    def check(self, x: Tensor, weight: Tensor) -> None:
        if weight.dtype not in DENSE_DTYPES or x.dtype != weight.dtype:
            accepted = ", ".join(str(d).removeprefix("torch.") for d in DENSE_DTYPES)
            raise DTypeError(
                f"gemm: x is {str(x.dtype).removeprefix('torch.')} and w is "
                f"{str(weight.dtype).removeprefix('torch.')}; both must have one dtype of "
                f"{accepted}. Cast one of them."
            )
        if weight.dim() != 2 or weight.shape[0] != self.n or weight.shape[1] != self.k:
            raise ShapeError(
                f"gemm: w has shape {tuple(weight.shape)}; the spec says (N, K) = "
                f"({self.n}, {self.k}). Pass the weight as nn.Linear stores it, (out, in)."
            )
        if weight.shape[1] > 1 and weight.stride(1) != 1:
            raise LayoutError(
                f"gemm: w has strides {weight.stride()}; K must be contiguous (stride 1). "
                "Call w.contiguous()."
            )

    def accumulate(self, x: Tensor, weight: Tensor, context: Context) -> Tensor:
        if weight.dtype == torch.int8:
            # Products of int8 summed over K <= 2^38 stay exact in float64, not in float32.
            return torch.mm(x.double(), weight.double().t()).float()
        if weight.dtype == torch.float32:
            return float_product(x, weight)
        return float_product(x.float(), weight.float())
