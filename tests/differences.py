"""What a failed comparison of tensors says: how many elements, which, and what they are."""

from __future__ import annotations

import torch
from torch import Tensor


def _values(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def differences(got: Tensor, wanted: Tensor, allowed: Tensor | float = 0.0) -> str:
    """A line for an assertion's message; NaN differs from everything, NaN included.

    Args:
        got, wanted: of one shape.
        allowed: the largest error that is none, of each element or of all.
    """
    if got.shape != wanted.shape:
        return f"shapes {tuple(got.shape)} and {tuple(wanted.shape)}"
    one, two = _values(got), _values(wanted)
    bound = _values(torch.as_tensor(allowed)).expand(one.shape)
    # Equal infinities have no difference.
    error = torch.where(one == two, 0.0, (one - two).abs())
    wrong = ~(error <= bound)
    if not wrong.any():
        return f"none of {one.numel()} elements differs"
    # By its share of the bound; NaN first, as argmax takes it.
    worst = (error / bound.clamp(min=1e-300)).where(wrong, -1.0).argmax()

    def at(place: Tensor) -> str:
        index = tuple(int(i) for i in place)
        values = (float(x[index]) for x in (one, two, error, bound))
        return "{}: got {:g}, expected {:g}, error {:g}, allowed {:g}".format(index, *values)

    places = wrong.nonzero()
    axes = [f"{len(places[:, axis].unique())} of {size}" for axis, size in enumerate(one.shape)]
    return (
        f"{len(places)} of {one.numel()} elements differ (at {' x '.join(axes)} places of the "
        f"axes); NaN: {int(one.isnan().sum())} got, {int(two.isnan().sum())} expected; "
        f"first {at(places[0])}; worst {at(torch.stack(torch.unravel_index(worst, one.shape)))}"
    )
