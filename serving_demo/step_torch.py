"""``PlainStep``: the same decode step as plain torch writes it, the peer of ``FusedStep``.

Written against torch alone, so that it is an oracle too: projections joined, one kernel or more for
everything else, a contiguous KV cache and a fixed position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serving_demo.config import ModelConfig
from serving_demo.model import DecoderModel
from serving_demo.step_model import StepBatch

__all__ = ["PlainStep", "PlainWeights"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class _Layer:
    """A layer's tensors as torch's functions take them."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_biases: tuple[Tensor | None, Tensor | None]


class PlainWeights:
    """The model's weights in torch's layout: shared with it, but for gate and up, which it packs.

    Args:
        model: the model whose step is repeated.
    """

    def __init__(self, model: DecoderModel) -> None:
        self.config: ModelConfig = model.config
        self.token_embedding = model.token_embedding
        self.final_norm: Any = model.final_norm.weight
        self.head: Any = model.head.weight
        self.cos_sin = model.get_buffer("cos_sin")
        self.layers = [_unpacked(layer) for layer in model.layers]


def _unpacked(layer: Any) -> _Layer:
    from fusedops.packing import unpack_gate_up

    mlp = layer.mlp
    gate, up, down = mlp.unpacked()
    bias = None
    if mlp.gate_up_bias is not None:
        bias = torch.cat(unpack_gate_up(mlp.gate_up_bias, mlp.intermediate))
    return _Layer(
        layer.attention_norm.weight,
        layer.qkv.weight,
        layer.qkv.bias,
        layer.output.weight,
        layer.output.bias,
        layer.mlp_norm.weight,
        torch.cat((gate, up)),
        mlp.down if down.shape == mlp.down.shape else down,
        (bias, mlp.down_bias),
    )


class PlainStep:
    """A decode step of ``F.linear``, ``F.rms_norm``, RoPE in the model's dtype, and SDPA.

    Args:
        name: as the table shows it.
        batch: the work; its cache is copied, so that all contenders see the same keys and values.
        weights: the model's.

    Attributes:
        tokens: (batch,) int64, what the last step chose, and what the next one reads.
        logits: of the last ``run``.
    """

    def __init__(self, name: str, batch: StepBatch, weights: PlainWeights) -> None:
        self.name = name
        self.logits: Tensor | None = None
        self.tokens = batch.tokens.clone()
        self._batch = batch
        self._weights = weights
        self._position = batch.context - 1
        half = weights.config.head_dim // 2
        cos, sin = weights.cos_sin[self._position].split(half)
        dtype = weights.token_embedding.dtype
        self._cos, self._sin = (torch.cat((part, part)).to(dtype) for part in (cos, sin))
        cache, table = batch.cache, batch.block_table.to(batch.tokens.device).long()
        self._k = [_contiguous(pages, table, batch.context) for pages in cache.k]
        self._v = [_contiguous(pages, table, batch.context) for pages in cache.v]

    @property
    def mean_length(self) -> float:
        """Length of a request: the position is fixed."""
        return float(self._batch.context)

    def reset(self) -> None:
        """Put the first tokens back."""
        self.tokens.copy_(self._batch.tokens)

    def prepare(self) -> None:
        """Nothing: the step is all on the device."""

    def appended(self, layer: int) -> tuple[Tensor, Tensor]:
        """(batch, kv_heads, head_dim) keys and values of a layer at the step's position."""
        return self._k[layer][:, :, self._position], self._v[layer][:, :, self._position]

    def run(self) -> Tensor:
        """One step on the current stream; returns the logits."""
        weights, eps = self._weights, self._weights.config.rms_norm_eps
        x = F.embedding(self.tokens, weights.token_embedding)
        for index, layer in enumerate(weights.layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.attention_norm, eps)
            attended = self._attend(index, F.linear(normed, layer.qkv, layer.qkv_bias))
            x = x + F.linear(attended, layer.output, layer.output_bias)
            normed = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, eps)
            x = x + self._mlp(layer, normed)
        x = F.rms_norm(x, x.shape[-1:], weights.final_norm, eps)
        self.logits = F.linear(x, weights.head)
        self.tokens.copy_(self.logits.argmax(-1))
        return self.logits

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        bias, down_bias = layer.mlp_biases
        gate, up = F.linear(x, layer.gate_up, bias).chunk(2, -1)
        activated = _ACTIVATIONS[self._weights.config.activation](gate) * up
        return F.linear(activated, layer.down, down_bias)

    def _attend(self, index: int, joint: Tensor) -> Tensor:
        """(batch, heads * head_dim) from the joined projections; appends keys and values."""
        config = self._weights.config
        heads = joint.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.n_heads, config.n_kv_heads, config.n_kv_heads), 1)
        keys, values = self._k[index], self._v[index]
        keys[:, :, self._position] = self._rotated(k)
        values[:, :, self._position] = v
        query = self._rotated(q)[:, :, None]
        out = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        return out.flatten(1)

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self._cos + torch.cat((-second, first), -1) * self._sin


def _contiguous(pages: Tensor, table: Tensor, context: int) -> Tensor:
    """(batch, kv_heads, context, head_dim) out of a paged cache."""
    return pages[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
