"""What every FlashInfer implementation shares: is it here, may it run now, does the layout fit.

FlashInfer is imported by the first CUDA call that it could serve, never by ``import fusedops``. It
builds its kernels with nvcc or the CuTe DSL at first use, so a call also asks whether they are
there: an unpinned call never waits minutes for nvcc, and no call builds inside a graph capture.

A refusal is a ``Support`` that is not ok; None means no objection, so refusals chain with ``or``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fusedops.check import describe
from fusedops.errors import BuildError, KernelMissingError
from fusedops.providers.base import Support, current_policy, elsewhere, unsupported

__all__ = [
    "NAME",
    "absent",
    "call",
    "is_capturing",
    "module",
    "not_ready",
    "off_cuda",
    "opt_in",
    "stream_of",
    "unbuilt",
    "wrong_alignment",
    "wrong_dtype",
    "wrong_rows",
]

NAME = "flashinfer"

HALF_DTYPES = (torch.bfloat16, torch.float16)

_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
"""What importing or asking FlashInfer raises when it, or a library under it, is broken."""

_ready: set[Hashable] = set()
"""Kernels that ran once, so that a graph capture finds them built and loaded."""

_LOG_LINES = 12


def module(name: str) -> Any:
    """``flashinfer.<name>``, imported on first use."""
    return importlib.import_module(f"flashinfer.{name}")


@functools.cache
def absent() -> str | None:
    """Why FlashInfer cannot be imported here, or None if it can. Looked up once a process."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'fusedops[flashinfer]')"
    try:
        importlib.import_module("flashinfer")
    except _IMPORT_ERRORS as error:
        return f"`import flashinfer` fails: {type(error).__name__}: {error}"
    return None


def is_cuda(tensor: Tensor) -> bool:
    """Whether FlashInfer's kernels can read the tensor."""
    return tensor.is_cuda


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


