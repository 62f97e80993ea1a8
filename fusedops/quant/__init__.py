"""Quantization: schemes, and weights quantized by round-to-nearest."""

from __future__ import annotations

from fusedops.quant.pack import QuantizedWeight, quantize_weight
from fusedops.quant.schemes import SCHEMES, Scheme, as_scheme, scheme

__all__ = ["SCHEMES", "QuantizedWeight", "Scheme", "as_scheme", "quantize_weight", "scheme"]
