"""RoPE and the append to a paged KV cache in one operation: a decoder layer's step after QKV."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.ops.guards import require_writable
from fusedops.ops.kv_append import append_slots, check_append, write_slots
from fusedops.ops.kv_scale import as_stored, require_positive_scales
from fusedops.ops.op import Op, entry
from fusedops.ops.overlap import overlap, require_apart, require_disjoint
from fusedops.ops.rope_kv import check_rope, require_in_table, rotate_in_place

__all__ = ["rope_append_paged_kv_"]

_NAME = "rope_append_paged_kv_"


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    style: str,
    layout: str,
) -> None:
    check_rope(_NAME, q, k, positions, cos_sin, style)
    cache = (k_cache, v_cache, block_table, request_index, positions, k_scale, v_scale, layout)
    check_append(_NAME, k, v, *cache)
    require_writable(_NAME, "q", q)
    require_writable(_NAME, "k", k)


def _check_apart(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *_options: str,
) -> None:
    # What was checked must still be true when it is used, behind the rotation.
    require_apart(
        _NAME,
        {"k_cache": k_cache, "v_cache": v_cache, "q": q, "k": k},
        {
            "positions": positions,
            "cos_sin": cos_sin,
            "block_table": block_table,
            "request_index": request_index,
            "k_scale": k_scale,
            "v_scale": v_scale,
        },
    )
    require_disjoint(_NAME, "k_cache", k_cache, "v", v)
    require_disjoint(_NAME, "v_cache", v_cache, "v", v)


def _with_own_values(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
    """A copy in the place of a v that shares memory with q or k: it is read behind the rotation.

    Refusing it would not do: torch.compile's inductor drops a caller's own ``clone()``.
    """
    if overlap(k, v) or overlap(q, v):
        v = v.clone()
    return (q, k, v, *rest)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    style: str,
    layout: str,
) -> None:
    rows = positions.clamp(min=0)
    if not q.is_cpu:
        # Each half under its own name, so that a provider that has it serves it.
        torch.ops.fusedops.rope_.default(q, k, rows, cos_sin, style)
        placed = torch.where(positions < cos_sin.shape[0], positions, -1)
        torch.ops.fusedops.append_paged_kv.default(
            k, v, k_cache, v_cache, block_table, request_index, placed, k_scale, v_scale, layout
        )
        return
    # Both look at the values before either writes.
    require_in_table(_NAME, rows, cos_sin)
    slots = append_slots(_NAME, k_cache, block_table, request_index, positions, layout)
    rotate_in_place(q, k, rows, cos_sin, style)
    stored = as_stored(k, v, k_cache, v_cache, k_scale, v_scale)
    write_slots(*stored, slots, layout)


Op(
    "rope_append_paged_kv_(Tensor(a!) q, Tensor(b!) k, Tensor v, Tensor positions, Tensor cos_sin,"
    " Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor block_table, Tensor request_index,"
    " Tensor? k_scale, Tensor? v_scale, str style, str layout) -> ()",
    check=_check,
    check_values=lambda *args: require_positive_scales(_NAME, *args[9:11]),
    check_aliases=_check_apart,
    separate=_with_own_values,
    fake=lambda *_args: None,
    reference=_reference,
)

_OP_ROPE_APPEND_PAGED_KV_ = entry("rope_append_paged_kv_")


def rope_append_paged_kv_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    style: str = "halves",
    layout: str = "NHD",
) -> None:
    """``rope_`` of q and k, then ``append_paged_kv`` of the rotated k and of v.

    Args:
        q: (T, Hq, D), rotated in place; may be a view of a fused QKV tensor, as k and v may.
        k: (T, Hkv, D), rotated in place.
        v: (T, Hkv, D), stored as it is before the rotation, also where it shares memory with q or
            k (it is copied then).
        positions: (T,) int32 or int64, each token's position in its request, which is also its row
            of ``cos_sin``; negative: a padding token, which writes nothing into the cache.
        cos_sin: as in ``rope``.
        k_cache, v_cache, block_table, request_index, layout: as in ``append_paged_kv``.
        k_scale, v_scale: as in ``append_paged_kv``; an 8-bit cache gets the key that was rounded to
            the dtype of ``k``, quantised.
        style: as in ``rope``.

    Raises:
        PositionError: as in ``rope`` and ``append_paged_kv``, on the CPU and with nothing written.
            On a GPU a token whose position lies outside ``cos_sin`` or its pages is not stored.
        LayoutError: q or k or a cache shares a memory cell with another one of them or with what
            is only read (but v with q or k); nothing is written.
        ShapeError, DTypeError, DeviceError, LayoutError, ConfigError: an argument is not as
            described; scales for a cache that takes none, or none for an 8-bit one.
        UnsupportedError: an input requires grad while grad mode is on; one that is written was made
            under ``torch.inference_mode()`` and is used outside of it.
    """
    _OP_ROPE_APPEND_PAGED_KV_(
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        block_table,
        request_index,
        k_scale,
        v_scale,
        style,
        layout,
    )
