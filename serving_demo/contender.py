"""Plain transformers on the same model, prompts and dtype: the contender of the demo's table.

It gets its best: ``generate`` with its KV cache, once with all prompts as one left-padded batch and
once prompt by prompt; the faster one counts. The prompt-by-prompt run also gives the reference
tokens, because padding changes what float32 rounds.

From a folder transformers loads the model itself. From a GGUF file it is given the weights that the
demo dequantised (bitwise those of its own loader, as a test shows), because its loader takes three
times as long as the whole rest of the demo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving_demo.checkpoint import Checkpoint
from serving_demo.engine import DecodeStep, Generation, Request

__all__ = ["Contender", "load_contender"]


def _hf_config(checkpoint: Checkpoint) -> Any:
    """The LlamaConfig of a GGUF checkpoint."""
    from transformers import LlamaConfig

    config = checkpoint.config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
        if config.rope_scaling.original_max_position is not None:
            rope["original_max_position_embeddings"] = config.rope_scaling.original_max_position
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids),
        pad_token_id=None,
    )


def load_contender(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> Contender:
    """transformers' own model of the same checkpoint, on ``device``."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if checkpoint.hf_config is not None:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype, local_files_only=True
        )
    else:
        config = _hf_config(checkpoint)
        model = LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=dict(checkpoint.tensors), dtype=dtype
        )
        if checkpoint.rope_factors is not None:
            rotary = model.model.rotary_emb
            rotary.inv_freq = rotary.inv_freq / checkpoint.rope_factors
    return Contender(model.to(device).eval(), checkpoint.config.eos_token_ids)


@dataclass
class _Clock:
    """A stopping criterion that never stops: it notes when each step's tokens are known."""

    times: list[float]

    def __call__(self, input_ids: Tensor, scores: Tensor, **_kwargs: Any) -> Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Contender:
    """transformers' ``generate``, timed step by step.

    Args:
        model: a causal language model of transformers.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, model: Any, eos_token_ids: Sequence[int]) -> None:
        self.model = model
        self._eos = tuple(eos_token_ids)

    def _generate(
        self, rows: Sequence[Sequence[int]], request: Request
    ) -> tuple[list[list[int]], list[float], int]:
        """(new tokens of each row, a time stamp before and after each step, padded length)."""
        longest = max(len(row) for row in rows)
        pad = self._eos[0] if self._eos else 0
        device = self.model.device
        padded = [[pad] * (longest - len(row)) + list(row) for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        options: dict[str, Any] = {"do_sample": False}
        if request.temperature > 0:
            options = {
                "do_sample": True,
                "temperature": request.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        clock = _Clock([time.perf_counter()])
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=request.max_new_tokens,
                use_cache=True,
                eos_token_id=list(self._eos) or None,
                pad_token_id=pad,
                stopping_criteria=[clock],
                **options,
            )
        new = output[:, longest:].tolist()
        return [self._cut(row) for row in new], clock.times, longest

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to and with the first end-of-text token; the rest is padding."""
        for index, token in enumerate(tokens):
            if token in self._eos:
                return tokens[: index + 1]
        return tokens

    def batched(self, requests: Sequence[Request]) -> Generation:
        """All prompts as one left-padded batch; the first request's options count for all."""
        tokens, times, padded_len = self._generate([r.prompt for r in requests], requests[0])
        steps = [
            DecodeStep(
                times[i + 1] - times[i],
                sum(len(row) > i for row in tokens),
                # Padding, and rows that have ended, are read like everything else.
                len(tokens) * (padded_len + i),
            )
            for i in range(1, len(times) - 1)
        ]
        return Generation(
            tokens=tuple(tuple(row) for row in tokens),
            prefill_seconds=times[1] - times[0],
            prefill_tokens=sum(len(request.prompt) for request in requests),
            steps=tuple(steps),
        )

    def one_by_one(self, requests: Sequence[Request]) -> Generation:
        """Prompt by prompt, without padding: the reference tokens."""
        runs = [self.batched([request]) for request in requests]
        return Generation(
            tokens=tuple(run.tokens[0] for run in runs),
            prefill_seconds=sum(run.prefill_seconds for run in runs),
            prefill_tokens=sum(run.prefill_tokens for run in runs),
            steps=tuple(step for run in runs for step in run.steps),
        )
