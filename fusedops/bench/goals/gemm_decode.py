"""Decode GEMMs of Llama-3-8B in dependent chains: the five products, and how they grow with M."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusedops.bench.chain import ChainContender, DependentChain
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_rows import COVERS, MINE, chain_launch
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Measurement, Outcome
from fusedops.bench.products import MODELS, PRODUCTS, Layer

__all__ = ["LAYERS"]

LAYERS: dict[str, Callable[[int], Layer]] = {
    name: partial(MODELS["llama3-8b"].layer, name) for name in PRODUCTS
}
"""The products of one layer of Llama-3-8B and its head, by name, at M rows."""


def chain_row(run: GoalRun, name: str, m: int) -> dict[str, Outcome]:
    """The row of one product at M = ``m``: ours, torch and cuBLASLt's best of 8 in one chain."""
    made: list[LayerChain] = []

    def make_chain() -> DependentChain:
        made.append(LayerChain(LAYERS[name](m), run.device))
        return made[0].chain

    def contenders(_: DependentChain) -> list[ChainContender]:
        layers = made[0]
        return [layers.contender(MINE, chain_launch(layers)), *layers.peers()]

    return run.chain(f"{name} m{m}", make_chain, contenders)


def _peer(rows: dict[str, Outcome]) -> str:
    timed = {
        name: row.median_us
        for name, row in rows.items()
        if name != MINE and isinstance(row, Measurement)
    }
    if not timed:
        return ""
    best = min(timed, key=lambda name: timed[name])
    return f"{best} {timed[best]:.1f} us"


def _register(name: str) -> None:
    @goal(f"gemm.{name}.m16", provider="cutlass", covers=COVERS)
    def product(run: GoalRun) -> Reading:
        rows = chain_row(run, name, 16)
        return Reading.of(run.mine(rows, MINE), run.goal.unit, peer=_peer(rows))


for _name in LAYERS:
    _register(_name)


@goal("gemm.m64_over_m16", provider="cutlass", covers=COVERS)
def m64_over_m16(run: GoalRun) -> Reading:
    """The largest ratio over the five products; its note names each."""
    ratios: dict[str, tuple[float, float, float]] = {}
    for name in LAYERS:
        wide = run.mine(chain_row(run, name, 64), MINE)
        narrow = run.mine(chain_row(run, name, 16), MINE)
        ratios[name] = (
            wide.median_us / narrow.median_us,
            wide.low_us / narrow.high_us,
            wide.high_us / narrow.low_us,
        )
    worst = max(ratios, key=lambda name: ratios[name][0])
    note = ", ".join(f"{name} {ratio[0]:.3f}" for name, ratio in ratios.items())
    return Reading(*ratios[worst], note=note)
