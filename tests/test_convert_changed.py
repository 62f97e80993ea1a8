"""convert() on models that differ from what they look like: changed classes, state, modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import assert_same_logits, build, logits, paths, reasons, tiny, tokens
from torch import Tensor, nn

from fusedops.errors import ConfigError
from fusedops.nn import FusedLinear, convert
from fusedops.nn.drop_in import DropInGatedMLP, DropInMLP

transformers = pytest.importorskip("transformers")

from transformers.models.gemma2 import modeling_gemma2  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.mistral import modeling_mistral  # noqa: E402
from transformers.utils.deprecation import deprecate_kwarg  # noqa: E402

MLP = "model.layers.0.mlp"
NORM = "model.layers.0.input_layernorm"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def doubled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``forward`` with twice its result, under its own name."""

    @functools.wraps(forward)
    def twice(*arguments: Any) -> Tensor:
        return 2.0 * forward(*arguments)

    return twice


def unnamed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: 2.0 * forward(*arguments)


# Classes


def subclass(base: type[nn.Module], **members: Any) -> type[nn.Module]:
    """A class of the same name with another ``forward``."""
    return type(base.__name__, (base,), {"forward": doubled(base.forward), **members})


def same_name(model: Any) -> None:
    model.get_submodule(MLP).__class__ = subclass(modeling_llama.LlamaMLP)
    model.get_submodule(NORM).__class__ = subclass(modeling_llama.LlamaRMSNorm)


def same_name_and_place(model: Any) -> None:
    place = {"__module__": modeling_llama.__name__}
    model.get_submodule(MLP).__class__ = subclass(modeling_llama.LlamaMLP, **place)
    model.get_submodule(NORM).__class__ = subclass(modeling_llama.LlamaRMSNorm, **place)


def other_call(model: Any) -> None:
    place = {"__module__": modeling_llama.__name__}
    for path, base in ((MLP, modeling_llama.LlamaMLP), (NORM, modeling_llama.LlamaRMSNorm)):
        members = {"forward": base.forward, "__call__": doubled(nn.Module.__call__), **place}
        model.get_submodule(path).__class__ = subclass(base, **members)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (same_name, "its class is test_convert_changed.Llama"),
        (same_name_and_place, "the forward of its class was replaced"),
        (other_call, "its class has a __call__ of its own"),
    ],
)
def test_a_subclass_of_the_same_name_is_left_alone(
    change: Callable[[Any], None], reason: str
) -> None:
    model = tiny("llama")
    change(model)
    expected = logits(model, tokens())
    report = convert(model, "fp32")
    left = reasons(report)
    for path in (MLP, NORM):
        assert reason in left[path]
        assert not type(model.get_submodule(path)).__module__.startswith("fusedops")
    assert {f"{MLP}.up_proj", "model.layers.1.mlp", "model.norm"} <= paths(report)
    assert_same_logits(model, expected)


@pytest.mark.parametrize("patch", [doubled, unnamed, functools.partial])
@pytest.mark.parametrize(
    ("family", "owner", "name", "path"),
    [
        ("llama", modeling_llama.LlamaMLP, "forward", MLP),
        ("llama", modeling_llama.LlamaRMSNorm, "forward", NORM),
        ("gemma2", modeling_gemma2.Gemma2RMSNorm, "_norm", NORM),
        ("llama", nn.Linear, "forward", Q_PROJ),
        ("gpt_neox", nn.LayerNorm, "forward", "gpt_neox.final_layer_norm"),
    ],
)
def test_a_class_with_a_patched_method_is_left_alone(
    family: str,
    owner: type[nn.Module],
    name: str,
    path: str,
    patch: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(family, num_hidden_layers=1)
    kind = type(model.get_submodule(path))
    assert kind is owner
    monkeypatch.setattr(owner, name, patch(getattr(owner, name)))
    report = convert(model, "fp32")
    assert reasons(report)[path] == f"the {name} of its class was replaced"
    assert type(model.get_submodule(path)) is kind
    assert report.converted
    assert not any(row.old_class == owner.__name__ for row in report.converted)


def test_the_logits_of_a_model_with_a_patched_class_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    plain = logits(model, tokens())
    for owner in (modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm, nn.Linear):
        monkeypatch.setattr(owner, "forward", doubled(owner.forward))
    expected = logits(model, tokens())
    assert (expected - plain).abs().max() > 0.1
    assert convert(model, "fp32").converted == ()
    assert torch.equal(logits(model, tokens()), expected)


def test_the_forward_of_a_sister_class_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", modeling_mistral.MistralMLP.forward, raising=True
    )
    assert MLP in reasons(convert(tiny("llama"), "fp32"))


