"""The prefill kernel (``fusedops.cutlass.sm90_prefill``) as a candidate of ``cutlass``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

import fusedops.config.prefill
from fusedops.config import PrefillTile, choose_prefill
from fusedops.jit.dsl import DslProgram, LoadedKernel, dsl_kernel
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass_kernel import Launch, TileCandidate, kernel_program
from fusedops.providers.cutlass_rules import all_aligned, along_columns

__all__ = ["PrefillCandidate", "prefill_candidate", "prefill_program"]

_COLUMNS = 8
"""Widths that the kernel for aligned tensors takes are multiples of this ..."""

_ALIGNED_BYTES = 16
"""... and the tensors' addresses and row pitches of this."""


def prefill_program(problem: GemmProblem, tile: PrefillTile, aligned: bool) -> DslProgram:
    """The prefill kernel of a problem's chain and dtypes in one tiling; M, N, K stay dynamic.

    Args:
        aligned: the result and what the chain reads along N are aligned, see ``PrefillGemm``.
    """
    spec = problem.spec
    config = tile.problem_config(problem)

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.prefill_arguments import prefill_arguments

        return prefill_arguments(
            config, spec.epilogue, problem.x_dtype, spec.out_dtype, problem.operand_dtypes, aligned
        )

    text = f"{config} {'aligned' if aligned else 'any alignment'}"
    return kernel_program("sm90_prefill", problem, text, fusedops.config.prefill, arguments)


class PrefillCandidate(TileCandidate[PrefillTile]):
    """A prefill tiling for a problem."""

    @property
    def clusters(self) -> int:
        """Clusters to launch."""
        return self.tile.clusters(self.problem.m, self.problem.spec.n, self.problem.sm_count)

    def describe(self) -> str:
        """What would run."""
        tile = self.tile
        return (
            f"prefill kernel {tile.name}, {tile.mode}, tiles of {tile.tile_m} x {tile.tile_n}, "
            f"{self.clusters} clusters of {tile.cluster_m} x {tile.cluster_n}"
            f"{f', K split by {tile.split}' if tile.split > 1 else ''}, "
            f"predicted {self.predicted_us:.1f} us"
        )

    def _allocated_aligned(self) -> bool:
        """Whether tensors as torch allocates them are aligned.

        Operands along N need no look: they have two or more bytes an element, so widths that the
        kernel takes make multiples of 16 bytes.
        """
        spec = self.problem.spec
        out, *extra = spec.allocate(torch.empty(self.problem.m, spec.k, device="meta"))
        in_pairs = along_columns(self.problem)
        return _is_aligned(spec, (out, *compress(extra, in_pairs[len(in_pairs) - len(extra) :])))

    def program(self) -> DslProgram:
        """The program for tensors as torch allocates them."""
        return prefill_program(self.problem, self.tile, self._allocated_aligned())

    def launcher(self) -> Launch:
        """The kernel, compiled for tensors as torch allocates them, ready to launch.

        Other alignments take a second kernel, compiled when the first such tensor comes.
        """
        problem, clusters = self.problem, self.clusters
        spec, in_pairs = problem.spec, along_columns(problem)

        @cache
        def kernel(aligned: bool) -> LoadedKernel:
            return dsl_kernel(prefill_program(problem, self.tile, aligned), problem.arch)

        kernel(self._allocated_aligned())

        def launch(
            x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
        ) -> None:
            tensors = (*operands, *extra)
            aligned = _is_aligned(spec, (out, *compress(tensors, in_pairs)))
            kernel(aligned)(x, w, out, tensors or (out,), clusters)

        return launch


def _is_aligned(spec: GemmSpec, tensors: Iterable[Tensor]) -> bool:
    """Whether these may take the kernel for aligned tensors, see ``PrefillGemm``.

    Args:
        tensors: the result, and what the chain accesses along N.
    """
    whole = spec.n % _COLUMNS == 0 and spec.out_n % _COLUMNS == 0
    given = tuple(tensors)
    # Repeated rows have no pitch that a tensor map takes.
    apart = all(tensor.dim() < 2 or tensor.stride(0) for tensor in given)
    return whole and apart and all_aligned(given, _ALIGNED_BYTES)


def prefill_candidate(problem: GemmProblem) -> PrefillCandidate:
    """The prefill tiling for a problem with any M > 0; ConfigError where none is legal."""
    return PrefillCandidate(problem, choose_prefill(problem, problem.gpu))
