"""``reduce``: sums, means, extrema, their positions and logical reductions over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.check import describe, describe_value, require_choice, require_dtype
from fusedops.errors import ConfigError, ShapeError
from fusedops.ops.op import Op, entry

__all__ = ["REDUCE_DTYPES", "REDUCTIONS", "Reduction", "reduce"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

REDUCE_DTYPES = _FLOATS + _INTEGERS
"""Dtypes that ``reduce`` accepts (``logsumexp`` takes the floating-point ones only)."""


def reduce(
    x: Tensor,
    op: str,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
) -> Tensor:
    """Reduce ``x`` over one, several or all dimensions.

    Args:
        x: any shape and strides; float32, bfloat16, float16, float64, bool or an integer of
            int8, uint8, int16, int32, int64.
        op: sum, mean, sumsq, max, min, absmax, argmax, argmin, logsumexp, any or all, see below.
        dim: the dimension or dimensions to reduce, negative ones counted from the end; None
            reduces all.
        keepdim: keep reduced dimensions with size 1.

    Returns:
        contiguous; of the dtype below. Floats accumulate in float32 (float64 in float64) and are
        rounded once, so that half-precision sums neither stop growing nor overflow on the way.

        ========== ========================= ============= ==================================
        op         result dtype, float x     integer x     empty dimension
        ========== ========================= ============= ==================================
        sum        of x                      int64 (wraps) 0
        mean       of x                      float32       NaN
        sumsq      of x                      int64 (wraps) 0
        max, min   of x                      of x          ShapeError
        absmax     of x                      of x          ShapeError
        argmax     int64                     int64         ShapeError
        argmin     int64                     int64         ShapeError
        logsumexp  of x                      DTypeError    -inf
        any, all   bool                      bool          False, True
        ========== ========================= ============= ==================================

        - max, min and absmax are NaN whenever one element is NaN; a row of -inf has max -inf.
        - absmax of an integer saturates: the magnitude of the most negative int8, -128, counts
          as 127, since 128 is no int8.
        - argmax and argmin give the first position of the extremum; NaN counts as the extremum,
          and 0.0 equals -0.0. Over all dimensions the position is that in row-major order.
        - mean of integers sums in int64 and divides in float64 before it rounds to float32.
        - logsumexp subtracts the maximum first: all -inf gives -inf, +inf gives inf, NaN NaN.
        - any and all take every value but zero as true, NaN too.

    Raises:
        ConfigError: unknown ``op``; ``dim`` empty or naming a dimension twice; several but not
            all dimensions for argmax or argmin.
        DTypeError: ``x`` has another dtype.
        ShapeError: ``dim`` outside ``x``; an empty dimension where the table says so.
        UnsupportedError: ``x`` requires grad while grad mode is on.
    """
    dims = None if dim is None else _listed(dim)
    result: Tensor = _OP_REDUCE(x, op, dims, keepdim)
    return result


def _listed(dim: int | Sequence[int]) -> list[int]:
    dims = list(dim) if isinstance(dim, Iterable) else [dim]
    # Torch would take True for 1; what else is no integer it refuses itself.
    if any(isinstance(d, bool) for d in dims):
        raise ConfigError(
            f"reduce: dim is {describe_value(dim)}; accepted: an integer, several, or None for all."
        )
    return dims


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64:
        return torch.float64
    return torch.float32 if dtype.is_floating_point else torch.int64


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims, dtype=_accumulator(x.dtype))


def _sumsq(x: Tensor, dims: list[int]) -> Tensor:
    return x.to(_accumulator(x.dtype)).square().sum(dims)


def _mean(x: Tensor, dims: list[int]) -> Tensor:
    total = _sum(x, dims)
    if not x.is_floating_point():
        total = total.double()
    # A tensor as divisor: torch on CUDA multiplies by the rounded reciprocal of a number instead.
    return total / total.new_full((), math.prod(x.shape[d] for d in dims))


def _max(x: Tensor, dims: list[int]) -> Tensor:
    return x.amax(dims)


def _min(x: Tensor, dims: list[int]) -> Tensor:
    return x.amin(dims)


def _absmax(x: Tensor, dims: list[int]) -> Tensor:
    if x.is_floating_point():
        return x.abs().amax(dims)
    if x.dtype in (torch.bool, torch.uint8):
        return x.amax(dims)
    lowest = x.amin(dims).clamp_(min=-torch.iinfo(x.dtype).max)
    return torch.maximum(x.amax(dims), lowest.neg_())


def _argmax(x: Tensor, dims: list[int]) -> Tensor:
    rows, dim = _rows_for_position(x, dims)
    return rows.argmax(dim)


def _argmin(x: Tensor, dims: list[int]) -> Tensor:
    rows, dim = _rows_for_position(x, dims)
    return rows.argmin(dim)


def _rows_for_position(x: Tensor, dims: list[int]) -> tuple[Tensor, int]:
    """``x`` and the one dimension to search, after flattening if all are asked for."""
    if x.dtype == torch.bool:  # torch orders no booleans in argmax
        x = x.to(torch.uint8)
    return (x.reshape(-1), 0) if len(dims) == x.dim() else (x, dims[0])


def _logsumexp(x: Tensor, dims: list[int]) -> Tensor:
    return torch.logsumexp(x.to(_accumulator(x.dtype)), dims)


def _any(x: Tensor, dims: list[int]) -> Tensor:
    return x.any(dims)


def _all(x: Tensor, dims: list[int]) -> Tensor:
    return x.all(dims)


@dataclass(frozen=True)
class Reduction:
    """What ``reduce`` does for one ``op``.

    Attributes:
        compute: reduces the listed dimensions (one at least) of a tensor; its result is not yet
            rounded to the result dtype.
        integer_result: result dtype for integers and booleans; None keeps that of ``x``.
        float_result: result dtype for floats; None keeps that of ``x``.
        needs_elements: an empty dimension has no result.
        one_dim: takes one dimension or all.
        dtypes: accepted dtypes.
    """

    compute: Callable[[Tensor, list[int]], Tensor]
    integer_result: torch.dtype | None = None
    float_result: torch.dtype | None = None
    needs_elements: bool = False
    one_dim: bool = False
    dtypes: tuple[torch.dtype, ...] = REDUCE_DTYPES

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The result's dtype for an input of ``dtype``."""
        wanted = self.float_result if dtype.is_floating_point else self.integer_result
        return wanted or dtype


