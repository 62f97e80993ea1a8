"""Weights by round-to-nearest: scales, zero points, edges, and the errors of every scheme."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_oracle import block_values, floats, grouped_values, int4_values, nibbles_of
from torch import Tensor

import fusedops
from fusedops.errors import ConfigError, DTypeError, ShapeError
from fusedops.packing import pack_gate_up, pack_rope
from fusedops.quant import SCHEMES, Scheme, as_scheme, quantize_weight, scheme
from fusedops.quant.pack import QuantizedWeight
from fusedops.weight import Int4

VARIANTS = (
    *SCHEMES.values(),
    *(scheme("int4", group=group) for group in (0, 32, 64)),
    *(scheme("int4", group=group, zero_points=True) for group in (0, 32, 128)),
    scheme("int8-wo", group=64),
    scheme("fp8-wo", group=32),
    scheme("w4a8", group=64, zero_points=True),
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def weight_of(n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(q: QuantizedWeight, k: int) -> np.ndarray:
    """The values of a quantized weight, element by element."""
    scale, zero = q.scales["w_scale"], q.scales.get("w_zero")
    if q.scheme.sharing == "block":
        return block_values(q.weight, scale)
    if q.scheme.weight == "int4":
        return int4_values(q.weight, k, q.scheme.group, scale, zero)
    if q.scheme.sharing == "group":
        return grouped_values(q.weight, q.scheme.group, scale)
    return floats(q.weight) * (floats(scale)[:, None] if scale.dim() else float(scale))


def largest_error(q: QuantizedWeight, w: Tensor) -> np.ndarray:
    """Half a step at each value, and what the scale's own rounding adds."""
    ones = replace(q, weight=_ones_like(q), scales=q.scales)
    step = np.abs(oracle(ones, w.shape[1]))
    if q.scheme.weight == "e4m3":
        # Half of a unit in the last of four digits; below 2^-6 units are 2^-9.
        return np.maximum(np.abs(floats(w)) * 2.0**-4, step * 2.0**-10) * 1.0001
    rounding = 16 * 2.0**-8 if q.scheme.weight == "int4" else 128 * 2.0**-8
    is_rounded = q.scales["w_scale"].dtype == torch.bfloat16
    # The end of a range with a zero point may lie half a step further out.
    ends = 0.5 if q.scheme.zero_points else 0.0
    return step * (0.5001 + (rounding if is_rounded else 0.0) + ends)


def _ones_like(q: QuantizedWeight) -> Tensor:
    """Stored values that stand for one step each."""
    if q.scheme.weight != "int4":
        return torch.ones_like(q.weight)
    if q.scheme.zero_points:
        zero = q.scales["w_zero"].t().long()
        stored = q.format
        assert isinstance(stored, Int4)
        columns = zero.repeat_interleave(stored.group_columns, 1)[:, : stored.k]
        shifted = torch.where(columns < 15, columns + 1, columns - 1)
        return fusedops.weight.pack_nibbles(shifted)
    return torch.full_like(q.weight, 0x99)


@every_variant
@pytest.mark.parametrize(("n", "k"), [(130, 200), (7, 128), (16, 5)])
def test_values_are_within_half_a_step(variant: Scheme, n: int, k: int) -> None:
    w = weight_of(n, k)
    q = quantize_weight(w, variant)
    error = np.abs(oracle(q, k) - floats(w))
    assert (error <= largest_error(q, w)).all()
    values = floats(q.dequantize())
    assert (np.abs(values - oracle(q, k)) <= np.abs(values) * 2.0**-24).all()


