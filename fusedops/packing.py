"""Row packing of paired weights: gate/up and rotation partners, both exactly reversible.

A wgmma accumulator gives one thread the elements (r, c), (r, c+1), (r+8, c), (r+8, c+1) of its tile
(PTX ISA, "Register Fragments for wgmma.mma_async"). Rows that must meet in one thread are therefore
placed 8 apart: the pair then shares a thread with the weight on either side of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.check import require_dim, require_one_dtype, require_same_device, require_tensor
from fusedops.epilogue.nodes import PACK
from fusedops.errors import ShapeError

__all__ = [
    "ROPE_HEAD_DIMS",
    "pack_gate_up",
    "pack_rope",
    "padded_gate_rows",
    "rope_permutation",
    "unpack_gate_up",
    "unpack_rope",
]

ROPE_HEAD_DIMS = (64, 96, 128, 256)
"""Head dimensions whose rotation partners can be packed 8 rows apart."""


def padded_gate_rows(rows: int) -> int:
    """Rows of one half after padding to whole blocks of 8."""
    return -(-rows // PACK) * PACK


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave gate and up rows in blocks of 8.

    Args:
        gate, up: weights (F, K), or biases and per-row scales (F,); same shape, dtype and device.

    Returns:
        (2 * F', K) or (2 * F',) with F' = F rounded up to a multiple of 8; added rows are zero, so
        their gated outputs are zero for every activation with f(0) finite.

    Raises:
        ShapeError: the shapes differ.
        DTypeError: the dtypes differ, or one is no tensor.
        DeviceError: the devices differ.
    """
    require_tensor("pack_gate_up", "gate", gate)
    require_tensor("pack_gate_up", "up", up)
    require_one_dtype("pack_gate_up", gate=gate, up=up)
    require_same_device("pack_gate_up", "gate", gate, up=up)
    if gate.shape != up.shape or gate.dim() not in (1, 2):
        raise ShapeError(
            f"pack_gate_up: gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape, "
            "(F, K) or (F,)."
        )
    rows, *rest = gate.shape
    padded = padded_gate_rows(rows)
    packed = gate.new_zeros((padded // PACK, 2, PACK, *rest))
    for half, source in enumerate((gate, up)):
        whole = rows // PACK
        packed[:whole, half] = source[: whole * PACK].reshape(whole, PACK, *rest)
        if rows > whole * PACK:
            packed[whole, half, : rows - whole * PACK] = source[whole * PACK :]
    return packed.reshape(2 * padded, *rest)


def unpack_gate_up(packed: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The (gate, up) halves of ``rows`` rows each that ``pack_gate_up`` interleaved: two copies.

    Raises:
        ShapeError: ``packed`` cannot hold two halves of that many rows.
        DTypeError: ``packed`` is no tensor.
    """
    require_tensor("unpack_gate_up", "packed", packed)
    require_dim("unpack_gate_up", "packed", packed, 1)
    if packed.shape[0] != 2 * padded_gate_rows(rows):
        raise ShapeError(
            f"unpack_gate_up: {packed.shape[0]} packed rows do not hold two halves of {rows}; "
            f"expected {2 * padded_gate_rows(rows)}."
        )
    halves = packed.unflatten(0, (-1, 2, PACK))
    # clone: with one block of 8 a half is contiguous already, and contiguous() would be a view.
    gate, up = (
        halves[:, half].clone(memory_format=torch.contiguous_format).flatten(0, 1)[:rows]
        for half in range(2)
    )
    return gate, up


def rope_permutation(head_dim: int) -> Tensor:
    """Row order of one head, int64 (head_dim,): packed row p holds row ``order[p]``.

    Partners (i, i + head_dim / 2) land 8 rows apart: blocks of 8 first-half rows alternate with
    blocks of their 8 partners.

    Raises:
        ShapeError: the head dimension is not 64, 96, 128 or 256.
    """
    _require_head_dim(head_dim)
    order = torch.arange(head_dim).reshape(2, head_dim // (2 * PACK), PACK)
    return order.transpose(0, 1).flatten()


def _heads(weight: Tensor, head_dim: int) -> int:
    require_tensor("rope packing", "weight", weight)
    require_dim("rope packing", "weight", weight, 1)
    rows: int = weight.shape[0]
    _require_head_dim(head_dim)
    if rows % head_dim:
        raise ShapeError(f"rope packing: {rows} rows are no multiple of head_dim {head_dim}.")
    return rows // head_dim


def _require_head_dim(head_dim: int) -> None:
    if head_dim not in ROPE_HEAD_DIMS:
        raise ShapeError(f"rope packing: head_dim {head_dim}; accepted are {ROPE_HEAD_DIMS}.")


def pack_rope(weight: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of every head of a Q or K projection by ``rope_permutation``.

    Args:
        weight: (heads * head_dim, K), or a bias (heads * head_dim,). V is left as it is.
    """
    heads = _heads(weight, head_dim)
    order = rope_permutation(head_dim).to(weight.device)
    by_head: Tensor = weight.unflatten(0, (heads, head_dim))
    return by_head[:, order].flatten(0, 1)


def unpack_rope(packed: Tensor, head_dim: int) -> Tensor:
    """The inverse of ``pack_rope``, exact."""
    heads = _heads(packed, head_dim)
    order = rope_permutation(head_dim).to(packed.device)
    by_head: Tensor = packed.unflatten(0, (heads, head_dim))
    return by_head[:, order.argsort()].flatten(0, 1)
