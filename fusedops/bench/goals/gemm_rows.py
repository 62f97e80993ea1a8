"""What the GEMM goals share: our contender in both protocols, and what a row says beside its time.

Everything that reads the device is in the functions that a row is measured with; what becomes of
the outcomes (``ratio``, ``collect``, ``geomean``) works on any that are handed in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalError, GoalRun, Reading
from fusedops.bench.goals.gemm_layers import Row
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Measurement, Outcome, Ratio, speedup
from fusedops.bench.precompile import Precompiled, Target, layer_problem, precompile
from fusedops.bench.products import CUBLASLT, Layer
from fusedops.bench.readings import void_reason
from fusedops.bench.roofline import Traffic, floor, row_ceilings
from fusedops.epilogue.spec import dtype_name
from fusedops.gemm import explain_problem

__all__ = [
    "COVERS",
    "MINE",
    "Compiler",
    "Scored",
    "annotated",
    "chain_launch",
    "collect",
    "geomean",
    "launcher",
    "layer_check",
    "our_contender",
    "plan_text",
    "ratio",
    "refuse_void",
    "traffic",
    "worst",
]

COVERS: tuple[str, ...] = ("cutlass_configs", "cutlass_configs/tuned/*.json")
"""What every figure of these kernels depends on beside what is imported: which tile is chosen."""

MINE = "fusedops"

Call = Callable[[Tensor, Tensor, list[Tensor], Tensor], None]
"""``call(x, w, operands, out)``: one launch of ``fusedops::gemm_out``."""


def launcher(layer: Layer) -> Call:
    """One launch of a layer, its operands in the chain's order, weight and bias packed."""
    spec = f"none > dense({layer.N},{layer.K}) > {layer.chain_text} > {dtype_name(layer.dtype)}"
    run = torch.ops.fusedops.gemm_out.default

    def call(x: Tensor, w: Tensor, operands: list[Tensor], out: Tensor) -> None:
        run(x, w, operands, spec, [out])

    return call


def chain_launch(layers: LayerChain) -> Callable[[Tensor, int, Tensor], None]:
    """Our launch on weight ``index`` of a layer's chain."""
    layer = layers.layer
    call = launcher(layer)
    weights = [layer.packed(weight) for weight in layers.chain.weights]
    bias = None if layers.bias is None else layer.packed(layers.bias)
    operands = [term for term in (bias, layers.residual) if term is not None]

    def launch(x: Tensor, index: int, out: Tensor) -> None:
        call(x, weights[index], operands, out)

    return launch


def layer_check(layer: Layer) -> Callable[[tuple[Tensor, ...], Buffers], str | None]:
    """Judges a layer's result against float64."""

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return layer.verdict(results[0], layer.reference(buffers))

    return check


def our_contender(layer: Layer) -> Contender:
    """A layer by ``fusedops`` on buffers of ``make_layer_buffers``."""
    call = launcher(layer)

    def prepare(buffers: Buffers) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        x, w, bias, residual = layer.operands(buffers)
        bias = None if bias is None else layer.packed(bias)
        operands = [term for term in (bias, residual) if term is not None]
        return x, layer.packed(w), operands, buffers.outputs[0]

    def run(state: tuple[Tensor, Tensor, list[Tensor], Tensor]) -> Tensor:
        call(*state)
        return state[3]

    return Contender(MINE, run, layer_check(layer), prepare=prepare)


