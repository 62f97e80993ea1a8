"""What GPU tests share that needs no GPU: messages of comparisons, numbers drawn for them."""

from __future__ import annotations

import math

import torch
from differences import differences
from gemm_cases import to_e4m3


def test_message_names_how_many_where_and_what() -> None:
    wanted = torch.arange(12.0).view(3, 4)
    got = wanted.clone().to(torch.bfloat16)
    assert differences(got, wanted) == "none of 12 elements differs"
    got[1, 2], got[2, 2] = 6.5, 30.0
    text = differences(got, wanted)
    assert text.startswith("2 of 12 elements differ (at 2 of 3 x 1 of 4 places of the axes)")
    assert "NaN: 0 got, 0 expected" in text
    assert "first (1, 2): got 6.5, expected 6, error 0.5, allowed 0" in text
    assert "worst (2, 2): got 30, expected 10, error 20, allowed 0" in text


def test_message_counts_nan_and_weighs_errors_by_what_is_allowed() -> None:
    wanted, allowed = torch.zeros(4), torch.tensor([1.0, 100.0, 1.0, math.inf])
    text = differences(torch.tensor([9.0, 200.0, 0.5, 7.0]), wanted, allowed)
    assert text.startswith("2 of 4 elements differ")
    assert "worst (0,): got 9, expected 0, error 9, allowed 1" in text
    text = differences(torch.tensor([9.0, math.nan, math.inf, 0.0]), wanted, allowed)
    assert "NaN: 1 got, 0 expected" in text
    assert "worst (1,): got nan" in text


def test_message_takes_equal_infinities_as_equal_and_nan_as_different() -> None:
    values = torch.tensor([math.inf, math.nan])
    assert "1 of 2 elements differ" in differences(values, values)
    assert differences(torch.zeros(2), torch.zeros(3)) == "shapes (2,) and (3,)"


def test_numbers_beyond_the_largest_e4m3_are_drawn_as_that_one() -> None:
    """Normal numbers times 100 are now and then; some casts to e4m3 make NaN of them."""
    drawn = torch.tensor([449.0, -465.0, 1e4, -math.inf])
    assert to_e4m3(drawn).float().tolist() == [448.0, -448.0, 448.0, -448.0]
    inside = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    assert torch.equal(to_e4m3(inside).float(), inside.to(torch.float8_e4m3fn).float())
