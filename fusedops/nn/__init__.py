"""Drop-in modules built from fusedops' operations, and the conversion of whole models."""

from __future__ import annotations

from fusedops.nn.convert import convert
from fusedops.nn.linear import FusedGatedMLP, FusedLinear, FusedMLP, FusedQKV
from fusedops.nn.norm import LayerNorm, RMSNorm
from fusedops.nn.quant_blocks import QuantGatedMLP, QuantMLP, QuantQKV
from fusedops.nn.quant_linear import QuantizedActivations, QuantLinear
from fusedops.nn.report import ConversionReport, ConvertedModule, SkippedModule

__all__ = [
    "ConversionReport",
    "ConvertedModule",
    "FusedGatedMLP",
    "FusedLinear",
    "FusedMLP",
    "FusedQKV",
    "LayerNorm",
    "QuantGatedMLP",
    "QuantLinear",
    "QuantMLP",
    "QuantQKV",
    "QuantizedActivations",
    "RMSNorm",
    "SkippedModule",
    "convert",
]
