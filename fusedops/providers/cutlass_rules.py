"""What both CuTe DSL providers ask: of a problem, before a kernel; of tensors, before a launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fusedops.config import tuned_choices
from fusedops.epilogue.base import FLOAT_DTYPES, Node
from fusedops.errors import ConfigError
from fusedops.jit.dsl import missing_wheels
from fusedops.jit.location import OVERLAY_VARIABLE
from fusedops.problem import GemmProblem
from fusedops.providers.base import Support, unsupported
from fusedops.weight import Dense

__all__ = ["all_aligned", "along_columns", "first_refusal"]


def first_refusal(
    problem: GemmProblem,
    own_reason: Callable[[GemmProblem], str | None],
    choose: Callable[[GemmProblem], object],
    dtypes: tuple[torch.dtype, ...],
    formats: tuple[str, ...] = (Dense.spec_name,),
) -> Support | None:
    """The first reason why a provider's kernels cannot serve a problem, or None if they can.

    Args:
        problem: on a device that the provider's kernels are for.
        own_reason: what these kernels refuse beside what every CuTe DSL kernel does.
        choose: gives the tiling of a problem with M, N > 0, or raises ConfigError with the reasons.
        dtypes: of x and the weight that these kernels multiply.
        formats: of weights that they take, by the names that specs have for them.

    Raises:
        ConfigError: the file of measured choices is malformed.
    """
    if problem.spec.weight.spec_name not in formats:
        return unsupported(f"has no kernel for the weight format {problem.spec.weight}")
    if problem.x_dtype not in dtypes:
        *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        names = f"{', '.join(first)} and {last}"
        return unsupported(f"multiplies {names}, got {problem.x_dtype}")
    reason = own_reason(problem)
    if reason is not None:
        return unsupported(reason)
    for node in problem.spec.epilogue:
        if type(node).emit is Node.emit:
            return unsupported(f"the node {node} has no emission (Node.emit)")
    # The weight's own operands have the dtypes that its format states.
    before, own = (len(part.operands()) for part in (problem.spec.prologue, problem.spec.weight))
    others = (*problem.operand_dtypes[:before], *problem.operand_dtypes[before + own :])
    if any(dtype is not None and dtype not in FLOAT_DTYPES for dtype in others):
        return unsupported(f"reads float operands only, got {others}")
    if 0 in (problem.m, problem.spec.n):
        return None
    # A malformed file of measured choices is an error, not a reason to pass the kernels over.
    tuned_choices(problem.gpu)
    try:
        choose(problem)
    except ConfigError as error:
        return unsupported(str(error))
    missing = missing_wheels(prebuilt=bool(os.environ.get(OVERLAY_VARIABLE)))
    return unsupported(missing) if missing else None


def along_columns(problem: GemmProblem) -> list[bool]:
    """Which tensors of a chain run along the result's columns, where kernels access neighbours.

    One entry for each operand that is given, then one for each extra output.
    """
    spec, rows = problem.spec, 3
    operands = zip(spec.operands, problem.operand_dtypes, strict=True)
    found = [operand.axis in ("n", "mn") for operand, dtype in operands if dtype is not None]
    for output, width in spec.epilogue.extra_outputs(spec.n):
        dtype = output.dtype or spec.out_dtype
        like = output.allocate((rows,), width, dtype, torch.device("meta"))
        found.append(tuple(like.shape) == (rows, width))
    return found


def all_aligned(tensors: Iterable[Tensor], size_bytes: int) -> bool:
    """Whether every address and row pitch is a multiple of ``size_bytes``, a power of two.

    A tensor on the device ``meta`` stands for one that torch allocates: its address is 0.
    """
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
        if tensor.dim() > 1:
            bits |= tensor.stride(0) * tensor.itemsize
    return bits % size_bytes == 0
