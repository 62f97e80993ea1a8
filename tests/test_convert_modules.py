"""What convert() recognises, keeps, leaves alone and refuses, module by module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import assert_same_logits, build, logits, paths, reasons, tiny, tokens
from torch import Tensor, nn

from fusedops.errors import ConfigError, DeviceError, UnsupportedError
from fusedops.nn import FusedLinear, convert
from fusedops.nn.drop_in import DropInGatedMLP
from fusedops.nn.rules import GatedMlpRule

transformers = pytest.importorskip("transformers")

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


# The report


def test_report_lists_every_module_once() -> None:
    model = tiny("llama")
    report = convert(model, "bf16")
    assert (report.family, report.policy) == ("Llama", "bf16")
    assert report.cast_parameters == len(list(tiny("llama").parameters()))
    layer = ("input_layernorm", "post_attention_layernorm", "mlp")
    layer += tuple(f"self_attn.{name}_proj" for name in "qkvo")
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in layer} | {"model.norm"}
    assert paths(report) == expected
    assert len(report.converted) == len(expected)
    assert set(reasons(report)) == {"model.embed_tokens", "model.rotary_emb", "lm_head"}
    assert "lm_head=True" in reasons(report)["lm_head"]
    rows = {row.path: row for row in report.converted}
    mlp = rows[MLP]
    assert (mlp.old_class, mlp.new_class) == ("LlamaMLP", "DropInGatedMLP")
    assert mlp.parameters == 3 * 64 * 116
    assert report.parameters == sum(row.parameters for row in report.converted)


def test_report_prints_a_table_with_the_layers_folded() -> None:
    text = str(convert(build("gpt_neox", num_hidden_layers=3), "fp32"))
    lines = text.splitlines()
    assert lines[0].startswith("GPT-NeoX, policy fp32: 16 modules converted (95,900 parameters)")
    (mlp,) = [line for line in lines if ".mlp " in line]
    assert mlp.split() == [
        "gpt_neox.layers.{0-2}.mlp",
        "GPTNeoXMLP",
        "DropInMLP",
        f"{3 * (2 * 64 * 116 + 64 + 116):,}",
    ]
    (head,) = [line for line in lines if line.startswith("lm_head")]
    assert head.endswith("the output embedding; lm_head=True converts it")
    assert max(len(line) for line in lines) < 120


def test_report_keeps_apart_what_differs_between_layers() -> None:
    model = build("llama", num_hidden_layers=5)
    for index in (0, 3):
        model.model.layers[index].mlp.act_fn = nn.Tanh()
    text = str(convert(model, "fp32"))
    assert "model.layers.{1-2,4}.mlp " in text
    assert "model.layers.{0,3}.mlp " in text


def test_a_second_call_finds_nothing_to_do() -> None:
    model = tiny("gemma2")
    first = convert(model, "fp32")
    modules = list(model.modules())
    expected = logits(model, tokens())
    second = convert(model, "fp32")
    assert (second.converted, second.cast_parameters, second.parameters) == ((), 0, 0)
    listed = reasons(second)
    assert all(listed[path] == "already converted" for path in paths(first))
    assert list(model.modules()) == modules
    assert torch.equal(logits(model, tokens()), expected)


# Hooks


@pytest.mark.parametrize("when", ["before", "after"])
def test_forward_hooks_fire(when: str) -> None:
    model = tiny("llama")
    names = [f"{ATTENTION}.q_proj", MLP, "model.layers.0.input_layernorm", "model.layers.0"]
    names += ["model.norm", "lm_head"]
    fired: list[tuple[str, tuple[int, ...]]] = []

    def register() -> list[Any]:
        handles = []
        for name in names:

            def note(module: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                fired.append((name, tuple(output.shape)))

            handles.append(model.get_submodule(name).register_forward_hook(note))
        return handles

    if when == "after":
        convert(model, "fp32")
    handles = register()
    if when == "before":
        convert(model, "fp32")
    logits(model, tokens(5))
    assert {name for name, _ in fired} == set(names)
    assert (f"{ATTENTION}.q_proj", (2, 5, 64)) in fired
    for handle in handles:
        handle.remove()
    fired.clear()
    logits(model, tokens(5))
    assert fired == []


def test_a_hook_may_change_what_a_module_reads_and_gives() -> None:
    plain, fused = tiny("qwen3"), tiny("qwen3")
    convert(fused, "fp32")
    for model in (plain, fused):
        attention = model.get_submodule(ATTENTION)
        attention.q_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        attention.k_proj.register_forward_hook(lambda module, inputs, output: output + 1.0)
        model.model.layers[1].mlp.register_forward_hook(lambda module, i, output: output * 2.0)
    untouched = logits(tiny("qwen3"), tokens())
    expected = logits(plain, tokens())
    assert (expected - untouched).abs().max() > 0.1
    assert_same_logits(fused, expected)


def test_hidden_states_and_attentions_are_recorded() -> None:
    plain, fused = tiny("llama"), tiny("llama")
    convert(fused, "fp32")
    for model in (plain, fused):
        model.set_attn_implementation("eager")
    outputs = [
        model(tokens(), output_hidden_states=True, output_attentions=True)
        for model in (plain, fused)
    ]
    for kind in ("hidden_states", "attentions"):
        expected, found = (output[kind] for output in outputs)
        assert len(found) == len(expected) >= 2
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-5)


# What is left alone


def hook_on_gate(model: Any) -> None:
    model.get_submodule(f"{MLP}.gate_proj").register_forward_hook(lambda m, i, o: o * 2.0)


def tanh_activation(model: Any) -> None:
    model.get_submodule(MLP).act_fn = nn.Tanh()


def other_gelu(model: Any) -> None:
    model.config.hidden_act = "gelu"
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU(approximate="tanh")


def no_activation_name(model: Any) -> None:
    model.config.hidden_act = "mish"
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Mish()


class ScaledLinear(nn.Linear):
    """A linear layer of another class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def other_linear_class(model: Any) -> None:
    model.get_submodule(f"{MLP}.down_proj").__class__ = ScaledLinear


