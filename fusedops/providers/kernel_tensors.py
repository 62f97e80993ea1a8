"""Tensors as the CuTe DSL kernels take them: matrices with columns of stride 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.config.elements import is_block_scaled
from fusedops.epilogue.base import Axis
from fusedops.errors import LayoutError
from fusedops.problem import GemmSpec
from fusedops.weight import GroupedFormat

__all__ = ["as_bytes", "loaded", "nothing", "operands_read", "written"]

_BYTE_DTYPES = (torch.float8_e4m3fn, torch.int8)
_BULK_BYTES = 16
_PITCH_ELEMENTS = 16
"""Row pitches of our choice are multiples of this: of 16 bytes in every dtype."""


def nothing(spec: GemmSpec, x: Tensor, out: Sequence[Tensor] | None) -> list[Tensor]:
    """The results where M or N is 0: row statistics of no columns are 0."""
    results = spec.allocate(x) if out is None else list(out)
    for result in results:
        result.zero_()
    return results


def unit_stride(matrix: Tensor) -> Tensor:
    """``matrix`` with columns of stride 1: a view, or a copy of one whose columns lie apart.

    Strides of dimensions of size 1 are free; kernels take them as those of a dense matrix.
    """
    rows, columns = matrix.shape
    if columns > 1 and matrix.stride(1) != 1:
        return matrix.contiguous()
    if rows > 1 and columns > 1:
        return matrix
    pitch = matrix.stride(0) if rows > 1 else -(-columns // _PITCH_ELEMENTS) * _PITCH_ELEMENTS
    return matrix.as_strided((rows, columns), (pitch, 1))


def operands_read(spec: GemmSpec, operands: Sequence[Tensor | None], m: int) -> list[Tensor]:
    """The operands that are given, flat.

    But those of the result's shape as (m, columns), and what has a row for each part or group of
    all M as such rows, which keep their pitch. Scales a block are matrices too; those of x are
    loaded in bulk, and so are scales and zero points of groups, (groups, N).
    """
    pairs = list(zip(spec.operands, operands, strict=True))
    scales: list[Tensor] = []
    if is_block_scaled(spec):
        x_scale, w_scale = (given for _, given in pairs[:2] if given is not None)
        scales, pairs = [_loaded_anywhere(x_scale), unit_stride(w_scale)], pairs[2:]
    elif isinstance(spec.weight, GroupedFormat) and spec.weight.layout != "rows":
        count = len(spec.weight.operands())
        given = (tensor for _, tensor in pairs[:count] if tensor is not None)
        scales, pairs = [_of_groups(spec.weight, tensor) for tensor in given], pairs[count:]
    return scales + [
        _operand_read(operand.axis, tensor, m) for operand, tensor in pairs if tensor is not None
    ]


def _of_groups(weight: GroupedFormat, tensor: Tensor) -> Tensor:
    matrix = tensor.reshape(weight.groups, weight.n)
    return _loaded_anywhere(matrix) if weight.group else unit_stride(matrix)


def _operand_read(axis: Axis, tensor: Tensor, m: int) -> Tensor:
    if axis == "mn":
        return unit_stride(tensor.reshape(m, -1))
    if axis in ("parts_m", "groups_m"):
        return unit_stride(tensor)
    flat = tensor.reshape(-1).contiguous()
    # Operands along K are loaded 16 bytes at a time; the caching allocator aligns what is new.
    return flat.clone() if axis == "k" and flat.data_ptr() % 16 else flat


def loaded(matrix: Tensor, align_bytes: int) -> Tensor:
    """x or w for a kernel compiled for ``align_bytes``.

    ``reshape`` of leading dimensions that are no view copies to dense rows, which may be less
    aligned than the rows it came from.
    """
    view = unit_stride(matrix)
    if view.stride(0) * view.itemsize % align_bytes == 0:
        return view
    rows, columns = view.shape
    pitch = -(-columns // _PITCH_ELEMENTS) * _PITCH_ELEMENTS
    return view.new_empty((rows, pitch))[:, :columns].copy_(view)


def _loaded_anywhere(matrix: Tensor) -> Tensor:
    """``matrix`` with address and row pitch for bulk copies."""
    view = loaded(matrix, _BULK_BYTES)
    # A new tensor is aligned, and as dense as the pitch allows.
    return loaded(view.clone(), _BULK_BYTES) if view.data_ptr() % _BULK_BYTES else view


def as_bytes(tensor: Tensor) -> Tensor:
    """``tensor``, one of an 8-bit dtype as bytes: not every release of torch hands e4m3 out."""
    return tensor.view(torch.uint8) if tensor.dtype in _BYTE_DTYPES else tensor


def written(result: Tensor, m: int) -> Tensor:
    """A result as (rows, columns), a view of the same memory; 8-bit ones as bytes."""
    stored = as_bytes(result)
    rows = stored if stored.dim() == 2 else stored.view(m, stored.shape[-1])
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise LayoutError(
            f"gemm: a result of shape {tuple(result.shape)} has strides {result.stride()}; kernels "
            "write rows of stride 1. Change the layout that ExtraOutput.allocate gives."
        )
    return unit_stride(rows)
