"""FlashInfer's paged attention: planned on the host at each call, so only where pinned.

Its kernels take the page lists of a batch as CSR (indptr, indices, length of each last page) and a
schedule that ``plan()`` computes on the host from the lengths. ``plan_pages`` makes the former.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import PositionError, ShapeError
from fusedops.providers.base import SUPPORTED, Support, unsupported
from fusedops.providers.flashinfer_base import (
    call,
    is_capturing,
    module,
    not_ready,
    off_cuda,
    opt_in,
    stream_of,
    wrong_alignment,
    wrong_dtype,
)

__all__ = [
    "CUDA_CORE_GROUPS",
    "HEAD_DIMS",
    "WORKSPACE_BYTES",
    "Pages",
    "paged_attention",
    "plan_pages",
    "supports_paged_attention",
    "window_left",
]

HEAD_DIMS = (64, 128, 256)
"""Head dims that both its decode and its prefill kernel take."""

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads a KV head of its CUDA-core decode kernel (``DISPATCH_GQA_GROUP_SIZE``)."""

WORKSPACE_BYTES = 128 << 20
"""Scratch for split-KV partial results: the size that FlashInfer recommends."""

_CAPTURED = (
    "an eager call synchronises, a captured decode step uses "
    "fusedops.providers.flashinfer.FlashInferDecode"
)


@dataclass(frozen=True)
class Pages:
    """The page lists of a batch as FlashInfer takes them, on the host.

    Attributes:
        counts: pages that each request uses.
        indptr: (B + 1,) int32, offsets of each request's pages in the flat list.
        last_page_len: (B,) int32, slots used of each request's last page; 0: an empty request.
    """

    counts: tuple[int, ...]
    indptr: Tensor
    last_page_len: Tensor


