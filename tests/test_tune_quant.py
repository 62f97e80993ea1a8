"""Tuning of quantized products: problems, candidates, and how candidates are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.bench import chain
from fusedops.bench.measurement import Failed, Measurement
from fusedops.bench.precompile import H200
from fusedops.bench.products import Layer
from fusedops.bench.quant_products import QuantLayer
from fusedops.bench.timer import Protocol
from fusedops.bench.tune_measure import measure_quantized
from fusedops.bench.tune_problems import candidates, tune_problems
from fusedops.config import files
from fusedops.errors import ConfigError
from fusedops.providers.base import use_provider
from fusedops.providers.cutlass import choose_candidate
from fusedops.providers.cutlass_mixed import MixedCandidate
from fusedops.quant import SCHEMES, scheme

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
SHAPE = "4096,4096,residual"


@pytest.fixture(autouse=True)
def small_chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(chain, "MIN_WEIGHT_BYTES", 100_000)
    monkeypatch.setattr(chain, "STREAMED_BYTES", 1)
    monkeypatch.setattr(chain, "MIN_LAUNCHES", 4)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_candidates_and_a_key_of_its_own(name: str) -> None:
    (problem,) = tune_problems([], [SHAPE], [16], H200, scheme(name))
    (plain,) = tune_problems([], [SHAPE], [16], H200)
    assert problem.key != plain.key
    tried = candidates(problem.problem, 3)
    assert len(tried) >= 3
    assert choose_candidate(problem.problem).name in {one.name for one in tried}
    in_groups = SCHEMES[name].sharing == "group"
    assert {isinstance(one, MixedCandidate) for one in tried} == {in_groups}


@pytest.mark.parametrize("name", ["fp8-block", "int4", "w4a8"])
def test_a_measured_choice_is_what_the_provider_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = tune_problems([], [SHAPE], [16], H200, scheme(name))
    slowest = max(candidates(problem.problem, 4), key=lambda one: one.predicted_us)
    assert choose_candidate(problem.problem).name != slowest.name
    tuned = {problem.key: {"config": slowest.name}}
    modules = ("fusedops.config.files", "fusedops.providers.cutlass")
    for module in modules:
        monkeypatch.setattr(f"{module}.tuned_choices", lambda gpu: tuned)
    assert files.tuned_choices(H200.gpu) == tuned
    assert choose_candidate(problem.problem).name == slowest.name


def test_what_kernels_do_not_take_is_left_out() -> None:
    found = tune_problems([], [SHAPE], [16, 100_000], H200, scheme("int8"))
    assert [problem.problem.m for problem in found] == [16, 16384]
    (biased,) = tune_problems([], ["4096,4096,bias"], [16], H200, scheme("fp8"))
    assert not biased.layer.bias
    with pytest.raises(ConfigError, match="scheme"):
        scheme("int3")


def launch_by_torch(made: QuantLayer, factor: float = 1.0) -> Any:
    """A candidate's launch, on operands in the provider's form."""
    assert made.scheme.name == "int8"

    def launch(
        x: Tensor, w: Tensor, out: Tensor, operands: Sequence[Tensor], extra: Sequence[Tensor]
    ) -> None:
        assert not extra
        x_scale, w_scale = (operand.double().flatten() for operand in operands)
        wide = x.view(torch.int8).double() @ w.view(torch.int8).double().T
        out.copy_(wide * x_scale[:, None] * w_scale * factor)

    return launch


@pytest.mark.parametrize("m", [3, 130])
def test_candidates_of_a_scheme_are_checked_and_timed(m: int) -> None:
    made = QuantLayer(Layer(m, 256, 256), SCHEMES["int8"])
    launches = {"right": launch_by_torch(made), "wrong": launch_by_torch(made, 1.5)}
    with use_provider("reference"):
        found = measure_quantized(made, launches, torch.device("cpu"), QUICK)
    assert isinstance(found["right"], Measurement), found["right"]
    assert isinstance(found["wrong"], Failed)
    assert ("torch" in found) == (m > 128)
