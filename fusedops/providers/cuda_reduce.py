"""``reduce`` by csrc/reduce.cu: which kernel walks which elements, and how rows are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from fusedops.providers.cuda_reduce_ops import KERNEL_DTYPES, KERNEL_OPS, KernelOp

__all__ = ["plan_reduce"]

_SOURCE = "reduce.cu"

_UNROLL = 8
_SHORT_UNROLL = 2
_GATHER_UNROLL = 4
_LEAST_LANES = 8
"""Threads of a row that is not shorter: they read 128 bytes side by side."""

_SEGMENT_BYTES = 512
"""Pieces of a row shorter than this are gathered one element at a time."""

_BLOCKS_PER_SM = 8
"""Blocks to split few rows into: more than fit at once, so that none waits for the last ones."""

_COLUMN_BLOCKS = 4
"""Blocks of columns that an SM runs at once."""

_COLUMN_ROUNDS = (2, 4)
"""Rounds of them to split columns into: of the numbers in between, the one that leaves the fewest
SMs idle in the last round (1 GiB on an H200: 243.2 us with 1024 blocks, 244.9 with 2176)."""

_LEAST_SPLIT_BYTES = 32 << 10
_SPLIT_BYTES = 256 << 10
"""What a block takes at most of rows that are split: with several times more blocks than fit at
once, the last ones leave few SMs idle (1 GiB on an H200: 237 us in 4096 pieces, 240.6 in 1056)."""

_CLUSTERS = ((8, 512, 1), (4, 512, 1), (2, 1024, 1), (2, 512, 2))
"""Blocks a cluster, threads a block, and blocks an SM that must be enough for all of them.

Rows whose blocks run all at once take the time of one block, so that the SMs should get as many
bytes each: 64 rows of 128,256 float32 take 11.4 us in clusters of 2 (8.2 from the L2), in clusters
of 4 and 8 with as many threads an SM 12.6 and 12.1 (10.3 and 9.2), and 14.0 (11.7) where they take
two rounds (H200). Blocks of 1024 threads come in twos at most: of clusters of 4 with one block an
SM fewer than 32 run at once.
"""

_WIDE_THREADS = 1024
_WIDE_ELEMENT_BYTES = 4
"""Such a block leaves 64 registers a thread, which only elements of this size get along with."""

_MANY_CLUSTERS = (8, 512)
"""Of more rows, which take several rounds anyway: short blocks."""

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
    rows, sms = problem.results, problem.gpu.sms
    size = problem.x.dtype.itemsize
    fitting = [
        (n, threads)
        for n, threads, each in _CLUSTERS
        if rows * n <= sms * each and (threads < _WIDE_THREADS or size == _WIDE_ELEMENT_BYTES)
    ]
    blocks, threads = fitting[0] if fitting else _MANY_CLUSTERS
    step = VECTOR_BYTES // size
    chunk = ceil_div(ceil_div(length, blocks), step) * step
    kernel = problem.kernel("reduce_cluster", str(blocks), str(threads))
    return Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _CLUSTER_PARAMETERS,
        (X, OUT),
        (length, chunk, *problem.constants(problem.kept)),
        (rows * blocks, 1),
        threads=threads,
        cluster=blocks,
    )


def _column_splits(blocks: int, sms: int) -> int:
    """Into how many parts each of so many blocks of columns is split."""
    at_once = _COLUMN_BLOCKS * sms
    fewest, most = (rounds * at_once // blocks for rounds in _COLUMN_ROUNDS)
    return max(
        range(max(fewest, 1), max(most, 1) + 1),
        key=lambda n: n * blocks / ceil_div(n * blocks, at_once),
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
    wanted = blocks * _column_splits(blocks, problem.gpu.sms)
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
