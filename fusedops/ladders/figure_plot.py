"""A figure's panel as SVG: lines over an axis of numbers, bars over one of names."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusedops.ladders.figures import FigureRow, Panel

__all__ = ["panel_svg"]

_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 210, 16, 48
_BAR, _BAR_LEFT, _BAR_RIGHT = 18, 260, 90
_LOG_FROM = 16.0
"""Places that are this many times apart stand on a logarithmic axis."""

_COLOURS = (
    *("#2471a3", "#c0392b", "#239b56", "#b9770e", "#7d3c98", "#148f77"),
    *("#839192", "#d81b60"),
)


@dataclass(frozen=True)
class _Axis:
    """Positions between two values."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        place, low, high = (
            map(math.log, (value, self.low, self.high))
            if self.is_log
            else (value, self.low, self.high)
        )
        return self.start + (place - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.is_log:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
            first = math.ceil(self.low / step)
            return [step * i for i in range(first, math.floor(self.high / step) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        parts = (1, 2, 5) if self.high / self.low < 100 else (1,)
        ticks = [part * 10.0**power for power in powers for part in parts]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def _axis(values: Sequence[float], start: float, end: float, is_log: bool) -> _Axis:
    low, high = min(values), max(values)
    if is_log:
        return _Axis(low / 1.3, high * 1.3, start, end, True)
    margin = 0.08 * (high - min(low, 0.0)) or 1.0
    return _Axis(min(low, 0.0), high + margin, start, end, False)


def _number(value: float) -> str:
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.0e}"


Line = tuple[str, list[tuple[float, float]]]


def _lines(panel: Panel, rows: Sequence[FigureRow]) -> list[Line]:
    """(label, points) of each series and plotted column, without what a logarithm has not."""
    found: dict[str, list[tuple[float, float]]] = {}
    several = len({row.series for row in rows}) > 1
    for column in panel.y:
        for row in rows:
            value = row.values.get(column)
            if row.at is None or value is None or (panel.log_y and value <= 0):
                continue
            names = [row.series] if several or len(panel.y) == 1 else []
            label = ", ".join([*names, *([column] if len(panel.y) > 1 else [])])
            found.setdefault(label, []).append((row.at, value))
    return [(label, sorted(points)) for label, points in found.items()]


def panel_svg(panel: Panel, rows: Sequence[FigureRow]) -> str:
    """The plot of a panel, or an empty text where no row has a value."""
    lines = _lines(panel, rows)
    name = html.escape(panel.name, quote=True)
    if lines:
        head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">'
        return "\n".join([head, *_plot(panel, rows, lines), "</svg>"])
    bars = [(row, row.values[panel.y[0]]) for row in rows if row.values.get(panel.y[0]) is not None]
    if not bars:
        return ""
    height = _BAR * len(bars) + 40
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}">'
    return "\n".join([head, *_bars(panel, bars), "</svg>"])


def _plot(panel: Panel, rows: Sequence[FigureRow], lines: Sequence[Line]) -> list[str]:
    left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    places = {row.at: row.x for row in rows if row.at is not None}
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    log_x = min(xs) > 0 and max(xs) / min(xs) >= _LOG_FROM
    across = _axis(xs, left, right, log_x)
    up = _axis(ys, bottom, top, panel.log_y)
    parts = [
        f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>'
    ]
    for at in sorted(set(xs)):
        x = across.at(at)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        label = html.escape(places[at])
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}">{label}</text>')
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" class="end">{_number(tick)}</text>')
    middle = (top + bottom) / 2
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 38}">{html.escape(panel.x)}</text>')
    parts.append(
        f'<text x="18" y="{middle}" transform="rotate(-90 18 {middle})">'
        f"{html.escape(', '.join(panel.y))}</text>"
    )
    for number, (label, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        spots = [(across.at(x), up.at(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:{colour}"/>' for x, y in spots
        ]
        y = top + 14 + 18 * number
        parts.append(
            f'<line x1="{right + 10}" x2="{right + 28}" y1="{y}" y2="{y}" stroke="{colour}" '
            'stroke-width="3"/>'
        )
        parts.append(
            f'<text class="start" x="{right + 34}" y="{y + 4}">{html.escape(label)}</text>'
        )
    return parts


def _bars(panel: Panel, bars: Sequence[tuple[FigureRow, float]]) -> list[str]:
    longest = max(value for _, value in bars) or 1.0
    same_x = len({row.x for row, _ in bars}) == 1
    series = list(dict.fromkeys(row.series for row, _ in bars))
    parts = []
    for number, (row, value) in enumerate(bars):
        y = 10 + _BAR * number
        colour = _COLOURS[0 if same_x else series.index(row.series) % len(_COLOURS)]
        width = max(value, 0.0) / longest * (_WIDTH - _BAR_LEFT - _BAR_RIGHT)
        label = html.escape(row.series if same_x else row.key)
        box = f'x="{_BAR_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 4}"'
        end = f"{_BAR_LEFT + width + 6:.1f}"
        parts += [
            f'<text class="end" x="{_BAR_LEFT - 8}" y="{y + 12}">{label}</text>',
            f'<rect {box} fill="{colour}"/>',
            f'<text class="start" x="{end}" y="{y + 12}">{_number(value)}</text>',
        ]
    y = 28 + _BAR * len(bars)
    parts.append(f'<text class="start" x="{_BAR_LEFT}" y="{y}">{html.escape(panel.y[0])}</text>')
    return parts
