"""histogram, bincount and expert_histogram: edges, ranges, strangers, exact counts, errors."""

from __future__ import annotations

import math

import numpy as np
import oracles_memory as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from fusedops.errors import ConfigError, DTypeError, UnsupportedError
from fusedops.ops import histogram as histogram_module
from fusedops.ops.histogram import (
    HISTOGRAM_DTYPES,
    INDEX_DTYPES,
    MAX_BINS,
    bin_edges,
    bincount,
    expert_histogram,
    histogram,
)

CPU = torch.device("cpu")
INF = math.inf


# histogram


@pytest.mark.parametrize("dtype", HISTOGRAM_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bins", "ends"), [(1, (-1.0, 1.0)), (7, (-0.3, 0.7)), (100, (-3.0, 3.0)), (3, (1e-40, 2e-40))]
)
def test_counts_equal_an_independent_walk(
    dtype: torch.dtype, bins: int, ends: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(bins)
    x = torch.randn(900, generator=generator)
    x = torch.cat((x, x[:100] * 1e-40, torch.tensor([math.nan, INF, -INF, *ends]))).to(dtype)
    double = dtype == torch.float64
    expected = oracle.histogram(x.tolist(), bins, *ends, double=double)
    got = histogram(x, bins, range=ends)
    assert got.dtype == torch.int64
    assert got.tolist() == expected


@given(
    st.lists(st.floats(width=32, allow_nan=True), max_size=30),
    st.integers(1, 12),
    st.floats(-1e6, 1e6, width=32),
    st.floats(2.0**-20, 2.0**20, width=32),
)
@hypothesis_settings(max_examples=150)
def test_counts_equal_an_independent_walk_for_any_float32(
    samples: list[float], bins: int, lo: float, width: float
) -> None:
    hi = float(np.float32(lo + width))
    if hi <= lo:
        hi = float(np.nextafter(np.float32(lo), np.float32(INF)))
    on_edges = oracle.edges(lo, hi, bins)
    x = torch.tensor([*samples, *on_edges], dtype=torch.float32)
    expected = oracle.histogram(x.tolist(), bins, lo, hi)
    assert histogram(x, bins, range=(lo, hi)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("bins", "ends"), [(10, (0.0, 0.99)), (1000, (-0.1, 0.3)), (3, (5.0, 6.0))]
)
def test_an_edge_belongs_to_the_bin_above_it(
    dtype: torch.dtype, bins: int, ends: tuple[float, float]
) -> None:
    double = dtype == torch.float64
    lo, hi = (float(np.float64(e) if double else np.float32(e)) for e in ends)
    edges = bin_edges(lo, hi, bins, dtype, CPU)
    assert edges.dtype == dtype
    assert edges.tolist() == oracle.edges(lo, hi, bins, double=double)
    assert edges.diff().gt(0).all()
    below = torch.nextafter(edges, torch.full_like(edges, -INF))
    assert histogram(edges[:-1], bins, range=ends).tolist() == [1] * bins
    assert histogram(below, bins, range=ends).tolist() == [1] * bins
    assert (
        histogram(torch.nextafter(edges[-1:], edges.new_tensor([INF])), bins, range=ends).sum() == 0
    )


def test_agrees_with_numpy_where_edges_are_exact() -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    x = torch.cat((x, torch.arange(-32, 33) / 8))
    expected, _ = np.histogram(x.double().numpy(), bins=64, range=(-4.0, 4.0))
    assert histogram(x, 64, range=(-4.0, 4.0)).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", HISTOGRAM_DTYPES, ids=str)
def test_b45_nan_infinities_and_outsiders_are_not_counted(dtype: torch.dtype) -> None:
    above = {torch.bfloat16: 1.01, torch.float16: 1.002}.get(dtype, 1.0001)
    x = torch.tensor([math.nan, -1, 0, 0.5, 1, above, INF, -INF], dtype=dtype)
    assert x[5] > 1
    assert histogram(x, 2, range=(0, 1)).tolist() == [1, 2]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_b45_automatic_range_refuses_data_that_are_not_finite(bad: float) -> None:
    for dtype in HISTOGRAM_DTYPES:
        x = torch.tensor([0.0, 1.0, bad, 2.0], dtype=dtype)
        with pytest.raises(ValueError, match="pass range="):
            histogram(x, 4)


def test_b47_samples_on_edges_stay_in_order() -> None:
    x = torch.linspace(0, 0.99, 1001)
    counts = histogram(x, 10, range=(0, 0.99))
    assert counts.sum() == 1001
    assert counts.min() >= 99
    assert counts.max() <= 101
    assert counts.tolist() == oracle.histogram(x.tolist(), 10, 0.0, 0.99)


def test_b49_counts_pass_two_to_the_24() -> None:
    n = 2**24 + 3
    x = torch.zeros(n)
    assert histogram(x, 4, range=(0, 1)).tolist() == [n, 0, 0, 0]
    x[::100] = 0.6
    few = -(-n // 100)
    assert histogram(x, 4, range=(0, 1)).tolist() == [n - few, 0, few, 0]


@pytest.mark.parametrize(
    ("samples", "bins", "expected"),
    [
        ([], 3, [0, 0, 0]),
        ([2.0, 4.0, 3.0], 2, [1, 2]),
        ([7.0, 7.0], 4, [0, 0, 2, 0]),
        ([1e10, 1e10, 1e10], 4, [0, 0, 0, 3]),
        ([-3e38, 3e38, 0.0], 3, [1, 1, 1]),
    ],
)
def test_automatic_range(samples: list[float], bins: int, expected: list[int]) -> None:
    assert histogram(torch.tensor(samples), bins).tolist() == expected


@pytest.mark.parametrize("dtype", HISTOGRAM_DTYPES, ids=str)
def test_automatic_range_counts_every_sample(dtype: torch.dtype) -> None:
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(4)).to(dtype)
    counts = histogram(x, 13)
    ends = (x.min().item(), x.max().item())
    assert counts.sum() == 1500
    assert counts[0] >= 1
    assert counts[-1] >= 1
    assert torch.equal(counts, histogram(x, 13, range=ends))


def test_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    ids = torch.randint(-2, 12, (1000,), generator=torch.Generator().manual_seed(6))
    whole = histogram(x, 9, range=(-2, 2)), bincount(ids, 10)
    monkeypatch.setattr(histogram_module, "_CHUNK_ELEMENTS", 7)
    assert torch.equal(histogram(x, 9, range=(-2, 2)), whole[0])
    assert torch.equal(bincount(ids, 10), whole[1])


# bincount


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_bincount_leaves_strangers_out(dtype: torch.dtype) -> None:
    values = [0, 3, 3, 200, 4, 0, 0, 255] + ([] if dtype == torch.uint8 else [-1, -200])
    got = bincount(torch.tensor(values, dtype=dtype).reshape(2, -1), 4)
    assert got.dtype == torch.int64
    assert got.tolist() == [3, 0, 0, 2]
    extremes = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
    assert bincount(extremes, 2).tolist() == [int(dtype == torch.uint8), 0]


def test_bincount_of_the_most_bins() -> None:
    last = MAX_BINS - 1
    counts = bincount(torch.tensor([last, 5, last, MAX_BINS]), MAX_BINS)
    assert counts.shape == (MAX_BINS,)
    assert counts.nonzero().flatten().tolist() == [5, last]
    assert counts[last] == 2


# expert_histogram


@given(
    st.lists(st.integers(-2, 7), max_size=40),
    st.integers(1, 6),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_experts_are_sorted_stably_with_strangers_last(
    ids: list[int], n_experts: int, dtype: torch.dtype
) -> None:
    counts, offsets, permutation = expert_histogram(torch.tensor(ids, dtype=dtype), n_experts)
    expected = oracle.by_expert(ids, n_experts)
    assert (counts.tolist(), offsets.tolist(), permutation.tolist()) == expected
    assert {counts.dtype, offsets.dtype, permutation.dtype} == {torch.int64}


def test_expert_ids_of_any_shape_are_flattened() -> None:
    ids = torch.randint(0, 8, (200, 2), generator=torch.Generator().manual_seed(7))
    for x in (ids, ids.t(), ids.to(torch.uint8), ids[::3]):
        counts, offsets, permutation = expert_histogram(x, 8)
        flat = x.flatten()
        assert (counts.tolist(), offsets.tolist(), permutation.tolist()) == oracle.by_expert(
            flat.tolist(), 8
        )
        assert flat[permutation].diff().ge(0).all() or x.dtype == torch.uint8


# Cases on every operation


def test_b04_empty_input_gives_zero_counts() -> None:
    for shape in ((0,), (0, 8), (8, 0)):
        assert histogram(torch.empty(shape), 3, range=(0, 1)).tolist() == [0, 0, 0]
        empty_ids = torch.empty(shape, dtype=torch.int32)
        assert bincount(empty_ids, 3).tolist() == [0, 0, 0]
        counts, offsets, permutation = expert_histogram(empty_ids, 3)
        assert (counts.tolist(), offsets.tolist(), permutation.tolist()) == ([0] * 3, [0] * 4, [])
    assert torch.ones(3).sum() == 3


def test_b10_and_b12_views_equal_their_copies() -> None:
    base = torch.randn(8, 130, generator=torch.Generator().manual_seed(8))
    ids = torch.randint(-1, 9, (8, 130), generator=torch.Generator().manual_seed(9))
    cuts = [(slice(None), slice(offset, None)) for offset in (1, 2, 3, 4)]
    for cut in (*cuts, (slice(1, None, 3), slice(None, None, 7))):
        view, id_view = base[cut], ids[cut].t()
        for dtype in HISTOGRAM_DTYPES:
            samples = base.to(dtype)[cut]
            expected = histogram(samples.clone(), 11, range=(-2, 2))
            assert torch.equal(histogram(samples, 11, range=(-2, 2)), expected)
        assert torch.equal(histogram(view, 11), histogram(view.clone(), 11))
        assert torch.equal(bincount(id_view, 8), bincount(id_view.contiguous(), 8))
        for got, expected in zip(
            expert_histogram(id_view, 8), expert_histogram(id_view.contiguous(), 8), strict=True
        ):
            assert torch.equal(got, expected)
    scalar = torch.tensor(0.5)
    assert histogram(scalar, 2, range=(0, 1)).tolist() == [0, 1]


def test_b14_inputs_stay_as_they_were() -> None:
    x, ids = torch.randn(40), torch.randint(-3, 9, (40,))
    before, ids_before = x.clone(), ids.clone()
    histogram(x, 3)
    histogram(x, 3, range=(0, 1))
    bincount(ids, 4)
    expert_histogram(ids, 4)
    assert torch.equal(x, before)
    assert torch.equal(ids, ids_before)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bins": 0}, ConfigError, "bins=0; accepted are 1 to 1048576"),
        ({"bins": MAX_BINS + 1}, ConfigError, "accepted are 1 to 1048576"),
        ({"range": (1.0, 1.0)}, ConfigError, "lo below hi"),
        ({"range": (2.0, 1.0)}, ConfigError, "lo below hi"),
        ({"range": (0.0, math.nan)}, ConfigError, "finite"),
        ({"range": (-INF, 1.0)}, ConfigError, "finite"),
        ({"range": (0.0, 1e39)}, ConfigError, "in float32, .* finite"),
        ({"range": (1.0, 1.0 + 1e-9)}, ConfigError, "lo below hi"),
        ({"range": (0.0,)}, ConfigError, "two ends"),
        ({"range": (0.0, 1.0, 2.0)}, ConfigError, "two ends"),
        ({"range": (-1e308, 1e308), "x": torch.ones(2).double()}, ConfigError, "in float64"),
        ({"x": torch.ones(3).int()}, DTypeError, "int32"),
        ({"x": torch.ones(3).to(torch.float8_e4m3fn)}, DTypeError, "float8_e4m3fn"),
        ({"x": torch.ones(3, requires_grad=True)}, UnsupportedError, "inference only"),
    ],
)
def test_histogram_refuses(
    arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    arguments = {"x": torch.ones(3), "bins": 4, **arguments}
    with pytest.raises(error, match=words):
        histogram(**arguments)  # type: ignore[arg-type]


def test_automatic_range_refuses_data_wider_than_float64() -> None:
    x = torch.tensor([-1e308, 1e308], dtype=torch.float64)
    with pytest.raises(ConfigError, match="wider than the largest float64"):
        histogram(x, 4)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float32], ids=str)
