"""Embedding lookup that never reads outside its table."""

from __future__ import annotations

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

__all__ = ["embedding"]


def _check(token_ids: Tensor, weight: Tensor) -> None:
    require_dtype("embedding", "token_ids", token_ids, INDEX_DTYPES)
    require_dtype("embedding", "weight", weight, ACTIVATION_DTYPES)
    require_dim("embedding", "weight", weight, 2, exactly=True)
    if weight.shape[0] == 0:
        raise ShapeError(f"embedding: weight is {describe(weight)}; it needs at least one row.")
    if token_ids.device != weight.device:
        require_same_device("embedding", "weight", weight, token_ids=token_ids)


def _check_values(token_ids: Tensor, weight: Tensor) -> None:
    vocabulary = weight.shape[0]
    require_within("embedding", "token_ids", token_ids, 0, vocabulary, "the rows of weight")


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


Op(
    "embedding(Tensor token_ids, Tensor weight) -> Tensor",
    check=_check,
    check_values=_check_values,
    fake=_fake,
    reference=_reference,
)

_OP_EMBEDDING = entry("embedding")


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
