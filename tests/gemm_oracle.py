"""Float64 formulas of the epilogue nodes, written apart from the library (numpy, math.erf).

Each takes the accumulator and named operands as numpy arrays and returns the node's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATION_FORMULAS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda v: v,
    "relu": lambda v: np.where(v > 0, v, 0.0),
    "gelu": lambda v: v * (1 + _erf(v / math.sqrt(2))) / 2,
    "gelu_tanh": lambda v: v / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "silu": lambda v: v / (1 + np.exp(-v)),
    "quick_gelu": lambda v: v / (1 + np.exp(-1.702 * v)),
    "relu2": lambda v: np.where(v > 0, v, 0.0) ** 2,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
}


def gate_columns(width: int) -> tuple[list[int], list[int]]:
    """Column numbers of the gate and of the up half in a packed accumulator, by plain counting."""
    gate = [c for c in range(width) if (c // 8) % 2 == 0]
    up = [c for c in range(width) if (c // 8) % 2 == 1]
    return gate, up


def apply_chain(text: str, accumulator: Array, operands: Mapping[str, Array]) -> Array:
    """The chain ``text`` on ``accumulator`` (M, N) in float64, before the final rounding."""
    value = accumulator
    for part in text.split("|"):
        name, _, rest = part.partition("(")
        args = rest.rstrip(")").split(",") if rest else []
        match name:
            case "none" | "tap" | "row_stat":
                pass
            case "scale":
                scale = operands[args[0] if args else "scale"]
                axis = args[1] if len(args) > 1 else "scalar"
                value = value * (scale.reshape(-1, 1) if axis == "m" else scale.reshape(-1))
            case "bias":
                value = value + operands[args[0] if args else "bias"].reshape(1, -1)
            case "act":
                value = ACTIVATION_FORMULAS[args[0] if args else "identity"](value)
            case "gate":
                gate, up = gate_columns(value.shape[1])
                function = ACTIVATION_FORMULAS[args[0] if args else "silu"]
                value = function(value[:, gate]) * value[:, up]
            case "residual":
                beta = float(args[0]) if args else 1.0
                value = value + beta * operands["residual"].reshape(value.shape)
            case "softcap":
                cap = float(args[0]) if args else 30.0
                value = cap * np.tanh(value / cap)
            case "quantize":
                scale = operands["out_scale"]
                value = value / (scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(()))
            case _:
                raise AssertionError(f"the oracle has no formula for {part}")
    return value


def to_numpy(tensor: torch.Tensor) -> Array:
    """A float64 copy of any tensor, exact."""
    return tensor.detach().to(torch.float64).numpy()
