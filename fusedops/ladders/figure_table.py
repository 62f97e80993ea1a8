"""The cells of a figure's panels, the same for the terminal, Markdown and HTML."""

from __future__ import annotations

from dataclasses import dataclass

from fusedops.ladders.figures import Figure, FigureResult, FigureRow, Panel

__all__ = ["PanelTable", "figure_tables"]

NOT_RUN = "not run"
_NONE = "-"


@dataclass(frozen=True)
class PanelTable:
    """A panel as it is shown.

    Attributes:
        panel: what it is of.
        headings, lines: the table.
        rows: as recorded, for the plot.
        notes: how to read it, and what is missing and why.
    """

    panel: Panel
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    rows: tuple[FigureRow, ...]
    notes: tuple[str, ...]


def _cell(value: float | None) -> str:
    if value is None:
        return _NONE
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.2f}" if 0.1 <= abs(value) < 1000 else f"{value:,.4g}"


def _line(panel: Panel, row: FigureRow) -> tuple[str, ...]:
    width = len(panel.columns) + len(panel.counted)
    for state in ("failed", "absent"):
        reason = getattr(row, state)
        if reason:
            return (row.series, row.x, f"{state}: {reason}", *([""] * (width - 1)))
    measured = [_cell(row.values.get(column)) for column in panel.columns]
    counted = [
        _NONE if row.counters is None else _cell(pick(row.counters))
        for pick in panel.counted.values()
    ]
    return (row.series, row.x, *measured, *counted)


def figure_tables(figure: Figure, result: FigureResult | None) -> list[PanelTable]:
    """The panels of a figure, run or not."""
    tables = []
    for panel in figure.panels:
        rows = () if result is None else result.panels.get(panel.name, ())
        headings = ("series", panel.x, *panel.columns, *panel.counted)
        lines = tuple(_line(panel, row) for row in rows)
        if not lines:
            lines = ((panel.name, NOT_RUN, *([""] * (len(headings) - 2))),)
        notes = [panel.note] if panel.note else []
        if panel.counted and result is not None and result.counters_absent:
            notes.append(f"No counters for {figure.id}: {result.counters_absent}.")
        tables.append(PanelTable(panel, headings, lines, rows, tuple(notes)))
    return tables
