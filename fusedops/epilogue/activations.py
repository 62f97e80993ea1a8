"""Activation functions by name: the one place that defines their formulas.

Each formula is evaluated in the dtype of its input; callers that need float32 math cast first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import e, log2, pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.epilogue.emit import KernelMath, Value
from fusedops.errors import ConfigError

__all__ = ["ACTIVATIONS", "Activation", "activation", "activation_from_hf", "lookup"]


@dataclass(frozen=True)
class Activation:
    """An activation function.

    Attributes:
        name: its name in specs.
        formula: the function on a tensor.
        slope: the largest |f'| over inputs of at most the given magnitude, which carries an error
            bound from the input to the output.
        emit: the formula on one float32 value inside a kernel.
        hf_names: the names Hugging Face configs use for the same formula.
    """

    name: str
    formula: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor | float]
    emit: Callable[[KernelMath, Value], Value]
    hf_names: tuple[str, ...] = ()


def _gelu(x: Tensor) -> Tensor:
    y = F.gelu(x)
    # torch's vectorised form on CPUs gives NaN at infinity and infinity above 1e38. From 10 on the
    # result is x: what is missing is less than half a unit of float64.
    return y if x.is_cuda else torch.where(x > 10.0, x, y)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _at_most(bound: float) -> Callable[[Tensor], float]:
    return lambda magnitude: bound


def _identity(x: Tensor) -> Tensor:
    return x


def _emit_sigmoid(math: KernelMath, v: Value, slope: float = 1.0) -> Value:
    """1 / (1 + exp(-slope v)); the slope costs nothing."""
    return math.fast_reciprocal(1.0 + math.exp2((-slope * log2(e)) * v))


_ERFC_SCALE = 0.3275911
_ERFC_TERMS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""erfc(z) = (a1 t + ... + a5 t^5) exp(-z^2) with t = 1 / (1 + p z), to 1.5e-7 for z >= 0 (Hastings;
Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26)."""


def _emit_gelu(math: KernelMath, v: Value) -> Value:
    # 13 instructions a value, where the library's erf takes 23.
    size = math.absolute(v)
    t = math.fast_reciprocal((_ERFC_SCALE * sqrt(0.5)) * size + 1.0)
    series = 0.5 * _ERFC_TERMS[-1]
    for term in _ERFC_TERMS[-2::-1]:
        series = series * t + 0.5 * term
    # Half of erf(|v| / sqrt 2); it is 1/2 at infinity, and the sum below infinity or NaN.
    half_erf = 0.5 - (series * t) * math.exp2((-0.5 * log2(e)) * v * v)
    return 0.5 * v + size * half_erf


def _emit_gelu_tanh(math: KernelMath, v: Value) -> Value:
    # (1 + tanh(u)) / 2 is the sigmoid of 2u: one exponential instead of a tanh.
    argument = v * (0.044715 * (v * v) + 1.0)
    return v * _emit_sigmoid(math, argument, 2.0 * sqrt(2.0 / pi))


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("identity", _identity, _at_most(1.0), lambda math, v: v, ("linear",)),
        Activation("relu", F.relu, _at_most(1.0), lambda math, v: math.maximum(v, 0.0), ("relu",)),
        Activation("gelu", _gelu, _at_most(1.13), _emit_gelu, ("gelu", "gelu_python")),
        Activation(
            "gelu_tanh",
            _gelu_tanh,
            _at_most(1.13),
            _emit_gelu_tanh,
            (
                "gelu_new",
                "gelu_pytorch_tanh",
                "gelu_python_tanh",
                "gelu_fast",
                "gelu_accurate",
            ),
        ),
        Activation(
            "silu",
            F.silu,
            _at_most(1.1),
            lambda math, v: v * _emit_sigmoid(math, v),
            ("silu", "swish"),
        ),
        Activation(
            "quick_gelu",
            _quick_gelu,
            _at_most(1.1),
            lambda math, v: v * _emit_sigmoid(math, v, 1.702),
            ("quick_gelu",),
        ),
        Activation(
            "relu2",
            _relu2,
            lambda magnitude: 2.0 * magnitude,
            lambda math, v: math.maximum(v, 0.0) * math.maximum(v, 0.0),
            ("relu2",),
        ),
        Activation("sigmoid", torch.sigmoid, _at_most(0.25), _emit_sigmoid, ("sigmoid",)),
    )
}


def activation(name: str, x: Tensor) -> Tensor:
    """Apply the activation called ``name``, in the dtype of ``x``.

    Raises:
        ConfigError: no activation has that name.
    """
    return lookup(name).formula(x)


def lookup(name: str) -> Activation:
    """The activation called ``name``.

    Raises:
        ConfigError: no activation has that name.
    """
    found = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"unknown activation {name!r}; accepted are {', '.join(ACTIVATIONS)}"
            " (fusedops.epilogue.activation_from_hf() maps Hugging Face's names)."
        )
    return found


def activation_from_hf(hf_name: str) -> str:
    """Our name for an activation as named in a Hugging Face config (``hidden_act``).

    Raises:
        ConfigError: the name is not known; the message lists those that are.
    """
    for candidate in ACTIVATIONS.values():
        if hf_name in candidate.hf_names:
            return candidate.name
    known = sorted(name for a in ACTIVATIONS.values() for name in a.hf_names)
    raise ConfigError(
        f"unknown Hugging Face activation {hf_name!r}; accepted are {', '.join(known)}."
    )
