"""``histogram``, ``bincount`` and ``expert_histogram`` by csrc/histogram.cu and csrc/experts.cu.

Counters of a thread's own cost the same for any values, so they are taken wherever they fit; for
more bins a block counts in shared memory, and for more than four sweeps over the input would hold,
in global memory. Sources: Gómez-Luna et al., "An optimized approach to histogram computation on
GPU", 2013, for private copies; Merrill and Grimshaw, "High Performance and Scalable Radix Sorting",
2011, for the counters by expert and piece that one running sum turns into places.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_call import CallPlan, CudaCall, float64_bits, most_shared_bytes
from fusedops.providers.cuda_plan import (
    DIMS_PARAMETERS,
    THREADS,
    Axis,
    Gpu,
    Launch,
    View,
    ceil_div,
    coalesce,
    dims_constants,
    element_count,
)
from fusedops.providers.cuda_sinks import Served

__all__ = [
    "BINCOUNT",
    "EXPERT_HISTOGRAM",
    "HISTOGRAM",
    "plan_bincount",
    "plan_expert_histogram",
    "plan_histogram",
]

_SOURCE = "histogram.cu"
_EXPERTS_SOURCE = "experts.cu"

_INDICES = {torch.int64: "long long", torch.int32: "int", torch.uint8: "unsigned char"}
_SAMPLES = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}

_PRIVATE_THREADS = 384
_MOST_PRIVATE_ELEMENTS = 60_000
"""Elements of a thread whose counters have 16 bits: below 65,536 by more than a vector's worth."""

_SHARED_THREADS = 512
_SHARED_BLOCKS_PER_SM = 2
_CACHE_BYTES = 8192 * 8
_MOST_SWEEPS = 4
"""Sweeps over the input for bins that shared memory does not hold at once; then global counters."""

_JOIN_COLUMNS = 32
_JOIN_THREADS = 512

_COUNT_PARAMETERS = ("int64", "int32", *["int64"] * 5, *DIMS_PARAMETERS)

_MOST_COUNTED = 2**32 - 1
_BLOCK_WARPS = 32
_BLOCK_IDS = 1 << 16
"""Up to this many ids one block is quicker than five launches."""

_WARPS_PER_BLOCK = THREADS // 32
_WARP_STEP = 16
_IDS_PER_WARP = 512
_COUNTERS = 1 << 22
_TILE = 4096


def _axes(x: View) -> list[Axis]:
    """The elements in any order: where they lie behind one another, one dimension."""
    return coalesce(sorted(x.axes, key=lambda axis: axis[1], reverse=True))


def plan_bincount(views: Sequence[View], gpu: Gpu, bins: int) -> CallPlan:
    """How integers are counted.

    Raises:
        UnsupportedError: more dimensions than the kernels walk.
    """
    (x,) = views
    return _plan(x, gpu, f"fusedops::IndexBins<{_INDICES[x.dtype]}>", bins, (0,) * 5)


def plan_histogram(
    views: Sequence[View], gpu: Gpu, bins: int, range: tuple[float, float] | None
) -> CallPlan:
    """How samples are counted; see ``plan_bincount``."""
    if range is None:
        raise UnsupportedError("takes a given range; range=None reads the data first")
    (x,) = views
    is_double = x.dtype == torch.float64
    lo, hi = (end if is_double else ctypes.c_float(end).value for end in range)
    step = (hi - lo) / bins
    scale, slack = _guess(lo, hi, bins, is_double)
    constants = tuple(float64_bits(value) for value in (lo, hi, step, scale, slack))
    return _plan(x, gpu, f"fusedops::RangeBins<{_SAMPLES[x.dtype]}>", bins, constants)


def _guess(lo: float, hi: float, bins: int, is_double: bool) -> tuple[float, float]:
    """Bins a unit, and how near a whole number a product with it may be wrong, in bins.

    The difference, the scale and the product are each rounded: 1.5 ulp of up to ``bins``, taken
    twice. An edge is rounded by half an ulp of the larger end. A slack of 1 trusts no product.
    """
    epsilon, least, most = (2.0**-52, 2.0**-1000, 2.0**1000)
    if not is_double:
        epsilon, least, most = (2.0**-23, 2.0**-120, 2.0**120)
    width = hi - lo
    if not least < width < most or not least < bins / width < most:
        return 0.0, 1.0
    edge = max(abs(lo), abs(hi)) * epsilon * bins / width
    return bins / width, min(1.0, 3.0 * bins * epsilon + edge)


