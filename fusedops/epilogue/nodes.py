"""The epilogue nodes: every fused step that a GEMM's result can go through.

Adding one is adding one class here (or in a user's own module): see CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.epilogue.activations import lookup
from fusedops.epilogue.base import (
    FLOAT32_ROUNDOFF,
    FLOAT_DTYPES,
    Axis,
    Context,
    Node,
    Operand,
)
from fusedops.epilogue.emit import KernelTile
from fusedops.errors import ConfigError, ShapeError

__all__ = [
    "Act",
    "Bias",
    "Gate",
    "Residual",
    "Scale",
    "SoftCap",
    "scale_axis",
]

_SCALE_AXES: dict[str, Axis] = {"scalar": "scalar", "m": "m", "n": "n"}
PACK = 8
"""Rows per block of an interleaved pair (gate/up, rotation partners), see fusedops.packing."""


def scale_axis(node: str, axis: str) -> Axis:
    """``axis`` of a scale, checked; ConfigError names the node and what is accepted."""
    if axis not in _SCALE_AXES:
        raise ConfigError(f"{node}: axis {axis!r}; accepted are {', '.join(_SCALE_AXES)}.")
    return _SCALE_AXES[axis]


@dataclass(frozen=True)
class Scale(Node):
    """Multiply by a float32 scale: one for all (``scalar``), a row (``m``) or a column (``n``)."""

    spec_name: ClassVar[str] = "scale"
    operand: str = "scale"
    axis: str = "scalar"

    def __post_init__(self) -> None:
        if self.operand in _SCALE_AXES:
            raise ConfigError(
                f"scale: {self.operand!r} is an axis, and the operand's name stands before it; "
                f"write scale(scale,{self.operand})."
            )
        scale_axis(self.spec_name, self.axis)

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.operand, scale_axis(self.spec_name, self.axis)),)

    def reference(self, value: Tensor, context: Context) -> Tensor:
        return value * context.read(self.operand, value)

    def emit(self, tile: KernelTile) -> KernelTile:
        return tile.combine(self.operand, lambda value, scale: value * scale)

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        scale = context.read(self.operand, value).abs()
        return scale * (error + (value.abs() + error) * FLOAT32_ROUNDOFF)


@dataclass(frozen=True)
class Bias(Node):
    """Add a bias of shape (N,) or (1, N)."""

    spec_name: ClassVar[str] = "bias"
    operand: str = "bias"

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.operand, "n", FLOAT_DTYPES),)

    def reference(self, value: Tensor, context: Context) -> Tensor:
        return value + context.read(self.operand, value)

    def emit(self, tile: KernelTile) -> KernelTile:
        return tile.combine(self.operand, lambda value, bias: value + bias)

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        total = (value + context.read(self.operand, value)).abs()
        return error + (total + error) * FLOAT32_ROUNDOFF


@dataclass(frozen=True)
class Act(Node):
    """Apply an activation of ``fusedops.epilogue.activations``."""

    spec_name: ClassVar[str] = "act"
    function: str = "identity"

    def __post_init__(self) -> None:
        lookup(self.function)

    def reference(self, value: Tensor, context: Context) -> Tensor:
        return lookup(self.function).formula(value)

    def emit(self, tile: KernelTile) -> KernelTile:
        function = lookup(self.function).emit
        return tile.map(lambda value: function(tile.math, value))

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        return activation_bound(self.function, value, error)


def activation_bound(function: str, value: Tensor, error: Tensor) -> Tensor:
    """Error bound of an activation in float32.

    The exponential and the division behind it cost about 8 rounding errors relative to the input's
    magnitude (bounded by it: |f(x)| <= |x| or <= 1 for every activation but relu2).
    """
    act = lookup(function)
    reach = value.abs() + error
    magnitude = torch.maximum(act.formula(value).abs(), reach.clamp(max=1.0))
    return act.slope(reach) * error + 8 * FLOAT32_ROUNDOFF * (magnitude + error)


@dataclass(frozen=True)
class Gate(Node):
    """Gated linear unit over a packed weight: ``act(gate) * up`` (SwiGLU, GeGLU, ReGLU).

    The N columns alternate in blocks of 8: eight gate columns, then their eight up columns
    (``fusedops.packing.pack_gate_up``), so that both halves of a pair sit in one thread of a wgmma
    accumulator. Halves N. Source: N. Shazeer, GLU Variants Improve Transformer, 2020.
    """

    spec_name: ClassVar[str] = "gate"
    function: str = "silu"

    def __post_init__(self) -> None:
        lookup(self.function)

    def width(self, n: int) -> int:
        if n % (2 * PACK):
            raise ShapeError(
                f"gate: N={n} must be a multiple of {2 * PACK}: blocks of {PACK} gate columns and "
                f"{PACK} up columns; fusedops.packing.pack_gate_up() pads and packs a weight."
            )
        return n // 2

    @staticmethod
    def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
        pairs = value.reshape(value.shape[0], value.shape[1] // (2 * PACK), 2, PACK)
        gate, up = pairs.unbind(2)
        return gate, up

    def reference(self, value: Tensor, context: Context) -> Tensor:
        gate, up = self._halves(value)
        # An activation over strips of 8 columns takes three times as long as one over a copy.
        return (lookup(self.function).formula(gate.contiguous()) * up).flatten(1)

    def emit(self, tile: KernelTile) -> KernelTile:
        function = lookup(self.function).emit
        return tile.combine_pairs(lambda gate, up: function(tile.math, gate) * up)

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        gate, up = self._halves(value)
        gate_error, up_error = self._halves(error)
        activated = lookup(self.function).formula(gate).abs()
        activated_error = activation_bound(self.function, gate, gate_error)
        reach = (activated + activated_error) * (up.abs() + up_error)
        product = activated_error * (up.abs() + up_error) + activated * up_error
        return (product + reach * FLOAT32_ROUNDOFF).flatten(1)


@dataclass(frozen=True)
class Residual(Node):
    """Add ``beta`` times a residual of the output's shape."""

    spec_name: ClassVar[str] = "residual"
    beta: float = 1.0
    operand: str = "residual"

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.operand, "mn", FLOAT_DTYPES),)

    def reference(self, value: Tensor, context: Context) -> Tensor:
        residual = context.read(self.operand, value)
        return value + residual if self.beta == 1.0 else value + self.beta * residual

    def emit(self, tile: KernelTile) -> KernelTile:
        if self.beta == 1.0:
            return tile.combine(self.operand, lambda value, residual: value + residual)
        return tile.combine(self.operand, lambda value, residual: value + self.beta * residual)

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        term = (self.beta * context.read(self.operand, value)).abs()
        return error + (value.abs() + error + 2 * term) * FLOAT32_ROUNDOFF


@dataclass(frozen=True)
class SoftCap(Node):
    """``cap * tanh(value / cap)``, the logit soft cap of Gemma 2."""

    spec_name: ClassVar[str] = "softcap"
    cap: float = 30.0

    def __post_init__(self) -> None:
        # The kernels multiply by 1 / cap, which must be a normal float32 too.
        if not 2.0**-126 <= self.cap <= 2.0**126:
            raise ConfigError(
                f"softcap: cap={self.cap} must be positive: accepted are 2**-126 to 2**126."
            )

    def reference(self, value: Tensor, context: Context) -> Tensor:
        return self.cap * torch.tanh(value / self.cap)

    def emit(self, tile: KernelTile) -> KernelTile:
        return tile.map(lambda value: self.cap * tile.math.tanh(value * (1.0 / self.cap)))

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        # |tanh'| <= 1; division, tanh (4 units) and product round once each.
        return error + 6 * FLOAT32_ROUNDOFF * (value.abs() + error).clamp(max=self.cap)
