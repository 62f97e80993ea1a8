"""transpose with a cast, and transpose_quantize, on the CPU."""

from __future__ import annotations

import math

import numpy as np
import oracles_memory as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from torch import Tensor

from fusedops import transpose_quantize
from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from fusedops.ops.quantize import FORMATS, dequantize, quantize
from fusedops.ops.transpose import transpose

FORMAT_NAMES = tuple(FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = ("token", "block128")
OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
ops = torch.ops.fusedops


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values whose columns differ in magnitude by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    magnitude = torch.randint(-3, 3, (shape[-1],), generator=generator).double()
    return (x * 10.0**magnitude).to(dtype)


def codes_of(q: Tensor) -> Tensor:
    """Stored codes as integers: bytes of e4m3, values of int8."""
    return q.view(torch.uint8).long() if q.dtype == torch.float8_e4m3fn else q.long()


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Equal layout and bits, NaN payloads of scales excepted."""
    assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
    if got.element_size() == 1:
        got, expected = codes_of(got), codes_of(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_composed(x: Tensor, fmt: str, granularity: str, scale: Tensor | None = None) -> None:
    """What the two operations give one after the other."""
    got = transpose_quantize(x, dtype=fmt, granularity=granularity, scale=scale)
    expected = quantize(transpose(x), fmt, granularity=granularity, scale=scale)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


# The cast


def rounded_bfloat16(value: float) -> float:
    """The nearest number of eight bits of mantissa, ties to even; in float64."""
    if not math.isfinite(value) or value == 0.0:
        return value
    mantissa, exponent = math.frexp(value)
    step = math.ldexp(1.0, max(exponent - 8, -133))
    return float(np.float64(round(math.ldexp(mantissa, exponent) / step)) * step)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_cast_rounds_each_element_once(source: torch.dtype, target: torch.dtype) -> None:
    x = sample(2, 5, 37, dtype=source)
    y = transpose(x, target)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((2, 37, 5), target, True)
    wide = x.double().numpy()
    round_to = {
        torch.float32: np.float32,
        torch.float16: lambda v: np.float32(v).astype(np.float16),
        torch.bfloat16: rounded_bfloat16,
    }[target]
    for b, c, r in np.ndindex(2, 37, 5):
        assert float(y[b, c, r]) == float(round_to(wide[b, r, c]))


def test_a_cast_ties_to_even_and_overflows_to_infinity() -> None:
    ties = torch.tensor([[1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8, 1e-45, 3.4e38]])
    one = 2.0**-7
    expected = [1.0, 1.0 + 2 * one, -1.0, 0.0, math.inf]
    assert transpose(ties, torch.bfloat16).flatten().tolist() == expected
    edge = torch.tensor([[65504.0, 65519.9, 65520.0, -1e30, 2.0**-25, 2.0**-24]])
    expected = [65504.0, 65504.0, math.inf, -math.inf, 0.0, 2.0**-24]
    assert transpose(edge, torch.float16).flatten().tolist() == expected
    special = torch.tensor([[math.nan, math.inf, -math.inf, -0.0]])
    for target in DTYPES[1:]:
        y = transpose(special, target).flatten()
        assert y.isnan().tolist() == [True, False, False, False]
        assert y[1:3].tolist() == [math.inf, -math.inf]
        assert math.copysign(1.0, y[3].item()) == -1.0


def test_a_cast_takes_any_strides_and_never_returns_a_view() -> None:
    big = sample(40, 70)
    for x in (big[3:36, 2:67], big[::2, ::3], big.t(), big[:1], big[:, :1], big[:1].expand(5, 70)):
        before = x.clone()
        for target in DTYPES:
            y = transpose(x, target)
            assert y.is_contiguous()
            assert torch.equal(y, x.t().to(target))
            y.fill_(7.0)
        assert torch.equal(x, before)
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        y = transpose(torch.empty(shape), torch.float16)
        assert (y.shape, y.dtype) == ((*shape[:-2], shape[-1], shape[-2]), torch.float16)


def test_the_own_dtype_is_no_cast() -> None:
    x = torch.arange(6, dtype=torch.int8).view(2, 3)
    assert torch.equal(transpose(x, torch.int8), x.t())
    payload = torch.tensor([[0x7FC1, 0x7F81]], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(
        transpose(payload, torch.bfloat16).view(torch.int16), payload.view(torch.int16).t()
    )


@pytest.mark.parametrize(
    ("x", "dtype", "error", "words"),
    [
        (torch.ones(4), torch.float16, ShapeError, "^transpose: .*at least 2 dimension"),
        (torch.ones(2, 2).double(), torch.float32, DTypeError, "x is float64"),
        (torch.ones(2, 2).int(), torch.float32, DTypeError, "x is int32"),
        (torch.ones(2, 2), torch.float64, DTypeError, r"^transpose: dtype=.*float16\.$"),
        (torch.ones(2, 2), torch.int8, DTypeError, "Call transpose_quantize for 8 bits"),
        (torch.ones(2, 2), "bfloat16", ConfigError, r"dtype is 'bfloat16' \(str\)"),
        ("x", torch.float16, DTypeError, r"x is 'x' \(str\)"),
        (torch.ones(2, 2, requires_grad=True), torch.float16, UnsupportedError, "inference only"),
    ],
)
def test_a_cast_refuses(x: Tensor, dtype: torch.dtype, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        transpose(x, dtype)


# Quantization


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_equal_an_independent_formula(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    x = sample(2, 300, 5, dtype=dtype)
    q, scale = transpose_quantize(x, dtype=fmt, granularity=granularity)
    rows = x.double().numpy().swapaxes(1, 2).reshape(10, 300)
    codes, scales = oracle.quantized(rows, fmt, granularity)
    assert codes_of(q).tolist() == codes.reshape(2, 5, 300).tolist()
    assert scale.double().reshape(-1).tolist() == scales


@given(
    np_st.arrays(
        np.float32,
        np_st.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=5),
        elements=st.floats(width=32),
    ),
    st.sampled_from(FORMAT_NAMES),
    st.sampled_from(GRANULARITIES),
)
@hypothesis_settings(max_examples=60)
def test_bits_equal_an_independent_formula_for_any_float32(
    x: np.ndarray, fmt: str, granularity: str
) -> None:
    q, scale = transpose_quantize(torch.from_numpy(x), dtype=fmt, granularity=granularity)
    codes, scales = oracle.quantized(x.astype(np.float64).T, fmt, granularity)
    assert codes_of(q).tolist() == codes.tolist()
    np.testing.assert_array_equal(scale.double().reshape(-1).numpy(), np.array(scales))


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_composition_bit_for_bit(dtype: torch.dtype, fmt: str) -> None:
    big = sample(260, 70, dtype=dtype)
    batch = sample(2, 3, 40, 24, dtype=dtype)
    views = [big, big[1:, 3:], big[::2, ::3], big.t(), big[:1], big[:, :1], big[:1].expand(5, 70)]
    views += [batch, batch.permute(1, 0, 2, 3), batch[:, :1].expand(2, 3, 40, 24)]
    for x in views:
        rows = x[..., 0, :].numel()
        given = torch.rand(2 * rows)[::2] + 0.01
        for granularity in GRANULARITIES:
            assert_composed(x, fmt, granularity)
        assert_composed(x, fmt, "tensor", torch.tensor(0.02))
        assert_composed(x, fmt, "token", given)
        assert_composed(x, fmt, "token", given.reshape(x[..., 0, :].shape))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_b10_unaligned_view_equals_its_clone(offset: int) -> None:
    for dtype in DTYPES:
        x = sample(1, 131 * 9 + offset, dtype=dtype).view(-1)[offset:].view(131, 9)
        for granularity in GRANULARITIES:
            got = transpose_quantize(x, granularity=granularity)
            expected = transpose_quantize(x.clone(), granularity=granularity)
            assert all(map(torch.equal, map(codes_of, got[:1]), map(codes_of, expected[:1])))
            assert torch.equal(got[1], expected[1])


def test_b16_all_zero_column_gets_scale_one() -> None:
    x = sample(256, 4, dtype=torch.bfloat16)
    x[:, 2] = 0
    x[128:, 1] = -0.0
    for fmt in FORMAT_NAMES:
        q, scale = transpose_quantize(x, dtype=fmt)
        assert scale.eq(1).tolist() == [False, False, True, False]
        assert not codes_of(q)[2].any()
        _, scale = transpose_quantize(x, dtype=fmt, granularity="block128")
        assert scale.eq(1).nonzero().tolist() == [[0, 2], [1, 1], [1, 2]]


def test_b18_nan_column_gets_a_nan_scale_and_infinity_an_infinite_one() -> None:
    x = sample(200, 5)
    x[150, 1] = math.nan
    x[3, 4] = -math.inf
    q, scale = transpose_quantize(x)
    assert scale.isnan().tolist() == [False, True, False, False, False]
    assert scale.isinf().tolist() == [False] * 4 + [True]
    assert (codes_of(q)[1] == oracle.E4M3_NAN).all()
    assert dequantize(q, scale).isfinite().all(1).tolist() == [True, False, True, True, False]
    q, scale = transpose_quantize(x, dtype="int8", granularity="block128")
    assert scale.isnan().nonzero().tolist() == [[1, 1]]
    assert scale.isinf().nonzero().tolist() == [[0, 4]]
    assert not q[1, 128:].any()
    assert q[1, :128].any()


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (2, 0, 8), (0, 3, 4)], ids=str)
def test_b04_empty_input_gives_empty_output(shape: tuple[int, ...], fmt: str) -> None:
    *batch, rows, columns = shape
    count = math.prod(batch) * columns
    for granularity, scale_shape in (
        ("token", (*batch, columns)),
        ("block128", (-(-rows // 128), count)),
    ):
        x = torch.empty(shape, dtype=torch.bfloat16)
        q, scale = transpose_quantize(x, dtype=fmt, granularity=granularity)
        assert q.shape == (*batch, columns, rows)
        assert scale.shape == scale_shape
        assert scale.eq(1).all()


@pytest.mark.parametrize("columns", [1, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 128, 129])
def test_block_scales_are_padded_to_four_rows_of_the_result(rows: int, columns: int) -> None:
    _, scale = transpose_quantize(sample(2, rows, columns), granularity="block128")
    padded = -(-2 * columns // 4) * 4
    assert scale.shape == (-(-rows // 128), 2 * columns)
    assert scale.stride() == (padded, 1)


def test_a_given_scale_comes_back_as_it_is() -> None:
    scale = torch.tensor(0.5)
    _, got = transpose_quantize(sample(3, 8), granularity="tensor", scale=scale)
    assert got is scale


@pytest.mark.parametrize(
    ("x", "options", "error", "words"),
    [
        (torch.ones(4), {}, ShapeError, "^transpose_quantize: .*at least 2 dimension"),
        (torch.ones(2, 2).double(), {}, DTypeError, "transpose_quantize: x is float64"),
        (torch.ones(2, 2).int(), {}, DTypeError, "x is int32"),
        ("x", {}, DTypeError, r"transpose_quantize: x is 'x' \(str\)"),
        (torch.ones(2, 2), {"dtype": "int4"}, ConfigError, "accepted are e4m3, int8"),
        (torch.ones(2, 2), {"granularity": "row"}, ConfigError, "accepted are token, block128"),
        (torch.ones(2, 2), {"granularity": "tensor"}, ConfigError, "needs a given scale"),
        (
            torch.ones(2, 3),
            {"scale": torch.ones(2)},
            ShapeError,
            r"\(3,\).*one scale for each row of the result",
        ),
        (
            torch.ones(2, 3),
            {"scale": torch.ones(3), "granularity": "tensor"},
            ShapeError,
            "one scale for granularity='tensor'",
        ),
        (
            torch.ones(2, 3),
            {"scale": torch.ones(3), "granularity": "block128"},
            ConfigError,
            "granularity of a given scale",
        ),
        (torch.ones(2, 3), {"scale": torch.ones(3).half()}, DTypeError, "scale is float16"),
        (torch.ones(2, 3), {"scale": torch.ones(3, device="meta")}, DeviceError, "scale"),
        (torch.ones(2, 3), {"scale": torch.zeros(3)}, ConfigError, "^transpose_quantize: .*finite"),
        (
            torch.ones(2, 3),
            {"scale": torch.ones(4)},
            ShapeError,
            r"accepted shape: \(3,\) \(one scale",
        ),
        (torch.ones(2, 2, requires_grad=True), {}, UnsupportedError, "requires grad"),
    ],
)
def test_quantization_refuses(
    x: Tensor, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        transpose_quantize(x, **options)  # type: ignore[arg-type]


# Tracing


@pytest.mark.parametrize("shape", [(3, 5), (2, 130, 6)], ids=str)
def test_b37_opcheck(shape: tuple[int, ...]) -> None:
    x = sample(*shape, dtype=torch.bfloat16)
    scale = torch.tensor(0.1)
    calls = [
        (ops.transpose_cast, (x, torch.float32)),
        (ops.transpose_quantize, (x, None, "e4m3", "token")),
        (ops.transpose_quantize, (x.transpose(0, 1), None, "int8", "block128")),
        (ops.transpose_quantize, (x, scale, "e4m3", "tensor")),
    ]
    for op, args in calls:
        torch.library.opcheck(op.default, args, test_utils=OPCHECK_TESTS)


def test_b39_compiles_without_a_graph_break() -> None:
    def block(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = transpose_quantize(x + 1, granularity="block128")
        return q, scale, transpose(x, torch.bfloat16)

    compiled = torch.compile(block, backend="eager", fullgraph=True, dynamic=True)
    for rows in (130, 140):
        x = sample(rows, 6)
        for got, expected in zip(compiled(x), block(x), strict=True):
            assert torch.equal(got.float(), expected.float())
            assert got.stride() == expected.stride()
