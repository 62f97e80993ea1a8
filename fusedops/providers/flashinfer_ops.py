"""FlashInfer's norms, gated activations, RoPE and paged append under this project's contracts.

Where FlashInfer rounds elsewhere than the operation promises, or needs the host, it serves only a
call that pins it. Each answer says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fusedops.check import describe
from fusedops.providers.base import SUPPORTED, Support, unsupported
from fusedops.providers.flashinfer_base import (
    call,
    is_capturing,
    module,
    not_ready,
    off_cuda,
    opt_in,
    wrong_alignment,
    wrong_dtype,
    wrong_rows,
)

__all__ = [
    "act_and_mul",
    "append_paged_kv",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "rms_norm",
    "rope",
    "rope_",
    "supports_act_and_mul",
    "supports_append_paged_kv",
    "supports_fused_add_rms_norm",
    "supports_rms_norm",
    "supports_rope",
]

_HEAD_DIMS = (64, 128, 256, 512)
"""Head dims for which its RoPE and append kernels exist (``DISPATCH_HEAD_DIM``)."""

_MAX_FUSED_ADD_COLUMNS = 32768
"""Its fused add keeps a row in shared memory as float32: this is 128 KiB of an SM's 227."""

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_MAX_THREADS = 1024


# Norms


def _wrong_weight(x: Tensor, weight: Tensor, weight_offset: float) -> Support | None:
    if weight.dtype is not x.dtype:
        return unsupported(f"reads the weight in the dtype of x, but weight is {describe(weight)}")
    if weight_offset not in (0.0, 1.0):
        return unsupported(f"adds 0 or 1 to the weight, not weight_offset={weight_offset}")
    return wrong_alignment("weight", weight)


def _norm_key(name: str, x: Tensor, weight_offset: float) -> Hashable:
    # Its CuTe DSL kernels are compiled for a row length and for contiguous or strided rows.
    return name, x.device, x.dtype, x.shape[-1], weight_offset, x.is_contiguous()


def supports_rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool
) -> Support:
    """Whether FlashInfer serves ``rms_norm``: Gemma's order always, Llama's only where pinned.

    In Llama's order its single rounding differs by up to 1.5 eps of the dtype (relative).
    """
    elsewhere = off_cuda(x)
    if elsewhere is not None:
        return elsewhere
    refusal = wrong_dtype("x", x) or _wrong_weight(x, weight, weight_offset)
    refusal = refusal or wrong_rows("x", x)
    if refusal is None and round_before_weight:
        refusal = opt_in("rounds once, after the weight product; the call asks for Llama's order")
    return refusal or not_ready(_norm_key("rms_norm", x, weight_offset), "norm") or SUPPORTED


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool
) -> Tensor:
    """``flashinfer.norm.rmsnorm``, or ``gemma_rmsnorm`` for a weight offset of 1."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    norm = module("norm")
    function = norm.gemma_rmsnorm if weight_offset else norm.rmsnorm
    columns = x.shape[-1]
    key = _norm_key("rms_norm", x, weight_offset)
    call(key, function, x.view(-1, columns), weight, eps, out=out.view(-1, columns))
    return out


def supports_fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> Support:
    """Whether FlashInfer serves a fused add and norm: only where pinned.

    It normalises the float32 sum that it has in registers; the operation, like a model, normalises
    the sum rounded to the dtype. Results differ by up to 2 eps of the dtype (relative) in Gemma's
    order, 2.5 in Llama's; the new residual is the same.
    """
    elsewhere = off_cuda(x)
    if elsewhere is not None:
        return elsewhere
    refusal = wrong_dtype("x", x) or _wrong_weight(x, weight, weight_offset)
    if refusal is None and x.shape[-1] > _MAX_FUSED_ADD_COLUMNS:
        refusal = unsupported(
            f"fuses the add for rows of at most {_MAX_FUSED_ADD_COLUMNS}, got {x.shape[-1]}"
        )
    order = " and rounds after the weight product" if round_before_weight else ""
    refusal = refusal or opt_in(f"normalises the sum before it is rounded{order}")
    refusal = refusal or wrong_rows("x", x) or wrong_rows("residual", residual)
    return refusal or not_ready(_fused_key(x, residual, weight_offset), "norm") or SUPPORTED


def _fused_key(x: Tensor, residual: Tensor, weight_offset: float) -> Hashable:
    return _norm_key("fused_add_rms_norm", x, weight_offset), residual.is_contiguous()


def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> None:
    """``flashinfer.norm.fused_add_rmsnorm``, or its Gemma form, in place as the operation is."""
    if x.numel() == 0:
        return
    norm = module("norm")
    function = norm.gemma_fused_add_rmsnorm if weight_offset else norm.fused_add_rmsnorm
    columns = x.shape[-1]
    rows = (x.view(-1, columns), residual.view(-1, columns))
    call(_fused_key(x, residual, weight_offset), function, *rows, weight, eps)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The in-place kernel on copies of x and residual: FlashInfer has no other form."""
    y = x.clone(memory_format=torch.contiguous_format)
    total = residual.clone(memory_format=torch.contiguous_format)
    fused_add_rms_norm_(y, total, weight, eps, weight_offset, round_before_weight)
    return y, total


