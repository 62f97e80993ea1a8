"""Rotary position embedding. ``append_paged_kv``, the step after it, can be imported here too."""

from __future__ import annotations

from typing import NamedTuple

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
from fusedops.errors import ShapeError
from fusedops.ops.guards import (
    INDEX_DTYPES,
    empty_contiguous,
    require_per_token,
    require_tokens,
    require_within,
    require_writable,
)
from fusedops.ops.kv_append import append_paged_kv
from fusedops.ops.op import Op, entry
from fusedops.ops.overlap import require_apart

__all__ = [
    "ROPE_STYLES",
    "append_paged_kv",
    "check_rope",
    "require_in_table",
    "rope",
    "rope_",
    "rotate_in_place",
]

ROPE_STYLES = ("halves", "interleaved")
"""halves: element i rotates with i + R/2 (Llama, NeoX). interleaved: 2i with 2i + 1 (GPT-J)."""


def check_rope(
    op: str, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str
) -> None:
    """Check everything but values; ``op`` is named in errors."""
    require_tokens(op, "q", q, "k", k)
    if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        accepted = [(q.shape[0], k.shape[1], q.shape[2])]
        require_shape(op, "k", k, accepted, "the tokens and head dim of q")
    if positions.dtype not in INDEX_DTYPES:
        require_dtype(op, "positions", positions, INDEX_DTYPES)
    require_per_token(op, "positions", positions, q)
    if cos_sin.dtype is not torch.float32:
        require_dtype(op, "cos_sin", cos_sin, (torch.float32,))
    if cos_sin.dim() != 2:
        require_dim(op, "cos_sin", cos_sin, 2, exactly=True)
    rows, rotary_dim = cos_sin.shape
    if rows < 1 or rotary_dim < 2 or rotary_dim % 2 or rotary_dim > q.shape[2]:
        raise ShapeError(
            f"{op}: cos_sin is {describe(cos_sin)}; it needs a row for each position and an even "
            f"number of columns from 2 to the head dim {q.shape[2]}. Make it with rope_table()."
        )
    if cos_sin.device != q.device:
        require_same_device(op, "q", q, cos_sin=cos_sin)
    if style not in ROPE_STYLES:
        require_choice(op, "style", style, ROPE_STYLES)


class _Turn(NamedTuple):
    """The angles of T tokens, laid out to multiply heads viewed as (T, H, *pair_shape).

    Attributes:
        cos: (T, 1, ...) float32, broadcast over the two elements of a pair.
        sin: (T, 1, *pair_shape) float32, negative for the first element of a pair.
        pair_shape: (2, R/2) for halves, (R/2, 2) for interleaved.
        pair_dim: the dimension of that view along which a pair lies: 2 or 3.
        rotary_dim: R.
        inside: (T, 1, 1) bool, True where the position is in the table; None where all are.
    """

    cos: Tensor
    sin: Tensor
    pair_shape: tuple[int, int]
    pair_dim: int
    rotary_dim: int
    inside: Tensor | None


def _turn(positions: Tensor, cos_sin: Tensor, style: str, guarded: bool) -> _Turn:
    """``guarded``: nobody has looked at the positions, so some may be outside the table."""
    inside = None
    if guarded:
        last = cos_sin.shape[0] - 1
        inside = ((positions >= 0) & (positions <= last))[:, None, None]
        positions = positions.clamp(0, last)
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    rows = cos_sin.index_select(0, positions)
    if style == "halves":
        pair_shape, pair_dim = (2, half), 2
        cos, sin = rows.view(-1, 1, 2, half).chunk(2, 2)
    else:
        pair_shape, pair_dim = (half, 2), 3
        cos, sin = rows.view(-1, 1, rotary_dim, 1).chunk(2, 2)
    sin = torch.cat((-sin, sin), pair_dim)
    return _Turn(cos, sin, pair_shape, pair_dim, rotary_dim, inside)


def _rotated(x: Tensor, turn: _Turn) -> Tensor:
    """(T, H, R) float32: the rotary part of ``x``, turned."""
    if turn.rotary_dim < x.shape[2]:
        x = x.narrow(2, 0, turn.rotary_dim)
    pairs = (x if x.dtype is torch.float32 else x.float()).view(*x.shape[:2], *turn.pair_shape)
    swapped = pairs.flip(turn.pair_dim)
    return (pairs * turn.cos).addcmul_(swapped, turn.sin).flatten(2)


def _rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str
) -> tuple[Tensor, Tensor]:
    if q.is_cpu and q.dtype is torch.float32:
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
        rotate_in_place(q, k, positions, cos_sin, style)
        return q, k
    turn = _turn(positions, cos_sin, style, guarded=not q.is_cpu)
    return _rope_one(q, turn), _rope_one(k, turn)


def _rope_one(x: Tensor, turn: _Turn) -> Tensor:
    out = _rotated(x, turn)
    if x.dtype is not torch.float32:
        out = out.to(x.dtype)
    if turn.rotary_dim < x.shape[2]:
        out = torch.cat((out, x.narrow(2, turn.rotary_dim, x.shape[2] - turn.rotary_dim)), 2)
    if turn.inside is not None:
        out = torch.where(turn.inside, out, 0.0)
    return out.contiguous()


