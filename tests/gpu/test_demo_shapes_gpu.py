"""Decode steps of a tiny shape on a GPU: captured, checked against plain torch, counted, timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops.bench.runner import make_runner
from fusedops.bench.timer import Protocol
from fusedops.providers import flashinfer_base
from serving_demo.cache import PagedKVCache
from serving_demo.random_model import fill_cache, random_model
from serving_demo.shapes import SHAPES
from serving_demo.step_bench import OURS, TORCH_GRAPH, ShapeOptions, measure_shape
from serving_demo.step_model import ADVANCES, FusedStep, StepBatch, StepProviders
from serving_demo.step_report import StepRow

COVERS = (
    "fusedops/bench/runner.py",
    "fusedops/bench/timer.py",
    "fusedops/nn/*.py",
    "fusedops/ops/norm.py",
    "fusedops/providers/epilogue_torch.py",
    "fusedops/providers/flashinfer*.py",
    "fusedops/providers/gemm.py",
    "serving_demo/cache.py",
    "serving_demo/model.py",
    "serving_demo/random_model.py",
    "serving_demo/state.py",
    "serving_demo/step_*.py",
)
CONTEXT = 100
CONFIG = replace(
    SHAPES["llama3-8b"].config,
    hidden_size=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=1,
    head_dim=64,
    intermediate_size=384,
    vocab_size=1000,
)
TORCH = StepProviders("cublas", "torch", "torch", "torch", "torch")
FLASHINFER = StepProviders("cublas", "flashinfer", "flashinfer", "torch", "flashinfer")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def needs_flashinfer() -> None:
    for kernels in ("norm", "rope"):
        reason = flashinfer_base.absent() or flashinfer_base.unbuilt(kernels)
        if reason is not None:
            pytest.skip(f"FlashInfer: {reason}")


def measure(contenders: dict[str, StepProviders], **changed: Any) -> dict[str, StepRow]:
    rows = measure_shape(
        ShapeOptions("llama3-8b", batches=(1, 3), context=CONTEXT, replays=5),
        replace(CONFIG, **changed),
        contenders,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        read_bytes_per_s=4e12,
        runner=make_runner("cuda"),
        protocol=Protocol(samples=20, min_samples=5),
    )
    assert [(row.batch, row.notes) for row in rows if row.ms is None] == []
    return {f"{row.contender} x{row.batch}": row for row in rows}


@pytest.mark.parametrize("changed", [{}, {"qkv_bias": True, "tied_embeddings": True}])
def test_torch_runs_all_but_the_products(changed: dict[str, Any]) -> None:
    rows = measure({OURS: TORCH}, **changed)
    assert len(rows) == 4
    for row in rows.values():
        assert row.plan_us is None
        assert row.kernels_per_step is not None
        assert row.ms is not None
        # Every kernel takes about a microsecond, and a tiny step little more than that.
        assert 0.5e-3 < row.ms / row.kernels_per_step < 0.1
        assert row.steps == 20


def test_flashinfer_plans_between_replays() -> None:
    needs_flashinfer()
    rows = measure({OURS: FLASHINFER, "torch norms": replace(FLASHINFER, norm="torch")})
    for name, row in rows.items():
        assert (row.plan_us is not None) is not name.startswith(TORCH_GRAPH)


def test_kernels_of_a_layer_stay_few() -> None:
    """What a decode step's budget rests on: 22 kernels a layer with FlashInfer's norms and RoPE."""
    needs_flashinfer()
    contenders = {OURS: FLASHINFER}
    two, six = (measure(contenders, n_layers=n)[f"{OURS} x1"].kernels_per_step for n in (2, 6))
    assert two is not None
    assert six is not None
    assert (six - two) / 4 <= 24


@torch.inference_mode()
def test_products_run_on_cublas_and_nothing_else_serves() -> None:
    model = random_model(CONFIG, CONTEXT + ADVANCES, "cuda", torch.bfloat16)
    pages = 2 * StepBatch.pages_each(CONTEXT, 16)
    cache = PagedKVCache(CONFIG, pages, dtype=torch.bfloat16, device="cuda")
    fill_cache(cache, CONTEXT)
    step = FusedStep(OURS, StepBatch.make(model, cache, 2, CONTEXT), TORCH)
    step.prepare()
    step.run()
    assert step.served == {
        ("gemm", "cublas"): 2 * 4 + 1,
        ("rms_norm", "torch"): 2 * 2 + 1,
        ("rope", "torch"): 2,
        ("paged_attention", "torch"): 2,
        ("embedding", "torch"): 1,
        ("greedy", "torch"): 1,
    }
