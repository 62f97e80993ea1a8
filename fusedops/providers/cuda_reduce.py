"""``reduce`` by csrc/reduce.cu: which kernel walks which elements, and how rows are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_plan import (
    DIMS_PARAMETERS,
    OUT,
    THREADS,
    VECTOR_BYTES,
    WORK,
    Axis,
    Gpu,
    Launch,
    Plan,
    View,
    X,
    ceil_div,
    coalesce,
    dims_constants,
    element_count,
    power_of_two_from,
)

__all__ = ["KERNEL_DTYPES", "KERNEL_OPS", "KernelOp", "plan_reduce"]

_SOURCE = "reduce.cu"

KERNEL_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}
"""Element types and what they are in CUDA."""


@dataclass(frozen=True)
class KernelOp:
    """A struct of csrc/include/reduce_ops.cuh.

    Attributes:
        template: its name with ``<T>`` for the element type.
        values: numbers in an accumulator.
        compares: they are of the type for comparing (``Wide``), else of that for adding
            (``Total``), in which integers have 64 bits.
        has_position: an accumulator holds a 64-bit position, too.
        is_flag: an accumulator is one int, whatever the elements are.
        integer_result: dtype of ``Out`` for integers; None: that of the input.
        float_result: dtype of ``Out`` for floats; None: that of the input.
    """

    template: str
    values: int = 1
    compares: bool = False
    has_position: bool = False
    integer_result: torch.dtype | None = None
    float_result: torch.dtype | None = None
    is_flag: bool = False

    def name(self, dtype: torch.dtype) -> str:
        """The struct for elements of ``dtype``."""
        return f"fusedops::{self.template.replace('<T', '<' + KERNEL_DTYPES[dtype])}"

    def accumulator_bytes(self, dtype: torch.dtype) -> int:
        """``sizeof(Acc)``."""
        if self.is_flag:
            return 4
        is_double_word = dtype in (torch.float64, torch.int64) or not (
            self.compares or dtype.is_floating_point
        )
        value_bytes = 8 if is_double_word else 4
        return 16 if self.has_position else self.values * value_bytes

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of ``Out``."""
        return (self.float_result if dtype.is_floating_point else self.integer_result) or dtype


_INT64 = torch.int64
_BOOL = torch.bool

KERNEL_OPS = {
    "sum": KernelOp("Sum<T>", integer_result=_INT64),
    "mean": KernelOp("Mean<T>", integer_result=torch.float32),
    "sumsq": KernelOp("SumSq<T>", integer_result=_INT64),
    "max": KernelOp("Max<T>", compares=True),
    "min": KernelOp("Min<T>", compares=True),
    "absmax": KernelOp("AbsMax<T>", compares=True),
    "argmax": KernelOp(
        "Arg<T, true>",
        compares=True,
        has_position=True,
        integer_result=_INT64,
        float_result=_INT64,
    ),
    "argmin": KernelOp(
        "Arg<T, false>",
        compares=True,
        has_position=True,
        integer_result=_INT64,
        float_result=_INT64,
    ),
    "logsumexp": KernelOp("LogSumExp<T>", values=2, compares=True),
    "any": KernelOp("Any<T>", is_flag=True, integer_result=_BOOL, float_result=_BOOL),
    "all": KernelOp("All<T>", is_flag=True, integer_result=_BOOL, float_result=_BOOL),
}
"""The struct of each operation of ``reduce``."""

_UNROLL = 8
_SHORT_UNROLL = 2
_GATHER_UNROLL = 4
_LEAST_LANES = 8
"""Threads of a row that is not shorter: they read 128 bytes side by side."""

_SEGMENT_BYTES = 512
"""Pieces of a row shorter than this are gathered one element at a time."""

_BLOCKS_PER_SM = 8
"""Blocks to split few rows into: more than fit at once, so that none waits for the last ones."""

_COLUMN_BLOCKS_PER_SM = 16
_LEAST_SPLIT_BYTES = 32 << 10
_SPLIT_BYTES = 256 << 10
"""What a block takes at most of rows that are split: with several times more blocks than fit at
once, the last ones leave few SMs idle (1 GiB on an H200: 237 us in 4096 pieces, 240.6 in 1056)."""

_CLUSTER_BLOCKS = 8
_CLUSTER_THREADS = 512
_CLUSTER_MAX_BYTES = 1 << 20
"""Longer rows are split over more blocks than a cluster has, which takes a second launch."""

_MAX_PACK = 8
_FINISH_WIDE = 4096
"""Results from which on one thread joins the parts of each, with neighbours side by side."""

