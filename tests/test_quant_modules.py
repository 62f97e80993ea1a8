"""Quantized layers and blocks against float64, their state, and what surrounds them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.errors import ConfigError, DTypeError, ShapeError
from fusedops.nn import (
    QuantGatedMLP,
    QuantizedActivations,
    QuantLinear,
    QuantMLP,
    QuantQKV,
    RMSNorm,
    quant_state,
)
from fusedops.packing import unpack_gate_up
from fusedops.quant import SCHEMES, quantize_weight, scheme

BF16 = torch.bfloat16
STATIC = ("fp8", "fp8-tensor", "int8", "w4a8")
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return (normal(n, k, seed=seed, dtype=torch.float32) / k**0.5).to(BF16)


def seen(layer: QuantLinear, x: Tensor) -> Tensor:
    """x as the layer's product sees it, float64."""
    if layer.scheme.activation is None:
        return x.double()
    q, scale, _ = layer.quantize(x)
    granularity = layer.scheme.granularity if layer.input_scale is None else "tensor"
    wide = {"token": scale[..., None], "tensor": scale}
    if granularity != "block128":
        return q.double() * wide[granularity].double()
    columns = scale.t().repeat_interleave(128, 1)[:, : x.shape[-1]].reshape(x.shape)
    return q.double() * columns.double()


def exact(layer: QuantLinear, x: Tensor) -> Tensor:
    """The layer's product and bias of what it sees, float64."""
    product = seen(layer, x) @ layer.quantized().dequantize().double().t()
    return product if layer.bias is None else product + layer.bias.double()


def assert_rounded_once(actual: Tensor, expected: Tensor) -> None:
    """A result in bf16 is the expected one but for its own rounding and float32's sums."""
    assert actual.dtype == BF16
    error = (actual.double() - expected).abs()
    assert (error <= expected.abs() * 2.0**-8 + 1e-5).all()


@every_scheme
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_its_quantized_product(name: str, bias: bool) -> None:
    w, b = weight(24, 300), normal(24, seed=1) if bias else None
    layer = QuantLinear.from_weights(w, b, name)
    x, residual = normal(2, 3, 300, seed=2), normal(2, 3, 24, seed=3)
    expected = exact(layer, x)
    assert_rounded_once(layer(x), expected)
    assert_rounded_once(layer(x, residual), expected + residual.double())
    error = expected - (x.double() @ w.double().t() + (0 if b is None else b.double()))
    assert error.norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("name", STATIC)
def test_a_static_scale_of_activations(name: str) -> None:
    largest = 448 if SCHEMES[name].activation == "e4m3" else 127
    scale = torch.tensor(3.0 / largest)
    layer = QuantLinear.from_weights(weight(16, 128), None, name, input_scale=scale)
    x = normal(5, 128, seed=1)
    assert x.abs().max() > 3  # some saturate
    assert_rounded_once(layer(x), exact(layer, x))
    rows = layer(x[:2])
    assert torch.equal(rows, layer(x)[:2])
    assert "static scale" in repr(layer)


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - set(STATIC)))
def test_schemes_without_static_scales_refuse_one(name: str) -> None:
    with pytest.raises(ConfigError, match="takes no static scale of activations"):
        QuantLinear.from_weights(weight(16, 128), None, name, input_scale=torch.ones(()))


@every_scheme
def test_an_activation_and_a_norm(name: str) -> None:
    norm = RMSNorm(64, 1e-5, dtype=BF16)
    norm.weight.copy_(1 + 0.1 * normal(64, seed=5))
    layer = QuantLinear.from_weights(weight(16, 64), None, name, activation="silu")
    x = normal(4, 64, seed=1)
    expected = nn.functional.silu(exact(layer, norm.normalize(x)))
    assert_rounded_once(layer(x, norm=norm), expected)


@every_scheme
@pytest.mark.parametrize("intermediate", [64, 116])
def test_a_gated_mlp(name: str, intermediate: int) -> None:
    gate, up = weight(intermediate, 48, 1), weight(intermediate, 48, 2)
    down = weight(48, intermediate, 3)
    gate_bias, down_bias = normal(intermediate, seed=4), normal(48, seed=5)
    mlp = QuantGatedMLP.from_weights(gate, up, down, name, "silu", gate_bias, None, down_bias)
    norm = RMSNorm(48, dtype=BF16)
    x, residual = normal(6, 48, seed=6), normal(6, 48, seed=7)
    halves = unpack_gate_up(exact(mlp.gate_up, norm.normalize(x)).t(), intermediate)
    hidden = (nn.functional.silu(halves[0]) * halves[1]).t()
    values = mlp.down.quantized().dequantize().double()[:, :intermediate]
    expected = hidden @ values.t() + down_bias.double() + residual.double()
    error = (mlp(x, residual, norm).double() - expected).norm() / expected.norm()
    # Quantizing ``hidden`` is what is left: 2^-4 / sqrt(12) for e4m3 at most.
    assert error < (0.02 if mlp.down.scheme.activation else 0.004)
    assert_rounded_once(mlp(x, norm=norm), mlp(x, torch.zeros_like(x), norm).double())


