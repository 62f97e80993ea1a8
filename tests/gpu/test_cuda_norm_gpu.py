"""The norm kernels by four oracles: exact values, float64, torch, poisoned memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_cases import assert_same_bits, replayed
from cuda_row_cases import (
    FLOATS,
    assert_all_same,
    assert_few_codes_differ,
    assert_near,
    assert_rounded_alike,
    drawn,
    only_our_kernels,
    row_views,
    run_twice,
    signs,
)
from torch import Tensor

import fusedops
from fusedops.errors import UnsupportedError
from fusedops.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, layer_norm, rms_norm
from fusedops.ops.quantize import quantize
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/norm.cu",
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/fused_quantize.py",
    "fusedops/ops/norm.py",
    "fusedops/ops/op.py",
    "fusedops/ops/quantize.py",
    "fusedops/prologue.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_row_cases.py",
)

pytestmark = pytest.mark.gpu

EPS = 1e-6
COLUMNS = (1, 7, 64, 128, 576, 1000, 1024, 3421, 4096, 8192, 16400)
STORAGES = list(itertools.product(("e4m3", "int8"), ("token", "block128")))


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with only_our_kernels():
        yield


def on_cpu(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The operation's own definition, on the CPU, back on the GPU."""
    with use_provider("reference"):
        moved = [a.cpu() if isinstance(a, Tensor) else a for a in args]
        result = function(*moved, **options)
    if isinstance(result, Tensor):
        return result.cuda()
    return tuple(each.cuda() for each in result)


def rms_args(
    x: Tensor, weight: Tensor, eps: float = EPS, offset: float = 0.0, rounds: bool = True
) -> tuple[Any, ...]:
    return x, weight, eps, offset, rounds


# Oracle 1: exact


# The mean of squares is 4, whose root is exact; so is one over the columns, if a power of two.
EXACT = [
    (columns, dtype)
    for columns, dtype in itertools.product(COLUMNS, FLOATS)
    if dtype != torch.float32 or columns & (columns - 1) == 0
]


