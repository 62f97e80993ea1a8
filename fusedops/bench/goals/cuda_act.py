"""Gated activation to e4m3 in one pass, as a share of what the memory reads and writes at best.

Beside it stand all gated activations at the sizes of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_quantized import per_group, quantized_error
from fusedops.bench.goals.cuda_rows import COVERS, MINE, best_peer, measured, rows_beside
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import within
from fusedops.bench.peers import act_and_mul_peers, compiled_peers
from fusedops.bench.roofline import Traffic, floor, row_ceilings
from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.epilogue.outputs import GROUP
from fusedops.ops.activation import act_and_mul
from fusedops.ops.fused_quantize import act_and_mul_quantize

__all__ = ["SMALL_ROWS", "act_outcomes", "act_quant_outcomes", "act_quant_traffic"]

_ROWS, _COLUMNS = 16384, 14336
SMALL_ROWS = (1, 16, 64)
"""Rows of a decode step."""

_ERROR = 2.0**-7
"""Relative error of bfloat16 products: one rounding of each factor and of the product."""


def act_quant_traffic(rows: int, columns: int) -> Traffic:
    """The least work: bfloat16 halves in, e4m3 and the scales of groups out."""
    written = rows * columns + 4 * rows * columns // GROUP
    return Traffic(2 * 2 * rows * columns, written, 0.0)


def act_outcomes(run: GoalRun, act: str, rows: int, columns: int) -> dict[str, Outcome]:
    """act(gate) * up of bfloat16 rows, whose data lies in the L2 as in a decode step."""
    formula = ACTIVATIONS[act]

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device=run.device)
        return Buffers((x.normal_(generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        gate, up = buffers.inputs[0].double().chunk(2, -1)
        factor = formula.formula(gate)
        # Where a factor cancels, its own rounding in bfloat16 is relative to its terms.
        return within(
            results[0], factor * up, _ERROR * (factor.abs() + 0.5 * gate.abs()) * up.abs()
        )

    ours = Contender(MINE, lambda buffers: act_and_mul(buffers.inputs[0], act), check)
    key = f"act_and_mul {act} {rows}x{columns}"
    return measured(run, key, [ours, *act_and_mul_peers(check, act)], make, hot=True)


def act_quant_outcomes(
    run: GoalRun, rows: int, columns: int, *, hot: bool = False
) -> dict[str, Outcome]:
    """silu(gate) * up to e4m3 with a scale for 128 elements."""

    def make(generator: torch.Generator) -> Buffers:
        x = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device=run.device)
        return Buffers((x.normal_(generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        q, scale = results
        # In pieces: float64 of everything would be 16 times the data.
        step = 1024
        for first in range(0, rows, step):
            gate, up = buffers.inputs[0][first : first + step].double().chunk(2, -1)
            exact = F.silu(gate) * up
            piece = slice(first, first + step)
            wrong = quantized_error(q[piece], scale[:, piece], exact, _ERROR * exact.abs())
            if wrong is not None:
                return f"rows from {first}: {wrong}"
        return None

    def torchs(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        return per_group(F.silu(gate) * up)

    def ours(buffers: Buffers) -> tuple[Tensor, Tensor]:
        return act_and_mul_quantize(buffers.inputs[0], granularity="block128")

    found = [
        Contender(MINE, ours, check),
        Contender("torch", lambda buffers: torchs(buffers.inputs[0]), check),
        *compiled_peers(torchs, check),
    ]
    return measured(run, f"act_and_mul_quantize {rows}x{columns}", found, make, hot=hot)


def _beside(run: GoalRun) -> dict[str, Callable[[], dict[str, Outcome]]]:
    """Every gated activation, and the quantized one, at the sizes of a decode step."""
    found: dict[str, Callable[[], dict[str, Outcome]]] = {}
    for rows in SMALL_ROWS:
        for act in ACTIVATIONS:
            found[f"{act} {rows}"] = partial(act_outcomes, run, act, rows, _COLUMNS)
        found[f"quantize {rows}"] = partial(act_quant_outcomes, run, rows, _COLUMNS, hot=True)
    return found


@goal(
    "cuda.act_quant",
    provider="cuda",
    covers=(*COVERS, "csrc/activation.cu"),
)
def act_quant(run: GoalRun) -> Reading:
    """The time of the least traffic at the memory's ceiling over ours."""
    rows = act_quant_outcomes(run, _ROWS, _COLUMNS)
    mine = run.mine(rows, MINE)
    least = floor(act_quant_traffic(_ROWS, _COLUMNS), row_ceilings(run.device))
    return Reading(
        least.fraction(mine.median_us),
        least.fraction(mine.high_us),
        least.fraction(mine.low_us),
        peer=best_peer(rows),
        note=f"{mine.median_us:.1f} us; {rows_beside(_beside(run))}",
    )