@pytest.mark.parametrize(
    ("name", "static"),
    [("fp8-block", False), ("int8", False), ("int8", True), ("fp8", False), ("fp8", True)],
)
def test_what_the_next_layer_takes_is_quantized_in_the_epilogue(name: str, static: bool) -> None:
    scale = torch.tensor(0.01) if static else None
    mlp = QuantMLP.from_weights(
        weight(128, 64), weight(64, 128), name, "gelu", down_input_scale=scale
    )
    given = mlp.up.into(mlp.down, normal(3, 64))
    assert isinstance(given, QuantizedActivations)
    assert given.q.dtype == SCHEMES[name].activation_dtype
    assert given.dtype == BF16
    with fusedops.use_provider("reference") as usage:
        mlp(normal(3, 64))
    fused = static or name == "fp8-block"
    calls = usage.count("quantize", "reference") + usage.count("quantize_static", "reference")
    assert calls == (1 if fused else 2)
    assert usage.count("gemm", "reference") == 2


def test_a_norm_quantizes_in_its_own_kernel() -> None:
    layer = QuantLinear.from_weights(weight(16, 64), None, "fp8")
    with fusedops.use_provider("reference") as usage:
        layer(normal(4, 64), norm=RMSNorm(64, dtype=BF16))
    assert usage.count("rms_norm_quantize", "reference") == 1


@every_scheme
def test_mlp_without_a_gate(name: str) -> None:
    up, down = weight(40, 64), weight(64, 40)
    mlp = QuantMLP.from_weights(up, down, name, "gelu", normal(40), normal(64))
    x = normal(5, 64, seed=2)
    hidden = nn.functional.gelu(exact(mlp.up, x))
    expected = hidden @ mlp.down.quantized().dequantize().double().t() + normal(64).double()
    assert (mlp(x).double() - expected).norm() < 0.03 * expected.norm()


def test_schemes_may_differ_within_a_block() -> None:
    parts = (weight(32, 64, 1), weight(32, 64, 2), weight(64, 32, 3))
    mlp = QuantGatedMLP.from_weights(*parts, "int4", down_scheme=None)
    assert mlp.gate_up.scheme.name == "int4"
    assert mlp.down.scheme.name == "none"
    assert torch.equal(mlp.down.weight, parts[2])
    x = normal(3, 64)
    assert mlp(x).shape == (3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x.float()).dtype == BF16


@every_scheme
def test_qkv(name: str) -> None:
    q, k, v = weight(64, 48, 1), weight(32, 48, 2), weight(32, 48, 3)
    block = QuantQKV.from_weights(q, k, v, 4, 2, 16, name, normal(64), None, normal(32, seed=1))
    x = normal(5, 48, seed=4)
    got = block(x, RMSNorm(48, dtype=BF16))
    joint = exact(block.joint, RMSNorm(48, dtype=BF16).normalize(x))
    assert [tuple(t.shape) for t in got] == [(5, 4, 16), (5, 2, 16), (5, 2, 16)]
    assert_rounded_once(torch.cat([t.flatten(1) for t in got], 1), joint)


@every_scheme
def test_under_autocast_x_is_cast(name: str) -> None:
    layer = QuantLinear.from_weights(weight(24, 64), normal(24), name)
    x, norm = normal(3, 64, dtype=torch.float32), RMSNorm(64)
    expected = layer(x.to(BF16)), layer(norm.normalize(x).to(BF16))
    with torch.autocast("cpu", BF16):
        got = layer(x), layer(x, norm=norm)
    assert all(map(torch.equal, got, expected))


# State


MODULES: dict[str, Callable[[str], nn.Module]] = {
    "linear": lambda name: QuantLinear.from_weights(weight(24, 64), normal(24), name),
    "gated": lambda name: QuantGatedMLP.from_weights(
        weight(20, 64, 1), weight(20, 64, 2), weight(64, 20, 3), name
    ),
    "qkv": lambda name: QuantQKV.from_weights(
        weight(32, 64, 1), weight(16, 64, 2), weight(16, 64, 3), 2, 1, 16, name
    ),
}


