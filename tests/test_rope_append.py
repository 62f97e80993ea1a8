"""``rope_append_paged_kv_``: RoPE and the append in one call equal the two apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops import append_paged_kv, rope, rope_append_paged_kv_, rope_table
from fusedops.errors import DTypeError, LayoutError, PositionError, ShapeError, UnsupportedError
from fusedops.ops.paged import LAYOUTS
from fusedops.ops.rope_kv import ROPE_STYLES

PAGE_SIZE, PAGES, HQ, HKV, D = 4, 12, 6, 2, 8
op = torch.ops.fusedops.rope_append_paged_kv_.default


def qkv(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one fused QKV tensor, as ``FusedQKV`` gives them."""
    generator = torch.Generator().manual_seed(tokens)
    joint = torch.randn(tokens, HQ + 2 * HKV, D, generator=generator).to(dtype)
    q, k, v = joint.split((HQ, HKV, HKV), dim=1)
    return q, k, v


def caches(layout: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inner = (PAGE_SIZE, HKV) if layout == "NHD" else (HKV, PAGE_SIZE)
    return torch.zeros(PAGES, *inner, D, dtype=dtype), torch.zeros(PAGES, *inner, D, dtype=dtype)


TABLE = torch.tensor([[7, 2, 9, 0], [11, 4, 1, 10], [5, 3, 8, 6]], dtype=torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", ROPE_STYLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_equals_rope_then_append(
    layout: str, style: str, dtype: torch.dtype, tokens: int, rotary_dim: int
) -> None:
    q, k, v = qkv(tokens, dtype)
    spread = torch.arange(tokens)
    positions = (spread // 3).to(torch.int32)
    request_index = (spread % 3).to(torch.int32)
    if tokens > 1:
        positions[1] = -1
    cos_sin = rope_table(rotary_dim, 16)
    expected_q, expected_k = rope(q, k, positions.clamp(min=0), cos_sin, style=style)
    expected = caches(layout, dtype)
    append_paged_kv(expected_k, v, *expected, TABLE, request_index, positions, layout=layout)
    got, v_before = caches(layout, dtype), v.clone()
    rope_append_paged_kv_(
        q, k, v, positions, cos_sin, *got, TABLE, request_index, style=style, layout=layout
    )
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)
    assert torch.equal(v, v_before)
    for cache, other in zip(got, expected, strict=True):
        assert torch.equal(cache, other)


@pytest.mark.parametrize(
    ("positions", "request_index", "pages"),
    [([0, 16], [0, 1], 12), ([0, 9], [0, 1], 12), ([0, 1], [0, 3], 12), ([0, 1], [0, 1], 8)],
    ids=["behind the table of pages", "behind cos_sin", "no such request", "no such page"],
)
def test_a_token_without_a_place_is_refused_with_nothing_written(
    positions: list[int], request_index: list[int], pages: int
) -> None:
    q, k, v = qkv(2)
    before = (q.clone(), k.clone())
    k_cache, v_cache = (cache[:pages] for cache in caches("NHD"))
    rows = 32 if 16 in positions else 8
    with pytest.raises(PositionError, match="rope_append_paged_kv_"):
        rope_append_paged_kv_(
            q,
            k,
            v,
            torch.tensor(positions, dtype=torch.int32),
            rope_table(D, rows),
            k_cache,
            v_cache,
            TABLE,
            torch.tensor(request_index, dtype=torch.int32),
        )
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert not k_cache.any()
    assert not v_cache.any()


def test_bad_arguments_are_refused() -> None:
    q, k, v = qkv(2)
    index = torch.tensor([0, 1], dtype=torch.int32)
    rest = (index, rope_table(D, 16), *caches("NHD"), TABLE, index)
    with pytest.raises(ShapeError, match="rope_append_paged_kv_: v"):
        rope_append_paged_kv_(q, k, v[:, :1], *rest)
    with pytest.raises(DTypeError, match="rope_append_paged_kv_: positions"):
        rope_append_paged_kv_(q, k, v, index.float(), *rest[1:])
    with pytest.raises(LayoutError, match="rope_append_paged_kv_: q"):
        rope_append_paged_kv_(q[:1].expand(2, -1, -1), k, v, *rest)
    with pytest.raises(UnsupportedError, match="inference only"):
        rope_append_paged_kv_(q.clone().requires_grad_(), k, v, *rest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b37_opcheck(layout: str) -> None:
    q, k, v = (x.contiguous() for x in qkv(3))
    index = torch.tensor([0, 1, 2], dtype=torch.int32)
    tensors = (q, k, v, index, rope_table(D, 16), *caches(layout), TABLE, index)
    torch.library.opcheck(op, (*tensors, None, None, "halves", layout))


def test_one_token_joined_or_apart() -> None:
    """q and k of one buffer are turned as one view; apart they are not, with the same result."""
    joined, apart = qkv(3), tuple(x.contiguous() for x in qkv(3))
    index = torch.tensor([2, 1, 0], dtype=torch.int32)
    for q, k, v in (joined, apart):
        rope_append_paged_kv_(q, k, v, index, rope_table(D, 16), *caches("NHD"), TABLE, index)
    assert torch.equal(joined[0], apart[0])
    assert torch.equal(joined[1], apart[1])
