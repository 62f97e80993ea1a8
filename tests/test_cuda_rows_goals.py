"""The measuring functions of norms and gated activations, small and on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_cuda_goals import QUICK, failures, time_of

from fusedops.bench import peers
from fusedops.bench.goal_run import GoalRun, RowStore
from fusedops.bench.goal_spec import load_goals
from fusedops.bench.goals import cuda_act, cuda_norm, load_all
from fusedops.bench.goals.cuda_quantized import per_group, per_token, quantized_error
from fusedops.bench.goals.cuda_rows import MINE
from fusedops.bench.measurement import Absent, Measurement
from fusedops.bench.roofline import PUBLISHED_CEILINGS
from fusedops.providers.base import use_provider

IDS = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "rms_norm_small", "act_quant")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalRun]:
    """A run on the CPU that pins the reference, with torch as its only peer."""

    def status(names: list[str]) -> dict[str, object]:
        return {
            name: peers.Available("") if name == "torch" else Absent("left out") for name in names
        }

    for module in (peers, cuda_act, cuda_norm):
        monkeypatch.setattr(module, "peer_status", status)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with use_provider("reference") as usage:
        yield GoalRun(
            load_goals()["cuda.rms_norm"],
            provider="reference",
            device="cpu",
            protocol=QUICK,
            store=RowStore({}, "sources", lambda: None),
            usage=usage,
        )
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", IDS)
def test_each_goal_has_a_function_that_pins_the_kernels(name: str) -> None:
    registered = load_all()[f"cuda.{name}"]
    assert registered.provider == "cuda"
    assert registered.sources()


def test_each_row_times_us_and_torch(run: GoalRun) -> None:
    for rows in (
        cuda_norm.rms_norm_outcomes(run, 5, 256),
        cuda_norm.add_rms_norm_outcomes(run, 5, 256),
        cuda_norm.rms_norm_fp8_outcomes(run, 5, 256),
        cuda_act.act_quant_outcomes(run, 5, 256),
    ):
        assert set(rows) == {MINE, "torch"}
        assert not failures(rows)


def test_a_wrong_norm_gets_no_time(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_norm.F, "rms_norm", lambda x, *rest: x * 1.0)
    for rows in (
        cuda_norm.rms_norm_outcomes(run, 5, 256),
        cuda_norm.add_rms_norm_outcomes(run, 5, 256),
        cuda_norm.rms_norm_fp8_outcomes(run, 5, 256),
    ):
        assert set(failures(rows)) == {"torch"}


def test_a_wrong_activation_gets_no_time(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_act, "per_group", lambda y: per_group(y * 1.2))
    rows = cuda_act.act_quant_outcomes(run, 5, 256)
    assert set(failures(rows)) == {"torch"}


@pytest.mark.parametrize("quantize", [per_token, per_group])
def test_quantized_values_are_judged_with_their_scales(quantize: object) -> None:
    assert callable(quantize)
    y = torch.randn(6, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, scale = quantize(y)
    exact, error = y.double(), 0.001 * y.double().abs()
    assert quantized_error(q, scale, exact, error) is None
    wrong = q.clone()
    wrong[3, 5] = -wrong[3, 5].float() + 100.0
    assert quantized_error(wrong, scale, exact, error) is not None
    assert quantized_error(q, scale * 1.1, exact, error) is not None
    assert quantized_error((q.float() / 2).to(q.dtype), scale * 2, exact, error) is not None


def test_the_slowest_number_of_rows_counts(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(_run: GoalRun, rows: int, _columns: int, *, hot: bool) -> dict[str, Measurement]:
        assert hot
        return {MINE: time_of(2 if rows == 4 else 1), "torch": time_of(5)}

    monkeypatch.setattr(cuda_norm, "rms_norm_outcomes", outcomes)
    found = cuda_norm.small(run)
    assert (found.value, found.peer) == (2, "torch 5.0 us")
    assert "64 rows 1.00 us" in found.note


def test_the_share_of_the_ceiling_is_the_least_time_over_ours(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = cuda_act.act_quant_traffic(16384, 14336)
    assert traffic.read_bytes == 16384 * 28672 * 2
    assert traffic.write_bytes == 16384 * (14336 + 4 * 112)
    h200 = PUBLISHED_CEILINGS["NVIDIA H200"]
    monkeypatch.setattr(cuda_act, "row_ceilings", lambda device: h200)
    monkeypatch.setattr(
        cuda_act, "act_quant_outcomes", lambda *args: {MINE: time_of(300), "torch": time_of(900)}
    )
    least_us = (traffic.read_bytes + traffic.write_bytes) / 4.28e12 * 1e6
    found = cuda_act.act_quant(run)
    assert found.value == pytest.approx(least_us / 300)
    assert found.peer == "torch 900.0 us"
