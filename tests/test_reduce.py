"""reduce: every operation against float64, NaN and infinities, empty dimensions, half sums."""

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

from fusedops.errors import ConfigError, DTypeError, ShapeError, UnsupportedError
from fusedops.ops.reduce import REDUCE_DTYPES, REDUCTIONS, reduce

OPS = tuple(REDUCTIONS)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = tuple(dtype for dtype in REDUCE_DTYPES if not dtype.is_floating_point)
POSITIONS = ("argmax", "argmin")
NEED_ELEMENTS = ("max", "min", "absmax", *POSITIONS)

# One rounding to the result dtype, and for float32 a few of the accumulation.
RELATIVE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 1e-3}


def integers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers; zeros, repeated values and both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    return torch.randint(low, 4, shape, generator=generator).to(dtype)


def assert_close_to_oracle(x: Tensor, op: str, axes: tuple[int, ...], got: Tensor) -> None:
    expected = torch.from_numpy(oracle.reduced_over(x.double().numpy(), op, axes))
    assert got.shape == expected.shape
    assert got.is_contiguous()
    sums = ("sum", "mean", "sumsq", "logsumexp")
    rtol = RELATIVE.get(got.dtype, 0.0) if op in sums else 0.0
    atol = rtol * x.double().abs().amax().item() if op in ("sum", "mean") else 0.0
    torch.testing.assert_close(got.double(), expected.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("op", "axes"),
    [
        (op, axes)
        for op in OPS
        for axes in ((0,), (1,), (2,), (0, 2), (0, 1, 2))
        if op not in POSITIONS or len(axes) != 2
    ],
)
def test_floats_agree_with_an_independent_formula(op: str, axes: tuple[int, ...]) -> None:
    for dtype in FLOATS:
        x = torch.randn(4, 33, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        x[:, 3] = 0
        got = reduce(x, op, axes)
        wanted = {"any": torch.bool, "all": torch.bool}.get(op, dtype)
        assert got.dtype == (torch.int64 if op in POSITIONS else wanted)
        assert_close_to_oracle(x, op, axes, got)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", [op for op in OPS if op != "logsumexp"])
def test_integers_agree_with_an_independent_formula(op: str, dtype: torch.dtype) -> None:
    x = integers(3, 17, 4, dtype=dtype)
    result = {
        "sum": torch.int64,
        "sumsq": torch.int64,
        "argmax": torch.int64,
        "argmin": torch.int64,
        "mean": torch.float32,
        "any": torch.bool,
        "all": torch.bool,
    }
    for axes in ((0,), (1,), (0, 1, 2)):
        got = reduce(x, op, axes)
        assert got.dtype == result.get(op, dtype)
        assert_close_to_oracle(x, op, axes, got)


@given(
    np_st.arrays(
        np.float32,
        np_st.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6),
        elements=st.sampled_from([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan]),
    ),
    st.data(),
)
@hypothesis_settings(max_examples=150)
def test_special_values_in_any_place(x: np.ndarray, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([op for op in OPS if op != "logsumexp"]))
    axis = data.draw(st.integers(0, x.ndim - 1))
    got = reduce(torch.from_numpy(x), op, axis)
    if op in ("sum", "mean", "sumsq"):
        reducer = {"sum": np.sum, "mean": np.mean, "sumsq": lambda v, axis: np.sum(v * v, axis)}
        with np.errstate(invalid="ignore"):
            expected = torch.from_numpy(np.asarray(reducer[op](x.astype(np.float64), axis=axis)))
    else:
        expected = torch.from_numpy(oracle.reduced_over(x.astype(np.float64), op, (axis,)))
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-6, atol=0, equal_nan=True)