def replaced_forward(model: Any) -> None:
    mlp = model.get_submodule(MLP)
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 0.5


def half_of_it_in_bf16(model: Any) -> None:
    mlp = model.get_submodule(MLP)
    mlp.down_proj.to(torch.bfloat16)
    mlp.down_proj.register_forward_pre_hook(lambda m, i: (i[0].bfloat16(),))
    mlp.down_proj.register_forward_hook(lambda m, i, o: o.float())


def replaced_activation_forward(model: Any) -> None:
    model.get_submodule(MLP).act_fn.forward = torch.tanh


def extra_parameter(model: Any) -> None:
    model.get_submodule(MLP).scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_on_gate, "gate_proj: a hook is registered on it"),
        (tanh_activation, "its act_fn does not compute silu"),
        (other_gelu, "its act_fn does not compute gelu"),
        (no_activation_name, "unknown Hugging Face activation 'mish'"),
        (other_linear_class, "down_proj: it is a ScaledLinear, not a plain nn.Linear"),
        (replaced_forward, "its forward was replaced on the instance"),
        (half_of_it_in_bf16, "down_proj: a hook is registered on it"),
        (replaced_activation_forward, "act_fn: its forward was replaced on the instance"),
        (extra_parameter, "it has a parameter 'scale' that its class does not have"),
    ],
)
def test_an_mlp_that_is_not_as_the_table_says_is_left_alone(
    change: Callable[[Any], None], reason: str
) -> None:
    model = tiny("llama")
    change(model)
    expected = logits(model, tokens())
    report = convert(model, "keep")
    assert reason in reasons(report)[MLP]
    assert type(model.get_submodule(MLP)).__name__ == "LlamaMLP"
    # Its plain layers are still converted one by one.
    assert type(model.get_submodule(f"{MLP}.up_proj")) is FusedLinear
    assert f"{MLP}.up_proj" in paths(report)
    assert_same_logits(model, expected)


