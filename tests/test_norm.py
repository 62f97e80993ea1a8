"""RMSNorm, residual add + RMSNorm and LayerNorm on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from fusedops.ops import norm
from fusedops.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, layer_norm, rms_norm
from fusedops.prologue import RmsNormPrologue

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
MAX_ULPS = {torch.float32: 6.0, torch.bfloat16: 0.51, torch.float16: 0.52}
"""Against float64 with the same rounding points: float32 order error, half an ulp at the end."""
ops = torch.ops.fusedops


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near_one(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A norm's weight: 1 + 0.1 * normal."""
    return (1.0 + 0.1 * normal(size, seed=99)).to(dtype)


def assert_follows(
    actual: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> None:
    """Llama's order: equal to float64 with both roundings, but where the first falls on a tie.

    Float32 arithmetic may take the other side of a tie of the first rounding; the result is then
    up to two ulps away, which one value in a thousand may be.
    """
    exact = oracles.rms_norm(x, weight, eps, offset, round_before_weight=True)
    expected = oracles.rounded(exact, x.dtype)
    equal = (oracles.floats(actual) == expected).mean()
    assert equal >= 0.998
    assert oracles.ulps_off(actual, expected) <= 2.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 64), (2, 5, 130), (7,), (4, 1), (33, 4096)])
def test_rms_norm_in_float32_to_the_end(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, dtype=dtype), near_one(shape[-1], dtype)
    y = rms_norm(x, weight, 1e-5, weight_offset=1.0, round_before_weight=False)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    assert oracles.ulps_off(y, oracles.rms_norm(x, weight, 1e-5, 1.0)) <= MAX_ULPS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 576), (2, 5, 130), (33, 4096)])
def test_rms_norm_in_llama_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, dtype=dtype), near_one(shape[-1], dtype)
    assert_follows(rms_norm(x, weight, 1e-5), x, weight, 1e-5)
    assert_follows(rms_norm(x, weight, 1e-5, weight_offset=0.5), x, weight, 1e-5, 0.5)
    wide = near_one(shape[-1])
    assert_follows(rms_norm(x, wide, 1e-5), x, wide, 1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 576), (7,), (2, 5, 130), (33, 4096)])
def test_the_gpu_form_of_llama_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, dtype=dtype), near_one(shape[-1], dtype)
    assert_follows(norm._rms_norm_in_two_kernels(x, weight, 1e-5), x, weight, 1e-5)
    strided = normal(6, 2 * shape[-1], dtype=dtype)[:, : shape[-1]]
    y = norm._rms_norm_in_two_kernels(strided, weight, 1e-5)
    assert y.is_contiguous()
    assert_follows(y, strided, weight, 1e-5)


def test_rms_norm_in_float32_is_the_same_in_both_orders() -> None:
    x, weight = normal(5, 576), near_one(576)
    late = rms_norm(x, weight, round_before_weight=False)
    assert torch.equal(rms_norm(x, weight), late)
    assert oracles.ulps_off(late, oracles.rms_norm(x, weight, 1e-6)) <= MAX_ULPS[torch.float32]