_ROWS_PARAMETERS = (
    *("pointer", "pointer", "int64", "int64", "int64", "int64", "int32"),
    *(*DIMS_PARAMETERS, *DIMS_PARAMETERS),
)
_CLUSTER_PARAMETERS = ("pointer", "pointer", "int64", "int64", *DIMS_PARAMETERS)
_COLUMNS_PARAMETERS = (
    *("pointer", "pointer", "int64", "int64", "int64", "uint32", "int32"),
    *(*DIMS_PARAMETERS, *DIMS_PARAMETERS),
)
_GATHER_PARAMETERS = (
    *("pointer", "pointer", "int64", "int64", "int64", "int32"),
    *(*DIMS_PARAMETERS, *DIMS_PARAMETERS),
)
_FINISH_PARAMETERS = ("pointer", "pointer", *["int64"] * 5, "int32")


@dataclass(frozen=True)
class _Problem:
    """What is reduced: the kept and the reduced dimensions, outermost first."""

    x: View
    op: KernelOp
    kept: list[Axis]
    reduced: list[Axis]
    gpu: Gpu

    @property
    def results(self) -> int:
        return element_count(self.kept)

    @property
    def length(self) -> int:
        return element_count(self.reduced)

    @property
    def struct(self) -> str:
        return self.op.name(self.x.dtype)

    def kernel(self, name: str, *arguments: str) -> str:
        """A name expression; ``arguments`` follow the struct and the element type."""
        return f"fusedops::{name}<{', '.join([self.struct, _element(self.x), *arguments])}>"

    def constants(self, *axes: list[Axis]) -> tuple[int, ...]:
        return tuple(n for part in axes for n in dims_constants(part, "dimensions"))


def _element(x: View) -> str:
    return KERNEL_DTYPES[x.dtype]


def plan_reduce(x: View, gpu: Gpu, op: str, dims: Sequence[int] | None, keepdim: bool) -> Plan:
    """How ``reduce`` computes its result; the arguments were checked.

    Raises:
        UnsupportedError: more dimensions than the kernels walk.
    """
    count = len(x.shape)
    chosen = set(range(count)) if dims is None else {d % max(count, 1) for d in dims}
    kept = [axis for d, axis in enumerate(x.axes) if d not in chosen]
    reduced = [axis for d, axis in enumerate(x.axes) if d in chosen]
    kernel_op = KERNEL_OPS[op]
    shape = tuple(
        1 if d in chosen else size for d, size in enumerate(x.shape) if keepdim or d not in chosen
    )
    dtype = kernel_op.result_dtype(x.dtype)
    if element_count(kept) == 0:
        return Plan(shape, dtype)
    if element_count(reduced) == 0:
        reduced = [(0, 1)]
    elif not kernel_op.has_position:
        # The order of additions is free as long as it is fixed; a repeated dimension goes outside.
        reduced.sort(key=lambda axis: axis[1] or 2**63, reverse=True)
    problem = _Problem(x, kernel_op, coalesce(kept), coalesce(reduced), gpu)
    first, layout = _first_launch(problem)
    splits = first.blocks[1]
    if first.tensors[1] == OUT:
        return Plan(shape, dtype, (first,))
    work_bytes = splits * problem.results * kernel_op.accumulator_bytes(x.dtype)
    return Plan(shape, dtype, (first, _finish(problem, splits, layout)), work_bytes)


def _first_launch(problem: _Problem) -> tuple[Launch, tuple[int, int]]:
    """The launch that reads x, and where its parts lie: stride of a result and of a part."""
    inner, stride = problem.reduced[-1] if problem.reduced else (1, 1)
    is_long = inner * problem.x.dtype.itemsize >= _SEGMENT_BYTES
    if stride == 1 and (len(problem.reduced) < 2 or is_long):
        launch = _rows(problem)
    elif problem.kept and problem.kept[-1][1] == 1:
        launch = _columns(problem)
        return launch, (1, problem.results)
    else:
        launch = _gather(problem)
    return launch, (launch.blocks[1], 1)


