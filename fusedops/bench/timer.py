"""The measuring protocol: every time that the project reports comes from here.

What it does, in this order, for the contenders of one row:

1. Buffers are created, filled with random data and, for cold rows, rotated: as many sets as it
   takes to exceed the L2 four times. Constant data is refused.
2. Each contender runs once outside any timing (compilation happens here) and its result is checked.
   A wrong result or a NaN makes the row ``Failed``: it never gets a time.
3. Each contender's launches are captured into one program (a CUDA graph), long enough that the
   window's own cost is under a percent.
4. All programs are replayed until their times settle, because an idle GPU starts at low clocks.
5. Programs alternate, one replay each a round, in an order that shifts every round; a sample is one
   window over its launches. Caches are flushed before a window, never inside it.
6. The last replay's result is checked again: launches that disturb each other are found here.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusedops.bench.measurement import Failed, Outcome, summarize
from fusedops.bench.runner import Replay, Runner
from fusedops.errors import ConfigError

__all__ = ["Program", "Protocol", "settle", "time_programs"]


_RESOLUTION_US = 1e-3
"""No window is called shorter than this, so that ratios of rows always exist."""


@dataclass(frozen=True)
class Protocol:
    """How long and how often a row is measured.

    Attributes:
        samples: rounds that are kept.
        min_samples: rounds that are taken even when the cap is reached.
        cap_s: seconds that warm-up and sampling of one row may take together.
        min_launches: launches in a program, at least (and at least one whole rotation).
        max_launches: launches in a program, at most.
        min_window_us: a window shorter than this gets more launches.
        settle_rounds: two successive groups of this many rounds must agree ...
        settle_tolerance: ... within this fraction before sampling starts,
        settle_min_s: after at least this long,
        settle_max_s: but no longer than this (a note then says so).
    """

    samples: int = 25
    min_samples: int = 5
    cap_s: float = 2.0
    min_launches: int = 1
    max_launches: int = 4096
    min_window_us: float = 1000.0
    settle_rounds: int = 5
    settle_tolerance: float = 0.01
    settle_min_s: float = 0.05
    settle_max_s: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.samples:
            raise ConfigError(
                f"Protocol: min_samples={self.min_samples} and samples={self.samples}; accepted: "
                "1 <= min_samples <= samples."
            )
        if not 1 <= self.min_launches <= self.max_launches:
            raise ConfigError(
                f"Protocol: min_launches={self.min_launches} and max_launches={self.max_launches}; "
                "accepted: 1 <= min_launches <= max_launches."
            )


@dataclass(frozen=True)
class Program:
    """A contender in the form that the timer runs.

    Attributes:
        name: the contender's name; unique in a row.
        enqueue: ``enqueue(n)`` issues n launches on the current stream, from the start of the
            rotation.
        step: n is a multiple of this (the length of the rotation).
        check: runs one launch and returns what is wrong with its result, or None.
        check_after: called with the replay once sampling is over; the same answer.
        launches: fixes n where it is not the timer's to choose.
    """

    name: str
    enqueue: Callable[[int], None]
    check: Callable[[], str | None]
    step: int = 1
    check_after: Callable[[Replay], str | None] | None = None
    launches: int | None = None


@dataclass(frozen=True)
class _Captured:
    program: Program
    replay: Replay
    launches: int


def _problem(check: Callable[[], str | None]) -> str | None:
    """What a check says, an exception included: whatever goes wrong, the row is no time."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - any failure of a contender is a row of the table
        return f"{type(error).__name__}: {error}"


