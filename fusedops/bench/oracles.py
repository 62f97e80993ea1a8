"""Oracles: how a result is judged before its time counts. Each says what is wrong, or None.

An operation should pass four of them: small-integer inputs give the exact bits; random inputs stay
within an elementwise bound of a float64 reference; the error is at most twice torch's in the same
dtype; and an output inside NaN-poisoned guard bands is written completely, and nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedops.bench.data import poison
from fusedops.check import describe

__all__ = [
    "bitwise",
    "first_wrong",
    "guarded",
    "integers",
    "no_worse_than",
    "relative_error",
    "within",
]


def integers(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    low: int = -3,
    high: int = 4,
) -> Tensor:
    """Small random integers in ``[low, high)`` held in ``dtype``.

    Sums of their products stay exact in float32 up to 2^24, and in bf16 outputs up to 256.
    """
    drawn = torch.randint(low, high, shape, generator=generator, device=generator.device)
    return drawn.to(dtype)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Euclidean norm of the difference over that of the reference; NaN if either holds one."""
    wide = reference.to(torch.float64)
    scale = float(wide.norm())
    error = float((result.to(torch.float64) - wide).norm())
    return error / scale if scale else error


def _shape_problem(result: Tensor, reference: Tensor) -> str | None:
    if result.shape != reference.shape:
        return f"the result is {describe(result)}, expected shape {tuple(reference.shape)}"
    return None


def first_wrong(wrong: Tensor, result: Tensor, reference: Tensor) -> str:
    """Text that names the first element where ``wrong`` is True."""
    index = tuple(int(i) for i in wrong.nonzero()[0])
    share = float(wrong.to(torch.float64).mean())
    return (
        f"element {index} is {float(result[index])!r}, expected {float(reference[index])!r} "
        f"({share:.2%} of the elements are wrong)"
    )


def bitwise(result: Tensor, reference: Tensor) -> str | None:
    """The same values, dtype and shape; NaN equals nothing."""
    problem = _shape_problem(result, reference)
    if problem is not None:
        return problem
    if result.dtype != reference.dtype:
        return f"the result is {describe(result)}, expected {reference.dtype}"
    wrong = result != reference
    return first_wrong(wrong, result, reference) if bool(wrong.any()) else None


def within(result: Tensor, reference: Tensor, bound: Tensor | float) -> str | None:
    """``|result - reference| <= bound`` for every element; NaN in the result is always wrong.

    Args:
        reference: float64, the exact value as far as float64 can tell.
        bound: absolute, one number or a tensor that broadcasts to the reference.
    """
    problem = _shape_problem(result, reference)
    if problem is not None:
        return problem
    distance = (result.to(torch.float64) - reference.to(torch.float64)).abs()
    wrong = ~(distance <= bound)
    return first_wrong(wrong, result, reference) if bool(wrong.any()) else None


def no_worse_than(
    result: Tensor, peer: Tensor, reference: Tensor, factor: float = 2.0
) -> str | None:
    """Our relative error is at most ``factor`` times that of ``peer`` in the same dtype.

    Raising the peer's error to half a unit in the last place keeps a peer that happens to be exact
    from failing a result that is merely well rounded.
    """
    problem = _shape_problem(result, reference)
    if problem is not None:
        return problem
    ours, theirs = relative_error(result, reference), relative_error(peer, reference)
    least = torch.finfo(result.dtype).eps / 2 if result.dtype.is_floating_point else 0.0
    allowed = factor * max(theirs, least)
    if not ours <= allowed:
        return f"relative error {ours:.3g}, allowed {allowed:.3g} ({factor:g} x the peer's)"
    return None


def guarded(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str, pad: int = 64
) -> tuple[Tensor, Callable[[], str | None]]:
    """A 2-D output view with poisoned guard bands of ``pad`` rows and columns around it.

    Returns:
        the view (its row pitch is the columns + 2 pad), and a function that says whether the bands
        were written or the inside was not. The dtype must have a NaN.
    """
    rows, columns = shape
    whole = torch.empty(rows + 2 * pad, columns + 2 * pad, dtype=dtype, device=device)
    poison(whole)
    inside = whole[pad : pad + rows, pad : pad + columns]

    def verdict() -> str | None:
        missing = int(inside.isnan().sum())
        if missing:
            return f"{missing} elements of the output are NaN or were not written"
        written = int((~whole.isnan()).sum()) - rows * columns
        if written:
            return f"{written} elements around the output were overwritten"
        return None

    return inside, verdict
