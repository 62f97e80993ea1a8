"""Whether tensors share memory cells, told exactly from their addresses and strides.

Views of one buffer may lie between each other without sharing a cell (q and k of a fused QKV tensor
do), so comparing storages or address ranges would refuse too much. Nothing is read on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from fusedops.check import describe
from fusedops.errors import LayoutError

__all__ = ["overlap", "overlaps_itself", "require_apart", "require_disjoint"]

_CACHED = 4096

Dims = tuple[tuple[int, int], ...]
"""(count, stride in bytes) of each dimension, the largest stride first."""


class _Cells(NamedTuple):
    """The bytes of a tensor, relative to its first one.

    Attributes:
        dims: the dimensions over which runs repeat.
        run: length of each contiguous run, bytes.
        extent: from the first byte to behind the last one; 0 for a tensor without elements.
    """

    dims: Dims
    run: int
    extent: int


@lru_cache(_CACHED)
def _cells(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> _Cells:
    if 0 in shape:
        return _Cells((), 0, 0)
    run = itemsize
    dims: list[tuple[int, int]] = []
    # A dimension of one element or of stride 0 adds no cells.
    strided = sorted((s * itemsize, n) for n, s in zip(shape, stride, strict=True) if n > 1 and s)
    for step, count in strided:
        if not dims and step <= run:
            run += (count - 1) * step
        elif dims and step == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * count, dims[-1][1])
        else:
            dims.append((count, step))
    outermost_first = tuple(reversed(dims))
    return _Cells(outermost_first, run, _extent(outermost_first, run))


def _extent(dims: Dims, run: int) -> int:
    return run + sum((count - 1) * step for count, step in dims)


@lru_cache(_CACHED)
def _meet(a: Dims, a_run: int, b: Dims, b_run: int, distance: int) -> bool:
    """Whether two sets of bytes share one; b's first byte is ``distance`` behind a's."""
    if distance >= _extent(a, a_run) or -distance >= _extent(b, b_run):
        return False
    if not a and not b:
        return True
    a_step, b_step = (a[0][1] if a else 0), (b[0][1] if b else 0)
    # The outermost dimension is taken apart: of both where their steps agree, since then only the
    # difference of their indices counts, else of the one with the larger step.
    step = max(a_step, b_step)
    first, last = 0, 0
    if a_step == step:
        first, a = 1 - a[0][0], a[1:]
    if b_step == step:
        last, b = b[0][0] - 1, b[1:]
    # Only shifts that leave the rest of both in reach of each other.
    first = max(first, (-_extent(b, b_run) - distance) // step + 1)
    last = min(last, -((distance - _extent(a, a_run)) // step) - 1)
    return any(
        _meet(a, a_run, b, b_run, distance + shift * step) for shift in range(first, last + 1)
    )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether an element of ``a`` and one of ``b`` share a byte; both on one device."""
    # Most tensors have an allocation of their own, which takes a third of the time to see.
    a_storage, b_storage = a.untyped_storage(), b.untyped_storage()
    apart = b_storage.data_ptr() - a_storage.data_ptr()
    if (apart >= a_storage.nbytes()) if apart > 0 else (-apart >= b_storage.nbytes()):
        return False
    distance = b.data_ptr() - a.data_ptr()
    a_cells = _cells(a.shape, a.stride(), a.itemsize)
    b_cells = _cells(b.shape, b.stride(), b.itemsize)
    if distance >= a_cells.extent or -distance >= b_cells.extent:
        return False
    if a_cells.extent == 0 or b_cells.extent == 0:
        return False
    return _meet(a_cells.dims, a_cells.run, b_cells.dims, b_cells.run, distance)


@lru_cache(_CACHED)
def overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements of a tensor of this layout share a memory cell."""
    if 0 in shape:
        return False
    steps = sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1)
    inner: Dims = ()
    for step, count in steps:
        if step == 0 or any(
            _meet(inner, 1, inner, 1, shift * step)
            for shift in range(1, min(count - 1, (_extent(inner, 1) - 1) // step) + 1)
        ):
            return True
        inner = ((count, step), *inner)
    return False


def require_disjoint(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise LayoutError where ``tensor``, which is written, shares memory with ``other``."""
    if not overlap(tensor, other):
        return
    same = tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
    raise LayoutError(
        f"{op}: {name} and {other_name} {'are one tensor' if same else 'overlap in memory'} "
        f"({name}: {describe(tensor)}, {other_name}: {describe(other)}), and {name} is written. "
        f"Pass {other_name}.clone(), or views that share no element."
    )


def require_apart(
    op: str, written: Mapping[str, Tensor], read: Mapping[str, Tensor | None]
) -> None:
    """``require_disjoint`` of each tensor that is written from the other ones and from those read.

    Quicker than pair by pair: each allocation is looked up once, and nearly all are apart.
    """
    taken: list[tuple[int, int, str, Tensor]] = []
    for tensors in (written, read):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            end = start + storage.nbytes()
            for low, high, other_name, other in taken:
                if start < high and low < end:
                    require_disjoint(op, other_name, other, name, tensor)
            if tensors is written:
                taken.append((start, end, name, tensor))
