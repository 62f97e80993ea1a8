"""Asking GEMM providers; prologues run ahead for those whose kernels do not have them inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedops.epilogue.base import Context
from fusedops.problem import GemmProblem
from fusedops.prologue import NO_PROLOGUE, RmsNormPrologue, rms_normalize
from fusedops.providers.base import Support, unpinned
from fusedops.providers.gemm import GEMM_PROVIDERS, GemmRun

__all__ = ["answer", "behind_prologue", "description", "run_of", "with_prologue_ahead"]


def behind_prologue(problem: GemmProblem) -> GemmProblem | None:
    """What is left of a problem once its prologue has run on its own; None where it has none."""
    spec = problem.spec
    if spec.prologue == NO_PROLOGUE:
        return None
    # The prologue's result is a new, dense x.
    pitch = spec.k * problem.x_dtype.itemsize
    return replace(
        problem,
        spec=replace(spec, prologue=NO_PROLOGUE),
        operand_dtypes=problem.operand_dtypes[len(spec.prologue.operands()) :],
        aligned_bytes=min(problem.aligned_bytes, pitch & -pitch or 16),
    )


def with_prologue_ahead(problem: GemmProblem, run: GemmRun) -> GemmRun:
    """``run``, which serves ``behind_prologue(problem)``, for the whole problem.

    The prologue rounds to x's dtype wherever it runs, so the result is that of a fused one.
    """
    front = _front(problem)
    count = len(problem.spec.prologue.operands())

    def run_both(
        x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
    ) -> list[Tensor]:
        return run(front(x, operands), w, operands[count:], out)

    return run_both


def _front(problem: GemmProblem) -> Callable[[Tensor, Sequence[Tensor | None]], Tensor]:
    spec, m, k = problem.spec, problem.m, problem.spec.k
    prologue = spec.prologue
    names = [operand.name for operand in prologue.operands()]

    def in_torch(x: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        context = Context(dict(zip(names, operands, strict=False)), spec.out_dtype)
        return prologue.reference(x.reshape(m, k), context).view(x.shape)

    if not isinstance(prologue, RmsNormPrologue):
        return in_torch
    norm = _norm_op if problem.device_type == "cuda" else rms_normalize

    def by_norm(x: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        weight, sumsq = operands[:2]
        if sumsq is not None or weight is None or weight.dtype not in (x.dtype, torch.float32):
            return in_torch(x, operands)
        rounds_first = prologue.order == "llama"
        return norm(x, weight.reshape(-1), prologue.eps, prologue.weight_offset, rounds_first)

    return by_norm


def _norm_op(*args: Any) -> Tensor:
    # Its own providers have it as one kernel; a provider pinned for the product may not.
    with unpinned():
        y: Tensor = torch.ops.fusedops.rms_norm.default(*args)
    return y


def answer(name: str, problem: GemmProblem) -> Support | None:
    """What the provider says to the problem, whole or behind its prologue; None: no such one."""
    provider = GEMM_PROVIDERS.get(name)
    if provider is None:
        return None
    whole = provider.supports(problem)
    behind = behind_prologue(problem)
    return whole if whole.ok or behind is None else provider.supports(behind)


def run_of(name: str, problem: GemmProblem) -> GemmRun:
    """The provider's run; a prologue that its kernel does not have inside runs ahead of it."""
    provider = GEMM_PROVIDERS[name]
    behind = behind_prologue(problem)
    if behind is None or provider.supports(problem).ok:
        return provider.plan(problem)
    return with_prologue_ahead(problem, provider.plan(behind))


def description(name: str, problem: GemmProblem) -> str:
    """One line for ``explain``: what the provider would run."""
    provider = GEMM_PROVIDERS[name]
    behind = behind_prologue(problem)
    if behind is None or provider.supports(problem).ok:
        return provider.describe(problem)
    return f"{problem.spec.prologue} ahead, then {provider.describe(behind)}"