def test_bincount_and_expert_histogram_refuse_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    with pytest.raises(DTypeError, match="accepted dtypes: int64, int32, uint8"):
        bincount(x, 4)
    with pytest.raises(DTypeError, match="accepted dtypes: int64, int32, uint8"):
        expert_histogram(x, 4)


@pytest.mark.parametrize("count", [0, -1, MAX_BINS + 1])
def test_bincount_and_expert_histogram_refuse_other_counts(count: int) -> None:
    x = torch.ones(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=f"bins={count}; accepted are 1 to 1048576"):
        bincount(x, count)
    with pytest.raises(ConfigError, match=f"n_experts={count}; accepted are 1 to 1048576"):
        expert_histogram(x, count)


def test_b37_histograms_pass_opcheck() -> None:
    ops = torch.ops.fusedops
    x = torch.randn(4, 6)
    for ends in (None, [-1.0, 1.0]):
        torch.library.opcheck(ops.histogram.default, (x.bfloat16(), 5, ends))
    ids = torch.randint(-1, 5, (4, 6))
    torch.library.opcheck(ops.bincount.default, (ids.t(), 5))
    torch.library.opcheck(ops.expert_histogram.default, (ids.int(), 4))


def test_b39_compiles_without_a_graph_break() -> None:
    def counts(x: Tensor, bins: int) -> tuple[Tensor, ...]:
        ids = (x.abs() * 2).long()
        return (
            histogram(x * 2, bins) + 1,
            histogram(x, bins, range=(-1.0, 1.5)),
            bincount(ids, bins),
            *expert_histogram(ids, bins),
        )

    compiled = torch.compile(counts, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 6, 9):
        x = torch.randn(rows, 4)
        for got, expected in zip(compiled(x, rows + 1), counts(x, rows + 1), strict=True):
            assert torch.equal(got, expected)


