"""Packed modules: weights of one dtype, state dicts that are copies, autocast as in nn.Linear."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedops
from fusedops.errors import DTypeError, ShapeError
from fusedops.nn import FusedGatedMLP, FusedLinear, FusedMLP, FusedQKV, RMSNorm
from fusedops.nn.drop_in import DropInGatedMLP, DropInMLP
from fusedops.packing import pack_gate_up

NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def gated(intermediate: int = 16, biased: bool = False) -> DropInGatedMLP:
    shapes = ((intermediate, 16), (intermediate, 16), (16, intermediate))
    tensors = {name: draw(*shape) for name, shape in zip(NAMES, shapes, strict=True)}
    if biased:
        names = (name.replace("weight", "bias") for name in NAMES)
        tensors |= {name: draw(shape[0]) for name, shape in zip(names, shapes, strict=True)}
    return DropInGatedMLP.from_tensors(tensors, ("gate_proj", "up_proj"), "down_proj", "silu")


def plain(biased: bool = True) -> DropInMLP:
    tensors = {"up_proj.weight": draw(16, 8), "down_proj.weight": draw(8, 16)}
    if biased:
        tensors |= {"up_proj.bias": draw(16), "down_proj.bias": draw(8)}
    return DropInMLP.from_tensors(tensors, ("up_proj", "down_proj"), "gelu")


A, B = draw(8, 16), draw(8, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: pack_gate_up(A, B), "gate is float32, up is bfloat16"),
        (lambda: pack_gate_up(B[0], A[0]), "gate is bfloat16, up is float32"),
        (lambda: FusedGatedMLP.from_weights(A, B, A.T), "gate is float32, up is bfloat16"),
        (lambda: FusedGatedMLP.from_weights(A, A, B.T), "down is bfloat16"),
        (
            lambda: FusedGatedMLP.from_weights(A, A, A.T, "silu", A[:, 0], B[:, 0]),
            "gate is float32, up is bfloat16",
        ),
        (lambda: FusedMLP.from_weights(A, B.T), "up is float32, down is bfloat16"),
        (lambda: FusedQKV.from_weights(A, A, B, 2, 2, 4), "k is float32, v is bfloat16"),
        (
            lambda: FusedQKV.from_weights(A, A, A, 2, 2, 4, A[:, 0], None, B[:, 0]),
            "q_bias is float32, v_bias is bfloat16",
        ),
    ],
)
def test_weights_of_several_dtypes_are_refused(make: Any, names: str) -> None:
    with pytest.raises(DTypeError, match=f"{names}.*accepted: one dtype"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda bias: FusedLinear.from_weights(A, bias),
        lambda bias: FusedMLP.from_weights(A, A.T, "gelu", bias),
        lambda bias: FusedGatedMLP.from_weights(A, A, A.T, "silu", None, bias),
        lambda bias: FusedQKV.from_weights(A, A, A, 2, 2, 4, None, bias),
    ],
)
def test_biases_of_another_shape_are_refused(make: Any) -> None:
    make(torch.ones(8))
    make(torch.ones(1, 8))
    for shape in ((7,), (8, 1), ()):
        with pytest.raises(ShapeError, match=r"bias has shape .*accepted: \(8,\)"):
            make(torch.ones(shape))


@pytest.mark.parametrize("make", [FusedLinear.from_weights, lambda w: pack_gate_up(w, w)])
def test_a_weight_must_be_a_matrix(make: Any) -> None:
    with pytest.raises(ShapeError):
        make(torch.ones(2, 2, 2))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_checkpoint_with_gate_and_up_of_two_dtypes_is_refused(assign: bool, kind: str) -> None:
    module = gated(biased=True)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    mixed = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    mixed[f"gate_proj.{kind}"] = mixed[f"gate_proj.{kind}"].bfloat16()
    with pytest.raises(DTypeError, match=rf"gate_proj\.{kind} is bfloat16, up_proj\.{kind} is flo"):
        module.load_state_dict(mixed, assign=assign)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_checkpoint_of_another_dtype_is_cast_and_what_it_lacks_stays_exact() -> None:
    module = gated()
    kept = module.state_dict()
    module.load_state_dict({NAMES[0]: draw(16, 16, dtype=torch.bfloat16)}, strict=False)
    for name in NAMES[1:]:
        assert torch.equal(module.state_dict()[name], kept[name])
    whole = {name: tensor.bfloat16() for name, tensor in kept.items()}
    module.load_state_dict(whole)
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, whole[name].float())
    module.load_state_dict(whole, assign=True)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("intermediate", [16, 8, 3])
@pytest.mark.parametrize("keep_vars", [False, True])
def test_the_state_dict_of_a_gated_mlp_holds_copies(intermediate: int, keep_vars: bool) -> None:
    module = gated(intermediate, biased=True)
    x = draw(2, 16)
    expected, before = module(x), {n: t.clone() for n, t in module.state_dict().items()}
    for tensor in module.state_dict(keep_vars=keep_vars).values():
        assert tensor.is_contiguous()
        tensor.fill_(9.0)
    for tensor in module.unpacked():
        tensor.fill_(9.0)
    assert torch.equal(module(x), expected)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_state_dict_of_an_mlp_without_a_gate_shares_memory_as_in_torch() -> None:
    module = plain()
    for tensor in module.state_dict().values():
        tensor.fill_(9.0)
    for parameter in module.parameters():
        assert (parameter == 9.0).all()


LOWER = [torch.bfloat16, torch.float16]


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, *LOWER], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_layer_under_autocast_is_torchs(
    dtype: torch.dtype, x_dtype: torch.dtype, compiled: bool
) -> None:
    x, weight, bias = whole_numbers(3, 16).to(x_dtype), whole_numbers(8, 16), whole_numbers(8)
    fused: Any = FusedLinear.from_weights(weight, bias)
    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(fused, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            got, expected = fused(x), F.linear(x, weight, bias)
        assert got.dtype == expected.dtype == dtype
        assert torch.equal(got, expected)
        if x_dtype == torch.float32:
            assert torch.equal(fused(x), F.linear(x, weight, bias))  # and none outside of it
            assert fused(x).dtype == torch.float32


def test_a_residual_under_autocast_is_added_in_its_own_precision() -> None:
    x, weight, residual = whole_numbers(3, 16), whole_numbers(8, 16), draw(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = FusedLinear.from_weights(weight)(x, residual)
        expected = residual + F.linear(x, weight)
    assert got.dtype == expected.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_under_autocast_follow_separate_layers(x_dtype: torch.dtype) -> None:
    x, norm = draw(4, 16, dtype=x_dtype), RMSNorm(16)
    gate, up, down, q, k = (draw(*s) / 4 for s in ((24, 16), (24, 16), (16, 24), (8, 16), (4, 16)))
    mlp = FusedGatedMLP.from_weights(gate, up, down)
    qkv = FusedQKV.from_weights(q, k, k, 2, 1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed = norm(x)
        expected = F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
        close = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(mlp(x, norm=norm), expected, **close)
        torch.testing.assert_close(qkv(x, norm=norm)[0].flatten(1), F.linear(normed, q), **close)
        assert norm(x).dtype == x_dtype


@pytest.mark.parametrize("family", ["llama_biased", "qwen3", "gemma2", "gpt_neox"])
def test_a_converted_float32_model_runs_under_autocast(family: str) -> None:
    original, converted = hf_models.tiny(family), hf_models.tiny(family)
    fusedops.convert(converted, "fp32")
    tokens = hf_models.tokens(8)
    with torch.no_grad():
        exact = original(tokens).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs, ours = original(tokens).logits, converted(tokens).logits
    assert ours.dtype == theirs.dtype == torch.bfloat16
    error = (ours.float() - exact).abs().max()
    assert error <= 2.0 * (theirs.float() - exact).abs().max()


def test_a_module_is_still_found_as_a_linear_layer() -> None:
    assert isinstance(FusedLinear(4, 4), nn.Linear)
