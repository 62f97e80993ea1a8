"""What the modules share: frozen parameters and specs built once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedops.gemm import spec_text

__all__ = ["frozen", "run_dense"]

# Looked up once: the three attribute reads cost a tenth of a small call.
_OP_GEMM = torch.ops.fusedops.gemm.default


def frozen(tensor: Tensor) -> nn.Parameter:
    """``tensor`` as a parameter that never requires grad: fusedops is inference only."""
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def run_dense(
    x: Tensor,
    weight: Tensor,
    epilogue: str,
    operands: list[Tensor | None],
    prologue: str | None = None,
) -> Tensor:
    """``epilogue(prologue(x) @ weight.T)`` in x's dtype through ``fusedops::gemm``.

    An x whose rows are strided is copied first: a module that stands in a model cannot ask the code
    around it for another layout.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    spec, _ = spec_text(tuple(weight.shape), epilogue, x.dtype, x.dtype, prologue)
    result: Tensor = _OP_GEMM(x, weight, operands, spec)[0]
    return result
