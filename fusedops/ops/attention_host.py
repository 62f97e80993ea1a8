"""Attention over a paged KV cache in torch for CPU tensors, whose metadata the host can read.

The caches are (pages, page_size, Hkv, D) views; it works in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.errors import PositionError, ShapeError
from fusedops.ops.attention_torch import Attention, capped, scaled_scores, visible
from fusedops.ops.kv_scale import from_codes
from fusedops.ops.paged import require_length, require_pages

__all__ = ["attend_on_host"]


def attend_on_host(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    max_query_len: int,
    options: Attention,
) -> Tensor:
    """For CPU tensors, whose values are free: each request with its own keys, none padded.

    Prompts are computed request by request, a decode step's queries together where their keys lie
    evenly in the pool. The metadata is checked here because it is read here anyway.
    """
    lengths = seq_lens.tolist()
    pages = _used_pages(block_table, lengths, k_slots.shape)
    if query_start is None:
        return _attend_single(q, k_slots, v_slots, pages, lengths, options)
    starts = query_start.tolist()
    _require_offsets(starts, lengths, q.shape[0], max_query_len)
    if len(lengths) == 1 and starts[1] == q.shape[0] > 0 and lengths[0]:
        return _attend_one(q, k_slots, v_slots, pages[0], lengths[0], options).contiguous()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        if length and end > start:
            out[start:end] = _attend_one(
                q[start:end], k_slots, v_slots, pages[request], length, options
            )
    return out


def _used_pages(
    block_table: Tensor, lengths: list[int], slots_shape: torch.Size
) -> list[list[int]]:
    """The pages that hold each request's keys, in order; raises where one is not in the pool."""
    op = "paged_attention"
    pages, page_size = slots_shape[:2]
    max_pages = block_table.shape[1]
    longest = max(lengths, default=0)
    if min(lengths, default=0) < 0 or longest > max_pages * page_size:
        for request, length in enumerate(lengths):
            require_length(op, request, length, max_pages, page_size)
    rows = block_table.narrow(1, 0, -(-longest // page_size)).tolist()
    used = [row[: -(-length // page_size)] for row, length in zip(rows, lengths, strict=True)]
    for request, row in enumerate(used):
        if row and (min(row) < 0 or max(row) >= pages):
            require_pages(op, request, row, pages)
    return used


def _require_offsets(
    starts: list[int], lengths: list[int], tokens: int, max_query_len: int
) -> None:
    op = "paged_attention"
    counts = [after - before for before, after in pairwise(starts)]
    if starts[0] != 0 or starts[-1] > tokens or min(counts, default=0) < 0:
        raise ShapeError(
            f"{op}: query_start is {starts}; it must start at 0, never decrease and end at or "
            f"before {tokens}, the rows of q."
        )
    if max(counts, default=0) > max_query_len:
        raise ShapeError(
            f"{op}: query_start gives a request {max(counts)} queries but max_query_len is "
            f"{max_query_len}; raise max_query_len."
        )
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if 0 < length < count:
            raise PositionError(
                f"{op}: request {request} has length {length} but {count} queries; seq_lens "
                "counts the queries too, so it is at least their number (or 0)."
            )


def _attend_single(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    options: Attention,
) -> Tensor:
    """A decode step: (B, Hq, D), one query a request, which sees every key (of its window)."""
    requests, query_heads, head_dim = q.shape
    heads = k_slots.shape[2]
    # The query heads that share a KV head become rows of one product, so K and V are not repeated.
    grouped = (requests, heads, query_heads // heads, head_dim)
    wide = (q if q.dtype is torch.float32 else q.float()).view(grouped)
    evenly = not options.window and not options.softcap and _viewable(k_slots, v_slots)
    runs = list(_even_runs(pages)) if evenly else []
    results = []
    for first, end, step in runs:
        run = slice(first, end)
        part = (wide[run] if len(runs) > 1 else wide, k_slots, v_slots, pages[run], lengths[run])
        together = _attend_run(*part, step, options.scale) if step else None
        results.append(_attend_each(*part, options) if together is None else together)
    if not runs:
        results.append(_attend_each(wide, k_slots, v_slots, pages, lengths, options))
    out = results[0] if len(results) == 1 else torch.cat(results)
    return out.reshape(q.shape).to(q.dtype)


def _attend_each(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    options: Attention,
) -> Tensor:
    """(B, Hkv, group, D) float32 like ``q``, with two small products a request.

    SDPA takes longer for one query of one request at every length from 32 to 8192 keys, and its
    call is the larger part of the time at the short ones.
    """
    page_size = k_slots.shape[1]
    scaled = torch.mul(q, options.scale)
    out = torch.empty(q.shape, dtype=torch.float32, device="cpu")
    read = _key_reader(k_slots, v_slots, options)
    for rows, result, row, length in zip(
        scaled.unbind(), out.unbind(), pages, lengths, strict=True
    ):
        if not length:
            result.zero_()
            continue
        oldest = max(0, length - options.window) if options.window else 0
        first = oldest // page_size
        k, v = read(row[first:], oldest - first * page_size, length - oldest)
        scores = capped(torch.bmm(rows, k), options)
        torch.bmm(scores.softmax(-1), v, out=result)
    return out


def _lie_in_order(pages: list[int]) -> bool:
    return pages[-1] - pages[0] == len(pages) - 1 and pages == list(
        range(pages[0], pages[0] + len(pages))
    )


def _even_runs(pages: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """(first, end, step): requests whose keys lie in order, ``step`` pages from one to the next.

    That is what a batch looks like that was read together; two requests with keys are always even.
    A request by itself has step 0.
    """
    ordered = [bool(row) and _lie_in_order(row) for row in pages]
    first = 0
    while first < len(pages):
        end, step = first + 1, 0
        while end < len(pages) and ordered[end - 1] and ordered[end]:
            gap = pages[end][0] - pages[end - 1][0]
            if gap <= 0 or step not in (0, gap):
                break
            end, step = end + 1, gap
        yield first, end, step
        first = end


@lru_cache(16)
def _beyond(lengths: tuple[int, ...]) -> Tensor:
    """(B, 1, 1, longest) float32: 0 for a request's keys, -inf behind them; for every layer."""
    ends = torch.tensor(lengths, device="cpu").view(-1, 1, 1, 1)
    behind = torch.arange(max(lengths), device="cpu") >= ends
    return torch.zeros(behind.shape, device="cpu").masked_fill_(behind, -torch.inf)


def _attend_run(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    step: int,
    scale: float,
) -> Tensor | None:
    """``_attend_each`` of a run of ``_even_runs`` as one call, from a view of the caches.

    Four requests with 80 keys take 25 us instead of 80. The view is as long as the longest request:
    None where the pool ends before it does, or where a result is not finite, as a NaN behind a
    shorter request's keys may have come through the mask.
    """
    page_size, heads, head_dim = k_slots.shape[1:]
    longest = max(lengths)
    if pages[-1][0] * page_size + longest > k_slots.shape[0] * page_size:
        return None
    size = (len(lengths), heads, longest, head_dim)
    page = page_size * heads * head_dim
    stride = (step * page, head_dim, heads * head_dim, 1)
    k, v = (
        slots.as_strided(size, stride, slots.storage_offset() + pages[0][0] * page)
        for slots in (k_slots, v_slots)
    )
    mask = None if min(lengths) == longest else _beyond(tuple(lengths))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if mask is not None and not attended.sum().isfinite():
        return None
    return attended


def _attend_one(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    pages: list[int],
    length: int,
    options: Attention,
) -> Tensor:
    """(n, Hq, D): the n queries of one request over its keys; its last key is its last query's."""
    queries, query_heads, head_dim = q.shape
    page_size, heads = k_slots.shape[1:3]
    first_page = 0
    if options.window:
        first_page = max(0, length - queries - options.window + 1) // page_size
    first_key = first_page * page_size
    k, v = _key_reader(k_slots, v_slots, options)(pages[first_page:], 0, length - first_key)
    k = k.transpose(1, 2)
    full = queries == length and options.causal and not options.window
    if full and queries > 1 and not options.softcap:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None].float(),
            k[None],
            v[None],
            is_causal=True,
            scale=options.scale,
            enable_gqa=True,
        )
        per_query = out[0].transpose(0, 1).unflatten(1, (heads, query_heads // heads))
        _redo_unclean(per_query, q, k, v, first_key, length, options)
        whole: Tensor = per_query.flatten(1, 2).to(q.dtype)
        return whole
    group = query_heads // heads
    rows = q.view(queries, heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    mask = _mask(queries, length, first_key, options)
    if mask is not None:
        mask = mask.repeat(group, 1)
    out = _attend_rows(rows.float(), k, v, mask, options)
    out = out.view(heads, group, queries, head_dim).permute(2, 0, 1, 3)
    if mask is not None:
        _redo_unclean(out, q, k, v, first_key, length, options)
    return out.flatten(1, 2).to(q.dtype)


def _redo_unclean(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: int,
    length: int,
    options: Attention,
) -> None:
    """Compute anew, from only the keys it attends, each query whose result is not finite.

    A masked key with a NaN or Inf would show: its weight of 0 times that is NaN, and so is a masked
    score that was NaN. Looking at the results finds every such query, at a price that does not grow
    with the number of keys.

    Args:
        out: (n, Hkv, group, D) float32, written.
        q: (n, Hq, D).
        k, v: (Hkv, keys, D) float32, from the key at position ``first_key`` on.
    """
    if out.sum().isfinite():
        return
    queries = q.shape[0]
    for query in (~out.isfinite().flatten(1).all(1)).nonzero().flatten().tolist():
        own = length - queries + query
        oldest = max(first_key, own - options.window + 1) if options.window else first_key
        newest = own if options.causal else length - 1
        seen = slice(oldest - first_key, newest - first_key + 1)
        rows = q[query].view(out.shape[1:]).float()
        out[query] = torch.bmm(scaled_scores(rows, k[:, seen], options).softmax(-1), v[:, seen])


_Read = Callable[[list[int], int, int], tuple[Tensor, Tensor]]
"""(pages, skip, count) -> keys (Hkv, D, count) and values (Hkv, count, D), float32, of the pages
from slot ``skip`` on."""


def _viewable(k_slots: Tensor, v_slots: Tensor) -> bool:
    """Whether products can read the caches where they are."""
    both = k_slots.dtype is torch.float32 and v_slots.dtype is torch.float32
    return both and k_slots.is_contiguous() and v_slots.is_contiguous()


def _key_reader(k_slots: Tensor, v_slots: Tensor, options: Attention) -> _Read:
    """What reads requests' keys and values from (pages, page_size, Hkv, D) views of the caches."""
    page_size = k_slots.shape[1]
    # Pages that lie in order in the pool, as after a prefill, are read where they are: from views
    # of the whole pool, made once, as a view costs a third of a small product.
    viewable = _viewable(k_slots, v_slots)
    if viewable:
        pool_k = k_slots.flatten(0, 1).permute(1, 2, 0)
        pool_v = v_slots.flatten(0, 1).transpose(0, 1)

    def read(pages: list[int], skip: int, count: int) -> tuple[Tensor, Tensor]:
        first, number = pages[0], len(pages)
        neighbours = _lie_in_order(pages)
        if neighbours and viewable:
            start = first * page_size + skip
            return pool_k.narrow(2, start, count), pool_v.narrow(1, start, count)
        where = slice(first, first + number) if neighbours else torch.tensor(pages, device="cpu")
        k, v = (
            from_codes(slots[where].flatten(0, 1).narrow(0, skip, count), scale)
            for slots, scale in ((k_slots, options.k_scale), (v_slots, options.v_scale))
        )
        return k.permute(1, 2, 0), v.transpose(0, 1)

    return read


def _mask(queries: int, length: int, first_key: int, options: Attention) -> Tensor | None:
    """(queries, keys) bool, True where a query attends a key; None where all attend all."""
    if not options.causal and not options.window:
        return None
    own = torch.arange(length - queries, length, device="cpu")[:, None]
    key = torch.arange(first_key, length, device="cpu")
    return visible(key, own, options)


def _attend_rows(
    rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Attention
) -> Tensor:
    """(Hkv, rows, D) float32 attention of ``rows`` over (Hkv, keys, D); a row sees some key."""
    if not options.softcap:
        return F.scaled_dot_product_attention(
            rows[None], k[None], v[None], attn_mask=mask, scale=options.scale
        )[0]
    scores = scaled_scores(rows, k, options)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), v)
