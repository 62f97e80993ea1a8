"""The paged KV cache: its two layouts, and the checks of its metadata.

A cache is a pool of pages of ``page_size`` slots; a slot holds one token's keys (or values) of all
KV heads. Row b of the block table names the pages of request b in order, so that the token at
position p lives in page ``block_table[b, p // page_size]``, slot ``p % page_size``. Entries behind
a request's last used page are never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.check import (
    require_choice,
    require_dim,
    require_dtype,
    require_integer,
    require_same_device,
    require_shape,
    require_tensor,
)
from fusedops.errors import PositionError, ShapeError
from fusedops.ops.kv_scale import CODE_DTYPES, check_cache_scales

__all__ = [
    "LAYOUTS",
    "check_paged_cache",
    "check_paged_metadata",
    "require_length",
    "require_pages",
    "slots_view",
]

LAYOUTS = ("NHD", "HND")
"""NHD: (pages, page_size, Hkv, D). HND: (pages, Hkv, page_size, D)."""


def slots_view(cache: Tensor, layout: str) -> Tensor:
    """The cache as (pages, page_size, Hkv, D) whatever its layout; a view."""
    return cache if layout == "NHD" else cache.transpose(1, 2)


def check_paged_cache(
    op: str,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    layout: str,
    like: Tensor,
    heads: int | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Check two caches, their scales and block table against the tokens' ``like`` (..., D).

    ``heads`` is the number of KV heads that the caches must have; None accepts any.
    """
    if layout not in LAYOUTS:
        require_choice(op, "layout", layout, LAYOUTS)
    if k_cache.dtype is not like.dtype and k_cache.dtype not in CODE_DTYPES:
        accepted_dtypes = (like.dtype, *CODE_DTYPES)
        why = "that of the tokens, or 8 bits with k_scale and v_scale"
        require_dtype(op, "k_cache", k_cache, accepted_dtypes, why)
    if v_cache.dtype is not k_cache.dtype:
        require_dtype(op, "v_cache", v_cache, (k_cache.dtype,), "that of k_cache")
    if k_cache.dim() != 4:
        require_dim(op, "k_cache", k_cache, 4, exactly=True)
    if v_cache.shape != k_cache.shape:
        require_shape(op, "v_cache", v_cache, [tuple(k_cache.shape)], "the shape of k_cache")
    pages, rows, columns, head_dim = k_cache.shape
    page_size, cache_heads = (rows, columns) if layout == "NHD" else (columns, rows)
    if head_dim != like.shape[-1] or (heads is not None and cache_heads != heads):
        wanted = cache_heads if heads is None else heads
        inner = (page_size, wanted) if layout == "NHD" else (wanted, page_size)
        accepted = [(pages, *inner, like.shape[-1])]
        require_shape(op, "k_cache", k_cache, accepted, f"layout {layout}, heads and head dim")
    check_cache_scales(op, k_cache, k_scale, v_scale, cache_heads)
    if pages == 0 or page_size == 0:
        raise ShapeError(f"{op}: k_cache has shape {tuple(k_cache.shape)}; it needs a page.")
    if block_table.dtype is not torch.int32:
        require_dtype(op, "block_table", block_table, (torch.int32,))
    if block_table.dim() != 2:
        require_dim(op, "block_table", block_table, 2, exactly=True)
    device = like.device
    if k_cache.device != device or v_cache.device != device or block_table.device != device:
        others = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
        require_same_device(op, "the tokens' tensor", like, **others)


def require_length(op: str, request: int, length: int, max_pages: int, page_size: int) -> None:
    """Raise PositionError unless a request's KV length fits its row of the block table."""
    capacity = max_pages * page_size
    if not 0 <= length <= capacity:
        raise PositionError(
            f"{op}: request {request} has length {length}; accepted are 0 to {capacity} "
            f"({max_pages} pages of {page_size} slots in its row of block_table)."
        )


def require_pages(op: str, request: int, used: Sequence[int], pages: int) -> None:
    """Raise PositionError unless the pages that a request uses are in the pool."""
    if used and (min(used) < 0 or max(used) >= pages):
        raise PositionError(
            f"{op}: request {request} uses pages {list(used)}; accepted are 0 to {pages - 1}, the "
            "pages of the cache. Change its row of block_table."
        )


def check_paged_metadata(
    seq_lens: Tensor, block_table: Tensor, page_size: int, pages: int | None = None
) -> None:
    """Check the metadata of a paged KV cache on the host, before any launch.

    ``paged_attention`` and ``append_paged_kv`` do not look at values on a GPU; call this where the
    metadata is made. CUDA tensors are copied to the host first, which synchronises.

    Args:
        seq_lens: (B,) int32 or int64, KV length of each request in tokens.
        block_table: (B, max_pages) int32 or int64, page numbers.
        page_size: slots a page, >= 1.
        pages: number of pages in the pool; None does not check page numbers.

    Raises:
        PositionError: a length is negative or beyond its row of the table, or a page that is in
            use lies outside the pool.
        ShapeError, DTypeError, ConfigError: an argument is not as described.
    """
    op = "check_paged_metadata"
    require_tensor(op, "seq_lens", seq_lens)
    require_tensor(op, "block_table", block_table)
    require_integer(op, "page_size", page_size, 0)
    if pages is not None:
        require_integer(op, "pages", pages, 0)
    require_dtype(op, "seq_lens", seq_lens, (torch.int32, torch.int64))
    require_dtype(op, "block_table", block_table, (torch.int32, torch.int64))
    require_dim(op, "block_table", block_table, 2, exactly=True)
    require_shape(
        op, "seq_lens", seq_lens, [(block_table.shape[0],)], "a length for each table row"
    )
    if page_size < 1:
        raise ShapeError(f"{op}: page_size is {page_size}; a page has at least one slot.")
    max_pages = block_table.shape[1]
    rows = block_table.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        require_length(op, request, length, max_pages, page_size)
        if pages is not None:
            require_pages(op, request, rows[request][: -(-length // page_size)], pages)