@every_variant
def test_shapes_and_dtypes_are_what_gemm_takes(variant: Scheme) -> None:
    w = weight_of(24, 300)
    q = quantize_weight(w, variant)
    operands = dict(q.scales)
    x = weight_of(3, 300, seed=1)
    if variant.activation:
        x, operands["x_scale"] = variant.quantize_activations(x)
        assert x.dtype == variant.activation_dtype
    chain = "|".join(variant.scale_steps()) or None
    y = fusedops.gemm(x, q.weight, chain, operands, weight=q.format, out_dtype=torch.float32)
    exact = floats(weight_of(3, 300, seed=1)) @ oracle(q, 300).T
    assert np.linalg.norm(floats(y) - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(("n", "k"), [(0, 64), (3, 0), (0, 0), (1, 1)])
@every_variant
def test_no_rows_or_no_columns(variant: Scheme, n: int, k: int) -> None:
    q = quantize_weight(weight_of(n, k), variant)
    assert q.dequantize().shape == (n, k)
    operands = dict(q.scales)
    x = torch.zeros(2, k)
    if variant.activation:
        x, operands["x_scale"] = variant.quantize_activations(x)
    chain = "|".join(variant.scale_steps()) or None
    y = fusedops.gemm(x, q.weight, chain, operands, weight=q.format, out_dtype=torch.float32)
    assert torch.equal(y, torch.zeros(2, n))


@every_variant
def test_zeros_have_scale_one_and_stay_zeros(variant: Scheme) -> None:
    w = weight_of(256, 256)
    w[:128] = 0
    q = quantize_weight(w, variant)
    assert (q.dequantize()[:128] == 0).all()
    scale = q.scales["w_scale"]
    if variant.sharing == "block":
        assert (scale[0] == 1).all()
        assert (scale[1] != 1).any()
    elif variant.sharing == "group":
        assert (scale[:, :128] == 1).all()
    elif variant.sharing == "channel":
        assert (scale[:128] == 1).all()
    whole = quantize_weight(torch.zeros(8, 64), variant)
    assert (whole.scales["w_scale"] == 1).all()
    assert (whole.dequantize() == 0).all()


@every_variant
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.6e38])
def test_extreme_weights_keep_finite_scales(variant: Scheme, size: float) -> None:
    w = torch.linspace(-size, size, 8 * 64).reshape(8, 64)
    q = quantize_weight(w, variant)
    scale = q.scales["w_scale"].float()
    assert scale.isfinite().all()
    assert (scale >= torch.finfo(torch.float32).tiny).all()
    error = np.abs(oracle(q, 64) - floats(w)).max()
    coarse = 2.0**-126 if size < 1e-35 else 0.0
    assert error <= size * (0.1 if variant.weight == "int4" else 0.04) + coarse


@every_variant
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_damaged_weights_are_refused(variant: Scheme, value: float) -> None:
    w = weight_of(8, 64)
    w[3, 5] = value
    with pytest.raises(ConfigError, match=r"gate_proj holds 1 value\(s\) that are NaN or infinite"):
        quantize_weight(w, variant, name="gate_proj")


def exact_steps(value: float, scale: float) -> int:
    """value / scale rounded half to even, by whole numbers."""
    return round(Fraction(value) / Fraction(scale))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=40),
    st.booleans(),
)
def test_int4_nibbles_are_the_nearest_by_whole_numbers(row: list[float], zero: bool) -> None:
    w = torch.tensor([row])
    q = quantize_weight(w, scheme("int4", group=0, zero_points=zero))
    scale = q.scales["w_scale"].item()
    absmax = max(abs(v) for v in row)
    if zero:
        low, high = min(0.0, *row), max(0.0, *row)
        expected_scale = np.float32(high) / np.float32(15) - np.float32(low) / np.float32(15)
        offset = q.scales["w_zero"].item()
        assert offset == min(15, exact_steps(-low, scale))
    else:
        expected_scale, offset = np.float32(absmax) / np.float32(7.5), 8
    assert scale == (max(expected_scale, 2.0**-126) if absmax else 1.0)
    steps = np.array([exact_steps(v, scale) + offset for v in row])
    # float32 division may round a tie's neighbour onto the tie: one nibble off at most, there.
    found = nibbles_of(q.weight, len(row))[0]
    off = np.abs(found - steps.clip(0, 15))
    ties = [abs(abs(v / scale) % 1 - 0.5) < 1e-5 for v in row]
    assert (off <= np.array(ties)).all()


