"""The demo's model against transformers' on tiny random models of the family: logits and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import randomize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from serving_demo.cache import PagedKVCache
from serving_demo.checkpoint import Checkpoint
from serving_demo.config import ModelConfig, expected_tensors
from serving_demo.engine import Engine, Request
from serving_demo.loader import load_checkpoint
from serving_demo.model import DecoderModel
from serving_demo.tokenizer import DemoTokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 52,  # no multiple of 8: packed rows are padded
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "6/2 heads, tied": ("llama", {"tie_word_embeddings": True}),
    "5/1 heads, wide head": (
        "llama",
        {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "head_dim": 16},
    ),
    "8/8 heads": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "attention biases": ("llama", {"attention_bias": True}),
    "mlp biases, gelu": ("llama", {"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "linear scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    ),
    "llama3 scaling": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn scaling": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window of 7": ("mistral", {"sliding_window": 7}),
}

BLANK = "\u0120"
"""How byte-level BPE spells a blank."""


def byte_tokenizer() -> Tokenizer:
    """96 tokens: three special ones, printable ASCII and the blank; no merges."""
    words = ["<pad>", "<bos>", "<eos>", *(chr(code) for code in range(33, 125)), BLANK]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return backend


def transformers_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model of transformers, float32."""
    import transformers

    cls = {"llama": transformers.LlamaForCausalLM, "mistral": transformers.MistralForCausalLM}[kind]
    config = cls.config_class(**{**SIZES, **changes})
    torch.manual_seed(seed)
    return randomize(cls(config), seed).eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save it as a Hugging Face folder with a tokenizer."""
    model.save_pretrained(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def random_checkpoint(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """A checkpoint with random weights, made without transformers and without files."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        weight = noise / shape[-1] ** 0.5 if len(shape) == 2 else 1.0 + 0.2 * noise
        tensors[name] = weight.to(dtype)
    tokenizer = DemoTokenizer(byte_tokenizer(), None, {})
    return Checkpoint(config, tensors, tokenizer, None, Path("random"), "random")


def tiny_config(**changes: Any) -> ModelConfig:
    """The configuration of a tiny model of this family."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 48,
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 52,
        "vocab_size": 96,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tied_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "activation": "silu",
        "sliding_window": 0,
        "max_positions": 128,
        "eos_token_ids": (2,),
    }
    return ModelConfig(**{**values, **changes})


class ScatteredRequests:
    """Requests whose cache pages lie in any order in a pool full of NaN."""

    def __init__(self, model: DecoderModel, prompts: list[list[int]], capacity: int) -> None:
        page_size = 4
        pages_each = -(-capacity // page_size)
        n_pages = len(prompts) * pages_each + 3
        self.cache = PagedKVCache(model.config, n_pages, page_size, model.dtype, model.device)
        for pool in (*self.cache.k, *self.cache.v):
            pool.fill_(float("nan"))
        order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(3))
        self.table = order[: len(prompts) * pages_each].view(len(prompts), -1).int()
        self.model = model
        self.lengths = [0] * len(prompts)

    @torch.inference_mode()
    def feed(self, chunks: list[list[int]]) -> Tensor:
        """Feed each request some tokens; (requests, vocab) logits of each one's last."""
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + len(chunk))
        positions = [
            n + i for n, c in zip(self.lengths, chunks, strict=True) for i in range(len(c))
        ]
        self.lengths = [n + len(c) for n, c in zip(self.lengths, chunks, strict=True)]
        longest = max(map(len, chunks))
        return self.model(
            torch.tensor([token for chunk in chunks for token in chunk]),
            torch.tensor(positions, dtype=torch.int32),
            torch.tensor([i for i, c in enumerate(chunks) for _ in c], dtype=torch.int32),
            self.cache,
            self.table,
            torch.tensor(self.lengths, dtype=torch.int32),
            None if longest == 1 else torch.tensor(starts, dtype=torch.int32),
            longest,
        )


@pytest.mark.parametrize("name", FAMILY)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = FAMILY[name]
    reference = transformers_model(kind, **changes)
    checkpoint = load_checkpoint(save(reference, tmp_path))
    model = DecoderModel.from_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (21, 9, 1)]
    fed = [torch.randint(3, 96, (6,), generator=generator).tolist() for _ in prompts]

    requests = ScatteredRequests(model, prompts, 32)
    got = [requests.feed(prompts)]
    got += [requests.feed([[tokens[i]] for tokens in fed]) for i in range(6)]

    for row, (prompt, tokens) in enumerate(zip(prompts, fed, strict=True)):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
        ours = torch.stack([step[row] for step in got])
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)

    reference.generation_config.eos_token_id = None
    engine = Engine(model, len(prompts), 64, eos_token_ids=())
    generation = engine.generate([Request(tuple(prompt), 20) for prompt in prompts])
    for prompt, tokens in zip(prompts, generation.tokens, strict=True):
        with torch.inference_mode():
            output = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
        assert list(tokens) == output[0, len(prompt) :].tolist()
        assert len(tokens) == 20


def test_a_token_embedding_tied_to_the_head_is_one_tensor() -> None:
    model = DecoderModel.from_checkpoint(random_checkpoint(tiny_config()))
    assert model.token_embedding.data_ptr() == model.head.weight.data_ptr()
    untied = DecoderModel.from_checkpoint(random_checkpoint(tiny_config(tied_embeddings=False)))
    assert untied.token_embedding.data_ptr() != untied.head.weight.data_ptr()


def test_bytes_of_a_step_count_every_weight_once_and_not_the_embedding() -> None:
    tied, untied = tiny_config(), tiny_config(tied_embeddings=False)
    packed_rows = 2 * 56 - 2 * 52 + 56 - 52  # gate, up and down are padded from 52 to 56
    for config in (tied, untied):
        names = {
            n: s for n, s in expected_tensors(config).items() if n != "model.embed_tokens.weight"
        }
        elements = sum(torch.Size(shape).numel() for shape in names.values())
        elements += config.n_layers * packed_rows * config.hidden_size
        if config.tied_embeddings:
            elements += config.vocab_size * config.hidden_size
        model = DecoderModel.from_checkpoint(random_checkpoint(config))
        assert model.weight_bytes_per_step == 4 * elements


def test_the_rope_table_is_no_longer_than_the_model_was_trained_for() -> None:
    checkpoint = random_checkpoint(tiny_config())
    assert DecoderModel.from_checkpoint(checkpoint).max_positions == 128
    assert DecoderModel.from_checkpoint(checkpoint, max_positions=40).max_positions == 40
    assert DecoderModel.from_checkpoint(checkpoint, max_positions=4000).max_positions == 128


def test_half_precision_stays_close_to_float32() -> None:
    config = tiny_config()
    prompts = [[5, 9, 20, 33], [7, 8]]
    exact = ScatteredRequests(
        DecoderModel.from_checkpoint(random_checkpoint(config)), prompts, 8
    ).feed(prompts)
    for dtype, bound in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        model = DecoderModel.from_checkpoint(random_checkpoint(config, dtype))
        logits = ScatteredRequests(model, prompts, 8).feed(prompts)
        assert logits.dtype is dtype
        assert (logits.float() - exact).abs().max() < bound * exact.abs().max()
