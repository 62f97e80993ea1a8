"""Figures: measurements with an axis of their own, beside the ladders' steps on one problem.

A figure has panels; a panel is a table and a plot of rows, each a series at a place on the x axis
with a value for each column. What cannot be measured here is a row that says why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Failed, Measurement, Outcome
from fusedops.bench.products import Layer
from fusedops.bench.roofline import Ceilings
from fusedops.bench.runner import GraphRunner
from fusedops.bench.timer import Protocol
from fusedops.errors import LoadError
from fusedops.jit.resources import PACKAGE_DIR
from fusedops.jit.sources import cuda_sources
from fusedops.ladders.counters import Counters
from fusedops.ladders.model import LadderKernel, Lesson

__all__ = ["Bench", "Figure", "FigureResult", "FigureRow", "Panel", "outcome_row"]

QUICK = Protocol(samples=9, min_samples=3, cap_s=0.2, settle_min_s=0.01, settle_max_s=0.06)
"""A figure shows a course over many rows: each gets less time than a row of a ladder."""


@dataclass(frozen=True)
class FigureRow:
    """One point of a panel.

    Attributes:
        series: the line that it belongs to.
        x: its place as the table shows it.
        at: its place on the axis; None on an axis of names.
        values: column -> figure, in the unit that the column's name ends with.
        absent: why it could not be measured here; empty elsewhere.
        failed: what went wrong; empty elsewhere.
        counters: of its kernel, or None.
    """

    series: str
    x: str
    at: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    absent: str = ""
    failed: str = ""
    counters: Counters | None = None

    @property
    def key(self) -> str:
        """Its name within the figure."""
        return f"{self.series}, {self.x}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object of what is known."""
        data: dict[str, Any] = {"series": self.series, "x": self.x, "values": dict(self.values)}
        data |= {name: text for name in ("absent", "failed") if (text := getattr(self, name))}
        if self.at is not None:
            data["at"] = self.at
        if self.counters is not None:
            data["counters"] = self.counters.to_json()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FigureRow:
        """The inverse of ``to_json``.

        Raises:
            LoadError: the object has other fields, or lacks one.
        """
        counted = data.get("counters")
        try:
            return cls(
                **{**data, "counters": None if counted is None else Counters.from_json(counted)}
            )
        except TypeError as error:
            raise LoadError(f"no row of a figure: {error}.") from error


@dataclass(frozen=True)
class Bench:
    """What a panel measures with.

    Attributes:
        device: a CUDA device.
        limits: its ceilings.
        runner: replays and times; one for all, because it holds a buffer for flushing caches.
        protocol: the timer's settings.
    """

    device: torch.device
    limits: Ceilings
    runner: GraphRunner
    protocol: Protocol = QUICK

    def generator(self, seed: int = 0) -> torch.Generator:
        """Random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def time(
        self,
        contenders: Sequence[Contender],
        make: Callable[[torch.Generator], Buffers],
        hot: bool = False,
    ) -> dict[str, Outcome]:
        """Check and time contenders as every report does: cold, in a graph, taking turns."""
        return measure(
            contenders,
            make,
            device=self.device,
            hot=hot,
            protocol=self.protocol,
            runner=self.runner,
        )

    @property
    def sms(self) -> int:
        """Multiprocessors."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count


def outcome_row(
    series: str,
    x: str,
    at: float | None,
    outcome: Outcome,
    values: Callable[[float], Mapping[str, float]],
) -> FigureRow:
    """A row of a timed contender.

    Args:
        values: the columns from the median in us.
    """
    if isinstance(outcome, Measurement):
        return FigureRow(series, x, at, values(outcome.median_us))
    if isinstance(outcome, Failed):
        return FigureRow(series, x, at, failed=outcome.reason)
    return FigureRow(series, x, at, absent=outcome.reason)


@dataclass(frozen=True)
class Panel:
    """A table with its plot.

    Attributes:
        name: heading; unique in the figure.
        x: what the x axis shows, with its unit.
        columns: of the values; a name ends with its unit.
        y: which of them are plotted against x, or as bars where the axis has names.
        measure: makes the rows.
        note: how to read it.
        log_y: the y axis is logarithmic.
        probes: key of a row -> makes its launch, for reading counters.
        counted: column -> the counter that it shows, where counters could be read.
    """

    name: str
    x: str
    columns: tuple[str, ...]
    y: tuple[str, ...]
    measure: Callable[[Bench], Iterator[FigureRow]]
    note: str = ""
    log_y: bool = False
    probes: Mapping[str, Callable[[torch.device], Callable[[], object]]] = field(
        default_factory=dict
    )
    counted: Mapping[str, Callable[[Counters], float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A rung of a ladder that is a figure instead of a step.

    Attributes:
        id: e.g. ``small.saxpy``.
        title: a few words.
        lesson: idea, wall and lever.
        panels: in the order of the page.
        kernels: own kernels that it launches.
        files: files of csrc that it depends on.
        capability: the least compute capability.
        modules: Python files of fusedops that measure it, relative to the package.
        layers: products that it asks the library for, whose kernels can be compiled ahead.
    """

    id: str
    title: str
    lesson: Lesson
    panels: tuple[Panel, ...]
    kernels: tuple[LadderKernel, ...] = ()
    files: tuple[str, ...] = ()
    capability: tuple[int, int] = (8, 0)
    modules: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()

    def sources(self, versions: Mapping[str, str]) -> str:
        """Hash of the code behind it and of the installed versions, which it measures too."""
        names = {kernel.file for kernel in self.kernels} | set(self.files)
        files = [pair for file in sorted(names) for pair in cuda_sources(file).files]
        code = [(PACKAGE_DIR / module).read_text(encoding="utf-8") for module in self.modules]
        text = json.dumps([files, code, sorted(versions.items())])
        return hashlib.sha256(f"{self.id} {text}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FigureResult:
    """What was recorded of a figure.

    Attributes:
        panels: name -> rows.
        counters_absent: why no counters were read; empty where they were, or none are asked for.
    """

    panels: Mapping[str, tuple[FigureRow, ...]]
    counters_absent: str = ""

    @property
    def rows(self) -> list[FigureRow]:
        """The rows of all panels."""
        return [row for rows in self.panels.values() for row in rows]

    @property
    def failed(self) -> int:
        """How many rows went wrong."""
        return sum(bool(row.failed) for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        panels = {name: [row.to_json() for row in rows] for name, rows in self.panels.items()}
        return {"panels": panels, "counters_absent": self.counters_absent}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FigureResult:
        """The inverse of ``to_json``.

        Raises:
            LoadError: a row is damaged.
            KeyError, TypeError, AttributeError: so is something else.
        """
        panels = {
            name: tuple(FigureRow.from_json(row) for row in rows)
            for name, rows in data["panels"].items()
        }
        return cls(panels, data.get("counters_absent", ""))
