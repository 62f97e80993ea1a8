"""SmolLM2-135M-Instruct itself: greedy tokens equal transformers', in float32 on the CPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fusedops.errors import LoadError
from serving_demo.checkpoint import Checkpoint
from serving_demo.contender import load_contender
from serving_demo.engine import Engine, Request
from serving_demo.loader import default_model_path, load_checkpoint
from serving_demo.model import DecoderModel

PROMPTS = (
    "Why is the sky blue?",
    "Write a limerick about a cat who codes.",
    "List the first ten prime numbers.",
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into French, German and Danish.",
    "def fibonacci(n):",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "What is 17 * 23?",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Name three uses of a paperclip.",
    "How does a refrigerator work?",
    "Write a short poem about the sea.",
    "What should I pack for a week in Iceland?",
    "Is a tomato a fruit or a vegetable?",
    "Tell me a joke about computers.",
    "Describe the colour red to someone who cannot see.",
    "What does 'ceteris paribus' mean?",
    "Plan a three-day trip to Kyoto.",
)


@cache
def checkpoint() -> Checkpoint:
    """The default model; tests are skipped where it is not installed."""
    try:
        path = default_model_path()
    except LoadError as error:
        pytest.skip(str(error))
    return load_checkpoint(path)


def assert_tokens_equal(prompts: tuple[str, ...], n_tokens: int) -> None:
    """Our batch against transformers' ``generate``, prompt by prompt."""
    requests = [
        Request(
            tuple(checkpoint().tokenizer.encode_chat([{"role": "user", "content": prompt}])),
            n_tokens,
        )
        for prompt in prompts
    ]
    capacity = max(len(request.prompt) for request in requests) + n_tokens
    engine = Engine(
        DecoderModel.from_checkpoint(checkpoint(), max_positions=capacity),
        len(requests),
        capacity,
    )
    ours = engine.generate(requests)
    theirs = load_contender(checkpoint(), torch.float32, "cpu").one_by_one(requests)
    for prompt, got, expected in zip(prompts, ours.tokens, theirs.tokens, strict=True):
        assert got == expected, prompt
    assert max(len(tokens) for tokens in ours.tokens) == n_tokens


def test_greedy_tokens_equal_transformers() -> None:
    assert_tokens_equal(PROMPTS[:3], 24)


@pytest.mark.slow
def test_greedy_tokens_of_twenty_prompts_equal_transformers() -> None:
    assert_tokens_equal(PROMPTS, 64)


@pytest.mark.slow
def test_dequantised_weights_are_bitwise_those_of_transformers_own_loader() -> None:
    from transformers import AutoModelForCausalLM

    path = checkpoint().path
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    state = reference.state_dict()
    assert set(state) - set(checkpoint().tensors) == {"lm_head.weight"}
    for name, tensor in checkpoint().tensors.items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(state["lm_head.weight"], checkpoint().tensors["model.embed_tokens.weight"])
