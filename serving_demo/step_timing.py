"""Timing of whole decode steps: each checked against plain torch before and after its time counts.

The protocol is ``fusedops.bench.timer``'s, with one replay of one step a window. Before a window,
outside its time, the host does what the step needs of it: FlashInfer's ``plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.bench.measurement import Outcome
from fusedops.bench.runner import Replay, Runner
from fusedops.bench.timer import Program, Protocol, time_programs
from serving_demo.step_model import FusedStep
from serving_demo.step_torch import PlainStep

__all__ = ["HostWorkRunner", "Oracle", "Step", "StepTimes", "time_steps"]

Step = FusedStep | PlainStep

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative error of a row of logits, or of keys or values, between two ways to run a step.

In bfloat16 two sound ways drift apart by 2 % over 32 layers; a wrong page of 64 moves its request's
logits by 30 %.
"""


@dataclass(frozen=True)
class _PreparedReplay:
    """A captured program and what the host does before each replay of it."""

    replay: Replay
    prepare: Callable[[], None]

    def __call__(self) -> None:
        self.replay()


def _nothing() -> None:
    pass


class HostWorkRunner:
    """A runner that lets the host work before each window, with the device idle.

    A program names its work with ``prepare_next`` before it is captured.

    Args:
        inner: what captures, replays and times.
    """

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._prepare: Callable[[], None] = _nothing
        self.mode = inner.mode
        self.cache_bytes = inner.cache_bytes

    def prepare_next(self, prepare: Callable[[], None]) -> None:
        """Call ``prepare`` before each replay of the program that is captured next."""
        self._prepare = prepare

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """As the inner runner, with the program's host work beside it."""
        prepare, self._prepare = self._prepare, _nothing
        return _PreparedReplay(self._inner.capture(enqueue), prepare)

    def time_round(self, replays: Sequence[Replay], *, hot: bool) -> list[float]:
        """One window of each program, one after the other."""
        times: list[float] = []
        for replay in replays:
            if isinstance(replay, _PreparedReplay):
                replay.prepare()
                # The work is queued on another stream than the replay.
                self._inner.synchronize()
            times += self._inner.time_round([replay], hot=hot)
        return times

    def empty_window_us(self) -> float:
        """As the inner runner."""
        return self._inner.empty_window_us()

    def synchronize(self) -> None:
        """As the inner runner."""
        self._inner.synchronize()


@dataclass(frozen=True)
class Oracle:
    """What a sound step of a batch gives: plain torch's first step.

    Attributes:
        logits: (batch, vocab).
        appended: layer -> (keys, values), each (batch, kv_heads, head_dim), of the new tokens.
    """

    logits: Tensor
    appended: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, step: PlainStep, n_layers: int) -> Oracle:
        """Run ``step`` eagerly from its first tokens."""
        step.reset()
        logits = step.run().clone()
        appended = {}
        for layer in (0, n_layers - 1):
            keys, values = step.appended(layer)
            appended[layer] = keys.clone(), values.clone()
        step.reset()
        return cls(logits, appended)

    def problem(self, step: Step) -> str | None:
        """What is wrong with the first step of a contender that has just run it, or None."""
        logits = step.logits
        if logits is None:
            return "the step did not run"
        if not bool(logits.isfinite().all()):
            return "the logits are not finite"
        allowed = TOLERANCE[logits.dtype]
        pairs = {"logits": (logits, self.logits)}
        for layer, (keys, values) in self.appended.items():
            got_keys, got_values = step.appended(layer)
            pairs[f"appended keys of layer {layer}"] = got_keys, keys
            pairs[f"appended values of layer {layer}"] = got_values, values
        for what, (got, expected) in pairs.items():
            error = _row_error(got, expected)
            if not error <= allowed:
                return f"{what}: relative error {error:.3g} in a row, allowed {allowed:g}"
        return None


