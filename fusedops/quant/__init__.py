"""Quantization: schemes, and weights quantized by round-to-nearest."""

from __future__ import annotations

from fusedops.quant.pack import QuantizedWeight, empty_weight, quantize_weight, weight_format
from fusedops.quant.schemes import SCHEMES, UNQUANTIZED, Scheme, as_scheme, scheme

__all__ = [
    "SCHEMES",
    "UNQUANTIZED",
    "QuantizedWeight",
    "Scheme",
    "as_scheme",
    "empty_weight",
    "quantize_weight",
    "scheme",
    "weight_format",
]
