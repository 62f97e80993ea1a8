"""convert() with schemes: what it costs in KL, who gets which scheme, state, ties and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILY_CONFIGS, build, logits, tiny, tokens, with_parameters_cast
from quant_models import exact_model, kl_divergence, wide
from torch import nn

from fusedops.errors import ConfigError, UnsupportedError
from fusedops.nn import FusedLinear, QuantGatedMLP, QuantLinear, QuantMLP, convert
from fusedops.nn.drop_in import DropInGatedMLP
from fusedops.quant import SCHEMES, scheme

transformers = pytest.importorskip("transformers")

BF16 = torch.bfloat16
KERNEL_SHARE = 0.2
"""The part of a scheme's KL divergence that its arithmetic may add."""

every_scheme = pytest.mark.parametrize("name", SCHEMES)
POLICIES = ("fp8", "fp8-block", "int8", "int4", "w4a8")


def bf16(name: str) -> Any:
    return with_parameters_cast(tiny(name), BF16)


@every_scheme
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_arithmetic_costs_a_fraction_of_what_the_scheme_costs(name: str, policy: str) -> None:
    plain, converted = bf16("llama"), bf16("llama")
    if policy == "fp32":
        converted = wide(converted)
    convert(converted, policy, quantize=name)
    ids = tokens()
    exact = exact_model(converted)
    own = kl_divergence(converted, exact, ids)
    of_scheme = kl_divergence(exact, plain if policy == "bf16" else wide(plain), ids)
    assert of_scheme > 1e-5
    assert own <= KERNEL_SHARE * of_scheme
    assert of_scheme < (0.15 if SCHEMES[name].weight == "int4" else 0.02)


@pytest.mark.parametrize(
    ("family", "policy"), [*((family, "fp8") for family in FAMILY_CONFIGS), ("phi3", "int4")]
)
def test_every_family_is_quantized(family: str, policy: str) -> None:
    plain, converted = tiny(family), tiny(family)
    report = convert(converted, "fp32", quantize=policy)
    layers = [m for m in converted.modules() if isinstance(m, QuantLinear)]
    blocks = [m for m in converted.modules() if isinstance(m, (QuantGatedMLP, QuantMLP))]
    assert len(blocks) == 2
    assert {layer.scheme.name for layer in layers} == {policy}
    left = [m for m in converted.modules() if type(m) in (nn.Linear, FusedLinear)]
    assert left == [converted.get_output_embeddings()]
    quantized = {row.path for row in report.converted if row.scheme}
    assert len(quantized) == len(layers) - 2
    assert 0 < kl_divergence(converted, plain, tokens()) < 0.3
    assert not any(parameter.requires_grad for parameter in converted.parameters())


@pytest.mark.parametrize("policy", ["fp8-block", "w4a8"])
def test_a_scheme_as_policy_means_bf16_for_the_rest(policy: str) -> None:
    model = tiny("qwen2")
    report = convert(model, policy)
    assert report.policy == policy
    floating = {p.dtype for p in model.parameters() if p.dtype in (torch.float16, BF16)}
    assert floating == {BF16}
    assert model.model.embed_tokens.weight.dtype == BF16
    assert type(model.lm_head) is nn.Linear
    assert model.generate(tokens(5), max_new_tokens=3, do_sample=False).shape == (2, 8)
    text = str(report)
    assert str(SCHEMES[policy]) in text
    assert "the output embedding; lm_head=True converts it" in text
    again = convert(model, policy)
    assert not again.converted


def test_overrides_choose_by_name_and_the_report_lists_them() -> None:
    model = tiny("llama")
    report = convert(
        model,
        "int4",
        overrides={
            "model.layers.0.self_attn.o_proj": None,
            "*.o_proj": "int8",
            "model.layers.1.mlp.down_proj": scheme("int4", group=32, zero_points=True),
            "model.layers.0.mlp.*": None,
            "*.k_proj": "fp8-wo",
        },
    )
    found = {row.path: row.scheme for row in report.converted}
    attention = "model.layers.{}.self_attn.{}_proj".format
    assert found[attention(0, "q")] == "int4 (groups of 128)"
    assert found[attention(0, "k")] == "fp8-wo (per row)"
    assert found[attention(0, "o")] == ""
    assert found[attention(1, "o")] == "int8"
    assert found["model.layers.0.mlp"] == ""
    assert found["model.layers.1.mlp"] == (
        "gate_proj int4 (groups of 128); up_proj int4 (groups of 128); "
        "down_proj int4 (groups of 32, zero points)"
    )
    assert type(model.model.layers[0].self_attn.o_proj) is FusedLinear
    assert type(model.model.layers[0].mlp) is DropInGatedMLP
    assert "scheme" in str(report).splitlines()[2]
    assert torch.isfinite(logits(model, tokens())).all()