@given(
    np_st.arrays(np.int64, st.integers(1, 9)),
    st.sampled_from(["sum", "sumsq", "max", "min", "argmax", "argmin"]),
)
def test_int64_is_exact_modulo_its_width(x: np.ndarray, op: str) -> None:
    values = [int(v) for v in x]
    expected = {
        "sum": lambda: sum(values),
        "sumsq": lambda: sum(v * v for v in values),
        "max": lambda: max(values),
        "min": lambda: min(values),
        "argmax": lambda: values.index(max(values)),
        "argmin": lambda: values.index(min(values)),
    }[op]()
    wrapped = (expected + 2**63) % 2**64 - 2**63
    assert reduce(torch.from_numpy(x), op).item() == wrapped


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_absmax_of_the_most_negative_integer_saturates(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    x = torch.tensor([[info.min, 5], [info.min + 1, 5], [-7, 5]], dtype=dtype)
    assert reduce(x, "absmax", 1).tolist() == [info.max, info.max, 7]


def test_mean_of_integers_divides_in_float64() -> None:
    total = 2**24 + 5  # no float32: rounding it before the division gives another mean
    assert np.float32(np.float32(total) / np.float32(3)) != np.float32(total / 3)
    x = torch.tensor([2**24, 4, 1], dtype=torch.int64)
    assert reduce(x, "mean").item() == np.float32(total / 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_positions_are_of_the_first_extremum(dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 3, -2, 3, -2], [0.0, -0.0, 0.0, -0.0, 0.0]], dtype=dtype)
    assert reduce(x, "argmax", 1).tolist() == [1, 0]
    assert reduce(x, "argmin", 1).tolist() == [2, 0]
    assert reduce(x, "argmax").item() == 1
    assert reduce(x.t(), "argmax").item() == 2, "row-major order of the view, not of the memory"
    for length in (33, 1000):
        assert reduce(torch.ones(3, length, dtype=dtype), "argmax", 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logsumexp_is_stable(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [
            [-math.inf, -math.inf, -math.inf],
            [math.inf, 1.0, -math.inf],
            [math.nan, math.inf, 1.0],
            [1000.0, 1000.0, -1000.0],
            [-1000.0, -1000.0, -1000.0],
        ],
        dtype=dtype,
    )
    got = reduce(x, "logsumexp", 1)
    expected = [
        -math.inf,
        math.inf,
        math.nan,
        1000.0 + math.log(2.0),
        -1000.0 + math.log(3.0),
    ]
    wanted = torch.tensor(expected, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=2e-7, atol=0, equal_nan=True)


# Cases


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["max", "min", "absmax", *POSITIONS])
def test_b18_one_nan_anywhere_decides(op: str, dtype: torch.dtype) -> None:
    for length in (1, 2, 31, 32, 33, 1024, 1025, 4097):
        places = sorted({p for p in (0, 31, 32, 1023, length - 1) if p < length})
        x = torch.randn(len(places), length, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[torch.arange(len(places)), torch.tensor(places)] = math.nan
        got = reduce(x, op, 1)
        if op in POSITIONS:
            assert got.tolist() == places
            assert reduce(x.t().contiguous(), op, 0).tolist() == places
        else:
            assert got.isnan().all()
            assert reduce(x, op).isnan()


def test_b18_nan_and_infinite_rows() -> None:
    nan, inf = math.nan, math.inf
    for dtype in FLOATS:
        x = torch.tensor([[nan, nan, nan, 42], [1, nan, 2, 3], [nan] * 4, [-inf] * 4]).to(dtype)
        for op in ("max", "absmax", "min"):
            assert reduce(x, op, 1)[:3].isnan().all()
        assert reduce(x, "max", 1)[3] == -inf
        assert reduce(x, "min", 1)[3] == -inf
        assert reduce(x, "absmax", 1)[3] == inf
        assert reduce(x, "argmax", 1).tolist() == [0, 1, 0, 0]


def test_b22_half_sums_neither_overflow_nor_stop() -> None:
    half = torch.float16
    cancelling = torch.tensor([32000.0] * 4 + [-32000.0] * 4, dtype=half)
    assert reduce(cancelling, "sum", 0).item() == 0
    ones = torch.ones(70000, dtype=torch.bfloat16)
    assert reduce(ones, "sum").item() == 70144
    assert reduce(ones, "sumsq").item() == 70144
    assert reduce(ones, "mean").item() == 1.0
    assert reduce(torch.ones(20000, dtype=half), "sum").item() == 20000
    assert reduce(torch.full((65536,), 60000.0, dtype=half), "mean").item() == 60000
    x = integers(65536, dtype=torch.int64).to(half)
    assert reduce(x, "mean") == x.double().mean().to(half)


@pytest.mark.parametrize("keepdim", [False, True])
def test_b51_dimensions_of_size_zero_and_one(keepdim: bool) -> None:
    empty, rows = torch.ones(3, 0), torch.ones(0, 4)
    shape = (3, 1) if keepdim else (3,)
    for op, value in (
        ("sum", 0.0),
        ("sumsq", 0.0),
        ("mean", math.nan),
        ("logsumexp", -math.inf),
        ("any", False),
        ("all", True),
    ):
        got = reduce(empty, op, 1, keepdim=keepdim)
        wanted = torch.full(shape, value, dtype=got.dtype)
        torch.testing.assert_close(got, wanted, equal_nan=True)
    assert reduce(torch.ones(3, 0, dtype=torch.int8), "mean", 1).isnan().all()
    for op in NEED_ELEMENTS:
        got = reduce(rows, op, 1, keepdim=keepdim)
        assert got.shape == ((0, 1) if keepdim else (0,))
        for x, dim, named in ((empty, 1, 1), (empty, -1, 1), (rows, 0, 0), (rows, None, 0)):
            with pytest.raises(ShapeError, match=f"over dim {named} of size 0"):
                reduce(x, op, dim, keepdim=keepdim)
    column = torch.tensor([[1.5], [-2.0], [0.0]])
    for op in ("sum", "mean", "max", "min", "logsumexp"):
        got = reduce(column, op, 1, keepdim=keepdim)
        assert torch.equal(got, column if keepdim else column[:, 0])


def test_b04_empty_result_then_an_ordinary_operation() -> None:
    for op in OPS:
        got = reduce(torch.empty(0, 8), op, -1)
        assert got.shape == (0,)
    assert torch.ones(3).sum() == 3


@pytest.mark.parametrize("op", OPS)
def test_b10_unaligned_view_equals_its_clone(op: str) -> None:
    for dtype in FLOATS:
        for offset in (1, 2, 3, 4):
            view = torch.randn(1024 + offset).to(dtype)[offset:].view(8, 128)
            assert view.storage_offset() == offset
            assert torch.equal(reduce(view, op, 1), reduce(view.clone(), op, 1))


@pytest.mark.parametrize("op", OPS)
def test_b12_non_contiguous_input_equals_its_contiguous_copy(op: str) -> None:
    qkv = torch.randn(16, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    heads = qkv.split([64, 16, 16], dim=1)[0].view(16, 4, 16)
    for x in (heads, heads.permute(2, 0, 1), qkv[::3, ::5], qkv[:, :1].expand(16, 9)):
        for dim in (0, -1, None):
            got = reduce(x, op, dim)
            assert got.stride() == torch.empty(got.shape).stride()
            torch.testing.assert_close(got, reduce(x.contiguous(), op, dim), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("op", OPS)
def test_b14_input_and_its_neighbours_stay_as_they_were(op: str) -> None:
    big = torch.full((6, 40), 1234.0)
    view = big[1:5, 3:35]
    view.copy_(torch.randn(4, 32))
    before = big.clone()
    for x in (view, view[:, :1], view[0, 0]):
        reduce(x, op, -1).fill_(1)
    assert torch.equal(big, before)


def test_dimensions_are_counted_from_either_end() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert torch.equal(reduce(x, "sum", (-1, 0)), reduce(x, "sum", [0, 2]))
    assert reduce(x, "sum", (0, 2), keepdim=True).shape == (1, 3, 1)
    assert reduce(x, "argmax", keepdim=True).shape == (1, 1, 1)
    assert reduce(x, "argmax", (0, 1, 2)).item() == reduce(x, "argmax").item()
    scalar = torch.tensor(-2.5)
    for dim in (None, 0, -1):
        assert reduce(scalar, "absmax", dim).item() == 2.5
        assert reduce(scalar, "argmin", dim, keepdim=True).shape == ()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"op": "median"}, ConfigError, "'median'; accepted are sum, mean, max"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, DTypeError, "complex64"),
        ({"x": torch.ones(2).to(torch.float8_e4m3fn)}, DTypeError, "float8_e4m3fn"),
        ({"x": torch.ones(2).int(), "op": "logsumexp"}, DTypeError, "int32"),
        ({"dim": 2}, ShapeError, "got dim 2 .* accepted are -2 to 1"),
        ({"dim": (0, -3)}, ShapeError, "got dim -3"),
        ({"dim": 1, "x": torch.tensor(1.0)}, ShapeError, "accepted are -1 to 0"),
        ({"dim": (1, -1)}, ConfigError, "twice"),
        ({"dim": ()}, ConfigError, "names no dimension"),
        (
            {"op": "argmax", "dim": (0, 1), "x": torch.ones(2, 2, 2)},
            ConfigError,
            "one dimension or all",
        ),
        ({"x": torch.ones(2, requires_grad=True)}, UnsupportedError, "inference only"),
    ],
)
def test_reduce_refuses(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"x": torch.ones(2, 3), "op": "sum", **arguments}
    with pytest.raises(error, match=words):
        reduce(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", OPS)
def test_b37_reduce_passes_opcheck(op: str) -> None:
    x = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(3)).permute(2, 0, 1)
    torch.library.opcheck(torch.ops.fusedops.reduce.default, (x.bfloat16(), op, [1], True))
    if op in ("sum", "absmax", "argmax", "all"):
        whole = (integers(3, 4, dtype=torch.int8), op, None, False)
        torch.library.opcheck(torch.ops.fusedops.reduce.default, whole)


def test_b39_compiles_without_a_graph_break() -> None:
    def statistics(x: Tensor) -> list[Tensor]:
        x = x * 2
        return [
            reduce(x, "sumsq", -1) + x[:, 0],
            reduce(x, "max", (0, 1)),
            reduce(x, "argmax", 0, keepdim=True),
            reduce(x, "mean"),
        ]

    compiled = torch.compile(statistics, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 6, 9):
        x = torch.randn(rows, 4)
        for got, expected in zip(compiled(x), statistics(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
