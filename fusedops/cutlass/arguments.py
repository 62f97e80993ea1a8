"""Fake tensors to trace kernels on: element types and alignment are fixed, sizes are not."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.epilogue.chain import Epilogue

__all__ = ["chain_tensors", "fake_tensor"]


def fake_tensor(element: Any, dimensions: int, *, aligned: bool = False) -> Any:
    """A tensor of unknown sizes with rows of stride 1; ``aligned``: 16-byte address and pitch."""
    shape = tuple(cute.sym_int32() for _ in range(dimensions))
    per_unit = 128 // element.width if aligned else 1
    pitch = tuple(cute.sym_int64(divisibility=per_unit) for _ in range(dimensions - 1))
    align = 16 if aligned else max(1, element.width // 8)
    return make_fake_tensor(element, shape, (*pitch, 1), assumed_align=align)


def chain_tensors(
    epilogue: Epilogue,
    operand_dtypes: tuple[torch.dtype | None, ...],
    out_dtype: torch.dtype,
    aligned: str | None = None,
) -> list[Any]:
    """Operands, then extra outputs, of a chain in its order; one operand may be aligned."""
    tensors = [
        fake_tensor(
            CUTE_DTYPES[given], 2 if operand.axis == "mn" else 1, aligned=operand.name == aligned
        )
        for operand, given in zip(epilogue.operands, operand_dtypes, strict=True)
        if given is not None
    ]
    # Any width does: only the outputs' number and dtypes are asked for.
    for output, _ in epilogue.extra_outputs(16 * 1024):
        tensors.append(fake_tensor(STORAGE_DTYPES[output.dtype or out_dtype], 2))
    return tensors
