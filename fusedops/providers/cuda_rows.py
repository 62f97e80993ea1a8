"""Rows kept in registers (csrc/include/row.cuh): how many threads a row gets, and who has what.

Every kernel of norms, gated activations and quantization reads a row once, so the layout decides
how many bytes are in flight and what a small call waits for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusedops.epilogue.outputs import GROUP
from fusedops.errors import UnsupportedError
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.cuda_plan import (
    VECTOR_BYTES,
    Axis,
    Gpu,
    Launch,
    View,
    ceil_div,
    coalesce,
    element_count,
    power_of_two_from,
)

__all__ = [
    "KERNEL_FLOATS",
    "MOST_CLUSTER",
    "MOST_COLUMNS",
    "SCALE_ROW_ALIGNMENT",
    "RowLayout",
    "Rows",
    "access_width",
    "row_layout",
    "rows_of",
    "scale_pitch",
]

KERNEL_FLOATS = {
    torch.float32: "float",
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
}
"""Element types of activations and what they are in CUDA."""

SCALE_ROW_ALIGNMENT = 4
"""A group's scales start at multiples of this many floats: 16 bytes, one TMA unit."""

MOST_COLUMNS = 8192
"""Elements that one block keeps of a row whose elements are read one by one."""

MOST_CLUSTER = 8
"""Blocks that share a longer row on a GPU with clusters."""

_WARP = 32
_BLOCK = 128
"""Threads a block where several rows share it: small blocks come and go without leaving a hole in
what is in flight."""

_WIDE_BLOCK = 256
_MOST_THREADS = 1024
_LEAN_THREADS = 512
"""Threads a block up to which two blocks fit an SM whatever registers they take."""

_PACKS = 4
"""Packs a thread where rows are many: 64 bytes in flight a thread, within 40 to 72 registers."""

_CLUSTER_PACKS = 1024
"""Longer rows, if they are few, are read by a cluster: 16 KB by one SM take longer than meeting."""

_EARLY_ROWS = 64
"""Rows up to which a kernel lets the next one start at its entry, see csrc/include/pdl.cuh.

It is for the product that follows: between two products 64 rows of 4096 take 0.6 to 2.1 us less
this way. Behind one another, kernels of rows do better without it (0.4 to 1.3 us at 64 rows).
"""

_BLOCKS_PER_SM = 8
_LARGEST_GRID = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """A tensor as rows of its last dimension.

    Attributes:
        axes: the other dimensions, joined where they lie behind one another.
        count: number of rows.
        columns: elements a row.
        inner: stride of an element.
        view: the tensor.
    """

    axes: list[Axis]
    count: int
    columns: int
    inner: int
    view: View


def rows_of(view: View) -> Rows:
    """The rows of a tensor with at least one dimension."""
    *outer, (columns, inner) = view.axes
    return Rows(coalesce(outer), element_count(outer), columns, inner, view)


def scale_pitch(rows: int) -> int:
    """Floats from one group's scales to the next one's: whole 16-byte units."""
    return ceil_div(rows, SCALE_ROW_ALIGNMENT) * SCALE_ROW_ALIGNMENT


def access_width(rows: Sequence[Rows], vectors: Sequence[View], columns: int) -> int:
    """Elements that are read and written at once: up to 16 bytes of the first tensor.

    Args:
        rows: the tensors whose rows are walked, of one dtype.
        vectors: contiguous tensors of ``columns`` elements that are read beside them.
        columns: elements a row of the result.
    """
    size = rows[0].view.dtype.itemsize
    width = VECTOR_BYTES // size
    while width > 1:
        aligned = all(
            each.inner == 1
            and each.view.aligned_bytes >= width * size
            and all(stride % width == 0 for _, stride in each.axes)
            for each in rows
        )
        parameters = all(
            view.aligned_bytes >= min(VECTOR_BYTES, width * view.dtype.itemsize) for view in vectors
        )
        if columns % width == 0 and aligned and parameters:
            break
        width //= 2
    return width


