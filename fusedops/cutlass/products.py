"""What differs between products of 16-bit floats, e4m3 and int8: element, accumulator, instruction.

All are wgmma instructions over 32 bytes of K, with both operands K-major in shared memory, which is
how x (M, K) and w (N, K) lie (the only way for 8-bit ones). So a stage has as many bytes whatever
the element.

Accumulation. Products of bfloat16 and float16 are added up in float32. Those of int8 are exact in
int32 (K up to ``LARGEST_INT8_K``); the epilogue rounds the sum once, to float32.
Those of e4m3 go to float32 accumulators, but Hopper's Tensor Cores keep about 14 bits of a sum
while they add: the 32 products of an instruction and the accumulator are aligned to the largest of
them, and what lies below 2^-13 of that is cut off (2^-12 at worst, for mantissas of products reach
up to 4). So an instruction loses at most 33 such cuts. In a long sum it is the accumulator's cut
that counts, one for every 32 of K, always towards zero: up to K / 32 * 2^-13 of the running sum,
1.6 % for K = 4096 where all products have one sign. One scale a tensor, row or channel goes to the
finished sum, with this error; scales a block of 128 along K are applied as ``promotion`` describes,
which bounds it by four instructions. Whole numbers whose sums stay below 2^12 are exact.

Sources: PTX ISA, "wgmma.mma_async"; DeepSeek-V3 Technical Report, 2024, 3.3.2 and 3.5.2 (14 bits);
J. Zhang et al., SageAttention2, 2024 (13 bits behind the leading one, cut).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Numeric, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils import hopper_helpers as sm90

from fusedops.cutlass.arguments import fake_tensor
from fusedops.cutlass.math import ACCUMULATOR_DTYPES, PRODUCT_DTYPES, STORAGE_DTYPES

__all__ = ["Products", "as_float"]


@dataclass(frozen=True)
class Products:
    """Products of elements of one dtype.

    Attributes:
        dtype: of x and the weight.
    """

    dtype: torch.dtype

    @property
    def element(self) -> type[Numeric]:
        """The type that wgmma multiplies."""
        return PRODUCT_DTYPES[self.dtype]

    @property
    def accumulator(self) -> type[Numeric]:
        """The type of its sums."""
        return ACCUMULATOR_DTYPES[self.dtype]

    def tiled_mma(self, warpgroups: int, rows: int, columns: int) -> cute.TiledMma:
        """Instructions of (rows, columns) with ``warpgroups`` of them along the rows."""
        major = OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            self.element,
            self.element,
            major,
            major,
            self.accumulator,
            (warpgroups, 1, 1),
            tiler_mn=(rows, columns),
        )

    def fake(self) -> Any:
        """x or w to trace a kernel on; 8-bit ones come as bytes, which every loader knows."""
        return fake_tensor(STORAGE_DTYPES[self.dtype], 2, aligned=True)

    def typed(self, tensor: Any) -> Any:
        """A tensor as it came, with the elements that it holds."""
        return tensor if self.dtype.itemsize > 1 else cute.recast_tensor(tensor, self.element)


def as_float(value: Any) -> Any:
    """A finished sum as a float32: an int32 is rounded to nearest even."""
    return value.to(Float32)
