"""The modules: they give what separate torch layers give, and keep their weights exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusedops.errors import ConfigError, ShapeError
from fusedops.nn import FusedGatedMLP, FusedLinear, FusedQKV, RMSNorm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_linear(bias: bool, activation: str | None, with_residual: bool) -> None:
    plain = nn.Linear(24, 17, bias)
    fused = FusedLinear.from_weights(plain.weight, plain.bias, activation)
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 17)
    expected = plain(x)
    if activation == "silu":
        expected = F.silu(expected)
    elif activation == "gelu_tanh":
        expected = F.gelu(expected, approximate="tanh")
    if with_residual:
        expected = expected + residual
    torch.testing.assert_close(fused(x, residual if with_residual else None), expected.detach())
    assert not any(p.requires_grad for p in fused.parameters())
    assert set(fused.state_dict()) == set(plain.state_dict())


def test_linear_state_dict_round_trip() -> None:
    plain = nn.Linear(8, 4)
    fused = FusedLinear(8, 4, True)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(fused(x), plain(x).detach())
    with pytest.raises(ShapeError, match="bias has shape"):
        FusedLinear.from_weights(plain.weight, torch.ones(5))
    with pytest.raises(ConfigError, match="unknown activation"):
        FusedLinear(8, 4, activation="swoosh")


@pytest.mark.parametrize("intermediate", [40, 43, 3])
@pytest.mark.parametrize("biases", [(), ("gate", "up", "down"), ("up",)])
def test_gated_mlp(intermediate: int, biases: tuple[str, ...]) -> None:
    gate, up = (nn.Linear(16, intermediate, name in biases) for name in ("gate", "up"))
    down = nn.Linear(intermediate, 16, "down" in biases)
    fused = FusedGatedMLP.from_weights(
        gate.weight, up.weight, down.weight, "silu", gate.bias, up.bias, down.bias
    )
    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    expected = (residual + down(F.silu(gate(x)) * up(x))).detach()
    torch.testing.assert_close(fused(x, residual), expected)
    torch.testing.assert_close(fused(x), expected - residual, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(fused.unpacked(), (gate.weight, up.weight, down.weight), strict=True):
        assert torch.equal(mine, theirs)


def test_gated_mlp_refuses_a_down_of_another_size() -> None:
    with pytest.raises(ShapeError, match="down \\(16, 8\\)"):
        FusedGatedMLP.from_weights(torch.ones(8, 16), torch.ones(8, 16), torch.ones(16, 9))


@pytest.mark.parametrize("biased", [(), ("q", "k", "v"), ("q",)])
def test_qkv(biased: tuple[str, ...]) -> None:
    layers = {
        name: nn.Linear(20, heads * 6, name in biased)
        for name, heads in (("q", 5), ("k", 1), ("v", 1))
    }
    fused = FusedQKV.from_weights(
        *(layer.weight for layer in layers.values()),
        5,
        1,
        6,
        *(layer.bias for layer in layers.values()),
    )
    x = torch.randn(4, 20)
    for mine, layer in zip(fused(x), layers.values(), strict=True):
        torch.testing.assert_close(mine.flatten(1), layer(x).detach())
    with pytest.raises(ShapeError, match="k has shape"):
        FusedQKV.from_weights(torch.ones(30, 20), torch.ones(12, 20), torch.ones(6, 20), 5, 1, 6)


def test_norm_module_with_and_without_residual() -> None:
    norm = RMSNorm(32, 1e-5)
    norm.weight.copy_(torch.randn(32))
    x, residual = torch.randn(3, 32), torch.randn(3, 32)
    expected = F.rms_norm(x, (32,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected)
    normed, added = norm(x, residual)
    assert torch.equal(added, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(added, (32,), norm.weight, 1e-5))


def test_modules_survive_torch_compile() -> None:
    mlp = FusedGatedMLP.from_weights(torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24))
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 16)
    assert torch.equal(compiled(x, x), mlp(x, x))