def stream_of(tensor: Tensor) -> int:
    """Identifies the stream on which work on the tensor is queued."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def is_pinned() -> bool:
    """Whether the caller asks for FlashInfer by name."""
    return current_policy().pinned == NAME


def off_cuda(tensor: Tensor) -> Support | None:
    """Not applicable away from CUDA: the first question, so that CPU calls cost nothing."""
    return None if is_cuda(tensor) else elsewhere(tensor.device)


def wrong_dtype(name: str, tensor: Tensor) -> Support | None:
    """Refuse what is neither bfloat16 nor float16."""
    if tensor.dtype in HALF_DTYPES:
        return None
    return unsupported(f"takes bfloat16 and float16, but {name} is {describe(tensor)}")


def wrong_alignment(name: str, tensor: Tensor) -> Support | None:
    """Refuse a tensor whose rows cannot be read 16 bytes at a time.

    Every row (all but the last dimension) must start at a multiple of 8 elements (16 bytes).
    """
    strides = tensor.stride()
    if strides and strides[-1] == 1 and tensor.data_ptr() % 16 == 0:
        outer = zip(tensor.shape[:-1], strides[:-1], strict=True)
        if all(size == 1 or stride % 8 == 0 for size, stride in outer):
            return None
    return unsupported(
        f"reads rows in units of 16 bytes, but {name} has strides {tuple(strides)} and its data "
        f"starts {tensor.data_ptr() % 16} bytes behind a multiple of 16"
    )


def wrong_rows(name: str, tensor: Tensor) -> Support | None:
    """Refuse what is no (rows, H) matrix to a norm kernel.

    CuTe DSL kernels for contiguous tensors are compiled for, and check, the largest alignment that
    the row length allows, up to 128 bytes; the others need ``wrong_alignment``'s 16.
    """
    if tensor.is_contiguous():
        row_bytes = tensor.shape[-1] * tensor.element_size()
        alignment = math.gcd(128 if norm_uses_dsl() else 16, row_bytes)
        if tensor.data_ptr() % alignment:
            return unsupported(f"needs {name} to start at a multiple of {alignment} bytes")
    elif tensor.dim() != 2:
        return unsupported(f"takes contiguous tensors or (rows, H) views; {name} is neither")
    else:
        refusal = wrong_alignment(name, tensor)
        if refusal is not None:
            return refusal
    if sum(max(n - 1, 0) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) >= 2**31:
        return unsupported(f"counts elements in 32 bits; {name} spans 2^31 or more")
    return None


def opt_in(difference: str) -> Support | None:
    """Refuse a call whose result or cost differs from the contract, unless FlashInfer is pinned."""
    if is_pinned():
        return None
    return unsupported(f"{difference}; pin it with use_provider({NAME!r}) to accept that")


def not_ready(key: Hashable, kernels: str | None) -> Support | None:
    """Refuse where FlashInfer is absent, or would have to build kernels at a wrong moment.

    Args:
        key: identifies the kernel as in ``call``.
        kernels: FlashInfer's name of the module that holds it; None: any call may build it.
    """
    reason = absent()
    if reason is not None:
        return unsupported(reason)
    if key in _ready:
        return None
    if is_capturing():
        return unsupported(
            "its kernel has not run yet, and building or loading it inside a graph capture is not "
            "possible; run the call once before the capture"
        )
    if kernels is None or is_pinned():
        return None
    reason = unbuilt(kernels)
    if reason is None:
        return None
    return unsupported(
        f"{reason}; install flashinfer-jit-cache, or pin it with use_provider({NAME!r}) to let it "
        "build them"
    )


_SPECS: dict[str, Callable[[], Any]] = {
    "norm": lambda: module("jit.norm").gen_norm_module(),
    "rope": lambda: module("jit.rope").gen_rope_module(),
    "page": lambda: module("jit.page").gen_page_module(),
    "silu_and_mul": lambda: module("jit.activation").gen_act_and_mul_module("silu"),
    "gelu_and_mul": lambda: module("jit.activation").gen_act_and_mul_module("gelu"),
    "gelu_tanh_and_mul": lambda: module("jit.activation").gen_act_and_mul_module("gelu_tanh"),
}
"""FlashInfer's kernel modules by name, as it describes them to its builder."""


@functools.cache
def unbuilt(kernels: str) -> str | None:
    """Why a kernel module would need nvcc first, or None. Looked up once a process."""
    if kernels == "norm" and norm_uses_dsl():
        return None
    try:
        if _SPECS[kernels]().is_compiled:
            return None
    except _IMPORT_ERRORS as error:
        return f"asking for its {kernels!r} kernels fails: {type(error).__name__}: {error}"
    return f"its {kernels!r} kernels are not built, which takes nvcc minutes"


@functools.cache
def norm_uses_dsl() -> bool:
    """Whether FlashInfer's norms come from the CuTe DSL: seconds, and no nvcc."""
    forced = os.environ.get("FLASHINFER_USE_CUDA_NORM", "0") == "1"
    return not forced and importlib.util.find_spec("cutlass") is not None


def call(key: Hashable, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``; the first call of a key is the one that builds and loads.

    Raises:
        BuildError: that first call failed; the last lines of FlashInfer's message follow.
        KernelMissingError: it would happen inside a graph capture.
    """
    if key in _ready:
        return function(*args, **kwargs)
    if is_capturing():
        raise KernelMissingError(
            f"flashinfer: {key} has not run yet, and its kernel cannot be built or loaded inside a "
            "graph capture; run the call once before the capture"
        )
    try:
        result = function(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        lines = "\n".join(str(error).splitlines()[-_LOG_LINES:])
        raise BuildError(
            f"flashinfer: the first call of {key} failed; it builds and loads kernels then, which "
            "needs nvcc or flashinfer-jit-cache. Pin another provider with use_provider() to do "
            "without. Its message ends:\n"
            f"{type(error).__name__}: {lines}"
        ) from error
    _ready.add(key)
    return result