def test_a_method_replaced_on_the_instance_is_seen() -> None:
    model = tiny("gemma2")
    norm = model.get_submodule(NORM)
    norm._norm = doubled(norm._norm)
    expected = logits(model, tokens())
    assert reasons(convert(model, "fp32"))[NORM] == "its _norm was replaced on the instance"
    assert_same_logits(model, expected)


def test_a_decorator_of_transformers_itself_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = modeling_llama.LlamaMLP
    decorated = deprecate_kwarg("old", version="99.0.0")(owner.forward)
    assert decorated is not owner.forward
    monkeypatch.setattr(owner, "forward", decorated)
    assert MLP in paths(convert(tiny("llama"), "fp32"))


# State that the replacement would not have


def buffer_of(path: str, persistent: bool = True) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(path).register_buffer("extra", torch.ones(2), persistent)

    return change


def child_of(path: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(path).extra = nn.LayerNorm(3)

    return change


def stateful_activation(model: Any) -> None:
    class Scaled(nn.SiLU):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

    model.get_submodule(MLP).act_fn = Scaled()


def state_dict_hook_inside(model: Any) -> None:
    model.get_submodule(f"{MLP}.up_proj").register_state_dict_post_hook(lambda *arguments: None)


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        (buffer_of(MLP), MLP, "it has a buffer 'extra'"),
        (buffer_of(MLP, persistent=False), MLP, "it has a buffer 'extra'"),
        (buffer_of(f"{MLP}.up_proj"), MLP, "up_proj: it has a buffer 'extra'"),
        (buffer_of(NORM), NORM, "it has a buffer 'extra'"),
        (buffer_of(Q_PROJ), Q_PROJ, "it has a buffer 'extra'"),
        (child_of(MLP), MLP, "it has a module 'extra'"),
        (child_of(f"{MLP}.up_proj"), MLP, "up_proj: it has a module 'extra'"),
        (child_of(NORM), NORM, "it has a module 'extra'"),
        (child_of(Q_PROJ), Q_PROJ, "it has a module 'extra'"),
        (stateful_activation, MLP, "its act_fn has parameters or buffers"),
        (state_dict_hook_inside, MLP, "up_proj: a hook is registered on it"),
    ],
)
def test_a_module_with_more_state_than_its_class_has_stays(
    change: Callable[[Any], None], path: str, reason: str
) -> None:
    model = tiny("llama")
    change(model)
    kind, names = type(model.get_submodule(path)), list(model.state_dict())
    buffers = [name for name, _ in model.named_buffers()]
    report = convert(model, "fp32")
    assert reasons(report)[path].startswith(reason)
    assert type(model.get_submodule(path)) is kind
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_buffers()] == buffers
    assert "model.layers.1.mlp" in paths(report)


@pytest.mark.parametrize("path", [NORM, Q_PROJ])
def test_a_module_without_its_weight_stays(path: str) -> None:
    model = tiny("llama")
    del model.get_submodule(path).weight
    assert reasons(convert(model, "fp32"))[path] == "it has no parameter 'weight'"


@pytest.mark.parametrize("activation", [nn.GLU(), nn.CosineSimilarity()])
def test_an_activation_that_is_no_function_of_one_tensor_is_another(activation: Any) -> None:
    model = tiny("llama")
    model.get_submodule(MLP).act_fn = activation
    assert reasons(convert(model, "fp32"))[MLP] == "its act_fn does not compute silu"


