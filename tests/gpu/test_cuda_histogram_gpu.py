"""The histogram kernels: equal to the operations' own definition, for any values and layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from cuda_call_cases import on_cpu, results_in_poisoned_memory
from cuda_cases import PROVIDER, captured
from torch import Tensor

from fusedops.ops.histogram import (
    HISTOGRAM_DTYPES,
    INDEX_DTYPES,
    MAX_BINS,
    bincount,
    expert_histogram,
    histogram,
)
from fusedops.providers import cuda_histogram
from fusedops.providers.base import Usage, use_provider

COVERS = (
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_call_cases.py",
    "csrc/histogram.cu",
    "csrc/experts.cu",
    "fusedops/ops/histogram.py",
)

pytestmark = pytest.mark.gpu

BINS = (1, 7, 256, 297, 298, 4096, 65_536, 200_000, MAX_BINS)


@pytest.fixture(autouse=True)
def usage() -> Iterator[Usage]:
    with use_provider(PROVIDER) as found:
        yield found
    assert sum(found.calls.values()) > 0
    assert {provider for _, provider in found.calls} == {PROVIDER}


def drawn(count: int, below: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Integers from a little below 0 to a little over ``below``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    low = 0 if dtype == torch.uint8 else -3
    high = min(below + 5, 256) if dtype == torch.uint8 else below + 5
    return torch.randint(low, high, (count,), generator=generator, device="cuda").to(dtype)


def views(x: Tensor) -> list[Tensor]:
    """Views of a vector of 60,000: whole, misaligned, strided, permuted, repeated, one, none."""
    square = x[:57_600].view(240, 240)
    return [
        *(x, x[1:], x[3:-1], x[::3], square[:, 5:77], square.t(), square[::2, ::7]),
        *(x[:48].view(2, 3, 8).permute(2, 0, 1), x[:9].expand(500, 9), x[5], x[:0], x[:1]),
    ]


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("bins", BINS)
def test_counts_equal_the_definition(bins: int, dtype: torch.dtype) -> None:
    for x in views(drawn(60_000, bins, dtype)):
        got = bincount(x, bins)
        assert torch.equal(got.cpu(), on_cpu(bincount, x, bins))
        (again,) = results_in_poisoned_memory(cuda_histogram.BINCOUNT.call, (x,), bins)
        assert torch.equal(again, got)


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("bins", [256, 4096, MAX_BINS])
def test_any_skew_is_counted_exactly(bins: int, dtype: torch.dtype) -> None:
    count = (1 << 24) + 7
    spread = torch.arange(count, device="cuda")
    last = (min(bins, 256) if dtype == torch.uint8 else bins) - 1
    cases = [torch.full_like(spread, last), spread % 2, spread % 32 * 32, (spread % 1000) // 999]
    for x in cases:
        x = x.clamp_(max=last).to(dtype)
        expected = torch.bincount(x.to(torch.int32), minlength=bins)
        assert torch.equal(bincount(x, bins), expected)


def test_private_counters_do_not_overflow() -> None:
    x = torch.full((1 << 31,), 3, dtype=torch.uint8, device="cuda")
    assert bincount(x, 8).tolist() == [0, 0, 0, 1 << 31, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", HISTOGRAM_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bins", "ends"),
    [
        *((1, (-1.0, 1.0)), (7, (-0.3, 0.7)), (100, (-3.0, 3.0)), (3, (1e-40, 2e-40))),
        *((10, (0, 0.99)), (5, (1.0, 1.0000005)), (70_000, (-2.0, 2.0)), (3, (0.0, 1e-44))),
        *((9, (-3e38, 3e38)), (MAX_BINS, (-2.0, 2.0))),
    ],
)
def test_samples_fall_into_the_bins_of_the_definition(
    dtype: torch.dtype, bins: int, ends: tuple[float, float]
) -> None:
    lo, hi = ends
    generator = torch.Generator("cuda").manual_seed(bins)
    options = {"generator": generator, "device": "cuda", "dtype": torch.float64}
    edges = torch.arange(min(bins, 5000) + 1, device="cuda", dtype=torch.float64)
    x = torch.cat(
        (
            torch.randn(20_000, **options),
            lo + (hi - lo) * torch.rand(20_000, **options),
            edges * ((hi - lo) / bins) + lo,
            torch.tensor([math.nan, math.inf, -math.inf, lo, hi], device="cuda").double(),
        )
    ).to(dtype)
    if dtype.itemsize >= 4:
        infinity = torch.full_like(x, math.inf)
        x = torch.cat((x, torch.nextafter(x, infinity), torch.nextafter(x, -infinity)))
    if dtype != torch.float64 and not math.isfinite(torch.tensor(hi - lo).item()):
        ends = (lo / 4, hi / 4)
    for samples in (x, x[1:], x[::3], x[: x.numel() // 4 * 4].view(4, -1).t()):
        got = histogram(samples, bins, range=ends)
        assert torch.equal(got.cpu(), on_cpu(histogram, samples, bins, range=ends))
    (again,) = results_in_poisoned_memory(cuda_histogram.HISTOGRAM.call, (x,), bins, tuple(ends))
    assert torch.equal(again, histogram(x, bins, range=ends))


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("experts", [1, 8, 130, 256, 1500, 5000])
def test_tokens_are_sorted_by_expert_stably(experts: int, dtype: torch.dtype) -> None:
    for count in (0, 1, 31, 4096, 65_536, 65_537, 300_001):
        ids = drawn(count, experts, dtype, seed=count)
        for x in (ids, ids[1:], ids[: count // 2 * 2].view(-1, 2).t(), ids[::3]):
            got = expert_histogram(x, experts)
            expected = on_cpu(expert_histogram, x, experts)
            again = results_in_poisoned_memory(cuda_histogram.EXPERT_HISTOGRAM.call, (x,), experts)
            for result, right, second in zip(got, expected, again, strict=True):
                assert torch.equal(result.cpu(), right)
                assert torch.equal(second, result)


def test_all_tokens_of_one_expert_keep_their_order() -> None:
    for count in (5000, 500_000):
        ids = torch.full((count,), 3, dtype=torch.int32, device="cuda")
        counts, offsets, permutation = expert_histogram(ids, 8)
        assert counts.tolist() == [0, 0, 0, count, 0, 0, 0, 0]
        assert offsets.tolist() == [0] * 4 + [count] * 5
        assert torch.equal(permutation, torch.arange(count, device="cuda"))
    strangers = torch.full((99,), -1, device="cuda")
    counts, offsets, permutation = expert_histogram(strangers, 2)
    assert (counts.tolist(), offsets.tolist()) == ([0, 0], [0, 0, 0])
    assert torch.equal(permutation, torch.arange(99, device="cuda"))


def test_captured_calls_replay_like_eager_ones() -> None:
    for bins, count in ((256, 1 << 20), (4096, 1 << 20), (MAX_BINS, 1 << 18)):
        x = drawn(count, bins, torch.int32)
        graph, result = captured(lambda x=x, bins=bins: bincount(x, bins))
        for seed in (1, 2):
            x.copy_(drawn(count, bins, torch.int32, seed))
            graph.replay()
            assert torch.equal(result, bincount(x, bins))
    for count in (4096, 200_000):
        ids = drawn(count, 64, torch.int32)
        graph, results = captured(lambda ids=ids: expert_histogram(ids, 64))
        ids.copy_(drawn(count, 64, torch.int32, 3))
        graph.replay()
        for result, expected in zip(results, expert_histogram(ids, 64), strict=True):
            assert torch.equal(result, expected)


def test_dependent_launches_see_what_the_kernel_ahead_wrote() -> None:
    x = drawn(1 << 20, 250, torch.int32)
    expected = bincount(x, 256)
    for _ in range(30):
        y = x * 1
        assert torch.equal(bincount(y, 256), expected)
        nested = bincount(bincount(y, 256).clamp(max=255), 256)
        assert nested.sum() == 256


def test_it_works_under_torch_compile() -> None:
    x = drawn(5000, 60, torch.int64)
    compiled = torch.compile(lambda t: bincount(t * 2, 128) + 1, fullgraph=True)
    assert torch.equal(compiled(x), bincount(x * 2, 128) + 1)


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    size = 2**31 + 4099
    x = torch.zeros(size, dtype=torch.uint8, device="cuda")
    x[-1], x[2**31], x[5] = 200, 7, 9
    for bins in (256, 4096, MAX_BINS):
        counts = bincount(x, bins)
        assert (counts[0], counts[7], counts[9], counts[200]) == (size - 3, 1, 1, 1)
    assert bincount(x[1:], 256)[200] == 1
    assert bincount(x[::2], 256).sum() == -(-size // 2)
    counts, offsets, permutation = expert_histogram(x, 8)
    assert counts.tolist() == [size - 3, 0, 0, 0, 0, 0, 0, 1]
    assert offsets[-1] == size - 2
    assert permutation[-3:].tolist() == [2**31, 5, size - 1]
    assert permutation[size - 4] == size - 2
