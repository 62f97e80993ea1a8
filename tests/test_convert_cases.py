"""Adapters, biases, activations and rounding under convert(): inputs from public bug reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import (
    FAMILY_CONFIGS,
    assert_same_logits,
    build,
    logits,
    paths,
    reasons,
    tiny,
    tokens,
)
from torch import Tensor, nn

from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.errors import DeviceError
from fusedops.nn import FusedLinear, LayerNorm, RMSNorm, convert
from fusedops.nn.drop_in import DropInGatedMLP, DropInMLP

transformers = pytest.importorskip("transformers")

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


# Adapters


class LoraLinear(nn.Module):
    """A linear layer wrapped as adapter libraries do it."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, False)})
        for parameter in (self.lora_A["default"].weight, self.lora_B["default"].weight):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def delta(self) -> Tensor:
        return (self.lora_B["default"].weight @ self.lora_A["default"].weight).detach()

    def forward(self, x: Tensor) -> Tensor:
        down = self.lora_A["default"](x)
        return self.base_layer(x) + self.lora_B["default"](down)


def wrap(model: Any, path: str) -> LoraLinear:
    """Wrap the layer at ``path``, which an adapter library finds because it is an nn.Linear."""
    parent, _, name = path.rpartition(".")
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    wrapped = LoraLinear(layer)
    setattr(model.get_submodule(parent), name, wrapped)
    return wrapped


@pytest.mark.parametrize("path", [f"{ATTENTION}.q_proj", f"{MLP}.gate_proj", "lm_head"])
def test_b88_a_wrapped_layer_is_left_alone_and_its_adapter_shows(path: str) -> None:
    model = tiny("llama")
    without = logits(model, tokens())
    wrap(model, path)
    expected = logits(model, tokens())
    assert (expected - without).abs().max() > 0.1
    report = convert(model, "fp32", lm_head=True)
    assert reasons(report)[path].startswith("an adapter (LoRA) wraps its layer")
    assert type(model.get_submodule(f"{path}.base_layer")) is nn.Linear
    assert not any(p.startswith(path) for p in paths(report))
    assert isinstance(model.get_submodule(MLP), DropInGatedMLP) == ("mlp" not in path)
    if "mlp" in path:
        assert reasons(report)[MLP] == "gate_proj: an adapter wraps it"
    assert_same_logits(model, expected)


@pytest.mark.parametrize("path", [f"{ATTENTION}.q_proj", "lm_head"])
def test_b88_a_converted_layer_can_be_wrapped_merged_and_unmerged(path: str) -> None:
    plain, fused = tiny("qwen2"), tiny("qwen2")
    without = logits(plain, tokens())
    wrap(plain, path)
    expected = logits(plain, tokens())
    convert(fused, "fp32", lm_head=True)
    wrapped = wrap(fused, path)
    assert type(wrapped.base_layer) is FusedLinear
    assert_same_logits(fused, expected)
    parent, _, name = path.rpartition(".")
    setattr(fused.get_submodule(parent), name, wrapped.base_layer)
    wrapped.base_layer.weight.data += wrapped.delta()
    assert_same_logits(fused, expected)
    wrapped.base_layer.weight.data = wrapped.base_layer.weight.data - wrapped.delta()
    assert_same_logits(fused, without)


# Biases


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("load", ["before", "after", "from meta"])
def test_b84_a_bias_is_kept(policy: str, load: str) -> None:
    source = nn.Linear(64, 96)
    source.bias.data = torch.linspace(-147.0, 147.0, 96)
    state = {f"0.{key}": value for key, value in source.state_dict().items()}
    with torch.device("meta" if load == "from meta" else "cpu"):
        model = nn.Sequential(nn.Linear(64, 96)).eval()
    if load == "from meta":
        with pytest.raises(DeviceError, match=r"0\.weight is on the meta device"):
            convert(model, policy, strict=False)
        model.load_state_dict(state, assign=True)
    elif load == "before":
        model.load_state_dict(state)
    convert(model, policy, strict=False)
    if load == "after":
        model.load_state_dict(state)
    assert type(model[0]) is FusedLinear
    dtype = torch.float32 if policy == "fp32" else torch.bfloat16
    x = torch.randn(5, 64).to(dtype)
    expected = source.to(dtype)(x).detach()
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(model(torch.zeros_like(x)), source.bias.detach().expand(5, -1))


