"""What the prefill kernel of a configuration is traced on."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from fusedops.config.prefill import PrefillConfig
from fusedops.cutlass.arguments import chain_tensors, fake_tensor
from fusedops.cutlass.block_scales import fake_scales
from fusedops.cutlass.math import STORAGE_DTYPES
from fusedops.cutlass.sm90_prefill import PrefillGemm
from fusedops.epilogue.chain import Epilogue

__all__ = ["prefill_arguments"]


def prefill_arguments(
    config: PrefillConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
    aligned: bool,
) -> tuple[Any, ...]:
    """The kernel of a configuration and chain, with the fake tensors to trace it on."""
    scales = fake_scales() if config.block_scaled else ()
    given = operand_dtypes[len(scales) :]
    kernel = PrefillGemm(config, epilogue, dtype, out_dtype, aligned, operand_dtypes=given)
    tensors = [*scales, *chain_tensors(epilogue, given, out_dtype, kernel.arriving)]
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2, aligned=aligned)
    return (
        kernel,
        kernel.products.fake(),
        kernel.products.fake(),
        out,
        tuple(tensors) or (out,),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
