"""Figure of fusion: two kernels against one, the difference split into launch and traffic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Measurement
from fusedops.bench.oracles import bitwise, relative_error
from fusedops.bench.products import Layer
from fusedops.errors import LaunchError
from fusedops.gemm import gemm
from fusedops.jit.dsl import missing_wheels
from fusedops.ladders.figures import Bench, Figure, FigureRow, Panel
from fusedops.ladders.model import Lesson
from fusedops.ladders.small_host import CHAIN, THREADS
from fusedops.ops.activation import act_and_mul
from fusedops.ops.fused_quantize import rms_norm_quantize
from fusedops.ops.norm import fused_add_rms_norm, rms_norm
from fusedops.ops.quantize import quantize
from fusedops.packing import pack_gate_up
from fusedops.providers.base import use_provider

__all__ = ["PAIRS", "Pair", "fusion", "split"]

SIZES_M = (1, 16, 256, 4096)
HIDDEN = 4096
GATED_K, GATED_F = 2048, 4096
_ELEMENT_BYTES = 2
_TOLERANCE = 0.02
_QUANTIZED_TOLERANCE = 0.06

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """Two ways to one result.

    Attributes:
        name: of the panel.
        make: makes the buffers of M rows.
        fused, apart: one kernel, and two.
        reference: the results in float32 from the inputs.
        saved_elements: elements of M rows that the fused kernel does not move.
        tolerance: relative error allowed.
        needs: why it cannot run in this process, or an empty text.
    """

    name: str
    make: Callable[[int, torch.Generator], Buffers]
    fused: Callable[[Buffers], Tensor | Results]
    apart: Callable[[Buffers], Tensor | Results]
    reference: Callable[[Buffers], Results]
    saved_elements: Callable[[int], int]
    tolerance: float = _TOLERANCE
    needs: Callable[[], str] = lambda: ""


def _draw(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    x = torch.empty(shape, device=generator.device).normal_(0, scale, generator=generator)
    return x.to(torch.bfloat16)


# gate_up + SwiGLU


def _make_gated(m: int, generator: torch.Generator) -> Buffers:
    """x, gate and up, and the weight in the order that the fused kernel takes."""
    x = _draw(generator, m, GATED_K)
    gate, up = (_draw(generator, GATED_F, GATED_K, scale=GATED_K**-0.5) for _ in range(2))
    return Buffers((x, torch.cat((gate, up)), pack_gate_up(gate, up)))


def _gated(buffers: Buffers) -> Tensor:
    x, _, packed = buffers.inputs
    with use_provider("cutlass"):
        result = gemm(x, packed, "gate(silu)")
    return result if isinstance(result, Tensor) else result[0]


def _gated_apart(buffers: Buffers) -> Tensor:
    x, w, _ = buffers.inputs
    with use_provider("cutlass"):
        both = gemm(x, w)
    with use_provider("cuda"):
        return act_and_mul(both if isinstance(both, Tensor) else both[0], "silu")


def _gated_reference(buffers: Buffers) -> Results:
    x, w, _ = (tensor.float() for tensor in buffers.inputs)
    gate, up = (x @ w.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up,)


# norm + quantize


def _make_norm(m: int, generator: torch.Generator) -> Buffers:
    return Buffers((_draw(generator, m, HIDDEN), _draw(generator, HIDDEN)))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), (HIDDEN,), weight.float(), 1e-6)


def _norm_quantized(buffers: Buffers) -> Results:
    x, weight = buffers.inputs
    with use_provider("cuda"):
        return rms_norm_quantize(x, weight)


def _norm_then_quantize(buffers: Buffers) -> Results:
    x, weight = buffers.inputs
    with use_provider("cuda"):
        return quantize(rms_norm(x, weight))


# add + norm


def _make_add(m: int, generator: torch.Generator) -> Buffers:
    x, residual = (_draw(generator, m, HIDDEN) for _ in range(2))
    return Buffers((x, residual, _draw(generator, HIDDEN)))


def _added_norm(buffers: Buffers) -> Results:
    x, residual, weight = buffers.inputs
    with use_provider("cuda"):
        return fused_add_rms_norm(x, residual, weight)


def _add_then_norm(buffers: Buffers) -> Results:
    x, residual, weight = buffers.inputs
    added = x + residual
    with use_provider("cuda"):
        return rms_norm(added, weight), added


def _add_reference(buffers: Buffers) -> Results:
    x, residual, weight = buffers.inputs
    added = x.float() + residual.float()
    return _normed(added, weight), added


PAIRS = (
    Pair(
        "gate_up + SwiGLU",
        _make_gated,
        _gated,
        _gated_apart,
        _gated_reference,
        # Gate and up are neither written nor read again.
        lambda m: 2 * m * 2 * GATED_F,
        needs=lambda: missing_wheels(prebuilt=False),
    ),
    Pair(
        "norm + quantize",
        _make_norm,
        _norm_quantized,
        _norm_then_quantize,
        lambda buffers: (_normed(*buffers.inputs),),
        lambda m: 2 * m * HIDDEN,
        _QUANTIZED_TOLERANCE,
    ),
    Pair(
        "add + norm",
        _make_add,
        _added_norm,
        _add_then_norm,
        _add_reference,
        # The sum is written by both, and read again by the norm alone.
        lambda m: m * HIDDEN,
    ),
)


def _check(pair: Pair, results: Results, buffers: Buffers) -> str | None:
    if results[0].dtype == torch.float8_e4m3fn:
        q, scale = results
        results = (q.float() * scale[:, None],)
    for number, (result, expected) in enumerate(zip(results, pair.reference(buffers), strict=True)):
        error = relative_error(result, expected)
        # A NaN fails, too.
        if not error <= pair.tolerance:
            return f"result {number}: relative error {error:.1e} over {pair.tolerance:.0e}"
    return None


def split(
    fused_us: float, apart_us: float, launch_us: float, traffic_us: float
) -> dict[str, float]:
    """The columns of a row.

    What two kernels take beyond one is a launch, which any kernel costs, and the rest, which should
    be the bytes that go to memory and back.

    Args:
        launch_us: one more kernel in a graph.
        traffic_us: the saved bytes over the memory's bandwidth.
    """
    saved_us = apart_us - fused_us
    of_launch_us = min(max(saved_us, 0.0), launch_us)
    return {
        "fused us": fused_us,
        "apart us": apart_us,
        "saved us": saved_us,
        "of it launch us": of_launch_us,
        "of it traffic us": saved_us - of_launch_us,
        "traffic by bytes us": traffic_us,
    }


def _one_more_us(bench: Bench) -> float:
    """One nearly empty kernel in a graph, in us.

    Raises:
        LaunchError: it did not run.
    """

    def run(buffers: Buffers) -> Tensor:
        (x,) = buffers.inputs
        # No rounds: every element is written back as it was.
        CHAIN.launch((1, 1, 1), (THREADS, 1, 1), (x, 0, x.numel()))
        return x

    x = torch.randn(THREADS, device=bench.device)
    as_it_was = x.clone()
    contender = Contender("empty", run, lambda results, _: bitwise(results[0], as_it_was))
    (outcome,) = bench.time([contender], lambda _: Buffers((x,)), hot=True).values()
    if isinstance(outcome, Measurement):
        return outcome.median_us
    raise LaunchError(f"an empty kernel: {outcome.reason}")


def _is_hot(pair: Pair, m: int, bench: Bench) -> bool:
    """Whether so few rows are moved that too many buffers would have to take turns."""
    buffers = pair.make(m, bench.generator())
    size = sum(tensor.numel() * tensor.element_size() for tensor in buffers.tensors)
    return 4 * bench.runner.cache_bytes > bench.protocol.max_launches * size


def _rows(pair: Pair, bench: Bench) -> Iterator[FigureRow]:
    missing = pair.needs()
    if missing:
        yield FigureRow(pair.name, "-", None, absent=missing)
        return
    launch_us = _one_more_us(bench)
    check = functools.partial(_check, pair)
    ways = [Contender("fused", pair.fused, check), Contender("apart", pair.apart, check)]
    for m in SIZES_M:
        hot = _is_hot(pair, m, bench)
        make = functools.partial(pair.make, m)
        fused, apart = bench.time(ways, make, hot=hot).values()
        x = f"{m}, hot" if hot else str(m)
        if not isinstance(fused, Measurement) or not isinstance(apart, Measurement):
            reasons = [row.reason for row in (fused, apart) if not isinstance(row, Measurement)]
            yield FigureRow(pair.name, x, m, failed="; ".join(reasons))
            continue
        moved = _ELEMENT_BYTES * pair.saved_elements(m)
        traffic_us = moved / bench.limits.read_write_bytes_per_s * 1e6
        yield FigureRow(
            pair.name, x, m, split(fused.median_us, apart.median_us, launch_us, traffic_us)
        )


def fusion(id: str, title: str) -> Figure:
    """Three fusions at four sizes, from decode to prefill."""
    lesson = Lesson(
        "The second kernel's work is done where the first one still holds the values. At few rows "
        "that saves a launch; at many it saves writing the values and reading them again.",
        "launch. At M = 1 the difference is one kernel's launch whatever is fused. With more rows "
        "it is the bytes: cheap while what lies between fits the L2, dear once it goes to memory.",
        "Fuse along the chain first where kernels are short; where the product dominates, fuse "
        "what its epilogue can do while the next tile loads.",
    )
    panels = tuple(
        Panel(
            pair.name,
            "M, rows",
            tuple(split(0.0, 0.0, 0.0, 0.0)),
            ("apart us", "fused us"),
            functools.partial(_rows, pair),
            "bfloat16. Launch is what one nearly empty kernel takes in a graph, at most the "
            "difference; traffic is the rest, beside the saved bytes over the measured bandwidth, "
            "which a cache undercuts. Hot: too few bytes to keep them out of the caches.",
            log_y=True,
        )
        for pair in PAIRS
    )
    files = ("norm.cu", "quantize.cu", "activation.cu", CHAIN.file)
    layers = tuple(
        layer
        for m in SIZES_M
        for layer in (
            Layer(m, 2 * GATED_F, GATED_K),
            Layer(m, 2 * GATED_F, GATED_K, activation="silu", gated=True),
        )
    )
    return Figure(id, title, lesson, panels, files=files, layers=layers)
