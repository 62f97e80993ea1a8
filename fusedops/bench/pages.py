"""Pages: a list of rows as Markdown for people and JSON for programs, losses included.

The JSON holds the raw samples and a schema number; ``read_page`` refuses another schema, so that a
page is never rendered from fields that mean something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedops.bench.environment import Environment
from fusedops.bench.files import write_json, write_text
from fusedops.bench.measurement import (
    Absent,
    Failed,
    Measurement,
    Outcome,
    outcome_from_json,
    outcome_to_json,
    speedup,
)
from fusedops.errors import ConfigError, LoadError

__all__ = ["SCHEMA", "Page", "Row", "markdown", "read_page", "write_page"]

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One contender on one problem.

    Attributes:
        problem: what was done, e.g. ``rms_norm 16384x4096 bf16``.
        contender: who did it.
        outcome: the measurement, or why there is none.
        floor_us: the roofline's floor, where known.
        bytes_moved: least bytes read and written, for the bandwidth column; 0 where unknown.
        wall: what holds the row back, by rule.
        ours: True for this project's own rows; the others are peers.
    """

    problem: str
    contender: str
    outcome: Outcome
    floor_us: float | None = None
    bytes_moved: float = 0.0
    wall: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: heading.
        environment: where the figures come from.
        rows: in the order of the page.
        absent_peers: peer -> reason, for peers that could not run here.
        notes: paragraphs under the heading.
    """

    title: str
    environment: Environment
    rows: tuple[Row, ...]
    absent_peers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        "problem": row.problem,
        "contender": row.contender,
        "outcome": outcome_to_json(row.outcome),
        "floor_us": row.floor_us,
        "bytes_moved": row.bytes_moved,
        "wall": row.wall,
        "ours": row.ours,
    }


def page_to_json(page: Page) -> dict[str, Any]:
    """The page as a JSON object with its schema number."""
    return {
        "schema": SCHEMA,
        "title": page.title,
        "environment": page.environment.to_json(),
        "absent_peers": dict(page.absent_peers),
        "notes": list(page.notes),
        "rows": [_row_to_json(row) for row in page.rows],
    }


def read_page(path: Path) -> Page:
    """Read a page's JSON.

    Raises:
        LoadError: the file is missing, no JSON, of another schema, or incomplete.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not a readable report: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise LoadError(
            f"{path}: schema {schema!r}; this version reads {SCHEMA}. Write the report again."
        )
    try:
        rows = tuple(
            Row(
                problem=row["problem"],
                contender=row["contender"],
                outcome=outcome_from_json(row["outcome"]),
                floor_us=row["floor_us"],
                bytes_moved=row["bytes_moved"],
                wall=row["wall"],
                ours=row["ours"],
            )
            for row in data["rows"]
        )
        return Page(
            data["title"],
            Environment(**data["environment"]),
            rows,
            data["absent_peers"],
            tuple(data["notes"]),
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise LoadError(f"{path}: incomplete report: {error!r}") from error


def _best_peer(rows: Iterable[Row]) -> Measurement | None:
    peers = [row.outcome for row in rows if not row.ours and isinstance(row.outcome, Measurement)]
    return min(peers, key=lambda outcome: outcome.median_us, default=None)


def _against(row: Row, best_peer: Measurement | None) -> str:
    """Our speed over the best peer of the same problem; a loss is named as plainly as a win."""
    if not row.ours or best_peer is None or not isinstance(row.outcome, Measurement):
        return ""
    if len(row.outcome.samples) == len(best_peer.samples):
        ratio = speedup(row.outcome, best_peer).median
    else:
        ratio = best_peer.median_us / row.outcome.median_us
    return f"{ratio:.2f}x" if ratio >= 1 else f"{ratio:.2f}x (slower)"


def _cells(row: Row, best_peer: Measurement | None) -> list[str]:
    outcome = row.outcome
    name = f"**{row.contender}**" if row.ours else row.contender
    if isinstance(outcome, Failed):
        return [name, f"failed: {outcome.reason}", "", "", "", "", ""]
    if isinstance(outcome, Absent):
        return [name, f"absent: {outcome.reason}", "", "", "", "", ""]
    bandwidth = row.bytes_moved / outcome.median_us / 1e6 if row.bytes_moved else None
    return [
        name,
        f"{outcome.median_us:.2f}",
        f"{outcome.spread:.1%}",
        f"{bandwidth:.2f}" if bandwidth is not None else "",
        f"{row.floor_us / outcome.median_us:.0%}" if row.floor_us else "",
        _against(row, best_peer),
        ", ".join(filter(None, [row.wall, "hot" if outcome.hot else "cold"])),
    ]


_HEADINGS = ("contender", "us", "spread", "TB/s", "of floor", "vs best peer", "wall, cache")


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    text = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return [*text, *("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)]


def markdown(page: Page) -> str:
    """The page as Markdown: environment, absent peers, one table a problem, notes of rows."""
    about = page.environment
    lines = [f"# {page.title}", ""]
    lines += [f"{note}\n" for note in page.notes]
    facts = [
        ("GPU", f"{about.gpu}, driver {about.driver}"),
        ("CPU", about.cpu),
        ("versions", ", ".join(f"{k} {v}" for k, v in sorted(about.versions.items()))),
        ("Python", about.python),
        *about.variables.items(),
        ("commit", about.commit),
        ("date", about.date),
        ("command", f"`{about.command}`"),
    ]
    lines += _table(("read with", ""), facts)
    if page.absent_peers:
        lines += ["", "Peers that did not run:", ""]
        lines += _table(("peer", "why"), sorted(page.absent_peers.items()))
    problems: dict[str, list[Row]] = {}
    for row in page.rows:
        problems.setdefault(row.problem, []).append(row)
    remarks: dict[str, None] = {}
    for problem, rows in problems.items():
        floor_us = next((row.floor_us for row in rows if row.floor_us), None)
        lines += ["", f"## {problem}", ""]
        if floor_us:
            lines += [f"Floor {floor_us:.2f} us.", ""]
        lines += _table(_HEADINGS, [_cells(row, _best_peer(rows)) for row in rows])
        for row in rows:
            if isinstance(row.outcome, Measurement):
                for note in row.outcome.notes:
                    remarks[f"{problem}, {row.contender}: {note}"] = None
    if remarks:
        lines += ["", "## Notes on rows", "", *(f"- {_escaped(remark)}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def write_page(page: Page, folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``folder/name.json`` and ``folder/name.md``; returns both paths."""
    data, text = folder / f"{name}.json", folder / f"{name}.md"
    write_json(data, page_to_json(page))
    write_text(text, markdown(page))
    return data, text
