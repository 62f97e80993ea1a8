"""What a weight format states: how a GEMM's weight is stored, checked and multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.epilogue.base import Context, Operand
from fusedops.epilogue.spec import SpecItem
from fusedops.errors import ConfigError

__all__ = ["WeightFormat", "WeightOperand"]

ROWS_OF_X = -2
"""Stands for M in a ``WeightOperand``'s shapes."""


@dataclass(frozen=True)
class WeightOperand(Operand):
    """A tensor that belongs to a weight: scales or zero points, of a shape that its format states.

    Attributes:
        shapes: accepted shapes, ``ROWS_OF_X`` standing for M; all hold the same elements in the
            same order, and ``view`` gives the first of them.
    """

    axes: ClassVar[tuple[str, ...]] = ("weight", "groups_m")
    stated_by: ClassVar[str] = "the weight's format"
    shapes: tuple[tuple[int, ...], ...] = ()

    def accepted_shapes(
        self, m_shape: tuple[int, ...], m: int, n: int, k: int
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(m if s == ROWS_OF_X else s for s in shape) for shape in self.shapes)

    def view(self, tensor: Tensor, m: int, n: int) -> Tensor:
        first = self.accepted_shapes((), m, n, 0)[0]
        return tensor if tensor.shape == first else tensor.reshape(first)


@dataclass(frozen=True)
class WeightFormat(SpecItem):
    """A stored weight of N output rows and K input columns."""

    registry: ClassVar[dict[str, type[SpecItem]]] = {}
    kind: ClassVar[str] = "weight format"
    n: int = 0
    k: int = 0

    def __post_init__(self) -> None:
        if self.n < 0 or self.k < 0:
            raise ConfigError(f"{self}: N and K must not be negative.")

    def operands(self) -> tuple[Operand, ...]:
        """Tensors beside the weight itself (scales, zero points), in the order they are passed."""
        return ()

    def stored_bytes(self, x_dtype: torch.dtype) -> int:
        """Bytes of the weight and of what belongs to it, beside activations of ``x_dtype``."""
        raise NotImplementedError

    def check(self, x: Tensor, weight: Tensor) -> None:
        """Raise unless ``weight`` is stored in this format and can be multiplied with ``x``."""
        raise NotImplementedError

    def accumulate(self, x: Tensor, weight: Tensor, context: Context) -> Tensor:
        """x (M, K) times the weight, transposed: the float32 accumulator (M, N)."""
        raise NotImplementedError
