"""GEMM goals over sets of shapes: against cuBLAS with its epilogue apart, and against QuACK.

Small and mid M run in dependent chains (``LayerChain``), as decoding meets them; the rows against
QuACK run on rotated buffers. Goals that read one set measure it once: within a process the second
takes the first one's rows over, so select both (``gemm.small_m.*``) in one run.
"""

from __future__ import annotations

from collections.abc import Callable

from fusedops.bench.chain import measure_chain
from fusedops.bench.contenders import measure
from fusedops.bench.goal_run import GoalError, GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_layers import GOAL_ROWS, Row
from fusedops.bench.goals.gemm_rows import (
    COVERS,
    MINE,
    Compiler,
    Scored,
    annotated,
    chain_launch,
    collect,
    geomean,
    layer_check,
    our_contender,
    ratio,
    refuse_void,
    worst,
)
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Outcome, Ratio
from fusedops.bench.peers import Available, peer_status
from fusedops.bench.products import CUBLASLT, make_layer_buffers, quack_peers

__all__ = ["chain_outcomes", "forget_rows", "quack_outcomes", "scored_set"]

TimeRow = Callable[[GoalRun, Row], dict[str, Outcome]]

_measured: dict[tuple[str, str], dict[str, Outcome]] = {}
"""(set, row's key) -> what this process has measured or taken over."""


def forget_rows() -> None:
    """Forget what this process has measured, so that every goal starts from its own record."""
    _measured.clear()


def chain_outcomes(run: GoalRun, row: Row) -> dict[str, Outcome]:
    """A row in a dependent chain: ours, torch, and cuBLASLt's best of 8."""
    layers = LayerChain(row.layer, run.device)
    contenders = [layers.contender(MINE, chain_launch(layers)), *layers.peers()]
    return measure_chain(layers.chain, contenders, device=run.device, protocol=run.protocol)


def quack_outcomes(run: GoalRun, row: Row) -> dict[str, Outcome]:
    """A row on rotated buffers: ours and each of QuACK's configurations."""
    layer = row.layer
    return measure(
        [our_contender(layer), *quack_peers(layer, layer_check(layer))],
        lambda generator: make_layer_buffers(layer, generator),
        device=run.device,
        protocol=run.protocol,
    )


def scored_set(
    run: GoalRun,
    name: str,
    rows: list[Row],
    time_row: TimeRow,
    required: tuple[str, ...] = (CUBLASLT,),
    compiler: Compiler | None = None,
) -> list[Scored]:
    """Every row of a set, measured unless it is known, against its best peer.

    Args:
        name: of the set; goals that read the same set give the same name.
        time_row: measures a row; its kernels are compiled by then.
        required: peers that every row needs.
        compiler: compiles ahead of the first row that is measured.

    Raises:
        GoalError: a row has no ratio (all others are measured and kept first).
        OutOfTimeError: the budget was spent; rows that are done are kept.
    """
    compiler = compiler or Compiler(rows)

    def score(row: Row) -> tuple[str, Ratio]:
        def measure_row() -> dict[str, Outcome]:
            compiler.before(row, run.device)
            outcomes = time_row(run, row)
            refuse_void(row.layer, outcomes, run.device)
            return annotated(row.layer, outcomes, run.device)

        known = _measured.get((name, row.key))
        if known is None:
            known = _measured[name, row.key] = run.row(row.key, measure_row)
        else:
            run.rows += 1
        return ratio(run, known, required)

    return collect(rows, score)


def _register(
    goal_id: str, set_name: str, time_row: TimeRow, read: Callable[[list[Scored]], Reading]
) -> None:
    @goal(goal_id, provider="cutlass", covers=COVERS)
    def over_cublas(run: GoalRun) -> Reading:
        return read(scored_set(run, set_name, GOAL_ROWS[run.goal.id](), time_row))


_register("gemm.small_m.geomean", "small_m", chain_outcomes, geomean)
_register("gemm.small_m.worst", "small_m", chain_outcomes, worst)
_register("gemm.mid_m.geomean", "mid_m", chain_outcomes, geomean)


def _register_quack(goal_id: str, read: Callable[[list[Scored]], Reading]) -> None:
    @goal(goal_id, provider="cutlass", covers=COVERS)
    def over_quack(run: GoalRun) -> Reading:
        status = peer_status(["quack"])["quack"]
        if not isinstance(status, Available):
            raise GoalError(f"not measurable without QuACK: {status.reason}")
        rows = GOAL_ROWS[run.goal.id]()
        reading = read(scored_set(run, run.goal.id, rows, quack_outcomes, required=()))
        return Reading(
            reading.value,
            reading.low,
            reading.high,
            peer=f"QuACK {status.version}",
            note=reading.note,
        )


_register_quack("gemm.quack.small_m", geomean)
_register_quack("gemm.quack.large_m", worst)
