"""The Ampere-style kernel as a GEMM provider: sm_80 to sm_100a, and any alignment of x and w."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

import fusedops.config.sm80
from fusedops.config.sm80 import DEVICES, LARGEST_SIZE, MmaTile, choose_mma
from fusedops.jit.dsl import DslProgram, LoadedKernel, dsl_kernel
from fusedops.problem import GemmProblem
from fusedops.providers.base import SUPPORTED, Support, not_applicable
from fusedops.providers.cutlass_kernel import kernel_program
from fusedops.providers.cutlass_rules import all_aligned, along_columns, first_refusal
from fusedops.providers.gemm import GemmRun, refuse_prologue, register_gemm_provider
from fusedops.providers.kernel_tensors import loaded, nothing, operands_read, written
from fusedops.providers.recent import note_written, settle, storages

__all__ = ["CutlassSm80Provider", "mma_program", "register"]

_DTYPES = (torch.bfloat16, torch.float16)

_PAIR_BYTES = 8
"""Largest pair of neighbours that the epilogue accesses at once: two float32."""


def mma_program(problem: GemmProblem, tile: MmaTile, paired: bool) -> DslProgram:
    """The kernel of a problem's chain, dtypes and alignment in one tiling; M, N, K stay dynamic.

    It is compiled for ``DEVICES[problem.arch].build``.

    Args:
        problem: what is computed, on which device.
        tile: the tiling.
        paired: what the chain accesses along N is aligned to pairs, see ``MmaGemm``.
    """
    spec, device = problem.spec, DEVICES[problem.arch]
    config = tile.config(problem.aligned_bytes)

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.sm80 import mma_arguments

        return mma_arguments(
            config,
            spec.epilogue,
            problem.x_dtype,
            spec.out_dtype,
            problem.operand_dtypes,
            paired,
            device.pdl,
        )

    text = f"{config} {'pairs' if paired else 'elements'} {'pdl' if device.pdl else 'no pdl'}"
    return kernel_program("sm80", problem, text, fusedops.config.sm80, arguments)


class CutlassSm80Provider:
    """cp.async, ldmatrix and mma.sync: every Tensor Core GPU from Ampere on.

    x and w may have any address and row pitch; below 16 bytes of alignment they are copied in
    pieces of 8, 4 or 2 bytes, which is slower. M, N and K are arbitrary, K = 0 included.
    """

    name = "cutlass_sm80"

    def supports(self, problem: GemmProblem) -> Support:
        if problem.device_type != "cuda":
            return not_applicable(f"runs on CUDA tensors, got {problem.device_type}")
        if problem.arch not in DEVICES:
            return not_applicable(f"is compiled for {', '.join(DEVICES)}, got {problem.arch}")
        refusal = refuse_prologue(problem) or first_refusal(
            problem, _own_reason, choose_mma, _DTYPES
        )
        return refusal or SUPPORTED

    def describe(self, problem: GemmProblem) -> str:
        if 0 in (problem.m, problem.spec.n):
            return "nothing to compute"
        tile = choose_mma(problem)
        ctas = -(-problem.m // tile.tile_m) * tile.tiles_n(problem.spec.n)
        return (
            f"Ampere-style kernel {tile.name} for {DEVICES[problem.arch].build}, {ctas} CTAs of "
            f"{tile.tile_m} x {tile.tile_n}, copies of {problem.aligned_bytes} bytes, predicted "
            f"{tile.predicted_us(problem):.1f} us"
        )

    def plan(self, problem: GemmProblem) -> GemmRun:
        spec, m, k = problem.spec, problem.m, problem.spec.k
        if 0 in (m, spec.n):
            return lambda x, w, operands, out: nothing(spec, x, out)
        tile = choose_mma(problem)
        pairs = along_columns(problem)
        even = any(pairs) and spec.n % 2 == 0 and spec.out_n % 2 == 0

        @cache
        def kernel(paired: bool) -> LoadedKernel:
            return dsl_kernel(mma_program(problem, tile, paired), DEVICES[problem.arch].build)

        # For tensors as torch allocates them; others take a second kernel when the first comes.
        kernel(even and spec.n % 4 == 0 and spec.out_n % 4 == 0)

        def run(
            x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
        ) -> list[Tensor]:
            results = spec.allocate(x) if out is None else list(out)
            read = operands_read(spec, operands, m)
            main, *extra = (written(result, m) for result in results)
            tensors = (*read, *extra)
            paired = even and all_aligned(compress(tensors, pairs), _PAIR_BYTES)
            with torch.cuda.device(x.device):
                settle(w)
                kernel(paired)(
                    loaded(w, problem.aligned_bytes),
                    loaded(x.reshape(m, k), problem.aligned_bytes),
                    main,
                    tensors or (main,),
                )
            note_written(results if out is None else storages(results))
            return results

        return run


def _converts_to_e4m3(problem: GemmProblem) -> bool:
    spec = problem.spec
    extra = [output.dtype for output, _ in spec.epilogue.extra_outputs(spec.n)]
    return torch.float8_e4m3fn in (spec.out_dtype, *extra)


def _own_reason(problem: GemmProblem) -> str | None:
    spec = problem.spec
    if max(problem.m, spec.n, spec.k) > LARGEST_SIZE:
        sizes = f"M={problem.m}, N={spec.n}, K={spec.k}"
        return f"serves M, N and K up to {LARGEST_SIZE}, got {sizes}"
    if _converts_to_e4m3(problem) and not DEVICES[problem.arch].converts_e4m3:
        return f"converts to e4m3 on sm_89 and later only, got {problem.arch}"
    return None


def register() -> None:
    """Add the provider to those that ``fusedops::gemm`` asks."""
    register_gemm_provider(CutlassSm80Provider())
