"""What a family of kernels offers to the provider ``cutlass``, and what all families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

import fusedops.config.elements
import fusedops.cutlass
from fusedops.epilogue.spec import dtype_name
from fusedops.jit.dsl import DslProgram
from fusedops.jit.sources import python_sources
from fusedops.problem import GemmProblem

__all__ = ["Candidate", "Launch", "TileCandidate", "kernel_program"]

Launch = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], None]
"""``launch(x, w, out, operands, extra outputs)``: x (M, K), w (N, K), out (M, N'); operands along
one axis are one-dimensional, others (M, width); x, weights and outputs of 8 bits are viewed as
bytes."""


class Candidate(Protocol):
    """A kernel family's best tiling for a problem."""

    @property
    def name(self) -> str:
        """The tiling's name in ``cutlass_configs``, unique over all families."""
        ...

    @property
    def predicted_us(self) -> float:
        """Time by the family's analytic model."""
        ...

    def describe(self) -> str:
        """What would run, for ``explain``."""
        ...

    def program(self) -> DslProgram:
        """What ``launcher`` compiles, for tensors as torch allocates them."""
        ...

    def launcher(self) -> Launch:
        """The compiled kernel, ready to launch; M, N and K are not zero."""
        ...


class Tile(Protocol):
    """What every tiling tells of itself."""

    @property
    def name(self) -> str:
        """Its name in ``cutlass_configs``."""
        ...

    def predicted_us(self, problem: GemmProblem) -> float:
        """Time of a problem by the family's analytic model."""
        ...


TileT = TypeVar("TileT", bound=Tile)


@dataclass(frozen=True)
class TileCandidate(Generic[TileT]):
    """A tiling for a problem: what candidates of every family have alike."""

    problem: GemmProblem
    tile: TileT

    @property
    def name(self) -> str:
        """The tiling's name."""
        return self.tile.name

    @property
    def predicted_us(self) -> float:
        """Time by the analytic model."""
        return self.tile.predicted_us(self.problem)


def kernel_program(
    family: str,
    problem: GemmProblem,
    config: object,
    config_module: ModuleType,
    arguments: Callable[[], tuple[Any, ...]],
) -> DslProgram:
    """The program of a problem's chain and dtypes in one configuration; M, N and K are dynamic.

    Args:
        family: the kernel's module in ``fusedops.cutlass``.
        config: everything else that the kernel depends on, by its ``str``.
        config_module: the module that defines the configuration's class.
        arguments: imports the kernel and returns the function to trace with its arguments.
    """
    spec = problem.spec
    operand_names = ",".join("-" if d is None else dtype_name(d) for d in problem.operand_dtypes)
    text = (
        f"{spec.prologue} > {spec.epilogue} > {dtype_name(spec.out_dtype)} "
        f"| x {dtype_name(problem.x_dtype)} | operands {operand_names} | {config}"
    )
    nodes = {type(node) for node in spec.epilogue}
    sources = python_sources(fusedops.cutlass, fusedops.config.elements, config_module, *nodes)
    return DslProgram(f"cutlass/{family}", text, sources, arguments)