def test_layers_of_two_dtypes_are_not_packed() -> None:
    model = tiny("llama")
    model.get_submodule(f"{MLP}.up_proj").to(torch.bfloat16)
    assert "differ in device or dtype" in reasons(convert(model, "keep"))[MLP]


class DoubledNorm(nn.Module):
    """A norm that no table knows."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach() * 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def test_unknown_modules_are_left_alone_and_listed() -> None:
    model = tiny("llama")
    model.model.layers[1].input_layernorm = DoubledNorm(model.model.layers[1].input_layernorm)
    model.model.layers[1].adapter_like = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    expected = logits(model, tokens())
    report = convert(model, "fp32")
    left = reasons(report)
    unknown = "not in the table of Llama"
    assert left["model.layers.1.input_layernorm"] == unknown
    assert left["model.layers.1.adapter_like.0"] == unknown
    assert type(model.model.layers[1].adapter_like[0]) is nn.Linear
    assert type(model.model.layers[1].input_layernorm) is DoubledNorm
    assert_same_logits(model, expected)


class GatedAttention(nn.Module):
    """A container of a known module, with a parameter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Parameter(torch.zeros(64))

    def forward(self, **arguments: Any) -> Any:
        output, weights = self.inner(**arguments)
        return output * torch.sigmoid(self.gate), weights


def test_an_unknown_container_with_parameters_is_listed_and_its_children_converted() -> None:
    model = tiny("llama")
    model.model.layers[0].self_attn = GatedAttention(model.model.layers[0].self_attn)
    expected = logits(model, tokens())
    report = convert(model, "fp32")
    assert reasons(report)[ATTENTION] == "not in the table of Llama"
    assert f"{ATTENTION}.inner.q_proj" in paths(report)
    assert_same_logits(model, expected)


def test_old_weights_are_freed_one_module_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", num_hidden_layers=4)
    old = [weakref.ref(layer.mlp) for layer in model.model.layers]
    alive: list[int] = []
    build_mlp = GatedMlpRule.build

    def count_and_build(*arguments: Any) -> nn.Module:
        alive.append(sum(reference() is not None for reference in old))
        return build_mlp(*arguments)

    monkeypatch.setattr(GatedMlpRule, "build", count_and_build)
    convert(model, "bf16")
    assert alive == [4, 3, 2, 1]


def test_a_classification_head_is_left_alone() -> None:
    config = tiny("llama").config
    model = transformers.LlamaForSequenceClassification(config).eval()
    report = convert(model, "fp32")
    assert reasons(report)["score"] == "not in the table of Llama"
    assert MLP in paths(report)


def test_weights_of_an_unsupported_dtype_are_left_alone() -> None:
    model = tiny("olmo2").to(torch.float64)
    ids = tokens()
    expected = logits(model, ids)
    report = convert(model, "keep")
    assert report.converted == ()
    assert reasons(report)[f"{ATTENTION}.q_proj"] == "its weight is float64"
    assert reasons(report)["model.norm"] == "its weight is float64"
    assert torch.equal(logits(model, ids), expected)
    assert convert(model, "fp32").converted


def test_a_norm_weight_of_another_dtype_that_would_widen_the_result_is_left_alone() -> None:
    model = tiny("llama").to(torch.bfloat16)
    model.model.norm.float()
    assert (
        reasons(convert(model, "keep"))["model.norm"] == "its weight is float32 in a bfloat16 model"
    )


def test_a_module_registered_twice_is_replaced_in_both_places() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.o_proj = model.model.layers[0].self_attn.o_proj
    model.model.layers[1].mlp = model.model.layers[0].mlp
    expected = logits(model, tokens())
    convert(model, "fp32")
    first, second = model.model.layers
    assert first.mlp is second.mlp
    assert isinstance(second.mlp, DropInGatedMLP)
    assert first.self_attn.o_proj is second.self_attn.o_proj
    assert_same_logits(model, expected)


