"""A chain of dependent products: how a decode step meets a GEMM kernel.

One product is launched again and again in one CUDA graph, each launch reading what the previous one
wrote. Nothing overlaps that real decoding could not overlap: a kernel with programmatic dependent
launch may fetch its weights early, but must wait for the grid before it for its activations.
Weights take turns and together exceed the L2 four times, so every launch streams its weight from
memory.

Each launch reads columns ``0 .. dependent_columns`` of its x from the previous output and the rest
from fixed random columns. The first launch of a replay reads a start buffer that is never written,
so each replay repeats the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.bench.data import ROTATION_FACTOR, l2_bytes, poison, refuse_constant
from fusedops.bench.measurement import Outcome
from fusedops.bench.runner import Replay, Runner, make_runner
from fusedops.bench.timer import Program, Protocol, time_programs
from fusedops.errors import ConfigError

__all__ = ["ChainContender", "ChainSpec", "DependentChain", "gain_for", "measure_chain"]

MIN_LAUNCHES = 32
MIN_WEIGHT_BYTES = 240_000_000
"""All weights of a chain together: four times the L2 of an H200."""

STREAMED_BYTES = 4_700_000_000
"""A replay streams about this much (1 ms of an H200's bandwidth), so that the window's own 2 to 3
us are under a third of a percent ..."""

MAX_LAUNCHES = 512
"""... with no more launches than this, unless a single turn of the weights needs them."""

_ALIGNMENT = 64
"""Rows of the activation buffers start at multiples of this many elements (128 bytes in bf16)."""

_STD_RANGE = (1 / 8, 8.0)
"""Standard deviation that the last output must have; outside it the chain grew or faded."""


@dataclass(frozen=True)
class ChainSpec:
    """The product of a chain.

    Attributes:
        M: rows of x.
        N: rows of a weight.
        K: columns of x and of a weight.
        columns_out: columns that one launch writes; N, or N / 2 behind a gate.
        dtype: of x, the weights and the outputs.
        gain: weights are normal with standard deviation ``gain / sqrt(K)``; choose it so that the
            epilogue returns unit variance (``gain_for``).
        weight_bytes: bytes of one weight as it is stored; by default N * K elements of ``dtype``.
            Quantized weights are smaller, so more of them are needed to exceed the L2.
        dependent_columns: columns of x that come from the previous output; by default
            min(columns_out, K). A gate multiplies two values, so a chain through all columns
            squares its deviation from unit variance at every launch and fades or overflows within
            ten; SiLU and GELU drift more slowly. Give those K / 8. Every kernel still needs the
            previous output for its first sum.
        seed: of everything random.
    """

    M: int
    N: int
    K: int
    columns_out: int | None = None
    dtype: torch.dtype = torch.bfloat16
    gain: float = 1.0
    weight_bytes: int | None = None
    dependent_columns: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.M, self.N, self.K) < 1:
            raise ConfigError(f"ChainSpec: M, N, K = {self.M}, {self.N}, {self.K}; each is >= 1.")
        if not 1 <= self.dependent <= min(self.out_columns, self.K):
            raise ConfigError(
                f"ChainSpec: dependent_columns={self.dependent_columns}; accepted: 1 to "
                f"{min(self.out_columns, self.K)} (the smaller of columns_out and K)."
            )

    @property
    def out_columns(self) -> int:
        """Columns that one launch writes."""
        return self.N if self.columns_out is None else self.columns_out

    @property
    def dependent(self) -> int:
        """Columns of x that the previous launch wrote."""
        if self.dependent_columns is not None:
            return self.dependent_columns
        return min(self.out_columns, self.K)

    @property
    def stored_bytes(self) -> int:
        """Bytes of one weight as it is stored."""
        return self.weight_bytes or self.N * self.K * self.dtype.itemsize

    def weight_count(self, cache_bytes: int = 0) -> int:
        """Distinct weights: at least 2, together ``MIN_WEIGHT_BYTES`` and 4 x the cache."""
        needed = max(MIN_WEIGHT_BYTES, ROTATION_FACTOR * cache_bytes)
        return max(2, -(-needed // self.stored_bytes))

    def launch_count(self, weights: int) -> int:
        """Launches in one replay: whole turns of the weights, at least ``MIN_LAUNCHES``."""
        wanted = max(MIN_LAUNCHES, min(MAX_LAUNCHES, STREAMED_BYTES // self.stored_bytes))
        return weights * -(-wanted // weights)


@dataclass(frozen=True)
class ChainContender:
    """One way to run the product of a chain.

    Attributes:
        name: as the table shows it.
        launch: ``launch(x, weight_index, out)``; x is (M, K), out is (M, columns_out), both views
            with a row pitch. It issues one product (with its epilogue) on the current stream.
        check: ``check(x, weight_index, out)`` says what is wrong with a result, or None.
        repeatable: two replays must give the same bits; False for a library that does not promise
            it.
    """

    name: str
    launch: Callable[[Tensor, int, Tensor], object]
    check: Callable[[Tensor, int, Tensor], str | None]
    repeatable: bool = True


class DependentChain:
    """Buffers and weights of a chain on one device.

    Attributes:
        weights: the distinct weights, each (N, K); contenders pack or quantize them beforehand.
        launches: launches in one replay.
    """

    def __init__(self, spec: ChainSpec, device: torch.device | str) -> None:
        self.spec = spec
        generator = torch.Generator(device=device).manual_seed(spec.seed)
        on_gpu = torch.device(device).type == "cuda"
        count = spec.weight_count(l2_bytes(torch.device(device)) if on_gpu else 0)

        def normal(rows: int, columns: int) -> Tensor:
            drawn = torch.empty(rows, columns, dtype=spec.dtype, device=device)
            return drawn.normal_(generator=generator)

        self.weights = [normal(spec.N, spec.K).mul_(spec.gain / spec.K**0.5) for _ in range(count)]
        self.launches = spec.launch_count(count)
        # x starts where its dependent columns begin, and its fixed columns follow the output.
        self._x_start = 0 if spec.dependent == spec.K else spec.out_columns - spec.dependent
        width = max(self._x_start + spec.K, spec.out_columns)
        pitch = -(-width // _ALIGNMENT) * _ALIGNMENT
        self._start, *self._turns = (normal(spec.M, pitch) for _ in range(3))
        refuse_constant([self._start, self.weights[0]], op="DependentChain")

    def views(self, position: int) -> tuple[Tensor, int, Tensor]:
        """x, the weight's index and the output of launch ``position`` of a replay."""
        source = self._start if position == 0 else self._turns[position % 2]
        target = self._turns[(position + 1) % 2]
        x = source[:, self._x_start : self._x_start + self.spec.K]
        return x, position % len(self.weights), target[:, : self.spec.out_columns]

    def enqueue(self, launch: Callable[[Tensor, int, Tensor], object], count: int) -> None:
        """Issue the first ``count`` launches of the chain."""
        for position in range(count):
            launch(*self.views(position))

    def program(self, contender: ChainContender, runner: Runner) -> Program:
        """The contender's chain as the timer runs it, with its checks."""

        def check_launch(position: int) -> str | None:
            x, index, out = self.views(position)
            runner.synchronize()
            if bool(out.isnan().any()):
                return "the result holds NaN (or was not written)"
            return contender.check(x, index, out)

        def check() -> str | None:
            poison(self.views(0)[2])
            contender.launch(*self.views(0))
            return check_launch(0)

        def check_after(replay: Replay) -> str | None:
            last = self.launches - 1
            out = self.views(last)[2]
            finals = []
            for _ in range(2):
                poison(out)
                replay()
                runner.synchronize()
                finals.append(out.clone())
            # The launch before the last one left its output in the other buffer: x is intact.
            wrong = check_launch(last)
            if wrong is not None:
                return f"launch {last} of the chain: {wrong}"
            if contender.repeatable and not torch.equal(finals[0], finals[1]):
                return "two replays of the chain gave different bits"
            std = float(out.float().std()) if out.numel() > 1 else 1.0
            if not _STD_RANGE[0] <= std <= _STD_RANGE[1]:
                return (
                    f"the chain's last output has standard deviation {std:.3g}: values fade or "
                    "grow; change gain (gain_for) or dependent_columns of the ChainSpec"
                )
            return None

        return Program(
            contender.name,
            lambda count: self.enqueue(contender.launch, count),
            check,
            step=self.launches,
            check_after=check_after,
            launches=self.launches,
        )


def measure_chain(
    chain: DependentChain,
    contenders: Sequence[ChainContender],
    *,
    device: torch.device | str,
    protocol: Protocol | None = None,
    runner: Runner | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Outcome]:
    """Time one launch of each contender's chain: the graph's time over its launches.

    Contenders alternate replay by replay; each is checked on its first launch and on the last one
    of a replayed chain.

    Raises:
        ConfigError: two contenders have one name, or there are none.
        DeviceError: the device is absent.
    """
    runner = runner or make_runner(device)
    programs = [chain.program(contender, runner) for contender in contenders]
    return time_programs(programs, runner, protocol=protocol, clock=clock)


def gain_for(
    epilogue: Callable[[Tensor], Tensor], columns: int = 1, samples: int = 1 << 15
) -> float:
    """The gain at which ``epilogue`` returns unit variance.

    Args:
        epilogue: takes accumulators of shape (samples, columns) and returns (samples,) outputs; a
            gate takes two columns.
        columns: accumulators that make one output.
        samples: normal values to estimate with (fixed seed).

    Raises:
        ConfigError: no gain between 1e-3 and 1e3 gives it (the epilogue may add too much itself).
    """
    drawn = torch.randn(samples, columns, generator=torch.Generator().manual_seed(0))
    low, high = 1e-3, 1e3

    def excess(gain: float) -> float:
        return float(epilogue(drawn * gain).square().mean()) - 1.0

    if excess(low) > 0 or excess(high) < 0:
        raise ConfigError(
            f"gain_for: mean square of the output minus 1 is {excess(low):.3g} at gain {low:g} and "
            f"{excess(high):.3g} at {high:g}; it must pass 0 between. Scale the epilogue's own "
            "terms (a residual of standard deviation 0.5, say)."
        )
    # 20 halvings of six decades leave a relative error of 1e-5, far below the estimate's own.
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return float((low * high) ** 0.5)
