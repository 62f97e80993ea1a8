"""What a measuring function of a goal gets and gives: rows that resume, and one reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.bench.chain import ChainContender, DependentChain, measure_chain
from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.goal_spec import Goal
from fusedops.bench.measurement import (
    Bound,
    Failed,
    Measurement,
    Outcome,
    outcome_from_json,
    outcome_to_json,
)
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError
from fusedops.providers.base import Usage

__all__ = ["GoalError", "GoalRun", "OutOfTimeError", "Reading", "RowStore"]

_PER_UNIT = {"us": 1.0, "ms": 1e3, "s": 1e6}


class GoalError(Exception):
    """A row that the goal needs has no time: wrong, raised, or did not run its provider."""


class OutOfTimeError(Exception):
    """The time budget is spent; rows that are done are kept for the next run."""


@dataclass(frozen=True)
class Reading:
    """A measured value of a goal, in the goal's unit.

    Attributes:
        value: the figure that is compared with the goal.
        low: 10th percentile.
        high: 90th percentile.
        peer: what the best peer reached in the same run, as text.
        note: anything that a reader must know.
    """

    value: float
    low: float
    high: float
    peer: str = ""
    note: str = ""

    @classmethod
    def of(cls, row: Measurement, unit: str, peer: str = "", note: str = "") -> Reading:
        """The reading of a row's time.

        Raises:
            ConfigError: the unit is no unit of time.
        """
        if unit not in _PER_UNIT:
            raise ConfigError(
                f"Reading.of: unit {unit!r}; accepted are {', '.join(_PER_UNIT)}. Give value, low "
                "and high yourself for a ratio."
            )
        per = _PER_UNIT[unit]
        notes = "; ".join(filter(None, [note, *row.notes]))
        return cls(row.median_us / per, row.low_us / per, row.high_us / per, peer, notes)

    @property
    def spread(self) -> float:
        """Distance from low to high over the value."""
        return (self.high - self.low) / abs(self.value) if self.value else 0.0


class RowStore:
    """Raw rows of one goal, saved as they come.

    Args:
        rows: key -> stored row, as read from the file; changed in place.
        sources: hash of today's sources; rows of others are measured again.
        save: called after each new row.
    """

    def __init__(
        self, rows: dict[str, Any], sources: str, save: Callable[[], None], force: bool = False
    ) -> None:
        self._rows = rows
        self._sources = sources
        self._save = save
        self._done: set[str] = set()
        self._force = force

    def get(self, key: str) -> tuple[dict[str, Outcome], int] | None:
        """A row's outcomes and its calls of the provider, if it was measured on these sources."""
        stored = self._rows.get(key)
        if stored is None or stored["sources"] != self._sources:
            return None
        if self._force and key not in self._done:
            return None
        outcomes = {name: outcome_from_json(data) for name, data in stored["outcomes"].items()}
        return outcomes, int(stored["calls"])

    def put(self, key: str, outcomes: Mapping[str, Outcome], calls: int) -> None:
        """Keep a row."""
        self._done.add(key)
        self._rows[key] = {
            "sources": self._sources,
            "calls": calls,
            "outcomes": {name: outcome_to_json(outcome) for name, outcome in outcomes.items()},
        }
        self._save()


class GoalRun:
    """The measuring of one goal.

    Attributes:
        goal: what is to be reached.
        provider: the provider that is pinned.
        device: where to measure.
        protocol: the timer's settings; a row is capped at ``protocol.cap_s`` seconds.
        rows: number of rows measured or taken over so far.
        bounds: ``row: contender`` -> what it is held against, of those rows that have a bound.
    """

    def __init__(
        self,
        goal: Goal,
        *,
        provider: str,
        device: torch.device | str,
        protocol: Protocol,
        store: RowStore,
        usage: Usage,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.goal = goal
        self.provider = provider
        self.device = device
        self.protocol = protocol
        self.rows = 0
        self.bounds: dict[str, Bound] = {}
        self._store = store
        self._usage = usage
        self._deadline = deadline
        self._clock = clock

    def _calls(self) -> int:
        return sum(
            count for (_, provider), count in self._usage.calls.items() if provider == self.provider
        )

    def ran_elsewhere(self, op: str, calls: int) -> None:
        """Count calls of the pinned provider that another process made (cold-start goals)."""
        self._usage.calls[op, self.provider] += calls

    def row(self, key: str, measure_row: Callable[[], dict[str, Outcome]]) -> dict[str, Outcome]:
        """One row: taken over from an earlier run on the same sources, or measured and kept.

        Raises:
            GoalError: the pinned provider did not run in it.
            OutOfTimeError: the budget was spent before it began.
        """
        stored = self._store.get(key)
        if stored is None:
            if self._deadline is not None and self._clock() >= self._deadline:
                raise OutOfTimeError
            before = self._calls()
            outcomes = measure_row()
            calls = self._calls() - before
            self._store.put(key, outcomes, calls)
        else:
            outcomes, calls = stored
        if calls < 1:
            reasons = [
                f"{name}: {o.reason}" for name, o in outcomes.items() if isinstance(o, Failed)
            ]
            why = "; ".join(["", *reasons[:1]])
            raise GoalError(f"row {key}: the provider {self.provider!r} never ran{why}")
        self.rows += 1
        for name, outcome in outcomes.items():
            if isinstance(outcome, Measurement) and outcome.bound is not None:
                self.bounds[f"{key}: {name}"] = outcome.bound
        return outcomes

    def measure(
        self,
        key: str,
        contenders: Sequence[Contender],
        make_buffers: Callable[[torch.Generator], Buffers],
        *,
        hot: bool = False,
        flush: bool = False,
    ) -> dict[str, Outcome]:
        """A row of contenders on rotated buffers; see ``fusedops.bench.contenders.measure``."""
        return self.row(
            key,
            lambda: measure(
                contenders,
                make_buffers,
                device=self.device,
                hot=hot,
                flush=flush,
                protocol=self.protocol,
            ),
        )

    def chain(
        self,
        key: str,
        make_chain: Callable[[], DependentChain],
        make_contenders: Callable[[DependentChain], Sequence[ChainContender]],
    ) -> dict[str, Outcome]:
        """A row of contenders in a dependent chain; both are made only if the row is measured."""

        def measure_row() -> dict[str, Outcome]:
            chain = make_chain()
            return measure_chain(
                chain, make_contenders(chain), device=self.device, protocol=self.protocol
            )

        return self.row(key, measure_row)

    def mine(self, outcomes: Mapping[str, Outcome], name: str) -> Measurement:
        """The measurement that the goal is about.

        Raises:
            GoalError: the contender failed, or there is none of this name.
        """
        outcome = outcomes.get(name)
        if isinstance(outcome, Measurement):
            return outcome
        reason = f"no contender {name!r}" if outcome is None else outcome.reason
        raise GoalError(f"{name}: {reason}")

    @staticmethod
    def best(outcomes: Mapping[str, Outcome], names: Sequence[str]) -> tuple[str, Measurement]:
        """The fastest of several contenders that have a time.

        Raises:
            GoalError: none of them has one, so that there is nothing to compare with.
        """
        timed = {
            name: outcome
            for name in names
            if isinstance(outcome := outcomes.get(name), Measurement)
        }
        if not timed:
            raise GoalError(f"none of the peers {', '.join(names)} has a time: {dict(outcomes)}")
        name = min(timed, key=lambda key: timed[key].median_us)
        return name, timed[name]
