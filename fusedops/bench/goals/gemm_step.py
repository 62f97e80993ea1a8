"""The products of one decode step of Llama-3-8B in one graph: 32 x {qkv, o, gate_up, down}, head.

Each product reads the first K columns of the one before it, so the chain is as dependent as a step
whose attention takes no time. Every product has a weight of its own, 15 GB together, and an output
of its own, so that each of the 129 results is checked after a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.chain import gain_for
from fusedops.bench.cublaslt import LtMatmul
from fusedops.bench.data import poison, refuse_constant
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_layers import set_rows
from fusedops.bench.goals.gemm_rows import COVERS, MINE, Compiler, launcher, traffic
from fusedops.bench.layer_chain import finish_into
from fusedops.bench.measurement import Outcome
from fusedops.bench.peers import Available, peer_status
from fusedops.bench.products import CUBLASLT, MODELS, PRODUCTS, Layer, ModelShape, lt_fusion
from fusedops.bench.ranking import best_algorithm
from fusedops.bench.runner import Replay, Runner, make_runner
from fusedops.bench.timer import Program, time_programs

__all__ = ["Product", "StepChain"]

BIAS_STD = 0.5
RESIDUAL_STD = 0.5**0.5
"""Half of each output's variance is the fixed residual: a gate squares every deviation from unit
variance, and the residuals before and after it halve the deviation twice."""

_STD_RANGE = (1 / 8, 8.0)


@dataclass(frozen=True)
class Product:
    """One product of the chain.

    Attributes:
        layer: its sizes and epilogue.
        weight: (N, K).
        term: bias (N,), residual (M, N), or None.
        x: (M, K), columns of the output before it.
        out: (M, columns_out).
    """

    layer: Layer
    weight: Tensor
    term: Tensor | None
    x: Tensor
    out: Tensor

    def reference(self) -> Tensor:
        """The layer on what ``x`` holds now, in float64."""
        bias = self.term.double() if self.layer.bias and self.term is not None else None
        product = F.linear(self.x.double(), self.weight.double(), bias)
        residual = self.term.double() if self.layer.residual and self.term is not None else None
        return self.layer.epilogue(product, residual)


def _gain(layer: Layer) -> float:
    """The gain at which a layer of a step returns unit variance on unit-variance input."""
    if layer.gated:
        return gain_for(lambda product: layer.epilogue(product, None)[:, 0], 2)
    term_std = BIAS_STD if layer.bias else RESIDUAL_STD if layer.residual else 0.0
    return float((1.0 - term_std**2) ** 0.5)


Launch = Callable[[Product], None]


class StepChain:
    """The products of a step on one device.

    Args:
        shape: the model's sizes.
        device: where it runs.
        m: rows, one a sequence.

    Attributes:
        products: in the order of the step; the head is the last.
    """

    def __init__(self, shape: ModelShape, device: torch.device | str, m: int = 1) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        layers = [shape.layer(name, m) for name in PRODUCTS]
        gains = [_gain(layer) for layer in layers]

        def normal(std: float, *sizes: int) -> Tensor:
            drawn = torch.empty(sizes, dtype=layers[0].dtype, device=device)
            return drawn.normal_(std=std, generator=generator)

        self.products: list[Product] = []
        previous = normal(1.0, m, layers[0].K)
        order = [*range(len(PRODUCTS) - 1)] * shape.layers + [len(PRODUCTS) - 1]
        for kind in order:
            layer = layers[kind]
            term = None
            if layer.bias:
                term = normal(BIAS_STD, layer.N)
            elif layer.residual:
                term = normal(RESIDUAL_STD, m, layer.N)
            weight = normal(gains[kind] / layer.K**0.5, layer.N, layer.K)
            out = normal(1.0, m, layer.columns_out)
            x = previous[:, : layer.K]
            self.products.append(Product(layer, weight, term, x, out))
            previous = out
        refuse_constant([self.products[0].x, self.products[0].weight], op="StepChain")

    def poison(self) -> None:
        """Overwrite every output."""
        for product in self.products:
            poison(product.out)

    def wrong(self) -> str | None:
        """What is wrong with the outputs of a run, product by product, or None."""
        for position, product in enumerate(self.products):
            wrong = product.layer.verdict(product.out, product.reference())
            if wrong is not None:
                return f"product {position}: {wrong}"
        std = float(self.products[-1].out.float().std())
        if not _STD_RANGE[0] <= std <= _STD_RANGE[1]:
            return f"the last output has standard deviation {std:.3g}: values fade or grow"
        return None

    def program(self, name: str, launch: Launch, runner: Runner) -> Program:
        """One way to run the chain, as the timer takes it; one launch is the whole chain."""

        def enqueue(count: int) -> None:
            for _ in range(count):
                for product in self.products:
                    launch(product)

        def check() -> str | None:
            self.poison()
            enqueue(1)
            runner.synchronize()
            return self.wrong()

        def check_after(replay: Replay) -> str | None:
            finals = []
            for _ in range(2):
                self.poison()
                replay()
                runner.synchronize()
                finals.append(self.products[-1].out.clone())
            if not torch.equal(*finals):
                return "two replays of the chain gave different bits"
            return self.wrong()

        return Program(name, enqueue, check, check_after=check_after, launches=1)


def our_launch(products: Sequence[Product]) -> Launch:
    """One launch of ``fusedops::gemm_out`` a product, gate and up rows packed beforehand."""
    weights = {id(each): each.layer.packed(each.weight) for each in products}
    calls = {id(each): launcher(each.layer) for each in products}

    def launch(each: Product) -> None:
        operands = [] if each.term is None else [each.term]
        calls[id(each)](each.x, weights[id(each)], operands, each.out)

    return launch


def torch_launch(each: Product) -> None:
    """A product in as few torch calls as it takes."""
    if each.layer.gated:
        finish_into(each.layer, F.linear(each.x, each.weight), None, each.out)
    elif each.term is None:
        torch.mm(each.x, each.weight.T, out=each.out)
    else:
        torch.addmm(each.term, each.x, each.weight.T, out=each.out)


def lt_launch(products: Sequence[Product]) -> Launch:
    """cuBLASLt's best algorithm of each kind of product, SwiGLU apart."""
    plans = {}
    for each in products:
        layer = each.layer
        if layer in plans:
            continue
        fusion = lt_fusion(layer)
        out = each.out
        if not fusion.whole:
            out = torch.empty(layer.M, layer.N, dtype=layer.dtype, device=out.device)
        addend = each.term if fusion.residual else None
        plan = LtMatmul(each.x, each.weight, out, fusion.epilogue, addend)
        plans[layer] = (plan, best_algorithm(plan, out.device).algorithm, out)

    def launch(each: Product) -> None:
        layer = each.layer
        plan, algorithm, scratch = plans[layer]
        fusion = lt_fusion(layer)
        target = each.out if fusion.whole else scratch
        bias = each.term if layer.bias else None
        plan.run(
            algorithm, each.x, each.weight, target, bias, each.term if fusion.residual else None
        )
        if not fusion.whole:
            finish_into(layer, target, None, each.out)

    return launch


