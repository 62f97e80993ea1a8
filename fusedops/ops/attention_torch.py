"""Attention over a paged KV cache in torch: one way for host metadata, one for device metadata.

Both take the caches as (pages, page_size, Hkv, D) views and work in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.errors import PositionError, ShapeError
from fusedops.ops.kv_scale import codes, from_codes
from fusedops.ops.paged import require_length, require_pages

__all__ = ["Attention", "attend_batched", "attend_on_host"]


class Attention(NamedTuple):
    """The options of ``paged_attention`` that decide which keys count and by how much."""

    scale: float
    causal: bool
    window: int
    softcap: float
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


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
    """Request by request, each with exactly its own keys: for CPU tensors, whose values are free.

    A request's slots behind its length are never touched, and nothing is padded or masked that
    need not be (one masked call for four requests took longer than four plain ones: 320 us against
    190 us at 70 keys). The values are checked here because they are read here anyway.
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
    """A decode step: (B, Hq, D), one query a request, which sees every key (of its window).

    Two small products a request: SDPA takes longer for one query at every length from 32 to 8192
    keys, and its call is the larger part of the time at the short ones.
    """
    requests, query_heads, head_dim = q.shape
    page_size, heads = k_slots.shape[1:3]
    # The query heads that share a KV head become rows of one product, so K and V are not repeated.
    grouped = (requests, heads, query_heads // heads, head_dim)
    scaled = torch.mul(q if q.dtype is torch.float32 else q.float(), options.scale)
    out = torch.empty(grouped, dtype=torch.float32, device="cpu")
    read = _key_reader(k_slots, v_slots, options)
    for rows, result, row, length in zip(
        scaled.view(grouped).unbind(), out.unbind(), pages, lengths, strict=True
    ):
        if not length:
            result.zero_()
            continue
        oldest = max(0, length - options.window) if options.window else 0
        first = oldest // page_size
        k, v = read(row[first:], oldest - first * page_size, length - oldest)
        scores = _capped(torch.bmm(rows, k), options)
        torch.bmm(scores.softmax(-1), v, out=result)
    return out.view(q.shape).to(q.dtype)


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
        out[query] = torch.bmm(_scores(rows, k[:, seen], options).softmax(-1), v[:, seen])


_Read = Callable[[list[int], int, int], tuple[Tensor, Tensor]]
"""(pages, skip, count) -> keys (Hkv, D, count) and values (Hkv, count, D), float32, of the pages
from slot ``skip`` on."""


def _key_reader(k_slots: Tensor, v_slots: Tensor, options: Attention) -> _Read:
    """What reads requests' keys and values from (pages, page_size, Hkv, D) views of the caches."""
    page_size = k_slots.shape[1]
    # Pages that lie in order in the pool, as after a prefill, are read where they are: from views
    # of the whole pool, made once, as a view costs a third of a small product.
    viewable = k_slots.dtype is torch.float32 and k_slots.is_contiguous()
    if viewable and v_slots.is_contiguous():
        pool_k = k_slots.flatten(0, 1).permute(1, 2, 0)
        pool_v = v_slots.flatten(0, 1).transpose(0, 1)
    else:
        viewable = False

    def read(pages: list[int], skip: int, count: int) -> tuple[Tensor, Tensor]:
        first, number = pages[0], len(pages)
        neighbours = pages[-1] - first == number - 1 and pages == list(range(first, first + number))
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
    return _visible(key, own, options)


def _visible(key: Tensor, own: Tensor, options: Attention) -> Tensor:
    """True where the key's position is one that a query at position ``own`` attends."""
    if not options.causal:
        return key > own - options.window
    if not options.window:
        return key <= own
    return (key <= own) & (key > own - options.window)


def _attend_rows(
    rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Attention
) -> Tensor:
    """(Hkv, rows, D) float32 attention of ``rows`` over (Hkv, keys, D); a row sees some key."""
    if not options.softcap:
        return F.scaled_dot_product_attention(
            rows[None], k[None], v[None], attn_mask=mask, scale=options.scale
        )[0]
    scores = _scores(rows, k, options)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), v)


def _scores(rows: Tensor, k: Tensor, options: Attention) -> Tensor:
    return _capped(torch.matmul(rows, k.transpose(-1, -2)).mul_(options.scale), options)


def _capped(scores: Tensor, options: Attention) -> Tensor:
    """Scaled scores behind the soft cap, in place."""
    if options.softcap:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    return scores


