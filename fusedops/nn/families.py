"""The model families that ``convert`` knows: one table entry each.

Entries name classes of Hugging Face transformers 5. Residual additions stay where the model makes
them, between the modules that are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusedops.nn.rules import (
    AttentionRule,
    GatedMlpRule,
    LayerNormRule,
    MlpRule,
    RmsNormRule,
    Rule,
)

__all__ = ["FAMILIES", "Family", "accepted_model_types", "family_of"]


@dataclass(frozen=True)
class Family:
    """One family of decoder models.

    Attributes:
        name: its name for people.
        model_type: ``config.model_type`` of its models.
        rules: what happens to its modules.
        package: its package in ``transformers.models``; None where that is ``model_type``.
    """

    name: str
    model_type: str
    rules: tuple[Rule, ...]
    package: str | None = None

    @property
    def home(self) -> str:
        """The Python module that defines its classes."""
        package = self.package or self.model_type
        return f"transformers.models.{package}.modeling_{package}"

    @cached_property
    def by_class(self) -> dict[str, Rule]:
        """The rules by the name of the class that they describe."""
        return {rule.class_name: rule for rule in self.rules}


def _gemma_norm(class_name: str) -> RmsNormRule:
    return RmsNormRule(class_name, eps="eps", weight_offset=1.0, round_before_weight=False)


FAMILIES: tuple[Family, ...] = (
    Family(
        "Llama",
        "llama",
        (
            RmsNormRule("LlamaRMSNorm"),
            AttentionRule("LlamaAttention"),
            GatedMlpRule("LlamaMLP"),
        ),
    ),
    Family(
        "Mistral",
        "mistral",
        (
            RmsNormRule("MistralRMSNorm"),
            AttentionRule("MistralAttention"),
            GatedMlpRule("MistralMLP"),
        ),
    ),
    Family(
        "Qwen2",
        "qwen2",
        (
            RmsNormRule("Qwen2RMSNorm"),
            AttentionRule("Qwen2Attention"),
            GatedMlpRule("Qwen2MLP"),
        ),
    ),
    Family(
        "Qwen3",
        "qwen3",
        (
            RmsNormRule("Qwen3RMSNorm"),
            AttentionRule("Qwen3Attention"),
            GatedMlpRule("Qwen3MLP"),
        ),
    ),
    Family(
        "Gemma 2",
        "gemma2",
        (
            _gemma_norm("Gemma2RMSNorm"),
            AttentionRule("Gemma2Attention"),
            GatedMlpRule("Gemma2MLP", activation_key="hidden_activation"),
        ),
    ),
    Family(
        "Gemma 3 (text)",
        "gemma3_text",
        (
            _gemma_norm("Gemma3RMSNorm"),
            AttentionRule("Gemma3Attention"),
            GatedMlpRule("Gemma3MLP", activation_key="hidden_activation"),
        ),
        package="gemma3",
    ),
    Family(
        "Phi-3",
        "phi3",
        (
            RmsNormRule("Phi3RMSNorm"),
            AttentionRule("Phi3Attention", ("qkv_proj", "o_proj")),
            GatedMlpRule("Phi3MLP", "activation_fn", halves=("gate_up_proj",)),
        ),
    ),
    Family(
        "SmolLM3",
        "smollm3",
        (
            RmsNormRule("SmolLM3RMSNorm"),
            AttentionRule("SmolLM3Attention"),
            GatedMlpRule("SmolLM3MLP"),
        ),
    ),
    Family(
        "OLMo-2",
        "olmo2",
        (
            RmsNormRule("Olmo2RMSNorm", round_before_weight=False),
            AttentionRule("Olmo2Attention"),
            GatedMlpRule("Olmo2MLP"),
        ),
    ),
    Family(
        "GPT-NeoX",
        "gpt_neox",
        (
            LayerNormRule(),
            AttentionRule("GPTNeoXAttention", ("query_key_value", "dense")),
            MlpRule("GPTNeoXMLP", "act", layers=("dense_h_to_4h", "dense_4h_to_h")),
        ),
    ),
)


def family_of(model_type: str | None) -> Family | None:
    """The family of models with this ``config.model_type``, or None."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    return None


def accepted_model_types() -> str:
    """The families and their model types, for messages."""
    return ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES)
