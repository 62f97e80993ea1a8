"""A ``DecoderModel`` with random weights, made on the device that it runs on.

Weights are normal with a standard deviation of 1/sqrt(K) for K input columns, which keeps
activations of unit size through any number of layers. Keys are of unit size as well; values are
sqrt(context) of it, because attention averages that many: a wrong page then shows in the logits,
where its share would otherwise be a few percent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedops.nn import FusedGatedMLP, FusedLinear, FusedQKV, RMSNorm
from fusedops.ops.rope_table import rope_table
from serving_demo.cache import PagedKVCache
from serving_demo.config import ModelConfig
from serving_demo.model import DecoderLayer, DecoderModel

__all__ = ["fill_cache", "kv_bytes_per_position", "random_model", "weight_bytes"]

_NORM_WEIGHT_STD = 0.1


class _Draw:
    """Random parameters of one dtype on one device, the same for the same seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, parameters: nn.Module, columns: int) -> None:
        """Draw every parameter of a module in place; ``columns`` is K."""
        for parameter in parameters.parameters():
            self._normal(parameter, columns**-0.5)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) of standard deviation 1/sqrt(columns)."""
        tensor = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        self._normal(tensor, columns**-0.5)
        return tensor

    def norm(self, size: int, eps: float) -> RMSNorm:
        """A norm with weights around 1."""
        module = RMSNorm(size, eps, dtype=self.dtype, device=self.device)
        self._normal(module.weight, _NORM_WEIGHT_STD, mean=1.0)
        return module

    def _normal(self, tensor: Tensor, std: float, mean: float = 0.0) -> None:
        with torch.no_grad():
            tensor.normal_(mean, std, generator=self._generator)


def random_model(
    config: ModelConfig,
    n_positions: int,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> DecoderModel:
    """A model of that shape with random weights; nothing passes through the host.

    Args:
        config: the shape.
        n_positions: length of the RoPE table: no sequence may be longer.
        device: where the weights are drawn and stay.
        dtype: of weights, activations and cache.
        seed: the same seed gives the same weights on the same kind of device.
    """
    place = torch.device(device)
    draw = _Draw(place, dtype, seed)
    table = rope_table(config.head_dim, n_positions, config.rope_theta, config.rope_scaling)
    token_embedding = draw.matrix(config.vocab_size, config.hidden_size)
    layers = [_layer(config, draw) for _ in range(config.n_layers)]
    head = token_embedding
    if not config.tied_embeddings:
        head = draw.matrix(config.vocab_size, config.hidden_size)
    return DecoderModel(
        config,
        token_embedding,
        layers,
        draw.norm(config.hidden_size, config.rms_norm_eps),
        FusedLinear.from_weights(head),
        table.to(place),
    )


def _layer(config: ModelConfig, draw: _Draw) -> DecoderLayer:
    hidden, q_columns = config.hidden_size, config.n_heads * config.head_dim
    qkv = FusedQKV(
        hidden,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.qkv_bias,
        dtype=draw.dtype,
        device=draw.device,
    )
    output = FusedLinear(q_columns, hidden, config.o_bias, dtype=draw.dtype, device=draw.device)
    draw.fill(qkv, hidden)
    draw.fill(output, q_columns)
    return DecoderLayer(
        config,
        draw.norm(hidden, config.rms_norm_eps),
        qkv,
        output,
        draw.norm(hidden, config.rms_norm_eps),
        _mlp(config, draw),
    )


def _mlp(config: ModelConfig, draw: _Draw) -> FusedGatedMLP:
    hidden, inner = config.hidden_size, config.intermediate_size
    biases: list[Tensor | None] = [None, None, None]
    if config.mlp_bias:
        biases = [draw.matrix(1, size)[0] for size in (inner, inner, hidden)]
    # From unpacked matrices, so that padding rows of a width that is no multiple of 8 stay zero.
    return FusedGatedMLP.from_weights(
        draw.matrix(inner, hidden),
        draw.matrix(inner, hidden),
        draw.matrix(hidden, inner),
        config.activation,
        *biases,
    )


def fill_cache(cache: PagedKVCache, context: int, seed: int = 0) -> None:
    """Draw every key and value of a cache that is to hold ``context`` positions a request."""
    generator = torch.Generator(cache.k[0].device).manual_seed(seed)
    for keys, values in zip(cache.k, cache.v, strict=True):
        keys.normal_(generator=generator)
        values.normal_(std=context**0.5, generator=generator)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's matrices, both ends of the vocabulary included."""
    rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    columns = rows + config.n_heads * config.head_dim + 3 * config.intermediate_size
    ends = 1 if config.tied_embeddings else 2
    elements = config.n_layers * columns + ends * config.vocab_size
    return elements * config.hidden_size * dtype.itemsize


def kv_bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one cached position, over all layers."""
    return config.kv_elements_per_position * dtype.itemsize
