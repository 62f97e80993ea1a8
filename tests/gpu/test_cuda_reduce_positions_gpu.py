"""argmax and argmin where batches are passed over: ties, NaN, order and places of the extremum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from cuda_cases import assert_same_bits, pinned
from torch import Tensor

from fusedops.ops.reduce import REDUCE_DTYPES, reduce
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/reduce.cu",
    "csrc/include",
    "fusedops/ops/reduce.py",
    "fusedops/providers/cuda_reduce*.py",
    "tests/gpu/cuda_cases.py",
)

pytestmark = pytest.mark.gpu

LENGTH = 70_001
"""Odd, so that rows begin and end anywhere between two vectors; clusters share each of them."""

ROWS = (5, 16, 33, 64, 120, 160)
"""Of which each takes clusters of other sizes (132 SMs)."""

PLACES = (
    *(0, 1, 2, 3, 4, 5, 17, 511, 512, 4095, 4096, 16_384, 32_768),
    *(LENGTH // 8, LENGTH // 4, LENGTH // 2, LENGTH // 2 + 1, LENGTH - 20),
    *(LENGTH - 5, LENGTH - 4, LENGTH - 3, LENGTH - 2, LENGTH - 1),
)
"""In heads, tails, first and last batches, and where the elements of a block end."""

PAIRS = (
    *((0, LENGTH - 1), (1, 2), (3, 4), (7, 2055), (2055, 2060), (100, 35_000), (35_000, 35_100)),
    *((8_000, 60_000), (17_000, 18_000), (LENGTH - 2, LENGTH - 1)),
)
"""Places in one vector, in vectors, batches, threads and blocks beside and far from each other."""


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with pinned("reduce"):
        yield


def noise(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A row between the limits of ``with_places``, that many elements tie in for narrow dtypes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(LENGTH, generator=generator).clamp(-9, 9).to(dtype)
    low, high = (0, 1) if dtype == torch.bool else (3, 100)
    return torch.randint(low, high, (LENGTH,), generator=generator).to(dtype)


def with_places(row: Tensor, value: float, *places: int) -> Tensor:
    row = row.clone()
    row[list(places)] = value
    return row


def rows_of_any_dtype(dtype: torch.dtype) -> list[Tensor]:
    """Sorted rows, equal elements, and extrema at each of the places and pairs of them."""
    most = 1 if dtype == torch.bool else 120
    rising = torch.linspace(0, most, LENGTH, dtype=torch.float64).to(dtype)
    row = noise(dtype)
    rows = [row, rising, rising.flip(0), torch.ones_like(row), torch.zeros_like(row)]
    for value in (most, 0):
        low = row if value else torch.full_like(row, 1)
        rows += [with_places(low, value, place) for place in PLACES]
        rows += [with_places(low, value, *pair) for pair in PAIRS]
    return rows


def rows_of_floats(dtype: torch.dtype) -> list[Tensor]:
    """NaN, infinities and zeros of both signs, of which the first counts."""
    row, zeros = noise(dtype), torch.zeros(LENGTH, dtype=dtype)
    nan, inf = math.nan, math.inf
    rows = [torch.full_like(row, value) for value in (nan, inf, -inf)]
    rows += [with_places(row, nan, place) for place in PLACES]
    rows += [with_places(row, -nan, *pair) for pair in PAIRS]
    for first, last in PAIRS:
        rows.append(with_places(with_places(row, inf, first), nan, last))
        rows.append(with_places(with_places(row, nan, first), -inf, last))
        rows.append(with_places(row, inf, first, last))
        rows.append(with_places(torch.full_like(row, -inf), row[5].item(), last))
        for base in (torch.full_like(row, -1), torch.full_like(row, 1)):
            rows.append(with_places(with_places(base, -0.0, first), 0.0, last))
            rows.append(with_places(with_places(base, 0.0, first), -0.0, last))
        rows += [with_places(zeros, -0.0, first), with_places(-zeros, 0.0, last)]
    return rows + [-other for other in rows]


def rows_of_low_bits(dtype: torch.dtype) -> list[Tensor]:
    """64-bit values that differ in their lower 32 bits only."""
    low = torch.randint(0, 1 << 30, (LENGTH,), generator=torch.Generator().manual_seed(1))
    steps = [low, torch.arange(LENGTH), torch.arange(LENGTH).flip(0)]
    steps += [with_places(low, 1 << 31, *pair) for pair in PAIRS]
    steps += [with_places(low + 7, 3, *pair) for pair in PAIRS]
    if dtype == torch.int64:
        rows = [(9 << 32) + step for step in steps]
    else:
        rows = [
            (torch.tensor(1.5, dtype=dtype).view(torch.int64) + step).view(dtype) for step in steps
        ]
    return rows + [-row for row in rows]


def special_rows(dtype: torch.dtype) -> Tensor:
    rows = rows_of_any_dtype(dtype)
    if dtype.is_floating_point:
        rows += rows_of_floats(dtype)
    if dtype.itemsize == 8:
        rows += rows_of_low_bits(dtype)
    return torch.stack(rows)


def positions(x: Tensor, op: str, dim: int | None) -> Tensor:
    """By torch, on the CPU."""
    with use_provider("reference"):
        return reduce(x, op, dim)


@pytest.mark.parametrize("dtype", REDUCE_DTYPES, ids=str)
def test_the_first_extremum_is_found_wherever_it_lies(dtype: torch.dtype) -> None:
    rows = special_rows(dtype)
    x = rows.cuda()
    for op in ("argmax", "argmin"):
        expected = positions(rows, op, 1).cuda()
        for count in ROWS:
            for part, places in zip(x.split(count), expected.split(count), strict=True):
                got = reduce(part, op, 1)
                assert_same_bits(got, places)
        # Whole tensors, columns, rows of a few vectors and pieces of them: as without clusters.
        assert_same_bits(reduce(x, op).cpu(), positions(rows, op, None))
        assert_same_bits(reduce(x.t().contiguous(), op, 0), expected)
        assert_same_bits(reduce(x[:, 1:999], op, 1).cpu(), positions(rows[:, 1:999], op, 1))
        assert_same_bits(reduce(x[:, :3], op, 1).cpu(), positions(rows[:, :3], op, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_rows_may_begin_anywhere(dtype: torch.dtype) -> None:
    rows = rows_of_any_dtype(dtype)[:20]
    for offset in range(1, 17):
        flat = torch.cat([torch.zeros(offset, dtype=dtype), *rows])
        view = flat.cuda()[offset:].view(len(rows), LENGTH)
        assert_same_bits(reduce(view, "argmax", 1).cpu(), positions(torch.stack(rows), "argmax", 1))


def test_the_same_rows_give_the_same_positions_every_time() -> None:
    x = torch.stack([noise(torch.bfloat16, seed) for seed in range(64)]).float().cuda()
    expected = positions(x.cpu(), "argmax", 1).cuda()
    for _ in range(50):
        assert_same_bits(reduce(x, "argmax", 1), expected)
