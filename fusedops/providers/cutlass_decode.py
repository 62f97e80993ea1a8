"""The decode kernel (``fusedops.cutlass.sm90_decode``) as a candidate of ``cutlass``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import fusedops.config.decode
from fusedops.config import DecodeTile, choose_decode, m_bucket
from fusedops.jit.dsl import DslProgram, dsl_kernel
from fusedops.problem import GemmProblem
from fusedops.providers.cutlass_kernel import Launch, TileCandidate, kernel_program

__all__ = ["DecodeCandidate", "decode_candidate", "decode_program"]


def decode_program(problem: GemmProblem, tile: DecodeTile) -> DslProgram:
    """The decode kernel of a problem's chain and dtypes in one tiling; M, N and K stay dynamic."""
    spec = problem.spec
    config = tile.problem_config(problem)

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.sm90_decode import decode_arguments

        return decode_arguments(
            config,
            spec.epilogue,
            problem.x_dtype,
            spec.out_dtype,
            problem.operand_dtypes,
            spec.prologue,
        )

    return kernel_program("sm90_decode", problem, config, fusedops.config.decode, arguments)


class DecodeCandidate(TileCandidate[DecodeTile]):
    """A decode tiling for a problem."""

    @property
    def clusters(self) -> int:
        """Clusters to launch."""
        return self.tile.clusters(self.problem.spec.n, self.problem.sm_count)

    def describe(self) -> str:
        """What would run."""
        return (
            f"decode kernel {self.name}, M padded to {m_bucket(self.problem.m)}, "
            f"{self.clusters} clusters of {self.tile.split}, predicted {self.predicted_us:.1f} us"
        )

    def program(self) -> DslProgram:
        """The program for tensors of any alignment."""
        return decode_program(self.problem, self.tile)

    def launcher(self) -> Launch:
        """The compiled kernel, ready to launch."""
        kernel = dsl_kernel(self.program(), self.problem.arch)
        clusters = self.clusters

        def launch(
            x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
        ) -> None:
            kernel(w, x, out, (*operands, *extra) or (out,), clusters)

        return launch


def decode_candidate(problem: GemmProblem) -> DecodeCandidate:
    """The decode tiling for a problem with M <= 128; ConfigError where none is legal."""
    return DecodeCandidate(problem, choose_decode(problem, problem.gpu))
