"""Memory-bound operations on a GPU against the CPU: bitwise wherever the rule fixes every bit.

Each call pins the provider ``torch``: these tests hold the reference path on CUDA to the CPU's
results; kernels have tests of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.errors import ConfigError, DeviceError
from fusedops.ops.histogram import (
    HISTOGRAM_DTYPES,
    INDEX_DTYPES,
    bincount,
    expert_histogram,
    histogram,
)
from fusedops.ops.quantize import (
    FORMATS,
    GRANULARITIES,
    SMALLEST_SCALE,
    dequantize,
    quantize,
)
from fusedops.ops.reduce import REDUCE_DTYPES, REDUCTIONS, reduce
from fusedops.ops.transpose import TRANSPOSE_DTYPES, transpose
from fusedops.providers.base import use_provider

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

DEVICE = "cuda"
PROVIDER = "torch"
FORMAT_NAMES = tuple(FORMATS)
ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*ACTIVATIONS, torch.float64)
EXACT_REDUCTIONS = tuple(op for op in REDUCTIONS if op != "logsumexp")


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    """Pin the provider in strict mode and require that it, and no other, ran on the GPU."""
    with use_provider(PROVIDER) as usage:
        yield
    assert usage.calls, "no operation ran"
    assert {provider for _, provider in usage.calls} == {PROVIDER}


def on_cpu(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The reference result of a call whose tensors live on the GPU."""
    moved = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
    moved_kwargs = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    with use_provider("reference"):
        return outputs(call(*moved, **moved_kwargs))


