"""convert() on every family: the same logits, tokens and checkpoints as the unconverted model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILY_CONFIGS, build, logits, tiny, tokens, with_parameters_cast
from torch import nn

from fusedops.nn import FusedLinear, convert
from fusedops.nn.drop_in import DropInGatedMLP, DropInMLP
from fusedops.nn.families import FAMILIES

transformers = pytest.importorskip("transformers")

BF16_RMS_BOUND = 1.25
BF16_PEAK_BOUND = 2.0
"""Error of a converted bf16 model as a multiple of the unconverted one's, both against the float32
model with the same (bf16) weights: root mean square, and the largest element."""

every_family = pytest.mark.parametrize("name", FAMILY_CONFIGS)


def test_every_family_of_the_table_is_tested() -> None:
    types = {tiny(name).config.model_type for name in FAMILY_CONFIGS}
    assert types == {family.model_type for family in FAMILIES}


@every_family
def test_float32_logits_are_the_same(name: str) -> None:
    plain, fused = tiny(name), tiny(name)
    report = convert(fused, "fp32")
    ids = tokens()
    torch.testing.assert_close(logits(fused, ids), logits(plain, ids), rtol=0, atol=1e-5)
    mlps = [m for m in fused.modules() if isinstance(m, (DropInGatedMLP, DropInMLP))]
    assert len(mlps) == 2
    # What is left: the output embedding; no norm and no other linear layer.
    left = [m for m in fused.modules() if type(m) is nn.Linear or "MLP" in type(m).__name__]
    assert [m for m in left if m not in mlps] == [fused.get_output_embeddings()]
    assert not any("Norm" in row.old_class for row in report.skipped)
    assert not any(p.requires_grad for p in fused.parameters())


@every_family
def test_bf16_error_is_within_the_stated_multiple_of_the_models_own(name: str) -> None:
    plain = with_parameters_cast(tiny(name), torch.bfloat16)
    exact = with_parameters_cast(plain, torch.float32)
    fused = tiny(name)
    convert(fused, "bf16")
    assert {p.dtype for p in fused.parameters()} == {torch.bfloat16}
    ids = tokens()
    expected = logits(exact, ids)
    error, own_error = logits(fused, ids) - expected, logits(plain, ids) - expected
    assert error.square().mean().sqrt() <= BF16_RMS_BOUND * own_error.square().mean().sqrt()
    assert error.abs().max() <= BF16_PEAK_BOUND * own_error.abs().max()


@every_family
def test_greedy_generation_gives_the_same_tokens(name: str) -> None:
    plain, fused = tiny(name), tiny(name)
    convert(fused, "fp32")
    ids = tokens(7)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = plain.generate(ids, **options)
    assert expected.shape[1] > 7
    assert torch.equal(fused.generate(ids, **options), expected)


@pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if name != "llama_biased"])
def test_torch_compile_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    fused = build(name, num_hidden_layers=1)
    convert(fused, "fp32")
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    ids = tokens(9)
    torch.testing.assert_close(logits(compiled, ids), logits(fused, ids), rtol=0, atol=1e-5)


@every_family
def test_state_dict_is_that_of_the_unconverted_model(name: str) -> None:
    plain, fused = tiny(name), tiny(name)
    convert(fused, "keep")
    assert_same_state(fused.state_dict(), plain.state_dict())


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same keys in the same order, same tensors bit by bit."""
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(state[key], tensor), key


@every_family
def test_save_pretrained_writes_a_checkpoint_of_the_plain_model(name: str, tmp_path: Path) -> None:
    plain, fused = tiny(name), tiny(name)
    convert(fused, "fp32")
    fused.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert_same_state(loaded.state_dict(), plain.state_dict())
    ids = tokens()
    assert torch.equal(logits(loaded, ids), logits(plain, ids))


