"""The operations of ``reduce`` as structs of csrc/include/reduce_ops.cuh, and what they are of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KERNEL_DTYPES", "KERNEL_OPS", "KernelOp"]

KERNEL_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}
"""Element types and what they are in CUDA."""


@dataclass(frozen=True)
class KernelOp:
    """A struct of csrc/include/reduce_ops.cuh.

    Attributes:
        template: its name with ``<T>`` for the element type.
        values: numbers in an accumulator.
        compares: they are of the type for comparing (``Wide``), else of that for adding
            (``Total``), in which integers have 64 bits.
        has_position: an accumulator holds a 64-bit position, too.
        is_flag: an accumulator is one int, whatever the elements are.
        integer_result: dtype of ``Out`` for integers; None: that of the input.
        float_result: dtype of ``Out`` for floats; None: that of the input.
    """

    template: str
    values: int = 1
    compares: bool = False
    has_position: bool = False
    integer_result: torch.dtype | None = None
    float_result: torch.dtype | None = None
    is_flag: bool = False

    def name(self, dtype: torch.dtype) -> str:
        """The struct for elements of ``dtype``."""
        return f"fusedops::{self.template.replace('<T', '<' + KERNEL_DTYPES[dtype])}"

    def accumulator_bytes(self, dtype: torch.dtype) -> int:
        """``sizeof(Acc)``."""
        if self.is_flag:
            return 4
        is_double_word = dtype in (torch.float64, torch.int64) or not (
            self.compares or dtype.is_floating_point
        )
        value_bytes = 8 if is_double_word else 4
        return 16 if self.has_position else self.values * value_bytes

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of ``Out``."""
        return (self.float_result if dtype.is_floating_point else self.integer_result) or dtype


_INT64 = torch.int64
_BOOL = torch.bool

KERNEL_OPS = {
    "sum": KernelOp("Sum<T>", integer_result=_INT64),
    "mean": KernelOp("Mean<T>", integer_result=torch.float32),
    "sumsq": KernelOp("SumSq<T>", integer_result=_INT64),
    "max": KernelOp("Max<T>", compares=True),
    "min": KernelOp("Min<T>", compares=True),
    "absmax": KernelOp("AbsMax<T>", compares=True),
    "argmax": KernelOp(
        "Arg<T, true>",
        compares=True,
        has_position=True,
        integer_result=_INT64,
        float_result=_INT64,
    ),
    "argmin": KernelOp(
        "Arg<T, false>",
        compares=True,
        has_position=True,
        integer_result=_INT64,
        float_result=_INT64,
    ),
    "logsumexp": KernelOp("LogSumExp<T>", values=2, compares=True),
    "any": KernelOp("Any<T>", is_flag=True, integer_result=_BOOL, float_result=_BOOL),
    "all": KernelOp("All<T>", is_flag=True, integer_result=_BOOL, float_result=_BOOL),
}
"""The struct of each operation of ``reduce``."""