def _row_error(got: Tensor, expected: Tensor) -> float:
    """The largest relative error (Euclidean norms) of a request; NaN where there is one."""
    wide = expected.flatten(1).float()
    return float(((got.flatten(1).float() - wide).norm(dim=1) / wide.norm(dim=1)).max())


@dataclass(frozen=True)
class StepTimes:
    """What came of one contender.

    Attributes:
        outcome: microseconds a step, without the host's plan; or why there is no time.
        plan_us: median host time of a plan; None where the step needs none.
        kernels_per_step: kernels of one replay; None where they could not be counted.
    """

    outcome: Outcome
    plan_us: float | None
    kernels_per_step: int | None


def time_steps(
    steps: Sequence[Step],
    oracle: Oracle,
    runner: HostWorkRunner,
    protocol: Protocol,
) -> dict[str, StepTimes]:
    """Check, capture and time contenders of one batch together, replay by replay in turn.

    Args:
        steps: with unique names.
        oracle: the first step's results.
        runner: of the device that they run on.
        protocol: lengths and caps.

    Returns:
        name -> its times.
    """
    contenders = [_Timed(step, oracle, runner) for step in steps]
    outcomes = time_programs([timed.program() for timed in contenders], runner, protocol=protocol)
    return {
        timed.step.name: StepTimes(outcomes[timed.step.name], timed.plan_us(), timed.kernels())
        for timed in contenders
    }


class _Timed:
    """One contender as a program of the timer."""

    def __init__(self, step: Step, oracle: Oracle, runner: HostWorkRunner) -> None:
        self.step = step
        self._oracle = oracle
        self._runner = runner
        self._eager_tokens: list[int] = []
        self._checked_replay: Replay | None = None

    def program(self) -> Program:
        """The contender as the timer runs it."""
        # One step a replay: the host plans between replays.
        return Program(
            self.step.name, self._enqueue, self._check, check_after=self._check_after, launches=1
        )

    def plan_us(self) -> float | None:
        """Median host time of a plan."""
        plans = sorted(self.step.attention.plan_us) if isinstance(self.step, FusedStep) else []
        return plans[len(plans) // 2] if plans else None

    def _enqueue(self, count: int) -> None:
        for _ in range(count):
            self.step.run()

    def _first_step(self, run: Callable[[], object]) -> str | None:
        """Run the first step and judge it."""
        self.step.reset()
        self.step.prepare()
        self._runner.synchronize()
        run()
        self._runner.synchronize()
        return self._oracle.problem(self.step) or self._standstill()

    def _standstill(self) -> str | None:
        if isinstance(self.step, PlainStep):
            return None
        positions = self.step.positions()
        if positions == [self.step.context] * len(positions):
            return None
        return f"positions are {positions} after the first step; expected {self.step.context} each"

    def _check(self) -> str | None:
        problem = self._first_step(self.step.run)
        self._eager_tokens = self.step.tokens.tolist()
        if problem is None:
            # The timer captures a program right after its check.
            self._runner.prepare_next(self.step.prepare)
        return problem

    def _check_after(self, replay: Replay) -> str | None:
        problem = self._first_step(replay)
        if problem is not None:
            return problem
        tokens = self.step.tokens.tolist()
        # Beyond one row, ties of bfloat16 logits are too likely for this to be a test.
        if len(tokens) == 1 and tokens != self._eager_tokens:
            return (
                f"the replay chose token {tokens}, the same step run eagerly {self._eager_tokens}"
            )
        self._checked_replay = replay
        return None

    def kernels(self) -> int | None:
        """Kernels of one replay; None where it was not timed or nothing can count them."""
        if self._checked_replay is None or not self.step.tokens.is_cuda:
            return None
        self.step.prepare()
        self._runner.synchronize()
        return _count_kernels(self._checked_replay, self._runner)


def _count_kernels(replay: Replay, runner: HostWorkRunner) -> int | None:
    """Kernels as torch's profiler sees them; None where it sees none (no CUPTI)."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            replay()
            runner.synchronize()
    except RuntimeError:
        return None
    names = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names) or None
