"""``rope``, ``rope_``, ``append_paged_kv`` and both in one, by the one kernel of rope_append.cu.

An 8-bit cache is a sink with given scales: one, or one for each KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import THREADS, VECTOR_BYTES, Gpu, Launch, View, ceil_div
from fusedops.providers.cuda_reduce_ops import KERNEL_DTYPES
from fusedops.providers.cuda_sinks import FORMATS, Served, Sink, given_stride, sink_of

__all__ = [
    "APPEND",
    "ROPE",
    "ROPE_",
    "ROPE_APPEND",
    "plan_append",
    "plan_rope",
    "plan_rope_",
    "plan_rope_append",
]

_SOURCE = "rope_append.cu"
_LARGEST_GRID = 2**31 - 1
_LARGEST_GRID_Y = 65535

_FORMAT_OF = {dtype: name for name, (_, dtype) in FORMATS.items()}

_PARAMETERS = (
    *["pointer"] * 13,
    *["int32"] * 5,
    *("int64", "int64", "int32", "int64", "int64"),
    *["int64"] * (5 * 3 + 2 * 4 + 8),
)


def _width(heads: Sequence[View], sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Elements that move at once: they must lie side by side, and every size and stride fit."""
    width = VECTOR_BYTES // dtype.itemsize
    if any(view.strides[-1] != 1 for view in heads):
        return 1
    numbers = [*sizes, *(stride for view in heads for stride in view.strides[:-1])]
    aligned = min(view.aligned_bytes // view.dtype.itemsize for view in heads)
    while width > 1 and (aligned < width or any(n % width for n in numbers)):
        width //= 2
    return width


def _cache_sink(caches: tuple[View, View] | None) -> Sink:
    """How both caches store elements: as they are, or 8 bits with given scales."""
    name = None if caches is None else _FORMAT_OF.get(caches[0].dtype)
    return sink_of(name, None, True)


def _by_slot(cache: View, layout: str) -> View:
    """A cache as (pages, page_size, heads, head dim), whatever its layout."""
    if layout == "NHD":
        return cache
    order = (0, 2, 1, 3)
    shape = tuple(cache.shape[d] for d in order)
    strides = tuple(cache.strides[d] for d in order)
    return View(shape, strides, cache.dtype, cache.aligned_bytes)


def _contiguous(x: View) -> View:
    tokens, heads, head_dim = x.shape
    return View((tokens, heads, head_dim), (heads * head_dim, head_dim, 1), x.dtype)


def _launch(
    q: View | None,
    k: View,
    v: View | None,
    positions: View,
    cos_sin: View | None,
    outputs: tuple[View, View] | None,
    caches: tuple[View, View] | None,
    table: View | None,
    requests: View | None,
    scales: tuple[View | None, View | None],
    tensors: tuple[int, ...],
    *,
    is_interleaved: bool,
    is_in_place: bool,
) -> Launch | None:
    """The launch for what is given; None where there is nothing to do."""
    tokens, k_heads, head_dim = k.shape
    q_heads = 0 if q is None else q.shape[1]
    rows, rotary_dim = (0, 0) if cos_sin is None else cos_sin.shape
    moved = [view for view in (q, k, v, *(outputs or ()), *(caches or ())) if view is not None]
    width = _width(moved, (rotary_dim // 2, head_dim - rotary_dim, head_dim), k.dtype)
    per_turned = (rotary_dim // 2 + head_dim - rotary_dim) // width
    items = (q_heads + k_heads) * per_turned
    items += 0 if caches is None else k_heads * (head_dim // width)
    if tokens == 0 or items == 0 or (table is not None and 0 in table.shape and cos_sin is None):
        return None
    blocks = (tokens, ceil_div(items, THREADS))
    if tokens > _LARGEST_GRID or blocks[1] > _LARGEST_GRID_Y:
        raise UnsupportedError(
            f"takes up to {_LARGEST_GRID} tokens of {_LARGEST_GRID_Y * THREADS} packs of elements, "
            f"got {tokens} of {items}"
        )
    flags = (is_interleaved, cos_sin is not None, caches is not None, is_in_place)
    words = ", ".join(str(flag).lower() for flag in flags)
    sink = _cache_sink(caches).name
    kernel = f"fusedops::rope_append<{KERNEL_DTYPES[k.dtype]}, {width}, {words}, {sink}>"
    none = (0, 0, 0, 0)
    k_out, v_out = (view.strides for view in caches) if caches else (none, none)
    q_to, k_to = (view.strides for view in outputs) if outputs else (none[:3], none[:3])
    pages, page_size = caches[0].shape[:2] if caches else (0, 1)
    constants = (
        *(q_heads, k_heads, head_dim, rotary_dim, int(positions.dtype == torch.int64)),
        *(rows, pages, page_size),
        *((0, 0) if table is None else table.shape),
        *(none[:3] if q is None else q.strides),
        *k.strides,
        *(none[:3] if v is None else v.strides),
        *q_to,
        *k_to,
        *k_out,
        *v_out,
        positions.strides[0],
        *((0, 0) if cos_sin is None else cos_sin.strides),
        *((0, 0) if table is None else table.strides),
        0 if requests is None else requests.strides[0],
        *(given_stride(scale) for scale in scales),
    )
    program = CudaProgram(_SOURCE, (kernel,))
    return Launch(program, kernel, _PARAMETERS, tensors, constants, blocks)


def _plan(
    launch: Launch | None, results: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
) -> CallPlan:
    return CallPlan(results, () if launch is None else (launch,))


def plan_rope(views: Sequence[View], gpu: Gpu, style: str) -> CallPlan:
    """How q and k are rotated into new tensors.

    Raises:
        UnsupportedError: more tokens or heads than a grid has blocks.
    """
    q, k = views[:2]
    launch = _rotation(views, (_contiguous(q), _contiguous(k)), (4, 5), style)
    return _plan(launch, ((q.shape, q.dtype), (k.shape, k.dtype)))


def plan_rope_(views: Sequence[View], gpu: Gpu, style: str) -> CallPlan:
    """How q and k are rotated in place; see ``plan_rope``."""
    q, k = views[:2]
    return _plan(_rotation(views, (q, k), (0, 1), style))


def _rotation(
    views: Sequence[View], outputs: tuple[View, View], places: tuple[int, int], style: str
) -> Launch | None:
    q, k, positions, cos_sin = views
    return _launch(
        *(q, k, None, positions, cos_sin, outputs, None, None, None, (None, None)),
        # The kernel asks for no values, caches, table, requests or scales in such a call.
        (0, 1, 1, 2, 3, *places, 0, 0, 2, 2, 3, 3),
        is_interleaved=style == "interleaved",
        is_in_place=places == (0, 1),
    )


def plan_append(views: Sequence[Any], gpu: Gpu, layout: str) -> CallPlan:
    """How new keys and values get into the cache; the two scales may be None. See ``plan_rope``."""
    k, v, k_cache, v_cache, table, requests, positions, *scales = views
    launch = _launch(
        *(None, k, v, positions, None, None),
        (_by_slot(k_cache, layout), _by_slot(v_cache, layout)),
        table,
        requests,
        (scales[0], scales[1]),
        (0, 0, 1, 6, 0, 0, 0, 2, 3, 4, 5, 7, 8),
        is_interleaved=False,
        is_in_place=False,
    )
    return _plan(launch)


def plan_rope_append(views: Sequence[Any], gpu: Gpu, style: str, layout: str) -> CallPlan:
    """How q and k are rotated in place and k and v stored; see ``plan_append``."""
    q, k, v, positions, cos_sin, k_cache, v_cache, table, requests, *scales = views
    launch = _launch(
        *(q, k, v, positions, cos_sin, (q, k)),
        (_by_slot(k_cache, layout), _by_slot(v_cache, layout)),
        table,
        requests,
        (scales[0], scales[1]),
        (0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10),
        is_interleaved=style == "interleaved",
        is_in_place=True,
    )
    return _plan(launch)


def _split(*args: Tensor | str | None) -> tuple[tuple[Tensor | None, ...], tuple[str, ...]]:
    """The tensors of a call, then its options: the schemas have them last."""
    tensors = tuple(arg for arg in args if not isinstance(arg, str))
    return tensors, tuple(arg for arg in args if isinstance(arg, str))


def _nothing(results: tuple[Tensor, ...], options: tuple[str, ...]) -> None:
    """An operation that writes into its arguments."""


ROPE = Served(CudaCall(plan_rope), _split, lambda results, _: results)
"""``fusedops::rope``."""

ROPE_ = Served(CudaCall(plan_rope_), _split, _nothing)
"""``fusedops::rope_``."""

APPEND = Served(CudaCall(plan_append), _split, _nothing)
"""``fusedops::append_paged_kv``."""

ROPE_APPEND = Served(CudaCall(plan_rope_append), _split, _nothing)
"""``fusedops::rope_append_paged_kv_``."""
