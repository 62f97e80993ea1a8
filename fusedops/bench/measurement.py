"""What a measurement is: samples with their median and spread, or the reason why there is no time.

A row of a table holds exactly one ``Outcome``. A wrong result is a ``Failed`` and never a time, and
a contender that is not installed is an ``Absent`` with the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusedops.errors import ConfigError

__all__ = [
    "Absent",
    "Bound",
    "Failed",
    "Measurement",
    "Outcome",
    "Ratio",
    "outcome_from_json",
    "outcome_to_json",
    "speedup",
    "summarize",
]


@dataclass(frozen=True)
class Bound:
    """What a row is held against.

    Attributes:
        limit_us: what ``value_us`` may not exceed, microseconds.
        value_us: the figure that counts, e.g. the row's median or its slowest sample.
    """

    limit_us: float
    value_us: float

    @property
    def ok(self) -> bool:
        """Whether the bound is kept; NaN never keeps it."""
        return self.value_us <= self.limit_us

    def to_json(self) -> dict[str, float]:
        """A JSON object with these fields."""
        return {"limit_us": self.limit_us, "value_us": round(self.value_us, 4)}


@dataclass(frozen=True)
class Measurement:
    """The time of one launch.

    Attributes:
        median_us: median of ``samples``, microseconds a launch.
        low_us: 10th percentile of ``samples``.
        high_us: 90th percentile of ``samples``.
        samples: one time a round, microseconds a launch, in the order in which they were taken; the
            samples of contenders measured together are paired by position.
        mode: how it was timed, e.g. ``cuda graph`` or ``cpu``.
        launches: launches in each sample.
        hot: True where one set of buffers was used again and again, so that caches hold it.
        notes: what a reader must know (clocks that did not settle, a cap that cut the row short).
        bound: what the row is held against, or None.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: tuple[float, ...]
    mode: str
    launches: int
    hot: bool
    notes: tuple[str, ...] = ()
    bound: Bound | None = None

    @property
    def spread(self) -> float:
        """Distance from the 10th to the 90th percentile over the median."""
        return (self.high_us - self.low_us) / self.median_us if self.median_us else 0.0


@dataclass(frozen=True)
class Failed:
    """A contender that raised or gave a wrong result; ``reason`` says which."""

    reason: str


@dataclass(frozen=True)
class Absent:
    """A contender that cannot run here, with the exact ``reason``."""

    reason: str


Outcome = Measurement | Failed | Absent
"""What stands in one row of a table."""


@dataclass(frozen=True)
class Ratio:
    """Two contenders of one run, round by round: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        raise ConfigError("a measurement needs at least one sample; got none.")
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], statistics.median(values), cuts[-1]


def summarize(
    samples: Sequence[float],
    *,
    mode: str,
    launches: int,
    hot: bool,
    notes: Sequence[str] = (),
) -> Measurement:
    """A ``Measurement`` from its samples (microseconds a launch).

    Raises:
        ConfigError: there are no samples.
    """
    low, median, high = _percentiles(samples)
    return Measurement(median, low, high, tuple(samples), mode, launches, hot, tuple(notes))


def speedup(ours: Measurement, peer: Measurement) -> Ratio:
    """How many times faster ``ours`` is than ``peer``: above 1 we win, below 1 we lose.

    The ratio is taken round by round, because the contenders of one run alternate and drift
    together when clocks do.

    Raises:
        ConfigError: the two were not measured in the same rounds.
    """
    if len(ours.samples) != len(peer.samples):
        raise ConfigError(
            f"speedup: {len(ours.samples)} samples against {len(peer.samples)}; measure both "
            "contenders in one call, so that their rounds are paired."
        )
    ratios = [b / a for a, b in zip(ours.samples, peer.samples, strict=True)]
    low, median, high = _percentiles(ratios)
    return Ratio(median, low, high)


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """A JSON object that ``outcome_from_json`` reads back; raw samples are kept.

    A row with a bound has the fields ``bound`` (``limit_us``, ``value_us``) and ``ok``.
    """
    if isinstance(outcome, Failed):
        return {"failed": outcome.reason}
    if isinstance(outcome, Absent):
        return {"absent": outcome.reason}
    data = {
        "median_us": round(outcome.median_us, 4),
        "low_us": round(outcome.low_us, 4),
        "high_us": round(outcome.high_us, 4),
        "spread": round(outcome.spread, 5),
        "samples": [round(sample, 4) for sample in outcome.samples],
        "mode": outcome.mode,
        "launches": outcome.launches,
        "hot": outcome.hot,
        "notes": list(outcome.notes),
    }
    if outcome.bound is not None:
        data |= {"bound": outcome.bound.to_json(), "ok": outcome.bound.ok}
    return data


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """The inverse of ``outcome_to_json``.

    Raises:
        ConfigError: the object is no outcome.
    """
    if "failed" in data:
        return Failed(str(data["failed"]))
    if "absent" in data:
        return Absent(str(data["absent"]))
    bound = data.get("bound")
    try:
        return Measurement(
            median_us=float(data["median_us"]),
            low_us=float(data["low_us"]),
            high_us=float(data["high_us"]),
            samples=tuple(float(sample) for sample in data["samples"]),
            mode=str(data["mode"]),
            launches=int(data["launches"]),
            hot=bool(data["hot"]),
            notes=tuple(str(note) for note in data["notes"]),
            bound=bound and Bound(float(bound["limit_us"]), float(bound["value_us"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"no measurement: {error!r} while reading an object with the keys {sorted(data)}; "
            "write it with outcome_to_json()."
        ) from error
