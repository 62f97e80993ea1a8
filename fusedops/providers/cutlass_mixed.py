"""The kernel for narrow weights (``fusedops.cutlass.sm90_mixed``) as a candidate of ``cutlass``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.config import MixedTile, choose_mixed
from fusedops.cutlass.mixed_program import mixed_program
from fusedops.jit.dsl import DslProgram, dsl_kernel
from fusedops.jit.launch import device_arch
from fusedops.problem import GemmProblem
from fusedops.prologue import NO_PROLOGUE
from fusedops.providers.cutlass_kernel import Launch, TileCandidate
from fusedops.weight import GroupedFormat, Int4, WeightFormat

__all__ = ["MixedCandidate", "fitting_layout", "kernel_layout", "mixed_candidate", "mixed_refusal"]

MIXED_ARCH = "sm_90a"
"""The architecture that the kernel is compiled for."""


def fitting_layout(weight: WeightFormat, x_dtype: torch.dtype | None) -> str | None:
    """The layout in which the kernel takes a weight beside ``x_dtype``, or None for no kernel.

    Args:
        weight: the format, in any layout.
        x_dtype: dtype to which activations are quantized; None: they stay as they are.
    """
    if not isinstance(weight, GroupedFormat):
        return None
    eight = isinstance(weight, Int4) and x_dtype == torch.float8_e4m3fn
    return "wgmma8" if eight else "wgmma16"


def kernel_layout(
    weight: WeightFormat, x_dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """``fitting_layout`` on ``device``, where the weight lies; None too for other architectures."""
    if device.type != "cuda" or device_arch(device.index or 0) != MIXED_ARCH:
        return None
    return fitting_layout(weight, x_dtype)


def mixed_refusal(problem: GemmProblem) -> str | None:
    """Why the kernel cannot load a weight with scales in groups, whatever the tiling, or None."""
    spec, weight = problem.spec, problem.spec.weight
    if not isinstance(weight, GroupedFormat):
        return f"has no kernel for the weight format {weight}"
    fitting = fitting_layout(weight, problem.x_dtype)
    if weight.layout != fitting:
        return (
            f"takes {weight.spec_name} beside {problem.x_dtype} in the layout {fitting}, got "
            f"{weight.layout}: QuantLinear.set_layout() or in_layout() of the quantized weight "
            "lays it out"
        )
    if spec.prologue != NO_PROLOGUE:
        return f"has no kernel with {spec.prologue} inside beside {weight}"
    return None


class MixedCandidate(TileCandidate[MixedTile]):
    """A tiling of the kernel with narrow weights for a problem."""

    def describe(self) -> str:
        """What would run."""
        config = self.tile.problem_config(self.problem)
        return (
            f"weight-only kernel {self.name} for {config.weight.kind}, M padded to {config.m_pad}, "
            f"{self.tile.clusters(self.problem)} clusters of {config.split}, predicted "
            f"{self.predicted_us:.1f} us"
        )

    def program(self) -> DslProgram:
        """The program for tensors of any alignment."""
        spec = self.problem.spec
        return mixed_program(
            self.tile.problem_config(self.problem),
            spec.epilogue,
            self.problem.x_dtype,
            spec.out_dtype,
            self.problem.operand_dtypes[len(spec.weight.operands()) :],
        )

    def launcher(self) -> Launch:
        """The compiled kernel, ready to launch."""
        kernel = dsl_kernel(self.program(), self.problem.arch)
        spec, clusters = self.problem.spec, self.tile.clusters(self.problem)
        count = len(spec.weight.operands())

        def launch(
            x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
        ) -> None:
            tensors = (*operands[count:], *extra) or (out,)
            kernel(w, tuple(operands[:count]), x, out, tensors, spec.n, clusters)

        return launch


def mixed_candidate(problem: GemmProblem) -> MixedCandidate:
    """The tiling for a problem; ConfigError where none is legal, as for M > 128."""
    return MixedCandidate(problem, choose_mixed(problem, problem.gpu))
