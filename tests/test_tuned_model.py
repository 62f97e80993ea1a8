"""What the analytic models claim, held against the measured rows of tuned/nvidia_h200.json."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from fusedops.bench.precompile import H200
from fusedops.config import decode_tiles, prefill_tiles, tuned_choices
from fusedops.epilogue import Epilogue
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.weight import Dense

BF16 = torch.bfloat16
FAMILIES = {"decode": decode_tiles(), "prefill": prefill_tiles()}


def problem_of(key: str, row: dict[str, Any]) -> GemmProblem:
    found = re.match(r"n(\d+) k(\d+) m(\d+)", key)
    assert found is not None
    n, k, m = map(int, found.groups())
    spec = GemmSpec(Dense(n, k), Epilogue.parse(row["epilogue"]), BF16)
    dtypes = (BF16,) * len(spec.operands)
    return GemmProblem(spec, m, BF16, dtypes, "cuda", H200.sm_count, 16, H200.arch, H200.gpu)


def rows_of(family: str) -> list[list[tuple[float, float]]]:
    """(predicted, measured) of a family's tilings, for each product that has two or more."""
    tiles = {tile.name: tile for tile in FAMILIES[family]}
    found = []
    for key, row in tuned_choices(H200.gpu).items():
        problem = problem_of(key, row)
        times = [
            (tiles[name].predicted_us(problem), us)
            for name, us in row["candidates"].items()
            if name in tiles
        ]
        if len(times) > 1:
            found.append(times)
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("family", "slower"), [("decode", 1.02), ("prefill", 1.05)])
def test_the_first_choice_is_close_to_the_fastest(family: str, slower: float) -> None:
    rows = rows_of(family)
    assert len(rows) > 40
    losses = [math.log(min(times)[1] / min(us for _, us in times)) for times in rows]
    assert math.exp(mean(losses)) < slower


def test_the_decode_model_predicts_times() -> None:
    errors = [math.log(predicted / us) for times in rows_of("decode") for predicted, us in times]
    assert math.sqrt(mean([error * error for error in errors])) < 0.1
