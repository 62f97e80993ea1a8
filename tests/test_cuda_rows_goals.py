"""The measuring functions of norms and gated activations, small and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_cuda_goals import failures, reference_run, time_of, timed

from fusedops.bench import chain
from fusedops.bench.goal_run import GoalRun
from fusedops.bench.goals import (
    cuda_act,
    cuda_lookup,
    cuda_norm,
    cuda_norm_small,
    cuda_visible,
    load_all,
)
from fusedops.bench.goals.cuda_quantized import per_group, per_token, quantized_error
from fusedops.bench.goals.cuda_rows import MINE
from fusedops.bench.measurement import Bound, Failed, Measurement, Outcome, summarize
from fusedops.bench.roofline import PUBLISHED_CEILINGS
from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.ops.activation import act_and_mul
from fusedops.ops.embedding import embedding
from fusedops.ops.histogram import expert_histogram
from fusedops.ops.quantize import quantize
from fusedops.ops.rope_append import rope_append_paged_kv_

IDS = ("rms_norm", "add_rms_norm", "rms_norm_fp8", "rms_norm_small", "act_quant")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalRun]:
    yield from reference_run(monkeypatch, "cuda.rms_norm")


@pytest.mark.parametrize("name", IDS)
def test_each_goal_has_a_function_that_pins_the_kernels(name: str) -> None:
    registered = load_all()[f"cuda.{name}"]
    assert registered.provider == "cuda"
    assert registered.sources()


def test_each_row_times_us_and_torch(run: GoalRun) -> None:
    for rows in (
        cuda_norm.rms_norm_outcomes(run, 5, 256),
        cuda_norm.add_rms_norm_outcomes(run, 5, 256),
        cuda_norm.layer_norm_outcomes(run, 5, 256),
        *(cuda_norm.quantized_outcomes(run, 5, 256, name) for name in cuda_norm.QUANTIZED),
        cuda_act.act_quant_outcomes(run, 5, 256),
        *(cuda_act.act_outcomes(run, act, 5, 256) for act in ACTIVATIONS),
    ):
        assert timed(rows) == {MINE, "torch"}
        assert not failures(rows)


def test_a_wrong_norm_gets_no_time(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_norm.F, "rms_norm", lambda x, *rest: x * 1.0)
    for rows in (
        cuda_norm.rms_norm_outcomes(run, 5, 256),
        cuda_norm.add_rms_norm_outcomes(run, 5, 256),
        cuda_norm.quantized_outcomes(run, 5, 256),
    ):
        assert set(failures(rows)) == {"torch"}


def test_a_wrong_activation_gets_no_time(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_act, "per_group", lambda y: per_group(y * 1.2))
    rows = cuda_act.act_quant_outcomes(run, 5, 256)
    assert set(failures(rows)) == {"torch"}


def test_a_wrong_gated_activation_gets_no_time(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_act, "act_and_mul", lambda x, act: act_and_mul(x, "identity"))
    for act in ("relu", "silu", "gelu", "sigmoid"):
        assert set(failures(cuda_act.act_outcomes(run, act, 5, 256))) == {MINE}


@pytest.mark.parametrize("method", [per_token, per_group])
def test_quantized_values_are_judged_with_their_scales(method: object) -> None:
    assert callable(method)
    y = torch.randn(6, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, scale = method(y)
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

    monkeypatch.setattr(cuda_norm_small, "rms_norm_outcomes", outcomes)
    asked = []

    def beside(_run: GoalRun) -> dict[str, Any]:
        asked.append(1)
        return {"other": lambda: {MINE: Failed("no")}}

    monkeypatch.setattr(cuda_norm_small, "_beside", beside)
    found = cuda_norm_small.small(run)
    assert (found.value, found.peer) == (2, "torch 5.0 us")
    assert "64 rows 1.00 us" in found.note
    assert found.note.endswith("; 1 rows beside; other: no")
    assert asked == [1]


def test_every_norm_and_activation_has_rows_of_a_decode_step(run: GoalRun) -> None:
    norms = cuda_norm_small._beside(run)
    lookups = ("embedding", "rope_append")
    names = ("fused_add_rms_norm", "layer_norm", *cuda_norm.QUANTIZED, *lookups)
    assert set(norms) == {
        *(f"{name} {rows}" for name in names for rows in (1, 16, 64)),
        *(f"visible {rows}" for rows in (1, 16, 64)),
    }
    activations = cuda_act._beside(run)
    names = (*ACTIVATIONS, "quantize")
    assert set(activations) == {f"{name} {rows}" for name in names for rows in (1, 16, 64)}


def test_kernels_that_look_up_are_timed_beside_torchs(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_lookup, "_VOCABULARY", 100)

    def rows(tokens: int) -> tuple[dict[str, Outcome], ...]:
        return (
            cuda_lookup.embedding_outcomes(run, tokens, 256),
            cuda_lookup.expert_outcomes(run, 60 * tokens, 7),
            cuda_lookup.rope_append_outcomes(run, tokens, 512),
        )

    for found in rows(5):
        assert timed(found) >= {MINE, "torch"}
        assert not failures(found), failures(found)

    def turned_twice(*args: Any) -> None:
        rope_append_paged_kv_(*args)
        rope_append_paged_kv_(*args)

    broken: dict[str, Callable[..., Any]] = {
        "embedding": lambda ids, table: embedding((ids + 1) % 100, table),
        "expert_histogram": lambda x, count: expert_histogram((x + 1) % count, count),
        "rope_append_paged_kv_": turned_twice,
    }
    for name, kernel in broken.items():
        monkeypatch.setattr(cuda_lookup, name, kernel)
    for found in rows(6):
        assert set(failures(found)) == {MINE}


@pytest.fixture
def small_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MIN_WEIGHT_BYTES", 100_000)
    monkeypatch.setattr(chain, "STREAMED_BYTES", 1)


VISIBLE = ("rms_norm", "fused_add_rms_norm", "act_and_mul", "quantize", "rope_append")


def test_what_is_visible_is_the_chain_less_its_products(run: GoalRun, small_chains: None) -> None:
    found = cuda_visible.visible_outcomes(run, 3, 256, gemm_provider="reference")
    assert not failures(found), failures(found)
    assert set(found) == {"gemm", "torch rms_norm", *(f"{MINE} {name}" for name in VISIBLE)}
    for name in VISIBLE:
        row = found[f"{MINE} {name}"]
        assert isinstance(row, Measurement)
        assert row.launches >= 32
        assert row.bound == Bound(0.7, row.median_us)
        assert row.notes[-1].startswith("chain ")
    # One launch of each small kernel before each product, and none by the products' provider.
    assert run._usage.count("rms_norm", "reference") > 32
    assert run._usage.count("gemm", "reference") == 0
    assert len(run.bounds) == len(VISIBLE)


def test_a_difference_is_taken_round_by_round() -> None:
    def row(*samples: float) -> Measurement:
        return summarize(samples, mode="cuda graph", launches=32, hot=False)

    rows: dict[str, Outcome] = {
        "gemm": row(5.0, 6.0, 7.0),
        f"{MINE} a": row(5.5, 6.6, 7.5),
        f"{MINE} b": row(5.9, 6.9, 7.9),
        f"{MINE} c": Failed("wrong"),
        "torch": row(7.0, 8.0, 9.0),
    }
    found = cuda_visible._against_the_product(rows)
    assert found["gemm"] is rows["gemm"]
    assert found[f"{MINE} c"] is rows[f"{MINE} c"]
    a, b, torchs = (found[name] for name in (f"{MINE} a", f"{MINE} b", "torch"))
    assert isinstance(a, Measurement)
    assert isinstance(b, Measurement)
    assert isinstance(torchs, Measurement)
    assert a.samples == pytest.approx((0.5, 0.6, 0.5))
    assert a.notes == ("chain 6.60 us, gemm 6.00",)
    assert a.bound == Bound(0.7, a.median_us)
    assert a.bound.ok
    assert b.bound is not None
    assert not b.bound.ok
    assert torchs.bound is None
    assert torchs.notes == ("chain 8.00 us, gemm 6.00",)
    without = {**rows, "gemm": Failed("no kernel")}
    assert cuda_visible._against_the_product(without) is without


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("rms_norm", lambda x, *rest: x * 1.0),
        ("fused_add_rms_norm", lambda x, residual, *rest: (x + residual, x)),
        ("act_and_mul", lambda x: x[:, : x.shape[1] // 2] * 1.0),
        ("quantize", lambda x: quantize(x * 2)),
        ("rope_append_paged_kv_", lambda *args: None),
    ],
)
def test_a_chain_with_a_wrong_kernel_gets_no_time(
    run: GoalRun,
    small_chains: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Any,
) -> None:
    monkeypatch.setattr(cuda_visible, name, broken)
    found = cuda_visible.visible_outcomes(run, 3, 256, gemm_provider="reference")
    short = name.removesuffix("_paged_kv_")
    assert set(failures(found)) == {f"{MINE} {short}"}


def test_the_share_of_the_ceiling_is_the_least_time_over_ours(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = cuda_act.act_quant_traffic(16384, 14336)
    assert traffic.read_bytes == 16384 * 28672 * 2
    assert traffic.write_bytes == 16384 * (14336 + 4 * 112)
    h200 = PUBLISHED_CEILINGS["NVIDIA H200"]
    monkeypatch.setattr(cuda_act, "row_ceilings", lambda device: h200)
    monkeypatch.setattr(cuda_act, "_beside", lambda run: {})
    monkeypatch.setattr(
        cuda_act, "act_quant_outcomes", lambda *args: {MINE: time_of(300), "torch": time_of(900)}
    )
    least_us = (traffic.read_bytes + traffic.write_bytes) / 4.28e12 * 1e6
    found = cuda_act.act_quant(run)
    assert found.value == pytest.approx(least_us / 300)
    assert found.peer == "torch 900.0 us"
