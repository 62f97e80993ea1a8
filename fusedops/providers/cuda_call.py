"""Running plans of several tensors and results, some of them written in place.

``CudaOp`` is the shorter way for an operation of one tensor with one result.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.jit.bound import BoundLaunch
from fusedops.providers.base import Support, elsewhere, not_applicable
from fusedops.providers.cuda_base import (
    ENTRY_LIMIT,
    bind_launch,
    current_device,
    gpu_of,
    machine_refusal,
    planned_answer,
    view_of,
)
from fusedops.providers.cuda_plan import VECTOR_BYTES, Gpu, Launch
from fusedops.providers.recent import note_written, storages

__all__ = ["CallPlan", "CudaCall", "float64_bits", "most_shared_bytes"]

_SHARED_BYTES = {80: 160 << 10, 86: 96 << 10, 89: 96 << 10, 120: 96 << 10}
_MOST_SHARED_BYTES = 224 << 10


@dataclass(frozen=True)
class CallPlan:
    """The launches of a call, in order; none where there is nothing to compute.

    Attributes:
        results: shape and dtype of each tensor that the call allocates, all contiguous.
        launches: their ``tensors`` count the arguments first, then the results, and last the
            memory that the launches share.
        work_bytes: size of that memory.
    """

    results: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    launches: tuple[Launch, ...] = ()
    work_bytes: int = 0


@dataclass(frozen=True)
class _Entry:
    """A plan with its launches bound on a device, for one thread."""

    plan: CallPlan
    device: torch.device
    launches: tuple[tuple[BoundLaunch, tuple[int, ...]], ...]

    def results(self) -> tuple[Tensor, ...]:
        """New tensors for the results."""
        return tuple(
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in self.plan.results
        )

    def launch(self, addresses: list[int]) -> None:
        """Put the launches on the current stream; addresses of arguments, then of results."""
        if self.plan.work_bytes:
            # The allocator hands it out again in stream order, so it may go when this returns.
            work = torch.empty(self.plan.work_bytes, dtype=torch.uint8, device=self.device)
            addresses = [*addresses, work.data_ptr()]
        for bound, tensors in self.launches:
            bound(*[addresses[tensor] for tensor in tensors])


class _Entries(threading.local):
    def __init__(self) -> None:
        self.of: dict[Hashable, _Entry] = {}


class CudaCall:
    """An operation of several tensors by kernels of csrc.

    Args:
        plan: ``plan(views, gpu, *options)`` with the view of each tensor, None for one that is
            absent; raises UnsupportedError with the reason where the kernels cannot. That may
            depend on anything but alignment.
    """

    def __init__(self, plan: Callable[..., CallPlan]) -> None:
        self._plan = plan
        self._entries = _Entries()
        self._answers: dict[Hashable, Support] = {}

    def supports(self, tensors: Sequence[Tensor | None], *options: Hashable) -> Support:
        """Whether the kernels serve a call; the first tensor is always there."""
        first = tensors[0]
        if first is None or not first.is_cuda:
            return not_applicable("got no tensor") if first is None else elsewhere(first.device)
        index = first.get_device()
        refusal = machine_refusal(index)
        if refusal is not None:
            return refusal
        key = (_signature(tensors), index, options)
        return planned_answer(
            self._answers, key, lambda: self._plan(_views(tensors), gpu_of(index), *options)
        )

    def run(self, tensors: Sequence[Tensor | None], *options: Hashable) -> tuple[Tensor, ...]:
        """Compute the results on torch's current stream of the device of the first tensor.

        Raises:
            KernelMissingError, BuildError, LaunchError: as ``CudaOp.run``.
        """
        entry, addresses = self.prepared(tensors, options)
        results = entry.results()
        addresses += [result.data_ptr() for result in results]
        if entry.device.index == current_device():
            entry.launch(addresses)
        else:
            with torch.cuda.device(entry.device):
                entry.launch(addresses)
        # Without a result of its own a call writes into its arguments.
        note_written(results or storages(t for t in tensors if t is not None))
        return results

    def prepared(
        self, tensors: Sequence[Tensor | None], options: tuple[Hashable, ...]
    ) -> tuple[_Entry, list[int]]:
        """The bound launches of a call in this thread, and the addresses of its arguments."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        first = tensors[0]
        if first is None:
            raise UnsupportedError("the first tensor of a call is absent")
        aligned = tuple(address % VECTOR_BYTES for address in addresses)
        key = (_signature(tensors), first.get_device(), aligned, options)
        entry = self._entries.of.get(key)
        if entry is None:
            plan = self._plan(_views(tensors), gpu_of(first.get_device()), *options)
            index = first.get_device()
            launches = tuple(
                (bind_launch(launch, index), launch.tensors) for launch in plan.launches
            )
            entry = _Entry(plan, first.device, launches)
            if len(self._entries.of) >= ENTRY_LIMIT:
                self._entries.of.clear()
            self._entries.of[key] = entry
        return entry, addresses


def _signature(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    )


def _views(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if tensor is None else view_of(tensor) for tensor in tensors)


def float64_bits(value: float) -> int:
    """A float64 as the int64 of its bits: constants of a launch are integers."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def most_shared_bytes(gpu: Gpu) -> int:
    """Dynamic shared memory that a block may take, with some left for what kernels declare."""
    capability = int(gpu.arch.removeprefix("sm_").rstrip("a"))
    return _SHARED_BYTES.get(capability, _MOST_SHARED_BYTES)
