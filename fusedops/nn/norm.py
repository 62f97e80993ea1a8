"""RMSNorm, alone or with the residual added in the same kernel, and LayerNorm."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from fusedops.check import require_bool
from fusedops.errors import ConfigError
from fusedops.nn.base import frozen, require_sizes
from fusedops.ops.norm import fused_add_rms_norm, layer_norm, rms_norm
from fusedops.prologue import RmsNormPrologue

__all__ = ["LayerNorm", "RMSNorm", "require_norm"]


@lru_cache(maxsize=64)
def _text(eps: float, weight_offset: float, round_before_weight: bool) -> str:
    return str(RmsNormPrologue(eps, "llama" if round_before_weight else "gemma", weight_offset))


def _prologue(eps: float, weight_offset: float, round_before_weight: bool) -> str:
    return _text(eps, weight_offset, round_before_weight)


# As ``gemm_arguments.spec_text``: torch.compile calls it while it traces and keeps the text. It
# would trace the cached function itself, and warn of that.
_prologue._dynamo_marked_constant = True  # type: ignore[attr-defined]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; parameter ``weight`` (hidden,), frozen.

    ``round_before_weight`` and ``weight_offset`` choose the model's rounding order, see
    ``fusedops.rms_norm``.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        round_before_weight: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_sizes("RMSNorm", dtype, hidden=hidden)
        require_bool("RMSNorm", round_before_weight=round_before_weight)
        self.eps, self.weight_offset = eps, weight_offset
        self.round_before_weight = round_before_weight
        self.weight = frozen(torch.ones(hidden, dtype=dtype, device=device))

    @property
    def prologue(self) -> str:
        """This norm as a GEMM's prologue; its operands are ``weight`` and no row statistics."""
        return _prologue(self.eps, self.weight_offset, self.round_before_weight)

    def normalize(self, x: Tensor) -> Tensor:
        """norm(x), of the shape and dtype of x."""
        offset, order = self.weight_offset, self.round_before_weight
        return rms_norm(x, self.weight, self.eps, weight_offset=offset, round_before_weight=order)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with ``residual`` the pair (norm(x + residual), x + residual).

        ``torch.autocast`` changes nothing: results have the dtype of x.
        """
        if residual is None:
            return self.normalize(x)
        offset, order = self.weight_offset, self.round_before_weight
        return fused_add_rms_norm(
            x, residual, self.weight, self.eps, weight_offset=offset, round_before_weight=order
        )

    def extra_repr(self) -> str:
        """Width and constants, for ``print(model)``."""
        return f"{self.weight.numel()}, eps={self.eps}, weight_offset={self.weight_offset}"


def require_norm(norm: object) -> None:
    """Raise ConfigError unless ``norm`` may run in front of a product: an RMSNorm, or None."""
    if norm is not None and not isinstance(norm, RMSNorm):
        raise ConfigError(
            f"norm is a {type(norm).__module__}.{type(norm).__qualname__}; accepted: a "
            "fusedops.nn.RMSNorm, which runs in front of the product, or None. Apply another norm "
            "to x yourself."
        )


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension: ``nn.LayerNorm`` through ``fusedops.layer_norm``.

    Parameters: ``weight`` and ``bias`` (hidden,), or None; frozen.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require_sizes("LayerNorm", dtype, hidden=hidden)
        require_bool("LayerNorm", elementwise_affine=elementwise_affine, bias=bias)
        super().__init__(hidden, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """norm(x), of the shape and dtype of x."""
        return layer_norm(x, self.weight, self.bias, self.eps)
