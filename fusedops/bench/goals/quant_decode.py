"""Decode products of Llama-3-8B under quantization: chains that all goals of M = 16 and 64 share.

One row holds a product under every scheme, so that ratios between schemes are of one run, with the
schemes' peers and the product in bfloat16. Within a process each row is measured once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_rows import COVERS
from fusedops.bench.goals.quant_layers import (
    M16_SCHEMES,
    M64_SCHEMES,
    PRODUCTS,
    SCHEME_OF,
    chain_layers,
)
from fusedops.bench.goals.quant_notes import annotated, compile_ahead
from fusedops.bench.measurement import Measurement, Outcome, speedup
from fusedops.bench.quant_peers import FLASHINFER, QUACK, SCALED_MM
from fusedops.bench.quant_rows import BF16, MINE, chain_outcomes

__all__ = ["decode_row", "forget_rows"]

_PEERS = {
    "fp8": (SCALED_MM["fp8"], BF16),
    "fp8-block": (FLASHINFER, BF16),
    "int4": (QUACK["int4"], BF16),
}
"""Whom a goal names as its best peer, by scheme."""

_measured: dict[str, dict[str, Outcome]] = {}
"""Row's key -> what this process has measured or taken over."""


def forget_rows() -> None:
    """Forget what this process has measured, so that every goal starts from its own record."""
    _measured.clear()


def decode_row(run: GoalRun, product: str, m: int) -> dict[str, Outcome]:
    """One of ``PRODUCTS`` at M = 16 or 64 under the schemes whose goals read that M."""
    key = f"{product} m{m}"
    known = _measured.get(key)
    if known is not None:
        run.rows += 1
        return known
    layers = chain_layers(product, m, M16_SCHEMES if m == 16 else M64_SCHEMES)

    def measure_row() -> dict[str, Outcome]:
        compile_ahead(run.device)
        return annotated(layers, chain_outcomes(layers, run.device, run.protocol), run.device)

    _measured[key] = run.row(key, measure_row)
    return _measured[key]


def _peer(rows: Mapping[str, Outcome], names: Sequence[str]) -> str:
    timed = {name: row for name in names if isinstance(row := rows.get(name), Measurement)}
    if not timed:
        return ""
    best = min(timed, key=lambda name: timed[name].median_us)
    return f"{best} {timed[best].median_us:.1f} us"


def _register(label: str, scheme: str, product: str) -> None:
    @goal(f"quant.{label}.{product}.m16", provider="cutlass", covers=COVERS)
    def decode_product(run: GoalRun) -> Reading:
        rows = decode_row(run, product, 16)
        mine = run.mine(rows, f"{MINE} {scheme}")
        return Reading.of(mine, run.goal.unit, peer=_peer(rows, _PEERS[scheme]))


for _label, _scheme in SCHEME_OF.items():
    for _product in PRODUCTS:
        _register(_label, _scheme, _product)


def _largest(ratios: Mapping[str, tuple[float, float, float]]) -> Reading:
    """The largest of several ratios (median, low, high); the note names each."""
    worst = max(ratios, key=lambda name: ratios[name][0])
    note = ", ".join(f"{name} {ratio[0]:.3f}" for name, ratio in ratios.items())
    return Reading(*ratios[worst], note=note)


@goal("quant.int8_over_fp8", provider="cutlass", covers=COVERS)
def int8_over_fp8(run: GoalRun) -> Reading:
    """The largest of int8's time over fp8's, round by round."""
    ratios = {}
    for product in PRODUCTS:
        rows = decode_row(run, product, 16)
        fp8, int8 = (run.mine(rows, f"{MINE} {scheme}") for scheme in ("fp8", "int8"))
        found = speedup(fp8, int8)
        ratios[product] = (found.median, found.low, found.high)
    return _largest(ratios)


def _register_growth(goal_id: str, scheme: str) -> None:
    @goal(goal_id, provider="cutlass", covers=COVERS)
    def m64_over_m16(run: GoalRun) -> Reading:
        ratios = {}
        for product in PRODUCTS:
            wide, narrow = (
                run.mine(decode_row(run, product, m), f"{MINE} {scheme}") for m in (64, 16)
            )
            ratios[product] = (
                wide.median_us / narrow.median_us,
                wide.low_us / narrow.high_us,
                wide.high_us / narrow.low_us,
            )
        return _largest(ratios)


_register_growth("quant.fp8_row.m64_over_m16", "fp8")
_register_growth("quant.int4.m64_over_m16", "int4")
