"""FlashInfer (the optional extra ``flashinfer``) as a GPU provider of the operations it shares.

Served unpinned, because the result is the contract's: ``rms_norm`` with
``round_before_weight=False``, ``rope`` and ``rope_`` in the halves style.

Served only where pinned (``use_provider("flashinfer")``), because it rounds elsewhere or
synchronises: ``rms_norm`` in Llama's order, ``fused_add_rms_norm`` and ``fused_add_rms_norm_``,
``act_and_mul``, ``append_paged_kv``, ``paged_attention``. A captured decode step uses
``FlashInferDecode``.

Left out: sampling (its noise is not that of ``sample``), ``layer_norm`` (float32 weights only).

Importing this module does not import FlashInfer; the first CUDA call that it could serve does.

Source: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
Serving", 2025; the flashinfer-python package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fusedops.providers import flashinfer_attention as attention
from fusedops.providers import flashinfer_ops as ops
from fusedops.providers.base import Support
from fusedops.providers.flashinfer_base import NAME
from fusedops.providers.flashinfer_decode import FlashInferDecode

__all__ = ["FlashInferDecode", "register"]


class Registry(Protocol):
    """What ``register`` needs of an operation."""

    def add(self, provider: str, supports: Callable[..., Support], run: Callable[..., Any]) -> None:
        """Register an implementation under a provider's name."""
        ...


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Support], Callable[..., Any]]] = {
    "rms_norm": (ops.supports_rms_norm, ops.rms_norm),
    "fused_add_rms_norm": (ops.supports_fused_add_rms_norm, ops.fused_add_rms_norm),
    "fused_add_rms_norm_": (ops.supports_fused_add_rms_norm, ops.fused_add_rms_norm_),
    "act_and_mul": (ops.supports_act_and_mul, ops.act_and_mul),
    "rope": (ops.supports_rope, ops.rope),
    "rope_": (ops.supports_rope, ops.rope_),
    "append_paged_kv": (ops.supports_append_paged_kv, ops.append_paged_kv),
    "paged_attention": (attention.supports_paged_attention, attention.paged_attention),
}


def register(operations: Mapping[str, Registry]) -> None:
    """Add FlashInfer to every operation that it has, by the operation's name; loads nothing."""
    for name, (supports, run) in _IMPLEMENTATIONS.items():
        operations[name].add(NAME, supports, run)