# Gated activations


def supports_act_and_mul(x: Tensor, act: str) -> Support:
    """Whether FlashInfer serves ``act_and_mul``: only where pinned (one rounding, not two).

    Results differ by up to 1.5 eps of the dtype (relative).
    """
    elsewhere = off_cuda(x)
    if elsewhere is not None:
        return elsewhere
    refusal = wrong_dtype("x", x)
    if refusal is None and act not in _ACTIVATIONS:
        refusal = unsupported(f"has {', '.join(_ACTIVATIONS)}; the call asks for {act}")
    refusal = refusal or opt_in(
        "rounds once, after the product; the operation rounds the activation first"
    )
    if refusal is None and not x.is_contiguous():
        refusal = unsupported(f"ignores strides, but x has strides {tuple(x.stride())}")
    if refusal is None and x.data_ptr() % 16:
        refusal = unsupported("needs x to start at a multiple of 16 bytes")
    return refusal or not_ready(_act_key(x, act), f"{act}_and_mul") or SUPPORTED


def _act_key(x: Tensor, act: str) -> Hashable:
    return "act_and_mul", x.device, x.dtype, act


def act_and_mul(x: Tensor, act: str) -> Tensor:
    """``flashinfer.activation.silu_and_mul``, ``gelu_and_mul`` or ``gelu_tanh_and_mul``."""
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    function = getattr(module("activation"), f"{act}_and_mul")
    y: Tensor = call(_act_key(x, act), function, x)
    return y


# RoPE


def supports_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str) -> Support:
    """Whether FlashInfer serves ``rope`` and ``rope_``: same float32 table, same one rounding."""
    elsewhere = off_cuda(q)
    if elsewhere is not None:
        return elsewhere
    refusal = wrong_dtype("q", q)
    refusal = refusal or _wrong_rotation(q, k, cos_sin, style)
    refusal = refusal or wrong_alignment("q", q) or wrong_alignment("k", k)
    return refusal or not_ready(_rope_key(q), "rope") or SUPPORTED


