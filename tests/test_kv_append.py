"""Append of keys and values to a paged cache, and the checks of the cache's metadata."""

from __future__ import annotations

from typing import Any

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
    PositionError,
    ShapeError,
    UnsupportedError,
)
from fusedops.ops.kv_append import _append_guarded, append_paged_kv
from fusedops.ops.paged import LAYOUTS, check_paged_metadata, slots_view
from fusedops.ops.rope_kv import rope, rope_
from fusedops.ops.rope_table import rope_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
PAGE_SIZE, HEADS, HEAD_DIM, PAGES = 4, 3, 8, 12
UNTOUCHED = 1234.0
op = torch.ops.fusedops.append_paged_kv.default


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caches(layout: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two caches full of a value that no test writes."""
    inner = (PAGE_SIZE, HEADS) if layout == "NHD" else (HEADS, PAGE_SIZE)
    shape = (PAGES, *inner, HEAD_DIM)
    return torch.full(shape, UNTOUCHED, dtype=dtype), torch.full(shape, UNTOUCHED, dtype=dtype)


def table(requests: int = 3, width: int = 4) -> Tensor:
    """A block table whose pages are neither in order nor neighbours."""
    order = torch.tensor([7, 2, 9, 0, 11, 4, 1, 10, 5, 3, 8, 6], dtype=torch.int32)
    return order[: requests * width].view(requests, width)


def written(
    cache: Tensor,
    new: Tensor,
    block_table: Tensor,
    request_index: list[int],
    positions: list[int],
    layout: str,
) -> Tensor:
    """What the cache holds afterwards, element by element; a token without a place is skipped."""
    expected = cache.clone()
    requests, width = block_table.shape
    for token, (request, position) in enumerate(zip(request_index, positions, strict=True)):
        if not (0 <= request < requests and 0 <= position < width * PAGE_SIZE):
            continue
        page, slot = int(block_table[request][position // PAGE_SIZE]), position % PAGE_SIZE
        if not 0 <= page < cache.shape[0]:
            continue
        for head in range(HEADS):
            place = (page, slot, head) if layout == "NHD" else (page, head, slot)
            expected[place] = new[token, head]
    return expected


def places(count: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Distinct (request, position) pairs in random order."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(3 * 4 * PAGE_SIZE, generator=generator)[:count].tolist()
    return [place // 16 for place in chosen], [place % 16 for place in chosen]


@EACH_LAYOUT
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 48])
def test_tokens_land_in_their_slots(
    layout: str, dtype: torch.dtype, index: torch.dtype, count: int
) -> None:
    k, v = (normal(count, HEADS, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    k_cache, v_cache = caches(layout, dtype)
    request_index, positions = places(count)
    expected = [
        written(cache, new, table(), request_index, positions, layout)
        for cache, new in ((k_cache, k), (v_cache, v))
    ]
    append_paged_kv(
        k,
        v,
        k_cache,
        v_cache,
        table(),
        torch.tensor(request_index, dtype=torch.int32),
        torch.tensor(positions, dtype=index),
        layout=layout,
    )
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@EACH_LAYOUT
@pytest.mark.parametrize("padding", [1, 30])
def test_a_negative_position_writes_nothing(layout: str, padding: int) -> None:
    request_index, positions = [2, *[0] * padding, 1], [5, *[-1] * padding, 15]
    count = len(positions)
    k, v = normal(count, HEADS, HEAD_DIM), normal(count, HEADS, HEAD_DIM, seed=1)
    k_cache, v_cache = caches(layout)
    expected = written(k_cache, k, table(), request_index, positions, layout)
    metadata = table(), torch.tensor(request_index).int(), torch.tensor(positions)
    append_paged_kv(k, v, k_cache, v_cache, *metadata, layout=layout)
    assert torch.equal(k_cache, expected)
    before = v_cache.clone()
    nowhere = torch.full((count,), -(2**31), dtype=torch.int32)
    append_paged_kv(k, v, k_cache, v_cache, *metadata[:2], nowhere, layout=layout)
    assert torch.equal(k_cache, expected)
    assert torch.equal(v_cache, before)


@EACH_LAYOUT
def test_b04_no_tokens_write_nothing(layout: str) -> None:
    k_cache, v_cache = caches(layout)
    none = torch.empty(0, HEADS, HEAD_DIM)
    index = torch.empty(0, dtype=torch.int32)
    append_paged_kv(none, none.clone(), k_cache, v_cache, table(), index, index, layout=layout)
    assert (k_cache == UNTOUCHED).all()


@EACH_LAYOUT
def test_b14_caches_that_are_views_leave_their_neighbours_alone(layout: str) -> None:
    both = torch.stack(caches(layout), 1)  # (pages, 2, ...): keys and values of a page together
    wide = torch.full((*both.shape[:-1], HEAD_DIM + 5), UNTOUCHED)
    k_cache, v_cache = wide[:, 0, ..., 2 : 2 + HEAD_DIM], wide[:, 1, ..., 2 : 2 + HEAD_DIM]
    qkv = normal(6, 5 * HEADS * HEAD_DIM)
    k, v = (qkv.chunk(5, 1)[i].view(6, HEADS, HEAD_DIM) for i in (3, 4))
    request_index, positions = places(6, seed=14)
    expected = [
        written(cache, new, table(), request_index, positions, layout)
        for cache, new in ((k_cache, k), (v_cache, v))
    ]
    metadata = table(), torch.tensor(request_index).int(), torch.tensor(positions)
    append_paged_kv(k, v, k_cache, v_cache, *metadata, layout=layout)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert (wide[..., :2] == UNTOUCHED).all()
    assert (wide[..., 2 + HEAD_DIM :] == UNTOUCHED).all()


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_b10_unaligned_tokens_equal_their_copies(offset: int) -> None:
    flat = normal(2 * HEADS * HEAD_DIM + 8, dtype=torch.bfloat16)
    k = flat[offset : offset + 2 * HEADS * HEAD_DIM].view(2, HEADS, HEAD_DIM)
    found = []
    for new in (k, k.clone()):
        k_cache, v_cache = caches("NHD", torch.bfloat16)
        index, positions = torch.tensor([0, 1]).int(), torch.tensor([3, 4])
        append_paged_kv(new, new, k_cache, v_cache, table(), index, positions)
        found.append(k_cache)
    assert torch.equal(*found)


OUTSIDE: list[tuple[str, dict[str, Any]]] = [
    ("request 1 has length 17; accepted are 0 to 16|positions holds 16", {"positions": 16}),
    ("accepted are 0 to 1[56]", {"positions": 2**31}),
    ("request_index holds 3; accepted are 0 to 2", {"request_index": 3}),
    ("request_index holds -1", {"request_index": -1}),
    (r"uses pages \[12\]|holds 12; accepted are 0 to 11", {"page": 12}),
    (r"uses pages \[-5\]|holds -5; accepted are 0 to 11", {"page": -5}),
]


@pytest.mark.parametrize(("message", "change"), OUTSIDE)
@pytest.mark.parametrize("count", [2, 40])
def test_b75_a_place_outside_the_cache_is_refused_and_nothing_written(
    message: str, change: dict[str, int], count: int
) -> None:
    k = normal(count, HEADS, HEAD_DIM)
    k_cache, v_cache = caches("NHD")
    positions, request_index, block_table = (
        torch.full((count,), -1),
        torch.ones(count).int(),
        table(),
    )
    positions[0] = 4
    positions[-1] = change.get("positions", 9)
    request_index[-1] = change.get("request_index", 1)
    block_table[1, 2] = change.get("page", 6)
    with pytest.raises(PositionError, match=message):
        append_paged_kv(k, k, k_cache, v_cache, block_table, request_index, positions)
    assert (k_cache == UNTOUCHED).all()
    assert (v_cache == UNTOUCHED).all()


def test_b75_append_into_a_full_table_is_refused() -> None:
    k = normal(1, HEADS, HEAD_DIM)
    k_cache, v_cache = caches("NHD")
    request_index = torch.zeros(1, dtype=torch.int32)
    for position in range(4 * PAGE_SIZE):
        append_paged_kv(k, k, k_cache, v_cache, table(), request_index, torch.tensor([position]))
    assert (k_cache[table()[0]] != UNTOUCHED).all()
    with pytest.raises(PositionError, match="4 pages of 4 slots"):
        append_paged_kv(k, k, k_cache, v_cache, table(), request_index, torch.tensor([16]))


@EACH_LAYOUT
@pytest.mark.parametrize("kind", ["some", "none placed", "first unplaced", "no table"])
def test_unchecked_tokens_without_a_place_write_nothing(layout: str, kind: str) -> None:
    request_index, positions = [0, 1, 2, 3, -1, 1, 2, 2], [0, 16, -1, 0, 0, 4, 8, 13]
    if kind == "first unplaced":
        request_index, positions = request_index[::-1], positions[::-1]
        positions[0] = 2**31
    if kind == "none placed":
        positions = [-1] * 8
    block_table = table()
    block_table[1, 1], block_table[2, 2] = 12, -1
    if kind == "no table":
        block_table = block_table[:, :0]
    k, v = normal(8, HEADS, HEAD_DIM), normal(8, HEADS, HEAD_DIM, seed=1)
    k_cache, v_cache = caches(layout)
    k_cache[0, 0, 0, 0] = torch.nan
    expected = [
        written(cache, new, block_table, request_index, positions, layout)
        for cache, new in ((k_cache, k), (v_cache, v))
    ]
    slots = [slots_view(cache, layout) for cache in (k_cache, v_cache)]
    metadata = torch.tensor(request_index).int(), torch.tensor(positions)
    _append_guarded(k, v, slots[0], slots[1], block_table, *metadata)
    assert torch.equal(k_cache.nan_to_num(nan=5.0), expected[0].nan_to_num(nan=5.0))
    assert torch.equal(v_cache, expected[1])


@given(
    count=st.integers(0, 24),
    padding=st.integers(0, 3),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
def test_checked_and_unchecked_forms_agree(
    count: int, padding: int, layout: str, seed: int
) -> None:
    request_index, positions = places(count, seed)
    request_index, positions = [*request_index, *[0] * padding], [*positions, *[-1] * padding]
    k = normal(count + padding, HEADS, HEAD_DIM, seed=seed)
    metadata = table(), torch.tensor(request_index).int(), torch.tensor(positions).long()
    one, other = caches(layout), caches(layout)
    append_paged_kv(k, -k, *one, *metadata, layout=layout)
    slots = [slots_view(cache, layout) for cache in other]
    _append_guarded(k, -k, slots[0], slots[1], *metadata)
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


@EACH_LAYOUT
@pytest.mark.parametrize(("of_k", "of_v"), [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_pages_of_the_caches_themselves_can_be_appended(layout: str, of_k: int, of_v: int) -> None:
    """Also one cache's page to the other: both tokens are read before either cache is written."""
    pair = [normal(*caches(layout)[0].shape, seed=seed) for seed in (1, 2)]
    pages = [slots_view(cache, layout)[0] for cache in pair]
    wanted = [pages[of].clone() for of in (of_k, of_v)]
    kept = [page.clone() for page in pages]
    metadata = table(1), torch.zeros(PAGE_SIZE, dtype=torch.int32), torch.arange(PAGE_SIZE)
    append_paged_kv(pages[of_k], pages[of_v], *pair, *metadata, layout=layout)
    for cache, page, first in zip(pair, wanted, kept, strict=True):
        assert torch.equal(slots_view(cache, layout)[7], page)
        assert torch.equal(slots_view(cache, layout)[0], first)


@EACH_LAYOUT
def test_a_page_can_be_appended_to_itself(layout: str) -> None:
    """A slot of the cache is read and written by one call: what stood there is what is written."""
    pair = [normal(*caches(layout)[0].shape, seed=seed) for seed in (1, 2)]
    views = [slots_view(cache, layout) for cache in pair]
    backwards = [view[7].clone() for view in views]
    positions = torch.arange(PAGE_SIZE).flip(0)
    metadata = table(1), torch.zeros(PAGE_SIZE, dtype=torch.int32), positions
    append_paged_kv(views[0][7], views[1][7], *pair, *metadata, layout=layout)
    for view, before in zip(views, backwards, strict=True):
        assert torch.equal(view[7], before.flip(0))


def test_caches_are_judged_by_where_they_lie() -> None:
    """What was found of one call holds for the same places only, not for the same shapes."""
    k, v = normal(1, HEADS, HEAD_DIM), normal(1, HEADS, HEAD_DIM, seed=1)
    pool = torch.full((4, 2, PAGE_SIZE, HEADS, HEAD_DIM), UNTOUCHED)
    where = (table(1, 1) * 0, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    for _ in range(2):
        append_paged_kv(k, v, pool[:2, 0], pool[:2, 1], *where)
        for overlapping in (pool[:2, 0], pool[1:3, 0]):
            with pytest.raises(LayoutError, match="k_cache and v_cache"):
                append_paged_kv(k, v, pool[:2, 0], overlapping, *where)
    assert torch.equal(pool[0, :, 0], torch.stack((k[0], v[0])))


def test_b75_metadata_is_checked_on_the_host() -> None:
    block_table = torch.tensor([[3], [0]], dtype=torch.int32)
    for length in (0, 1, 15, 16):
        check_paged_metadata(torch.tensor([length, 16]), block_table, 16, pages=4)
    for length in (-1, 17):
        with pytest.raises(PositionError, match=rf"request 1 has length {length}; .* 0 to 16"):
            check_paged_metadata(torch.tensor([16, length]), block_table, 16)
    for pages in (3, 1):
        with pytest.raises(PositionError, match=r"request 0 uses pages \[3\]"):
            check_paged_metadata(torch.tensor([1, 0]), block_table, 16, pages=pages)
    check_paged_metadata(torch.tensor([0, 9]), torch.tensor([[-7], [0]]), 16, pages=1)
    with pytest.raises(ShapeError, match="page_size is 0"):
        check_paged_metadata(torch.tensor([1, 1]), block_table, 0)
    with pytest.raises(ShapeError, match="a length for each table row"):
        check_paged_metadata(torch.tensor([1]), block_table, 16)
    with pytest.raises(ShapeError, match="exactly 2"):
        check_paged_metadata(torch.tensor([1]), block_table[0], 16)
    with pytest.raises(DTypeError, match="seq_lens"):
        check_paged_metadata(torch.tensor([1.0, 1.0]), block_table, 16)
    with pytest.raises(DTypeError, match="block_table"):
        check_paged_metadata(torch.tensor([1, 1]), block_table.float(), 16)


def test_bad_arguments_are_refused() -> None:
    k, index, positions = normal(2, HEADS, HEAD_DIM), torch.zeros(2).int(), torch.arange(2)
    k_cache, v_cache = caches("NHD")
    good = {
        "k": k,
        "v": k.clone(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table(),
        "request_index": index,
        "positions": positions,
    }
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DTypeError, "k is float64", {"k": k.double()}),
        (DTypeError, "v is bfloat16", {"v": k.bfloat16()}),
        (DTypeError, "k_cache is bfloat16", {"k_cache": k_cache.bfloat16()}),
        (DTypeError, "v_cache is float16", {"v_cache": v_cache.half()}),
        (DTypeError, "block_table is int64", {"block_table": table().long()}),
        (DTypeError, "request_index is int64", {"request_index": index.long()}),
        (DTypeError, "positions is float32", {"positions": positions.float()}),
        (ShapeError, "k is", {"k": k[0]}),
        (ShapeError, "v is", {"v": k[0]}),
        (ShapeError, "the shape of k", {"v": k[:1]}),
        (ShapeError, "k_cache is", {"k_cache": k_cache[0]}),
        (ShapeError, "the shape of k_cache", {"v_cache": v_cache[:5]}),
        (ShapeError, r"\(12, 4, 3, 6\)", {"k": k[..., :6], "v": k[..., :6]}),
        (ShapeError, r"\(12, 4, 2, 8\)", {"k": k[:, :2], "v": k[:, :2]}),
        (ShapeError, "needs a page", {"k_cache": k_cache[:0], "v_cache": v_cache[:0]}),
        (ShapeError, "block_table is", {"block_table": table()[0]}),
        (ShapeError, "request_index", {"request_index": index[:1]}),
        (ShapeError, "positions", {"positions": positions[None]}),
        (DeviceError, "v is on meta", {"v": k.to("meta")}),
        (DeviceError, "k_cache is on meta", {"k_cache": k_cache.to("meta")}),
        (DeviceError, "v_cache is on meta", {"v_cache": v_cache.to("meta")}),
        (DeviceError, "block_table is on meta", {"block_table": table().to("meta")}),
        (DeviceError, "positions is on meta", {"positions": positions.to("meta")}),
        (LayoutError, "k_cache is", {"k_cache": k_cache[:1].expand(PAGES, -1, -1, -1)}),
        (LayoutError, "v_cache is", {"v_cache": v_cache[:1].expand(PAGES, -1, -1, -1)}),
    ]
    for error, message, change in refused:
        with pytest.raises(error, match=message):
            append_paged_kv(**{**good, **change})
    with pytest.raises(ConfigError, match="NHD, HND"):
        append_paged_kv(**good, layout="DNH")
    with pytest.raises(ShapeError, match="layout HND"):
        append_paged_kv(**good, layout="HND")
    with pytest.raises(UnsupportedError, match="inference only"):
        append_paged_kv(**{**good, "k": k.requires_grad_()})
    assert (k_cache == UNTOUCHED).all()


@EACH_LAYOUT
def test_b37_opcheck(layout: str) -> None:
    k, v = normal(3, HEADS, HEAD_DIM), normal(3, HEADS, HEAD_DIM, seed=1)
    index, positions = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 5, -1])
    options = (None, None, layout)
    torch.library.opcheck(op, (k, v, *caches(layout), table(), index, positions, *options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b39_compiled_rope_and_append_keep_their_effect_at_any_m(backend: str) -> None:
    cos_sin, block_table = rope_table(HEAD_DIM, 32), table()

    def block(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, index: Tensor, at: Tensor) -> Tensor:
        q, k, v = qkv.view(-1, 3 * HEADS, HEAD_DIM).chunk(3, 1)
        q, k = rope(q, k, at, cos_sin)
        append_paged_kv(k, v, k_cache, v_cache, block_table, index, at)
        rope_(q, v, at, cos_sin)
        return q + k_cache.sum() + v_cache[0].sum()

    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for count in (3, 5, 8):
        qkv = normal(count, 3 * HEADS * HEAD_DIM, seed=count)
        request_index, positions = places(count, seed=count)
        metadata = torch.tensor(request_index).int(), torch.tensor(positions)
        ours, eager = (qkv.clone(), *caches("NHD")), (qkv.clone(), *caches("NHD"))
        assert torch.equal(compiled(*ours, *metadata), block(*eager, *metadata))
        for one, other in zip(ours, eager, strict=True):
            assert torch.equal(one, other)
        assert (ours[1] != UNTOUCHED).any()
