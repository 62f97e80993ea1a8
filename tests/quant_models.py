"""Models whose quantized layers are computed in float64 from exactly dequantized weights.

Written apart from the library's products and quantization: a converted model's own code differs
from them by float32 sums alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from hf_models import with_parameters_cast
from torch import Tensor, nn

from fusedops.nn import QuantGatedMLP, QuantLinear, QuantMLP
from fusedops.packing import unpack_gate_up
from fusedops.quant import Scheme


def _rounded(values: Tensor, largest: float) -> Tensor:
    """To e4m3's or int8's nearest, half to even, in float64."""
    if largest == 127.0:
        return values.round().clamp(-127, 127)
    exponent = values.abs().clamp(min=2.0**-6).log2().floor()
    step = 2.0 ** (exponent - 3)  # four digits of precision; denormals below 2^-6
    return ((values / step).round() * step).clamp(-largest, largest)


def seen(x: Tensor, scheme: Scheme) -> Tensor:
    """x as a layer of ``scheme`` sees it, float64."""
    values = x.double()
    if scheme.activation is None:
        return values
    largest = 448.0 if scheme.activation == "e4m3" else 127.0
    groups = values.split(128, dim=-1) if scheme.granularity == "block128" else (values,)
    parts = []
    for group in groups:
        dims = None if scheme.granularity == "tensor" else -1
        absmax = group.abs().amax() if dims is None else group.abs().amax(-1, keepdim=True)
        # The operation's own steps, each rounded to float32: values of 16 bits often lie on a tie
        # between two neighbours, which other steps would decide otherwise.
        scale = absmax.float() / torch.tensor(largest)
        scale = torch.where(absmax == 0, torch.ones_like(scale), scale)
        steps = (group.float() * (1 / scale)).double()
        parts.append(_rounded(steps, largest) * scale.double())
    return torch.cat(parts, -1)


class ExactLinear(nn.Module):
    """A layer's product in float64, rounded once to the dtype of x."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.scheme = layer.scheme
        self.values = layer.quantized().dequantize().double()
        self.shift = None if layer.bias is None else layer.bias.double()

    def product(self, x: Tensor) -> Tensor:
        y = seen(x, self.scheme) @ self.values.t()
        return y if self.shift is None else y + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x).to(x.dtype)


class ExactMLP(nn.Module):
    """A feed-forward block: rounded between its products, unless it is quantized there in one."""

    def __init__(self, block: QuantGatedMLP | QuantMLP) -> None:
        super().__init__()
        first = block.gate_up if isinstance(block, QuantGatedMLP) else block.up
        self.first, self.down = ExactLinear(first), ExactLinear(block.down)
        self.gate, self.activation = first.gate, first.activation
        self.intermediate = first.out_features // (2 if first.gate else 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first.product(x)
        functions = {"silu": F.silu, "gelu": F.gelu}
        if self.gate is not None:
            gate, up = unpack_gate_up(y.flatten(0, -2).t(), self.intermediate)
            y = (functions[self.gate](gate) * up).t().unflatten(0, x.shape[:-1])
        else:
            y = functions[str(self.activation)](y)
        if self.down.scheme.granularity != "block128":
            y = y.to(x.dtype)
        return self.down.product(y).to(x.dtype)


def exact_model(converted: Any) -> Any:
    """A copy of a converted model whose quantized parts are the exact ones."""
    model = copy.deepcopy(converted)
    for path, module in list(converted.named_modules()):
        parent, _, name = path.rpartition(".")
        if isinstance(module, (QuantGatedMLP, QuantMLP)):
            setattr(model.get_submodule(parent), name, ExactMLP(module))
        elif isinstance(module, QuantLinear) and not isinstance(
            converted.get_submodule(parent), (QuantGatedMLP, QuantMLP)
        ):
            setattr(model.get_submodule(parent), name, ExactLinear(module))
    return model


@torch.no_grad()
def kl_divergence(p_model: Any, q_model: Any, ids: Tensor) -> float:
    """Mean KL(p || q) in nats of the next-token distributions, in float64."""
    p, q = (F.log_softmax(m(ids).logits.double(), -1) for m in (p_model, q_model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def wide(model: Any) -> Any:
    """The model with float32 parameters, exactly the values that it has."""
    return with_parameters_cast(model, torch.float32)
