"""``greedy`` and ``sample`` by csrc, and the k largest elements of a row.

A row's maximum is a reduction. For the others the blocks of a cluster share a row; what they read
again after the first pass lies in the L2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES, describe, require_dim, require_dtype
from fusedops.errors import ConfigError, DeviceError, UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.base import current_policy
from fusedops.providers.cuda_base import NAME
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import Gpu, Launch, View, ceil_div
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_reduce_ops import KERNEL_DTYPES
from fusedops.providers.cuda_sinks import Served

__all__ = [
    "GREEDY",
    "MAX_TOP_K",
    "SAMPLE",
    "SELECT_MEMORY_BYTES",
    "plan_greedy",
    "plan_sample",
    "plan_top_k",
    "top_k",
]

MAX_TOP_K = 1024
"""The most elements of a row that ``top_k`` sorts."""

SELECT_MEMORY_BYTES = 48464
"""``sizeof(SelectMemory)`` of csrc/include/select_memory.cuh."""

_SOURCE = "sampling.cu"

_LAYOUTS = ((8, 1024), (4, 1024), (2, 1024), (1, 1024))
"""Blocks a row and threads a block, which has its SM to itself.

The first that fits has all blocks running at once, so that no row waits for a second round.
"""

_USABLE_BY_LARGE_CLUSTERS = 15 / 16
"""Share of the SMs that clusters of 4 and 8 surely get.

A cluster lies within one group of SMs, and groups have unequal sizes: with one block an SM, an
H200's 132 SMs hold 15 clusters of 8 or 31 of 4 (the ladder of occupancy counts them at two blocks
an SM: 30 and 62). An SM's neighbour is always in its group, so pairs get all.
"""

_MANY_ROWS = (1, 512)
"""Of more rows: two blocks an SM."""

_LEAST_CLUSTER_LENGTH = 8192
"""Rows from this length on are worth a cluster."""

_ROW_GAMMA = 0xD1B54A32D192ED03 - (1 << 64)
"""Distance of the seeds of neighbouring rows under one shared seed, as int64."""

_LARGEST_GRID = 2**31 - 1

_LARGEST_LENGTH = 2**23
"""So many weights of up to 2^40 have a sum of 64 bits."""

_SAMPLE_PARAMETERS = (*["pointer"] * 6, "int32", "int32", *["int64"] * 7)
_TOP_K_PARAMETERS = (*["pointer"] * 3, "int32", "int32", "int32", "int64", "int64")


def plan_greedy(views: Sequence[View], gpu: Gpu) -> CallPlan:
    """The position of each row's maximum."""
    (logits,) = views
    plan = plan_reduce(logits, gpu, "argmax", (1,), False)
    # Both plans count the input, the result and the memory between launches alike.
    return CallPlan(((plan.shape, plan.dtype),), plan.launches, plan.work_bytes)


def _layout(rows: int, length: int, gpu: Gpu) -> tuple[int, int]:
    """Blocks a row and threads a block."""
    if length < _LEAST_CLUSTER_LENGTH:
        return _MANY_ROWS
    for blocks, threads in _LAYOUTS:
        usable = gpu.sms * (_USABLE_BY_LARGE_CLUSTERS if blocks > 2 else 1)
        if (blocks == 1 or gpu.has_clusters) and rows * blocks <= usable:
            return blocks, threads
    return _MANY_ROWS


