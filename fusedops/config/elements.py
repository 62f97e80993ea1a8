"""What the element type of x and the weight changes for the tilings of the sm_90a kernels."""

from __future__ import annotations

import torch

from fusedops.epilogue.outputs import GROUP
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.weight import BlockFp8

__all__ = [
    "LARGEST_INT8_K",
    "PRODUCT_DTYPES",
    "SCALE_BLOCK",
    "element_refusal",
    "is_block_scaled",
    "is_interleaved",
    "scale_bytes",
    "tensor_rate",
]

PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
"""Dtypes that the kernels multiply."""

LARGEST_INT8_K = (2**31 - 1) // (128 * 128)
"""Products of int8 that an int32 accumulator surely holds: each is at most 128 * 128."""

SCALE_BLOCK = GROUP
"""Rows of the weight, and columns of K, that share a scale of the block format."""


def is_block_scaled(spec: GemmSpec) -> bool:
    """Whether x has a scale for 1 x 128 elements and the weight one for 128 x 128.

    They are the spec's first two operands, see ``fusedops.weight.BlockFp8``.
    """
    return isinstance(spec.weight, BlockFp8)


def is_interleaved(spec: GemmSpec) -> bool:
    """Whether two of the weight's blocks alternate every 8 of their 256 rows."""
    return isinstance(spec.weight, BlockFp8) and spec.weight.rows == "gate_up"


def scale_bytes(rows: int, k: int) -> int:
    """Shared memory that x's scales of a stage take: ``rows`` x ``k``, whole 128 bytes."""
    return -(-rows * (k // SCALE_BLOCK) * 4 // 128) * 128


def element_refusal(problem: GemmProblem) -> str | None:
    """Why the kernels cannot multiply the elements of ``problem``, or None if they can."""
    if is_block_scaled(problem.spec) and problem.x_dtype != torch.float8_e4m3fn:
        return f"multiplies blocks of float8_e4m3fn only, got {problem.x_dtype}"
    if problem.x_dtype == torch.int8 and problem.spec.k > LARGEST_INT8_K:
        return (
            f"adds products of int8 up in int32, which holds the sums of K <= {LARGEST_INT8_K}, "
            f"got K={problem.spec.k}"
        )
    return None


def tensor_rate(element_bytes: int) -> float:
    """Products a microsecond relative to those of 16-bit elements.

    wgmma takes 32 bytes of K at a time whatever the element. On an H200 cuBLAS reached 1420 TFLOP/s
    with e4m3 and 810 with bfloat16.
    """
    return 1.75 if element_bytes == 1 else 1.0
