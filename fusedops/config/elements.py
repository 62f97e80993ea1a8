"""What the element type of x and the weight changes for the tilings of the sm_90a kernels."""

from __future__ import annotations

import torch

from fusedops.problem import GemmProblem

__all__ = ["LARGEST_INT8_K", "PRODUCT_DTYPES", "element_refusal", "tensor_rate"]

PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
"""Dtypes that the kernels multiply."""

LARGEST_INT8_K = (2**31 - 1) // (128 * 128)
"""Products of int8 that an int32 accumulator surely holds: each is at most 128 * 128."""


def element_refusal(problem: GemmProblem) -> str | None:
    """Why the kernels cannot multiply the elements of ``problem``, or None if they can."""
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
