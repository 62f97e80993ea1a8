"""What tests of kernels with several tensors share: poisoned results, captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cuda_cases import GUARD_BYTES, POISON
from torch import Tensor

from fusedops.providers.base import use_provider
from fusedops.providers.cuda_call import CudaCall


def results_in_poisoned_memory(
    call: CudaCall, tensors: Sequence[Tensor | None], *options: object
) -> list[Tensor]:
    """What a call writes into poisoned results, whose guard bands it must leave alone."""
    entry, addresses = call.prepared(tensors, options)
    device = entry.device
    bands = []
    for shape, dtype in entry.plan.results:
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
        bands.append((whole, whole[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)))
    entry.launch([*addresses, *(result.data_ptr() for _, result in bands)])
    for whole, _ in bands:
        assert (whole[:GUARD_BYTES] == POISON).all()
        assert (whole[-GUARD_BYTES:] == POISON).all()
    return [result.clone() for _, result in bands]


def on_cpu(function: Callable[..., object], *args: object, **options: object) -> object:
    """The operation's own definition, of copies on the CPU."""

    def moved(value: object) -> object:
        return value.cpu() if isinstance(value, Tensor) else value

    with use_provider("reference"):
        return function(*map(moved, args), **{key: moved(v) for key, v in options.items()})