@dataclass(frozen=True)
class RowLayout:
    """A ``RowLayout`` of csrc/include/row.cuh with its grid.

    Attributes:
        threads: a block.
        lanes: threads a row in one block.
        packs: packs a thread.
        run: packs of a thread in a group of elements that a whole warp shares.
        parts: blocks a row.
        cluster: ``parts`` where they join their values, else 1.
        is_early: the next kernel may start when this one begins, not when it stops waiting.
    """

    threads: int
    lanes: int
    packs: int
    run: int = 1
    parts: int = 1
    cluster: int = 1
    is_early: bool = False

    def name(self, packs: int) -> str:
        """The type in CUDA for rows of so many packs."""
        is_full = packs == self.lanes * self.packs * self.parts
        numbers = (self.threads, self.lanes, self.packs, self.run, self.cluster)
        flags = (str(flag).lower() for flag in (is_full, self.is_early))
        return f"fusedops::RowLayout<{', '.join((*map(str, numbers), *flags))}>"

    def blocks(self, rows: int) -> int:
        """Blocks for a number of rows.

        Raises:
            UnsupportedError: a grid has no room for them.
        """
        count = ceil_div(rows, self.threads // self.lanes) * self.parts
        if count > _LARGEST_GRID:
            raise UnsupportedError(f"takes up to {_LARGEST_GRID} blocks of threads, got {count}")
        return count

    def launch(
        self,
        source: str,
        kernel: str,
        parameters: tuple[str, ...],
        tensors: tuple[int, ...],
        constants: tuple[int, ...],
        rows: int,
    ) -> Launch:
        """The launch of a kernel of ``source`` on the blocks that a number of rows takes."""
        return Launch(
            CudaProgram(source, (kernel,)),
            kernel,
            parameters,
            tensors,
            constants,
            (self.blocks(rows), 1),
            threads=self.threads,
            cluster=self.cluster,
        )


def row_layout(
    rows: int,
    columns: int,
    width: int,
    gpu: Gpu,
    *,
    element_bytes: int,
    joins: bool,
    groups: bool = False,
    packs_at_most: int = _PACKS,
    packs_at_least: int = _PACKS,
) -> RowLayout:
    """How threads share the rows.

    Args:
        rows: their number.
        columns: elements a row, a multiple of ``width``.
        width: elements a pack.
        gpu: where to run.
        element_bytes: size of an element.
        joins: values of a whole row are joined, so that its blocks must be one or a cluster.
        groups: 128 neighbouring elements share a scale.
        packs_at_most: packs a thread where rows need not be joined.
        packs_at_least: packs a thread where more rows than multiprocessors are joined, unless the
            block would have more than 512 threads; a power of two up to 4.

    Raises:
        UnsupportedError: a row is longer than the threads that may join its values can keep.
    """
    layout = _late_layout(
        rows, columns, width, gpu, element_bytes, joins, groups, packs_at_most, packs_at_least
    )
    return replace(layout, is_early=rows <= _EARLY_ROWS)


def _late_layout(
    rows: int,
    columns: int,
    width: int,
    gpu: Gpu,
    element_bytes: int,
    joins: bool,
    groups: bool,
    packs_at_most: int,
    packs_at_least: int,
) -> RowLayout:
    packs = columns // width
    run = max(1, GROUP // width // _WARP) if groups else 1
    if packs <= _WARP * run:
        lanes = _WARP if run > 1 else power_of_two_from(packs)
        return RowLayout(_BLOCK, lanes, run, run)
    if packs <= _WARP * _PACKS and rows > gpu.sms:
        return RowLayout(_BLOCK, _WARP, max(run, power_of_two_from(ceil_div(packs, _WARP))), run)
    if not joins:
        return _apart(rows, packs, run, packs_at_most, gpu)
    longest = MOST_COLUMNS * (MOST_CLUSTER if gpu.has_clusters else 1)
    if columns > longest:
        # Whatever the alignment, so that the answer does not depend on an address.
        raise UnsupportedError(
            f"keeps rows of up to {longest} elements in registers, got {columns}"
        )
    is_few = rows <= gpu.sms
    sizes = [n for n in (1, 2, 4) if n % run == 0 and (is_few or n >= packs_at_least)]
    if width * element_bytes < VECTOR_BYTES:
        sizes.append(2 * _PACKS)
    parts = [1]
    if gpu.has_clusters:
        is_split = 2 * rows <= gpu.sms and packs > _CLUSTER_PACKS
        parts = [MOST_CLUSTER] if is_split else [1, 2, 4, MOST_CLUSTER]
    for blocks, most in itertools.product(parts, (_LEAN_THREADS, _MOST_THREADS)):
        if most > _LEAN_THREADS and blocks < parts[-1]:
            continue
        for each in sizes:
            threads = ceil_div(packs, blocks * each * _WARP) * _WARP
            if threads <= most:
                return RowLayout(threads, threads, each, run, blocks, blocks)
    raise UnsupportedError(f"has no layout for {rows} rows of {columns} elements")


def _apart(rows: int, packs: int, run: int, packs_at_most: int, gpu: Gpu) -> RowLayout:
    """Blocks that know nothing of one another, each with a piece of one row."""
    each = max(run, packs_at_most)
    if rows * ceil_div(packs, _BLOCK) <= _BLOCKS_PER_SM * gpu.sms:
        each = run
        candidates = [_BLOCK]
    else:
        candidates = [_WIDE_BLOCK, _BLOCK]
    parts = {threads: ceil_div(packs, threads * each) for threads in candidates}
    # The size whose last block of a row is fuller; the wider one on a tie.
    threads = min(candidates, key=lambda n: n * parts[n])
    return RowLayout(threads, threads, each, run, parts[threads])
