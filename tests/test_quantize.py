"""quantize and dequantize: rounding, scales, edge cases, layouts, errors, tracing."""

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

from fusedops.epilogue.outputs import group_scale
from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from fusedops.ops.quantize import FORMATS, GRANULARITIES, SMALLEST_SCALE, dequantize, quantize

FORMAT_NAMES = tuple(FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values whose rows differ in magnitude by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    magnitude = torch.randint(-3, 3, (*shape[:-1], 1), generator=generator).double()
    return (x * 10.0**magnitude).to(dtype)


def codes_of(q: Tensor) -> Tensor:
    """Stored codes as integers: bytes of e4m3, values of int8."""
    return q.view(torch.uint8).long() if q.dtype == torch.float8_e4m3fn else q.long()


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Bitwise equality, NaN payloads of floats excepted."""
    assert got.dtype == expected.dtype
    if got.dtype in (torch.float8_e4m3fn, torch.int8):
        got, expected = codes_of(got), codes_of(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_matches_oracle(x: Tensor, fmt: str, granularity: str) -> None:
    q, scale = quantize(x, fmt, granularity=granularity)
    rows = x.double().reshape(-1, x.shape[-1]).numpy()
    codes, scales = oracle.quantized(rows, fmt, granularity)
    assert_same(codes_of(q), torch.from_numpy(codes).reshape(x.shape))
    assert_same(scale.double(), torch.tensor(scales).double().reshape(scale.shape))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_equal_an_independent_formula(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    assert_matches_oracle(sample(2, 3, 300, dtype=dtype), fmt, granularity)


@given(
    np_st.arrays(
        np.float32,
        np_st.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=5),
        elements=st.floats(width=32),
    ),
    st.sampled_from(FORMAT_NAMES),
    st.sampled_from(GRANULARITIES),
)
@hypothesis_settings(max_examples=150)
def test_bits_equal_an_independent_formula_for_any_float32(
    x: np.ndarray, fmt: str, granularity: str
) -> None:
    assert_matches_oracle(torch.from_numpy(x), fmt, granularity)


def test_e4m3_rounds_ties_to_even_and_saturates() -> None:
    magnitudes = torch.tensor(oracle.E4M3_MAGNITUDES)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    beyond = torch.tensor([449.0, 463.9, 464.0, 1e30, math.inf])
    x = torch.cat((magnitudes, middles, beyond))
    x = torch.cat((x, -x, torch.tensor([math.nan, -math.nan])))
    q, _ = quantize(x, granularity="tensor", scale=torch.tensor(1.0))
    assert codes_of(q).tolist() == [oracle.encoded_e4m3(v) for v in x.tolist()]
    assert q.float()[: len(magnitudes)].tolist() == magnitudes.tolist()


def test_int8_rounds_half_to_even_and_is_symmetric() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, 0.49999997, 126.5, 127.49, 127.5, 1e30, math.inf])
    x = torch.cat((x, -x, torch.tensor([math.nan])))
    q, _ = quantize(x, "int8", granularity="tensor", scale=torch.tensor(1.0))
    expected = [0, 2, 2, 0, 126, 127, 127, 127, 127]
    assert q.tolist() == [*expected, *(-v for v in expected), 0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_dequantised_values_lie_within_half_a_step(fmt: str, granularity: str) -> None:
    x = sample(7, 200, dtype=torch.bfloat16)
    q, scale = quantize(x, fmt, granularity=granularity)
    back = dequantize(q, scale, granularity=granularity).double()
    share = dequantize(torch.ones_like(q.float()).to(q.dtype), scale, granularity=granularity)
    # Half a unit of 3 mantissa bits, or of the smallest denormal; half an integer step. Four
    # float32 roundings come on top.
    if fmt == "e4m3":
        half_step = torch.maximum(x.double().abs() * 2.0**-4, share.double() * 2.0**-10)
    else:
        half_step = share.double() * 0.5
    assert (back - x.double()).abs().le(half_step + x.double().abs() * 2.0**-22).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_rounds_the_float32_product_once(dtype: torch.dtype) -> None:
    q, scale = quantize(sample(5, 260), granularity="block128")
    back = dequantize(q, scale, dtype, granularity="block128")
    spread = np.repeat(scale.numpy().T, 128, axis=1)[:, :260]
    decoded = [oracle.decoded_e4m3(code) for code in codes_of(q).flatten().tolist()]
    values = np.array(decoded, dtype=np.float32).reshape(5, 260)
    assert back.dtype == dtype
    assert torch.equal(back, torch.from_numpy(values * spread).to(dtype))


def test_static_scale_is_returned_as_it_is_and_used() -> None:
    x = sample(3, 4, 64)
    for granularity, scale in (
        ("tensor", torch.tensor(0.25)),
        ("token", torch.linspace(0.1, 2.0, 12)),
        ("token", torch.linspace(0.1, 2.0, 12).reshape(3, 4)),
        ("token", torch.tensor(0.7).expand(12)),
    ):
        q, returned = quantize(x, scale=scale, granularity=granularity)
        assert returned is scale
        per_row = scale.expand(12) if scale.dim() == 0 else scale.reshape(12)
        expected = [
            [oracle.stored(v, s, "e4m3") for v in row]
            for row, s in zip(x.reshape(12, 64).tolist(), per_row.tolist(), strict=True)
        ]
        assert codes_of(q).reshape(12, 64).tolist() == expected


def test_dynamic_scale_given_back_as_static_gives_the_same_bits() -> None:
    x = sample(4, 96)
    for granularity in ("token", "tensor"):
        q, scale = quantize(x, "int8", granularity=granularity)
        again, _ = quantize(x, "int8", granularity=granularity, scale=scale)
        assert torch.equal(q, again)


# Edge cases


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_b16_all_zero_row_gets_scale_one(dtype: torch.dtype, fmt: str) -> None:
    x = sample(4, 4096, dtype=dtype)
    untouched, untouched_scale = quantize(x, fmt)
    x[2] = 0
    q, scale = quantize(x, fmt)
    assert scale[2] == 1
    assert not q[2].float().any()
    assert not dequantize(q, scale)[2].any()
    for row in (0, 1, 3):
        assert_same(q[row], untouched[row])
        assert scale[row] == untouched_scale[row]
    assert quantize(torch.zeros(3, 5, dtype=dtype), fmt, granularity="tensor")[1] == 1
    x = sample(4, 300, dtype=dtype)
    x[1, 128:256] = 0
    assert quantize(x, fmt, granularity="block128")[1].eq(1).nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("tiny", [1e-30, 1e-37, 1e-40, 1.4e-45])
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_b16_tiny_row_keeps_a_finite_scale_above_zero(fmt: str, tiny: float) -> None:
    x = torch.full((2, 256), tiny)
    x[1] = 1.0
    q, scale = quantize(x, fmt)
    assert SMALLEST_SCALE <= scale[0] < 1e-30
    back = dequantize(q, scale)
    assert back.isfinite().all()
    assert (back[0] - x[0]).abs().max() <= max(tiny * 2.0**-4, SMALLEST_SCALE * 0.5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_b18_nan_row_gets_a_nan_scale(dtype: torch.dtype, granularity: str) -> None:
    x = sample(3, 300, dtype=dtype)
    x[1, 299] = math.nan
    expected = {"token": [[1]], "tensor": [[]], "block128": [[2, 1]]}[granularity]
    for fmt in FORMAT_NAMES:
        q, scale = quantize(x, fmt, granularity=granularity)
        assert scale.isnan().nonzero().tolist() == expected
        shared = dequantize(q, scale, granularity=granularity).isnan()
        assert shared.sum() == {"token": 300, "tensor": 900, "block128": 300 - 256}[granularity]
        if fmt == "e4m3":
            assert codes_of(q)[shared].unique().tolist() == [oracle.E4M3_NAN]
        else:
            assert not q[shared].any()


def test_infinite_row_shows_in_scale_and_result() -> None:
    x = torch.tensor([[1.0, math.inf, -math.inf, -2.0], [1.0, 2.0, 3.0, 4.0]])
    q, scale = quantize(x)
    assert scale[0] == math.inf
    assert codes_of(q)[0].tolist() == [0, oracle.E4M3_NAN, oracle.E4M3_NAN, 0x80]
    assert dequantize(q, scale).isnan().tolist() == [[True] * 4, [False] * 4]
    q, scale = quantize(x, "int8")
    assert scale[0] == math.inf
    assert q[0].tolist() == [0, 0, 0, 0]
    assert dequantize(q, scale).isnan().tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (2, 0, 8), (0,)])
def test_b04_empty_input_gives_empty_output(shape: tuple[int, ...], fmt: str) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    rows, groups = math.prod(shape[:-1]), -(-shape[-1] // 128)
    for granularity, scale_shape in (
        ("token", shape[:-1]),
        ("tensor", ()),
        ("block128", (groups, rows)),
    ):
        q, scale = quantize(x, fmt, granularity=granularity)
        assert (q.shape, scale.shape) == (shape, scale_shape)
        assert scale.eq(1).all()
        back = dequantize(q, scale, torch.bfloat16, granularity=granularity)
        assert back.shape == shape
    assert torch.ones(3).sum() == 3


# Layouts


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 130])
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
def test_block_scales_are_row_padded_to_four_floats(rows: int, columns: int) -> None:
    q, scale = quantize(sample(rows, columns), granularity="block128")
    groups, padded = -(-columns // 128), -(-rows // 4) * 4
    assert q.shape == (rows, columns)
    assert scale.shape == (groups, rows)
    assert scale.stride() == (padded, 1)
    assert scale.untyped_storage().nbytes() == groups * padded * 4
    padding = torch.as_strided(scale, (groups, padded), (padded, 1))[:, rows:]
    assert padding.eq(1).all()


def test_block_scales_equal_those_of_the_gemm_epilogue() -> None:
    x = sample(5, 300)
    x[2, :128] = 0
    x[3, 200] = math.nan
    for fmt in FORMATS.values():
        _, scale = quantize(x, fmt.name, granularity="block128")
        assert_same(scale, group_scale(x, fmt.largest).contiguous())


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_b10_unaligned_view_equals_its_clone(granularity: str, offset: int) -> None:
    for dtype in DTYPES:
        view = sample(1, 5 * 130 + 8, dtype=dtype).view(-1)[offset : offset + 650].view(5, 130)
        assert view.storage_offset() == offset
        q, scale = quantize(view, granularity=granularity)
        expected, expected_scale = quantize(view.clone(), granularity=granularity)
        assert_same(q, expected)
        assert_same(scale, expected_scale)
        codes = torch.cat((q.view(torch.uint8).view(-1), q.view(torch.uint8).view(-1)[:offset]))
        shifted = codes[offset:].view(q.dtype).view(5, 130)
        assert_same(
            dequantize(shifted, scale, granularity=granularity),
            dequantize(shifted.clone(), scale, granularity=granularity),
        )
    scales = torch.linspace(0.5, 1.5, 5 + offset)[offset:]
    x = sample(5, 16)
    assert_same(quantize(x, scale=scales)[0], quantize(x, scale=scales.clone())[0])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_b12_non_contiguous_input_equals_its_contiguous_copy(granularity: str) -> None:
    qkv = sample(32, 4096 // 8, dtype=torch.bfloat16)
    heads = qkv.split([256, 128, 128], dim=1)[0].view(32, 16, 16)
    assert heads.stride() == (512, 16, 1)
    column = sample(1, 40).t()
    for x in (heads, sample(6, 5, 140).permute(1, 2, 0), sample(1, 40).expand(7, 40), column):
        for fmt in FORMAT_NAMES:
            q, scale = quantize(x, fmt, granularity=granularity)
            expected, expected_scale = quantize(x.contiguous(), fmt, granularity=granularity)
            assert q.stride() == torch.empty(x.shape).stride()
            assert scale.stride() == expected_scale.stride()
            assert_same(q, expected)
            assert_same(scale, expected_scale)
            back = dequantize(q.transpose(0, 1), scale.new_tensor(2.0), granularity="tensor")
            assert back.stride() == torch.empty(back.shape).stride()
            assert torch.equal(back, q.transpose(0, 1).float() * 2)


def test_b14_input_and_its_neighbours_stay_as_they_were() -> None:
    big = torch.full((6, 40), 1234.0)
    x = big[1:5, 3:35]
    x.copy_(sample(4, 32))
    before = big.clone()
    for granularity in GRANULARITIES:
        q, scale = quantize(x, granularity=granularity)
        dequantize(q, scale, granularity=granularity)
        quantize(x, "int8", granularity=granularity)
    assert torch.equal(big, before)


# Errors


def test_the_smallest_given_scale_keeps_zeros_and_one_without_rows_is_accepted() -> None:
    x = torch.tensor([[0.0, 2 * SMALLEST_SCALE]])
    for dtype in FORMATS:
        q, scale = quantize(x, dtype, scale=torch.tensor([SMALLEST_SCALE]))
        assert q.float().tolist() == [[0.0, 2.0]]
        assert torch.equal(dequantize(q, scale), x)
        assert quantize(x[:0], dtype, scale=torch.ones(0))[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtype": "e5m2"}, ConfigError, "'e5m2'; accepted are e4m3, int8"),
        ({"dtype": torch.int8}, ConfigError, "torch.int8; accepted are e4m3, int8"),
        ({"granularity": "row"}, ConfigError, "accepted are token, tensor, block128"),
        ({"x": torch.ones(2, 4).double()}, DTypeError, "float64"),
        ({"x": torch.ones(2, 4).int()}, DTypeError, "int32"),
        ({"x": torch.tensor(1.0)}, ShapeError, "at least 1 dimension"),
        ({"x": torch.tensor(1.0), "scale": torch.ones(1)}, ShapeError, "at least 1 dimension"),
        ({"scale": torch.ones(2).half()}, DTypeError, "scale is float16"),
        ({"scale": torch.ones(3)}, ShapeError, r"accepted shape: \(2,\)"),
        ({"scale": torch.ones(2, 1)}, ShapeError, r"accepted shape: \(2,\)"),
        ({"scale": torch.tensor(1.0)}, ShapeError, r"accepted shape: \(2,\)"),
        ({"scale": torch.ones(2), "granularity": "tensor"}, ShapeError, r"accepted shape: \(\)"),
        ({"scale": torch.ones(1, 2), "granularity": "block128"}, ConfigError, "no given scale"),
        ({"scale": torch.tensor([1.0, 0.0])}, ConfigError, "holds 0.0; .* above zero"),
        ({"scale": torch.tensor([1.0, 1e-39])}, ConfigError, r"at least 1\.1754944e-38 \(2\^-126"),
        (
            {"scale": torch.tensor(SMALLEST_SCALE / 2), "granularity": "tensor"},
            ConfigError,
            "holds 5.877.*e-39; .* at least",
        ),
        ({"scale": torch.tensor([1.0, math.nan])}, ConfigError, "holds nan; .* finite"),
        ({"scale": torch.tensor([math.inf, 1.0])}, ConfigError, "holds inf; .* finite"),
        ({"scale": torch.tensor(-1.0), "granularity": "tensor"}, ConfigError, "above zero"),
        ({"scale": torch.ones(2, device="meta")}, DeviceError, "meta"),
        ({"x": torch.ones(2, 4, requires_grad=True)}, UnsupportedError, "inference only"),
    ],
)
def test_quantize_refuses(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"x": torch.ones(2, 4), **arguments}
    with pytest.raises(error, match=words):
        quantize(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"granularity": "row"}, ConfigError, "accepted are token, tensor, block128"),
        ({"q": torch.ones(2, 4)}, DTypeError, "accepted dtypes: float8_e4m3fn, int8"),
        ({"q": torch.tensor(1, dtype=torch.int8)}, ShapeError, "at least 1 dimension"),
        ({"scale": torch.ones(2).double()}, DTypeError, "scale is float64"),
        ({"scale": torch.ones(3)}, ShapeError, r"accepted shape: \(2,\)"),
        ({"granularity": "tensor"}, ShapeError, r"accepted shape: \(\)"),
        ({"granularity": "block128"}, ShapeError, r"accepted shape: \(1, 2\)"),
        ({"dtype": torch.int8}, DTypeError, "accepted are torch.float32"),
        ({"scale": torch.ones(2, device="meta")}, DeviceError, "meta"),
    ],
)
def test_dequantize_refuses(
    arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    arguments = {"q": torch.ones(2, 4, dtype=torch.int8), "scale": torch.ones(2), **arguments}
    with pytest.raises(error, match=words):
        dequantize(**arguments)  # type: ignore[arg-type]


# Tracing


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_b37_quantize_and_dequantize_pass_opcheck(fmt: str, granularity: str) -> None:
    ops = torch.ops.fusedops
    x = sample(5, 130, dtype=torch.bfloat16)
    torch.library.opcheck(ops.quantize.default, (x, fmt, granularity))
    q, scale = quantize(x, fmt, granularity=granularity)
    # The schema test compares inputs by arithmetic that torch lacks for float8; int8 stands in.
    without_schema = [name for name in OPCHECK_TESTS if name != "test_schema"]
    torch.library.opcheck(
        ops.dequantize.default,
        (q, scale, torch.bfloat16, granularity),
        test_utils=without_schema if fmt == "e4m3" else OPCHECK_TESTS,
    )


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_b37_quantize_static_passes_opcheck(fmt: str) -> None:
    op = torch.ops.fusedops.quantize_static.default
    x = sample(3, 5, 20).permute(1, 0, 2)
    for scale in (torch.tensor(0.5), torch.linspace(0.1, 1, 15), torch.ones(5, 3)):
        torch.library.opcheck(op, (x, scale, fmt))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_b39_compiles_without_a_graph_break(granularity: str) -> None:
    def round_trip(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        q, used = quantize(x + 1, granularity=granularity, scale=scale)
        return dequantize(q, used, x.dtype, granularity=granularity) + x, used

    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 6, 9):
        x = sample(rows, 140, dtype=torch.bfloat16)
        scales: list[Tensor | None] = [None]
        if granularity != "block128":
            scales.append(torch.tensor(0.5) if granularity == "tensor" else torch.ones(rows))
        for scale in scales:
            for got, expected in zip(compiled(x, scale), round_trip(x, scale), strict=True):
                assert got.stride() == expected.stride()
                assert_same(got, expected)