def outputs(result: Any) -> tuple[Tensor, ...]:
    """A call's results as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def bits(x: Tensor) -> Tensor:
    """Bytes of the elements in row-major order, on the CPU, each NaN of a float as one NaN."""
    x = x.cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    if x.dtype in FLOATS:
        x = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return x.view(torch.uint8)


def assert_same(got: Any, expected: Any) -> None:
    """Equal shapes, strides, dtypes and bits."""
    for one, other in zip(outputs(got), outputs(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.stride() == other.stride()
        assert torch.equal(bits(one), bits(other))


def assert_same_as_cpu_twice(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    first = call(*args, **kwargs)
    assert all(result.device.type == DEVICE for result in outputs(first))
    assert_same(first, on_cpu(call, *args, **kwargs))
    assert_same(call(*args, **kwargs), first)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values on the GPU whose rows differ in magnitude by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    magnitude = torch.randint(-3, 3, (*shape[:-1], 1), generator=generator).double()
    return (x * 10.0**magnitude).to(dtype).to(DEVICE)


def small_integers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Integers on the GPU whose float32 sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    return torch.randint(low, 4, shape, generator=generator).to(dtype).to(DEVICE)


def special_rows(dtype: torch.dtype) -> Tensor:
    """Rows with NaN, infinities, zeros of both signs, tiny and huge values."""
    x = sample(8, 300, dtype=dtype, seed=1)
    x[0] = 0
    x[1] = -0.0
    x[2, 7] = math.nan
    x[3, 299] = math.inf
    x[4, :2] = torch.tensor([-math.inf, math.nan])
    x[5] = torch.finfo(dtype).tiny
    x[5, 3] = torch.finfo(dtype).smallest_normal / 4
    x[6] = torch.finfo(dtype).max
    return x


# quantize and dequantize


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
def test_quantize_gives_the_bits_of_the_cpu(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    for x in (sample(33, 5, 1000, dtype=dtype), special_rows(dtype)):
        assert_same_as_cpu_twice(quantize, x, fmt, granularity=granularity)
        q, scale = quantize(x, fmt, granularity=granularity)
        for out in ACTIVATIONS:
            assert_same_as_cpu_twice(dequantize, q, scale, out, granularity=granularity)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_quantize_rounds_every_tie_like_the_cpu(fmt: str) -> None:
    steps = torch.arange(-512 * 8, 512 * 8 + 1, device=DEVICE) / 8
    x = torch.cat((steps, steps / 512, torch.tensor([math.nan, math.inf, -math.inf]).to(DEVICE)))
    one = torch.tensor(1.0, device=DEVICE)
    assert_same_as_cpu_twice(quantize, x, fmt, granularity="tensor", scale=one)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_static_scales_give_the_bits_of_the_cpu(fmt: str) -> None:
    x = special_rows(torch.bfloat16)
    scales = torch.tensor([1.0, 0.3, 1e-3, 7.0, 0.25, 3.0, 1e38, SMALLEST_SCALE], device=DEVICE)
    assert_same_as_cpu_twice(quantize, x, fmt, scale=scales)
    assert_same_as_cpu_twice(quantize, x, fmt, granularity="tensor", scale=scales[1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_b10_b12_views_quantize_like_their_copies(granularity: str) -> None:
    base = sample(64, 516, dtype=torch.bfloat16)
    heads = base[:, :512].split([256, 128, 128], dim=1)[0].view(64, 16, 16)
    views = [heads, base[:, :130].t(), *(base.view(-1)[o : o + 650].view(5, 130) for o in range(5))]
    for x in views:
        assert_same(
            quantize(x, granularity=granularity), quantize(x.clone(), granularity=granularity)
        )


# transpose


@pytest.mark.parametrize("dtype", TRANSPOSE_DTYPES, ids=str)
def test_transpose_moves_every_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = (3, 33, 65 * dtype.itemsize)
    raw = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).to(DEVICE)
    x = raw > 127 if dtype == torch.bool else raw.view(dtype)
    y = transpose(x)
    assert (y.shape, y.dtype, y.stride()) == ((3, 65, 33), dtype, (65 * 33, 33, 1))
    back = transpose(y)
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    moved = x.cpu().view(carrier).transpose(-1, -2).contiguous()
    assert torch.equal(y.cpu().view(carrier), moved)


@pytest.mark.parametrize(
    "shape", [(462, 1024), (33, 65), (1, 77), (77, 1), (0, 5), (5, 0), (2, 3, 4, 5)], ids=str
)
def test_b54_shapes_that_fill_no_tile(shape: tuple[int, ...]) -> None:
    for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.float64):
        x = small_integers(*shape, dtype=dtype)
        assert_same_as_cpu_twice(transpose, x)
        assert_same_as_cpu_twice(transpose, x.transpose(-1, -2))
    big = torch.full((40, 70), math.nan, device=DEVICE)
    big[3:36, 2:67] = 1.0
    assert transpose(big[3:36, 2:67]).eq(1).all()
    x = sample(1, 462, 16, 64)
    assert torch.equal(transpose(x.permute(0, 2, 1, 3)), x.permute(0, 2, 3, 1).contiguous())


# reduce


@pytest.mark.parametrize("dtype", REDUCE_DTYPES, ids=str)
@pytest.mark.parametrize("op", EXACT_REDUCTIONS)
def test_reductions_of_small_integers_are_exact(op: str, dtype: torch.dtype) -> None:
    x = small_integers(7, 513, 33, dtype=dtype)
    for dim in (0, 1, -1, None):
        assert_same_as_cpu_twice(reduce, x, op, dim)
    assert_same_as_cpu_twice(reduce, x.permute(2, 0, 1)[1:, :, ::2], op, 1, keepdim=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean", "sumsq", "logsumexp"])
def test_float_reductions_lie_within_their_error_bound(op: str, dtype: torch.dtype) -> None:
    x = torch.randn(37, 4096, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    got = reduce(x, op, 1)
    assert_same(reduce(x, op, 1), got)
    exact = x.double().cpu()
    with use_provider("reference"):
        expected = reduce(exact, op, 1)
    terms = {"sumsq": exact.square(), "logsumexp": torch.ones_like(exact)}.get(op, exact.abs())
    scale = terms.mean(1) if op in ("mean", "logsumexp") else terms.sum(1)
    accumulation = 2.0**-45 if dtype == torch.float64 else 2.0**-18
    rounding = torch.finfo(dtype).eps / 2
    bound = accumulation * scale + (rounding + accumulation) * expected.abs()
    assert (got.double().cpu() - expected).abs().le(bound).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["max", "min", "absmax", "argmax", "argmin"])
def test_b18_one_nan_anywhere_decides(op: str, dtype: torch.dtype) -> None:
    for length in (1, 31, 32, 33, 1024, 4097):
        places = sorted({p for p in (0, 31, 32, 1023, length - 1) if p < length})
        x = sample(len(places), length, dtype=dtype)
        x[torch.arange(len(places)), torch.tensor(places)] = math.nan
        got = reduce(x, op, 1)
        if op.startswith("arg"):
            assert got.tolist() == places
        else:
            assert got.isnan().all()
        assert_same_as_cpu_twice(reduce, x, op, 1)
        assert_same_as_cpu_twice(reduce, x, op)
    infinite = torch.full((2, 1000), -math.inf, dtype=dtype, device=DEVICE)
    assert_same_as_cpu_twice(reduce, infinite, op, 1)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_special_rows_reduce_like_on_the_cpu(op: str) -> None:
    for dtype in FLOATS:
        x = special_rows(dtype)[:5, :4]
        got, (expected,) = reduce(x, op, 1).cpu(), on_cpu(reduce, x, op, 1)
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_positions_are_of_the_first_extremum() -> None:
    for dtype in (*FLOATS, torch.int8, torch.bool):
        for length in (5, 33, 1000, 70000):
            x = torch.ones(3, length, dtype=dtype, device=DEVICE)
            x[1, 0] = 0
            assert reduce(x, "argmax", 1).tolist() == [0, 1, 0]
            assert reduce(x, "argmin", 1).tolist() == [0, 0, 0]
            assert reduce(x, "argmin").item() == length
            assert reduce(x.t(), "argmin").item() == 1


def test_b22_half_sums_neither_overflow_nor_stop() -> None:
    ones = torch.ones(70000, dtype=torch.bfloat16, device=DEVICE)
    assert reduce(ones, "sum").item() == 70144
    assert reduce(ones, "mean").item() == 1.0
    half = torch.tensor([32000.0] * 4 + [-32000.0] * 4, dtype=torch.float16, device=DEVICE)
    assert reduce(half, "sum", 0).item() == 0
    large = torch.full((65536,), 60000.0, dtype=torch.float16, device=DEVICE)
    assert reduce(large, "mean").item() == 60000


@pytest.mark.parametrize("op", [op for op in REDUCTIONS if not REDUCTIONS[op].needs_elements])
def test_b51_empty_dimensions_reduce_like_on_the_cpu(op: str) -> None:
    x = torch.ones(3, 0, device=DEVICE)
    for dim in (0, 1, None):
        assert_same_as_cpu_twice(reduce, x, op, dim, keepdim=True)


# histograms


@pytest.mark.parametrize("dtype", HISTOGRAM_DTYPES, ids=str)
def test_histogram_counts_like_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(301, 1007, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    for bins, ends in ((1, (-1, 1)), (10, (-0.3, 0.7)), (1000, (-3, 3)), (1 << 20, (-4, 4))):
        assert_same_as_cpu_twice(histogram, x, bins, range=ends)
    assert_same_as_cpu_twice(histogram, x[1:].t(), 100)


def test_b45_b47_b49_named_inputs() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([nan, -1, 0, 0.5, 1, 1.0001, inf, -inf], device=DEVICE)
    assert histogram(x, 2, range=(0, 1)).tolist() == [1, 2]
    for bad in (nan, inf, -inf):
        with pytest.raises(ValueError, match="pass range="):
            histogram(torch.tensor([0.0, bad], device=DEVICE), 2)
    grid = torch.linspace(0, 0.99, 1001).to(DEVICE)
    assert_same_as_cpu_twice(histogram, grid, 10, range=(0, 0.99))
    assert histogram(grid, 10, range=(0, 0.99)).sum() == 1001
    n = 2**24 + 3
    assert histogram(torch.zeros(n, device=DEVICE), 4, range=(0, 1)).tolist() == [n, 0, 0, 0]


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_integer_counts_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    low = 0 if dtype == torch.uint8 else -5
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(low, 140, (40000, 2), generator=generator).to(dtype).to(DEVICE)
    for x in (ids, ids.t(), ids[1::3], ids[:0], torch.zeros_like(ids)):
        for bins in (1, 128, 1 << 20):
            assert_same_as_cpu_twice(bincount, x, bins)
        assert_same_as_cpu_twice(expert_histogram, x, 128)


# every operation


def calls(x: Tensor) -> dict[str, Callable[[], Any]]:
    """One call of each operation on ``x`` (M, K), bfloat16; no result depends on sum order."""
    scale = x.new_tensor(0.5, dtype=torch.float32)

    def ids() -> Tensor:
        return x.view(torch.int16).to(torch.int32).abs() % 9

    return {
        **{f"quantize {g}": lambda g=g: quantize(x, granularity=g) for g in GRANULARITIES},
        "quantize int8": lambda: quantize(x, "int8"),
        "quantize static": lambda: quantize(x, granularity="tensor", scale=scale)[0],
        "dequantize": lambda: dequantize(x.to(torch.int8), scale, granularity="tensor"),
        "transpose": lambda: transpose(x),
        **{f"reduce {op}": lambda op=op: reduce(x, op, 1) for op in REDUCTIONS},
        "histogram": lambda: histogram(x, 7, range=(-2, 2)),
        "bincount": lambda: bincount(ids(), 8),
        "expert_histogram": lambda: expert_histogram(ids(), 8),
    }


@pytest.mark.parametrize("name", list(calls(torch.zeros(1, 1, dtype=torch.bfloat16))))
def test_captured_calls_replay_like_eager_ones(name: str) -> None:
    x = sample(6, 260, dtype=torch.bfloat16)
    call = calls(x)[name]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in (1, 2, 3):
        x.copy_(sample(6, 260, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        assert_same(captured, call())


def test_automatic_range_is_refused_in_a_capture_and_works_after_it() -> None:
    x = sample(4, 100)
    histogram(x, 4)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(0)
            histogram(x, 4)

    with pytest.raises(ConfigError, match="graph capture"):
        capture()
    assert_same_as_cpu_twice(histogram, x, 4)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)], ids=str)
def test_b04_empty_input_leaves_no_error_behind(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    refused = {f"reduce {op}" for op in REDUCTIONS if REDUCTIONS[op].needs_elements}
    for name, call in calls(x).items():
        if shape[1] > 0 or name not in refused:
            assert all(result.device.type == DEVICE for result in outputs(call()))
    torch.cuda.synchronize()
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_b35_tensors_on_two_devices_are_refused() -> None:
    x = sample(4, 64)
    with pytest.raises(DeviceError, match="move both to one device"):
        quantize(x, scale=torch.ones(4))
    q, scale = quantize(x)
    with pytest.raises(DeviceError, match="move both to one device"):
        dequantize(q, scale.cpu())


def test_b37_fakes_are_right_on_the_gpu() -> None:
    ops = torch.ops.fusedops
    x = sample(5, 130, dtype=torch.bfloat16)
    q, scale = quantize(x, "int8", granularity="block128")
    ids = torch.randint(0, 9, (40,), device=DEVICE)
    for op, args in (
        (ops.quantize, (x, "e4m3", "block128")),
        (ops.quantize_static, (x, scale[0], "e4m3")),
        (ops.dequantize, (q, scale, torch.bfloat16, "block128")),
        (ops.transpose, (x,)),
        (ops.reduce, (x, "mean", [0], True)),
        (ops.histogram, (x, 7, [-1.0, 1.0])),
        (ops.bincount, (ids, 9)),
        (ops.expert_histogram, (ids, 9)),
    ):
        torch.library.opcheck(op.default, args, test_utils="test_faketensor")
