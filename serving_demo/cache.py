"""The paged KV cache: a pool of pages for each layer, and who owns which page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from fusedops.errors import ConfigError, ShapeError
from serving_demo.check import require_int
from serving_demo.config import ModelConfig

__all__ = [
    "DEFAULT_PAGE_SIZE",
    "BlockAllocator",
    "PagedKVCache",
    "require_fit",
    "require_page_size",
]

DEFAULT_PAGE_SIZE = 16
"""Positions a page. Small pages waste little at a request's end."""

MAX_PAGES = 2**31 - 1
"""A block table holds page numbers as int32."""


class BlockAllocator:
    """Hands out page numbers of a pool, the lowest free ones first.

    So a request's pages mostly follow one another, and attention on the CPU reads neighbouring
    pages where they are instead of gathering them.

    Args:
        n_pages: pages in the pool, >= 1.
    """

    def __init__(self, n_pages: int) -> None:
        require_int("n_pages", n_pages, 1, MAX_PAGES, "It is the pages of the cache.")
        self.n_pages = n_pages
        self._free = list(range(n_pages))
        self._taken: set[int] = set()

    @property
    def n_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages, owned by the caller until ``free``.

        Raises:
            ShapeError: fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise ShapeError(
                f"{count} cache pages are asked for, but {len(self._free)} of {self.n_pages} are "
                "free; run fewer or shorter prompts at once, or make the cache larger."
            )
        pages = [heappop(self._free) for _ in range(count)]
        self._taken.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back.

        Raises:
            ConfigError: a page is not owned by anybody (freed twice).
        """
        stray = [page for page in pages if page not in self._taken]
        if stray or len(set(pages)) != len(pages):
            raise ConfigError(f"cache pages {stray or list(pages)} are freed twice.")
        self._taken.difference_update(pages)
        for page in pages:
            heappush(self._free, page)


class PagedKVCache:
    """Keys and values of all layers.

    Attributes:
        k, v: for each layer (n_pages, page_size, n_kv_heads, head_dim), layout NHD.
        allocator: who owns which page; one page number means that page in every layer.

    Args:
        config: the model.
        n_pages: pages in the pool.
        page_size: positions a page, >= 1.
        dtype, device: of the pool; dtype is the model's.

    Raises:
        ConfigError: a size is no int, out of range, or more than the device has memory for.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_pages: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        require_page_size(page_size)
        self.page_size = page_size
        self.allocator = BlockAllocator(n_pages)
        shape = (config.n_layers, 2, n_pages, page_size, config.n_kv_heads, config.head_dim)
        try:
            # Nothing ever reads a slot that was not written, so the pool needs no clearing.
            self._pool = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                f"a cache of {n_pages:,} pages with {page_size:,} positions each takes {gib:,.1f} "
                f"GiB, which {device} does not give; accepted is what fits into its memory. Lower "
                "max_requests, max_positions or page_size."
            ) from error
        self.k: list[Tensor] = [layer[0] for layer in self._pool]
        self.v: list[Tensor] = [layer[1] for layer in self._pool]

    @property
    def n_bytes(self) -> int:
        """Size of the pool."""
        return self._pool.nbytes

    def pages_for(self, n_positions: int) -> int:
        """Pages that ``n_positions`` positions of one request take."""
        return -(-n_positions // self.page_size)


def require_page_size(page_size: int) -> None:
    """Raise ConfigError unless a cache page holds a whole number of positions, >= 1."""
    require_int("page_size", page_size, 1, hint="It is the positions that a cache page holds.")


def require_fit(index: int, prompt_len: int, max_new_tokens: int, capacity: int) -> None:
    """Raise ShapeError unless a prompt and what follows it fit into a request's share of the cache.

    Args:
        index: the prompt's number, from 0.
        prompt_len: its tokens.
        max_new_tokens: tokens that may be generated after it.
        capacity: positions that the cache holds for a request.
    """
    # The last generated token is never fed back, so it takes no place in the cache.
    needed = prompt_len + max_new_tokens - 1
    if needed > capacity:
        raise ShapeError(
            f"prompt {index + 1} has {prompt_len:,} tokens and up to {max_new_tokens:,} are to "
            f"follow: that takes {needed:,} positions, but the cache holds {capacity:,} for a "
            "request. Shorten the prompt or lower --max-new-tokens."
        )