@every_family
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_packs_a_plain_checkpoint(name: str, assign: bool) -> None:
    fused, other = tiny(name), build(name, seed=1)
    convert(fused, "fp32")
    ids = tokens()
    before = logits(fused, ids)
    fused.load_state_dict(other.state_dict(), assign=assign)
    torch.testing.assert_close(logits(fused, ids), logits(other, ids), rtol=0, atol=1e-5)
    assert (logits(fused, ids) - before).abs().max() > 0.1
    assert_same_state(fused.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", ["llama_biased", "phi3", "gpt_neox"])
def test_load_state_dict_names_what_is_missing_unexpected_or_of_another_size(name: str) -> None:
    fused = tiny(name)
    convert(fused, "fp32")
    state = fused.state_dict()
    key = next(k for k in state if ".0.mlp." in k)
    missing, unexpected = fused.load_state_dict(
        {f"{k}x" if k == key else k: v for k, v in state.items()}, strict=False
    )
    assert (missing, unexpected) == ([key], [f"{key}x"])
    assert_same_state(fused.state_dict(), state)
    with pytest.raises(RuntimeError, match=f"size mismatch for {key}"):
        fused.load_state_dict({**state, key: state[key][1:]})


def test_part_of_an_mlp_can_be_loaded() -> None:
    fused, other = tiny("llama"), build("llama", seed=1)
    convert(fused, "fp32")
    key = "model.layers.1.mlp.up_proj.weight"
    expected = {**fused.state_dict(), key: other.state_dict()[key]}
    fused.load_state_dict({key: expected[key]}, strict=False)
    assert_same_state(fused.state_dict(), expected)


def test_a_converted_model_can_be_copied_pickled_and_cast() -> None:
    fused = tiny("llama_biased")
    convert(fused, "fp32")
    ids = tokens()
    expected = logits(fused, ids)
    assert torch.equal(logits(copy.deepcopy(fused), ids), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(fused)), ids), expected)
    state = fused.state_dict()
    fused.to(torch.bfloat16)
    half = {k: v.bfloat16() for k, v in state.items()}
    assert_same_state(fused.state_dict(), half)


@pytest.mark.parametrize("name", ["llama_biased", "phi3", "gpt_neox"])
def test_compiled_blocks_take_any_length(name: str) -> None:
    torch.compiler.reset()
    fused = tiny(name)
    convert(fused, "fp32")
    layer = fused.base_model.layers[0]
    block = nn.Sequential(layer.input_layernorm, layer.mlp)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (9, 5, 2):
        x = torch.randn(2, length, 64)
        torch.testing.assert_close(compiled(x), block(x))


@pytest.mark.parametrize("name", ["gemma3_text", "llama"])
@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("policy", ["keep", "bf16"])
def test_b86_tied_embedding_stays_tied_and_bitwise(name: str, lm_head: bool, policy: str) -> None:
    plain = build(name, tie_word_embeddings=True)
    fused = copy.deepcopy(plain)
    convert(fused, policy, lm_head=lm_head)
    table = fused.get_input_embeddings().weight
    dtype = torch.float32 if policy == "keep" else torch.bfloat16
    assert torch.equal(table, plain.get_input_embeddings().weight.to(dtype))
    head = fused.get_output_embeddings()
    assert head.weight is table
    assert type(head) is (FusedLinear if lm_head else nn.Linear)
    if policy == "keep":
        ids = tokens()
        torch.testing.assert_close(logits(fused, ids), logits(plain, ids), rtol=0, atol=1e-5)


def test_b86_reload_of_a_tied_checkpoint_without_the_head(tmp_path: Path) -> None:
    plain = build("llama", tie_word_embeddings=True)
    fused = copy.deepcopy(plain)
    convert(fused, "keep", lm_head=True)
    fused.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert_same_state(loaded.state_dict(), plain.state_dict())
    other = build("llama", seed=1, tie_word_embeddings=True)
    state = {k: v for k, v in other.state_dict().items() if k != "lm_head.weight"}
    missing, unexpected = fused.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    ids = tokens()
    torch.testing.assert_close(logits(fused, ids), logits(other, ids), rtol=0, atol=1e-5)


def test_an_untied_head_is_converted_on_request() -> None:
    plain, fused = tiny("qwen2"), tiny("qwen2")
    report = convert(fused, "fp32", lm_head=True)
    assert type(fused.lm_head) is FusedLinear
    assert "lm_head" in [row.path for row in report.converted]
    ids = tokens()
    torch.testing.assert_close(logits(fused, ids), logits(plain, ids), rtol=0, atol=1e-5)


def test_buffers_keep_their_dtype() -> None:
    plain, fused = tiny("gemma3_text"), tiny("gemma3_text")
    convert(fused, "fp16")
    assert {p.dtype for p in fused.parameters()} == {torch.float16}
    buffers = dict(fused.named_buffers())
    for name, buffer in plain.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer)