def rotate_in_place(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str) -> None:
    """``rope_`` in torch, of arguments that were checked."""
    if q.is_cpu and q.dtype is torch.float32:
        rows = cos_sin.index_select(0, positions)[:, None]
        joint = _joined(q, k)
        for heads in (q, k) if joint is None else (joint,):
            _turn_in_place(heads, rows, style)
        return
    turn = _turn(positions, cos_sin, style, guarded=not q.is_cpu)
    _rope_one_(q, turn)
    _rope_one_(k, turn)


def _rope_one_(x: Tensor, turn: _Turn) -> None:
    target = x.narrow(2, 0, turn.rotary_dim)
    out = _rotated(x, turn)
    target.copy_(out if turn.inside is None else torch.where(turn.inside, out, target))


def _joined(q: Tensor, k: Tensor) -> Tensor | None:
    """(T, Hq + Hkv, D): both as one view, where k's heads follow q's in memory (a QKV product)."""
    if q.stride() != k.stride() or q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    if k.storage_offset() != q.storage_offset() + q.shape[1] * q.stride(1):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def _turn_in_place(heads: Tensor, rows: Tensor, style: str) -> None:
    """Rotate float32 heads (T, H, D) by the table's rows (T, 1, R) of their positions."""
    rotary_dim = rows.shape[2]
    half = rotary_dim // 2
    cos, sin = rows.narrow(2, 0, half), rows.narrow(2, half, half)
    if style == "halves":
        first, second = heads.narrow(2, 0, half), heads.narrow(2, half, half)
    else:
        first, second = heads[:, :, 0:rotary_dim:2], heads[:, :, 1:rotary_dim:2]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).add_(turned)


def require_in_table(op: str, positions: Tensor, cos_sin: Tensor) -> None:
    """Raise PositionError unless every position is a row of the table; for CPU tensors."""
    require_within(op, "positions", positions, 0, cos_sin.shape[0], "the rows of cos_sin")


def _check_rope_in_place(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str
) -> None:
    check_rope("rope_", q, k, positions, cos_sin, style)
    require_writable("rope_", "q", q)
    require_writable("rope_", "k", k)


def _check_apart(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, style: str) -> None:
    require_apart("rope_", {"q": q, "k": k}, {"positions": positions, "cos_sin": cos_sin})


Op(
    "rope(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, str style) -> (Tensor, Tensor)",
    check=lambda *args: check_rope("rope", *args),
    check_values=lambda q, k, positions, cos_sin, style: require_in_table(
        "rope", positions, cos_sin
    ),
    fake=lambda q, k, *_rest: (empty_contiguous(q), empty_contiguous(k)),
    reference=_rope,
)
Op(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin, str style) -> ()",
    check=_check_rope_in_place,
    check_values=lambda q, k, positions, cos_sin, style: require_in_table(
        "rope_", positions, cos_sin
    ),
    check_aliases=_check_apart,
    fake=lambda *_args: None,
    reference=rotate_in_place,
)

_OP_ROPE = entry("rope")
_OP_ROPE_ = entry("rope_")


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, style: str = "halves"
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys.

    The rotation is computed in float32 from float32 cosines and sines, then rounded once. (Models
    in eager mode round the cosines and sines, both products and the sum to their own dtype; in
    bfloat16 that is up to a few ulp away.)

    Args:
        q: (T, Hq, D), float32, bfloat16 or float16, any strides.
        k: (T, Hkv, D), dtype of ``q``.
        positions: (T,), int32 or int64, the token's position in its sequence.
        cos_sin: (P, R) float32, row p = [cos(R/2) | sin(R/2)] of position p; see ``rope_table``.
            R <= D: elements R.. of each head pass through unchanged.
        style: "halves" rotates element i with i + R/2 (Llama, GPT-NeoX), "interleaved" rotates
            2i with 2i + 1 (GPT-J).

    Returns:
        (q', k'), contiguous, of the shapes and dtype of q and k.

    Raises:
        PositionError: a position lies outside [0, P), on the CPU. On a GPU, where looking would
            synchronise, such a token gets zeros and nothing is read out of bounds.
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    q_out, k_out = _OP_ROPE(q, k, positions, cos_sin, style)
    return q_out, k_out


def rope_(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, style: str = "halves"
) -> None:
    """In-place ``rope``: q and k may be views of one fused QKV tensor; only they are written.

    They must not share an element.

    Args:
        q, k, positions, cos_sin, style: as in ``rope``.

    Raises:
        PositionError: as in ``rope``, with nothing written. On a GPU such a token is left as it is.
        LayoutError: q or k repeats a memory cell (an expanded tensor), or shares one with the other
            or with what is read.
        ShapeError, DTypeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on; q or k was made under
            ``torch.inference_mode()`` and is used outside of it.
    """
    _OP_ROPE_(q, k, positions, cos_sin, style)
