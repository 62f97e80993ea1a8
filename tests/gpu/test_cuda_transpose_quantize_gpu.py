"""The transposes that cast or quantize: every bit is the reference's, for any shape and strides."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_cases import assert_same_bits, captured, replayed
from cuda_row_cases import FLOATS, as_codes, assert_all_same, drawn, only_our_kernels, run_twice
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.ops.fused_quantize import transpose_quantize
from fusedops.ops.quantize import FORMATS, dequantize, quantize
from fusedops.ops.transpose import transpose
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_transpose import tile_side

COVERS = (
    "csrc/transpose_quantize.cu",
    "csrc/quantize.cu",
    "csrc/reduce.cu",
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/ops/fused_quantize.py",
    "fusedops/ops/quantize.py",
    "fusedops/ops/transpose.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_row_cases.py",
)

pytestmark = pytest.mark.gpu

DYNAMIC = ("token", "block128")
EACH_STORAGE = pytest.mark.parametrize(
    ("fmt", "granularity"), list(itertools.product(FORMATS, DYNAMIC))
)
EACH_CAST = pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(FLOATS, FLOATS)), ids=str
)


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with only_our_kernels():
        yield


def spread(x: Tensor) -> Tensor:
    """The columns scaled by powers of ten, in place."""
    generator = torch.Generator("cuda").manual_seed(5)
    powers = torch.randint(-3, 3, x.shape[-1:], generator=generator, device="cuda")
    return x.mul_((10.0 ** powers.double()).to(x.dtype))


def views(dtype: torch.dtype) -> Iterator[Tensor]:
    """Matrices that reach each way to read and to write, and sizes around a tile."""
    side = tile_side(dtype.itemsize)
    for rows in (2, 7, 16, 127, 128, 129, 144, 300, 1024):
        for columns in (2, 9, side, side + 1, 2 * side + 9, 3 * side + 16, 4 * side + 2):
            yield spread(drawn(rows, columns, dtype=dtype))
    flat = spread(drawn(70_000, dtype=dtype))
    for offset in (1, 2, 3, 4, 5):
        yield flat[offset : offset + 128 * 256].view(128, 256)
        yield flat[offset : offset + 131 * 255].view(131, 255)
    big = spread(drawn(600, 700, dtype=dtype))
    yield from (big[5:400, 3:301], big[::2, ::3], big.t()[3:300, 1:90], big[:, :640], big[1:, 16:])
    yield from (big[:, :1], big[:1], big.t(), big[:1].expand(200, 700))
    batch = spread(drawn(4, 6, 5, 48, 96, dtype=dtype))
    yield from (batch, batch[::2, ::3, ::2], batch.permute(1, 0, 2, 3, 4), batch[:, :, 0])
    yield from (batch[0, 0, :1].expand(7, 48, 96), batch[0, 0, 0, :, None].expand(48, 5, 96))


def on_cpu(x: Tensor, fmt: str, granularity: str, scale: Tensor | None = None) -> list[Tensor]:
    """The definition, on the CPU: of the transposed matrix; values alone with a given scale."""
    with use_provider("reference"):
        given = None if scale is None else scale.cpu()
        q, found = quantize(
            x.cpu().transpose(-1, -2).contiguous(), fmt, granularity=granularity, scale=given
        )
    if given is not None:
        return [q.cuda()]
    if granularity != "block128":
        return [q.cuda(), found.cuda()]
    groups, rows = found.shape
    padded = torch.empty((groups, -(-rows // 4) * 4), device="cuda")[:, :rows]
    return [q.cuda(), padded.copy_(found)]


# Quantization


@EACH_STORAGE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_is_the_references(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    for x in views(dtype):
        got = run_twice("transpose_quantize", x, None, fmt, granularity)
        assert_all_same(got, on_cpu(x, fmt, granularity))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_given_scales(dtype: torch.dtype, fmt: str) -> None:
    scales = drawn(4000, dtype=torch.float32, seed=1).abs() + 0.01
    for x in views(dtype):
        rows = x[..., 0, :].numel()
        given = {"tensor": scales[0], "token": scales[:1].expand(rows)}
        if rows <= 2000:
            given["token"] = scales[: 2 * rows : 2]
        for granularity, scale in given.items():
            got = run_twice("transpose_quantize", x, scale, fmt, granularity)
            assert_all_same(got, on_cpu(x, fmt, granularity, scale))


@EACH_STORAGE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b16_b18_special_values(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    for columns in (136, 137):
        x = drawn(512, columns, dtype=dtype)
        x[:, 0] = 0
        x[:, 1] = -0.0
        x[3, 2] = math.nan
        x[200, 3] = math.inf
        x[300, 4] = -math.inf
        x[:, 5] = 1e-40
        x[:, 6] = 1e38
        x[130:, 7] = 0
        x[511, 135] = math.nan
        got = run_twice("transpose_quantize", x, None, fmt, granularity)
        assert_all_same(got, on_cpu(x, fmt, granularity))


@EACH_STORAGE
def test_it_is_what_the_two_kernels_give(fmt: str, granularity: str) -> None:
    x = spread(drawn(2, 1000, 777))
    got = transpose_quantize(x, dtype=fmt, granularity=granularity)
    expected = quantize(transpose(x), fmt, granularity=granularity)
    assert_all_same(list(got), list(expected))


@pytest.mark.parametrize("granularity", DYNAMIC)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_lie_within_half_a_step_of_float64(dtype: torch.dtype, granularity: str) -> None:
    x = spread(drawn(1000, 333, dtype=dtype))
    for fmt in FORMATS:
        q, scale = transpose_quantize(x, dtype=fmt, granularity=granularity)
        with use_provider("torch"):
            back = dequantize(q, scale, granularity=granularity).double()
        wide = scale.double()
        steps = wide[:, None] if granularity == "token" else wide.t().repeat_interleave(128, 1)
        exact = x.double().t()
        share = steps[:, : exact.shape[1]]
        # Half a unit of three mantissa bits or of the smallest denormal; half an integer.
        if fmt == "e4m3":
            bound = torch.maximum(exact.abs() * 2.0**-4, share * 2.0**-10)
        else:
            bound = share * 0.5
        assert ((back - exact).abs() <= bound + exact.abs() * 2.0**-22).all()


def test_whole_numbers_are_exact() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    whole = torch.randint(-127, 128, (700, 260), generator=generator, device="cuda")
    whole[0] = 127
    whole[::128] = 127
    for dtype in FLOATS:
        for granularity in DYNAMIC:
            x = whole.to(dtype)
            q, scale = transpose_quantize(x, dtype="int8", granularity=granularity)
            assert scale.eq(1).all()
            assert torch.equal(q.long(), whole.t())


def test_b04_empty_inputs_leave_no_error() -> None:
    for shape in ((0, 256), (3, 0), (0, 0), (2, 0, 64), (0, 3, 4)):
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for granularity in DYNAMIC:
            got = list(transpose_quantize(x, granularity=granularity))
            assert_all_same(got, on_cpu(x, "e4m3", granularity))
        assert transpose(x, torch.float32).shape == x.transpose(-1, -2).shape
    assert torch.ones(3, device="cuda").sum() == 3


def test_columns_may_be_longer_than_rows_that_quantize_takes() -> None:
    for x in (drawn(70_001, 24), drawn(24, 70_001).t()):
        got = run_twice("transpose_quantize", x, None, "e4m3", "token")
        assert_all_same(got, on_cpu(x, "e4m3", "token"))


def test_many_dimensions_are_refused() -> None:
    strides = (9000, 4000, 1900, 900, 400, 16, 1)
    x = torch.as_strided(drawn(20_000), (*(2,) * 5, 16, 16), strides)
    transpose_quantize(x[0])
    for granularity in DYNAMIC:
        with pytest.raises(UnsupportedError, match="up to 4"):
            transpose_quantize(x, granularity=granularity)


# The cast


@EACH_CAST
def test_a_cast_is_torchs_bit_for_bit(source: torch.dtype, target: torch.dtype) -> None:
    for x in views(source):
        (got,) = run_twice("transpose_cast", x, target)
        assert_same_bits(got, x.cpu().to(target).transpose(-1, -2).cuda().contiguous())


def test_a_cast_ties_to_even_and_overflows_to_infinity() -> None:
    base = torch.arange(0, 2**16, dtype=torch.int32, device="cuda") << 16
    floats = torch.cat([base + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001)]).view(torch.float32)
    x = floats.view(-1, 320)
    for target in FLOATS[1:]:
        (got,) = run_twice("transpose_cast", x, target)
        assert_same_bits(got, x.cpu().to(target).t().cuda().contiguous())


# Streams, captures, memory


def replays(call: Callable[[], Tensor], x: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [result.clone() for result in replayed(call, x, inputs)]


@pytest.mark.parametrize("granularity", DYNAMIC)
@pytest.mark.parametrize("columns", [520, 521])
def test_a_capture_replays_with_other_values(columns: int, granularity: str) -> None:
    x = drawn(300, columns)
    inputs = [drawn(300, columns, seed=seed) * 10.0**seed for seed in (1, 2)]

    def call(part: int) -> Tensor:
        return transpose_quantize(x, granularity=granularity)[part]

    for part in (0, 1):
        results = replays(functools.partial(call, part), x, inputs)
        for got, values in zip(results, inputs, strict=True):
            expected = on_cpu(values, "e4m3", granularity)[part]
            assert torch.equal(as_codes(got), as_codes(expected.contiguous()))
    for got, values in zip(
        replays(lambda: transpose(x, torch.float32), x, inputs), inputs, strict=True
    ):
        assert_same_bits(got, values.float().t().contiguous())


def test_dependent_launches_see_what_the_kernel_ahead_wrote() -> None:
    x = drawn(1024, 640)
    y = x
    for _ in range(32):
        y = transpose(transpose(y, torch.float32), torch.bfloat16)
    assert_same_bits(y, x)
    # Both passes of a scale a row read what a kernel ahead has just written.
    graph, results = captured(
        lambda: [transpose_quantize(transpose(x, torch.float32), granularity=g) for g in DYNAMIC]
    )
    for seed in (7, 8):
        x.copy_(drawn(1024, 640, seed=seed))
        graph.replay()
        for granularity, got in zip(DYNAMIC, results, strict=True):
            expected = on_cpu(x.float().t(), "e4m3", granularity)
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(as_codes(one), as_codes(other))


def test_it_works_under_torch_compile() -> None:
    x = drawn(200, 60)
    compiled = torch.compile(
        lambda t: transpose_quantize(t + 1.0, granularity="block128"), fullgraph=True
    )
    assert_all_same(list(compiled(x)), on_cpu(x + 1.0, "e4m3", "block128"))


@pytest.mark.parametrize("granularity", DYNAMIC)
def test_the_sizes_that_are_measured(granularity: str) -> None:
    for rows, columns in ((8192, 8192), (8191, 8193)):
        x = drawn(rows, columns)
        q, scale = transpose_quantize(x, granularity=granularity)
        with use_provider("torch"):
            expected, expected_scale = quantize(x.t().contiguous(), granularity=granularity)
        assert torch.equal(as_codes(q), as_codes(expected))
        assert torch.equal(scale, expected_scale)
    assert_same_bits(transpose(x, torch.float32), x.float().t().contiguous())


@pytest.mark.gpu_large
@pytest.mark.parametrize("granularity", DYNAMIC)
def test_b01_more_than_2_to_31_elements(granularity: str) -> None:
    rows, columns = 46_352, 46_376
    assert rows * columns > 2**31
    x = drawn(1, columns).expand(rows, columns).contiguous()
    x[-1] *= 2
    x[0, 0] = 100.0
    q, scale = transpose_quantize(x, granularity=granularity)
    for start in (0, 20_000, columns - 64):
        part = slice(start, start + 64)
        got = [q[part], scale[part] if granularity == "token" else scale[:, part]]
        for one, other in zip(got, on_cpu(x[:, part], "e4m3", granularity), strict=True):
            assert torch.equal(as_codes(one.contiguous()), as_codes(other.contiguous()))
    del q
    y = transpose(x, torch.float32)
    assert torch.equal(y[-1], x[:, -1].float())
    assert torch.equal(y[20_000], x[:, 20_000].float())
