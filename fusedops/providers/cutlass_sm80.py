"""The Ampere-style kernel as a GEMM provider: sm_80 to sm_100a, and any alignment of x and w."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

import fusedops.config.sm80
from fusedops.config.sm80 import DEVICES, LARGEST_SIZE, MmaTile, choose_mma
from fusedops.epilogue.base import FLOAT_DTYPES, Node
from fusedops.errors import ConfigError
from fusedops.jit.dsl import DslProgram, LoadedKernel, dsl_kernel, missing_wheels
from fusedops.jit.location import OVERLAY_VARIABLE
from fusedops.problem import GemmProblem
from fusedops.providers.base import SUPPORTED, Support, not_applicable, unsupported
from fusedops.providers.cutlass_kernel import kernel_program
from fusedops.providers.gemm import GemmRun, refuse_prologue, register_gemm_provider
from fusedops.providers.kernel_tensors import loaded, nothing, operands_read, written
from fusedops.weight import Dense

__all__ = ["CutlassSm80Provider", "mma_program", "register"]

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
        return refuse_prologue(problem) or _first_refusal(problem) or SUPPORTED

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
        pairs = _in_pairs(problem)
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
            paired = even and _aligned(compress(tensors, pairs), _PAIR_BYTES)
            with torch.cuda.device(x.device):
                kernel(paired)(
                    loaded(w, problem.aligned_bytes),
                    loaded(x.reshape(m, k), problem.aligned_bytes),
                    main,
                    tensors or (main,),
                )
            return results

        return run


def _in_pairs(problem: GemmProblem) -> list[bool]:
    """For each given operand and each extra output, whether it runs along the result's columns."""
    spec, rows = problem.spec, 3
    operands = zip(spec.operands, problem.operand_dtypes, strict=True)
    pairs = [operand.axis in ("n", "mn") for operand, dtype in operands if dtype is not None]
    for output, width in spec.epilogue.extra_outputs(spec.n):
        like = output.allocate((rows,), width, torch.float32, torch.device("meta"))
        pairs.append(tuple(like.shape) == (rows, width))
    return pairs


def _aligned(tensors: Iterable[Tensor], size_bytes: int) -> bool:
    """Whether every address and row pitch is a multiple of ``size_bytes``."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
        if tensor.dim() > 1:
            bits |= tensor.stride(0) * tensor.itemsize
    return bits % size_bytes == 0


def _converts_to_e4m3(problem: GemmProblem) -> bool:
    spec = problem.spec
    extra = [output.dtype for output, _ in spec.epilogue.extra_outputs(spec.n)]
    return torch.float8_e4m3fn in (spec.out_dtype, *extra)


def _first_refusal(problem: GemmProblem) -> Support | None:
    spec, device = problem.spec, DEVICES[problem.arch]
    if not isinstance(spec.weight, Dense):
        return unsupported(f"has no kernel for the weight format {spec.weight}")
    if problem.x_dtype not in (torch.bfloat16, torch.float16):
        return unsupported(f"multiplies bfloat16 and float16, got {problem.x_dtype}")
    if max(problem.m, spec.n, spec.k) > LARGEST_SIZE:
        sizes = f"M={problem.m}, N={spec.n}, K={spec.k}"
        return unsupported(f"serves M, N and K up to {LARGEST_SIZE}, got {sizes}")
    if _converts_to_e4m3(problem) and not device.converts_e4m3:
        return unsupported(f"converts to e4m3 on sm_89 and later only, got {problem.arch}")
    for node in spec.epilogue:
        if type(node).emit is Node.emit:
            return unsupported(f"the node {node} has no emission (Node.emit)")
    if any(dtype is not None and dtype not in FLOAT_DTYPES for dtype in problem.operand_dtypes):
        return unsupported(f"reads float operands only, got {problem.operand_dtypes}")
    if 0 in (problem.m, spec.n):
        return None
    try:
        choose_mma(problem)
    except ConfigError as error:
        return unsupported(str(error))
    missing = missing_wheels(prebuilt=bool(os.environ.get(OVERLAY_VARIABLE)))
    return unsupported(missing) if missing else None


def register() -> None:
    """Add the provider to those that ``fusedops::gemm`` asks."""
    register_gemm_provider(CutlassSm80Provider())
