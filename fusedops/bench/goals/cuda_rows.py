"""What the goals of the hand-written kernels share: contenders, and how a row is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.measurement import Measurement, Outcome
from fusedops.bench.peers import Available, Check, fresh_compile, peer_status

__all__ = ["COVERS", "MINE", "best_peer", "contenders", "reading"]

MINE = "fusedops"

COVERS = (
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/providers/cuda*.py",
)
"""What every figure of these kernels depends on, beside its own .cu file."""


def contenders(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor], check: Check
) -> list[Contender]:
    """Our function of a row's one input, torch's, and torch's compiled where that works here."""

    def on_input(name: str, function: Callable[[Tensor], Tensor]) -> Contender:
        return Contender(name, lambda buffers: function(buffers.inputs[0]), check)

    found = [on_input(MINE, ours), on_input("torch", torchs)]
    if isinstance(peer_status(["torch.compile"])["torch.compile"], Available):
        found.append(on_input("torch.compile", fresh_compile(torchs)))
    return found


def best_peer(rows: Mapping[str, Outcome]) -> str:
    """Name and time of the fastest contender but ours, as text."""
    timed = {
        name: row.median_us
        for name, row in rows.items()
        if not name.startswith(MINE) and isinstance(row, Measurement)
    }
    if not timed:
        return ""
    name = min(timed, key=lambda key: timed[key])
    return f"{name} {timed[name]:.1f} us"


def reading(run: GoalRun, rows: Mapping[str, Outcome], note: str = "") -> Reading:
    """Our time, with the best peer's."""
    return Reading.of(run.mine(rows, MINE), run.goal.unit, peer=best_peer(rows), note=note)
