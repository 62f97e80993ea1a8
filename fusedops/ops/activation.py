"""Gated activation: ``act(gate) * up`` over a packed (gate | up) tensor (SwiGLU, GeGLU, ReGLU)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES, describe, require_dim, require_dtype
from fusedops.epilogue.activations import ACTIVATIONS, lookup
from fusedops.errors import ShapeError
from fusedops.ops.op import Op, entry

__all__ = ["act_and_mul", "check_act_and_mul"]


def check_act_and_mul(op: str, x: Tensor, act: str) -> None:
    """Check the arguments of ``act_and_mul``; ``op`` is named in errors."""
    if x.dtype not in ACTIVATION_DTYPES:
        require_dtype(op, "x", x, ACTIVATION_DTYPES)
    if x.dim() == 0:
        require_dim(op, "x", x, 1)
    if x.shape[-1] % 2:
        raise ShapeError(
            f"{op}: x is {describe(x)}; its last dimension holds the halves (gate | up), so "
            "it must be even."
        )
    if act not in ACTIVATIONS:
        lookup(act)


def _fake(x: Tensor, act: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _reference(x: Tensor, act: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    if x.dtype is not torch.float32:
        gate = gate.float()
    activated = ACTIVATIONS[act].formula(gate).to(x.dtype)
    return (activated * up).contiguous()


Op(
    "act_and_mul(Tensor x, str act) -> Tensor",
    check=partial(check_act_and_mul, "act_and_mul"),
    fake=_fake,
    reference=_reference,
)

_OP_ACT_AND_MUL = entry("act_and_mul")


def act_and_mul(x: Tensor, act: str = "silu") -> Tensor:
    """Gated activation ``act(gate) * up`` of a packed tensor.

    The activation is computed in float32 and rounded to the dtype of ``x`` before the product,
    which is rounded again: the two rounding points of a model in eager mode.

    Args:
        x: (..., 2D) = [gate | up], float32, bfloat16 or float16, any strides, any D >= 0.
        act: identity, relu, gelu, gelu_tanh, silu, quick_gelu, relu2 or sigmoid
            (``fusedops.epilogue.activation_from_hf`` maps Hugging Face's names).

    Returns:
        (..., D), contiguous, dtype of ``x``.

    Raises:
        ShapeError: the last dimension is odd.
        ConfigError: no activation has that name.
        DTypeError: x is not a floating-point activation.
        UnsupportedError: x requires grad while grad mode is on.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    y: Tensor = _OP_ACT_AND_MUL(x, act)
    return y