def test_no_scheme_no_column() -> None:
    assert "scheme" not in str(convert(tiny("llama"), "bf16"))


def refused(model: Any, message: str, **options: Any) -> None:
    before = {key: id(value) for key, value in model.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        convert(model, **options)
    assert {key: id(value) for key, value in model.named_parameters()} == before


def test_what_is_refused_changes_nothing() -> None:
    model = tiny("llama")
    refused(
        model,
        r"gate_proj, up_proj have the schemes int8, fp8; accepted: one scheme",
        policy="fp8",
        overrides={"*.gate_proj": "int8"},
    )
    refused(
        model,
        r"overrides\['\*.w1'\] matches no layer; accepted are patterns of converted linear layers",
        policy="fp8",
        overrides={"*.w1": "int8"},
    )
    refused(model, r"scheme 'int3' \(str\)", quantize="int3")
    refused(model, r"overrides is \['fp8'\]; accepted: schemes by the names", overrides=["fp8"])
    refused(model, r"policy='fp8' is a scheme and quantize=", policy="fp8", quantize="int8")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.data[3, 3] = float("nan")
    refused(model, r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinities", policy="int4")
    report = convert(model, "int4", overrides={"model.layers.1.mlp.*": None})
    assert len(report.converted) > 0


def test_a_quantized_model_is_not_quantized_again() -> None:
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match="already quantized"):
        convert(model, "fp8")
    del model.config.quantization_config


@pytest.mark.parametrize(
    ("family", "policy"), [*(("llama", policy) for policy in POLICIES), ("gpt_neox", "int8")]
)
def test_state_dict_round_trip(family: str, policy: str) -> None:
    model, other = (build(family, seed, num_hidden_layers=1) for seed in (0, 1))
    plain = copy.deepcopy(model)
    convert(model, policy)
    convert(other, policy)
    ids = tokens()
    expected = logits(model, ids)
    assert not torch.equal(logits(other, ids), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), expected)
    # The state of the model before it was converted is quantized while it is loaded.
    other = build(family, seed=1, num_hidden_layers=1)
    convert(other, policy)
    other.load_state_dict(with_parameters_cast(plain, BF16).state_dict())
    assert torch.equal(logits(other, ids), expected)


@pytest.mark.parametrize("load", ["before", "after"])
@pytest.mark.parametrize("policy", POLICIES)
def test_b84_a_bias_is_kept(policy: str, load: str) -> None:
    source = nn.Linear(64, 96).bfloat16()
    source.bias.data = torch.linspace(-147.0, 147.0, 96).bfloat16()
    state = {f"0.{key}": value for key, value in source.state_dict().items()}
    model = nn.Sequential(nn.Linear(64, 96)).eval()
    if load == "before":
        model.load_state_dict(state)
    convert(model, policy, strict=False)
    if load == "after":
        model.load_state_dict(state)
    assert type(model[0]) is QuantLinear
    assert torch.equal(model(torch.zeros(5, 64, dtype=BF16)), source.bias.detach().expand(5, -1))
    x = torch.randn(5, 64).bfloat16()
    error = (model(x) - source(x).detach()).float()
    assert error.norm() < 0.15 * (source(x) - source.bias).float().norm() + 3


@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("policy", ["fp8", "int4"])
def test_b86_a_tied_embedding_stays_bitwise(policy: str, lm_head: bool) -> None:
    model = build("llama", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone().bfloat16()
    report = convert(model, policy, lm_head=lm_head)
    assert model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, before)
    head = model.get_output_embeddings()
    assert model.config.tie_word_embeddings is not lm_head
    if lm_head:
        assert isinstance(head, QuantLinear)
        assert "lm_head" in {row.path for row in report.converted if row.scheme == str(head.scheme)}
        model.tie_weights()
        assert isinstance(model.get_output_embeddings(), QuantLinear)
    else:
        assert head.weight is embedding
    assert torch.isfinite(logits(model, tokens())).all()


def test_b86_a_checkpoint_of_a_quantized_head_reloads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = (
        build("llama", seed, tie_word_embeddings=True, num_hidden_layers=1) for seed in (0, 1)
    )
    for each in (model, other):
        convert(each, "int4", lm_head=True)
    model.save_pretrained(tmp_path)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))


def test_the_output_embedding_may_have_a_scheme_of_its_own() -> None:
    model = tiny("llama")
    convert(model, "int4", lm_head=True, overrides={"lm_head": "fp8-wo"})
    assert model.lm_head.scheme.name == "fp8-wo"


def test_compiled_without_a_graph_break() -> None:
    torch.compiler.reset()
    model = build("llama", num_hidden_layers=1)
    convert(model, "fp8")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = tokens(9)
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, model(ids).logits)
