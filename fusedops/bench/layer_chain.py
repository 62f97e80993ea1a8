"""A linear layer in a dependent chain: the chain, its check, and the peers that run in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.chain import ChainContender, ChainSpec, DependentChain, gain_for
from fusedops.bench.cublaslt import LtMatmul
from fusedops.bench.data import Buffers
from fusedops.bench.peers import Available, peer_status
from fusedops.bench.products import ACTIVATIONS, CUBLASLT, Layer, lt_fusion
from fusedops.bench.ranking import best_algorithm

__all__ = ["LayerChain"]

_SAMPLES = 1 << 15
_TERM_STD = 0.5
"""Standard deviation of bias and residual, which leaves room for the product in a unit variance."""


class LayerChain:
    """A layer's dependent chain with fixed bias and residual, and unit variance throughout.

    Args:
        layer: shapes and epilogue.
        device: where it runs.
        weight_bytes: bytes of one weight as a quantized contender stores it; see ``ChainSpec``.

    Attributes:
        layer: as given.
        chain: buffers and weights; a contender packs ``chain.weights`` as it likes.
        bias: (N,) or None.
        residual: (M, columns_out) or None.
    """

    def __init__(
        self, layer: Layer, device: torch.device | str, weight_bytes: int | None = None
    ) -> None:
        self.layer = layer
        generator = torch.Generator(device=device).manual_seed(1)

        def term(wanted: bool, *shape: int) -> Tensor | None:
            if not wanted:
                return None
            drawn = torch.empty(shape, dtype=layer.dtype, device=device)
            return drawn.normal_(std=_TERM_STD, generator=generator)

        self.bias = term(layer.bias, layer.N)
        self.residual = term(layer.residual, layer.M, layer.columns_out)
        spec = ChainSpec(
            layer.M,
            layer.N,
            layer.K,
            columns_out=layer.columns_out,
            dtype=layer.dtype,
            gain=_gain(layer),
            weight_bytes=weight_bytes,
            dependent_columns=_dependent_columns(layer),
        )
        self.chain = DependentChain(spec, device)

    def reference(self, x: Tensor, index: int) -> Tensor:
        """The layer on ``x`` with weight ``index``, in float64."""
        inputs = [x, self.chain.weights[index]]
        inputs += [term for term in (self.bias, self.residual) if term is not None]
        return self.layer.reference(Buffers(tuple(inputs)))

    def check(self, x: Tensor, index: int, out: Tensor) -> str | None:
        """What is wrong with one launch's output, or None."""
        return self.layer.verdict(out, self.reference(x, index))

    def contender(
        self, name: str, launch: Callable[[Tensor, int, Tensor], object], repeatable: bool = True
    ) -> ChainContender:
        """A contender with the layer's own check."""
        return ChainContender(name, launch, self.check, repeatable)

    def peers(self) -> list[ChainContender]:
        """torch, and cuBLASLt's best algorithm where there is one.

        Each fuses what it can and runs the rest of the epilogue as separate kernels.
        """
        found = [self.contender("torch", self._torch())]
        if isinstance(peer_status(["cublaslt"])["cublaslt"], Available):
            found.append(self.contender(CUBLASLT, self._cublaslt()))
        return found

    def _torch(self) -> Callable[[Tensor, int, Tensor], object]:
        layer, weights = self.layer, [weight.T for weight in self.chain.weights]
        bias, residual = self.bias, self.residual
        term = bias if residual is None else residual
        if layer.gated or layer.activation or (bias is not None and residual is not None):

            def separate(x: Tensor, index: int, out: Tensor) -> None:
                finish_into(layer, F.linear(x, weights[index].T, bias), residual, out)

            return separate
        if term is None:
            return lambda x, index, out: torch.mm(x, weights[index], out=out)
        return lambda x, index, out: torch.addmm(term, x, weights[index], out=out)

    def _cublaslt(self) -> Callable[[Tensor, int, Tensor], None]:
        layer, weights = self.layer, self.chain.weights
        fusion = lt_fusion(layer)
        x, _, out = self.chain.views(0)
        product = torch.empty(layer.M, layer.N, dtype=layer.dtype, device=x.device)
        addend = self.residual if fusion.residual else None
        left = None if fusion.residual else self.residual
        plan = LtMatmul(x, weights[0], out if fusion.whole else product, fusion.epilogue, addend)
        algorithm = best_algorithm(plan, x.device).algorithm

        def launch(x: Tensor, index: int, out: Tensor) -> None:
            target = out if fusion.whole else product
            plan.run(algorithm, x, weights[index], target, self.bias, addend)
            if not fusion.whole:
                finish_into(layer, product, left, out, activated=fusion.activation)

        return launch


_INTO: dict[str, Callable[[Tensor, Tensor], object]] = {
    "": lambda x, out: out.copy_(x),
    "relu": lambda x, out: torch.clamp_min(x, 0, out=out),
    "silu": lambda x, out: torch.ops.aten.silu.out(x, out=out),
    "gelu": lambda x, out: torch.ops.aten.gelu.out(x, out=out),
    "gelu_tanh": lambda x, out: torch.ops.aten.gelu.out(x, approximate="tanh", out=out),
}
"""The activations with a given output: a chain's result goes where the next launch reads it."""


def finish_into(
    layer: Layer, product: Tensor, residual: Tensor | None, out: Tensor, activated: bool = False
) -> None:
    """The layer's epilogue on ``product`` in as few torch kernels as it takes, written to ``out``.

    ``activated`` says that the product holds its activation already.
    """
    activation = ACTIVATIONS["" if activated else layer.activation]
    if layer.gated:
        gate, up = product.chunk(2, dim=-1)
        if residual is None:
            torch.mul(activation(gate), up, out=out)
        else:
            torch.add(activation(gate) * up, residual, out=out)
    elif residual is not None:
        torch.add(activation(product), residual, out=out)
    else:
        _INTO["" if activated else layer.activation](product, out)


def _dependent_columns(layer: Layer) -> int | None:
    """How much of x the previous launch writes; see ``ChainSpec.dependent_columns``."""
    if not layer.gated and layer.activation in ("", "relu"):
        return None
    return max(1, min(layer.K // 8, layer.columns_out))


def _gain(layer: Layer) -> float:
    """The weights' gain at which the layer returns unit variance on unit-variance input."""
    generator = torch.Generator().manual_seed(2)
    width = 2 if layer.gated else 1
    bias = torch.randn(_SAMPLES, width, generator=generator) * _TERM_STD
    residual = torch.randn(_SAMPLES, 1, generator=generator) * _TERM_STD

    def epilogue(product: Tensor) -> Tensor:
        product = product + bias if layer.bias else product
        return layer.epilogue(product, residual if layer.residual else None)[:, 0]

    return gain_for(epilogue, width, _SAMPLES)
