"""What the kernel for many rows with narrow weights is traced on."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream

from fusedops.config.mixed_prefill import MixedPrefillConfig
from fusedops.cutlass.arguments import chain_tensors, fake_tensor
from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.cutlass.sm90_mixed_prefill import MixedPrefillGemm
from fusedops.epilogue.chain import Epilogue

__all__ = ["mixed_prefill_arguments"]


def mixed_prefill_arguments(
    config: MixedPrefillConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
    aligned: bool,
) -> tuple[Any, ...]:
    """The kernel of a configuration and chain, with the fake tensors to trace it on."""
    kernel = MixedPrefillGemm(config, epilogue, dtype, out_dtype, operand_dtypes, aligned)
    tensors = chain_tensors(epilogue, operand_dtypes, out_dtype, kernel.arriving)
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2, aligned=kernel.staged)
    grouped = config.groups > 0
    quantization = [fake_tensor(CUTE_DTYPES[config.weight.scale_dtype], 2, aligned=grouped)]
    if config.weight.zeros:
        quantization.append(fake_tensor(Uint8, 2, aligned=grouped))
    return (
        kernel,
        fake_tensor(Int64, 2, aligned=True),
        tuple(quantization),
        fake_tensor(STORAGE_DTYPES[dtype], 2, aligned=True),
        out,
        tuple(tensors) or (out,),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
