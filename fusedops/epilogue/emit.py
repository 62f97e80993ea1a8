"""What a node sees of the kernel it is traced into: float32 math and a tile of register values.

The kernels (``fusedops.cutlass``) implement these protocols; nodes only use them, so a node's
emission needs no import of the kernel language and works in every kernel and operand order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["KernelMath", "KernelTile", "Value"]

Value = Any
"""A float32 scalar of the kernel being traced; +, -, *, / and comparisons work on it."""


class KernelMath(Protocol):
    """float32 functions inside a kernel."""

    def exp(self, value: Value) -> Value:
        """e to the power of ``value``, to about 2 units in the last place for moderate values."""
        ...

    def exp2(self, value: Value) -> Value:
        """2 to the power of ``value``, likewise; 0 instead of results below 2^-126."""
        ...

    def erf(self, value: Value) -> Value:
        """The error function."""
        ...

    def tanh(self, value: Value) -> Value:
        """The hyperbolic tangent, accurate near zero too."""
        ...

    def reciprocal(self, value: Value) -> Value:
        """1 / value, correctly rounded."""
        ...

    def fast_reciprocal(self, value: Value) -> Value:
        """1 / value to one unit in the last place."""
        ...

    def maximum(self, left: Value, right: Value) -> Value:
        """The larger of two; NaN if either is."""
        ...

    def absolute(self, value: Value) -> Value:
        """The magnitude."""
        ...

    def where(self, condition: Any, value: Value, otherwise: Value) -> Value:
        """``value`` where the condition holds, else ``otherwise``; both are evaluated."""
        ...


class KernelTile(Protocol):
    """The values of an (M, N) tile that one thread holds, with their coordinates."""

    math: KernelMath

    def map(self, function: Callable[[Value], Value]) -> KernelTile:
        """Apply ``function`` to every value."""
        ...

    def combine(
        self,
        operand: str,
        function: Callable[[Value, Value], Value],
        prepare: Callable[[Value], Value] | None = None,
    ) -> KernelTile:
        """Apply ``function(value, operand)``; ``prepare`` runs once per loaded operand value."""
        ...

    def combine_pairs(self, function: Callable[[Value, Value], Value]) -> KernelTile:
        """Apply ``function(gate, up)`` to every interleaved pair; halves the columns."""
        ...

    def write(self, output: str, dtype: torch.dtype | None) -> None:
        """Store the values to the extra output of that name; None: the result's dtype."""
        ...

    def reduce_rows(self, output: str, function: Callable[[Value], Value], combine: str) -> None:
        """Reduce ``function`` of the values, rounded to the result's dtype, over the columns.

        ``combine`` is ``sum`` or ``max``; the partial results go to the extra output.
        """
        ...

    def scale_groups(
        self, output: str, columns: int, scale: Callable[[Value], Value]
    ) -> KernelTile:
        """Divide every group of ``columns`` columns of a row by a scale of its own.

        ``scale`` makes it of the group's largest magnitude (NaN if a value is); values are
        multiplied by its reciprocal. Scales go to the extra output at (group, row). Only tiles
        that hold whole groups can, see ``Node.group_columns``.
        """
        ...
