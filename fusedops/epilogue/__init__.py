"""The epilogue: the one definition of the math fused behind a GEMM."""

from __future__ import annotations

from fusedops.epilogue.activations import activation, activation_from_hf
from fusedops.epilogue.base import Context, ExtraOutput, Node, Operand
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.nodes import (
    Act,
    Bias,
    Gate,
    Residual,
    Scale,
    SoftCap,
)
from fusedops.epilogue.outputs import Quantize, RowStat, Tap

__all__ = [
    "Act",
    "Bias",
    "Context",
    "Epilogue",
    "ExtraOutput",
    "Gate",
    "Node",
    "Operand",
    "Quantize",
    "Residual",
    "RowStat",
    "Scale",
    "SoftCap",
    "Tap",
    "activation",
    "activation_from_hf",
]
