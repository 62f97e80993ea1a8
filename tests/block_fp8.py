"""The format of e4m3 blocks, as far as the kernels and their tests need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.epilogue.base import Context, Operand
from fusedops.weight import Dense

BLOCK = 128


@dataclass(frozen=True)
class Matrix(Operand):
    """An operand of one given shape."""

    shape: tuple[int, ...] = ()

    def accepted_shapes(
        self, m_shape: tuple[int, ...], m: int, n: int, k: int
    ) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)


@dataclass(frozen=True)
class BlockFp8(Dense):
    """e4m3 (N, K) with a float32 scale for 128 x 128 elements; x has one for 1 x 128."""

    spec_name: ClassVar[str] = "block_fp8"

    def operands(self) -> tuple[Operand, ...]:
        blocks = (-(-self.n // BLOCK), -(-self.k // BLOCK))
        return (Operand("x_scale", "parts_m"), Matrix("w_scale", "parts_m", shape=blocks))

    def accumulate(self, x: Tensor, weight: Tensor, context: Context) -> Tensor:
        one = torch.zeros((), device=x.device)
        x_scale, w_scale = context.read("x_scale", one), context.read("w_scale", one)
        rows = x.float() * x_scale.t().repeat_interleave(BLOCK, 1)[:, : self.k]
        blocks = w_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return rows @ (weight.float() * blocks[: self.n, : self.k]).t()
