"""Which tensors our kernels have written lately.

Our kernels allow the next one to start before they end, and a GEMM reads its weight as soon as it
starts (PTX ISA, "griddepcontrol"). Weights of a model were written long ago, but a call may also
multiply by what the call before it has made, say a transposed copy. Then an ordinary kernel, which
starts when all before it have ended, goes in between.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

__all__ = ["note_written", "settle", "storages"]

_WINDOW = 32
"""Launches of ours that can be under way at a time, with a margin."""
_ENTRY_LIMIT = 4096

_written: dict[int, int] = {}
_launches = 0


def note_written(results: Iterable[Tensor | UntypedStorage]) -> None:
    """Remember what a launch of ours writes: new tensors, or the storages of others."""
    global _launches
    _launches += 1
    if len(_written) >= _ENTRY_LIMIT:
        for address, launch in tuple(_written.items()):
            if _launches - launch > _WINDOW:
                _written.pop(address, None)
    for result in results:
        _written[result.data_ptr()] = _launches


def storages(results: Iterable[Tensor]) -> list[UntypedStorage]:
    """What to note of results in memory of the caller's, which may be parts of larger tensors."""
    return [result.untyped_storage() for result in results]


def settle(weight: Tensor) -> None:
    """Let every kernel before the next one end, if one of the last of ours wrote ``weight``.

    Costs one more launch then, and a look-up otherwise. Addresses are compared, so a tensor in
    memory that was freed since counts as written.
    """
    written = _written.get(weight.untyped_storage().data_ptr())
    if written is not None and _launches - written < _WINDOW:
        _ordinary_kernel(weight.device)


def _ordinary_kernel(device: torch.device) -> None:
    torch.zeros(1, device=device)
