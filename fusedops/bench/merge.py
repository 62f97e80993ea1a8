"""Adds the results of a run elsewhere to the reports: ``python -m fusedops.bench.merge DIR``.

DIR holds what such a run copied out: ``tests.json``, ``goals.json``, ``goals_rows.json``, each
optional. Entries go to the folder of the GPU that they name, and the newer of two wins.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedops.bench.environment import gpu_slug, repository_root
from fusedops.bench.goal_harness import add_entries, entries_of
from fusedops.bench.records import add_records, read_records
from fusedops.errors import ConfigError, FusedOpsError

__all__ = ["main", "merge"]


def _newer(found: Mapping[str, Any], known: Mapping[str, Any], date: str) -> dict[str, Any]:
    def when(entry: Any) -> str:
        return str(entry[date] if isinstance(entry, dict) else getattr(entry, date))

    return {
        name: entry
        for name, entry in found.items()
        if name not in known or when(entry) > when(known[name])
    }


def merge(source: Path, reports: Path) -> dict[str, int]:
    """Add the results below ``source`` to ``reports``.

    Returns:
        ``<gpu>/tests.json`` or ``<gpu>/goals.json`` -> entries taken over.

    Raises:
        ConfigError: ``source`` holds no results, or results of another schema.
    """
    tests, goals = read_records(source / "tests.json"), entries_of(source / "goals.json")
    if not tests and not goals:
        raise ConfigError(f"{source}: holds neither tests.json nor goals.json with entries.")
    taken: dict[str, int] = {}
    for slug in sorted({gpu_slug(record.gpu) for record in tests.values()}):
        target = reports / slug / "tests.json"
        here = {node: record for node, record in tests.items() if gpu_slug(record.gpu) == slug}
        newer = _newer(here, read_records(target), "date")
        if newer:
            add_records(target, newer)
        taken[f"{slug}/tests.json"] = len(newer)
    rows = entries_of(source / "goals_rows.json", "rows")
    for slug in sorted({gpu_slug(entry["gpu"]) for entry in goals.values()}):
        target = reports / slug / "goals.json"
        mine = {name: entry for name, entry in goals.items() if gpu_slug(entry["gpu"]) == slug}
        newer = _newer(mine, entries_of(target), "date")
        if newer:
            raw = {name: rows[name] for name in newer if name in rows}
            add_entries(target.with_name("goals_rows.json"), "rows", raw)
            add_entries(target, "goals", newer)
        taken[f"{slug}/goals.json"] = len(newer)
    return taken


def main(arguments: list[str]) -> int:
    """Merge the folder named by the only argument into the checkout's reports."""
    root = repository_root()
    if len(arguments) != 1 or root is None:
        print("usage: python -m fusedops.bench.merge DIR (from a checkout)", file=sys.stderr)
        return 2
    try:
        taken = merge(Path(arguments[0]), root / "reports")
    except FusedOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, count in taken.items():
        print(f"reports/{name}: {count} entries taken over")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