@pytest.mark.parametrize("hf_name", ["gelu_new", "gelu_fast", "silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_decide_what_an_activation_computes(
    hf_name: str, dtype: torch.dtype
) -> None:
    model = build("gpt_neox", hidden_act=hf_name, num_hidden_layers=1)
    torch.set_default_dtype(dtype)
    try:
        convert(model, "keep")
    finally:
        torch.set_default_dtype(torch.float32)
    assert type(model.gpt_neox.layers[0].mlp) is DropInMLP


# Values that a policy cannot hold


@pytest.mark.parametrize(
    ("policy", "value", "accepted"),
    [
        ("fp16", 65519.0, True),  # rounds to the largest, 65504
        ("fp16", 65520.0, False),
        ("fp16", -1e6, False),
        ("fp16", float("inf"), True),  # it was infinite before
        ("bf16", -3.4e38, False),
        ("bf16", 1e6, True),
        ("fp32", 3.4e38, True),
        ("keep", 1e6, True),
    ],
)
def test_a_finite_weight_does_not_become_infinite(
    policy: str, value: float, accepted: bool
) -> None:
    model = tiny("llama")
    weight = model.get_submodule(f"{MLP}.up_proj").weight
    weight.data[3, 5] = value
    model.model.norm.weight.data[7] = float("nan")  # it hides nothing in another parameter
    modules = list(model.modules())
    if accepted:
        convert(model, policy)
        up = model.state_dict()[f"{MLP}.up_proj.weight"]
        assert bool(up[3, 5].isfinite()) == (abs(value) < float("inf"))
        return
    with pytest.raises(ConfigError, match=rf"{MLP}\.up_proj\.weight holds a value of magnitude"):
        convert(model, policy)
    weight.data[3, 6], weight.data[3, 7] = float("nan"), float("inf")  # nor in the same one
    with pytest.raises(ConfigError, match=f"policy='{policy}' would make infinite"):
        convert(model, policy)
    assert list(model.modules()) == modules
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


# Inference mode


@functools.cache
def other_model() -> Any:
    return build("llama", seed=1, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("build_inside", "convert_inside", "policy"),
    [
        (False, True, "bf16"),
        (False, True, "keep"),
        (True, False, "bf16"),
        (True, False, "keep"),
        (True, True, "bf16"),
    ],
)
def test_inference_mode_around_building_or_converting_does_not_matter(
    build_inside: bool, convert_inside: bool, policy: str
) -> None:
    with torch.inference_mode(build_inside):
        model = build("llama", num_hidden_layers=1)
    transposed = model.get_submodule(Q_PROJ).weight  # which convert makes contiguous
    with torch.inference_mode(build_inside), torch.no_grad():
        transposed.data = transposed.data.t().contiguous().t()
    expected = logits(model, tokens())
    with torch.inference_mode(convert_inside):
        convert(model, policy)
    assert isinstance(model.get_submodule(MLP), DropInGatedMLP)
    assert type(model.get_submodule(Q_PROJ)) is FusedLinear
    assert {p.is_inference() for p in model.parameters()} == {build_inside}
    atol = 1e-5 if policy == "keep" else 0.2
    torch.testing.assert_close(logits(model, tokens()), expected, rtol=0, atol=atol)
    other = other_model()
    if build_inside:
        # As of any model that was built there: its parameters change only there.
        with pytest.raises(RuntimeError, match=rf"copying into {MLP}\.gate_up: Inplace update"):
            model.load_state_dict(other.state_dict())
    with torch.inference_mode(build_inside):
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model, tokens()), logits(other, tokens()), rtol=0, atol=atol)
    with torch.inference_mode():
        model.load_state_dict(other.state_dict(), assign=True)
    assert {p.is_inference() for p in model.parameters()} == {False}
    model.load_state_dict(other.state_dict())
    assert_same_logits(model, logits(other, tokens()))
