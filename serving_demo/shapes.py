"""Real models' shapes, for measurements with random weights where no checkpoint is at hand."""

from __future__ import annotations

from dataclasses import dataclass

from fusedops.errors import ConfigError
from fusedops.ops.rope_table import RopeScaling
from serving_demo.config import ModelConfig

__all__ = ["SHAPES", "Shape", "shape_by_name"]


@dataclass(frozen=True)
class Shape:
    """A model's shape under the name by which it is asked for.

    Attributes:
        name: as on the command line.
        source: where the numbers come from.
        config: the shape; it names no end-of-text token, so that no row of a measurement ends.
        note: what a reader of its figures must know; empty where there is nothing.
    """

    name: str
    source: str
    config: ModelConfig
    note: str = ""


def _llama(
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int = 128256,
    max_positions: int = 8192,
    rope_scaling: RopeScaling | None = None,
    tied_embeddings: bool = False,
) -> ModelConfig:
    """What all Llama 3 models share, around one model's sizes."""
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        rope_theta=500000.0,
        rope_scaling=rope_scaling,
        rms_norm_eps=1e-5,
        tied_embeddings=tied_embeddings,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        activation="silu",
        sliding_window=0,
        max_positions=max_positions,
        eos_token_ids=(),
    )


_QWEN25_7B = ModelConfig(
    architecture="qwen2",
    hidden_size=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152064,
    rope_theta=1000000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    tied_embeddings=False,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    activation="silu",
    sliding_window=0,
    max_positions=131072,
    eos_token_ids=(),
)

_TENSOR_PARALLEL = 8

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            "llama3-8b",
            "config.json of meta-llama/Meta-Llama-3-8B",
            _llama(4096, 32, 32, 8, 128, 14336),
        ),
        Shape(
            "llama3.2-1b",
            "config.json of meta-llama/Llama-3.2-1B",
            _llama(
                2048,
                16,
                32,
                8,
                64,
                8192,
                max_positions=131072,
                rope_scaling=RopeScaling(
                    "llama3",
                    32.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position=8192,
                ),
                tied_embeddings=True,
            ),
        ),
        Shape("qwen2.5-7b", "config.json of Qwen/Qwen2.5-7B", _QWEN25_7B),
        Shape(
            "llama3-70b-tp8",
            "config.json of meta-llama/Meta-Llama-3-70B, split as Megatron-LM splits it",
            _llama(
                8192,
                80,
                64 // _TENSOR_PARALLEL,
                8 // _TENSOR_PARALLEL,
                128,
                28672 // _TENSOR_PARALLEL,
                vocab_size=128256 // _TENSOR_PARALLEL,
            ),
            "one rank's share of tensor parallelism over 8 GPUs: heads, intermediate columns and "
            "vocabulary rows are divided by 8; its two all-reduces a layer and the gathering of "
            "logits are left out",
        ),
    )
}
"""Every shape by name."""


def shape_by_name(name: str) -> Shape:
    """The shape called ``name``.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    found = SHAPES.get(name)
    if found is None:
        raise ConfigError(f"shape {name!r} is not known; accepted are {', '.join(SHAPES)}.")
    return found
