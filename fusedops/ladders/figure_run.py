"""Runs figures: every panel measured and recorded before the next figure; counters come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusedops.bench.files import read_json, update_json
from fusedops.bench.roofline import Ceilings
from fusedops.bench.runner import GraphRunner
from fusedops.ladders.counters import Counters
from fusedops.ladders.figures import Bench, Figure, FigureResult, FigureRow, Panel

__all__ = ["FIGURES", "FigureTask", "add_counters", "run_figures", "uncounted"]

FIGURES = "figures"
"""Where they stand in the file of results."""


@dataclass(frozen=True)
class FigureTask:
    """A figure of a ladder."""

    ladder: str
    figure: Figure


def _rows(panel: Panel, bench: Bench) -> Iterator[FigureRow]:
    """A panel's rows; what stops it becomes its last row."""
    try:
        yield from panel.measure(bench)
    except Exception as error:  # noqa: BLE001 - one panel must not cost the others
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


def uncounted(path: Path, task: FigureTask) -> tuple[str, ...]:
    """Keys of the recorded rows that have a launch to profile and no counters yet."""
    entry = read_json(path).get(FIGURES, {}).get(task.figure.id)
    if entry is None:
        return ()
    probed = {key for panel in task.figure.panels for key in panel.probes}
    rows = FigureResult.from_json(entry).rows
    return tuple(row.key for row in rows if row.values and row.key in probed and not row.counters)


def add_counters(path: Path, task: FigureTask, found: Mapping[str, Counters] | str) -> None:
    """Put counters into the recorded rows that lack them, or the reason for none.

    Args:
        path: the file.
        found: key of a row -> counters, or why none were read.
    """
    lacking = uncounted(path, task)
    if not lacking:
        return
    counters = {} if isinstance(found, str) else found
    left = [key for key in lacking if key not in counters]
    reason = found if isinstance(found, str) else f"not read for {len(left)} of {len(lacking)} rows"

    def counted(row: FigureRow) -> FigureRow:
        return replace(row, counters=row.counters or counters.get(row.key))

    def change(data: dict[str, Any]) -> None:
        entry = data[FIGURES][task.figure.id]
        panels = FigureResult.from_json(entry).panels
        panels = {name: tuple(map(counted, rows)) for name, rows in panels.items()}
        result = FigureResult(panels, reason if left else "")
        data[FIGURES][task.figure.id] = {**result.to_json(), "sources": entry["sources"]}

    update_json(path, change)


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
    advance: Callable[[str, int], None],
    may_begin: Callable[[], bool] = lambda: True,
    make_bench: Callable[[torch.device, Ceilings], Bench] | None = None,
) -> None:
    """Measure what is not recorded for today's sources and write it into the file of results.

    A figure with a row that failed or was absent runs again, behind those that never ran.

    Args:
        path: the file, which exists.
        versions: installed versions.
        force: run again what is recorded.
        advance: called with what is under way, and how many figures were done since.
        may_begin: asked before a figure is measured; the others are left once it says no.
        make_bench: replaces the device's own bench (tests).
    """
    bench: Bench | None = None
    there = read_json(path).get(FIGURES, {})
    for task in sorted(tasks, key=lambda task: task.figure.id in there):
        figure = task.figure
        advance(figure.id, 0)
        sources = figure.sources(versions)
        if force or _recorded(path, figure, sources) is None:
            if not may_begin():
                return
            bench = bench or (make_bench or _bench)(device, limits)
            entry = {**measured(figure, bench).to_json(), "sources": sources}

            def change(data: dict[str, Any], key: str = figure.id, value: Any = entry) -> None:
                data.setdefault(FIGURES, {})[key] = value

            update_json(path, change)
        advance(figure.id, 1)


def _bench(device: torch.device, limits: Ceilings) -> Bench:
    return Bench(device, limits, GraphRunner(device))
