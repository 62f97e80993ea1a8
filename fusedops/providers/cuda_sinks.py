"""Where rows go (csrc/include/row_store.cuh): as they are, or 8 bits with scales; and who is asked.

A kernel that stores rows takes ``out``, ``given`` and ``scales`` among its tensors; the plan of
each says which argument or result these are.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.epilogue.outputs import GROUP
from fusedops.errors import UnsupportedError
from fusedops.providers.base import Support
from fusedops.providers.cuda_call import CudaCall
from fusedops.providers.cuda_plan import View, ceil_div, coalesce
from fusedops.providers.cuda_rows import Rows, scale_pitch

__all__ = [
    "ABSENT",
    "FORMATS",
    "PLAIN",
    "Served",
    "Sink",
    "first_result",
    "float32_bits",
    "given_stride",
    "quantized_result",
    "quantized_results",
    "sink_of",
]

FORMATS = {"e4m3": ("E4m3", torch.float8_e4m3fn), "int8": ("Int8", torch.int8)}
"""8-bit formats by name: the struct in CUDA, and the dtype."""

ABSENT = None
"""The last argument of every call here: its place stands for tensors that a launch has not."""

_MODES = {"token": "PerToken", "block128": "PerGroup"}

ResultSpec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Sink:
    """How results are stored.

    Attributes:
        name: the type in CUDA.
        dtype: of what is stored; None: that of the input.
        joins: a scale follows from the whole row.
        groups: a scale follows from 128 neighbouring elements.
    """

    name: str
    dtype: torch.dtype | None = None
    joins: bool = False
    groups: bool = False

    def results(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[ResultSpec, ...]:
        """What is allocated for results of ``shape``: values, then scales where they are computed.

        Scales of groups come with their padding: (ceil(columns / 128), pitch).
        """
        values = (shape, self.dtype or dtype)
        if self.joins:
            return values, (shape[:-1], torch.float32)
        if self.groups:
            groups = (ceil_div(shape[-1], GROUP), scale_pitch(math.prod(shape[:-1])))
            return values, (groups, torch.float32)
        return (values,)

    def grid_rows(self, rows: Rows) -> int:
        """Rows of the grid: those of the padding, too, which gets its ones from them."""
        return scale_pitch(rows.count) if self.groups else rows.count


PLAIN = Sink("fusedops::Plain")


@functools.cache
def sink_of(dtype: str | None, granularity: str | None, is_given: bool) -> Sink:
    """Plain for no dtype; else 8 bits with given scales, or one a ``token`` or ``block128``."""
    if dtype is None:
        return PLAIN
    struct_name, torch_dtype = FORMATS[dtype]
    mode = "Given" if is_given else _MODES[granularity or "token"]
    return Sink(
        f"fusedops::{mode}<fusedops::{struct_name}>",
        torch_dtype,
        joins=mode == "PerToken",
        groups=mode == "PerGroup",
    )


def float32_bits(value: float) -> int:
    """A float32 as the uint32 of its bits: constants of a launch are integers."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def given_stride(scale: View | None) -> int:
    """Distance in elements of one row's given scale from the next one's; 0 for one scale.

    Raises:
        UnsupportedError: they do not lie evenly.
    """
    if scale is None or not scale.shape:
        return 0
    axes = coalesce(scale.axes)
    if len(axes) > 1:
        raise UnsupportedError(f"reads scales that lie evenly, got strides {scale.strides}")
    return axes[0][1] if axes else 1


def quantized_result(results: Sequence[Tensor], sink: Sink) -> list[Tensor]:
    """Values and scales as the operations return them, from what a plan allocated."""
    if not sink.groups:
        return list(results)
    values, scales = results
    return [values, scales[:, : math.prod(values.shape[:-1])]]


def first_result(results: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """``Served.wrap`` of an operation with one result."""
    return results[0]


def quantized_results(results: Sequence[Tensor], options: tuple[Any, ...]) -> list[Tensor]:
    """``Served.wrap`` of one that quantizes; its options end with dtype and granularity."""
    return quantized_result(results, sink_of(*options[-2:], len(results) == 1))


@dataclass(frozen=True)
class Served:
    """An operation's arguments as a ``CudaCall`` takes them, and its results as it returns them.

    Attributes:
        call: runs the plan.
        split: (tensors, options) of the operation's arguments.
        wrap: what the operation returns, of the plan's results and the options.
    """

    call: CudaCall
    split: Callable[..., tuple[tuple[Tensor | None, ...], tuple[Hashable, ...]]]
    wrap: Callable[..., Any]

    @property
    def entry(self) -> tuple[Callable[..., Support], Callable[..., Any]]:
        """(supports, run) for the provider's table."""
        return self.supports, self.run

    def supports(self, *args: Any) -> Support:
        """The provider's answer to the operation's arguments."""
        tensors, options = self.split(*args)
        return self.call.supports(tensors, *options)

    def run(self, *args: Any) -> Any:
        """The operation."""
        tensors, options = self.split(*args)
        return self.wrap(self.call.run(tensors, *options), options)
