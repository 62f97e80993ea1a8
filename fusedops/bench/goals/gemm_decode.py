"""Decode GEMMs of Llama-3-8B in dependent chains: the five products, and how they grow with M."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedops.bench.chain import ChainContender, DependentChain
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Measurement, Outcome
from fusedops.bench.products import Layer
from fusedops.packing import pack_gate_up

__all__ = ["LAYERS"]

COVERS = (
    "fusedops/gemm.py",
    "fusedops/config",
    "fusedops/cutlass",
    "fusedops/epilogue",
    "fusedops/providers/cutlass*.py",
    "cutlass_configs",
)
MINE = "fusedops"

LAYERS: dict[str, Callable[[int], Layer]] = {
    "qkv_bias": lambda m: Layer(m, 6144, 4096, bias=True),
    "o_residual": lambda m: Layer(m, 4096, 4096, residual=True),
    "gate_up_swiglu": lambda m: Layer(m, 28672, 4096, activation="silu", gated=True),
    "down_residual": lambda m: Layer(m, 4096, 14336, residual=True),
    "lm_head": lambda m: Layer(m, 128256, 4096),
}
"""The products of one layer of Llama-3-8B and its head, by name, at M rows."""


def epilogue_text(layer: Layer) -> str:
    """The epilogue chain of a layer."""
    steps = ["bias"] if layer.bias else []
    if layer.gated:
        steps.append(f"gate({layer.activation})")
    elif layer.activation:
        steps.append(f"act({layer.activation})")
    if layer.residual:
        steps.append("residual")
    return "|".join(steps) or "none"


def _launcher(layers: LayerChain) -> Callable[[Tensor, int, Tensor], None]:
    """One launch of ``fusedops::gemm_out`` on weight ``index``."""
    layer = layers.layer
    spec = f"none > dense({layer.N},{layer.K}) > {epilogue_text(layer)} > bf16"
    weights = list(layers.chain.weights)
    if layer.gated:
        half = layer.N // 2
        weights = [pack_gate_up(weight[:half], weight[half:]) for weight in weights]
    operands = [term for term in (layers.bias, layers.residual) if term is not None]
    run = torch.ops.fusedops.gemm_out.default

    def launch(x: Tensor, index: int, out: Tensor) -> None:
        run(x, weights[index], operands, spec, [out])

    return launch


def chain_row(run: GoalRun, name: str, m: int) -> dict[str, Outcome]:
    """The row of one product at M = ``m``: ours, torch and cuBLASLt's best of 8 in one chain."""
    made: list[LayerChain] = []

    def make_chain() -> DependentChain:
        made.append(LayerChain(LAYERS[name](m), run.device))
        return made[0].chain

    def contenders(_: DependentChain) -> list[ChainContender]:
        layers = made[0]
        return [layers.contender(MINE, _launcher(layers)), *layers.peers()]

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