def test_8_bit_rows_are_those_of_quantize() -> None:
    w = weight_of(9, 70)
    for name, dtype in (("fp8", "e4m3"), ("int8", "int8")):
        q, scale = fusedops.quantize(w, dtype)
        found = quantize_weight(w, name)
        assert torch.equal(found.weight.view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(found.scales["w_scale"], scale)
    q, scale = fusedops.quantize(w, granularity="tensor")
    found = quantize_weight(w, "fp8-tensor")
    assert torch.equal(found.weight.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(found.scales["w_scale"], scale)


def test_one_group_has_float32_scales_and_more_have_bfloat16_ones() -> None:
    for name in ("int4", "int8-wo", "fp8-wo"):
        one, more = (quantize_weight(weight_of(4, 128), scheme(name, group=g)) for g in (128, 64))
        assert one.scales["w_scale"].dtype == torch.float32
        assert more.scales["w_scale"].dtype == torch.bfloat16


@every_variant
def test_packing_rows_composes_with_quantizing(variant: Scheme) -> None:
    gate, up = weight_of(300, 200), 5 * weight_of(300, 200, seed=1)
    packed = quantize_weight(pack_gate_up(gate, up), variant, rows="gate_up")
    if variant.sharing == "tensor":
        whole = quantize_weight(torch.cat((gate, up)), variant).dequantize()
        halves = whole.chunk(2)
    else:
        halves = tuple(quantize_weight(half, variant).dequantize() for half in (gate, up))
    assert torch.equal(packed.dequantize(), pack_gate_up(*halves))


@pytest.mark.parametrize(("head_dim", "rows"), [(64, "plain"), (128, "plain"), (256, "gate_up")])
def test_block_scales_follow_packed_rotation_partners(head_dim: int, rows: str) -> None:
    w = weight_of(512, 130) * torch.linspace(0.1, 9.0, 512)[:, None]
    own = quantize_weight(w.bfloat16(), "fp8-block")
    packed = quantize_weight(pack_rope(w.bfloat16(), head_dim), "fp8-block", rows=rows)
    assert torch.equal(packed.dequantize(), pack_rope(own.dequantize(), head_dim))


@pytest.mark.parametrize("layout", ["wgmma16", "wgmma8"])
def test_layouts_hold_the_same_values(layout: str) -> None:
    q = quantize_weight(weight_of(70, 130), scheme("int4", group=64, zero_points=True))
    tiled = q.in_layout(layout)
    assert tiled.weight.shape == (5, 3, 512)
    assert torch.equal(tiled.dequantize(), q.dequantize())
    assert torch.equal(tiled.in_layout("rows").weight, q.weight)
    assert torch.equal(tiled.in_layout("wgmma16").weight, q.in_layout("wgmma16").weight)
    with pytest.raises(ConfigError, match="accepted are weights with scales in groups"):
        quantize_weight(weight_of(4, 4), "int8").in_layout(layout)


@pytest.mark.parametrize("name", ["int8-wo", "fp8-wo"])
def test_eight_bit_weights_lie_in_fragments_too(name: str) -> None:
    q = quantize_weight(weight_of(70, 130), scheme(name, group=64))
    tiled = q.in_layout("wgmma16")
    assert tiled.weight.shape == (5, 5, 512)
    assert tiled.weight.dtype == q.weight.dtype
    assert torch.equal(tiled.dequantize(), q.dequantize())
    assert torch.equal(tiled.in_layout("rows").weight.view(torch.uint8), q.weight.view(torch.uint8))
    with pytest.raises(ConfigError, match="layout='wgmma8'; accepted are rows, wgmma16"):
        q.in_layout("wgmma8")


def test_nan_has_no_place_in_fragments() -> None:
    q = quantize_weight(weight_of(16, 64), "fp8-wo")
    q.weight.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(ConfigError, match="the weight holds NaN"):
        q.in_layout("wgmma16")


def test_errors_of_schemes() -> None:
    with pytest.raises(ConfigError, match=r"scheme 'int3' \(str\); accepted are fp8, fp8-tensor"):
        as_scheme("int3")
    with pytest.raises(ConfigError, match=r"group=48; accepted: 0, 32, 64, 128"):
        scheme("int4", group=48)
    with pytest.raises(ConfigError, match=r"scheme fp8: group=32; accepted: 0 \(its scales have"):
        scheme("fp8", group=32)
    with pytest.raises(ConfigError, match="only int4 weights have them"):
        scheme("int8-wo", zero_points=True)
    with pytest.raises(ConfigError, match="activations stay as they are"):
        as_scheme("int4").quantize_activations(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match="dynamic scales only"):
        as_scheme("fp8-block").quantize_activations(torch.zeros(2, 2), torch.ones(()))
    with pytest.raises(DTypeError, match=r"w is int8 \(2, 2\)"):
        quantize_weight(torch.zeros(2, 2, dtype=torch.int8), "fp8", name="w")
    with pytest.raises(ShapeError, match=r"weight is float32 \(2,\) on cpu; it needs exactly 2"):
        quantize_weight(torch.zeros(2), "fp8")


def test_schemes_print_their_options() -> None:
    assert str(as_scheme("fp8")) == "fp8"
    assert str(as_scheme("int8-wo")) == "int8-wo (per row)"
    assert str(scheme("int4", zero_points=True)) == "int4 (groups of 128, zero points)"
