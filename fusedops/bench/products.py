"""Peers of a linear layer with its epilogue: what a user would otherwise run.

A layer is ``activation(x @ w.T + bias) + residual``, or with a gate ``activation(gate) * up`` over
a weight that stacks gate rows on up rows. Buffers hold the inputs (x, w, bias?, residual?) and one
output. Each peer fuses what it can and runs the rest as separate torch operations, as its users do.

``MODELS`` holds the sizes of the models whose layers are measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.cublaslt import LtMatmul
from fusedops.bench.data import Buffers
from fusedops.bench.oracles import relative_error
from fusedops.bench.peers import Available, Check, fresh_compile, peer_status
from fusedops.bench.ranking import best_algorithm
from fusedops.check import require_choice
from fusedops.packing import pack_gate_up

__all__ = [
    "ACTIVATIONS",
    "CUBLASLT",
    "MODELS",
    "PRODUCTS",
    "Layer",
    "LtFusion",
    "ModelShape",
    "cublas_peers",
    "lt_fusion",
    "make_layer_buffers",
    "product_peers",
    "quack_peers",
]

CUBLASLT = "cublaslt best of 8"
"""The contender that runs cuBLASLt's best algorithm."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_QUACK_ACTIVATIONS = {"": None, "relu": "relu", "silu": "silu", "gelu_tanh": "gelu_tanh_approx"}
_QUACK_GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}

# tile_m, tile_n, ping-pong, cluster_m, cluster_n, swapped operands (weights on the MMA's row side).
_QUACK_CONFIGS = (
    (128, 128, True, 2, 1, False),
    (128, 160, True, 2, 1, False),
    (128, 192, True, 2, 1, False),
    (128, 256, False, 2, 1, False),
    (256, 128, False, 2, 1, False),
    (256, 192, False, 1, 2, False),
    (128, 128, True, 1, 2, True),
    (128, 128, True, 2, 1, True),
    (256, 128, False, 2, 1, True),
)