@pytest.mark.parametrize(("columns", "dtype"), EXACT, ids=str)
def test_rows_of_one_magnitude_are_exact_bit_for_bit(columns: int, dtype: torch.dtype) -> None:
    weight = signs(columns, size=3.0, dtype=dtype, seed=1)
    for rows in (1, 5, 300):
        x = signs(rows, columns, size=2.0, dtype=dtype)
        (got,) = run_twice("rms_norm", *rms_args(x, weight, 0.0))
        assert_same_bits(got, x / 2 * weight)
        half = signs(rows, columns, size=1.0, dtype=dtype)
        got, total = run_twice("fused_add_rms_norm", half, half, weight, 0.0, 1.0, False)
        assert_same_bits(total, half + half)
        assert_same_bits(got, (half * (weight + 1)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [2, 64, 1024, 4096, 16384])
def test_a_layer_norm_of_two_values_is_exact(columns: int, dtype: torch.dtype) -> None:
    weight, bias = (signs(columns, size=2.0, dtype=dtype, seed=seed) for seed in (1, 2))
    for rows in (1, 300):
        above = torch.arange(columns, device="cuda") % 2 == 0
        x = torch.where(above, 5.0, 3.0).to(dtype).expand(rows, columns)
        (got,) = run_twice("layer_norm", x, weight, bias, 0.0)
        expected = torch.where(above, 1.0, -1.0) * weight.float() + bias.float()
        assert_same_bits(got, expected.to(dtype).expand(rows, columns).contiguous())


# Oracles 2 to 4: float64, torch, poisoned memory


def exact_rms(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight.double() + offset)


def bound_of(exact: Tensor, dtype: torch.dtype, roundings: int) -> Tensor:
    """Relative roundings to the dtype, float32's on the way, and the smallest steps of float16."""
    unit = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return exact.abs() * (roundings * unit * 1.02 + 2.0**-20) + roundings * tiny


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_rms_norm_of_any_rows(columns: int, dtype: torch.dtype) -> None:
    forms = [
        (drawn(columns, dtype=dtype, seed=1), 0.0, True),
        (drawn(columns + 1, dtype=dtype)[1:], 1.0, False),
    ]
    if dtype != torch.float32:
        forms += [(drawn(columns, dtype=torch.float32, seed=2), 0.0, True)]
        forms += [(drawn(columns, dtype=dtype, seed=3), 0.5, True)]
    for x in row_views(columns, dtype):
        for weight, offset, rounds in forms:
            args = rms_args(x, weight, EPS, offset, rounds)
            (got,) = run_twice("rms_norm", *args)
            with use_provider("torch"):
                peer = torch.ops.fusedops.rms_norm(*args)
            exact = exact_rms(x, weight, offset)
            bound = bound_of(exact, dtype, 2 if rounds else 1)
            floor = exact * torch.finfo(dtype).eps / 2
            assert_near(got, exact, bound, peer, (x.shape, x.stride(), offset, rounds), floor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_sum_is_torchs_and_its_norm_is_that_of_the_rounded_sum(
    columns: int, dtype: torch.dtype
) -> None:
    weight = drawn(columns, dtype=dtype, seed=1)
    views = row_views(columns, dtype)
    for x, residual in zip(views, [view.flip(0) for view in views], strict=True):
        got, total = run_twice("fused_add_rms_norm", x, residual, weight, EPS, 0.0, True)
        assert_same_bits(total, (x + residual).contiguous())
        exact = exact_rms(total, weight, 0.0)
        error = (got.double() - exact).abs()
        assert error.le(bound_of(exact, dtype, 2)).all(), (x.shape, x.stride())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_in_place_only_the_views_elements_change(dtype: torch.dtype) -> None:
    for columns in (130, 576, 1000, 4096):
        weight = drawn(columns, dtype=dtype, seed=1)
        for place, step in ((8, 1), (3, 1), (2, 2)):
            whole = [drawn(7, 2 * columns + 40, dtype=dtype, seed=seed) for seed in (2, 3)]
            before = [each.clone() for each in whole]
            end = place + step * columns
            x, residual = (each[1:6, place:end:step] for each in whole)
            expected = fused_add_rms_norm(x, residual, weight, EPS)
            fused_add_rms_norm_(x, residual, weight, EPS)
            for got, wanted, each, old in zip((x, residual), expected, whole, before, strict=True):
                assert torch.equal(got, wanted)
                old[1:6, place:end:step] = got
                assert torch.equal(each, old)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_layer_norm_of_any_rows(columns: int, dtype: torch.dtype) -> None:
    weight, bias = (drawn(columns, dtype=dtype, seed=seed) for seed in (1, 2))
    wide_bias = drawn(columns + 1, dtype=torch.float32, seed=3)[1:]
    for view in row_views(columns, dtype):
        x = view.add_(2)
        for pair in ((weight, bias), (None, None), (weight, None), (None, wide_bias)):
            (got,) = run_twice("layer_norm", x, *pair, 1e-5)
            with use_provider("torch"):
                peer = layer_norm(x, *pair)
            wide = [None if each is None else each.double() for each in pair]
            exact = torch.nn.functional.layer_norm(x.double(), (columns,), *wide, 1e-5)
            # The mean is taken off values of size 2 to 6; what is left counts with their roundings.
            spread = x.double().std(-1, correction=0, keepdim=True) + 1e-5**0.5
            scale = 1.0 if wide[0] is None else wide[0].abs()
            lost = 2.0**-21 * (x.double().abs() + 2) / spread * scale
            bound = (
                bound_of(exact.abs() + (0 if wide[1] is None else wide[1].abs()), dtype, 1) + lost
            )
            floor = exact.abs() * torch.finfo(dtype).eps / 2 + lost
            assert_near(got, exact, bound, peer, (x.shape, x.stride()), floor)


# Quantized


@pytest.mark.parametrize(("storage", "granularity"), STORAGES)
def test_a_quantized_norm_is_quantize_of_the_norm(storage: str, granularity: str) -> None:
    for columns in (64, 128, 300, 576, 1000, 3421, 4096, 4224, 16400):
        weight, bias = (drawn(columns, seed=seed) for seed in (1, 2))
        for x in row_views(columns, torch.bfloat16):
            rms = (None, EPS, 0.0, True, storage, granularity)
            q, scale = run_twice("rms_norm_quantize", x, weight, *rms)
            expected, expected_scale = quantize(
                rms_norm(x, weight, EPS), storage, granularity=granularity
            )
            # The order of additions may follow the groups, which moves a rounding now and then.
            assert_few_codes_differ(q, expected, 1e-3)
            assert (scale / expected_scale - 1).abs().max() <= 2.0**-7
            assert scale.stride() == expected_scale.stride()
            residual = x.flip(0)
            q, total, _ = run_twice("fused_add_rms_norm_quantize", x, residual, weight, *rms)
            assert torch.equal(total, x + residual)
            expected, _ = quantize(rms_norm(total, weight, EPS), storage, granularity=granularity)
            assert_few_codes_differ(q, expected, 1e-3)
        x = drawn(6, columns)
        layer = (x, weight, bias, None, 1e-5, storage, granularity)
        q, _ = run_twice("layer_norm_quantize", *layer)
        expected, _ = quantize(layer_norm(x, weight, bias), storage, granularity=granularity)
        assert_few_codes_differ(q, expected, 1e-3)


@pytest.mark.parametrize("storage", ["e4m3", "int8"])
def test_a_given_scale_is_used(storage: str) -> None:
    x, weight = drawn(6, 1000), drawn(1000, seed=1)
    rows = drawn(12, dtype=torch.float32, seed=2).abs()[::2] + 0.01
    for granularity, scale in (("tensor", torch.full((), 0.02, device="cuda")), ("token", rows)):
        (q,) = run_twice(
            *("rms_norm_quantize", x, weight, scale, EPS, 0.0, True, storage, granularity)
        )
        expected, _ = quantize(
            rms_norm(x, weight, EPS), storage, granularity=granularity, scale=scale
        )
        assert_all_same([q], [expected])


def test_special_rows_follow_the_reference() -> None:
    x = drawn(6, 512, dtype=torch.float32)
    x[0] = 0
    x[1, 100] = math.nan
    x[2, 300] = math.inf
    x[3] = 1e-30
    x[4] = 1e15
    weight = torch.ones(512, device="cuda")
    got, expected = rms_norm(x, weight), on_cpu(rms_norm, x, weight)
    assert torch.equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)
    for granularity in ("token", "block128"):
        q, scale = fusedops.rms_norm_quantize(x, weight, granularity=granularity)
        wanted_q, wanted = on_cpu(fusedops.rms_norm_quantize, x, weight, granularity=granularity)
        torch.testing.assert_close(scale, wanted, rtol=1e-5, atol=0, equal_nan=True)
        assert torch.equal(q.float().isnan(), wanted_q.float().isnan())


# Named cases


def test_b04_no_rows_launch_nothing_and_leave_no_error() -> None:
    weight = drawn(64)
    for shape in ((0, 64), (3, 0, 64), (0, 0, 64)):
        assert rms_norm(drawn(*shape), weight).shape == shape
        q, scale = fusedops.rms_norm_quantize(drawn(*shape), weight, granularity="block128")
        assert (q.shape, scale.shape) == (shape, (1, 0))
    q, scale = fusedops.rms_norm_quantize(drawn(3, 0), drawn(0))
    assert (q.shape, scale.tolist()) == ((3, 0), [1, 1, 1])
    assert torch.ones(3, device="cuda").sum() == 3


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_views_at_odd_offsets(offset: int) -> None:
    base, weight = drawn(5000), drawn(2000, seed=1)
    x, w = base[offset : offset + 4096].view(4, 1024), weight[offset : offset + 1024]
    assert_rounded_alike(rms_norm(x, w), rms_norm(x.clone(), w.clone()))


def test_b12_heads_of_a_fused_projection() -> None:
    qkv = drawn(1024, 4096)
    q = qkv.split([2048, 1024, 1024], 1)[0].view(1024, 16, 128)
    weight = drawn(128, seed=1)
    assert_same_bits(rms_norm(q, weight), rms_norm(q.contiguous(), weight))


def test_b24_gemma_weight_plus_one_is_added_in_float32() -> None:
    x = torch.zeros(2, 4608, dtype=torch.bfloat16, device="cuda")
    x[:, ::9] = 1.0
    for value, peak in ((15.8125, 50.5), (0.00390625, 3.015625)):
        weight = torch.full((4608,), value, dtype=torch.bfloat16, device="cuda")
        y = rms_norm(x, weight, 1e-6, weight_offset=1.0, round_before_weight=False)
        assert torch.equal(y, peak * x)


def test_b26_llamas_order_is_the_references() -> None:
    x, weight = drawn(4, 4096), (1 + 0.1 * drawn(4096, seed=1).float()).bfloat16()
    for rounds in (True, False):
        got = rms_norm(x, weight, round_before_weight=rounds)
        expected = on_cpu(rms_norm, x, weight, round_before_weight=rounds)
        assert (got != expected).float().mean() < 0.002
        assert ((got - expected).abs() <= 2.0**-7 * expected.abs()).all()


def test_b41_a_float32_weight_under_half_activations() -> None:
    x, weight = drawn(4, 256), drawn(256, dtype=torch.float32, seed=1)
    expected = on_cpu(rms_norm, x, weight)
    assert (rms_norm(x, weight) != expected).float().mean() < 0.002


@pytest.mark.parametrize("columns", [64, 128, 256, 8192, 16384, 32768, 65536])
def test_b69_wide_rows(columns: int) -> None:
    weight = drawn(columns, seed=1)
    for rows in (1, 70, 1000):
        x, residual = drawn(rows, columns), drawn(rows, columns, seed=2)
        got, total = fused_add_rms_norm(x, residual, weight, EPS)
        exact = exact_rms(total, weight, 0.0)
        assert ((got.double() - exact).abs() <= bound_of(exact, torch.bfloat16, 2)).all()


def test_rows_that_are_too_long_are_refused() -> None:
    rms_norm(drawn(2, 64), drawn(64))
    with pytest.raises(UnsupportedError, match="up to 65536 elements"):
        rms_norm(drawn(2, 65537), drawn(65537))


@pytest.mark.parametrize("rows", [1, 64, 2000])
def test_a_capture_replays_with_other_values(rows: int) -> None:
    x, weight = drawn(rows, 4096), drawn(4096, seed=9)
    inputs = [drawn(rows, 4096, seed=seed) for seed in (1, 2)]
    for got, values in zip(replayed(lambda: rms_norm(x, weight), x, inputs), inputs, strict=True):
        assert_same_bits(got, rms_norm(values, weight))


def test_compiled_code_gives_the_same() -> None:
    x, weight = drawn(8, 512), drawn(512, seed=1)

    def block(x: Tensor) -> tuple[Tensor, ...]:
        y, total = fused_add_rms_norm(x, x * 2, weight)
        return *fusedops.rms_norm_quantize(y, weight, granularity="block128"), total

    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert_all_same(list(compiled(x)), list(block(x)))


def test_a_chain_of_dependent_launches_sees_every_result() -> None:
    x, weight = drawn(64, 4096), drawn(4096, seed=1)

    def chain(waits: bool) -> list[Tensor]:
        y, total = x, x
        for _ in range(50):
            y, total = fused_add_rms_norm(y, total, weight)
            if waits:
                torch.cuda.synchronize()
        return [y, total]

    assert_all_same(chain(waits=False), chain(waits=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_b35_another_device_than_the_current_one() -> None:
    x, weight = drawn(4, 256), drawn(256, seed=1)
    got = rms_norm(x.to("cuda:1"), weight.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_same_bits(got.to("cuda:0"), rms_norm(x, weight))


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    weight = drawn(512, dtype=torch.float16, seed=1)
    for rows, columns in ((4194305, 512), (131072, 16384)):
        x = drawn(1, columns, dtype=torch.float16).expand(rows, columns).contiguous()
        x[-1] *= 2
        w = weight if columns == 512 else drawn(columns, dtype=torch.float16, seed=1)
        got = rms_norm(x, w)
        for row in (0, rows // 2, rows - 1):
            assert_rounded_alike(got[row : row + 1], rms_norm(x[row : row + 1].clone(), w))
        del got, x


@pytest.mark.gpu_large
def test_b03_a_stride_beyond_32_bits() -> None:
    qkv = torch.empty(2, 139811, 15360, dtype=torch.bfloat16, device="cuda")
    qkv[:, :64, :5120] = drawn(2, 64, 5120)
    q = qkv[:, :64, :5120].unflatten(-1, (40, 128))
    weight = drawn(128, seed=1)
    assert_same_bits(rms_norm(q, weight)[1], rms_norm(q[1].contiguous(), weight))
