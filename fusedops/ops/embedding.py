"""Embedding lookup that never reads outside its table, with or without the rows' statistics."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_dim,
    require_dtype,
    require_same_device,
)
from fusedops.errors import ShapeError
from fusedops.ops.guards import INDEX_DTYPES, require_within
from fusedops.ops.op import Op, entry

__all__ = ["embedding", "embedding_sumsq"]


def _check(op: str, token_ids: Tensor, weight: Tensor) -> None:
    require_dtype(op, "token_ids", token_ids, INDEX_DTYPES)
    require_dtype(op, "weight", weight, ACTIVATION_DTYPES)
    require_dim(op, "weight", weight, 2, exactly=True)
    if weight.shape[0] == 0:
        raise ShapeError(f"{op}: weight is {describe(weight)}; it needs at least one row.")
    if token_ids.device != weight.device:
        require_same_device(op, "weight", weight, token_ids=token_ids)


def _check_values(op: str, token_ids: Tensor, weight: Tensor) -> None:
    vocabulary = weight.shape[0]
    require_within(op, "token_ids", token_ids, 0, vocabulary, "the rows of weight")


def _fake(token_ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*token_ids.shape, weight.shape[1]))


def _reference(token_ids: Tensor, weight: Tensor) -> Tensor:
    ids = token_ids.reshape(-1)
    shape = (*token_ids.shape, weight.shape[1])
    if weight.is_cpu:
        return weight.index_select(0, ids).view(shape)
    return _guarded(ids, weight).view(shape)


def _guarded(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows by flat ids where nobody has looked at the ids: a row of zeros for one outside."""
    last = weight.shape[0] - 1
    rows = weight.index_select(0, ids.clamp(0, last))
    outside = (ids < 0) | (ids > last)
    return rows.masked_fill_(outside[:, None], 0.0)


def _fake_sumsq(token_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    sumsq = weight.new_empty((1, token_ids.numel()), dtype=torch.float32)
    return _fake(token_ids, weight), sumsq


def _reference_sumsq(token_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = _reference(token_ids, weight)
    wide = rows.view(token_ids.numel(), weight.shape[1]).float()
    return rows, wide.square().sum(1).unsqueeze(0)


Op(
    "embedding(Tensor token_ids, Tensor weight) -> Tensor",
    check=partial(_check, "embedding"),
    check_values=partial(_check_values, "embedding"),
    fake=_fake,
    reference=_reference,
)
Op(
    "embedding_sumsq(Tensor token_ids, Tensor weight) -> (Tensor, Tensor)",
    check=partial(_check, "embedding_sumsq"),
    check_values=partial(_check_values, "embedding_sumsq"),
    fake=_fake_sumsq,
    reference=_reference_sumsq,
)

_OP_EMBEDDING = entry("embedding")
_OP_EMBEDDING_SUMSQ = entry("embedding_sumsq")


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight`` by token id.

    Args:
        token_ids: any shape, int32 or int64.
        weight: (V, H), float32, bfloat16 or float16, V >= 1.

    Returns:
        (*token_ids.shape, H), contiguous, dtype of ``weight``.

    Raises:
        PositionError: a token id lies outside [0, V), on the CPU. On a GPU, where looking would
            synchronise, such an id gives a row of zeros and reads nothing.
        ShapeError, DTypeError, DeviceError: an argument is not as described.
        UnsupportedError: weight requires grad while grad mode is on.
    """
    rows: Tensor = _OP_EMBEDDING(token_ids, weight)
    return rows


def embedding_sumsq(token_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``embedding``, and the sum of squares of each row that it returns.

    The second result is what the first layer's ``gemm(..., prologue="rms_norm(...)")`` takes as its
    operand ``norm_sumsq``, so that the norm behind an embedding needs no pass over the rows of its
    own. They are those of the rows as they are returned: a model that scales its embedding
    afterwards (Gemma) takes a table that holds the scaled rows, rounded as it rounds them.

    Args:
        token_ids: any shape, int32 or int64; M is their number.
        weight: (V, H), float32, bfloat16 or float16, V >= 1.

    Returns:
        (rows, sumsq): rows as ``embedding`` returns them, and (1, M) float32, contiguous, the sums
        of their squares in float32, in the order of ``token_ids`` and in the (parts, M) form of the
        row statistics that epilogues write (``row_stat(sumsq)``).

    Raises:
        PositionError: as ``embedding``, on the CPU. On a GPU a token id outside [0, V) gives a row
            of zeros, whose sum is 0.
        ShapeError, DTypeError, DeviceError: an argument is not as described.
        UnsupportedError: weight requires grad while grad mode is on.
    """
    rows, sumsq = _OP_EMBEDDING_SUMSQ(token_ids, weight)
    return rows, sumsq