class Compiler:
    """Compiles what a set's rows need in parallel, once, before the first row that is measured.

    Rows that are taken over from an earlier run compile nothing.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        compile_all: Callable[..., Precompiled] = precompile,
        target_of: Callable[[torch.device | str], Target] = Target.of,
    ) -> None:
        self._left = list(rows)
        self._compile_all = compile_all
        self._target_of = target_of
        self._done = False

    def before(self, row: Row, device: torch.device | str) -> None:
        """Called before ``row`` is measured: compiles for it and for all rows after it.

        A kernel that cannot be compiled is no error here; its row fails with the reason.
        """
        if self._done or torch.device(device).type != "cuda":
            return
        target = self._target_of(device)
        left = self._left[self._left.index(row) :]
        self._compile_all([layer_problem(each.layer, target) for each in left], target.arch)
        self._done = True


def traffic(layer: Layer) -> Traffic:
    """The least work of a layer."""
    element = layer.dtype.itemsize
    read = layer.N * layer.K + layer.M * layer.K
    read += layer.N if layer.bias else 0
    out = layer.M * layer.columns_out
    read += out if layer.residual else 0
    return Traffic(read * element, out * element, 2.0 * layer.M * layer.N * layer.K)


def plan_text(layer: Layer, device: torch.device | str) -> str:
    """What selection picks for a layer, as ``explain`` says it."""
    kind = str(torch.device(device))
    found = explain_problem(
        layer.M, layer.N, layer.K, dtype=layer.dtype, epilogue=layer.chain_text, device=kind
    )
    return f"{found.provider}: {found.plan}"


def annotated(
    layer: Layer, outcomes: dict[str, Outcome], device: torch.device | str
) -> dict[str, Outcome]:
    """The outcomes, with floor, plan and speed-ups in the notes of our row."""
    mine = outcomes.get(MINE)
    if not isinstance(mine, Measurement):
        return outcomes
    bound = floor(traffic(layer), row_ceilings(device))
    notes = [
        f"floor {bound.us:.2f} us, {bound.fraction(mine.median_us):.1%} of it reached",
        f"plan {plan_text(layer, device)}",
    ]
    for name, outcome in outcomes.items():
        if name != MINE and isinstance(outcome, Measurement):
            notes.append(f"speed-up {speedup(mine, outcome).median:.3f} over {name}")
    return {**outcomes, MINE: replace(mine, notes=(*mine.notes, *notes))}


def refuse_void(layer: Layer, outcomes: Mapping[str, Outcome], device: torch.device | str) -> None:
    """GoalError where cuBLAS's bare product was so slow that the row proves nothing.

    It is raised before the row is kept, so that the next run measures it again.
    """
    bare = layer.chain_text == "none" and layer.dtype == torch.bfloat16
    products = (outcomes.get(name) for name in ("torch", CUBLASLT))
    timed = [outcome for outcome in products if isinstance(outcome, Measurement)]
    if torch.device(device).type != "cuda" or not bare or not timed:
        return
    gpu = torch.cuda.get_device_name(torch.device(device))
    best = min(timed, key=lambda outcome: outcome.median_us)
    reason = void_reason(gpu, layer.M, layer.N, layer.K, best)
    if reason is not None:
        raise GoalError(reason)


@dataclass(frozen=True)
class Scored:
    """A row's outcome against its best peer.

    Attributes:
        row: as measured.
        peer: the best peer's name.
        ratio: the peer's time over ours; above 1 we win.
    """

    row: Row
    peer: str
    ratio: Ratio


def ratio(
    run: GoalRun,
    outcomes: Mapping[str, Outcome],
    required: Sequence[str] = (CUBLASLT,),
) -> tuple[str, Ratio]:
    """The best peer of a row and how many times faster we are.

    Args:
        required: peers without which the comparison would be too easy.

    Raises:
        GoalError: our row, a required peer, or every peer has no time.
    """
    mine = run.mine(outcomes, MINE)
    for name in required:
        outcome = outcomes.get(name)
        if not isinstance(outcome, Measurement):
            why = outcome.reason if outcome is not None else "it is not available"
            raise GoalError(f"not measurable without {name}: {why}")
    name, peer = run.best(outcomes, [name for name in outcomes if name != MINE])
    return name, speedup(mine, peer)


def collect(rows: Sequence[Row], score: Callable[[Row], tuple[str, Ratio]]) -> list[Scored]:
    """Every row's score; a row that fails does not keep the others from being measured.

    Raises:
        GoalError: rows have no ratio; it names them. A set is whole or has no figure.
        OutOfTimeError: the budget was spent.
    """
    scored, failed = [], []
    for row in rows:
        try:
            scored.append(Scored(row, *score(row)))
        except GoalError as error:
            failed.append(f"{row.key}: {error}")
    if failed:
        shown = "; ".join(failed[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise GoalError(f"{len(failed)} of {len(rows)} rows have no ratio: {shown}{more}")
    return scored


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _groups(scored: Sequence[Scored]) -> Iterator[str]:
    """Geometric means by M, for the note."""
    for m in sorted({item.row.layer.M for item in scored}):
        values = [item.ratio.median for item in scored if m == item.row.layer.M]
        yield f"m{m} {_mean(values):.3f}"


def _peers(scored: Sequence[Scored]) -> str:
    # QuACK's configurations are one peer.
    counts = Counter(item.peer.split(" ")[0] for item in scored)
    return ", ".join(f"{name} best in {count}" for name, count in counts.most_common())


def geomean(scored: Sequence[Scored]) -> Reading:
    """Geometric mean of the rows' medians; low and high are those of the rows' percentiles."""
    low = min(scored, key=lambda item: item.ratio.median)
    note = f"{len(scored)} rows; {', '.join(_groups(scored))}"
    return Reading(
        _mean([item.ratio.median for item in scored]),
        _mean([item.ratio.low for item in scored]),
        _mean([item.ratio.high for item in scored]),
        peer=_peers(scored),
        note=f"{note}; worst {low.row.key} {low.ratio.median:.3f}",
    )


def worst(scored: Sequence[Scored]) -> Reading:
    """The row with the lowest ratio; the note names the rows after it."""
    ordered = sorted(scored, key=lambda item: item.ratio.median)
    first = ordered[0]
    note = ", ".join(f"{item.row.key} {item.ratio.median:.3f}" for item in ordered[:5])
    return Reading(
        first.ratio.median,
        first.ratio.low,
        first.ratio.high,
        peer=first.peer,
        note=f"lowest of {len(scored)}: {note}",
    )
