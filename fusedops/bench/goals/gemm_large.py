"""Large GEMMs: what a fused epilogue costs over a bare product, and a plain one against cuBLAS.

Above M = 512 the moment's clocks decide times, so only ratios within one row are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_layers import GOAL_ROWS, Row
from fusedops.bench.goals.gemm_rows import COVERS, layer_check, our_contender, worst
from fusedops.bench.goals.gemm_sets import scored_set
from fusedops.bench.measurement import Outcome
from fusedops.bench.products import Layer, cublas_peers, make_layer_buffers

__all__ = ["bare_peers", "large_outcomes"]


def bare_peers(layer: Layer) -> list[Contender]:
    """``x @ w.T`` alone on a layer's buffers, by torch and by cuBLASLt's best of 8.

    Each set of buffers gets an output of the product's own size.
    """
    bare = Layer(layer.M, layer.N, layer.K, dtype=layer.dtype)
    bare_check = layer_check(bare)

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bare_check(results, Buffers(buffers.inputs[:2]))

    def on_layer(contender: Contender) -> Contender:
        inner = contender.prepare

        def prepare(buffers: Buffers) -> Any:
            x, w = buffers.inputs[:2]
            out = torch.empty(layer.M, layer.N, dtype=layer.dtype, device=x.device)
            product = Buffers((x, w), (out,))
            return product if inner is None else inner(product)

        return replace(contender, check=check, prepare=prepare)

    return [on_layer(contender) for contender in cublas_peers(bare, bare_check)]


def large_outcomes(run: GoalRun, row: Row) -> dict[str, Outcome]:
    """A row on rotated buffers: our fused layer, and cuBLAS's bare product."""
    layer = row.layer
    return measure(
        [our_contender(layer), *bare_peers(layer)],
        lambda generator: make_layer_buffers(layer, generator),
        device=run.device,
        protocol=run.protocol,
    )


@goal("gemm.large_m.fused_over_bare", provider="cutlass", covers=COVERS)
def fused_over_bare(run: GoalRun) -> Reading:
    """The largest of our time over the bare product's."""
    scored = scored_set(run, run.goal.id, GOAL_ROWS[run.goal.id](), large_outcomes)
    slowest = worst(scored)
    note = ", ".join(f"{item.row.key} {1 / item.ratio.median:.3f}" for item in scored)
    return Reading(
        1 / slowest.value, 1 / slowest.high, 1 / slowest.low, peer=slowest.peer, note=note
    )


@goal("gemm.8192_over_cublas", provider="cutlass", covers=COVERS)
def square_over_cublas(run: GoalRun) -> Reading:
    """Our TFLOP/s over cuBLAS's: the inverse ratio of times."""
    scored = scored_set(run, run.goal.id, GOAL_ROWS[run.goal.id](), large_outcomes)
    return worst(scored)
