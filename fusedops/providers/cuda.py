"""The hand-written CUDA kernels of csrc as a provider; nothing compiles before the first call.

A new kernel is one file in csrc, one planning function, and one line of the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fusedops.providers import cuda_activation, cuda_norm, cuda_quantize
from fusedops.providers.base import Support
from fusedops.providers.cuda_attention import PAGED_ATTENTION
from fusedops.providers.cuda_base import NAME, CudaOp
from fusedops.providers.cuda_embedding import EMBEDDING, EMBEDDING_SUMSQ
from fusedops.providers.cuda_histogram import BINCOUNT, EXPERT_HISTOGRAM, HISTOGRAM
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_rope import APPEND, ROPE, ROPE_, ROPE_APPEND
from fusedops.providers.cuda_sampling import GREEDY, SAMPLE
from fusedops.providers.cuda_transpose import plan_transpose
from fusedops.providers.cuda_transpose_quantize import TRANSPOSE_CAST, TRANSPOSE_QUANTIZE

__all__ = ["register"]


class Registry(Protocol):
    """What ``register`` needs of an operation."""

    def add(self, provider: str, supports: Callable[..., Support], run: Callable[..., Any]) -> None:
        """Register an implementation under a provider's name."""
        ...


_TRANSPOSE = CudaOp(plan_transpose)
_REDUCE = CudaOp(plan_reduce)


def _supports_reduce(x: Tensor, op: str, dim: Sequence[int] | None, keepdim: bool) -> Support:
    return _REDUCE.supports(x, op, None if dim is None else tuple(dim), keepdim)


def _reduce(x: Tensor, op: str, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    return _REDUCE.run(x, op, None if dim is None else tuple(dim), keepdim)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Support], Callable[..., Any]]] = {
    "transpose": (_TRANSPOSE.supports, _TRANSPOSE.run),
    "transpose_cast": TRANSPOSE_CAST.entry,
    "transpose_quantize": TRANSPOSE_QUANTIZE.entry,
    "reduce": (_supports_reduce, _reduce),
    "rms_norm": cuda_norm.RMS_NORM.entry,
    "rms_norm_quantize": cuda_norm.RMS_NORM_QUANTIZE.entry,
    "fused_add_rms_norm": cuda_norm.FUSED_ADD_RMS_NORM.entry,
    "fused_add_rms_norm_": cuda_norm.FUSED_ADD_RMS_NORM_.entry,
    "fused_add_rms_norm_quantize": cuda_norm.FUSED_ADD_RMS_NORM_QUANTIZE.entry,
    "layer_norm": cuda_norm.LAYER_NORM.entry,
    "layer_norm_quantize": cuda_norm.LAYER_NORM_QUANTIZE.entry,
    "act_and_mul": cuda_activation.ACT_AND_MUL.entry,
    "act_and_mul_quantize": cuda_activation.ACT_AND_MUL_QUANTIZE.entry,
    "quantize": cuda_quantize.QUANTIZE.entry,
    "quantize_static": cuda_quantize.QUANTIZE_STATIC.entry,
    "bincount": BINCOUNT.entry,
    "histogram": HISTOGRAM.entry,
    "expert_histogram": EXPERT_HISTOGRAM.entry,
    "greedy": GREEDY.entry,
    "sample": SAMPLE.entry,
    "rope": ROPE.entry,
    "rope_": ROPE_.entry,
    "append_paged_kv": APPEND.entry,
    "rope_append_paged_kv_": ROPE_APPEND.entry,
    "paged_attention": PAGED_ATTENTION.entry,
    "embedding": EMBEDDING.entry,
    "embedding_sumsq": EMBEDDING_SUMSQ.entry,
}


def register(operations: Mapping[str, Registry]) -> None:
    """Add the kernels to every operation that they serve, by the operation's name."""
    for name, (supports, run) in _IMPLEMENTATIONS.items():
        operations[name].add(NAME, supports, run)
