"""Activation functions by name: the one place that defines their formulas.

Each formula is evaluated in the dtype of its input; callers that need float32 math cast first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt

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


def _emit_sigmoid(math: KernelMath, v: Value) -> Value:
    return math.fast_reciprocal(1.0 + math.exp(-v))


def _emit_gelu(math: KernelMath, v: Value) -> Value:
    half = 0.5 * v
    return half + half * math.erf(v * sqrt(0.5))


def _emit_gelu_tanh(math: KernelMath, v: Value) -> Value:
    # (1 + tanh(u)) / 2 is the sigmoid of 2u: one exponential instead of a tanh.
    twice = (2.0 * sqrt(2.0 / pi)) * (v + 0.044715 * (v * v * v))
    return v * _emit_sigmoid(math, twice)


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
            lambda math, v: v * _emit_sigmoid(math, 1.702 * v),
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
