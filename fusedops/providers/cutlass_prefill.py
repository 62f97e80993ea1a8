"""The prefill kernel (``fusedops.cutlass.sm90_prefill``) as a candidate of ``cutlass``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

import fusedops.config.prefill
from fusedops.config import PrefillTile, choose_prefill
from fusedops.jit.dsl import DslProgram, LoadedKernel, dsl_kernel
from fusedops.problem import GemmProblem
from fusedops.providers.cutlass_kernel import Launch, kernel_program

__all__ = ["PrefillCandidate", "prefill_candidate", "prefill_program"]


def prefill_program(problem: GemmProblem, tile: PrefillTile, aligned: bool) -> DslProgram:
    """The prefill kernel of a problem's chain and dtypes in one tiling; M, N, K stay dynamic.

    Args:
        aligned: the result and what the chain reads along N are aligned, see ``PrefillGemm``.
    """
    spec = problem.spec
    config = tile.problem_config(problem)

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.sm90_prefill import prefill_arguments

        return prefill_arguments(
            config, spec.epilogue, problem.x_dtype, spec.out_dtype, problem.operand_dtypes, aligned
        )

    text = f"{config} {'aligned' if aligned else 'any alignment'}"
    return kernel_program("sm90_prefill", problem, text, fusedops.config.prefill, arguments)


@dataclass(frozen=True)
class PrefillCandidate:
    """A prefill tiling for a problem."""

    problem: GemmProblem
    tile: PrefillTile

    @property
    def name(self) -> str:
        """The tiling's name."""
        return self.tile.name

    @property
    def predicted_us(self) -> float:
        """Time by the analytic model."""
        return self.tile.predicted_us(self.problem)

    @property
    def clusters(self) -> int:
        """Clusters to launch."""
        return self.tile.clusters(self.problem.m, self.problem.spec.n, self.problem.sm_count)

    def describe(self) -> str:
        """What would run."""
        tile = self.tile
        return (
            f"prefill kernel {tile.name}, {tile.mode}, tiles of {tile.tile_m} x {tile.tile_n}, "
            f"{self.clusters} clusters of {tile.cluster_m} x {tile.cluster_n}, "
            f"predicted {self.predicted_us:.1f} us"
        )

    def launcher(self) -> Launch:
        """The kernel, compiled for tensors as torch allocates them, ready to launch.

        Other alignments take a second kernel, compiled when the first such tensor comes.
        """
        problem, clusters = self.problem, self.clusters
        spec = problem.spec
        whole = spec.n % 8 == 0 and spec.out_n % 8 == 0
        in_pairs = _read_in_pairs(problem)
        wide = _wide_outputs(problem)

        @cache
        def kernel(aligned: bool) -> LoadedKernel:
            return dsl_kernel(prefill_program(problem, self.tile, aligned), problem.arch)

        kernel(whole and spec.out_n * spec.out_dtype.itemsize % 16 == 0)

        def launch(
            x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
        ) -> None:
            tensors = (*operands, *extra)
            paired = compress(tensors, in_pairs + wide)
            kernel(whole and _aligned((out, *paired)))(x, w, out, tensors or (out,), clusters)

        return launch


def _read_in_pairs(problem: GemmProblem) -> list[bool]:
    """For each operand that is given, whether the kernel reads it in pairs of columns."""
    operands = zip(problem.spec.operands, problem.operand_dtypes, strict=True)
    return [operand.axis in ("n", "mn") for operand, dtype in operands if dtype is not None]


def _wide_outputs(problem: GemmProblem) -> list[bool]:
    """For each extra output, whether it has the result's rows and columns, written in pairs."""
    spec, rows = problem.spec, 3
    wide = []
    for output, width in spec.epilogue.extra_outputs(spec.n):
        dtype = output.dtype or spec.out_dtype
        like = output.allocate((rows,), width, dtype, torch.device("meta"))
        wide.append(tuple(like.shape) == (rows, width))
    return wide


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every address and row pitch is a multiple of 16 bytes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
        if tensor.dim() > 1:
            bits |= tensor.stride(0) * tensor.itemsize
    return bits % 16 == 0


def prefill_candidate(problem: GemmProblem) -> PrefillCandidate:
    """The prefill tiling for a problem with any M > 0; ConfigError where none is legal."""
    return PrefillCandidate(problem, choose_prefill(problem, problem.gpu))