def counted_in_float64(x: Tensor, bins: int, lo: float, hi: float) -> list[int]:
    """The documented rule, one sample after another, in numpy."""
    wide = np.float64 if x.dtype == torch.float64 else np.float32
    lo, hi = float(wide(lo)), float(wide(hi))
    step = (hi - lo) / bins
    edges = [float(wide(lo + i * step)) for i in range(bins)] + [hi]
    counts = [0] * bins
    for sample in x.double().flatten().tolist():
        if lo <= sample <= hi:
            counts[min(sum(edge <= sample for edge in edges) - 1, bins - 1)] += 1
    return counts


DENORMAL_RANGES = {
    torch.float32: ((0.0, 1e-44), (-1e-40, 1e-40), (-1e-38, 3e-38), (2e-45, 1e-39)),
    torch.bfloat16: ((-1e-39, 1e-39), (0.0, 9.2e-41)),
    torch.float16: ((-6e-5, 6e-5), (0.0, 6e-8)),
    torch.float64: ((-1e-310, 1e-310), (0.0, 1e-322)),
}


@pytest.mark.parametrize("bins", [1, 3, 10])
@pytest.mark.parametrize("dtype", DENORMAL_RANGES, ids=str)
def test_denormal_samples_and_ranges_are_counted_exactly(dtype: torch.dtype, bins: int) -> None:
    generator = torch.Generator().manual_seed(bins)
    for lo, hi in DENORMAL_RANGES[dtype]:
        unit = torch.rand(200, generator=generator, dtype=torch.float64)
        x = (lo + (hi - lo) * (1.2 * unit - 0.1)).to(dtype)
        assert (x != 0).any()
        expected = counted_in_float64(x, bins, lo, hi)
        assert histogram(x, bins, range=(lo, hi)).tolist() == expected
        own = [float(end) for end in torch.aminmax(x)]
        assert histogram(x, bins).tolist() == counted_in_float64(x, bins, *own)