def test_a_transposed_weight_is_made_contiguous() -> None:
    model = tiny("llama")
    layer = model.get_submodule(f"{ATTENTION}.o_proj")
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    expected = logits(model, tokens())
    convert(model, "fp32")
    assert_same_logits(model, expected)


def test_rows_may_be_strided() -> None:
    model = tiny("llama")
    mlp, o_proj = model.get_submodule(MLP), model.get_submodule(f"{ATTENTION}.o_proj")
    x = torch.randn(64, 3).t()
    expected = [layer(x).detach() for layer in (mlp, o_proj)]
    convert(model, "fp32")
    for path, result in zip((MLP, f"{ATTENTION}.o_proj"), expected, strict=True):
        torch.testing.assert_close(model.get_submodule(path)(x), result)


# What is refused


def test_refusals_say_what_is_accepted_and_change_nothing() -> None:
    model = tiny("llama")
    before = [(type(m), id(m)) for m in model.modules()]
    with pytest.raises(ConfigError, match="policy='int3'; accepted are bf16, fp16, fp32, keep, "):
        convert(model, "int3")
    with pytest.raises(ConfigError, match=r"training mode.*call model.eval\(\)"):
        convert(model.train(), "bf16")
    model.eval()
    with pytest.raises(ConfigError, match="LlamaModel has no output embedding"):
        convert(model.model, "bf16", lm_head=True)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match="already quantized"):
        convert(model, "bf16")
    del model.config.quantization_config
    with pytest.raises(ConfigError, match="is itself a LlamaMLP"):
        convert(model.get_submodule(MLP), "bf16")
    with pytest.raises(ConfigError, match=r"got a str; accepted: an nn\.Module"):
        convert("llama")  # type: ignore[arg-type]
    assert [(type(m), id(m)) for m in model.modules()] == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())


def test_weights_on_the_meta_device_are_refused() -> None:
    config = tiny("mistral").config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(DeviceError, match=r"embed_tokens\.weight is on the meta"):
        convert(model, "bf16")


def test_a_model_without_its_head_is_converted() -> None:
    plain, fused = tiny("smollm3").model, tiny("smollm3").model
    report = convert(fused, "fp32")
    assert "lm_head" not in reasons(report)
    found, expected = (model(tokens()).last_hidden_state for model in (fused, plain))
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)


def test_other_architectures_are_refused_or_have_their_linear_layers_converted() -> None:
    config = transformers.OPTConfig(
        vocab_size=128,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = transformers.OPTForCausalLM(config).eval()
    expected = logits(model, tokens())
    with pytest.raises(UnsupportedError, match=r"model_type 'opt'; accepted are Llama \(llama\)"):
        convert(model, "fp32")
    report = convert(model, "fp32", strict=False)
    assert report.family is None
    assert {(row.old_class, row.new_class) for row in report.converted} == {
        ("Linear", "FusedLinear")
    }
    assert len(report.converted) == 2 * 6
    assert reasons(report)["lm_head"].startswith("the output embedding")
    assert "plain nn.Linear layers only" in reasons(report)["model.decoder.final_layer_norm"]
    assert str(report).startswith("plain linear layers, policy fp32: 12 modules converted")
    assert_same_logits(model, expected)


def test_a_model_of_a_family_is_treated_alike_without_strict() -> None:
    model = tiny("llama")
    strict = convert(copy.deepcopy(model), "fp32")
    assert convert(model, "fp32", strict=False) == strict


def test_eager_calls_need_no_guard_because_parameters_are_frozen() -> None:
    model = tiny("gpt_neox")
    convert(model, "fp32")
    assert torch.is_grad_enabled()
    assert not model(tokens()).logits.requires_grad
