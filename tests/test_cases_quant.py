"""Inputs from public bug reports that meet quantized products and layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quant_oracle import floats, int4_values
from torch import Tensor

import fusedops
from fusedops.epilogue import Epilogue
from fusedops.epilogue.base import FLOAT32_ROUNDOFF
from fusedops.errors import ConfigError, DTypeError, ShapeError
from fusedops.nn import QuantLinear
from fusedops.problem import GemmSpec
from fusedops.quant import SCHEMES, quantize_weight, scheme
from fusedops.weight import (
    BlockFp8,
    Dense,
    Fp8Weight,
    Int4,
    Int8Weight,
    WeightFormat,
    pack_nibbles,
)

E4M3 = torch.float8_e4m3fn
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(name: str, n: int = 24, k: int = 256, bias: bool = True) -> QuantLinear:
    weight = (normal(n, k) / k**0.5).bfloat16()
    return QuantLinear.from_weights(weight, normal(n, seed=1).bfloat16() if bias else None, name)


@every_scheme
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)])
def test_b04_no_rows(name: str, shape: tuple[int, ...]) -> None:
    layer = layer_of(name)
    y = layer(torch.empty(shape, dtype=torch.bfloat16))
    assert y.shape == (*shape[:-1], 24)
    assert y.dtype == torch.bfloat16
    assert torch.ones(3).sum() == 3
    assert layer(torch.zeros(1, 256, dtype=torch.bfloat16)).shape == (1, 24)


@every_scheme
@pytest.mark.parametrize("shape", [(5, 24, 40), (2, 4, 3), (1, 1, 1), (17, 33, 65)])
def test_b08_odd_sizes(name: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    layer = layer_of(name, n, k, bias=False)
    x = normal(m, k, seed=2).bfloat16()
    if layer.scheme.activation is None:
        seen = x.double()
    else:
        q, scale, _ = layer.quantize(x)
        granularity = layer.scheme.granularity
        seen = fusedops.dequantize(q, scale, granularity=granularity).double()
    expected = seen @ layer.quantized().dequantize().double().t()
    torch.testing.assert_close(layer(x).double(), expected, rtol=2.0**-8, atol=1e-5)


@every_scheme
def test_b12_leading_dimensions_without_one_row_stride(name: str) -> None:
    qkv = normal(6, 256 * 4, seed=3).bfloat16()
    x = qkv.view(6, 4, 256)[:, 1:3]
    layer = layer_of(name)
    assert torch.equal(layer(x), layer(x.contiguous()))
    turned = normal(256, 5).bfloat16().t()
    assert torch.equal(layer(turned), layer(turned.contiguous()))


@every_scheme
def test_b16_an_all_zero_row_gives_the_bias(name: str) -> None:
    layer = layer_of(name)
    assert layer.bias is not None
    x = normal(4, 256, seed=2).bfloat16()
    alone = layer(x)
    x[2] = 0
    y = layer(x)
    assert torch.equal(y[2], layer.bias)
    if name != "fp8-tensor":  # one scale for all: the other rows may have held its largest value
        assert torch.equal(y[[0, 1, 3]], alone[[0, 1, 3]])
    assert torch.equal(layer(torch.zeros_like(x)), layer.bias.expand(4, -1))
    x[1] = 1e-30
    assert layer(x).isfinite().all()


@every_scheme
def test_b16_an_all_zero_row_of_the_weight(name: str) -> None:
    weight = normal(128, 256).bfloat16()
    weight[:, 128:] = 0
    weight[5] = 0
    layer = QuantLinear.from_weights(weight, None, name)
    y = layer(normal(3, 256, seed=4).bfloat16())
    assert (y[:, 5] == 0).all()
    assert y.isfinite().all()
    stored = layer.quantized()
    assert (stored.scales["w_scale"].float() > 0).all()


@every_scheme
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 31, 32, 255])
def test_b18_a_nan_or_an_infinity_shows_in_its_row(name: str, bad: float, at: int) -> None:
    layer = layer_of(name)
    x = normal(4, 256, seed=2).bfloat16()
    alone = layer(x)
    x[1, at] = bad
    y = layer(x)
    if SCHEMES[name].activation is None:
        assert not y[1].isfinite().any()
    else:
        assert y[1].isnan().all()
    if name != "fp8-tensor":
        assert torch.equal(y[[0, 2, 3]], alone[[0, 2, 3]])
    else:
        assert y.isnan().all()


def b20_weight(form: type[WeightFormat], k: int) -> tuple[WeightFormat, Tensor, dict[str, Tensor]]:
    """A weight that holds 4 everywhere, and scales of 2^-10."""
    scale = 2.0**-10
    if form is Int4:
        stored = Int4(16, k)
        weight = pack_nibbles(torch.full((16, k), 12))
        return stored, weight, {"w_scale": torch.full((stored.groups, 16), scale)}
    if form is BlockFp8:
        block = BlockFp8(16, k)
        scales = {
            "x_scale": torch.full((block.k_blocks, 4), 2.0**-5),
            "w_scale": torch.full((1, block.k_blocks), 2.0**-5),
        }
        return block, torch.full((16, k), 4.0).to(E4M3), scales
    wide = Int8Weight(16, k) if form is Int8Weight else Fp8Weight(16, k)
    return wide, torch.full((16, k), 4.0).to(wide.w_dtype), {"w_scale": torch.full((1, 16), scale)}


@pytest.mark.parametrize("form", [Int4, Int8Weight, Fp8Weight, BlockFp8])
@pytest.mark.parametrize("x_dtype", [torch.float16, E4M3])
def test_b20_scales_come_before_the_cast(form: type[WeightFormat], x_dtype: torch.dtype) -> None:
    stored, weight, scales = b20_weight(form, 4096)
    if x_dtype not in getattr(stored, "x_dtypes", ()):
        x_dtype = E4M3 if form is BlockFp8 else torch.float16
    x = torch.full((4, 4096), 8.0).to(x_dtype)
    y = fusedops.gemm(x, weight, None, scales, weight=stored, out_dtype=torch.float16)
    assert torch.equal(y, torch.full((4, 16), 128.0, dtype=torch.float16))


@pytest.mark.parametrize("kind", [E4M3, torch.int8])
def test_b20_in_the_rowwise_schemes(kind: torch.dtype) -> None:
    x, w = torch.full((4, 4096), 8.0).to(kind), torch.full((16, 4096), 4.0).to(kind)
    scales = {"x_scale": torch.full((4,), 2.0**-4), "w_scale": torch.full((16,), 2.0**-6)}
    chain = "scale(x_scale,m)|scale(w_scale,n)"
    y = fusedops.gemm(x, w, chain, scales, out_dtype=torch.float16)
    assert torch.equal(y, torch.full((4, 16), 128.0, dtype=torch.float16))


def test_b20_very_large_k_of_int8_leaves_nothing_out() -> None:
    k = 133_144  # the largest multiple of 8 whose products fit an int32: 127 * 127 * k < 2^31
    x, w = torch.full((1, k), 127, dtype=torch.int8), torch.full((2, k), -127, dtype=torch.int8)
    w[1] = 127
    y = fusedops.gemm(x, w, out_dtype=torch.float32)
    exact = torch.tensor([[-127 * 127 * k, 127 * 127 * k]])
    assert torch.equal(y, exact.float())


@pytest.mark.parametrize("k", [64, 65_536])
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
def test_rowwise_products_are_within_their_bound_at_any_k(dtype: str, k: int) -> None:
    m, n = 3, 4
    (x, x_scale), (w, w_scale) = (
        fusedops.quantize(normal(rows, k, seed=rows), dtype) for rows in (m, n)
    )
    operands = {"x_scale": x_scale, "w_scale": w_scale, "bias": normal(n)}
    chain = "scale(x_scale,m)|scale(w_scale,n)|bias"
    y = fusedops.gemm(x, w, chain, operands, out_dtype=torch.float16)
    spec = GemmSpec(Dense(n, k), Epilogue.parse(chain), torch.float16)
    accumulator = x.double() @ w.double().t()
    own = (x.double().abs() @ w.double().abs().t()) * 8 * k**0.5 * FLOAT32_ROUNDOFF
    context = spec.context([operands[name].double() for name in spec.operand_names], m)
    bound = spec.epilogue.error_bound(accumulator, own, context)
    exact = accumulator * x_scale.double()[:, None] * w_scale.double() + operands["bias"].double()
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("zero_points", [False, True])
def test_b78_every_group_size(group: int, zero_points: bool) -> None:
    n, k = 64, 512
    q = quantize_weight(normal(n, k).half(), scheme("int4", group=group, zero_points=zero_points))
    x = normal(1, 16, k, seed=1).half()
    y = fusedops.gemm(x, q.weight, None, q.scales, weight=q.format)
    values = int4_values(q.weight, k, group, q.scales["w_scale"], q.scales.get("w_zero"))
    expected = floats(x) @ values.T
    assert abs(floats(y) - expected).max() <= abs(expected).max() * 2.0**-11 + 1e-4


@pytest.mark.parametrize("group", [256, 1024, 16, 100])
def test_b78_other_group_sizes_are_refused(group: int) -> None:
    with pytest.raises(ConfigError, match=rf"group={group}.*accepted are 32, 64, 128, and 0 or K"):
        Int4(64, 4096, group)
    with pytest.raises(ConfigError, match=rf"group={group}; accepted: 0, 32, 64, 128"):
        scheme("int4", group=group)


SHAPES: list[Any] = [(24,), (24, 1), (1, 24)]


@pytest.mark.parametrize("name", ["fp8", "int8", "int8-wo", "fp8-wo"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_b83_scales_of_any_float_dtype_and_shape(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = normal(24, 64).bfloat16()
    q = quantize_weight(weight, name)
    scale = q.scales["w_scale"].to(dtype)
    x = normal(3, 64, seed=1).bfloat16()
    stored = type(q)(q.scheme, q.format, q.weight, {"w_scale": scale.reshape(shape)})
    exact = type(q)(
        q.scheme, q.format, q.weight, {"w_scale": scale.float().view_as(q.scales["w_scale"])}
    )
    y = QuantLinear.from_quantized(stored)(x)
    assert torch.equal(y, QuantLinear.from_quantized(exact)(x))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "fp8-wo", "fp8-block", "w4a8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float8_e8m0fnu])
def test_b83_scales_of_other_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    q = quantize_weight(normal(24, 64).bfloat16(), name)
    scale = q.scales["w_scale"]
    other = scale.view(torch.uint8)[..., : scale.shape[-1]] if dtype.itemsize == 1 else scale
    other = other.view(dtype) if dtype.itemsize == 1 else other.to(dtype)
    stored = type(q)(q.scheme, q.format, q.weight, {"w_scale": other})
    with pytest.raises(DTypeError, match=r"w_scale is .*accepted dtypes: float32, bfloat16"):
        QuantLinear.from_quantized(stored)
    form = None if name in ("fp8", "int8") else q.format
    chain = "scale(w_scale,n)" if form is None else None
    operands = {"w_scale": other}
    x = normal(3, 64).bfloat16() if SCHEMES[name].activation is None else q.weight[:3]
    if name == "w4a8":
        x = normal(3, 64).to(E4M3)
    if name == "fp8-block":
        operands["x_scale"] = torch.ones(1, 3)
    with pytest.raises(DTypeError, match=r"operand 'w_scale' has dtype .*accepted: float32"):
        fusedops.gemm(x, q.weight, chain, operands, weight=form, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (1,), (23,), (24, 2)])
def test_b83_scales_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    q = quantize_weight(normal(24, 64).bfloat16(), "int8")
    stored = type(q)(q.scheme, q.format, q.weight, {"w_scale": torch.ones(shape)})
    with pytest.raises(ShapeError, match=r"w_scale is float32 .*accepted shape: \(24,\)"):
        QuantLinear.from_quantized(stored)


@every_scheme
def test_saturated_activations_keep_their_sign(name: str) -> None:
    if SCHEMES[name].takes_static_scale:
        scale = torch.tensor(1e-3)
        layer = QuantLinear.from_weights(torch.eye(8).bfloat16(), None, name, input_scale=scale)
        largest = 448 if SCHEMES[name].activation == "e4m3" else 127
        y = layer(torch.full((1, 8), -300.0, dtype=torch.bfloat16))
        # The identity's own quantized value is 1 but for int4, whose largest is 7/7.5.
        one = layer.quantized().dequantize().diagonal()
        torch.testing.assert_close(y[0].float(), -largest * 1e-3 * one, rtol=2.0**-8, atol=0)
    else:
        layer = QuantLinear.from_weights(torch.eye(8).bfloat16(), None, name)
        y = layer(torch.full((1, 8), -300.0, dtype=torch.bfloat16))
        assert (y < -250).all()