def _plan(x: View, gpu: Gpu, struct: str, bins: int, numbers: tuple[int, ...]) -> CallPlan:
    axes = _axes(x)
    count = element_count(axes)
    results = (((bins,), torch.int64),)
    is_row = not axes or (len(axes) == 1 and axes[0][1] == 1)
    places = dims_constants([] if is_row else axes, "dimensions")
    constants = (count, bins, *numbers, *places)
    arguments = f"<{struct}, {'false' if is_row else 'true'}>"
    shared_bytes = most_shared_bytes(gpu)
    private_bytes = (bins + 1) * _PRIVATE_THREADS * 2
    if count > 0 and private_bytes <= shared_bytes:
        # As many blocks as fit, and more where a thread would meet too many elements.
        wanted = gpu.sms * max(1, min(shared_bytes // private_bytes, 2))
        blocks = min(wanted, max(1, ceil_div(count, _PRIVATE_THREADS * 4)))
        blocks = max(blocks, ceil_div(count, _PRIVATE_THREADS * _MOST_PRIVATE_ELEMENTS))
        first = _launch(
            f"histogram_private{arguments}",
            ("pointer", "pointer", *_COUNT_PARAMETERS),
            (0, 2),
            constants,
            (blocks, 1),
            _PRIVATE_THREADS,
            ceil_div(private_bytes, 16) * 16,
        )
        return _joined(results, first, bins)
    group = min(bins, shared_bytes // 4 // 32 * 32)
    sweeps = ceil_div(bins, group)
    if count > 0 and sweeps <= _MOST_SWEEPS:
        group = ceil_div(ceil_div(bins, sweeps), 32) * 32
        blocks = min(
            gpu.sms * max(1, min(_SHARED_BLOCKS_PER_SM, shared_bytes // (group * 4))),
            max(1, ceil_div(count, _SHARED_THREADS * 16)),
        )
        first = _launch(
            f"histogram_shared{arguments}",
            ("pointer", "pointer", "int32", *_COUNT_PARAMETERS),
            (0, 2),
            (group, *constants),
            (blocks, sweeps),
            _SHARED_THREADS,
            group * 4,
        )
        return _joined(results, first, bins)
    zero = _launch(
        "histogram_zero",
        ("pointer", "int64"),
        (1,),
        (bins,),
        (ceil_div(bins, _SHARED_THREADS), 1),
        _SHARED_THREADS,
    )
    if count == 0:
        return CallPlan(results, (zero,))
    add = _launch(
        f"histogram_global{arguments}",
        ("pointer", "pointer", *_COUNT_PARAMETERS),
        (0, 1),
        constants,
        (min(gpu.sms * _SHARED_BLOCKS_PER_SM, ceil_div(count, _SHARED_THREADS * 16)), 1),
        _SHARED_THREADS,
        _CACHE_BYTES,
    )
    return CallPlan(results, (zero, add))


def _launch(
    name: str,
    parameters: tuple[str, ...],
    tensors: tuple[int, ...],
    constants: tuple[int, ...],
    blocks: tuple[int, int],
    threads: int,
    shared_bytes: int = 0,
    source: str = _SOURCE,
) -> Launch:
    kernel = f"fusedops::{name}"
    program = CudaProgram(source, (kernel,))
    return Launch(
        program, kernel, parameters, tensors, constants, blocks, threads, shared_bytes=shared_bytes
    )


def _joined(
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...], first: Launch, bins: int
) -> CallPlan:
    parts = first.blocks[0]
    join = _launch(
        "histogram_join",
        ("pointer", "pointer", "int32", "int32"),
        (2, 1),
        (bins, parts),
        (ceil_div(bins, _JOIN_COLUMNS), 1),
        _JOIN_THREADS,
    )
    return CallPlan(results, (first, join), parts * bins * 4)


def plan_expert_histogram(views: Sequence[View], gpu: Gpu, n_experts: int) -> CallPlan:
    """How ids are sorted by expert.

    Raises:
        UnsupportedError: more dimensions than the kernels walk, or more ids than 32 bits count.
    """
    (ids,) = views
    count = math.prod(ids.shape)
    if count > _MOST_COUNTED:
        raise UnsupportedError(f"counts ids in 32 bits, up to {_MOST_COUNTED}; got {count}")
    results = tuple(((size,), torch.int64) for size in (n_experts, n_experts + 1, count))
    # The order of the ids is theirs in row-major order, so dimensions stay as they are.
    places = dims_constants(coalesce(ids.axes) if count else [], "dimensions")
    element = _INDICES[ids.dtype]
    shared_bytes = (n_experts + 1) * _BLOCK_WARPS * 4
    if count <= _BLOCK_IDS and shared_bytes <= most_shared_bytes(gpu):
        launch = _launch(
            f"experts_block<{element}>",
            ("pointer",) * 4 + ("int64", "int32", *DIMS_PARAMETERS),
            (0, 1, 2, 3),
            (count, n_experts, *places),
            (1, 1),
            1024,
            shared_bytes,
            _EXPERTS_SOURCE,
        )
        return CallPlan(results, (launch,))
    return _sorted_by_launches(results, element, count, n_experts, places)


def _sorted_by_launches(
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    element: str,
    count: int,
    n_experts: int,
    places: tuple[int, ...],
) -> CallPlan:
    wanted = min(ceil_div(count, _IDS_PER_WARP), _COUNTERS // (n_experts + 1))
    warps = max(1, ceil_div(wanted, _WARP_STEP)) * _WARP_STEP
    chunk = max(1, ceil_div(count, warps))
    tiles = ceil_div((n_experts + 1) * warps, _TILE)
    # The sums of the tiles lie behind the counters: one allocation, two pointers would take two.
    vectors = tiles * (_TILE // 4)
    blocks = (warps // _WARPS_PER_BLOCK, 1)
    numbers = ("int64", "int64", "int64", "int32", *DIMS_PARAMETERS)
    shape = (count, chunk, warps, n_experts, *places)
    work = 4
    launches = (
        _experts("experts_zero", ("pointer", "int64"), (work,), (vectors,), tiles * 4),
        _experts(
            f"experts_count<{element}>", ("pointer",) * 2 + numbers, (0, work), shape, blocks[0]
        ),
        _experts("experts_sums", ("pointer", "int64"), (work,), (vectors,), tiles),
        _experts(
            "experts_scan",
            ("pointer", "pointer", "int64", "int64", "int32"),
            (work, 2),
            (vectors, warps, n_experts),
            tiles,
        ),
        _experts(
            f"experts_scatter<{element}>",
            ("pointer",) * 5 + numbers,
            (0, work, 2, 1, 3),
            shape,
            blocks[0],
        ),
    )
    return CallPlan(results, launches, vectors * 16 + ceil_div(tiles, 4) * 16)


def _experts(
    name: str,
    parameters: tuple[str, ...],
    tensors: tuple[int, ...],
    constants: tuple[int, ...],
    blocks: int,
) -> Launch:
    source = _EXPERTS_SOURCE
    return _launch(name, parameters, tensors, constants, (blocks, 1), THREADS, source=source)


BINCOUNT = Served(
    CudaCall(plan_bincount), lambda x, bins: ((x,), (bins,)), lambda results, _: results[0]
)
"""``fusedops::bincount``."""

HISTOGRAM = Served(
    CudaCall(plan_histogram),
    lambda x, bins, range: ((x,), (bins, None if range is None else tuple(range))),
    lambda results, _: results[0],
)
"""``fusedops::histogram`` with a given range."""

EXPERT_HISTOGRAM = Served(
    CudaCall(plan_expert_histogram),
    lambda expert_ids, n_experts: ((expert_ids,), (n_experts,)),
    lambda results, _: results,
)
"""``fusedops::expert_histogram``."""
