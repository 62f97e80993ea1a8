"""Prologues: what happens to the activations in front of a GEMM.

A provider whose kernel has one inside runs it there; for the others it runs ahead of the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.epilogue.base import FLOAT_DTYPES, Context, Operand
from fusedops.epilogue.spec import SpecItem
from fusedops.errors import ConfigError

__all__ = ["NO_PROLOGUE", "NoPrologue", "Prologue", "RmsNormPrologue", "rms_normalize"]


@lru_cache(maxsize=256)
def _cpu_scalar(value: float) -> Tensor:
    # Outside inference mode, or it could not be used outside of it.
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device="cpu")


def _scalar_like(x: Tensor, value: float) -> Tensor:
    """A float32 scalar on x's device, made once on a CPU: a sixth of a one-row norm's time.

    Elsewhere it is made anew, as a graph capture owns what is made in it; so it is for subclasses
    of Tensor, such as fake ones, which do not mix with plain tensors.
    """
    if x.is_cpu and type(x) is Tensor:
        return _cpu_scalar(value)
    return torch.full((), value, dtype=torch.float32, device=x.device)


def rms_normalize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    sumsq: Tensor | None = None,
) -> Tensor:
    """RMS normalisation over the last dimension, the one definition of its rounding order.

    Statistics and the normalised value are float32. With ``round_before_weight`` (Llama) it is
    rounded to x's dtype and then multiplied by the weight; otherwise (Gemma) it is multiplied by
    ``weight + weight_offset`` in float32. Either way the result is rounded once more to x's dtype.
    Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019.

    Args:
        x: (..., H) float32, bfloat16 or float16.
        weight: (H,) in x's dtype or float32.
        eps: added to the mean of squares.
        weight_offset: added to the weight, in float32.
        round_before_weight: see above.
        sumsq: the rows' sums of squares, float32, shaped like x with a last dimension of 1; None
            computes them.
    """
    wide = x if x.dtype is torch.float32 else x.float()
    eps_tensor = _scalar_like(x, eps)
    share = 1.0 / max(x.shape[-1], 1)
    # Mean square + eps in one step: at one row every torch call costs more than its work.
    if sumsq is None:
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        mean_square = torch.addcmul(eps_tensor, norm, norm, value=share)
    else:
        mean_square = torch.add(eps_tensor, sumsq, alpha=share)
    y = wide * mean_square.rsqrt_()
    if x.dtype is torch.float32:
        y.mul_(weight if weight_offset == 0.0 else weight + weight_offset)
        return y.contiguous()
    if round_before_weight:
        y = y.to(x.dtype)
        if weight.dtype is x.dtype and weight_offset == 0.0:
            return y.mul_(weight).contiguous()
    return (y.float() * (weight.float() + weight_offset)).to(x.dtype).contiguous()


@dataclass(frozen=True)
class Prologue(SpecItem):
    """A transformation of the activations (M, K) that keeps their shape and dtype."""

    registry: ClassVar[dict[str, type[SpecItem]]] = {}
    kind: ClassVar[str] = "prologue"

    def operands(self) -> tuple[Operand, ...]:
        """Tensors the prologue reads, in the order in which they are passed."""
        return ()

    def reference(self, x: Tensor, context: Context) -> Tensor:
        """The transformed activations (M, K), rounded to x's dtype."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoPrologue(Prologue):
    """The activations as they are."""

    spec_name: ClassVar[str] = "none"

    def reference(self, x: Tensor, context: Context) -> Tensor:
        return x


NO_PROLOGUE = NoPrologue()


@dataclass(frozen=True)
class RmsNormPrologue(Prologue):
    """RMSNorm of the activations.

    Operands: ``norm_weight`` (K,), and optionally ``norm_sumsq`` (parts, M) float32, partial sums
    of squares written by the producer (``RowStat``); they are added in index order. ``order`` is
    ``llama`` (round before the weight) or ``gemma`` (weight + offset in float32).
    """

    spec_name: ClassVar[str] = "rms_norm"
    eps: float = 1e-6
    order: str = "llama"
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.order not in ("llama", "gemma"):
            raise ConfigError(f"rms_norm: order {self.order!r}; accepted are llama, gemma.")
        if not 0.0 <= self.eps < math.inf:
            raise ConfigError(f"rms_norm: eps is {self.eps}; accepted are finite values >= 0.")

    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand("norm_weight", "k", FLOAT_DTYPES),
            Operand("norm_sumsq", "parts_m", optional=True),
        )

    def reference(self, x: Tensor, context: Context) -> Tensor:
        partial = context.operands["norm_sumsq"]
        sumsq = None if partial is None else partial.sum(0).unsqueeze(1)
        weight = context.operands["norm_weight"]
        if weight is None:
            raise ConfigError("rms_norm: operand 'norm_weight' is missing.")
        return rms_normalize(
            x,
            weight.reshape(-1),
            self.eps,
            self.weight_offset,
            self.order == "llama",
            sumsq,
        )