def step_outcomes(run: GoalRun, shape: ModelShape, m: int = 1) -> dict[str, Outcome]:
    """The chain by us, torch and cuBLASLt; times are of the whole chain."""
    chain = StepChain(shape, run.device, m)
    runner = make_runner(run.device)
    launches: dict[str, Launch] = {MINE: our_launch(chain.products), "torch": torch_launch}
    if isinstance(peer_status(["cublaslt"])["cublaslt"], Available):
        launches[CUBLASLT] = lt_launch(chain.products)
    programs = [chain.program(name, launch, runner) for name, launch in launches.items()]
    return time_programs(programs, runner, protocol=run.protocol)


@goal("gemm.chain129.m1", provider="cutlass", covers=COVERS)
def chain129(run: GoalRun) -> Reading:
    """The time of the whole chain; the peer is the best of torch and cuBLASLt."""
    shape = MODELS["llama3-8b"]
    rows = set_rows([1], ["llama3-8b"])

    def measure_row() -> dict[str, Outcome]:
        Compiler(rows).before(rows[0], run.device)
        return step_outcomes(run, shape)

    outcomes = run.row(f"{4 * shape.layers + 1} products m1", measure_row)
    mine = run.mine(outcomes, MINE)
    name, peer = run.best(outcomes, [name for name in outcomes if name != MINE])
    return Reading.of(
        mine,
        run.goal.unit,
        peer=f"{name} {peer.median_us / 1e3:.3f} ms",
        note=f"{step_bytes(shape) / mine.median_us / 1e6:.2f} TB/s",
    )


def step_bytes(shape: ModelShape, m: int = 1) -> float:
    """Bytes that one chain must move."""

    def moved(layer: Layer) -> float:
        least = traffic(layer)
        return least.read_bytes + least.write_bytes

    *repeated, head = (shape.layer(name, m) for name in PRODUCTS)
    return shape.layers * sum(map(moved, repeated)) + moved(head)
