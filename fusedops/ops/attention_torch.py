"""Attention over a paged KV cache in torch, from metadata that stays on the device.

The caches are (pages, page_size, Hkv, D) views; it works in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.ops.kv_scale import codes, from_codes

__all__ = ["Attention", "attend_batched", "capped", "scaled_scores", "visible"]


class Attention(NamedTuple):
    """The options of ``paged_attention`` that decide which keys count and by how much."""

    scale: float
    causal: bool
    window: int
    softcap: float
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def visible(key: Tensor, own: Tensor, options: Attention) -> Tensor:
    """True where the key's position is one that a query at position ``own`` attends."""
    if not options.causal:
        return key > own - options.window
    if not options.window:
        return key <= own
    return (key <= own) & (key > own - options.window)


def scaled_scores(rows: Tensor, k: Tensor, options: Attention) -> Tensor:
    """Scaled and capped products of rows (..., rows, D) and keys (..., keys, D)."""
    return capped(torch.matmul(rows, k.transpose(-1, -2)).mul_(options.scale), options)


def capped(scores: Tensor, options: Attention) -> Tensor:
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
    scores = scaled_scores(rows.flatten(2, 3), k, options)
    scores = scores.view(requests, heads, group, max_query_len, -1)
    seen = stored[:, None, :] & (step < count)[:, :, None]
    if options.causal or options.window:
        seen &= visible(key, own[:, :, None], options)
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