def plan_pages(op: str, lengths: Sequence[int], max_pages: int, page_size: int) -> Pages:
    """The page lists of requests with these KV lengths in tokens.

    Raises:
        PositionError: a length is negative or beyond the request's row of the block table.
    """
    capacity = max_pages * page_size
    for request, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise PositionError(
                f"{op}: request {request} has length {length}; accepted are 0 to {capacity} "
                f"({max_pages} pages of {page_size} slots in its row of block_table)."
            )
    counts = tuple(-(-length // page_size) for length in lengths)
    last = [n - max(c - 1, 0) * page_size for n, c in zip(lengths, counts, strict=True)]
    return Pages(
        counts,
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
    )


def window_left(window: int) -> int:
    """FlashInfer's window, which counts the tokens before the query's own; -1: none."""
    return window - 1 if window else -1


def supports_paged_attention(
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
) -> Support:
    """Whether FlashInfer serves ``paged_attention``: only where pinned, and never in a capture."""
    elsewhere = off_cuda(q)
    if elsewhere is not None:
        return elsewhere
    refusal = wrong_dtype("q", q)
    if refusal is None and k_cache.dtype is not q.dtype:
        refusal = unsupported(f"reads caches of the queries' {q.dtype}, got {k_cache.dtype}")
    if refusal is None and q.shape[2] not in HEAD_DIMS:
        refusal = unsupported(f"has kernels for head dims {HEAD_DIMS}, got {q.shape[2]}")
    if refusal is None and k_cache.stride() != v_cache.stride():
        refusal = unsupported(
            f"needs equal strides of both caches, got {tuple(k_cache.stride())} and "
            f"{tuple(v_cache.stride())}"
        )
    refusal = refusal or opt_in(f"plans each call on the host from the lengths: {_CAPTURED}")
    if refusal is None and is_capturing():
        refusal = unsupported(f"plans on the host, which a capture forbids: {_CAPTURED}")
    for name, tensor in {"q": q, "k_cache": k_cache, "v_cache": v_cache}.items():
        refusal = refusal or wrong_alignment(name, tensor)
    return refusal or not_ready(None, None) or SUPPORTED


def paged_attention(
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
    """Plan from the lengths, then run FlashInfer's decode or prefill kernel; synchronises.

    As the host reads the metadata anyway, bad values raise here as they do on the CPU.
    """
    max_pages = block_table.shape[1]
    slots, heads = k_cache.shape[1:3] if layout == "NHD" else k_cache.shape[1:3][::-1]
    lengths: list[int] = seq_lens.tolist()
    pages = plan_pages("paged_attention", lengths, max_pages, slots)
    kind = "decode" if query_start is None else "prefill"
    offsets: list[int] = list(range(len(lengths) + 1))
    if query_start is not None:
        offsets = query_start.tolist()
        _require_queries(offsets, lengths, q.shape[0], max_query_len)
    total = offsets[-1]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if total == 0 or not any(lengths):
        return out
    tensor_cores = kind == "prefill" or q.shape[1] // heads not in CUDA_CORE_GROUPS
    wrapper = _wrapper(kind, q.device, stream_of(q), layout, tensor_cores)
    indices = _indices(block_table, pages, k_cache.shape[0])
    csr: tuple[Tensor, ...] = (pages.indptr, indices, pages.last_page_len)
    options: dict[str, Any] = {
        "sm_scale": scale,
        "window_left": window_left(window),
        "logits_soft_cap": softcap,
        "q_data_type": q.dtype,
        "kv_data_type": q.dtype,
    }
    if kind == "prefill":
        csr = (torch.tensor(offsets, dtype=torch.int32), *csr)
        options["causal"] = causal

    def plan_and_run() -> None:
        wrapper.plan(*csr, q.shape[1], heads, q.shape[2], slots, **options)
        wrapper.run(q[:total], (k_cache, v_cache), out=out[:total])

    form = (kind, tensor_cores, q.dtype, q.shape[2], causal, window > 0, softcap > 0)
    call(("paged_attention", q.device, *form), plan_and_run)
    for (start, end), length in zip(pairwise(offsets), lengths, strict=True):
        if length == 0:
            out[start:end].zero_()
    return out


def _indices(block_table: Tensor, pages: Pages, pool: int) -> Tensor:
    """The flat list of used pages, on the device of the table."""
    rows = block_table[:, : max(pages.counts)].tolist()
    used = [page for row, count in zip(rows, pages.counts, strict=True) for page in row[:count]]
    if min(used) < 0 or max(used) >= pool:
        raise PositionError(
            f"paged_attention: block_table names pages {min(used)} to {max(used)}; accepted are 0 "
            f"to {pool - 1}, the pages of the cache."
        )
    return torch.tensor(used, dtype=torch.int32, device=block_table.device)


def _require_queries(
    starts: list[int], lengths: list[int], tokens: int, max_query_len: int
) -> None:
    counts = [after - before for before, after in pairwise(starts)]
    if starts[0] != 0 or starts[-1] > tokens or min(counts, default=0) < 0:
        raise ShapeError(
            f"paged_attention: query_start is {starts}; it must start at 0, never decrease and end "
            f"at or before {tokens}, the rows of q."
        )
    if max(counts, default=0) > max_query_len:
        raise ShapeError(
            f"paged_attention: query_start gives a request {max(counts)} queries but "
            f"max_query_len is {max_query_len}; raise max_query_len."
        )
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if 0 < length < count:
            raise PositionError(
                f"paged_attention: request {request} has length {length} but {count} queries; "
                "seq_lens counts the queries too, so it is at least their number (or 0)."
            )


@functools.lru_cache(maxsize=4)
def _wrapper(kind: str, device: torch.device, stream: int, layout: str, tensor_cores: bool) -> Any:
    """FlashInfer's planner and launcher; calls on one stream share it, as they run in order."""
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if kind == "prefill":
        # "auto" picks its Hopper kernel (fa3), which takes nvcc minutes where it is not prebuilt.
        wrapper = module("prefill").BatchPrefillWithPagedKVCacheWrapper
        return wrapper(workspace, layout, backend="fa2")
    wrapper = module("decode").BatchDecodeWithPagedKVCacheWrapper
    return wrapper(workspace, layout, use_tensor_cores=tensor_cores)