def test_b84_a_model_with_large_biases_keeps_its_logits() -> None:
    model = tiny("qwen2")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            bias = getattr(layer.self_attn, name).bias
            bias.data = torch.linspace(-147.0, 147.0, len(bias)).flip(0)
    expected = logits(model, tokens())
    convert(model, "fp32")
    q_proj = model.get_submodule(f"{ATTENTION}.q_proj")
    assert torch.equal(q_proj(torch.zeros(3, 64)), q_proj.bias.expand(3, -1))
    # Rotated queries of 147 cancel: float32 itself is worth 147 * 147 * 2^-24 in a score.
    torch.testing.assert_close(logits(model, tokens()), expected, rtol=0, atol=1e-3)


# Activations


def known_hf_names() -> list[str]:
    """The names that both fusedops and transformers know."""
    names = {name for a in ACTIVATIONS.values() for name in a.hf_names}
    return sorted(names & set(transformers.activations.ACT2CLS))


@pytest.mark.parametrize("hf_name", known_hf_names())
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_b90_every_activation_name_means_what_the_model_computes(hf_name: str, family: str) -> None:
    model = build(family, hidden_act=hf_name, num_hidden_layers=1)
    layer = model.base_model.layers[0]
    x = torch.linspace(-2.69894, 2.69894, 3 * 64).reshape(3, 64)
    expected = layer.mlp(x).detach()
    convert(model, "fp32")
    assert isinstance(layer.mlp, DropInGatedMLP if family == "llama" else DropInMLP)
    torch.testing.assert_close(layer.mlp(x), expected, rtol=1e-5, atol=1e-5)


def test_b90_the_two_gelus_are_told_apart() -> None:
    x = torch.tensor([2.69894])
    results = []
    for hf_name in ("gelu", "gelu_pytorch_tanh"):
        model = build("gpt_neox", hidden_act=hf_name, num_hidden_layers=1)
        mlp = model.gpt_neox.layers[0].mlp
        for layer in (mlp.dense_h_to_4h, mlp.dense_4h_to_h):
            layer.weight.data = torch.eye(*layer.weight.shape)
            layer.bias.data.zero_()
        convert(model, "fp32")
        results.append(model.gpt_neox.layers[0].mlp(x.expand(1, 64))[0, 0])
    assert (results[0] - results[1]).abs().item() == pytest.approx(4.73e-4, abs=2e-6)


# Rounding of the norms


def test_b24_gemma_adds_one_to_the_weight_in_float32() -> None:
    x = torch.zeros(4608)
    x[::9] = 1.0
    for weight, peak in ((15.8125, 50.5), (0.00390625, 3.015625)):
        model = build(
            "gemma2", hidden_size=4608, num_hidden_layers=1, vocab_size=8, intermediate_size=8
        )
        model.model.norm.weight.data.fill_(weight)
        convert(model, "bf16")
        assert type(model.model.norm) is RMSNorm
        assert model.model.norm(x.bfloat16()[None]).max().item() == peak


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_b26_norms_round_where_the_models_own_do(name: str) -> None:
    plain, fused = tiny(name).to(torch.bfloat16), tiny(name)
    convert(fused, "bf16")
    norms = {p: m for p, m in fused.named_modules() if isinstance(m, (RMSNorm, LayerNorm))}
    assert len(norms) >= 5
    generator = torch.Generator().manual_seed(0)
    for path, norm in norms.items():
        width = norm.weight.numel()
        x = torch.randn(4, 4096 // width, width, generator=generator).bfloat16()
        theirs = plain.get_submodule(path)(x).detach()
        mine = norm(x)
        assert mine.dtype == theirs.dtype == torch.bfloat16
        differing = (mine != theirs).float().mean().item()
        # The other order would change about 23 % of them.
        assert differing < 0.002, f"{path}: {differing:.1%} differ"
        # One unit beside a rounding boundary, which the product with the weight can double.
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=0)
