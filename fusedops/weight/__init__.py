"""Weight formats: how a GEMM's weight is stored, checked and multiplied in the reference."""

from __future__ import annotations

from fusedops.weight.base import WeightFormat, WeightOperand
from fusedops.weight.dense import DENSE_DTYPES, Dense, float_product, in_blocks
from fusedops.weight.fragments import pack_codes, unpack_codes
from fusedops.weight.grouped import (
    GROUP_SIZES,
    BlockFp8,
    EightBitWeight,
    Fp8Weight,
    GroupedFormat,
    Int4,
    Int8Weight,
    QuantizedFormat,
)
from fusedops.weight.int4_layout import (
    INT4_LAYOUTS,
    pack_nibbles,
    to_rows,
    to_tiles,
    unpack_nibbles,
)

__all__ = [
    "DENSE_DTYPES",
    "GROUP_SIZES",
    "INT4_LAYOUTS",
    "BlockFp8",
    "Dense",
    "EightBitWeight",
    "Fp8Weight",
    "GroupedFormat",
    "Int4",
    "Int8Weight",
    "QuantizedFormat",
    "WeightFormat",
    "WeightOperand",
    "float_product",
    "in_blocks",
    "pack_codes",
    "pack_nibbles",
    "to_rows",
    "to_tiles",
    "unpack_codes",
    "unpack_nibbles",
]
