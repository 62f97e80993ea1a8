"""Programs of ``sm90_mixed`` and ``sm90_mixed_prefill``; the DSL is imported to compile them."""

from __future__ import annotations

from typing import Any

import torch

import fusedops.config.mixed
import fusedops.config.mixed_prefill
import fusedops.cutlass
import fusedops.weight.fragments
from fusedops.config.mixed import MixedConfig, NarrowTile
from fusedops.config.mixed_prefill import MixedPrefillConfig
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.spec import dtype_name
from fusedops.jit.dsl import DslProgram
from fusedops.jit.sources import Sources, python_sources

__all__ = ["mixed_prefill_program", "mixed_program"]


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

    text = _text(config, epilogue, x_dtype, out_dtype, operand_dtypes)
    return DslProgram("cutlass/sm90_mixed", text, _sources(epilogue), arguments)


def mixed_prefill_program(
    config: MixedPrefillConfig,
    epilogue: Epilogue,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
    aligned: bool,
) -> DslProgram:
    """The same of the kernel for many rows.

    Args:
        aligned: the result and the operand of its shape and dtype have addresses and row pitches
            that are multiples of 16 bytes.
    """

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.mixed_prefill_arguments import mixed_prefill_arguments

        return mixed_prefill_arguments(
            config, epilogue, x_dtype, out_dtype, operand_dtypes, aligned
        )

    text = _text(config, epilogue, x_dtype, out_dtype, operand_dtypes)
    text += " aligned" if aligned else " any alignment"
    return DslProgram("cutlass/sm90_mixed_prefill", text, _sources(epilogue), arguments)


def _text(
    config: NarrowTile,
    epilogue: Epilogue,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
) -> str:
    names = ",".join("-" if d is None else dtype_name(d) for d in operand_dtypes)
    return (
        f"{epilogue} > {dtype_name(out_dtype)} | x {dtype_name(x_dtype)} | operands {names} "
        f"| {config}"
    )


def _sources(epilogue: Epilogue) -> Sources:
    nodes = {type(node) for node in epilogue}
    modules = (
        fusedops.cutlass,
        fusedops.config.mixed,
        fusedops.config.mixed_prefill,
        fusedops.weight.fragments,
    )
    return python_sources(*modules, *nodes)
