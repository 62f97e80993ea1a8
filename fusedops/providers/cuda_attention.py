"""``paged_attention`` of decode steps by csrc/attention_decode.cu: one query a request.

A cluster of blocks has a request and up to 8 query heads of one KV head (4 in float32). How many
blocks follows from shapes alone, so that a call can be captured; how they share the keys follows
from the lengths on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import VECTOR_BYTES, Gpu, Launch, View, ceil_div
from fusedops.providers.cuda_reduce_ops import KERNEL_DTYPES
from fusedops.providers.cuda_sinks import Served, first_result, float32_bits, given_stride

__all__ = [
    "HEAD_DIMS",
    "PAGED_ATTENTION",
    "UNIT",
    "WARPS",
    "blocks_an_sm",
    "heads_a_cluster",
    "plan_paged_attention",
]

HEAD_DIMS = (64, 96, 128, 256)

UNIT = 16
"""Keys that a warp attends at a time; ``kUnit`` of csrc/include/decode_split.cuh."""

WARPS = 4
"""Warps a block; ``kAttentionWarps`` of csrc/include/attention_combine.cuh."""

_SOURCE = "attention_decode.cu"

_ELEMENTS = {**KERNEL_DTYPES, torch.float8_e4m3fn: "__nv_fp8_e4m3"}

_CLUSTERS = (16, 8, 4, 2)
_PORTABLE_CLUSTER = 8
_LARGE_CLUSTER_ARCHES = ("sm_90a", "sm_100a")

_USABLE = 15 / 16
"""Share of the SMs that clusters surely get: each lies within a group of them, of unequal sizes."""

_AHEAD_BYTES = 16 << 20
"""Keys and values brought into the L2 before the kernel ahead has finished; a third of an H200's,
as the weights of the products around have no use for it."""

_MOST_UNITS_AHEAD = 8

_LARGEST_GRID = 2**31 - 1
_LARGEST_GRID_Y = 65535
_LARGEST_CAPACITY = 2**31 - UNIT
_LARGEST_WINDOW = 2**31 - 1

_PARAMETERS = (
    *["pointer"] * 8,
    *["int32"] * 7,
    *["uint32"] * 2,
    *["int64"] * 13,
)


def heads_a_cluster(dtype: torch.dtype) -> int:
    """Query heads that one warp has; ``Warp::kHeads``."""
    return 4 if dtype is torch.float32 else 8


def blocks_an_sm(dtype: torch.dtype, element: torch.dtype, head_dim: int) -> int:
    """Blocks whose registers an SM has room for; ``Warp::kBlocks``."""
    if dtype is not torch.float32 and (
        head_dim <= 64 or (element.itemsize == 1 and head_dim < 256)
    ):
        return 4
    return 3 if head_dim <= 128 else 2


def _require_served(views: Sequence[Any]) -> None:
    """Raise UnsupportedError unless there is a kernel for these heads."""
    q, k_cache, v_cache, _, _, query_start = views[:6]
    if query_start is not None:
        raise UnsupportedError("serves decode steps, one query a request: got query_start")
    if q.shape[2] not in HEAD_DIMS:
        raise UnsupportedError(f"has kernels for head dims {HEAD_DIMS}, got {q.shape[2]}")
    for name, view in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if view.strides[-1] != 1:
            raise UnsupportedError(
                f"reads heads whose elements lie side by side, got {name} with strides "
                f"{view.strides}"
            )


def _blocks_a_cluster(clusters: int, most_units: int, blocks: int, gpu: Gpu) -> int:
    """The most that all run at once and find keys; 1 where there are enough clusters anyway."""
    if not gpu.has_clusters:
        return 1
    largest = _CLUSTERS[0] if gpu.arch in _LARGE_CLUSTER_ARCHES else _PORTABLE_CLUSTER
    at_once = int(blocks * gpu.sms * _USABLE)
    for size in _CLUSTERS:
        if size <= largest and clusters * size <= at_once and WARPS * size <= most_units:
            return size
    return 1


def _aligned_bytes(cache: View) -> int:
    """The largest power of two up to a vector's size that divides every head's address."""
    steps = [cache.aligned_bytes, *(s * cache.dtype.itemsize for s in cache.strides[:-1])]
    return math.gcd(VECTOR_BYTES, *steps)


def _score_factors(scale: float, softcap: float) -> tuple[int, int]:
    """Factor of a product and the ceiling of a tanh, as float32 bits; scores are powers of two."""
    log2_e = math.log2(math.e)
    factors = (scale / softcap, softcap * log2_e) if softcap else (scale * log2_e, 0.0)
    if max(map(abs, factors)) > torch.finfo(torch.float32).max:
        raise UnsupportedError(
            f"takes score factors that float32 holds, got scale {scale}, softcap {softcap}"
        )
    return float32_bits(factors[0]), float32_bits(factors[1])


def plan_paged_attention(
    views: Sequence[Any],
    gpu: Gpu,
    max_query_len: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    layout: str,
) -> CallPlan:
    """How a decode step attends; ``causal`` hides no key from the newest token.

    Raises:
        UnsupportedError: several queries a request, a head dim, page size or dtype without a
            kernel, heads whose elements do not lie side by side, or more than a grid holds.
    """
    _require_served(views)
    q, k_cache, v_cache, table, lengths, _, k_scale, v_scale = views
    requests, query_heads, head_dim = q.shape
    # Page, slot, head.
    order = (0, 1, 2) if layout == "NHD" else (0, 2, 1)
    pages, page_size, kv_heads = (k_cache.shape[d] for d in order)
    if page_size % UNIT:
        raise UnsupportedError(f"takes pages of a multiple of {UNIT} slots, got {page_size}")
    results = ((q.shape, q.dtype),)
    if requests == 0 or query_heads == 0:
        return CallPlan(results)
    capacity = table.shape[1] * page_size
    group = query_heads // kv_heads
    clusters = kv_heads * ceil_div(group, heads_a_cluster(q.dtype))
    most_units = ceil_div(min(capacity, window + UNIT) if window else capacity, UNIT)
    blocks_each = blocks_an_sm(q.dtype, k_cache.dtype, head_dim)
    cluster = _blocks_a_cluster(requests * clusters, most_units, blocks_each, gpu)
    blocks = (cluster * clusters, requests)
    if blocks[0] > _LARGEST_GRID or blocks[1] > _LARGEST_GRID_Y or capacity > _LARGEST_CAPACITY:
        raise UnsupportedError(
            f"takes up to {_LARGEST_GRID_Y} requests of {_LARGEST_CAPACITY} slots each, got "
            f"{requests} of {capacity}"
        )
    size = k_cache.dtype.itemsize
    unit_bytes = 2 * UNIT * head_dim * size
    ahead = _AHEAD_BYTES // (blocks[0] * blocks[1] * WARPS * unit_bytes)
    aligned = min(_aligned_bytes(k_cache), _aligned_bytes(v_cache))
    options = f"{head_dim}, {aligned}, {str(softcap > 0).lower()}"
    element = _ELEMENTS[k_cache.dtype]
    if q.dtype is torch.float32:
        warp = f"fusedops::FmaWarp<{element}, {options}>"
    else:
        warp = f"fusedops::MmaWarp<{KERNEL_DTYPES[q.dtype]}, {element}, {options}>"
    kernel = f"fusedops::attention_decode<{warp}, {cluster}>"
    constants = (
        *(kv_heads, group, pages, page_size // UNIT, capacity, min(window, _LARGEST_WINDOW)),
        max(1, min(ahead, _MOST_UNITS_AHEAD)),
        *_score_factors(scale, softcap),
        *q.strides[:2],
        *(cache.strides[d] * size for cache in (k_cache, v_cache) for d in order),
        *table.strides,
        *lengths.strides,
        given_stride(k_scale),
        given_stride(v_scale),
    )
    # A cache without codes has no scales, and its kernel reads none.
    scales = (0, 0) if k_scale is None else (6, 7)
    launch = Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _PARAMETERS,
        (0, 1, 2, 3, 4, *scales, 8),
        constants,
        blocks,
        threads=32 * WARPS,
        cluster=cluster,
    )
    return CallPlan(results, (launch,))


def _split(*args: Any) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """The tensors of a call, then its options: the schema has them last."""
    return args[:8], args[8:]


PAGED_ATTENTION = Served(CudaCall(plan_paged_attention), _split, first_result)
"""``fusedops::paged_attention``."""
