"""How much of a small kernel stays visible between two products of a dependent chain.

The chain is ``DependentChain``'s: one CUDA graph of at least 32 products, weights that take turns
and exceed the L2 four times, each product reading what was written before it. A contender puts a
small kernel before (or behind) every product; a product alone is what it is held against. All of
them launch with programmatic dependent launch, so a kernel starts while the one ahead ends, and
less than its own time is left to see.

RMSNorm and the gated activation make the product's x. The quantized x has no reader here, as the
product is bfloat16, and RoPE turns what the product wrote; both stand between two products in the
stream, which is all that their time depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.chain import ChainContender, ChainSpec, DependentChain, measure_chain
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun
from fusedops.bench.goals.cuda_quantized import quantized_error
from fusedops.bench.goals.cuda_rows import MINE, bounded
from fusedops.bench.goals.gemm_rows import launcher
from fusedops.bench.measurement import Measurement, Outcome, summarize
from fusedops.bench.products import Layer
from fusedops.ops.activation import act_and_mul
from fusedops.ops.norm import fused_add_rms_norm, rms_norm
from fusedops.ops.quantize import quantize
from fusedops.ops.rope_append import rope_append_paged_kv_
from fusedops.ops.rope_table import rope_table
from fusedops.providers.base import use_provider

__all__ = ["VISIBLE_LIMIT_US", "VISIBLE_ROWS", "Between", "visible_outcomes"]

VISIBLE_ROWS = (1, 16, 64)
VISIBLE_LIMIT_US = 0.7
"""What may stay visible of a small kernel between two products."""

_PRODUCT = "gemm"
_EPS = 1e-6
_RESIDUAL_VARIANCE = 0.75
"""Of each output: a gate squares the deviation of the other part, which thus fades."""

_GAIN = (0.25 / 0.356) ** 0.5
"""A quarter of an output's variance for x = silu(g) u, whose mean square is 0.356."""

_HEAD_DIM = 128
_QUERY_GROUP = 4
_PAGE_SIZE = 16
_POSITIONS = 64


@dataclass(frozen=True)
class Between:
    """What a contender does around each product.

    Attributes:
        before: makes the product's x of the previous output: (x, (M, columns)), of which the first
            columns are those that a product alone reads. None: nothing.
        exact: the same in float64.
        behind: called with the product's output.
        check: called with x and the output of the launch that was made last; what is wrong with
            anything but the product, or None.
        finished: the exact output that ``behind`` leaves of the product's exact one.
    """

    before: Callable[[Tensor], Tensor] | None = None
    exact: Callable[[Tensor], Tensor] | None = None
    behind: Callable[[Tensor], object] | None = None
    check: Callable[[Tensor, Tensor], str | None] | None = None
    finished: Callable[[Tensor], Tensor] | None = None


def _whole(x: Tensor) -> Tensor:
    """All of the previous output, whose first half x is."""
    return x.as_strided((x.shape[0], 2 * x.shape[1]), x.stride())


def _norm64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight.double()


def _quantized() -> Between:
    """The product reads x itself, which the kernel ahead of it has quantized."""
    last: list[tuple[Tensor, Tensor]] = []

    def before(x: Tensor) -> Tensor:
        last[:] = [quantize(x)]
        return x

    def check(x: Tensor, out: Tensor) -> str | None:
        exact = x.double()
        return quantized_error(*last[0], exact, torch.zeros_like(exact))

    return Between(before, lambda x: x.double(), check=check)


class _Turn:
    """RoPE and the paged append of what a product wrote: q, k and v side by side in each row."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str):
        self.q_heads = columns // _HEAD_DIM
        self.kv_heads = max(1, self.q_heads // _QUERY_GROUP)
        shape = (rows, _PAGE_SIZE, self.kv_heads, _HEAD_DIM)
        self.k_cache, self.v_cache = (
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)
        )
        request = torch.arange(rows, dtype=torch.int32, device=device)
        # One page a request: each token has a place of its own.
        self.positions = request % _PAGE_SIZE
        self.request, self.pages = request, request[:, None]
        self.cos_sin = rope_table(_HEAD_DIM, _POSITIONS).to(device)

    def split(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views."""
        sizes = (self.q_heads, self.kv_heads, self.kv_heads)
        heads = out[:, : sum(sizes) * _HEAD_DIM].unflatten(1, (sum(sizes), _HEAD_DIM))
        q, k, v = heads.split(sizes, dim=1)
        return q, k, v

    def behind(self, out: Tensor) -> None:
        """One launch."""
        rope_append_paged_kv_(
            *self.split(out),
            self.positions,
            self.cos_sin,
            self.k_cache,
            self.v_cache,
            self.pages,
            self.request,
        )

    def finished(self, exact: Tensor) -> Tensor:
        """The product's exact output, turned."""
        cosine, sine = self.cos_sin[self.positions.long()].double()[:, None].chunk(2, -1)
        turned = exact.clone()
        q, k, _ = self.split(turned)
        for heads in (q, k):
            low, high = (half.clone() for half in heads.chunk(2, -1))
            heads.copy_(torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1))
        return turned

    def check(self, x: Tensor, out: Tensor) -> str | None:
        """Whether the cache holds the keys and values of the output."""
        place = (self.request.long(), self.positions.long())
        _, k, v = self.split(out)
        same = torch.equal(self.k_cache[place], k) and torch.equal(self.v_cache[place], v)
        return None if same else "the cache does not hold the keys and values of the output"


