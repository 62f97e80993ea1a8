"""Runs figures: every panel measured, counters read, the result recorded before the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusedops.bench.files import read_json, update_json
from fusedops.bench.roofline import Ceilings
from fusedops.bench.runner import GraphRunner
from fusedops.errors import FusedOpsError
from fusedops.ladders.counters import Counters
from fusedops.ladders.figures import Bench, Figure, FigureResult, FigureRow, Panel

__all__ = ["FIGURES", "FigureTask", "run_figures"]

FIGURES = "figures"
"""Where they stand in the file of results."""

CounterReader = Callable[[str, str, Sequence[str]], dict[str, Counters] | str]


@dataclass(frozen=True)
class FigureTask:
    """A figure of a ladder."""

    ladder: str
    figure: Figure


def _rows(panel: Panel, bench: Bench) -> Iterator[FigureRow]:
    """A panel's rows; what stops it becomes its last row."""
    try:
        yield from panel.measure(bench)
    except (RuntimeError, ValueError, NotImplementedError, FusedOpsError) as error:
        yield FigureRow(panel.name, "-", failed=f"{type(error).__name__}: {error}")


def _missing(figure: Figure, device: torch.device) -> str:
    found = torch.cuda.get_device_capability(device)
    if found >= figure.capability:
        return ""
    least, here = (".".join(map(str, pair)) for pair in (figure.capability, found))
    return f"needs compute capability {least}; this GPU has {here}"


def measured(figure: Figure, bench: Bench) -> FigureResult:
    """All panels of a figure, without counters."""
    missing = _missing(figure, bench.device)
    panels: dict[str, tuple[FigureRow, ...]] = {}
    for panel in figure.panels:
        if missing:
            panels[panel.name] = (FigureRow(panel.name, "-", absent=missing),)
        else:
            panels[panel.name] = tuple(_rows(panel, bench))
    return FigureResult(panels)


def with_counters(
    result: FigureResult, task: FigureTask, read: CounterReader | None, not_read: str
) -> FigureResult:
    """The result with counters in the rows that have a probe, or with the reason for none."""
    probed = [key for panel in task.figure.panels for key in panel.probes]
    keys = [row.key for row in result.rows if row.values and row.key in probed]
    if not keys:
        return result
    found = not_read if read is None else read(task.ladder, task.figure.id, keys)
    if isinstance(found, str):
        return replace(result, counters_absent=found)
    panels = {
        name: tuple(replace(row, counters=found.get(row.key)) for row in rows)
        for name, rows in result.panels.items()
    }
    return FigureResult(panels)


def _recorded(path: Path, figure: Figure, sources: str) -> FigureResult | None:
    """What the file holds for today's sources; None where a row failed or was absent."""
    entry = read_json(path).get(FIGURES, {}).get(figure.id, {})
    if entry.get("sources") != sources:
        return None
    result = FigureResult.from_json(entry)
    return None if any(row.failed or row.absent for row in result.rows) else result


def run_figures(
    tasks: Sequence[FigureTask],
    path: Path,
    device: torch.device,
    limits: Ceilings,
    versions: Mapping[str, str],
    *,
    force: bool,
    read: CounterReader | None,
    not_read: str,
    advance: Callable[[str, int], None],
    make_bench: Callable[[torch.device, Ceilings], Bench] | None = None,
) -> None:
    """Run what is not recorded for today's sources and write it into the file of results.

    A figure with a row that failed or was absent runs again; one without counters is asked for
    them again.

    Args:
        path: the file, which exists.
        versions: installed versions.
        force: run again what is recorded.
        read: reads counters; None leaves them out, for which ``not_read`` is the reason.
        advance: called with what is under way, and how many figures were measured since.
        make_bench: replaces the device's own bench (tests).
    """
    bench: Bench | None = None
    for task in tasks:
        figure = task.figure
        advance(figure.id, 0)
        sources = figure.sources(versions)
        result = None if force else _recorded(path, figure, sources)
        lacks_counters = result is None or (bool(result.counters_absent) and read is not None)
        if result is None:
            bench = bench or (make_bench or _bench)(device, limits)
            result = measured(figure, bench)
        if lacks_counters:
            advance(f"counters of {figure.id}", 0)
            result = with_counters(result, task, read, not_read)
            if result.counters_absent and read is not None:
                # What keeps ncu from one figure keeps it from all.
                read, not_read = None, result.counters_absent
            entry = {**result.to_json(), "sources": sources}

            def change(data: dict[str, Any], key: str = figure.id, value: Any = entry) -> None:
                data.setdefault(FIGURES, {})[key] = value

            update_json(path, change)
        advance(figure.id, 1)


def _bench(device: torch.device, limits: Ceilings) -> Bench:
    return Bench(device, limits, GraphRunner(device))
