"""Attention over a paged KV cache: decode, prefill and both mixed in one batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_dim,
    require_dtype,
    require_finite,
    require_same_device,
    require_shape,
    require_tensor,
)
from fusedops.errors import ConfigError, ShapeError
from fusedops.ops.attention_host import attend_on_host
from fusedops.ops.attention_torch import Attention, attend_batched
from fusedops.ops.guards import empty_contiguous
from fusedops.ops.kv_scale import require_positive_scales
from fusedops.ops.op import Op, entry
from fusedops.ops.paged import check_paged_cache, check_paged_metadata, slots_view

__all__ = ["check_paged_metadata", "paged_attention"]


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_query_len: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    layout: str,
) -> None:
    op = "paged_attention"
    if q.dtype not in ACTIVATION_DTYPES:
        require_dtype(op, "q", q, ACTIVATION_DTYPES)
    if q.dim() != 3:
        require_dim(op, "q", q, 3, exactly=True)
    check_paged_cache(op, k_cache, v_cache, block_table, layout, q, None, k_scale, v_scale)
    heads = k_cache.shape[2 if layout == "NHD" else 1]
    if heads == 0 or q.shape[1] % heads or q.shape[2] == 0:
        raise ShapeError(
            f"{op}: q is {describe(q)} and k_cache is {describe(k_cache)}; the number of query "
            f"heads must be a multiple of the {heads} KV heads, and the head dim at least 1."
        )
    requests = block_table.shape[0]
    if seq_lens.dtype is not torch.int32:
        require_dtype(op, "seq_lens", seq_lens, (torch.int32,))
    if seq_lens.dim() != 1 or seq_lens.shape[0] != requests:
        require_shape(op, "seq_lens", seq_lens, [(requests,)], "one length for each request")
    if seq_lens.device != q.device:
        require_same_device(op, "q", q, seq_lens=seq_lens)
    if query_start is None:
        if q.shape[0] != requests:
            accepted = [(requests, q.shape[1], q.shape[2])]
            require_shape(op, "q", q, accepted, "one query a request where query_start is None")
        if max_query_len != 1:
            raise ConfigError(
                f"{op}: max_query_len={max_query_len} without query_start; pass query_start, or "
                "leave max_query_len at 1 for a decode step."
            )
    else:
        require_dtype(op, "query_start", query_start, (torch.int32,))
        require_shape(op, "query_start", query_start, [(requests + 1,)], "an offset a request, +1")
        require_same_device(op, "q", q, query_start=query_start)
    require_finite(op, "scale", scale)
    if max_query_len < 1 or window < 0 or not 0.0 <= softcap < math.inf:
        raise ConfigError(
            f"{op}: max_query_len={max_query_len}, window={window}, softcap={softcap}; accepted "
            "are max_query_len >= 1, window >= 0 (0: no window), softcap >= 0 (0: no cap)."
        )


def _reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_query_len: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    layout: str,
) -> Tensor:
    k_slots, v_slots = slots_view(k_cache, layout), slots_view(v_cache, layout)
    run = attend_on_host if q.is_cpu else attend_batched
    options = Attention(scale, causal, window, softcap, k_scale, v_scale)
    return run(q, k_slots, v_slots, block_table, seq_lens, query_start, max_query_len, options)


Op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,"
    " Tensor seq_lens, Tensor? query_start, Tensor? k_scale, Tensor? v_scale, int max_query_len,"
    " float scale, bool causal, int window, float softcap, str layout) -> Tensor",
    check=_check,
    check_values=lambda *args: require_positive_scales("paged_attention", *args[6:8]),
    fake=lambda q, *_rest: empty_contiguous(q),
    reference=_reference,
)

_OP_PAGED_ATTENTION = entry("paged_attention")


def _default_scale(q: Tensor) -> float:
    try:
        scale: float = q.shape[-1] ** -0.5
    except (AttributeError, IndexError, RuntimeError, ZeroDivisionError):
        require_tensor("paged_attention", "q", q)
        return 1.0  # the operation's own check says what is wrong with q's shape
    return scale


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_query_len: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    layout: str = "NHD",
) -> Tensor:
    """Softmax attention of each request's queries over its pages of a KV cache.

    The j-th of request b's n queries sits at position ``seq_lens[b] - n + j``. It attends the keys
    before ``seq_lens[b]`` whose position is at most its own (``causal``) and greater than its own
    minus ``window`` (where ``window`` > 0). Scores, softmax and the weighted sum are float32; the
    result is rounded once. A key that a query does not attend has no effect on its result, whatever
    it and its value hold, NaN and Inf included (other providers than torch's may let a NaN or Inf
    behind the mask or before the window show); nor have slots that no request uses.

    Args:
        q: (T, Hq, D), float32, bfloat16 or float16.
        k_cache, v_cache: (pages, page_size, Hkv, D) for layout "NHD", (pages, Hkv, page_size, D)
            for "HND"; both of the dtype of ``q``, or both float8_e4m3fn or int8; Hq a multiple of
            Hkv (grouped queries: head h reads KV head h // (Hq / Hkv)).
        block_table: (B, max_pages) int32, the pages of each request in order; entries behind its
            last used page are not read.
        seq_lens: (B,) int32, KV length of each request with its queries; 0 gives rows of zeros.
        query_start: (B + 1,) int32, offsets of each request's queries in ``q``, from 0; None: a
            decode step, one query a request. Rows of ``q`` behind the last offset give zeros.
        k_scale, v_scale: for 8-bit caches, and only for them: float32 on the caches' device, () or
            one for each KV head, (Hkv,); what the cache holds is multiplied by it in float32. The
            scales that ``append_paged_kv`` stored with: as there they must be finite and at least
            2^-126 (``SMALLEST_SCALE`` of ``fusedops.ops.quantize``), which is checked on the CPU
            only.
        max_query_len: upper bound of the number of queries of one request.
        scale: factor of q.k; None: 1 / sqrt(D).
        causal: whether later keys are masked.
        window: sliding window in tokens, the query's own included; 0: none.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask; 0: none.
        layout: "NHD" or "HND".

    Returns:
        (T, Hq, D), contiguous, dtype of ``q``.

    Raises:
        PositionError: a length beyond the request's row of the table or below its number of
            queries, or a page outside the cache, on the CPU. On a GPU, where looking would
            synchronise, keys of such pages are not attended, queries beyond ``max_query_len`` give
            zeros and nothing is read out of bounds; ``check_paged_metadata`` checks on the host.
        ShapeError: shapes do not agree; query_start (on the CPU) does not start at 0, decreases,
            exceeds T, or gives a request more than ``max_query_len`` queries.
        DTypeError, DeviceError, ConfigError: an argument is not as described; scales for a cache
            that takes none, or none for an 8-bit one; a scale below the least one (CPU).
        UnsupportedError: an input requires grad while grad mode is on.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023; soft cap: Gemma Team, "Gemma 2", 2024.
    """
    out: Tensor = _OP_PAGED_ATTENTION(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start,
        k_scale,
        v_scale,
        max_query_len,
        _default_scale(q) if scale is None else scale,
        causal,
        window,
        softcap,
        layout,
    )
    return out