def _position(compute: Callable[[Tensor, list[int]], Tensor]) -> Reduction:
    return Reduction(
        compute,
        integer_result=torch.int64,
        float_result=torch.int64,
        needs_elements=True,
        one_dim=True,
    )


def _truth(compute: Callable[[Tensor, list[int]], Tensor]) -> Reduction:
    return Reduction(compute, integer_result=torch.bool, float_result=torch.bool)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_sum, integer_result=torch.int64),
    "mean": Reduction(_mean, integer_result=torch.float32),
    "max": Reduction(_max, needs_elements=True),
    "min": Reduction(_min, needs_elements=True),
    "absmax": Reduction(_absmax, needs_elements=True),
    "argmax": _position(_argmax),
    "argmin": _position(_argmin),
    "sumsq": Reduction(_sumsq, integer_result=torch.int64),
    "logsumexp": Reduction(_logsumexp, dtypes=_FLOATS),
    "any": _truth(_any),
    "all": _truth(_all),
}
"""Every ``op`` of ``reduce``."""


def _reduced_dims(x: Tensor, op: str, dim: Sequence[int] | None) -> list[int]:
    """The reduced dimensions, counted from the front and ascending; raises on bad ones."""
    if dim is None:
        return list(range(x.dim()))
    if len(dim) == 0:
        raise ConfigError(
            f"reduce: op={op!r} got dim=(), which names no dimension; dim=None reduces all."
        )
    # Like torch, a tensor without dimensions accepts dim 0 and -1.
    count = max(x.dim(), 1)
    for d in dim:
        if not -count <= d < count:
            raise ShapeError(
                f"reduce: op={op!r} got dim {d} for x {describe(x)}; accepted are {-count} to "
                f"{count - 1}."
            )
    dims = sorted({d % count for d in dim})
    if len(dims) != len(dim):
        raise ConfigError(
            f"reduce: op={op!r} got dim={tuple(dim)}, which names a dimension of x {describe(x)} "
            "twice; name each once."
        )
    return dims if x.dim() > 0 else []


def _check(x: Tensor, op: str, dim: list[int] | None, keepdim: bool) -> None:
    require_choice("reduce", "op", op, tuple(REDUCTIONS))
    reduction = REDUCTIONS[op]
    require_dtype(f"reduce {op}", "x", x, reduction.dtypes)
    dims = _reduced_dims(x, op, dim)
    if reduction.one_dim and 1 < len(dims) < x.dim():
        raise ConfigError(
            f"reduce: op={op!r} got dim={tuple(dims)} for x {describe(x)}; it takes one dimension "
            "or all of them. Flatten the dimensions first."
        )
    if reduction.needs_elements:
        for d in dims:
            if x.shape[d] == 0:
                raise ShapeError(
                    f"reduce: op={op!r} over dim {d} of size 0 in x {describe(x)} has no result; "
                    "that dimension needs one element at least."
                )


def _result_shape(x: Tensor, dims: list[int], keepdim: bool) -> list[int]:
    if keepdim:
        return [1 if d in dims else size for d, size in enumerate(x.shape)]
    return [size for d, size in enumerate(x.shape) if d not in dims]


def _reference(x: Tensor, op: str, dim: list[int] | None, keepdim: bool) -> Tensor:
    reduction = REDUCTIONS[op]
    dims = _reduced_dims(x, op, dim)
    shape = _result_shape(x, dims, keepdim)
    values, value_dims = (x, dims) if dims else (x.reshape(1), [0])
    result = reduction.compute(values, value_dims).to(reduction.result_dtype(x.dtype))
    # reshape(-1): dimensions of size 1 get the strides of a new tensor too, as in the fake.
    return result.reshape(-1).view(shape)


def _fake(x: Tensor, op: str, dim: list[int] | None, keepdim: bool) -> Tensor:
    shape = _result_shape(x, _reduced_dims(x, op, dim), keepdim)
    return x.new_empty(shape, dtype=REDUCTIONS[op].result_dtype(x.dtype))


Op(
    "reduce(Tensor x, str op, int[]? dim, bool keepdim) -> Tensor",
    check=_check,
    fake=_fake,
    reference=_reference,
)

_OP_REDUCE = entry("reduce")