def results(module: nn.Module) -> list[Tensor]:
    y = module(normal(3, 64, seed=9))
    return list(y) if isinstance(y, tuple) else [y]


@every_scheme
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(name: str, kind: str, assign: bool) -> None:
    module = MODULES[kind](name)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data = torch.zeros_like(parameter)
    other.load_state_dict(module.state_dict(), assign=assign)
    assert all(map(torch.equal, results(other), results(module)))
    assert not any(parameter.requires_grad for parameter in module.parameters())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert all(map(torch.equal, results(again), results(module)))


@every_scheme
def test_a_layer_made_empty_loads_one_with_values(name: str) -> None:
    layer = QuantLinear.from_weights(weight(24, 200), normal(24), name)
    empty = QuantLinear(200, 24, name, bias=True, dtype=BF16)
    empty.load_state_dict(layer.state_dict())
    x = normal(3, 200)
    assert torch.equal(empty(x), layer(x))
    assert {k: (v.shape, v.dtype) for k, v in empty.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in layer.state_dict().items()
    }


@every_scheme
def test_b84_a_plain_checkpoint_is_quantized_as_it_is_loaded(name: str) -> None:
    w, b = weight(24, 64, 5), normal(24, seed=6)
    layer = QuantLinear.from_weights(weight(24, 64), normal(24), name)
    layer.load_state_dict({"weight": w, "bias": b})
    x = normal(3, 64)
    assert torch.equal(layer(x), QuantLinear.from_weights(w, b, name)(x))
    parts = [weight(20, 64, 1), weight(20, 64, 2), weight(64, 20, 3)]
    mlp = MODULES["gated"](name)
    names = ("gate_proj", "up_proj", "down_proj")
    new = [part * 2 for part in parts]
    mlp.load_state_dict({f"{n}.weight": part for n, part in zip(names, new, strict=True)})
    expected = QuantGatedMLP.from_weights(*new, name)
    assert torch.equal(mlp(x), expected(x))


def test_a_checkpoint_of_another_scheme_is_refused() -> None:
    fp8 = QuantLinear.from_weights(weight(24, 64), None, "fp8")
    int8 = QuantLinear.from_weights(weight(24, 64), None, "int8")
    before = fp8(normal(3, 64))
    with pytest.raises(RuntimeError, match=r"has int8 \(24, 64\) on cpu; accepted: float8_e4m3fn"):
        fp8.load_state_dict(int8.state_dict())
    assert torch.equal(fp8(normal(3, 64)), before)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        fp8.load_state_dict({"weight": fp8.weight})


@pytest.mark.parametrize(
    ("name", "layout", "pieces"),
    [("int4", "wgmma16", 4), ("w4a8", "wgmma8", 4), ("int8-wo", "wgmma16", 7)],
)
def test_layouts_are_not_seen_from_outside(name: str, layout: str, pieces: int) -> None:
    layer = QuantLinear.from_weights(weight(72, 200), None, name)
    x, state = normal(3, 200), layer.state_dict()
    expected = layer(x)
    layer.set_layout(layout)
    assert layer.weight.shape == (5, pieces, 512)
    assert torch.equal(layer(x), expected)
    tiled = layer.state_dict()
    assert all(torch.equal(tiled[key], state[key]) for key in state)
    layer.weight.zero_()
    layer.load_state_dict(state)
    assert torch.equal(layer(x), expected)
    layer.load_state_dict({"weight": weight(72, 200)})
    assert torch.equal(layer(x), expected)
    layer.set_layout("rows")
    assert torch.equal(layer.weight, state["weight"])


@every_scheme
def test_casting_a_model_leaves_quantized_tensors_alone(name: str) -> None:
    layer = QuantLinear.from_weights(weight(24, 64), normal(24), name)
    dtypes = {key: tensor.dtype for key, tensor in layer.state_dict().items()}
    model = nn.Sequential(layer, nn.Linear(24, 8)).to(torch.float16)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float16
    assert {k: t.dtype for k, t in layer.state_dict().items()} == {**dtypes, "bias": torch.float16}
    assert model.to("meta")[0].weight.device.type == "meta"
    with torch.no_grad():
        x = normal(3, 64).half()
        whole = nn.Sequential(QuantLinear.from_weights(weight(24, 64), None, name)).half()
        assert whole(x).dtype == torch.float16


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "int4"])
def test_compiled_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    mlp = MODULES["gated"](name)
    norm = RMSNorm(64, dtype=BF16)
    x = normal(4, 64)
    compiled = torch.compile(lambda t: mlp(t, t, norm), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), mlp(x, x, norm))


