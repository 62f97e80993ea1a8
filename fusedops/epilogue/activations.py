"""Activation functions by name: the one place that defines their formulas.

Each formula is evaluated in the dtype of its input; callers that need float32 math cast first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
        hf_names: the names Hugging Face configs use for the same formula.
    """

    name: str
    formula: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor | float]
    hf_names: tuple[str, ...] = ()


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


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("identity", _identity, _at_most(1.0), ("linear",)),
        Activation("relu", F.relu, _at_most(1.0), ("relu",)),
        Activation("gelu", F.gelu, _at_most(1.13), ("gelu", "gelu_python")),
        Activation(
            "gelu_tanh",
            _gelu_tanh,
            _at_most(1.13),
            (
                "gelu_new",
                "gelu_pytorch_tanh",
                "gelu_python_tanh",
                "gelu_fast",
                "gelu_accurate",
            ),
        ),
        Activation("silu", F.silu, _at_most(1.1), ("silu", "swish")),
        Activation("quick_gelu", _quick_gelu, _at_most(1.1), ("quick_gelu",)),
        Activation("relu2", _relu2, lambda magnitude: 2.0 * magnitude, ("relu2",)),
        Activation("sigmoid", torch.sigmoid, _at_most(0.25), ("sigmoid",)),
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
    found = ACTIVATIONS.get(name)
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