def attend_batched(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    max_query_len: int,
    options: Attention,
) -> Tensor:
    """All requests at once, from shapes alone: nothing synchronises, so it can be captured.

    Every request is computed over the whole row of its block table and masked, so the work and the
    memory, (B, Hq, max_query_len, max_pages * page_size) float32 scores, follow the table's width.
    """
    tokens, query_heads, head_dim = q.shape
    pages, page_size, heads, _ = k_slots.shape
    requests, max_pages = block_table.shape
    if tokens == 0 or block_table.numel() == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    table = block_table.long()
    in_pool = ((table >= 0) & (table < pages))[:, :, None].expand(-1, -1, page_size)
    key = torch.arange(max_pages * page_size, device=q.device)
    length = seq_lens.long()[:, None]
    stored = (key < length) & in_pool.reshape(requests, -1)
    k = _gathered(k_slots, table, stored, options.k_scale)

    step = torch.arange(max_query_len, device=q.device)
    if query_start is None:
        start = torch.arange(requests, device=q.device)[:, None]
        count = torch.ones_like(start)
    else:
        start = query_start[:-1].long()[:, None]
        count = query_start[1:].long()[:, None] - start
    own = length - count + step
    group = query_heads // heads
    padded = q.index_select(0, (start + step).clamp(0, tokens - 1).flatten()).float()
    rows = padded.view(requests, max_query_len, heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = _scores(rows.flatten(2, 3), k, options)
    scores = scores.view(requests, heads, group, max_query_len, -1)
    seen = stored[:, None, :] & (step < count)[:, :, None]
    if options.causal or options.window:
        seen &= _visible(key, own[:, :, None], options)
    attended = seen[:, None, None]
    weights = scores.masked_fill_(~attended, -torch.inf).softmax(-1)
    # A query that attends nothing has only -inf scores, whose softmax is NaN: it gives zeros.
    weights = weights.masked_fill_(~attended, 0.0)
    v = _gathered(v_slots, table, seen[:, 0] if max_query_len == 1 else stored, options.v_scale)
    shape = (requests, heads, group, max_query_len, head_dim)
    if max_query_len == 1:
        out = torch.matmul(weights.flatten(2, 3), v).view(shape)
    else:
        # A key that one query attends may be masked for another, where it must not show.
        finite = v.masked_fill(~v.isfinite(), 0.0)
        out = torch.matmul(weights.flatten(2, 3), finite).view(shape)
        out = out + _of_unclean(seen, v)[:, :, None]
    out = out.permute(0, 3, 1, 2, 4).reshape(-1, query_heads, head_dim).to(q.dtype)
    if query_start is None:
        return out
    return _unpadded(out, query_start.long(), tokens, max_query_len)


def _of_unclean(seen: Tensor, v: Tensor) -> Tensor:
    """(B, Hkv, queries, D): what the values that are not finite add to a result; else zeros.

    Inf where one that the query attends is, NaN for a NaN or both infinities. Two products without
    the query heads' weights, so that nothing has to be looked at.
    """
    counted = seen[:, None].float()
    nan = v.isnan()
    zero = v.new_zeros(())
    above, below = (
        torch.where(torch.matmul(counted, ((v == bound) | nan).float()) > 0, bound, zero)
        for bound in (torch.inf, -torch.inf)
    )
    return above + below


def _gathered(slots: Tensor, table: Tensor, stored: Tensor, scale: Tensor | None) -> Tensor:
    """(B, Hkv, keys, D) float32 by the block table; zeros where nothing is stored.

    Zeros, because a masked weight of 0 times a stale NaN or Inf would still be NaN.
    """
    requests = table.shape[0]
    flat = codes(slots).index_select(0, table.clamp(0, slots.shape[0] - 1).flatten())
    rows = from_codes(flat.view(slots.dtype).reshape(requests, -1, *slots.shape[2:]), scale)
    return rows.masked_fill_(~stored[:, :, None, None], 0.0).transpose(1, 2)


def _unpadded(out: Tensor, query_start: Tensor, tokens: int, max_query_len: int) -> Tensor:
    """(T, Hq, D) from rows padded to ``max_query_len`` a request; zeros where there is none."""
    token = torch.arange(tokens, device=out.device)
    request = torch.searchsorted(query_start[1:].contiguous(), token, right=True)
    last = query_start.shape[0] - 2
    start = query_start[request.clamp(max=last)]
    step = token - start
    absent = (request > last) | (step < 0) | (step >= max_query_len)
    source = request.clamp(max=last) * max_query_len + step.clamp(0, max_query_len - 1)
    return out.index_select(0, source).masked_fill_(absent[:, None, None], 0.0)
