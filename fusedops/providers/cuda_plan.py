"""What a CUDA kernel is launched with: plans, made from shapes, strides and alignment alone.

A plan needs no GPU and no tensor, so that geometry and refusals can be tested without either.
Addresses are added when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram

__all__ = [
    "DIMS_PARAMETERS",
    "MAX_DIMS",
    "OUT",
    "THREADS",
    "VECTOR_BYTES",
    "WORK",
    "Axis",
    "Gpu",
    "Launch",
    "Plan",
    "View",
    "X",
    "ceil_div",
    "coalesce",
    "dims_constants",
    "element_count",
    "power_of_two_from",
]

X = 0
"""The input, among the tensors of a launch."""

OUT = 1
"""The result."""

WORK = 2
"""Memory between two launches of a plan."""

THREADS = 256
"""Threads a block where a launch does not say otherwise."""

VECTOR_BYTES = 16

MAX_DIMS = 4
"""Dimensions that a kernel walks, after those that lie behind one another were joined."""

Axis = tuple[int, int]
"""Size and stride of a dimension, in elements."""

DIMS_PARAMETERS = ("int64",) * (2 * MAX_DIMS - 1)
"""Parameters of one ``Dims``: every size but the first, then every stride."""


@dataclass(frozen=True)
class Gpu:
    """What a plan depends on of a GPU.

    Attributes:
        arch: the architecture compiled for, e.g. ``"sm_90a"``.
        sms: multiprocessors.
    """

    arch: str
    sms: int

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can form clusters (Hopper and later)."""
        return int(self.arch.removeprefix("sm_").rstrip("a")) >= 90


@dataclass(frozen=True)
class View:
    """A tensor without its data.

    Attributes:
        shape: sizes.
        strides: in elements.
        dtype: of the elements.
        aligned_bytes: the largest power of two up to ``VECTOR_BYTES`` that divides its address.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned_bytes: int = VECTOR_BYTES

    @property
    def axes(self) -> list[Axis]:
        """Size and stride of each dimension."""
        return list(zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Launch:
    """One kernel launch but for the addresses.

    Attributes:
        program: where the kernel is.
        kernel: its name expression, one of ``program.kernels``.
        parameters: types of all parameters, see ``CudaModule.kernel``.
        tensors: which of ``X``, ``OUT``, ``WORK`` the first parameters point to.
        constants: values of the others.
        blocks: blocks in x and y.
        threads: threads a block.
        shared_bytes: dynamic shared memory.
        cluster: blocks a cluster; 1: none.
    """

    program: CudaProgram
    kernel: str
    parameters: tuple[str, ...]
    tensors: tuple[int, ...]
    constants: tuple[int, ...]
    blocks: tuple[int, int]
    threads: int = THREADS
    shared_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True)
class Plan:
    """The launches that compute a result, in order; none for a result without elements.

    Attributes:
        shape: of the result, which is contiguous.
        dtype: of the result.
        launches: see above.
        work_bytes: memory that the launches share, allocated for each call.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    launches: tuple[Launch, ...] = ()
    work_bytes: int = 0


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up."""
    return -(-value // divisor)


def power_of_two_from(value: int) -> int:
    """The smallest power of two that is not less than ``value``; 1 for less than 1."""
    return 1 << max(0, value - 1).bit_length()


def element_count(axes: Iterable[Axis]) -> int:
    """Number of positions of some dimensions."""
    return math.prod(size for size, _ in axes)


def coalesce(axes: Iterable[Axis]) -> list[Axis]:
    """The same positions in the same row-major order, in as few dimensions as possible."""
    joined: list[Axis] = []
    for size, stride in axes:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            size *= joined.pop()[0]
        joined.append((size, stride))
    return joined


def dims_constants(axes: Sequence[Axis], what: str) -> tuple[int, ...]:
    """The arguments of one ``Dims``.

    Raises:
        UnsupportedError: there are more than ``MAX_DIMS``.
    """
    if len(axes) > MAX_DIMS:
        raise UnsupportedError(
            f"walks up to {MAX_DIMS} {what} that do not lie behind one another in memory, got "
            f"{len(axes)}"
        )
    padded = [(1, 0)] * (MAX_DIMS - len(axes)) + list(axes)
    return (*(size for size, _ in padded[1:]), *(stride for _, stride in padded))
