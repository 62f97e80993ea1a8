"""The CuTe DSL kernels as a GEMM provider; nothing here imports the DSL until a kernel compiles.

They multiply bfloat16, float16, e4m3 and int8, e4m3 with scales a block, and weights of 4 and 8
bits (``fusedops.weight``: int4, int8_wo, fp8_wo) in the order of wgmma's registers. How sums of
8-bit products are kept, and the error that this leaves in those of e4m3, is told in
``fusedops.cutlass.products`` and ``fusedops.cutlass.promotion``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedops.config import tuned_choices, tuning_key
from fusedops.config.elements import PRODUCT_DTYPES, element_refusal
from fusedops.config.mixed_tiles import MIXED_FORMATS
from fusedops.errors import ConfigError
from fusedops.problem import GemmProblem
from fusedops.prologue import NO_PROLOGUE
from fusedops.providers.base import SUPPORTED, Support, not_applicable
from fusedops.providers.cutlass_decode import decode_candidate, decode_program
from fusedops.providers.cutlass_kernel import Candidate
from fusedops.providers.cutlass_mixed import mixed_candidate, mixed_refusal
from fusedops.providers.cutlass_mixed_prefill import mixed_prefill_candidate
from fusedops.providers.cutlass_prefill import prefill_candidate
from fusedops.providers.cutlass_rules import first_refusal
from fusedops.providers.gemm import GemmRun, register_gemm_provider
from fusedops.providers.kernel_tensors import as_bytes, loaded, nothing, operands_read, written
from fusedops.providers.recent import note_written, settle, storages
from fusedops.weight import BlockFp8, Dense, GroupedFormat
from fusedops.weight.fragments import words

__all__ = [
    "CutlassProvider",
    "choose_candidate",
    "decode_program",
    "register",
    "require_kernel_fits",
]

_LOAD_BYTES = 16

WEIGHT_FORMATS = (Dense.spec_name, BlockFp8.spec_name, *MIXED_FORMATS)
"""Formats that the kernels take, by the names that specs have for them."""

Family = Callable[[GemmProblem], Candidate]
"""Gives its best tiling for a problem, or raises ConfigError with the reasons."""


def _families(problem: GemmProblem) -> tuple[Family, ...]:
    if isinstance(problem.spec.weight, GroupedFormat):
        return mixed_candidate, mixed_prefill_candidate
    return decode_candidate, prefill_candidate


def _own_reason(problem: GemmProblem) -> str | None:
    if problem.spec.k == 0:
        return "needs K > 0"
    if isinstance(problem.spec.weight, GroupedFormat) and (reason := mixed_refusal(problem)):
        return reason
    if problem.aligned_bytes < _LOAD_BYTES:
        return (
            f"loads x and w in bulk: addresses and row pitches must be multiples of {_LOAD_BYTES} "
            f"bytes, got multiples of {problem.aligned_bytes}"
        )
    return element_refusal(problem)


def require_kernel_fits(problem: GemmProblem) -> None:
    """ConfigError where the kernels of no family can load the problem, whatever the tiling."""
    reason = _own_reason(problem)
    if reason is not None:
        raise ConfigError(f"cutlass {reason}.")


def choose_candidate(problem: GemmProblem) -> Candidate:
    """The kernel and tiling for a problem: measured, else predicted fastest.

    Raises:
        ConfigError: no kernel or no tiling of any family is legal (the message lists why), or the
            file of measured choices is malformed.
    """
    require_kernel_fits(problem)
    # Read first: a malformed file is not one family's reason.
    tuned = tuned_choices(problem.gpu).get(tuning_key(problem))
    candidates, reasons = [], []
    for family in _families(problem):
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


class CutlassProvider:
    """Tensor Core kernels emitted through CuTe DSL for sm_90a."""

    name = "cutlass"

    def supports(self, problem: GemmProblem) -> Support:
        if problem.device_type != "cuda":
            return not_applicable(f"runs on CUDA tensors, got {problem.device_type}")
        if problem.arch != "sm_90a":
            return not_applicable(f"is compiled for sm_90a, got {problem.arch}")
        refusal = first_refusal(
            problem, _own_reason, choose_candidate, PRODUCT_DTYPES, WEIGHT_FORMATS
        )
        return refusal or SUPPORTED

    def describe(self, problem: GemmProblem) -> str:
        if 0 in (problem.m, problem.spec.n):
            return "nothing to compute"
        return choose_candidate(problem).describe()

    def plan(self, problem: GemmProblem) -> GemmRun:
        spec, m, k = problem.spec, problem.m, problem.spec.k
        if 0 in (m, spec.n):
            return lambda x, w, operands, out: nothing(spec, x, out)
        launch = choose_candidate(problem).launcher()
        # The prologue's first operand and what belongs to a weight in groups are read, as the
        # weight is, ahead of the kernel before.
        ahead = 1 if spec.prologue != NO_PROLOGUE else 0
        in_groups = isinstance(spec.weight, GroupedFormat)
        if in_groups:
            ahead = len(spec.weight.operands())

        def run(
            x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
        ) -> list[Tensor]:
            results = spec.allocate(x) if out is None else list(out)
            given = operands_read(spec, operands, m)
            weight = words(w) if in_groups else _load(w)
            main, *extra = (written(result, m) for result in results)
            with torch.cuda.device(x.device):
                settle(w)
                for tensor in given[:ahead]:
                    settle(tensor)
                launch(_load(x.reshape(m, k)), weight, main, given, extra)
            note_written(results if out is None else storages(results))
            return results

        return run


def _load(matrix: Tensor) -> Tensor:
    return as_bytes(loaded(matrix, _LOAD_BYTES))


def register() -> None:
    """Add the provider to those that ``fusedops::gemm`` asks."""
    register_gemm_provider(CutlassProvider())
