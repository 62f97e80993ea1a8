"""A captured decode step on FlashInfer: plan on the host between replays, run inside the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.check import (
    describe,
    require_choice,
    require_dim,
    require_dtype,
    require_same_device,
    require_shape,
)
from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from fusedops.providers.flashinfer_attention import (
    CUDA_CORE_GROUPS,
    HEAD_DIMS,
    WORKSPACE_BYTES,
    plan_pages,
    window_left,
)
from fusedops.providers.flashinfer_base import (
    HALF_DTYPES,
    absent,
    call,
    is_capturing,
    module,
    off_cuda,
    wrong_alignment,
)

__all__ = ["FlashInferDecode"]

_OP = "FlashInferDecode"


class FlashInferDecode:
    """Decode attention of a fixed batch over a paged KV cache, for use inside a CUDA graph.

    FlashInfer's schedule depends on the lengths and is computed on the host, so a step is::

        decode.plan(lengths)   # host, before the capture and before each replay
        graph.replay()         # holds decode.run(q, k_cache, v_cache) for every layer

    One object serves all layers of a step. ``plan`` and the replay must be queued on one stream.
    Call ``run`` once before the capture: that is when FlashInfer loads its kernel.

    Args:
        batch: requests, fixed.
        pages: pages in the pool, the first dimension of the caches.
        page_size: slots a page.
        query_heads, kv_heads, head_dim: as in ``paged_attention``; head_dim is 64, 128 or 256.
        dtype: bfloat16 or float16, of the queries and the caches.
        device: a CUDA device.
        block_table: (batch, max_pages) int32 on ``device``; ``plan`` reads it on the device each
            time, so the owner may rewrite it in between. Its page numbers are not checked
            (``check_paged_metadata`` does).
        layout: "NHD" or "HND", as in ``paged_attention``.
        scale: factor of q.k; None: 1 / sqrt(head_dim).
        window, softcap: as in ``paged_attention``; 0: none.
        use_cuda_graph: keep every address and grid fixed, so that ``run`` can be captured.
        tensor_cores: FlashInfer's other kernel, made for prefill; it often wins where many query
            heads share a KV head. The first use builds it where it is not prebuilt.

    Raises:
        UnsupportedError: FlashInfer is absent, or has no kernel for the heads.
        ConfigError, DTypeError, ShapeError, DeviceError: an argument is not as described.
    """

    def __init__(
        self,
        *,
        batch: int,
        pages: int,
        page_size: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_table: Tensor,
        layout: str = "NHD",
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        use_cuda_graph: bool = True,
        tensor_cores: bool = False,
    ) -> None:
        _check_numbers(batch, pages, page_size, query_heads, kv_heads, window, softcap, layout)
        _check_kernel(query_heads // kv_heads, head_dim, dtype, tensor_cores)
        _check_table(block_table, batch, torch.device(device))
        reason = absent()
        if reason is not None:
            raise UnsupportedError(f"{_OP}: {reason}")
        inner = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
        self._shapes = {"q": (batch, query_heads, head_dim), "cache": (pages, *inner, head_dim)}
        self._page_size = page_size
        self._dtype = dtype
        self._block_table = block_table
        self._layout_of_plan = (query_heads, kv_heads, head_dim, page_size)
        self._options: dict[str, Any] = {
            "sm_scale": head_dim**-0.5 if scale is None else scale,
            "window_left": window_left(window),
            "logits_soft_cap": softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        form = (dtype, query_heads // kv_heads, head_dim, window > 0, softcap > 0, tensor_cores)
        self._kernel = (_OP, block_table.device, *form)
        self._planned = False
        self._copied = torch.cuda.Event()
        sizes = {"indptr": batch + 1, "indices": block_table.numel(), "last_page_len": batch}
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(
                size, dtype=torch.int32, device=block_table.device
            )
            for name, size in sizes.items()
        }
        self._wrapper = module("decode").BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=block_table.device),
            layout,
            use_cuda_graph=use_cuda_graph,
            use_tensor_cores=tensor_cores,
            **(buffers if use_cuda_graph else {}),
        )

    def plan(self, seq_lens_host: Sequence[int] | Tensor) -> None:
        """Schedule a step for these KV lengths (the new token's included); runs on the host.

        Args:
            seq_lens_host: ``batch`` lengths in tokens, numbers or a CPU tensor; 0: an empty
                request, whose row FlashInfer's kernel fills with zeros.

        Raises:
            PositionError: a length is negative or beyond the request's row of the block table.
            ShapeError: not one length for each request.
            DeviceError: the lengths are a CUDA tensor; reading it would synchronise.
            UnsupportedError: a CUDA graph is being captured.
            BuildError: FlashInfer could not build or load its kernel.
        """
        op = f"{_OP}.plan"
        if is_capturing():
            raise UnsupportedError(
                f"{op}: it runs on the host and cannot be captured; call it before the capture and "
                "before each replay"
            )
        if isinstance(seq_lens_host, Tensor):
            if seq_lens_host.device.type != "cpu":
                raise DeviceError(
                    f"{op}: seq_lens_host is on {seq_lens_host.device}; keep the lengths on the "
                    "host, where the plan is made."
                )
            lengths: list[int] = seq_lens_host.tolist()
        else:
            lengths = [int(n) for n in seq_lens_host]
        requests = self._block_table.shape[0]
        if len(lengths) != requests:
            raise ShapeError(
                f"{op}: {len(lengths)} lengths; accepted: one for each of {requests} requests."
            )
        max_pages = self._block_table.shape[1]
        pages = plan_pages(op, lengths, max_pages, self._page_size)
        device = self._block_table.device
        # FlashInfer stages its schedule in one pinned buffer: the last plan's copy must be over.
        self._copied.synchronize()
        first = torch.arange(0, requests * max_pages, max_pages) - pages.indptr[:-1]
        where = torch.repeat_interleave(first, pages.indptr.diff())
        where += torch.arange(where.numel())
        indices = self._block_table.flatten()[where.to(device, non_blocking=True)]
        call(
            (*self._kernel, "plan"),
            self._wrapper.plan,
            pages.indptr,
            indices,
            pages.last_page_len,
            *self._layout_of_plan,
            **self._options,
        )
        self._copied.record(torch.cuda.current_stream(device))
        self._planned = True

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None) -> Tensor:
        """Attention of one query a request over its pages, by the last plan; can be captured.

        Args:
            q: (batch, query_heads, head_dim).
            k_cache, v_cache: (pages, page_size, kv_heads, head_dim) for layout "NHD", (pages,
                kv_heads, page_size, head_dim) for "HND"; equal strides.
            out: as ``q``, contiguous, to write to; None allocates.

        Returns:
            (batch, query_heads, head_dim), dtype of ``q``.

        Raises:
            ConfigError: ``plan`` was not called yet.
            ShapeError, DTypeError, DeviceError: a tensor is not as described.
            LayoutError: unequal strides of the caches, or rows that are not aligned to 16 bytes.
            BuildError: FlashInfer could not load its kernel.
            KernelMissingError: the first run is inside a graph capture.
        """
        op = f"{_OP}.run"
        if not self._planned:
            raise ConfigError(f"{op}: no plan yet; call plan(lengths) first.")
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        if out is not None:
            tensors["out"] = out
        for name, tensor in tensors.items():
            shape = self._shapes["cache" if name.endswith("cache") else "q"]
            require_shape(op, name, tensor, [shape], "fixed when this object was made")
            require_dtype(op, name, tensor, (self._dtype,))
            refusal = wrong_alignment(name, tensor)
            if refusal is not None:
                raise LayoutError(f"{op}: FlashInfer {refusal.reason}.")
        require_same_device(op, "block_table", self._block_table, **tensors)
        if k_cache.stride() != v_cache.stride() or (out is not None and not out.is_contiguous()):
            raise LayoutError(
                f"{op}: k_cache has strides {tuple(k_cache.stride())}, v_cache "
                f"{tuple(v_cache.stride())}; they must be equal, and out contiguous."
            )
        result: Tensor = call(
            (*self._kernel, "run"), self._wrapper.run, q, (k_cache, v_cache), out=out
        )
        return result


def _check_numbers(
    batch: int,
    pages: int,
    page_size: int,
    query_heads: int,
    kv_heads: int,
    window: int,
    softcap: float,
    layout: str,
) -> None:
    if min(batch, pages, page_size, query_heads, kv_heads) < 1 or query_heads % kv_heads:
        raise ShapeError(
            f"{_OP}: batch={batch}, pages={pages}, page_size={page_size}, "
            f"query_heads={query_heads}, kv_heads={kv_heads}; accepted are at least 1 each, "
            "query_heads a multiple of kv_heads."
        )
    require_choice(_OP, "layout", layout, ("NHD", "HND"))
    if window < 0 or not 0.0 <= softcap < math.inf:
        raise ConfigError(
            f"{_OP}: window={window}, softcap={softcap}; accepted are >= 0 (0: none)."
        )


def _check_kernel(group: int, head_dim: int, dtype: torch.dtype, tensor_cores: bool) -> None:
    if dtype not in HALF_DTYPES:
        raise DTypeError(f"{_OP}: dtype is {dtype}; accepted are bfloat16 and float16.")
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(f"{_OP}: kernels exist for head dims {HEAD_DIMS}, got {head_dim}")
    if not tensor_cores and group not in CUDA_CORE_GROUPS:
        raise UnsupportedError(
            f"{_OP}: the CUDA-core kernel exists for {CUDA_CORE_GROUPS} query heads a KV head, got "
            f"{group}; pass tensor_cores=True"
        )


def _check_table(block_table: Tensor, batch: int, device: torch.device) -> None:
    require_dtype(_OP, "block_table", block_table, (torch.int32,))
    require_dim(_OP, "block_table", block_table, 2, exactly=True)
    if block_table.shape[0] != batch or block_table.shape[1] < 1:
        raise ShapeError(
            f"{_OP}: block_table is {describe(block_table)}; it needs {batch} rows of at least one "
            "page."
        )
    refusal = off_cuda(block_table)
    if refusal is not None:
        raise DeviceError(f"{_OP}: block_table: FlashInfer {refusal.reason}.")
    if device.type != block_table.device.type or device.index not in (
        None,
        block_table.device.index,
    ):
        raise DeviceError(f"{_OP}: block_table is on {block_table.device}, not on {device}.")
