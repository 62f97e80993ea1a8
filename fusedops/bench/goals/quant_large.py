"""Large quantized products: int4 against bf16, fp8 with a fused epilogue, and fp8 blocks."""

from __future__ import annotations

from fusedops.bench.contenders import Contender
from fusedops.bench.goal_run import GoalError, GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_rows import COVERS
from fusedops.bench.goals.quant_layers import QUANT_ROWS, QuantRow
from fusedops.bench.goals.quant_notes import annotated, compile_ahead
from fusedops.bench.measurement import Absent, Outcome, Ratio, speedup
from fusedops.bench.products import CUBLASLT
from fusedops.bench.quant_rows import MINE, Rotation, rotated_outcomes

__all__ = ["int4_outcomes", "large_row"]

Peers = dict[str, Contender | Absent]


def large_row(run: GoalRun, row: QuantRow, peers: Peers, rotation: Rotation) -> dict[str, Outcome]:
    """A row on rotated buffers: ours and the given peers."""

    def measure_row() -> dict[str, Outcome]:
        compile_ahead(run.device)
        outcomes = rotated_outcomes(rotation, peers, run.device, run.protocol)
        return annotated([row.made], outcomes, run.device)

    return run.row(row.key, measure_row)


def int4_outcomes(run: GoalRun, row: QuantRow) -> dict[str, Outcome]:
    """int4 weights against cuBLAS on the same values in bf16; QuACK's int4 beside them."""
    rotation = Rotation(row.made)
    bf16 = {peer.name: peer for peer in rotation.bf16_peers()}
    return large_row(run, row, {**rotation.peers(), **bf16}, rotation)


def _over(run: GoalRun, outcomes: dict[str, Outcome], peers: list[str]) -> tuple[str, Ratio]:
    """The best of some peers, and how many times faster than it we are."""
    mine = run.mine(outcomes, MINE)
    name, peer = run.best(outcomes, peers)
    return name, speedup(mine, peer)


@goal("quant.int4.large_m", provider="cutlass", covers=COVERS)
def int4_large(run: GoalRun) -> Reading:
    """The lowest of cuBLAS's time over ours; every row is measured, also after one that failed."""
    found: dict[str, tuple[str, Ratio]] = {}
    failed: list[str] = []
    for row in QUANT_ROWS[run.goal.id]():
        try:
            outcomes = int4_outcomes(run, row)
            cublas = [name for name in outcomes if name in ("torch", CUBLASLT)]
            found[row.key] = _over(run, outcomes, cublas)
        except GoalError as error:
            failed.append(f"{row.key}: {error}")
    if failed:
        count = len(failed) + len(found)
        raise GoalError(f"{len(failed)} of {count} rows have no ratio: {'; '.join(failed[:3])}")
    ordered = sorted(found, key=lambda key: found[key][1].median)
    name, ratio = found[ordered[0]]
    note = ", ".join(f"{key} {found[key][1].median:.3f}" for key in ordered)
    return Reading(ratio.median, ratio.low, ratio.high, peer=name, note=note)


@goal("quant.fp8_row.m4096_over_cublas", provider="cutlass", covers=COVERS)
def fused_over_cublas(run: GoalRun) -> Reading:
    """cuBLAS's time for the bare product over ours, which is the ratio of TFLOP/s."""
    (row,) = QUANT_ROWS[run.goal.id]()
    rotation = Rotation(row.made)
    peers: Peers = rotation.peers(exact_sums=True, product_only=True)
    outcomes = large_row(run, row, peers, rotation)
    mine = run.mine(outcomes, MINE)
    name, ratio = _over(run, outcomes, [name for name in outcomes if name != MINE])
    return Reading(
        ratio.median,
        ratio.low,
        ratio.high,
        peer=name,
        note=f"{_tflops(row, mine.median_us):.0f} TFLOP/s",
    )


def _tflops(row: QuantRow, us: float) -> float:
    layer = row.made.layer
    return 2.0 * layer.M * layer.N * layer.K / us / 1e6


@goal("quant.fp8_block.m4096_tflops", provider="cutlass", covers=COVERS)
def block_tflops(run: GoalRun) -> Reading:
    """The lowest TFLOP/s of the shapes; FlashInfer's kernel of the same scheme is the peer."""
    found: dict[str, Reading] = {}
    for row in QUANT_ROWS[run.goal.id]():
        rotation = Rotation(row.made)
        peers: Peers = rotation.peers()
        outcomes = large_row(run, row, peers, rotation)
        mine = run.mine(outcomes, MINE)
        value, low, high = (_tflops(row, us) for us in (mine.median_us, mine.high_us, mine.low_us))
        others = [name for name in outcomes if name in peers]
        try:
            name, best = run.best(outcomes, others)
            peer = f"{name} {_tflops(row, best.median_us):.0f} TFLOP/s"
        except GoalError:
            peer = ""
        found[row.key] = Reading(value, low, high, peer=peer)
    worst = min(found.values(), key=lambda reading: reading.value)
    note = ", ".join(f"{key} {reading.value:.0f}" for key, reading in found.items())
    return Reading(worst.value, worst.low, worst.high, peer=worst.peer, note=note)
