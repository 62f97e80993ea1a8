"""Rows of the decode-step baselines: floor, fraction, table, and the JSON that the README reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fusedops.bench.environment import Environment
from fusedops.bench.files import update_json
from fusedops.bench.measurement import Absent, Measurement
from fusedops.errors import ConfigError
from serving_demo.step_timing import StepTimes

__all__ = ["SCHEMA", "StepFloor", "StepRow", "step_row", "steps_table", "write_steps"]

SCHEMA = 1


@dataclass(frozen=True)
class StepFloor:
    """The least that a step of a model has to read, and how fast the device reads.

    Attributes:
        weight_bytes: every weight once, the embedding's other rows aside.
        kv_bytes_per_position: keys and values of one position of a request, over all layers.
        read_bytes_per_s: the device's streaming bandwidth.
    """

    weight_bytes: int
    kv_bytes_per_position: int
    read_bytes_per_s: float

    def ms(self, batch: int, mean_length: float) -> float:
        """The floor of a step in milliseconds; the new keys and values count as read."""
        n_bytes = self.weight_bytes + batch * mean_length * self.kv_bytes_per_position
        return n_bytes / self.read_bytes_per_s * 1e3


@dataclass(frozen=True)
class StepRow:
    """One contender at one batch size.

    Attributes:
        shape: the model's shape by name.
        batch: requests.
        context: length of each request in the first step, that step's token included.
        contender: whose step it is.
        provider: who ran the products.
        norms, rope, attention: who ran these.
        ms, ms_low, ms_high: median, 10th and 90th percentile of a step; None where it failed.
        plan_us: median host time of attention's plan between replays, not part of ``ms``; None
            where there is no plan.
        floor_ms: bytes of a step over the read bandwidth.
        fraction: floor_ms over ms.
        kernels_per_step: of one replay; None where they could not be counted.
        steps: timed steps.
        notes: what a reader must know; the reason where it failed.
    """

    shape: str
    batch: int
    context: int
    contender: str
    provider: str
    norms: str
    rope: str
    attention: str
    ms: float | None
    ms_low: float | None
    ms_high: float | None
    plan_us: float | None
    floor_ms: float
    fraction: float | None
    kernels_per_step: int | None
    steps: int
    notes: tuple[str, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows of one file apart; a new measurement replaces the old one."""
        return (self.shape, self.batch, self.context, self.contender, self.provider)


def step_row(
    shape: str,
    batch: int,
    context: int,
    contender: str,
    who: Mapping[str, str],
    times: StepTimes,
    floor_ms: float,
) -> StepRow:
    """The row of a contender; ``who`` holds provider, norms, rope and attention."""
    outcome = times.outcome
    low: float | None = None
    median: float | None = None
    high: float | None = None
    steps = 0
    if isinstance(outcome, Measurement):
        low, median, high = (
            round(us / 1e3, 6) for us in (outcome.low_us, outcome.median_us, outcome.high_us)
        )
        notes, steps = outcome.notes, len(outcome.samples) * outcome.launches
    else:
        kind = "absent" if isinstance(outcome, Absent) else "failed"
        notes = (f"{kind}: {outcome.reason}",)
    return StepRow(
        shape=shape,
        batch=batch,
        context=context,
        contender=contender,
        **who,
        ms=median,
        ms_low=low,
        ms_high=high,
        plan_us=times.plan_us,
        floor_ms=floor_ms,
        fraction=None if median is None else floor_ms / median,
        kernels_per_step=times.kernels_per_step,
        steps=steps,
        notes=notes,
    )


def steps_table(title: str, rows: Sequence[StepRow]) -> Table:
    """The rows for a terminal, 100 columns wide at most."""
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("batch", justify="right")
    table.add_column("contender")
    for heading in ("ms a step", "10-90 %", "plan us", "floor ms", "of floor", "kernels"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.ms is None:
            table.add_row(str(row.batch), row.contender, "-", "", "", f"{row.floor_ms:.2f}")
            continue
        table.add_row(
            str(row.batch),
            row.contender,
            f"{row.ms:.3f}",
            f"{row.ms_low:.3f}-{row.ms_high:.3f}",
            "-" if row.plan_us is None else f"{row.plan_us:.0f}",
            f"{row.floor_ms:.2f}",
            f"{row.fraction:.0%}",
            "-" if row.kernels_per_step is None else str(row.kernels_per_step),
        )
    return table


def write_steps(path: Path, rows: Sequence[StepRow], environment: Environment) -> None:
    """Add rows to a file; a row with the key of one that is there replaces it.

    Every row keeps the date and commit of its own run; ``environment`` is the last run's.

    Raises:
        ConfigError: the file is of another schema.
    """
    stamp = {"date": environment.date, "commit": environment.commit}
    fresh = {row.key: {**asdict(row), "notes": list(row.notes), **stamp} for row in rows}

    def change(data: dict[str, Any]) -> None:
        if data and data.get("schema") != SCHEMA:
            raise ConfigError(
                f"{path}: schema {data.get('schema')!r}; this version writes {SCHEMA}. Name "
                "another file, or remove it."
            )
        kept = {_key_of(row): row for row in data.get("rows", [])}
        data.update(
            schema=SCHEMA,
            environment=environment.to_json(),
            rows=list({**kept, **fresh}.values()),
        )

    update_json(path, change)


def _key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("shape", "batch", "context", "contender", "provider"))