def _betweens(chain: DependentChain, device: torch.device | str) -> dict[str, Between]:
    """Contenders by name: the product alone, with each small kernel of ours, and with torch's."""
    spec = chain.spec
    generator = torch.Generator(device=device).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        drawn = torch.empty(shape, dtype=spec.dtype, device=device)
        return drawn.normal_(generator=generator)

    weight, residual = 1.0 + 0.1 * normal(spec.K), normal(spec.M, spec.K)

    def exact_norm(x: Tensor) -> Tensor:
        return _norm64(x, weight)

    def exact_act(x: Tensor) -> Tensor:
        gate, up = _whole(x).double().chunk(2, -1)
        return F.silu(gate) * up

    turn = _Turn(spec.M, spec.K, spec.dtype, device)
    return {
        _PRODUCT: Between(),
        f"{MINE} rms_norm": Between(lambda x: rms_norm(x, weight, _EPS), exact_norm),
        f"{MINE} fused_add_rms_norm": Between(
            lambda x: fused_add_rms_norm(x, residual, weight, _EPS)[0],
            lambda x: exact_norm(x + residual),
        ),
        f"{MINE} act_and_mul": Between(lambda x: act_and_mul(_whole(x)), exact_act),
        f"{MINE} quantize": _quantized(),
        f"{MINE} rope_append": Between(
            behind=turn.behind, check=turn.check, finished=turn.finished
        ),
        "torch rms_norm": Between(
            lambda x: F.rms_norm(x, (x.shape[-1],), weight, _EPS), exact_norm
        ),
    }


def _contender(
    name: str, between: Between, chain: DependentChain, residual: Tensor, gemm_provider: str
) -> ChainContender:
    spec = chain.spec
    layer = Layer(spec.M, spec.N, spec.K, residual=True, dtype=spec.dtype)
    gemm = launcher(layer)

    def launch(x: Tensor, index: int, out: Tensor) -> None:
        read = x if between.before is None else between.before(x)
        with use_provider(gemm_provider):
            gemm(read, chain.weights[index], [residual], out)
        if between.behind is not None:
            between.behind(out)

    def check(x: Tensor, index: int, out: Tensor) -> str | None:
        read = x if between.exact is None else between.exact(x)
        exact = layer.reference(Buffers((read, chain.weights[index], residual)))
        if between.finished is not None:
            exact = between.finished(exact)
        wrong = layer.verdict(out, exact)
        if wrong is None and between.check is not None:
            wrong = between.check(x, out)
        return wrong

    return ChainContender(name, launch, check)


def _visible(whole: Measurement, product: Measurement) -> Measurement:
    """A chain's time less that of its products, round by round."""
    pairs = zip(whole.samples, product.samples, strict=True)
    differences = [with_it - without for with_it, without in pairs]
    return summarize(
        differences,
        mode=whole.mode,
        launches=whole.launches,
        hot=whole.hot,
        notes=[*whole.notes, f"chain {whole.median_us:.2f} us, {_PRODUCT} {product.median_us:.2f}"],
    )


def _against_the_product(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Every chain with a small kernel as what stays visible of it; the product as it is."""
    product = outcomes[_PRODUCT]
    if not isinstance(product, Measurement):
        return outcomes
    found: dict[str, Outcome] = {_PRODUCT: product}
    for name, row in outcomes.items():
        if name == _PRODUCT:
            continue
        if isinstance(row, Measurement):
            row = _visible(row, product)
            if name.startswith(MINE):
                row = bounded(row, VISIBLE_LIMIT_US)
        found[name] = row
    return found


def visible_outcomes(
    run: GoalRun, rows: int, columns: int, gemm_provider: str = "cutlass"
) -> dict[str, Outcome]:
    """What stays visible of each small kernel on (rows, columns), microseconds a launch.

    The product is (rows, columns) by (2 columns, columns) with a residual. Its own time a launch
    is the outcome ``gemm``; the others are differences of rounds. Ours have the bound
    ``VISIBLE_LIMIT_US``.

    Args:
        run: pins the provider of the small kernels.
        rows: of x.
        columns: of x, a multiple of 128.
        gemm_provider: runs the products.
    """

    def measure_row() -> dict[str, Outcome]:
        spec = ChainSpec(rows, 2 * columns, columns, gain=_GAIN)
        chain = DependentChain(spec, run.device)
        generator = torch.Generator(device=run.device).manual_seed(4)
        residual = torch.empty(rows, 2 * columns, dtype=spec.dtype, device=run.device)
        residual.normal_(std=_RESIDUAL_VARIANCE**0.5, generator=generator)
        contenders = [
            _contender(name, between, chain, residual, gemm_provider)
            for name, between in _betweens(chain, run.device).items()
        ]
        return _against_the_product(
            measure_chain(chain, contenders, device=run.device, protocol=run.protocol)
        )

    return run.row(f"visible {rows}x{columns}", measure_row)