def test_rms_norm_does_not_depend_on_the_default_dtype() -> None:
    x, weight = normal(3, 64), near_one(64)
    expected = rms_norm(x, weight, 3e-4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rms_norm(x, weight, 3.1e-4), rms_norm(x, weight, 3.1e-4))
        assert torch.equal(rms_norm(x, weight, 3e-4), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_rms_norm_takes_extreme_rows() -> None:
    x = torch.zeros(5, 8)
    x[1] = 1e-30
    x[2, 3] = torch.inf
    x[3, 3] = torch.nan
    x[4] = 1e15
    y = rms_norm(x, torch.ones(8), 1e-6)
    assert torch.equal(y[0], torch.zeros(8))
    assert oracles.ulps_off(y[1], oracles.rms_norm(x[1], torch.ones(8), 1e-6)) <= 6.0
    assert y[2, 3].isnan()
    assert torch.equal(y[2, :3], torch.zeros(3))
    assert y[3].isnan().all()
    assert torch.allclose(y[4], torch.ones(8))


def test_b24_gemma_weight_plus_one_is_added_in_float32() -> None:
    x = torch.zeros(2, 4608, dtype=torch.bfloat16)
    x[:, ::9] = 1.0
    for value, peak in ((15.8125, 50.5), (0.00390625, 3.015625)):
        weight = torch.full((4608,), value, dtype=torch.bfloat16)
        y = rms_norm(x, weight, 1e-6, weight_offset=1.0, round_before_weight=False)
        expected = torch.zeros_like(x)
        expected[:, ::9] = peak
        assert torch.equal(y, expected)


def test_b26_the_two_rounding_orders_differ_as_documented() -> None:
    x = normal(4, 4096, dtype=torch.bfloat16, seed=26)
    weight = near_one(4096, torch.bfloat16)
    llama = rms_norm(x, weight)
    late = rms_norm(x, weight, round_before_weight=False)
    assert 0.15 < (llama != late).float().mean().item() < 0.3
    assert_follows(llama, x, weight, 1e-6)
    assert oracles.ulps_off(late, oracles.rms_norm(x, weight, 1e-6)) <= 0.51


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_follows_transformers_llama(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = normal(16, 576, dtype=dtype), near_one(576, dtype)
    module = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        theirs = oracles.floats(module(x))
    ours = rms_norm(x, weight, 1e-5)
    assert oracles.ulps_off(ours, theirs) <= (6.0 if dtype == torch.float32 else 2.0)
    if dtype != torch.float32:
        assert (oracles.floats(ours) == theirs).mean() >= 0.998


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_follows_transformers_gemma(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    x, weight = normal(16, 576, dtype=dtype), (near_one(576) - 1.0).to(dtype)
    module = GemmaRMSNorm(576, eps=1e-6).to(dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        theirs = oracles.floats(module(x))
    ours = rms_norm(x, weight, 1e-6, weight_offset=1.0, round_before_weight=False)
    assert oracles.ulps_off(ours, theirs) <= (6.0 if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [True, False])
def test_fused_add_rms_norm_normalises_the_rounded_sum(dtype: torch.dtype, order: bool) -> None:
    x, residual = normal(6, 200, dtype=dtype), normal(6, 200, dtype=dtype, seed=1)
    weight = near_one(200, dtype)
    y, total = fused_add_rms_norm(x, residual, weight, 1e-5, round_before_weight=order)
    exact = oracles.floats(x) + oracles.floats(residual)
    assert oracles.ulps_off(total, oracles.rounded(exact, dtype)) == 0.0
    assert torch.equal(y, rms_norm(total, weight, 1e-5, round_before_weight=order))
    assert y.is_contiguous()
    assert total.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_add_rms_norm_in_place_equals_the_functional_form(
    dtype: torch.dtype, offset: float
) -> None:
    x, residual = normal(2, 3, 200, dtype=dtype), normal(2, 3, 200, dtype=dtype, seed=1)
    weight = near_one(200, dtype)
    y, total = fused_add_rms_norm(x, residual, weight, weight_offset=offset)
    fused_add_rms_norm_(x, residual, weight, weight_offset=offset)
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


def test_b14_in_place_form_leaves_neighbours_of_a_strided_view_alone() -> None:
    wide_x, wide_residual = torch.full((4, 90), 1234.0), torch.full((4, 90), 1234.0)
    x, residual = wide_x[:, 5:69], wide_residual[:, 3:67]
    x.copy_(normal(4, 64))
    residual.copy_(normal(4, 64, seed=1))
    y, total = fused_add_rms_norm(x, residual, torch.ones(64))
    fused_add_rms_norm_(x, residual, torch.ones(64))
    assert torch.equal(x, y)
    assert torch.equal(residual, total)
    for wide, columns in ((wide_x, (5, 69)), (wide_residual, (3, 67))):
        outside = torch.ones(90, dtype=torch.bool)
        outside[slice(*columns)] = False
        assert (wide[:, outside] == 1234.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", ["none", "weight", "both", "float32"])
def test_layer_norm_rounds_once(dtype: torch.dtype, parameters: str) -> None:
    x = normal(5, 3, 200, dtype=dtype)
    kind = torch.float32 if parameters == "float32" else dtype
    weight = None if parameters == "none" else near_one(200, kind)
    bias = normal(200, dtype=kind, seed=2) if parameters in ("both", "float32") else None
    y = layer_norm(x, weight, bias, 1e-5)
    assert y.dtype == dtype
    assert y.is_contiguous()
    expected = oracles.layer_norm(x, weight, bias, 1e-5)
    # Where weight * normalised and bias cancel, the float32 error stands against the terms.
    limit = 8.0 if dtype == torch.float32 else 0.53
    assert oracles.ulps_off(y, expected, floor=1.0 if dtype == torch.float32 else 0.03) <= limit


def rms(x: Tensor) -> Tensor:
    return rms_norm(x, near_one(x.shape[-1], x.dtype))


def added(x: Tensor) -> Tensor:
    return torch.stack(fused_add_rms_norm(x, x, near_one(x.shape[-1], x.dtype)))


def layered(x: Tensor) -> Tensor:
    return layer_norm(x, near_one(x.shape[-1], x.dtype))


EACH_NORM = pytest.mark.parametrize("norm", [rms, added, layered])


@EACH_NORM
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_unaligned_views_equal_their_copies(
    norm: Callable[[Tensor], Tensor], offset: int
) -> None:
    storage = normal(4 * 64 + 8, dtype=torch.bfloat16)
    view = storage[offset : offset + 4 * 64].view(4, 64)
    assert torch.equal(norm(view), norm(view.clone()))
    weight = storage[offset : offset + 64]
    assert torch.equal(rms_norm(view, weight), rms_norm(view, weight.clone()))


@EACH_NORM
def test_b12_a_view_without_one_row_stride_equals_its_copy(
    norm: Callable[[Tensor], Tensor],
) -> None:
    qkv = normal(64, 4096, dtype=torch.bfloat16)
    q = qkv.split([2048, 1024, 1024], dim=1)[0].view(64, 16, 128)
    assert q.stride() == (4096, 128, 1)
    y = norm(q)
    assert y.is_contiguous()
    assert torch.equal(y, norm(q.contiguous()))


@EACH_NORM
@pytest.mark.parametrize("kind", ["transposed", "every second", "expanded"])
def test_other_strides_equal_their_copies(norm: Callable[[Tensor], Tensor], kind: str) -> None:
    base = normal(12, 16, dtype=torch.bfloat16)
    x = {"transposed": base.t(), "every second": base[:, ::2], "expanded": base[:1].expand(5, 16)}[
        kind
    ]
    y = norm(x)
    assert y.is_contiguous()
    assert torch.equal(y, norm(x.clone(memory_format=torch.contiguous_format)))


@EACH_NORM
@pytest.mark.parametrize("shape", [(0, 8192), (0, 3, 16), (3, 0), (0,)])
def test_b04_empty_inputs_give_empty_results(
    norm: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    y = norm(x)
    assert y.shape[-len(shape) :] == x.shape
    assert y.dtype == x.dtype
    assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))


def test_b04_empty_inputs_in_place() -> None:
    x, residual = torch.empty(0, 64), torch.empty(0, 64)
    fused_add_rms_norm_(x, residual, torch.ones(64))
    assert x.shape == residual.shape == (0, 64)


def test_b41_a_float32_weight_is_used_in_float32() -> None:
    for shape in ((4, 256), (2, 3, 256)):
        x, weight = normal(*shape, dtype=torch.bfloat16), near_one(256)
        y = rms_norm(x, weight, round_before_weight=False)
        assert y.dtype == torch.bfloat16
        assert oracles.ulps_off(y, oracles.rms_norm(x, weight, 1e-6)) <= 0.51


def test_b41_other_dtypes_are_refused() -> None:
    x = normal(4, 256, dtype=torch.float16)
    wrong, right = near_one(256, torch.bfloat16), near_one(256, torch.float16)
    with pytest.raises(DTypeError, match="weight is bfloat16"):
        rms_norm(x, wrong)
    with pytest.raises(TypeError, match="weight is bfloat16"):
        layer_norm(x, wrong)
    with pytest.raises(DTypeError, match="bias is bfloat16"):
        layer_norm(x, right, wrong)
    for residual in (x.float(), x.bfloat16()):
        with pytest.raises(DTypeError, match="residual"):
            fused_add_rms_norm(x, residual, right)
        with pytest.raises(DTypeError, match="residual"):
            fused_add_rms_norm_(x, residual, right)
    with pytest.raises(DTypeError, match="accepted dtypes: float32, bfloat16, float16"):
        rms_norm(x.double(), right)
    with pytest.raises(DTypeError, match="x is int32"):
        rms_norm(x.int(), right)


def test_wrong_shapes_are_refused() -> None:
    x, weight = normal(4, 16), near_one(16)
    for bad in (near_one(15), weight[None], torch.tensor(1.0)):
        with pytest.raises(ShapeError, match=r"accepted shape: \(16,\)"):
            rms_norm(x, bad)
        with pytest.raises(ShapeError, match=r"accepted shape: \(16,\)"):
            layer_norm(x, weight, bad)
    with pytest.raises(ShapeError, match="at least 1 dimension"):
        rms_norm(torch.tensor(1.0), weight)
    for residual in (normal(3, 16), normal(16)):
        with pytest.raises(ShapeError, match="residual"):
            fused_add_rms_norm(x, residual, weight)
        with pytest.raises(ShapeError, match="residual"):
            fused_add_rms_norm_(x, residual, weight)


def test_tensors_of_two_devices_are_refused() -> None:
    x, meta = normal(4, 16), torch.empty(16, device="meta")
    with pytest.raises(DeviceError, match="weight is on meta"):
        ops.rms_norm.default(x, meta, 1e-6, 0.0, True)
    with pytest.raises(DeviceError, match="residual is on meta"):
        fused_add_rms_norm(x, torch.empty(4, 16, device="meta"), near_one(16))


def test_in_place_form_refuses_memory_that_it_would_write_twice() -> None:
    x, weight = normal(4, 16), near_one(16)
    with pytest.raises(LayoutError, match="x is float32"):
        fused_add_rms_norm_(x[:1].expand(4, 16), x.clone(), weight)
    with pytest.raises(LayoutError, match="residual is float32"):
        fused_add_rms_norm_(x, x[:1].expand(4, 16), weight)
    with pytest.raises(LayoutError, match="one tensor"):
        fused_add_rms_norm_(x, x, weight)


def test_gradients_are_refused() -> None:
    x = normal(4, 16).requires_grad_()
    with pytest.raises(UnsupportedError, match="inference only"):
        rms_norm(x, near_one(16))
    with torch.no_grad():
        assert torch.equal(rms_norm(x, near_one(16)), rms_norm(x.detach(), near_one(16)))


@given(
    rows=st.integers(0, 5),
    size=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1000),
)
def test_rms_norm_of_any_small_shape(
    rows: int, size: int, dtype: torch.dtype, scale: float, eps: float, offset: float, seed: int
) -> None:
    x, weight = (normal(rows, size, seed=seed) * scale).to(dtype), near_one(size, dtype)
    y = rms_norm(x, weight, eps, weight_offset=offset, round_before_weight=False)
    assert oracles.ulps_off(y, oracles.rms_norm(x, weight, eps, offset)) <= MAX_ULPS[dtype]


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_b37_opcheck(weight_dtype: torch.dtype) -> None:
    x, weight = normal(3, 32, dtype=torch.bfloat16), near_one(32, weight_dtype)
    residual = normal(3, 32, dtype=torch.bfloat16, seed=1)
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-6, 0.0, True))
    torch.library.opcheck(ops.rms_norm.default, (x.t(), weight[:3], 1e-6, 1.0, False))
    torch.library.opcheck(ops.fused_add_rms_norm.default, (x, residual, weight, 1e-6, 0.0, True))
    torch.library.opcheck(ops.fused_add_rms_norm_.default, (x, residual, weight, 1e-6, 0.0, True))
    torch.library.opcheck(ops.layer_norm.default, (x, weight, None, 1e-6))


def test_b37_compiled_consumers_agree_with_eager_at_any_m() -> None:
    weight = near_one(64)

    def consumer(x: Tensor, residual: Tensor) -> Tensor:
        y, total = fused_add_rms_norm(x, residual, weight)
        return rms_norm(x, weight) + x + y * total + layer_norm(total, weight)

    compiled = torch.compile(consumer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 8):
        x = normal(rows, 64, dtype=torch.bfloat16, seed=rows)
        residual = normal(rows, 64, dtype=torch.bfloat16, seed=100 + rows)
        assert torch.equal(compiled(x, residual), consumer(x, residual))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b39_compiled_in_place_form_keeps_its_effect(backend: str) -> None:
    weight = near_one(64)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        fused_add_rms_norm_(x, residual, weight)
        return x * 2.0

    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for rows in (3, 6):
        x, residual = normal(rows, 64), normal(rows, 64, seed=1)
        eager_x, eager_residual = x.clone(), residual.clone()
        expected = block(eager_x, eager_residual)
        assert torch.equal(compiled(x, residual), expected)
        assert torch.equal(x, eager_x)
        assert torch.equal(residual, eager_residual)


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_an_impossible_eps_is_refused(eps: float) -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ConfigError, match="rms_norm: eps is"):
        rms_norm(x, weight, eps)
    with pytest.raises(ConfigError, match="fused_add_rms_norm: eps is"):
        fused_add_rms_norm(x, x.clone(), weight, eps)
    with pytest.raises(ConfigError, match="fused_add_rms_norm_: eps is"):
        fused_add_rms_norm_(x, x.clone(), weight, eps)
    with pytest.raises(ConfigError, match="layer_norm: eps is"):
        layer_norm(x, eps=eps)
    with pytest.raises(ConfigError, match="rms_norm: eps is"):
        RmsNormPrologue(eps)
