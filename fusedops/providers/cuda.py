"""The hand-written CUDA kernels of csrc as a provider; nothing compiles before the first call.

A new kernel is one file in csrc, one planning function, and one line of the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fusedops.providers.base import Support
from fusedops.providers.cuda_base import NAME, CudaOp
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_transpose import plan_transpose

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
    "reduce": (_supports_reduce, _reduce),
}


def register(operations: Mapping[str, Registry]) -> None:
    """Add the kernels to every operation that they serve, by the operation's name."""
    for name, (supports, run) in _IMPLEMENTATIONS.items():
        operations[name].add(NAME, supports, run)
