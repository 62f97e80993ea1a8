"""A roofline plot as SVG: every step of a ladder on one problem under the measured ceilings."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from fusedops.bench.roofline import WRITE_SHARE
from fusedops.ladders.ceilings import LadderCeilings
from fusedops.ladders.model import Problem
from fusedops.ladders.report import ResultRow, cores_of

__all__ = ["roofline_svg"]

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 190, 20, 50
_LABEL_HEIGHT = 13


class _Scale:
    """Logarithmic positions between two values."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self._start + share * (self._end - self._start)

    def decades(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def _power(value: float) -> str:
    """``10^n`` as an axis shows it."""
    return f'10<tspan dy="-5" font-size="8">{round(math.log10(value))}</tspan>'


def _spread_labels(positions: Sequence[float]) -> list[float]:
    """Positions from top to bottom, moved down where labels would overlap."""
    moved: list[float] = []
    for position in positions:
        moved.append(max(position, moved[-1] + _LABEL_HEIGHT) if moved else position)
    # What ran over the lower edge moves up again.
    limit = float(_HEIGHT - _BOTTOM)
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - _LABEL_HEIGHT
    return moved


def roofline_svg(problem: Problem, rows: Mapping[str, ResultRow], limits: LadderCeilings) -> str:
    """The plot, or an empty text where no step has a time.

    Steps stand at the operations for each byte that memory moved, where that was counted, else for
    each byte that must be moved.
    """
    points = [
        (step, row.intensity, row.operations_per_s)
        for step, row in rows.items()
        if row.intensity and row.operations_per_s
    ]
    if not points:
        return ""
    traffic = problem.traffic
    moved = traffic.read_bytes + traffic.write_bytes
    reads = traffic.write_bytes < WRITE_SHARE * moved
    bandwidth = limits.read_bytes_per_s if reads else limits.read_write_bytes_per_s
    kind = "read" if reads else "read and write"
    least = problem.operations / moved
    every_x = [least, *(x for _, x, _ in points)]
    peak = limits.flops_per_s(problem.pipe) if traffic.flops else math.inf
    every_y = [min(bandwidth * least, peak), *(y for _, _, y in points)]
    across = _Scale(min(every_x) / 4, max(every_x) * 4, _LEFT, _WIDTH - _RIGHT)
    up = _Scale(min(every_y) / 2, max(every_y) * 6, _HEIGHT - _BOTTOM, _TOP)
    name = html.escape(problem.name, quote=True)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline of {name}">',
        *_axes(across, up, problem.unit),
        *_roof(across, up, bandwidth, kind, peak, cores_of(problem)),
        *_points(across, up, points),
        "</svg>",
    ]
    return "\n".join(parts)


def _axes(across: _Scale, up: _Scale, unit: str) -> list[str]:
    left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    parts = [
        f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>'
    ]
    for value in across.decades():
        x = across.at(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}">{_power(value)}</text>')
    for value in up.decades():
        y = up.at(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" class="end">{_power(value)}</text>')
    middle = (top + bottom) / 2
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 40}">{unit} a byte</text>')
    parts.append(
        f'<text x="20" y="{middle}" transform="rotate(-90 20 {middle})">{unit} a second</text>'
    )
    return parts


def _roof(
    across: _Scale, up: _Scale, bandwidth: float, kind: str, peak: float, cores: str
) -> list[str]:
    """The slope of the bandwidth, and the level of the peak from the ridge point on."""
    ridge = peak / bandwidth
    parts = _slope(across, up, bandwidth, kind, ridge)
    start = max(across.low, ridge)
    if start < across.high:
        x1, x2, y = across.at(start), across.at(across.high), up.at(peak)
        label = f"{cores} {peak / 1e12:.0f} TFLOP/s"
        parts += [
            f'<line class="roof" x1="{x1:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y:.1f}"/>',
            f'<text class="roof-label end" x="{x2 - 6:.1f}" y="{y - 6:.1f}">{label}</text>',
        ]
    return parts


def _slope(across: _Scale, up: _Scale, bandwidth: float, kind: str, ridge: float) -> list[str]:
    # From where the line enters the frame to where it leaves it or meets the peak.
    low = max(across.low, up.low / bandwidth)
    high = min(across.high, up.high / bandwidth, ridge)
    if low >= high:
        return []
    ends = [(across.at(x), up.at(x * bandwidth)) for x in (low, high)]
    (x1, y1), (x2, y2) = ends
    label = f"{kind} {bandwidth / 1e12:.2f} TB/s"
    x_label, y_label = x2 - 6, max(y2 + 12, _TOP + 14)
    return [
        f'<line class="roof" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>',
        f'<text class="roof-label end" x="{x_label:.1f}" y="{y_label:.1f}">{label}</text>',
    ]


def _points(across: _Scale, up: _Scale, points: Sequence[tuple[str, float, float]]) -> list[str]:
    ordered = sorted(points, key=lambda point: -point[2])
    labels = _spread_labels([up.at(y) for _, _, y in ordered])
    x_label = _WIDTH - _RIGHT + 12
    parts = []
    for (step, x, y), label in zip(ordered, labels, strict=True):
        cx, cy = across.at(x), up.at(y)
        parts.append(
            f'<line class="lead" x1="{cx:.1f}" y1="{cy:.1f}" x2="{x_label - 3}" y2="{label:.1f}"/>'
        )
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4"/>')
        parts.append(
            f'<text class="start" x="{x_label}" y="{label + 4:.1f}">{html.escape(step)}</text>'
        )
    return parts
