"""RMSNorm of the few rows of a decode step, whose data lies in the L2.

Beside it stand every other norm, embedding and RoPE with the append at the same sizes, and what
small kernels cost between two products (``cuda_visible``), so this goal depends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_lookup import embedding_outcomes, rope_append_outcomes
from fusedops.bench.goals.cuda_norm import (
    COLUMNS,
    NORM_COVERS,
    QUANTIZED,
    add_rms_norm_outcomes,
    layer_norm_outcomes,
    quantized_outcomes,
    rms_norm_outcomes,
)
from fusedops.bench.goals.cuda_rows import reading, rows_beside
from fusedops.bench.goals.cuda_visible import VISIBLE_ROWS, visible_outcomes
from fusedops.bench.goals.gemm_rows import COVERS as GEMM_COVERS
from fusedops.bench.measurement import Outcome

__all__ = ["BESIDE_ROWS", "SMALL_ROWS"]

SMALL_ROWS = (1, 4, 16, 64)
"""Rows of a decode step."""

BESIDE_ROWS = (1, 16, 64)
"""Those at which every other norm is measured."""


def _beside(run: GoalRun) -> dict[str, Callable[[], dict[str, Outcome]]]:
    """Every other kernel of rows at a decode step's sizes, then small ones between products."""
    found: dict[str, Callable[[], dict[str, Outcome]]] = {}
    for rows in BESIDE_ROWS:
        norms: dict[str, Callable[..., dict[str, Outcome]]] = {
            "fused_add_rms_norm": add_rms_norm_outcomes,
            "layer_norm": layer_norm_outcomes,
            **{name: partial(quantized_outcomes, name=name) for name in QUANTIZED},
        }
        for name, outcomes in norms.items():
            found[f"{name} {rows}"] = partial(outcomes, run, rows, COLUMNS, hot=True)
        found[f"embedding {rows}"] = partial(embedding_outcomes, run, rows, COLUMNS)
        found[f"rope_append {rows}"] = partial(rope_append_outcomes, run, rows, COLUMNS)
    for rows in VISIBLE_ROWS:
        found[f"visible {rows}"] = partial(visible_outcomes, run, rows, COLUMNS)
    return found


@goal(
    "cuda.rms_norm_small",
    provider="cuda",
    covers=(
        *(*NORM_COVERS, "csrc/activation.cu", "csrc/quantize.cu"),
        *("csrc/embedding.cu", "csrc/rope_append.cu"),
        *GEMM_COVERS,
    ),
)
def small(run: GoalRun) -> Reading:
    """The slowest of some numbers of rows, whose data lies in the L2 as in a decode step."""
    found = {
        rows: reading(run, rms_norm_outcomes(run, rows, COLUMNS, hot=True)) for rows in SMALL_ROWS
    }
    slowest = max(found.values(), key=lambda each: each.value)
    note = ", ".join(
        f"{rows} rows {each.value:.2f} us ({each.peer})" for rows, each in found.items()
    )
    note = f"{note}; {rows_beside(_beside(run))}"
    return Reading(slowest.value, slowest.low, slowest.high, peer=slowest.peer, note=note)
