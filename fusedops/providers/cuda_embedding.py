"""``embedding`` and ``embedding_sumsq`` by csrc/embedding.cu.

Rows alone are moved by a block a token, 16 bytes a thread where rows allow it. With their sums of
squares they are kept in registers, by the layouts of the norms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_call import CallPlan, CudaCall
from fusedops.providers.cuda_plan import (
    DIMS_PARAMETERS,
    THREADS,
    VECTOR_BYTES,
    Gpu,
    Launch,
    View,
    ceil_div,
    coalesce,
    dims_constants,
    element_count,
)
from fusedops.providers.cuda_rows import KERNEL_FLOATS, access_width, row_layout, rows_of
from fusedops.providers.cuda_sinks import Served

__all__ = ["EMBEDDING", "EMBEDDING_SUMSQ", "plan_embedding", "plan_embedding_sumsq"]

_SOURCE = "embedding.cu"
_WORDS = {2: "unsigned short", 4: "unsigned"}
_INDICES = {torch.int32: "int", torch.int64: "long long"}
_UNROLL = 4
_LARGEST_GRID = 2**31 - 1
_LARGEST_GRID_Y = 65535

_PARAMETERS = (*["pointer"] * 3, "int64", "int32", "int64", "int64", *DIMS_PARAMETERS)
_SUMSQ_PARAMETERS = (
    *["pointer"] * 4,
    *("int64", "int64", "int32", "int64", "int64"),
    *DIMS_PARAMETERS,
)


def plan_embedding(views: Sequence[View], gpu: Gpu) -> CallPlan:
    """How rows of the table are gathered.

    Raises:
        UnsupportedError: ids of more dimensions than the kernel walks, or more of them than a grid
            has blocks.
    """
    ids, weight = views
    rows, columns = weight.shape
    results = (((*ids.shape, columns), weight.dtype),)
    axes = coalesce(ids.axes)
    tokens = element_count(ids.axes)
    if tokens == 0 or columns == 0:
        return CallPlan(results)
    row_stride, column_stride = weight.strides
    size = weight.dtype.itemsize
    word = _WORDS[size]
    width = VECTOR_BYTES // size
    if (
        column_stride == 1
        and weight.aligned_bytes == VECTOR_BYTES
        and columns % width == 0
        and row_stride % width == 0
    ):
        word, columns, row_stride = "uint4", columns // width, row_stride // width
    unroll = min(_UNROLL, ceil_div(columns, THREADS))
    blocks = (tokens, ceil_div(columns, THREADS * unroll))
    if tokens > _LARGEST_GRID or blocks[1] > _LARGEST_GRID_Y:
        raise UnsupportedError(
            f"takes up to {_LARGEST_GRID} ids and rows of {_LARGEST_GRID_Y * THREADS * _UNROLL} "
            f"words, got {tokens} and {columns}"
        )
    kernel = f"fusedops::embedding<{word}, {_INDICES[ids.dtype]}, {unroll}>"
    launch = Launch(
        CudaProgram(_SOURCE, (kernel,)),
        kernel,
        _PARAMETERS,
        (0, 1, 2),
        (rows, columns, row_stride, column_stride, *dims_constants(axes, "dimensions")),
        blocks,
    )
    return CallPlan(results, (launch,))


def plan_embedding_sumsq(views: Sequence[View], gpu: Gpu) -> CallPlan:
    """How rows of the table are gathered, and their squares summed.

    Raises:
        UnsupportedError: as ``plan_embedding``, or rows are too long for registers.
    """
    ids, weight = views
    vocabulary, columns = weight.shape
    tokens = element_count(ids.axes)
    results = (((*ids.shape, columns), weight.dtype), ((1, tokens), torch.float32))
    rows = rows_of(weight)
    width = access_width([rows], [], columns)
    layout = row_layout(
        tokens, columns, width, gpu, element_bytes=weight.dtype.itemsize, joins=True
    )
    packs = columns // width
    types = (layout.name(packs), KERNEL_FLOATS[weight.dtype], _INDICES[ids.dtype], str(width))
    constants = (
        *(tokens, vocabulary, packs, *weight.strides),
        *dims_constants(coalesce(ids.axes), "dimensions"),
    )
    if tokens == 0:
        return CallPlan(results)
    kernel = f"fusedops::embedding_sumsq<{', '.join(types)}>"
    launch = layout.launch(_SOURCE, kernel, _SUMSQ_PARAMETERS, (0, 1, 2, 3), constants, tokens)
    return CallPlan(results, (launch,))


EMBEDDING = Served(
    CudaCall(plan_embedding),
    lambda token_ids, weight: ((token_ids, weight), ()),
    lambda results, _: results[0],
)
"""``fusedops::embedding``."""

EMBEDDING_SUMSQ = Served(
    CudaCall(plan_embedding_sumsq),
    lambda token_ids, weight: ((token_ids, weight), ()),
    lambda results, _: (results[0], results[1]),
)
"""``fusedops::embedding_sumsq``."""
