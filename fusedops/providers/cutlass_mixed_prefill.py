"""The kernel for many rows with narrow weights (``sm90_mixed_prefill``), offered to ``cutlass``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from fusedops.config.mixed_prefill import MixedPrefillTile, choose_mixed_prefill
from fusedops.cutlass.mixed_program import mixed_prefill_program
from fusedops.jit.dsl import DslProgram, LoadedKernel, dsl_kernel
from fusedops.problem import GemmProblem
from fusedops.providers.cutlass_kernel import Launch, TileCandidate
from fusedops.providers.cutlass_rules import all_aligned

__all__ = ["MixedPrefillCandidate", "mixed_prefill_candidate", "takes_bulk_stores"]

_ALIGNED_BYTES = 16


class MixedPrefillCandidate(TileCandidate[MixedPrefillTile]):
    """A tiling of the kernel for a problem."""

    def describe(self) -> str:
        """What would run."""
        config = self.tile.problem_config(self.problem)
        return (
            f"weight-only prefill kernel {self.name} for {config.weight.kind}, tiles of "
            f"{config.tile_m} x {config.rows}, {self.tile.clusters(self.problem)} clusters of "
            f"{config.cluster}, predicted {self.predicted_us:.1f} us"
        )

    def _program(self, aligned: bool) -> DslProgram:
        spec = self.problem.spec
        return mixed_prefill_program(
            self.tile.problem_config(self.problem),
            spec.epilogue,
            self.problem.x_dtype,
            spec.out_dtype,
            self.problem.operand_dtypes[len(spec.weight.operands()) :],
            aligned,
        )

    def _allocated_aligned(self) -> bool:
        """Whether the result as torch allocates it is aligned."""
        spec = self.problem.spec
        return spec.out_n * spec.out_dtype.itemsize % _ALIGNED_BYTES == 0

    def program(self) -> DslProgram:
        """The program for tensors as torch allocates them."""
        return self._program(self._allocated_aligned())

    def launcher(self) -> Launch:
        """The kernel, compiled for tensors as torch allocates them, ready to launch.

        Other alignments take a second kernel, compiled when the first such tensor comes.
        """
        problem = self.problem
        spec, clusters = problem.spec, self.tile.clusters(problem)
        count = len(spec.weight.operands())

        @cache
        def kernel(aligned: bool) -> LoadedKernel:
            return dsl_kernel(self._program(aligned), problem.arch)

        kernel(self._allocated_aligned())

        def launch(
            x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
        ) -> None:
            tensors = (*operands[count:], *extra) or (out,)
            aligned = takes_bulk_stores(out, operands[count:])
            kernel(aligned)(w, tuple(operands[:count]), x, out, tensors, spec.n, clusters)

        return launch


def takes_bulk_stores(out: Tensor, operands: Sequence[Tensor]) -> bool:
    """Whether the result and operands of its shape may take the kernel for aligned tensors."""
    given = (out, *(operand for operand in operands if operand.dim() == 2))
    # Repeated rows have no pitch that a tensor map takes.
    return all(tensor.stride(0) for tensor in given) and all_aligned(given, _ALIGNED_BYTES)


def mixed_prefill_candidate(problem: GemmProblem) -> MixedPrefillCandidate:
    """The tiling for a problem with any M > 0; ConfigError where none is legal."""
    return MixedPrefillCandidate(problem, choose_mixed_prefill(problem, problem.gpu))