def _split(units: int, blocks: int, wanted: int, least: int, step: int) -> tuple[int, int]:
    """(units a block takes, blocks along y) so that about ``wanted`` blocks have work.

    Args:
        units: of a row.
        blocks: blocks without splitting.
        least: units that are worth a block.
        step: units in the loop of a block, of which a part should be a multiple.
    """
    splits = min(ceil_div(wanted, blocks), units // least, 65535)
    if 2 * blocks > wanted or splits < 2:
        return max(units, 1), 1
    chunk = ceil_div(ceil_div(units, splits), step) * step
    return chunk, ceil_div(units, chunk)


def _launch(
    problem: _Problem,
    kernel: tuple[str, ...],
    parameters: tuple[str, ...],
    constants: tuple[int, ...],
    blocks: tuple[int, int],
) -> Launch:
    """A launch that writes results, or parts where rows are split over blocks."""
    is_final = blocks[1] == 1
    expression = problem.kernel(*kernel, str(is_final).lower())
    return Launch(
        CudaProgram(_SOURCE, (expression,)),
        expression,
        parameters,
        (X, OUT if is_final else WORK),
        constants,
        blocks,
    )


def _rows(problem: _Problem) -> Launch:
    *outer, (length, _) = problem.reduced or [(1, 1)]
    segments = element_count(outer)
    size = problem.x.dtype.itemsize
    vectors = ceil_div(length * size, VECTOR_BYTES)
    unroll = _UNROLL if vectors >= _UNROLL * _LEAST_LANES else _SHORT_UNROLL
    lanes = power_of_two_from(ceil_div(vectors, unroll))
    lanes = min(max(lanes, power_of_two_from(min(vectors, _LEAST_LANES))), THREADS)
    blocks = ceil_div(problem.results, THREADS // lanes)
    wanted = _BLOCKS_PER_SM * problem.gpu.sms
    row_bytes = segments * length * size
    is_few = 2 * blocks <= wanted and row_bytes >= 2 * _LEAST_SPLIT_BYTES
    is_cluster = problem.gpu.has_clusters and segments == 1 and row_bytes <= _CLUSTER_MAX_BYTES
    if is_few and is_cluster:
        return _cluster(problem, length)
    units, unit_bytes = (length, size) if segments == 1 else (segments, length * size)
    step = THREADS * VECTOR_BYTES // size if segments == 1 else 1
    least = ceil_div(_LEAST_SPLIT_BYTES, unit_bytes)
    pieces = max(wanted, problem.results * row_bytes // _SPLIT_BYTES)
    chunk, splits = _split(units, blocks, pieces, least, step) if is_few else (units, 1)
    return _launch(
        problem,
        ("reduce_rows", str(unroll)),
        _ROWS_PARAMETERS,
        (
            *(problem.results, segments, length, max(chunk, 1), lanes),
            *problem.constants(problem.kept, outer),
        ),
        (blocks, splits),
    )


def _cluster(problem: _Problem, length: int) -> Launch:
    step = VECTOR_BYTES // problem.x.dtype.itemsize
    chunk = ceil_div(ceil_div(length, _CLUSTER_BLOCKS), step) * step
    kernel = problem.kernel("reduce_cluster")
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _CLUSTER_PARAMETERS,
        (X, OUT),
        (length, chunk, *problem.constants(problem.kept)),
        (problem.results * _CLUSTER_BLOCKS, 1),
        threads=_CLUSTER_THREADS,
        cluster=_CLUSTER_BLOCKS,
    )


def _columns(problem: _Problem) -> Launch:
    *outer, (columns, _) = problem.kept
    x = problem.x
    width = min(VECTOR_BYTES // x.dtype.itemsize, _MAX_PACK)
    numbers = (columns, *(stride for _, stride in (*outer, *problem.reduced)))
    if x.aligned_bytes < width * x.dtype.itemsize or any(n % width for n in numbers):
        width = 1
    packs = columns // width
    lanes = min(power_of_two_from(packs), 32)
    column_blocks = ceil_div(packs, lanes)
    blocks = column_blocks * element_count(outer)
    step = THREADS // lanes * _UNROLL
    wanted = _COLUMN_BLOCKS_PER_SM * problem.gpu.sms
    chunk, splits = _split(problem.length, blocks, wanted, 2 * step, step)
    return _launch(
        problem,
        ("reduce_columns", str(width)),
        _COLUMNS_PARAMETERS,
        (
            *(columns, problem.length, chunk, column_blocks, lanes),
            *problem.constants(outer, problem.reduced),
        ),
        (blocks, splits),
    )


def _gather(problem: _Problem) -> Launch:
    lanes = min(power_of_two_from(ceil_div(problem.length, _GATHER_UNROLL)), THREADS)
    blocks = ceil_div(problem.results, THREADS // lanes)
    step = THREADS * _GATHER_UNROLL
    wanted = _BLOCKS_PER_SM * problem.gpu.sms
    chunk, splits = _split(problem.length, blocks, wanted, 2 * step, step)
    return _launch(
        problem,
        ("reduce_gather",),
        _GATHER_PARAMETERS,
        (
            *(problem.results, problem.length, chunk, lanes),
            *problem.constants(problem.kept, problem.reduced),
        ),
        (blocks, splits),
    )


def _finish(problem: _Problem, splits: int, layout: tuple[int, int]) -> Launch:
    results = problem.results
    lanes = min(power_of_two_from(splits), THREADS) if results < _FINISH_WIDE else 1
    kernel = f"fusedops::reduce_finish<{problem.struct}>"
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _FINISH_PARAMETERS,
        (WORK, OUT),
        (results, splits, *layout, problem.length, lanes),
        (ceil_div(results, THREADS // lanes), 1),
    )
