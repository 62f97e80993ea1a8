"""The append of new tokens' keys and values to a paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.check import require_dtype, require_shape
from fusedops.ops.guards import (
    INDEX_DTYPES,
    require_per_token,
    require_tokens,
    require_within,
    require_writable,
)
from fusedops.ops.kv_scale import as_stored, require_positive_scales
from fusedops.ops.op import Op, entry
from fusedops.ops.overlap import overlap, require_apart
from fusedops.ops.paged import check_paged_cache, require_length, require_pages, slots_view

__all__ = [
    "append_paged_kv",
    "append_slots",
    "check_append",
    "write_slots",
]

_FEW_TOKENS = 16
"""Up to this many tokens are placed by a Python loop on the CPU: it is quicker than torch calls."""


def check_append(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> None:
    """Check everything but values; ``op`` is named in errors."""
    require_tokens(op, "k", k, "v", v)
    if v.shape != k.shape:
        require_shape(op, "v", v, [tuple(k.shape)], "the shape of k")
    heads = k.shape[1]
    check_paged_cache(op, k_cache, v_cache, block_table, layout, k, heads, k_scale, v_scale)
    if request_index.dtype is not torch.int32:
        require_dtype(op, "request_index", request_index, (torch.int32,))
    if positions.dtype not in INDEX_DTYPES:
        require_dtype(op, "positions", positions, INDEX_DTYPES)
    require_per_token(op, "request_index", request_index, k)
    require_per_token(op, "positions", positions, k)
    require_writable(op, "k_cache", k_cache)
    require_writable(op, "v_cache", v_cache)


def _check_apart(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> None:
    require_apart(
        "append_paged_kv",
        {"k_cache": k_cache, "v_cache": v_cache},
        {
            "block_table": block_table,
            "request_index": request_index,
            "positions": positions,
            "k_scale": k_scale,
            "v_scale": v_scale,
        },
    )


def _place_few(
    op: str,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    page_size: int,
    pages: int,
) -> tuple[list[int], list[int]]:
    """Tokens that are no padding, and each one's slot, counted through the pool in page order.

    Raises before anything is written.
    """
    requests, max_pages = block_table.shape
    tokens: list[int] = []
    slots: list[int] = []
    where = positions.tolist()
    capacity = max_pages * page_size
    longest = max(0, min(max(where, default=-1) + 1, capacity))
    # One read of the columns in use: element by element, a read takes as long as a small product.
    table = block_table.narrow(1, 0, -(-longest // page_size)).tolist()
    for token, (position, request) in enumerate(zip(where, request_index.tolist(), strict=True)):
        if position < 0:
            continue
        if not 0 <= request < requests:
            require_within(op, "request_index", request_index, 0, requests, "block_table's rows")
        if position >= capacity:
            require_length(op, request, position + 1, max_pages, page_size)
        page = table[request][position // page_size]
        if not 0 <= page < pages:
            require_pages(op, request, [page], pages)
        tokens.append(token)
        slots.append(page * page_size + position % page_size)
    return tokens, slots


class Slots(NamedTuple):
    """Where tokens go.

    Attributes:
        slot: (n,) int64, counted through the pool in page order.
        tokens: (n,) int64, which tokens those are; None: all, in order.
    """

    slot: Tensor
    tokens: Tensor | None


def append_slots(
    op: str,
    k_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    layout: str,
) -> Slots:
    """Each token's place in the pool, from CPU metadata; raises PositionError where it has none."""
    pages, page_size = slots_view(k_cache, layout).shape[:2]
    count = positions.shape[0]
    if count <= _FEW_TOKENS:
        few, slots = _place_few(op, block_table, request_index, positions, page_size, pages)
        tokens = None if len(few) == count else torch.tensor(few, dtype=torch.int64, device="cpu")
        return Slots(torch.tensor(slots, dtype=torch.int64, device="cpu"), tokens)
    tokens = (positions >= 0).nonzero().flatten()
    positions, request_index = positions[tokens], request_index[tokens]
    requests, max_pages = block_table.shape
    require_within(op, "request_index", request_index, 0, requests, "block_table's rows")
    capacity = f"{max_pages} pages of {page_size} slots in each row of block_table"
    require_within(op, "positions", positions, 0, max_pages * page_size, capacity)
    page = block_table[request_index, positions // page_size]
    require_within(op, "block_table", page, 0, pages, "the pages of the cache")
    slot = page.long() * page_size + positions % page_size
    return Slots(slot, None if tokens.shape[0] == count else tokens)


def write_slots(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Slots, layout: str
) -> None:
    """Write the tokens' keys and values to their places."""
    slot, tokens = slots
    for cache, new in ((k_cache, k), (v_cache, v)):
        if tokens is not None:
            new = new[tokens]
        view = slots_view(cache, layout)
        if view.is_contiguous():
            view.flatten(0, 1).index_copy_(0, slot, new)
        else:
            page_size = view.shape[1]
            view.index_put_((slot // page_size, slot % page_size), new)


def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> None:
    k, v, k_cache, v_cache = as_stored(k, v, k_cache, v_cache, k_scale, v_scale)
    if k.is_cpu:
        slots = append_slots(
            "append_paged_kv", k_cache, block_table, request_index, positions, layout
        )
        write_slots(k, v, k_cache, v_cache, slots, layout)
        return
    k_slots, v_slots = slots_view(k_cache, layout), slots_view(v_cache, layout)
    _append_guarded(k, v, k_slots, v_slots, block_table, request_index, positions)


def _append_guarded(
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
) -> None:
    """Append where nobody has looked at the values: tokens without a place write nothing.

    Shapes are static and nothing synchronises, so it can be captured. A token without a place
    repeats the write of the first token that has one, which changes nothing; where none has one,
    all write back what slot (0, 0) holds.
    """
    pages, page_size = k_slots.shape[:2]
    requests, max_pages = block_table.shape
    if k.shape[0] == 0 or block_table.numel() == 0:
        return
    request, position = request_index.long(), positions.long()
    block = position.div(page_size, rounding_mode="floor")
    page = block_table[request.clamp(0, requests - 1), block.clamp(0, max_pages - 1)].long()
    placed = (request >= 0) & (request < requests) & (block >= 0) & (block < max_pages)
    placed &= (page >= 0) & (page < pages)
    tokens = torch.arange(k.shape[0], device=k.device)
    first = placed.int().argmax()
    source = torch.where(placed, tokens, first)
    anyone = placed.any()
    where = (
        torch.where(anyone, page[source], 0),
        torch.where(anyone, position[source] % page_size, 0),
    )
    for slots, new in ((k_slots, k), (v_slots, v)):
        slots.index_put_(where, torch.where(anyone, new[source], slots[where]))


def _with_own_tokens(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any
) -> tuple[Any, ...]:
    """Copies in the place of tokens that share memory with a cache, such as one of its pages.

    Refusing them would not do: torch.compile's inductor drops a caller's own ``clone()``.
    """
    k, v = (t.clone() if overlap(t, k_cache) or overlap(t, v_cache) else t for t in (k, v))
    return (k, v, k_cache, v_cache, *rest)


Op(
    "append_paged_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor block_table, Tensor request_index, Tensor positions, Tensor? k_scale,"
    " Tensor? v_scale, str layout) -> ()",
    check=partial(check_append, "append_paged_kv"),
    check_values=lambda *args: require_positive_scales("append_paged_kv", *args[7:9]),
    check_aliases=_check_apart,
    separate=_with_own_tokens,
    fake=lambda *_args: None,
    reference=_append,
)

_OP_APPEND_PAGED_KV = entry("append_paged_kv")


def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged KV cache, in place.

    A token with a negative position is padding: nothing is written for it on any device. No two
    tokens of a call may have the same place.

    Args:
        k, v: (T, Hkv, D), float32, bfloat16 or float16, any strides.
        k_cache, v_cache: (pages, page_size, Hkv, D) for layout "NHD", (pages, Hkv, page_size, D)
            for "HND"; both of the dtype of ``k``, or both float8_e4m3fn or int8.
        block_table: (B, max_pages) int32, the pages of each request in order.
        request_index: (T,) int32, the row of the block table of each token.
        positions: (T,) int32 or int64, the token's position in its request.
        k_scale, v_scale: for 8-bit caches, and only for them: float32 on the caches' device, () or
            one for each KV head, (Hkv,), finite and at least 2^-126 (checked on the CPU only).
            A value x is stored as round(x * (1 / scale)) in float32, ties to even, as ``quantize``
            stores it: float8_e4m3fn saturates at +-448 and keeps a NaN, int8 is clamped to +-127
            and makes a NaN 0. ``paged_attention`` reads q * scale with the same scales.
        layout: "NHD" or "HND".

    Raises:
        PositionError: a request index, a position (at most max_pages * page_size - 1) or a page
            lies outside its table, on the CPU and with nothing written. On a GPU, where looking
            would synchronise, such a token writes nothing.
        LayoutError: a cache shares a memory cell with the other one or with what is read beside
            the tokens (tokens that are views of a cache are copied first); nothing is written.
        ShapeError, DTypeError, DeviceError, LayoutError, ConfigError: an argument is not as
            described; scales for a cache that takes none, or none for an 8-bit one.
        UnsupportedError: an input requires grad while grad mode is on; a cache that was made under
            ``torch.inference_mode()`` is used outside of it.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.
    """
    _OP_APPEND_PAGED_KV(
        k, v, k_cache, v_cache, block_table, request_index, positions, k_scale, v_scale, layout
    )