def _row_launch(
    name: str,
    x: View,
    gpu: Gpu,
    parameters: tuple[str, ...],
    tensors: tuple[int, ...],
    constants: tuple[int, ...],
) -> Launch:
    """A cluster a row; the kernel takes the length of rows and of pieces before the constants."""
    rows, length = x.shape
    if length > _LARGEST_LENGTH:
        raise UnsupportedError(f"takes rows of up to {_LARGEST_LENGTH} elements, got {length}")
    blocks, threads = _layout(rows, length, gpu)
    if rows * blocks > _LARGEST_GRID:
        raise UnsupportedError(f"takes up to {_LARGEST_GRID // blocks} rows, got {rows}")
    kernel = f"fusedops::{name}<{KERNEL_DTYPES[x.dtype]}, {blocks}, {threads}>"
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        parameters,
        tensors,
        # Pieces begin at a multiple of 16 bytes where rows do.
        (length, ceil_div(ceil_div(length, blocks), 16) * 16, *constants),
        (rows * blocks, 1),
        threads=threads,
        shared_bytes=SELECT_MEMORY_BYTES,
        cluster=blocks,
    )


def plan_sample(views: Sequence[View | None], gpu: Gpu) -> CallPlan:
    """How a token a row is drawn.

    Raises:
        UnsupportedError: a row has more than 2^23 elements.
    """
    logits, temperature, seed, top_k, top_p = views
    if logits is None or temperature is None or seed is None:
        raise UnsupportedError("needs logits, temperatures and seeds")
    rows = logits.shape[0]
    results = (((rows,), torch.int64),)
    if rows == 0:
        return CallPlan(results)
    is_shared = seed.shape[0] != rows
    launch = _row_launch(
        "sample",
        logits,
        gpu,
        _SAMPLE_PARAMETERS,
        (0, 1, 2, 3, 4, 5),
        (
            *logits.strides,
            temperature.strides[0],
            0 if is_shared else seed.strides[0],
            _ROW_GAMMA if is_shared else 0,
            0 if top_k is None else top_k.strides[0],
            0 if top_p is None else top_p.strides[0],
        ),
    )
    return CallPlan(results, (launch,))


def plan_top_k(views: Sequence[View], gpu: Gpu, k: int) -> CallPlan:
    """How the ``k`` largest of each row are found; see ``plan_sample``."""
    (x,) = views
    rows = x.shape[0]
    results = (((rows, k), x.dtype), ((rows, k), torch.int64))
    if rows == 0:
        return CallPlan(results)
    launch = _row_launch("top_k", x, gpu, _TOP_K_PARAMETERS, (0, 1, 2), (k, *x.strides))
    return CallPlan(results, (launch,))


GREEDY = Served(
    CudaCall(plan_greedy), lambda logits: ((logits,), ()), lambda results, _: results[0]
)
"""``fusedops::greedy``."""

SAMPLE = Served(CudaCall(plan_sample), lambda *args: (args, ()), lambda results, _: results[0])
"""``fusedops::sample``.

The weights that top-p adds up are exact integers here, while a softmax rounds their sum first: the
last token within may be another one where the sum meets ``top_p`` to about 1e-6.
"""

_TOP_K = CudaCall(plan_top_k)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest elements of each row in descending order, on torch's current stream.

    A NaN counts as the largest, 0.0 equals -0.0, and the lower index goes first at a tie.

    Args:
        x: (rows, n) on a CUDA device, any strides; float32, bfloat16 or float16.
        k: 1 to the smaller of n and ``MAX_TOP_K``.

    Returns:
        values of the dtype of ``x`` and int64 indices, both (rows, k).

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument is not as described.
        UnsupportedError: a row has more than 2^23 elements.
    """
    require_dtype("top_k", "x", x, ACTIVATION_DTYPES)
    require_dim("top_k", "x", x, 2, exactly=True)
    if not 1 <= k <= min(x.shape[1], MAX_TOP_K):
        raise ConfigError(
            f"top_k: k is {k} and x is {describe(x)}; accepted are 1 to the length of a row, and "
            f"no more than {MAX_TOP_K}."
        )
    if not x.is_cuda:
        raise DeviceError(f"top_k: x is {describe(x)}; accepted are CUDA tensors.")
    usage = current_policy().usage
    if usage is not None:
        usage.calls["top_k", NAME] += 1
    values, indices = _TOP_K.run((x,), k)
    return values, indices
