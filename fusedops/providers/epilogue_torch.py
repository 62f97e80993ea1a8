"""Epilogue chains on torch kernels, with the one rounding inside the last node's own kernel.

A chain run node by node reads its operands into float32 with a kernel each and rounds with another.
In a captured decode step every kernel costs 1.2 to 2 us whatever it does, so a residual costs three
of them instead of one, and a gate three instead of two. torch's binary kernels convert both inputs
and the result on the fly (TensorIterator: mixed dtypes are computed in the promoted one), which
gives the same bits: float32 arithmetic, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.epilogue.activations import lookup
from fusedops.epilogue.base import FLOAT_DTYPES, Context, Node
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.nodes import PACK, Gate, Residual

__all__ = ["finish"]


def finish(epilogue: Epilogue, accumulator: Tensor, context: Context) -> Tensor:
    """``epilogue.reference(accumulator, context)``, bit for bit, in fewer kernels.

    Args:
        epilogue: the chain.
        accumulator: (M, N) float32.
        context: operands and output dtype; receives the extra outputs.
    """
    dtype = context.out_dtype
    if dtype in FLOAT_DTYPES and dtype is not torch.float32:
        match epilogue.nodes:
            case (*before, Residual(beta=1.0, operand=name)):
                residual = context.operands[name]
                if residual is not None:
                    value = _after(before, accumulator, context)
                    out = torch.empty(value.shape, dtype=dtype, device=value.device)
                    return torch.add(value, residual, out=out)
            case (*before, Gate(function=function)):
                value = _after(before, accumulator, context)
                # Activating the up columns too keeps the kernel's reads in one piece.
                gate, up = _halves(lookup(function).formula(value))[0], _halves(value)[1]
                out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
                return torch.mul(gate, up, out=out).flatten(1)
    return epilogue.reference(accumulator, context)


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """(M, blocks, 8) gate and up columns of a packed product."""
    gate, up = value.unflatten(1, (value.shape[1] // (2 * PACK), 2, PACK)).unbind(2)
    return gate, up


def _after(nodes: Sequence[Node], value: Tensor, context: Context) -> Tensor:
    """The float32 value behind ``nodes``."""
    for node in nodes:
        value = node.reference(value, context)
    return value
