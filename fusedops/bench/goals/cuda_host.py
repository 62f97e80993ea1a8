"""What an eager call of a hand-written kernel costs on the host, through ``torch.library``.

Beside it stands what the first call costs, which compiles the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_compile import cold_outcomes
from fusedops.bench.goals.cuda_rows import MINE, best_peer, rows_beside
from fusedops.bench.measurement import Failed, Outcome, summarize
from fusedops.bench.oracles import bitwise
from fusedops.providers.cuda_base import gpu_of
from fusedops.providers.cuda_plan import Gpu

__all__ = ["host_outcomes"]

_ROUNDS = 25
_CALLS = 200
"""Calls between two synchronisations: far fewer than the launches that a stream holds."""

_SHAPE = (64, 64)


def _sample_us(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    elapsed_s = time.perf_counter() - start
    synchronize()
    return elapsed_s / _CALLS * 1e6


@torch.inference_mode()
def host_outcomes(device: torch.device | str) -> dict[str, Outcome]:
    """Microseconds of the host a call: our operators, and torch's of the same result."""
    x = torch.randn(_SHAPE, device=device).round_()
    ops = torch.ops.fusedops
    calls: dict[str, Callable[[], torch.Tensor]] = {
        MINE: lambda: ops.transpose.default(x),
        f"{MINE} reduce": lambda: ops.reduce.default(x, "sum", [1], False),
        "torch": lambda: x.t().contiguous(),
        "torch reduce": lambda: x.sum([1]),
    }
    is_cuda = torch.device(device).type == "cuda"
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None
    outcomes: dict[str, Outcome] = {}
    for name in (MINE, f"{MINE} reduce"):
        wrong = bitwise(calls[name](), calls[name.replace(MINE, "torch")]())
        if wrong is not None:
            outcomes[name] = Failed(wrong)
    samples: dict[str, list[float]] = {name: [] for name in calls if name not in outcomes}
    for _ in range(_ROUNDS):
        for name, taken in samples.items():
            taken.append(_sample_us(calls[name], synchronize))
    for name, taken in samples.items():
        outcomes[name] = summarize(taken, mode="host", launches=_CALLS, hot=True)
    return outcomes


def _gpu(run: GoalRun) -> Gpu:
    """What the kernels are compiled for."""
    return gpu_of(torch.device(run.device).index or 0)


@goal(
    "cuda.host_us",
    provider="cuda",
    # The operators are called by name.
    covers=("csrc", *(f"fusedops/ops/{name}.py" for name in ("op", "reduce", "transpose"))),
)
def host_us(run: GoalRun) -> Reading:
    """The slower of two operators; the note holds both. Cold compiles are a row beside them."""
    rows = run.row("eager calls", lambda: host_outcomes(run.device))
    names = (MINE, f"{MINE} reduce")
    found = [run.mine(rows, name) for name in names]
    slower = max(found, key=lambda each: each.median_us)
    note = ", ".join(
        f"{name.removeprefix(MINE).strip() or 'transpose'} {each.median_us:.2f} us"
        for name, each in zip(names, found, strict=True)
    )
    cold = {"cold compile": lambda: run.row("cold compile", lambda: cold_outcomes(run, _gpu(run)))}
    note = f"{note}; {rows_beside(cold)}"
    return Reading.of(slower, run.goal.unit, peer=best_peer(rows), note=note)
