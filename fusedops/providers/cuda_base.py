"""Running plans: each is made once a signature and thread, and then costs little from Python."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.jit.bound import BoundLaunch
from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.location import OVERLAY_VARIABLE
from fusedops.jit.nvrtc import CudaProgram, program_key
from fusedops.providers.base import SUPPORTED, Support, elsewhere, unsupported
from fusedops.providers.cuda_plan import MAX_DIMS, OUT, VECTOR_BYTES, Gpu, Launch, Plan, View, X
from fusedops.providers.recent import note_written

__all__ = [
    "ENTRY_LIMIT",
    "NAME",
    "CudaOp",
    "bind_launch",
    "current_device",
    "gpu_of",
    "machine_refusal",
    "planned_answer",
    "view_of",
]

NAME = "cuda"

_OLDEST = (8, 0)
ENTRY_LIMIT = 4096
"""Signatures that an operation remembers before it forgets them all."""


@dataclass(frozen=True)
class _Entry:
    """A plan with its kernels loaded on a device and its launches bound, for one thread.

    Attributes:
        empty: allocates the result.
        direct: the launch of a plan that has one, from x to the result.
        launches: those of any other plan, each with the tensors that it takes.
        work: allocates the memory that they share.
    """

    empty: Callable[[], Tensor]
    direct: BoundLaunch | None
    launches: tuple[tuple[BoundLaunch, tuple[int, ...]], ...]
    work: Callable[[], Tensor]

    def launch(self, source: int, target: int) -> None:
        """Put the launches on the current stream of the current device, which is that of x."""
        if self.direct is not None:
            self.direct(source, target)
            return
        # The allocator hands it out again in stream order, so it may go when this returns.
        work = self.work()
        addresses = (source, target, work.data_ptr())
        for bound, tensors in self.launches:
            bound(*[addresses[tensor] for tensor in tensors])


class _Entries(threading.local):
    def __init__(self) -> None:
        self.of: dict[Hashable, _Entry] = {}


class CudaOp:
    """An operation of one tensor by kernels of csrc: what the provider registers.

    Args:
        plan: ``plan(view, gpu, *options)``: how a call is computed; raises UnsupportedError with
            the reason where the kernels cannot.
    """

    def __init__(self, plan: Callable[..., Plan]) -> None:
        self._plan = plan
        self._entries = _Entries()
        self._answers: dict[Hashable, Support] = {}

    def supports(self, x: Tensor, *options: Any) -> Support:
        """Whether the kernels serve a call; options are the operation's, lists as tuples."""
        if not x.is_cuda:
            return elsewhere(x.device)
        refusal = machine_refusal(x.get_device())
        if refusal is not None:
            return refusal
        # Fewer dimensions need no joining, so every such call has a plan.
        return SUPPORTED if x.dim() <= MAX_DIMS else self._plan_answer(x, options)

    def _plan_answer(self, x: Tensor, options: tuple[Any, ...]) -> Support:
        key = (x.shape, x.stride(), x.dtype, x.get_device(), options)
        return planned_answer(
            self._answers, key, lambda: self._plan(view_of(x), gpu_of(x.get_device()), *options)
        )

    def run(self, x: Tensor, *options: Any) -> Tensor:
        """Compute the result on torch's current stream of the device of ``x``.

        Raises:
            KernelMissingError: a kernel must be compiled, which FUSEDOPS_COMPILE=0 or a graph
                capture forbids.
            BuildError, LaunchError: as ``CudaKernel.launch``.
        """
        index = x.get_device()
        address = x.data_ptr()
        key = (x.shape, x.stride(), x.dtype, index, address % VECTOR_BYTES, options)
        entry = self._entries.of.get(key) or self._prepare(key, x, options)
        out = entry.empty()
        if index == current_device():
            entry.launch(address, out.data_ptr())
        else:
            with torch.cuda.device(index):
                entry.launch(address, out.data_ptr())
        note_written((out,))
        return out

    def _prepare(self, key: Hashable, x: Tensor, options: tuple[Any, ...]) -> _Entry:
        index = x.get_device()
        plan = self._plan(view_of(x), gpu_of(index), *options)
        launches = tuple((bind_launch(launch, index), launch.tensors) for launch in plan.launches)
        is_direct = len(launches) == 1 and launches[0][1] == (X, OUT)
        entry = _Entry(
            functools.partial(torch.empty, plan.shape, dtype=plan.dtype, device=x.device),
            launches[0][0] if is_direct else None,
            launches,
            functools.partial(torch.empty, plan.work_bytes, dtype=torch.uint8, device=x.device),
        )
        if len(self._entries.of) >= ENTRY_LIMIT:
            self._entries.of.clear()
        self._entries.of[key] = entry
        return entry


# torch.cuda.current_device() first asks whether CUDA is initialised, which a CUDA tensor shows.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def planned_answer(
    answers: dict[Hashable, Support], key: Hashable, plan: Callable[[], object]
) -> Support:
    """Whether ``plan`` finds a way for a call, asked once a key."""
    answer = answers.get(key)
    if answer is None:
        answer = SUPPORTED
        try:
            plan()
        except UnsupportedError as error:
            answer = unsupported(str(error))
        if len(answers) >= ENTRY_LIMIT:
            answers.clear()
        answers[key] = answer
    return answer


def view_of(x: Tensor) -> View:
    """What a plan looks at of a tensor."""
    address = x.data_ptr() % VECTOR_BYTES
    aligned_bytes = address & -address or VECTOR_BYTES
    return View(tuple(x.shape), x.stride(), x.dtype, aligned_bytes)


@functools.cache
def gpu_of(device: int) -> Gpu:
    """What a plan looks at of a CUDA device."""
    return Gpu(device_arch(device), torch.cuda.get_device_properties(device).multi_processor_count)


def bind_launch(launch: Launch, device: int) -> BoundLaunch:
    """A plan's launch with its kernel loaded on a device, ready but for addresses."""
    module = cuda_module(launch.program, device_arch(device))
    # The attribute costs nothing where no kernel is ahead, and every kernel of csrc waits before
    # what it reads counts.
    return module.kernel(launch.kernel, launch.parameters).bind(
        device,
        (*launch.blocks, 1),
        (launch.threads, 1, 1),
        launch.constants,
        shared_bytes=launch.shared_bytes,
        pdl=torch.cuda.get_device_capability(device) >= (9, 0),
        cluster=None if launch.cluster == 1 else (launch.cluster, 1, 1),
    )


@functools.cache
def machine_refusal(device: int) -> Support | None:
    """Why no kernel of csrc can run on a device, or None. Looked up once a process."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        found = ".".join(map(str, capability))
        return unsupported(f"needs compute capability 8.0 or newer, cuda:{device} has {found}")
    key = program_key(CudaProgram("probe.cu", ("probe",)), device_arch(device))
    if key.missing_tools and not os.environ.get(OVERLAY_VARIABLE):
        return unsupported(
            "NVRTC, the CUDA headers or cuda-core are not installed (pip install "
            f"'fusedops[cuda]'), and {OVERLAY_VARIABLE} names no prebuilt kernels"
        )
    return None