def _wrong_rotation(q: Tensor, k: Tensor, cos_sin: Tensor, style: str) -> Support | None:
    head_dim, rotary_dim = q.shape[2], cos_sin.shape[1]
    if style != "halves":
        # The last lane of a row loads 8 sines of which it uses 4.
        return unsupported("reads past the last row of cos_sin in the interleaved style")
    if head_dim not in _HEAD_DIMS:
        return unsupported(f"has kernels for head dims {_HEAD_DIMS}, got {head_dim}")
    lane = max(8, head_dim // 32)
    if rotary_dim % (2 * lane):
        return unsupported(
            f"rotates {lane} elements a lane, so at head dim {head_dim} the rotary dim must be a "
            f"multiple of {2 * lane}; got {rotary_dim}"
        )
    if q.shape[1] == 0 or k.shape[1] == 0:
        return unsupported("needs at least one head of q and of k")
    if not cos_sin.is_contiguous() or cos_sin.data_ptr() % 16:
        return unsupported("needs a contiguous cos_sin that starts at a multiple of 16 bytes")
    if cos_sin.numel() >= 2**31:
        return unsupported(f"counts elements in 32 bits; cos_sin has {cos_sin.numel()}")
    return None


def _rope_key(q: Tensor) -> Hashable:
    return "rope", q.device, q.dtype, q.shape[2]


def _rotated(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q', k', outside); outside (T, 1, 1) is True where the position is not in the table.

    The kernel does not look at positions, so it gets them clamped.
    """
    inside = positions.contiguous().clamp(0, cos_sin.shape[0] - 1)
    q_out, k_out = call(
        _rope_key(q),
        module("rope").apply_rope_with_cos_sin_cache,
        inside,
        q.flatten(1),
        k.flatten(1),
        q.shape[2],
        cos_sin,
        is_neox=True,
    )
    outside = inside != positions
    return q_out.view(q.shape), k_out.view(k.shape), outside[:, None, None]


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str
) -> tuple[Tensor, Tensor]:
    """``flashinfer.rope.apply_rope_with_cos_sin_cache``; rows without a position become zeros."""
    if q.shape[0] == 0:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    q_out, k_out, outside = _rotated(q, k, positions, cos_sin)
    return q_out.masked_fill_(outside, 0.0), k_out.masked_fill_(outside, 0.0)


def rope_(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str) -> None:
    """As ``rope``, copied back; rows without a position stay as they are.

    Its own in-place form would rotate such a row by another position's angles.
    """
    if q.shape[0] == 0:
        return
    q_out, k_out, outside = _rotated(q, k, positions, cos_sin)
    q.copy_(torch.where(outside, q, q_out))
    k.copy_(torch.where(outside, k, k_out))


# Paged append


def supports_append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> Support:
    """Whether FlashInfer serves ``append_paged_kv``: only where pinned, and never in a capture.

    Its kernel writes every token at ``indices[indptr[request] + position / page_size]``: a padding
    row (negative position) would overwrite the previous request's last page, and a page id outside
    the pool any memory. There is no address that it could be given instead, so such tokens are
    dropped beforehand, for which the host has to know whether there are any.
    """
    elsewhere = off_cuda(k)
    if elsewhere is not None:
        return elsewhere
    refusal = wrong_dtype("k", k) or _wrong_cache(k, k_cache, v_cache)
    refusal = refusal or opt_in(
        "writes every token, so padding rows and places outside the table are dropped on the host "
        "first, which synchronises"
    )
    if refusal is None and is_capturing():
        refusal = unsupported("synchronises to drop padding rows, which a capture forbids")
    for name, tensor in {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}.items():
        refusal = refusal or wrong_alignment(name, tensor)
    page_size = k_cache.shape[1 if layout == "NHD" else 2]
    if refusal is None and block_table.numel() * page_size >= 2**31:
        refusal = unsupported("counts slots in 32 bits; block_table has 2^31 or more")
    return refusal or not_ready(_append_key(k), "page") or SUPPORTED


def _wrong_cache(k: Tensor, k_cache: Tensor, v_cache: Tensor) -> Support | None:
    heads, head_dim = k.shape[1:]
    if k_cache.dtype is not k.dtype:
        return unsupported(f"appends without scales, to caches of {k.dtype}, got {k_cache.dtype}")
    if head_dim not in _HEAD_DIMS:
        return unsupported(f"has kernels for head dims {_HEAD_DIMS}, got {head_dim}")
    lanes = head_dim // max(8, head_dim // 32)
    if not 0 < heads * lanes <= _MAX_THREADS:
        return unsupported(
            f"gives {lanes} threads to each KV head of one block, so it takes 1 to "
            f"{_MAX_THREADS // lanes} heads of {head_dim}; got {heads}"
        )
    if k_cache.stride() != v_cache.stride():
        return unsupported(
            f"needs equal strides of both caches, got {tuple(k_cache.stride())} and "
            f"{tuple(v_cache.stride())}"
        )
    return None


def _append_key(k: Tensor) -> Hashable:
    return "append_paged_kv", k.device, k.dtype, k.shape[2]


def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request_index: Tensor,
    positions: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> None:
    """``flashinfer.page.append_paged_kv_cache`` of the tokens that have a place; synchronises.

    Row b of the block table becomes request b's page list of fixed length ``max_pages``.
    """
    requests, max_pages = block_table.shape
    if k.shape[0] == 0 or block_table.numel() == 0:
        return
    page_size = k_cache.shape[1 if layout == "NHD" else 2]
    block = positions.div(page_size, rounding_mode="floor").long()
    request = request_index.long()
    placed = (request >= 0) & (request < requests) & (block >= 0) & (block < max_pages)
    page = block_table[request.clamp(0, requests - 1), block.clamp(0, max_pages - 1)]
    placed &= (page >= 0) & (page < k_cache.shape[0])
    kept = placed.nonzero()[:, 0]
    if kept.numel() == 0:
        return
    if kept.numel() < k.shape[0]:
        k, v, request_index, positions = (t[kept] for t in (k, v, request_index, positions))
    start = torch.arange(0, (requests + 1) * max_pages, max_pages, device=k.device)
    # The last-page lengths only tell the append kernel how many requests there are.
    last_page_len = torch.full((requests,), page_size, device=k.device)
    call(
        _append_key(k),
        module("page").append_paged_kv_cache,
        k,
        v,
        request_index.contiguous(),
        positions.int().contiguous(),
        (k_cache, v_cache),
        block_table.flatten(),
        start.int(),
        last_page_len.int(),
        kv_layout=layout,
    )
