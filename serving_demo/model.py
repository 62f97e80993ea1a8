"""``DecoderModel``: a Llama-family decoder built from fusedops' modules, over a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedops.nn import FusedGatedMLP, FusedLinear, FusedQKV, RMSNorm
from fusedops.ops.attention import paged_attention
from fusedops.ops.embedding import embedding
from fusedops.ops.rope_append import rope_append_paged_kv_
from fusedops.ops.rope_table import rope_table
from serving_demo.cache import PagedKVCache
from serving_demo.checkpoint import Checkpoint, Track, no_progress
from serving_demo.config import ModelConfig

__all__ = ["DecoderLayer", "DecoderModel"]


class DecoderLayer(nn.Module):
    """norm, QKV, RoPE, attention, output projection + residual, norm, gated MLP + residual.

    Both norms are the prologue of the GEMM behind them and both residuals are added in the epilogue
    of the GEMM before them, so a layer is four products and the attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention_norm: RMSNorm,
        qkv: FusedQKV,
        output: FusedLinear,
        mlp_norm: RMSNorm,
        mlp: FusedGatedMLP,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.output = output
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.window = config.sliding_window

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        request_index: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor | None,
        max_query_len: int,
    ) -> Tensor:
        """x (T, hidden) -> (T, hidden); writes this layer's keys and values into the cache.

        The rest is as in ``DecoderModel.forward``.
        """
        q, k, v = self.qkv(x, self.attention_norm)
        rope_append_paged_kv_(
            q, k, v, positions, cos_sin, k_cache, v_cache, block_table, request_index
        )
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            query_start,
            max_query_len=max_query_len,
            window=self.window,
        )
        x = self.output(attended.flatten(1), x)
        out: Tensor = self.mlp(x, x, self.mlp_norm)
        return out


class DecoderModel(nn.Module):
    """The whole decoder; parameters are frozen, packed for fusedops' kernels.

    Attributes:
        config: its shape.
        max_positions: rows of its RoPE table: no sequence may be longer.
    """

    def __init__(
        self,
        config: ModelConfig,
        token_embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: FusedLinear,
        cos_sin: Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_positions = cos_sin.shape[0]
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.head = head
        # With tied embeddings this is the head's own weight, not a copy.
        self.token_embedding = token_embedding
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
        track: Track = no_progress,
    ) -> DecoderModel:
        """Pack a checkpoint's weights, in its dtype, on ``device``.

        Args:
            checkpoint: the model as read from disk.
            device: where it is to run.
            max_positions: length of the RoPE table; default: what the model was trained for.
            track: wraps the loop over layers to show progress.
        """
        config = checkpoint.config

        def take(name: str) -> Tensor:
            return checkpoint.tensors[name].to(device)

        layers = [
            _layer(config, checkpoint, f"model.layers.{index}.", torch.device(device))
            for index in track(range(config.n_layers), "packing")
        ]
        token_embedding = take("model.embed_tokens.weight")
        head = token_embedding if config.tied_embeddings else take("lm_head.weight")
        n_positions = min(max_positions or config.max_positions, config.max_positions)
        cos_sin = _cos_sin(config, n_positions, checkpoint.rope_factors)
        return cls(
            config,
            token_embedding,
            layers,
            _norm(take("model.norm.weight"), config.rms_norm_eps),
            FusedLinear.from_weights(head),
            cos_sin.to(device),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations and cache."""
        return self.token_embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.token_embedding.device

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that one decode step reads: all but the embedding's other rows."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        request_index: Tensor,
        cache: PagedKVCache,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor | None = None,
        max_query_len: int = 1,
    ) -> Tensor:
        """Run new tokens of a batch of requests and write their keys and values into the cache.

        Args:
            tokens: (T,) int32 or int64, the new tokens of all requests one after another.
            positions: (T,) int32, each token's position in its request; negative: a padding row,
                which writes nothing.
            request_index: (T,) int32, each token's row of ``block_table``.
            cache: where keys and values live.
            block_table: (B, max_pages) int32, the pages of each request in order.
            seq_lens: (B,) int32, each request's length with its new tokens; 0 for a padding row.
            query_start: (B + 1,) int32, where each request's tokens start; None for a decode step
                (one token a request, T == B). Every request has at least one.
            max_query_len: the longest run of new tokens (a bound; the host knows it).

        Returns:
            (B, vocab) logits of each request's last token, in the model's dtype.
        """
        cos_sin: Any = self.cos_sin
        x = embedding(tokens, self.token_embedding)
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            x = layer(
                x,
                cos_sin,
                positions,
                request_index,
                k_cache,
                v_cache,
                block_table,
                seq_lens,
                query_start,
                max_query_len,
            )
        if query_start is not None:
            x = x.index_select(0, query_start[1:] - 1)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def _norm(weight: Tensor, eps: float) -> RMSNorm:
    norm = RMSNorm(weight.shape[0], eps, device="meta")
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def _layer(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, device: torch.device
) -> DecoderLayer:
    def take(name: str) -> Tensor:
        return checkpoint.tensors[prefix + name].to(device)

    def maybe(name: str) -> Tensor | None:
        tensor = checkpoint.tensors.get(prefix + name)
        return None if tensor is None else tensor.to(device)

    return DecoderLayer(
        config,
        _norm(take("input_layernorm.weight"), config.rms_norm_eps),
        FusedQKV.from_weights(
            take("self_attn.q_proj.weight"),
            take("self_attn.k_proj.weight"),
            take("self_attn.v_proj.weight"),
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            maybe("self_attn.q_proj.bias"),
            maybe("self_attn.k_proj.bias"),
            maybe("self_attn.v_proj.bias"),
        ),
        FusedLinear.from_weights(take("self_attn.o_proj.weight"), maybe("self_attn.o_proj.bias")),
        _norm(take("post_attention_layernorm.weight"), config.rms_norm_eps),
        FusedGatedMLP.from_weights(
            take("mlp.gate_proj.weight"),
            take("mlp.up_proj.weight"),
            take("mlp.down_proj.weight"),
            config.activation,
            maybe("mlp.gate_proj.bias"),
            maybe("mlp.up_proj.bias"),
            maybe("mlp.down_proj.bias"),
        ),
    )


def _cos_sin(config: ModelConfig, n_positions: int, factors: Tensor | None) -> Tensor:
    """The RoPE table (n_positions, head_dim) float32."""
    if factors is None:
        return rope_table(config.head_dim, n_positions, config.rope_theta, config.rope_scaling)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents / factors.double()
    angles = torch.arange(n_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()