def settle(
    round_us: Callable[[], float], protocol: Protocol, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Call ``round_us`` (one round, returning its microseconds) until its times agree.

    Returns:
        False if ``settle_max_s`` passed before two successive groups of rounds agreed.
    """
    start = clock()
    group = protocol.settle_rounds
    history: list[float] = []
    while True:
        history.append(round_us())
        elapsed = clock() - start
        if len(history) >= 2 * group and elapsed >= protocol.settle_min_s:
            before = statistics.median(history[-2 * group : -group])
            now = statistics.median(history[-group:])
            if abs(now - before) <= protocol.settle_tolerance * now:
                return True
        if elapsed >= protocol.settle_max_s:
            return False


def _capture(program: Program, runner: Runner, protocol: Protocol, hot: bool) -> _Captured:
    """Capture a program, longer if its window comes out too short to be timed well."""
    launches = program.launches or _round_up(protocol.min_launches, program.step)
    while True:
        replay = runner.capture(functools.partial(program.enqueue, launches))
        # The first replay of a graph uploads it; the second is representative.
        window_us = min(runner.time_round([replay, replay], hot=hot))
        if program.launches is not None or window_us >= protocol.min_window_us:
            break
        longest = max(program.step, protocol.max_launches // program.step * program.step)
        # A fifth more than the estimate, which counts the window's own cost as launches.
        wanted = 1.2 * launches * protocol.min_window_us / max(window_us, 1e-3)
        longer = min(longest, _round_up(int(wanted) + 1, program.step))
        if longer <= launches:
            break
        launches = longer
    return _Captured(program, replay, launches)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def time_programs(
    programs: Sequence[Program],
    runner: Runner,
    *,
    protocol: Protocol | None = None,
    hot: bool = False,
    subtract_empty: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Outcome]:
    """Check, capture, settle and sample ``programs`` together (steps 2 to 6 of the protocol).

    Args:
        programs: contenders of one row, with unique names.
        runner: what replays and times them.
        hot: precede each window by an untimed replay instead of a flush; written into the rows.
        subtract_empty: take the window's own cost off each sample (for windows of one launch,
            where it is not small); a note states it.

    Returns:
        name -> ``Measurement`` or ``Failed``, in the order of ``programs``.

    Raises:
        ConfigError: two programs have one name, or there are none.
    """
    protocol = protocol or Protocol()
    names = [program.name for program in programs]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"time_programs: contenders {names}; give at least one, each with a name of its own."
        )
    failures: dict[str, Failed] = {}
    captured: list[_Captured] = []
    for program in programs:
        reason = _problem(program.check)
        if reason is None:
            try:
                captured.append(_capture(program, runner, protocol, hot))
            except Exception as error:  # noqa: BLE001 - a contender that cannot be captured is a row
                reason = f"could not be captured: {type(error).__name__}: {error}"
        if reason is not None:
            failures[program.name] = Failed(reason)

    notes: list[str] = []
    samples = _sample(captured, runner, protocol, hot, clock, notes) if captured else []
    window_us = runner.empty_window_us() if captured else 0.0
    if subtract_empty:
        notes.append(f"the empty window of {window_us:.2f} us is taken off each sample")
    elif window_us:
        notes.append(f"empty window {window_us:.2f} us, not taken off")
    timed: dict[str, Outcome] = {}
    for item, windows in zip(captured, samples, strict=True):
        reason = None
        if item.program.check_after is not None:
            check_after, replay = item.program.check_after, item.replay
            reason = _problem(lambda: check_after(replay))  # noqa: B023 - called at once
        if reason is not None:
            timed[item.program.name] = Failed(f"after timing: {reason}")
            continue
        off = window_us if subtract_empty else 0.0
        timed[item.program.name] = summarize(
            [max(window - off, _RESOLUTION_US) / item.launches for window in windows],
            mode=runner.mode,
            launches=item.launches,
            hot=hot,
            notes=notes,
        )
    return {name: failures.get(name) or timed[name] for name in names}


def _sample(
    captured: Sequence[_Captured],
    runner: Runner,
    protocol: Protocol,
    hot: bool,
    clock: Callable[[], float],
    notes: list[str],
) -> list[list[float]]:
    """Windows of each program in microseconds, one a round, after the times have settled."""
    start = clock()
    replays = [item.replay for item in captured]
    if not settle(lambda: sum(runner.time_round(replays, hot=hot)), protocol, clock):
        notes.append(f"times had not settled after {protocol.settle_max_s:g} s")
    samples: list[list[float]] = [[] for _ in captured]
    for number in range(protocol.samples):
        # The order shifts, so that no contender always follows the same one.
        order = [(number + offset) % len(captured) for offset in range(len(captured))]
        windows = runner.time_round([replays[index] for index in order], hot=hot)
        for index, window in zip(order, windows, strict=True):
            samples[index].append(window)
        if number + 1 >= protocol.min_samples and clock() - start >= protocol.cap_s:
            if number + 1 < protocol.samples:
                notes.append(f"cut after {number + 1} rounds by the cap of {protocol.cap_s:g} s")
            break
    return samples
