"""The CuTe DSL kernels as a GEMM provider; nothing here imports the DSL until a kernel compiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedops.config import tuned_choices, tuning_key
from fusedops.epilogue.base import FLOAT_DTYPES, Node
from fusedops.errors import ConfigError
from fusedops.jit.dsl import missing_wheels
from fusedops.jit.location import OVERLAY_VARIABLE
from fusedops.problem import GemmProblem
from fusedops.providers.base import SUPPORTED, Support, not_applicable, unsupported
from fusedops.providers.cutlass_decode import decode_candidate, decode_program
from fusedops.providers.cutlass_kernel import Candidate
from fusedops.providers.cutlass_prefill import prefill_candidate, prefill_program
from fusedops.providers.gemm import GemmRun, refuse_prologue, register_gemm_provider
from fusedops.providers.kernel_tensors import loaded, nothing, operands_read, written
from fusedops.weight import Dense

__all__ = ["CutlassProvider", "choose_candidate", "decode_program", "prefill_program", "register"]

_LOAD_BYTES = 16

FAMILIES: tuple[Callable[[GemmProblem], Candidate], ...] = (decode_candidate, prefill_candidate)
"""Each gives its best tiling for a problem, or raises ConfigError with the reasons."""


def choose_candidate(problem: GemmProblem) -> Candidate:
    """The kernel and tiling for a problem: measured, else predicted fastest.

    Raises:
        ConfigError: no tiling of any family is legal (the message lists why), or the file of
            measured choices is malformed.
    """
    # Read first: a malformed file is not one family's reason.
    tuned = tuned_choices(problem.gpu).get(tuning_key(problem))
    candidates, reasons = [], []
    for family in FAMILIES:
        try:
            candidates.append(family(problem))
        except ConfigError as error:
            reasons.append(str(error))
    if not candidates:
        raise ConfigError("; ".join(reasons))
    for candidate in candidates:
        if tuned is not None and candidate.name == tuned["config"]:
            return candidate
    return min(candidates, key=lambda candidate: candidate.predicted_us)


def _emits(node: Node) -> bool:
    return type(node).emit is not Node.emit


class CutlassProvider:
    """Tensor Core kernels emitted through CuTe DSL for sm_90a."""

    name = "cutlass"

    def supports(self, problem: GemmProblem) -> Support:
        if problem.device_type != "cuda":
            return not_applicable(f"runs on CUDA tensors, got {problem.device_type}")
        if problem.arch != "sm_90a":
            return not_applicable(f"is compiled for sm_90a, got {problem.arch}")
        return refuse_prologue(problem) or _first_refusal(problem) or SUPPORTED

    def describe(self, problem: GemmProblem) -> str:
        if 0 in (problem.m, problem.spec.n):
            return "nothing to compute"
        return choose_candidate(problem).describe()

    def plan(self, problem: GemmProblem) -> GemmRun:
        spec, m, k = problem.spec, problem.m, problem.spec.k
        if 0 in (m, spec.n):
            return lambda x, w, operands, out: nothing(spec, x, out)
        launch = choose_candidate(problem).launcher()

        def run(
            x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
        ) -> list[Tensor]:
            results = spec.allocate(x) if out is None else list(out)
            given = operands_read(spec, operands, m)
            main, *extra = (written(result, m) for result in results)
            with torch.cuda.device(x.device):
                launch(_load(x.reshape(m, k)), _load(w), main, given, extra)
            return results

        return run


def _load(matrix: Tensor) -> Tensor:
    return loaded(matrix, _LOAD_BYTES)


def _first_refusal(problem: GemmProblem) -> Support | None:
    spec = problem.spec
    if not isinstance(spec.weight, Dense):
        return unsupported(f"has no kernel for the weight format {spec.weight}")
    if problem.x_dtype not in (torch.bfloat16, torch.float16):
        return unsupported(f"multiplies bfloat16 and float16, got {problem.x_dtype}")
    if spec.k == 0:
        return unsupported("needs K > 0")
    if problem.aligned_bytes < _LOAD_BYTES:
        return unsupported(
            "loads x and w in bulk: addresses and row pitches must be multiples of 16 bytes, got "
            f"multiples of {problem.aligned_bytes}"
        )
    for node in spec.epilogue:
        if not _emits(node):
            return unsupported(f"the node {node} has no emission (Node.emit)")
    if any(dtype is not None and dtype not in FLOAT_DTYPES for dtype in problem.operand_dtypes):
        return unsupported(f"reads float operands only, got {problem.operand_dtypes}")
    if 0 in (problem.m, spec.n):
        return None
    # A malformed file of measured choices is an error, not a reason to pass the kernels over.
    tuned_choices(problem.gpu)
    try:
        choose_candidate(problem)
    except ConfigError as error:
        return unsupported(str(error))
    missing = missing_wheels(prebuilt=bool(os.environ.get(OVERLAY_VARIABLE)))
    return unsupported(missing) if missing else None


def register() -> None:
    """Add the provider to those that ``fusedops::gemm`` asks."""
    register_gemm_provider(CutlassProvider())