@dataclass(frozen=True)
class Layer:
    """A linear layer and what follows it.

    Attributes:
        M: rows of x.
        N: rows of the weight (gate and up rows together behind a gate).
        K: columns of x and of the weight.
        bias: whether a bias (N,) is added.
        activation: a key of ``ACTIVATIONS``.
        gated: ``activation(first half) * second half``; the output has N / 2 columns.
        residual: whether a residual of the output's shape is added last.
        dtype: of everything.

    Raises:
        ConfigError: an unknown activation.
    """

    M: int
    N: int
    K: int
    bias: bool = False
    activation: str = ""
    gated: bool = False
    residual: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require_choice("Layer", "activation", self.activation, tuple(ACTIVATIONS))

    @property
    def columns_out(self) -> int:
        """Columns of the output."""
        return self.N // 2 if self.gated else self.N

    @property
    def chain_text(self) -> str:
        """The epilogue chain as ``fusedops.gemm`` takes it."""
        steps = ["bias"] if self.bias else []
        if self.gated:
            steps.append(f"gate({self.activation})")
        elif self.activation:
            steps.append(f"act({self.activation})")
        if self.residual:
            steps.append("residual")
        return "|".join(steps) or "none"

    @property
    def aligned_bytes(self) -> int:
        """``GemmProblem.aligned_bytes`` of x and the weight as ``make_layer_buffers`` makes them.

        torch allocates them at multiples of more, so their dense rows of K elements decide.
        """
        bits = 16 | self.K * self.dtype.itemsize
        return bits & -bits

    def packed(self, tensor: Tensor) -> Tensor:
        """A weight or bias in the order in which our kernels read it: rows paired behind a gate."""
        if not self.gated:
            return tensor
        half = self.N // 2
        return pack_gate_up(tensor[:half], tensor[half:])

    def epilogue(self, product: Tensor, residual: Tensor | None) -> Tensor:
        """What follows ``x @ w.T + bias``, as separate torch operations in the tensor's dtype."""
        activation = ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = product.chunk(2, dim=-1)
            product = activation(gate) * up
        else:
            product = activation(product)
        return product if residual is None else product + residual

    def operands(self, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, w, bias or None, residual or None."""
        x, w, *rest = buffers.inputs
        bias = rest.pop(0) if self.bias else None
        return x, w, bias, rest.pop(0) if self.residual else None

    def reference(self, buffers: Buffers) -> Tensor:
        """The layer in float64 (slow; for checks)."""
        x, w, bias, residual = self.operands(buffers)
        product = x.double() @ w.double().T
        if bias is not None:
            product += bias.double()
        return self.epilogue(product, None if residual is None else residual.double())

    def verdict(self, result: Tensor, reference: Tensor) -> str | None:
        """What is wrong with a result, given the layer's in float64, or None."""
        error = relative_error(result, reference)
        # Peers' separate epilogues round two or three times; each costs at most half a unit.
        allowed = torch.finfo(self.dtype).eps
        return None if error <= allowed else f"relative error {error:.3g}, allowed {allowed:.3g}"


PRODUCTS = ("qkv_bias", "o_residual", "gate_up_swiglu", "down_residual", "lm_head")
"""The products of a decoder, each with its epilogue, in the order of a step."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder's linear layers.

    Attributes:
        hidden: columns of the residual stream.
        query: query heads times their width.
        kv: key/value heads times their width.
        intermediate: columns behind the gate.
        vocabulary: rows of the head.
        layers: decoder layers.
    """

    hidden: int
    query: int
    kv: int
    intermediate: int
    vocabulary: int
    layers: int

    def layer(self, product: str, M: int) -> Layer:
        """One of ``PRODUCTS`` at M rows.

        Raises:
            ConfigError: an unknown product.
        """
        require_choice("ModelShape.layer", "product", product, PRODUCTS)
        if product == "qkv_bias":
            return Layer(M, self.query + 2 * self.kv, self.hidden, bias=True)
        if product == "o_residual":
            return Layer(M, self.hidden, self.query, residual=True)
        if product == "gate_up_swiglu":
            return Layer(M, 2 * self.intermediate, self.hidden, activation="silu", gated=True)
        if product == "down_residual":
            return Layer(M, self.hidden, self.intermediate, residual=True)
        return Layer(M, self.vocabulary, self.hidden)


MODELS = {
    "llama3-8b": ModelShape(4096, 4096, 1024, 14336, 128256, 32),
    "llama3.2-1b": ModelShape(2048, 2048, 512, 8192, 128256, 16),
    "qwen2.5-7b": ModelShape(3584, 3584, 512, 18944, 152064, 28),
    # One rank's share of tensor parallelism over 8 GPUs.
    "llama3-70b-tp8": ModelShape(8192, 1024, 128, 3584, 16032, 80),
}
"""Sizes from each model's config.json, by the names that ``serving_demo`` gives them."""


def make_layer_buffers(layer: Layer, generator: torch.Generator) -> Buffers:
    """Random inputs of a layer, scaled so that the product has unit variance, and its output."""
    device = generator.device

    def normal(*shape: int) -> Tensor:
        drawn = torch.empty(shape, dtype=layer.dtype, device=device)
        return drawn.normal_(generator=generator)

    inputs = [normal(layer.M, layer.K), normal(layer.N, layer.K).mul_(layer.K**-0.5)]
    if layer.bias:
        inputs.append(normal(layer.N))
    if layer.residual:
        inputs.append(normal(layer.M, layer.columns_out))
    return Buffers(
        tuple(inputs), (torch.empty(layer.M, layer.columns_out, dtype=layer.dtype, device=device),)
    )


def _torch_run(layer: Layer) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return layer.epilogue(F.linear(x, w, bias), residual)

    return run


@dataclass(frozen=True)
class LtFusion:
    """How much of a layer cuBLASLt does in its product.

    Attributes:
        epilogue: its name for the epilogue.
        activation: whether the activation is in it.
        residual: whether the residual is; its addend comes before the activation, so only where
            there is none.
        whole: nothing is left to do.
    """

    epilogue: str
    activation: bool
    residual: bool
    whole: bool


def lt_fusion(layer: Layer) -> LtFusion:
    """The fusion of a layer that cuBLASLt is capable of."""
    activation = not layer.gated and layer.activation in ("", "relu", "gelu_tanh")
    residual = layer.residual and not layer.gated and not layer.activation
    words = ["bias"] if layer.bias else []
    if activation and layer.activation:
        words.append(layer.activation)
    whole = activation and residual == layer.residual
    return LtFusion("|".join(words), activation, residual, whole)


def _cublaslt(layer: Layer, check: Check) -> Contender:
    """cuBLASLt's best algorithm with as much of the epilogue as it has."""
    fusion = lt_fusion(layer)

    def prepare(buffers: Buffers) -> Any:
        x, w, bias, residual = layer.operands(buffers)
        out = buffers.outputs[0]
        if not fusion.whole:
            out = torch.empty(layer.M, layer.N, dtype=layer.dtype, device=x.device)
        addend = residual if fusion.residual else None
        plan = LtMatmul(x, w, out, fusion.epilogue, addend)
        algorithm = best_algorithm(plan, x.device).algorithm
        return plan, algorithm, (x, w, out, bias, addend), residual

    def run(state: Any) -> Tensor:
        plan, algorithm, arguments, residual = state
        plan.run(algorithm, *arguments)
        out: Tensor = arguments[2]
        if fusion.whole:
            return out
        return out + residual if fusion.activation else layer.epilogue(out, residual)

    return Contender(CUBLASLT, run, check, prepare=prepare)


def quack_peers(layer: Layer, check: Check, limit: int = len(_QUACK_CONFIGS)) -> list[Contender]:
    """One contender a configuration; the best of them is QuACK's row.

    QuACK must be installed (``peer_status``). The list is empty where it lacks the activation.
    """
    interface = importlib.import_module("quack.gemm_interface")
    config_class = importlib.import_module("quack.gemm_config").GemmConfig
    names = _QUACK_GATES if layer.gated else _QUACK_ACTIVATIONS
    if layer.activation not in names:
        return []
    activation = names[layer.activation]

    def prepare(buffers: Buffers) -> Any:
        x, w, bias, residual = layer.operands(buffers)
        if layer.gated:
            # QuACK pairs neighbouring rows: gate 0, up 0, gate 1, up 1, ...
            w = torch.stack(w.chunk(2), dim=1).flatten(0, 1).contiguous()
            bias = None if bias is None else torch.stack(bias.chunk(2), dim=1).flatten()
        return x, w.T, bias, residual, buffers.outputs[0]

    def contender(fields: tuple[int, int, bool, int, int, bool]) -> Contender:
        tile_m, tile_n, pingpong, cluster_m, cluster_n, swapped = fields
        config = config_class(
            tile_m=tile_m,
            tile_n=tile_n,
            pingpong=pingpong,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
            swap_ab=swapped,
            is_dynamic_persistent=False,
        )

        def run(state: Any) -> Tensor:
            x, w, bias, residual = state[:4]
            out: Tensor = state[4]
            if activation is None:
                interface.gemm_tuned.fn(x, w, out, C=residual, bias=bias, config=config)
                return out
            interface.gemm_act(
                x,
                w,
                bias=bias,
                activation=activation,
                postact_out=out,
                store_preact=False,
                config=config,
            )
            return out if residual is None else out + residual

        shape = f"{tile_m}x{tile_n} {'pingpong' if pingpong else 'cooperative'}"
        name = f"quack {shape} {cluster_m}x{cluster_n}{' swapped' if swapped else ''}"
        return Contender(name, run, check, prepare=prepare)

    # With a gate, QuACK has no swapped form and wants tiles in multiples of 32 columns.
    legal = [fields for fields in _QUACK_CONFIGS if not (layer.gated and fields[5])]
    return [contender(fields) for fields in legal[:limit]]


def cublas_peers(layer: Layer, check: Check) -> list[Contender]:
    """``torch``, and ``cublaslt best of 8`` where there is one."""
    plain = _torch_run(layer)
    found = [Contender("torch", lambda b: plain(*layer.operands(b)), check)]
    if isinstance(peer_status(["cublaslt"])["cublaslt"], Available):
        found.append(_cublaslt(layer, check))
    return found


def product_peers(
    layer: Layer, check: Check, *, quack_configs: int = len(_QUACK_CONFIGS)
) -> list[Contender]:
    """Every available peer of a layer, each checked by ``check``.

    Args:
        layer: shapes and epilogue; buffers are those of ``make_layer_buffers``.
        check: judges a result against the buffers it came from.
        quack_configs: how many of QuACK's configurations to try (each compiles for seconds).

    Returns:
        contenders named ``torch``, ``torch.compile``, ``cublaslt best of 8`` and ``quack ...``.
        ``peer_status()`` says why one is missing.
    """
    status = peer_status(["torch.compile", "quack"])
    found = cublas_peers(layer, check)
    if isinstance(status["torch.compile"], Available):
        function = fresh_compile(_torch_run(layer))
        found.insert(1, Contender("torch.compile", lambda b: function(*layer.operands(b)), check))
    if quack_configs and isinstance(status["quack"], Available):
        found += quack_peers(layer, check, quack_configs)
    return found
