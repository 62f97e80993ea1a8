"""Data to measure on: sets of buffers, how many of them are needed, and what may not be timed.

Zeros and constants are refused because they run faster than real data: a bf16 8192^3 product was
13 % faster on zeros on an H200, where the tensor cores' power sets the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.check import describe
from fusedops.errors import ConfigError

__all__ = [
    "ROTATION_FACTOR",
    "Buffers",
    "l2_bytes",
    "poison",
    "refuse_constant",
    "rotation_sets",
    "total_bytes",
]

ROTATION_FACTOR = 4
"""Buffers in rotation hold this many times the L2: a line is evicted long before its next use."""

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_POISON_BYTE = 0x7F
"""A byte that makes every float8_e4m3fn a NaN, and every integer an unlikely value."""


@dataclass(frozen=True)
class Buffers:
    """One set of buffers for one launch.

    Attributes:
        inputs: tensors that hold random data; constants are refused.
        outputs: preallocated results, poisoned before the result is checked.
        indices: tensors that are not data (page tables, lengths, scalars); never refused.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    indices: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the set."""
        return (*self.inputs, *self.outputs, *self.indices)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of ``tensors`` (not of the storages that they are views of)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache of a CUDA device in bytes (62,914,560 on an H200)."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def rotation_sets(set_bytes: int, cache_bytes: int) -> int:
    """How many sets of buffers must take turns so that no launch finds its data in a cache.

    Args:
        set_bytes: bytes that one launch touches.
        cache_bytes: bytes of the largest cache.

    Returns:
        at least 2, and enough that all sets hold ``ROTATION_FACTOR`` times the cache.

    Raises:
        ConfigError: ``set_bytes`` is not positive.
    """
    if set_bytes <= 0:
        raise ConfigError(
            f"rotation_sets: one set of buffers holds {set_bytes} bytes; give the launch tensors "
            "with at least one element."
        )
    return max(2, -(-ROTATION_FACTOR * cache_bytes // set_bytes))


def _as_integers(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    return dense.view(_INTEGER_OF_SIZE[tensor.element_size()])


def refuse_constant(tensors: Iterable[Tensor], *, op: str = "measure") -> None:
    """Raise ConfigError if a tensor of two or more elements holds one single value.

    The comparison is on bits, so it works for every dtype of 1, 2, 4 or 8 bytes.
    """
    for position, tensor in enumerate(tensors):
        if tensor.numel() < 2:
            continue
        low, high = torch.aminmax(_as_integers(tensor))
        if bool(low == high):
            value = tensor.flatten()[0].item()
            raise ConfigError(
                f"{op}: input {position} ({describe(tensor)}) is {value} everywhere; constant data "
                "runs faster than real data. Fill it with random values (torch.randn, "
                "torch.randint), or pass it as `indices` if it is no data."
            )


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with values that no right result has (NaN where the dtype has one)."""
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_contiguous():
        _fill_bytes(tensor)
    else:
        spoiled = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _fill_bytes(spoiled)
        tensor.copy_(spoiled)


def _fill_bytes(dense: Tensor) -> None:
    # A tensor without dimensions has no view of another element size.
    dense.view(-1).view(torch.uint8).fill_(_POISON_BYTE)
