"""Tiny Hugging Face models with random weights, built from their configs: nothing is downloaded."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedops.nn import ConversionReport

FAMILY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_biased": (
        "LlamaConfig",
        {"mlp_bias": True, "attention_bias": True, "intermediate_size": 112},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 8}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
}
"""The families by ``model_type``, with their config class and what they change in ``SIZES``."""

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 116,  # no multiple of 8: packed weights are padded
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that keep the activations near 1; norms and biases away from their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A new model of a family of ``FAMILY_CONFIGS``, float32, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    config_class, family_changes = FAMILY_CONFIGS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **family_changes, **changes})
    return randomize(transformers.AutoModelForCausalLM.from_config(config).eval(), seed)


@cache
def _original(name: str) -> Any:
    return build(name)


def tiny(name: str) -> Any:
    """A copy of the model ``build(name)`` gives."""
    return copy.deepcopy(_original(name))


def tokens(length: int = 24, seed: int = 0) -> Tensor:
    """Two random prompts, int64 (2, length), without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (2, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """The model's logits, float32."""
    result: Tensor = model(ids).logits
    return result.float()


def with_parameters_cast(model: Any, dtype: torch.dtype) -> Any:
    """A copy whose parameters have another dtype; buffers (rotary frequencies) keep theirs."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def reasons(report: ConversionReport) -> dict[str, str]:
    """Why each module was left alone, by path."""
    return {row.path: row.reason for row in report.skipped}


def paths(report: ConversionReport) -> set[str]:
    """Where modules were replaced."""
    return {row.path for row in report.converted}


def assert_same_logits(model: Any, expected: Tensor) -> None:
    """The model's logits for ``tokens()`` are the expected ones, float32."""
    torch.testing.assert_close(logits(model, tokens()), expected, rtol=0, atol=1e-5)
