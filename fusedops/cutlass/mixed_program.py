"""The program of ``fusedops.cutlass.sm90_mixed``; the DSL is imported when it is compiled."""

from __future__ import annotations

from typing import Any

import torch

import fusedops.config.mixed
import fusedops.cutlass
import fusedops.weight.fragments
from fusedops.config.mixed import MixedConfig
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.spec import dtype_name
from fusedops.jit.dsl import DslProgram
from fusedops.jit.sources import python_sources

__all__ = ["mixed_program"]


def mixed_program(
    config: MixedConfig,
    epilogue: Epilogue,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
) -> DslProgram:
    """The program of a configuration, chain and dtypes; M, N and K are dynamic.

    Its kernel is called with ``(words, (scales[, zero points]), x, out, (operands and extra
    outputs, or out), n, clusters)``, see ``MixedGemm.__call__``.
    """

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.sm90_mixed import mixed_arguments

        return mixed_arguments(config, epilogue, x_dtype, out_dtype, operand_dtypes)

    names = ",".join("-" if d is None else dtype_name(d) for d in operand_dtypes)
    text = (
        f"{epilogue} > {dtype_name(out_dtype)} | x {dtype_name(x_dtype)} | operands {names} "
        f"| {config}"
    )
    nodes = {type(node) for node in epilogue}
    modules = (fusedops.cutlass, fusedops.config.mixed, fusedops.weight.fragments)
    return DslProgram("cutlass/sm90_mixed", text, python_sources(*modules, *nodes), arguments)