@every_scheme
def test_repr_says_sizes_scheme_and_epilogue(name: str) -> None:
    layer = QuantLinear(64, 32, name, bias=True, activation="silu", dtype=BF16)
    text = repr(layer)
    assert text.startswith(f"QuantLinear(64, 32, scheme={layer.scheme}, epilogue='")
    assert "bias|act(silu)'" in text


def test_errors_name_the_argument() -> None:
    q = quantize_weight(weight(24, 64), scheme("int4", group=32))
    good = q.scales["w_scale"]
    bad: list[tuple[Tensor, Any, str]] = [
        (good.t(), ShapeError, r"w_scale is bfloat16 \(24, 2\).*accepted shape: \(2, 24\)"),
        (good.double(), DTypeError, "w_scale is float64.*accepted dtypes: float32"),
        (good.view(torch.uint8), DTypeError, "w_scale is uint8"),
    ]
    for scale, error, message in bad:
        broken = type(q)(q.scheme, q.format, q.weight, {"w_scale": scale})
        with pytest.raises(error, match=message):
            QuantLinear.from_quantized(broken)
    asymmetric = quantize_weight(weight(24, 64), scheme("int4", zero_points=True))
    asymmetric.scales["w_zero"][0, 3] = 17
    with pytest.raises(ConfigError, match="w_zero holds 17; accepted are zero points 0 to 16"):
        QuantLinear.from_quantized(asymmetric)
    with pytest.raises(ShapeError, match=r"bias has shape \(5,\); accepted: \(24,\)"):
        QuantLinear.from_quantized(q, torch.zeros(5))
    with pytest.raises(ConfigError, match="an activation or a gate, got both"):
        QuantLinear.from_quantized(q, activation="silu", gate="silu")
    with pytest.raises(ConfigError, match=r"norm is a torch\.nn\..*RMSNorm; accepted"):
        QuantLinear.from_quantized(q)(normal(2, 64), norm=nn.RMSNorm(64))
    with pytest.raises(DTypeError, match="x is 3"):
        QuantLinear.from_quantized(q)(3)
    layer = QuantLinear.from_weights(weight(24, 24), None, "fp8")
    with pytest.raises(ShapeError, match=r"gate_up has 24 rows and down 24 columns"):
        QuantGatedMLP(layer, layer, 24)
    with pytest.raises(ShapeError, match="up has 24 rows and down 64 columns"):
        QuantMLP(QuantLinear.from_quantized(q), QuantLinear.from_quantized(q))
    with pytest.raises(ShapeError, match="the joint layer has 24 rows; accepted are 64"):
        QuantQKV(QuantLinear.from_quantized(q), 2, 1, 16)


@pytest.mark.parametrize(
    ("name", "layout"), [("int4", "wgmma16"), ("w4a8", "wgmma8"), ("fp8-wo", "wgmma16")]
)
def test_a_layer_is_laid_out_for_the_kernels_of_its_device(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU in the place of a GPU: made there, moved there, and made without values."""
    rows = QuantLinear.from_weights(weight(40, 96), None, name)
    x = normal(3, 96)
    expected = rows(x)

    def of_device(form: object, x_dtype: torch.dtype | None, device: torch.device) -> str:
        return "wgmma8" if x_dtype == torch.float8_e4m3fn else "wgmma16"

    monkeypatch.setattr(quant_state, "kernel_layout", of_device)
    made = QuantLinear.from_weights(weight(40, 96), None, name)
    empty = QuantLinear(96, 40, name)
    from_meta = QuantLinear(96, 40, name, device="meta").to_empty(device="cpu")
    for layer in (empty, from_meta):
        layer.load_state_dict(rows.state_dict())
    for layer in (made, empty, from_meta):
        assert f"{layer.format}".endswith(layout + ")")
        assert torch.equal(layer(x), expected)
        state = layer.state_dict()
        assert all(torch.equal(state[key], given) for key, given in rows.state_dict().items())
    monkeypatch.setattr(quant_state, "kernel_layout", lambda *_: None)
    made.to("meta").to_empty(device="cpu")
    assert made.weight.shape == rows.weight.shape
