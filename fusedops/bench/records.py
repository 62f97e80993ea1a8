"""Records of GPU test runs: what passed, on which GPU, for which sources.

A machine with a GPU runs a part of the tests and adds to ``reports/<gpu>/tests.json``; shards and
days add up, because each entry carries a hash of the sources that its test covers. A test is stale
once they change. A test module names its sources::

    COVERS = ("fusedops/ops/norm.py", "csrc/norm.cu")

(files, folders or globs below the repository); without it the whole of ``DEFAULT_COVERS`` counts.
The test module itself always counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.bench.environment import SOURCE_SUFFIXES, source_hash
from fusedops.bench.files import read_json, update_json
from fusedops.errors import ConfigError

__all__ = [
    "DEFAULT_COVERS",
    "SCHEMA",
    "Shard",
    "TestRecord",
    "add_records",
    "covered_hash",
    "read_records",
    "stale",
    "summary",
]

SCHEMA = 2
DEFAULT_COVERS = ("fusedops", "csrc")


@dataclass(frozen=True)
class TestRecord:
    """The last run of one test.

    Attributes:
        outcome: ``passed``, ``failed``, ``error`` or ``skipped``.
        sources: hash of the sources that it covers.
        commit: the checkout's commit.
        gpu: the device that it ran on.
        date: ISO 8601, UTC.
        seconds: how long it took.
    """

    # pytest would otherwise try to collect a class of this name.
    __test__ = False

    outcome: str
    sources: str
    commit: str
    gpu: str
    date: str
    seconds: float


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (1-based) of ``count`` parts; a test belongs to one by the hash of its id."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``i/n``.

        Raises:
            ConfigError: not of that form, or not 1 <= i <= n.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        shard = cls(int(match[1]), int(match[2])) if match else None
        if shard is None or not 1 <= shard.index <= shard.count:
            raise ConfigError(f"shard {text!r}; accepted is i/n with 1 <= i <= n, e.g. 2/4.")
        return shard

    def holds(self, node_id: str) -> bool:
        """Whether this part runs the test; the same on every machine and in every order."""
        digest = hashlib.sha256(node_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.index - 1


def _holds_source(folder: Path) -> bool:
    return any(path.suffix in SOURCE_SUFFIXES for path in folder.rglob("*"))


def covered_hash(module_file: Path, covers: Sequence[str] | None, root: Path) -> str:
    """Hash of the sources of a test module's tests.

    Args:
        module_file: the test module.
        covers: its ``COVERS``, or None.
        root: the checkout.

    Raises:
        ConfigError: an entry of ``covers`` matches no source file.
    """
    if covers is None:
        # A folder of the default that holds no source yet is no mistake.
        patterns = [name for name in DEFAULT_COVERS if _holds_source(root / name)]
    else:
        patterns = list(covers)
    return source_hash([*patterns, module_file.relative_to(root).as_posix()], root)


def read_records(path: Path) -> dict[str, TestRecord]:
    """Node id -> record; an absent file has none.

    Raises:
        LoadError: the file is no JSON object.
        ConfigError: it is of another schema.
    """
    data = read_json(path)
    if data and data.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path}: schema {data.get('schema')!r}; this version reads {SCHEMA}. Remove the file "
            "and run the tests again."
        )
    return {
        f"{module}::{name}": TestRecord(outcome, sources, seconds=seconds, **data["runs"][run])
        for module, tests in data.get("tests", {}).items()
        for name, (outcome, sources, seconds, run) in tests.items()
    }


def _compact(records: Mapping[str, TestRecord]) -> dict[str, Any]:
    """What a file holds: thousands of tests share a run, so each says only which one."""
    runs: list[dict[str, str]] = []
    tests: dict[str, dict[str, tuple[str, str, float, int]]] = {}
    for node, record in records.items():
        run = {"commit": record.commit, "date": record.date, "gpu": record.gpu}
        if run not in runs:
            runs.append(run)
        module, _, name = node.partition("::")
        entry = (record.outcome, record.sources, record.seconds, runs.index(run))
        tests.setdefault(module, {})[name] = entry
    return {"schema": SCHEMA, "runs": runs, "tests": tests}


def add_records(path: Path, records: Mapping[str, TestRecord]) -> None:
    """Add records to a file; a test that ran again replaces its old record."""

    def change(data: dict[str, Any]) -> None:
        data.update(_compact({**read_records(path), **records}))

    update_json(path, change)


def stale(wanted: Mapping[str, str], records: Mapping[str, TestRecord]) -> dict[str, str]:
    """Tests with no passing record for today's sources.

    Args:
        wanted: node id -> hash of its sources today.
        records: what was recorded.

    Returns:
        node id -> why: never run, sources changed, or the last outcome.
    """
    reasons: dict[str, str] = {}
    for node, sources in wanted.items():
        record = records.get(node)
        if record is None:
            reasons[node] = "never run"
        elif record.sources != sources:
            reasons[node] = "sources changed since it ran"
        elif record.outcome != "passed":
            reasons[node] = record.outcome
    return reasons


def summary(records: Iterable[TestRecord]) -> str:
    """``12 passed, 1 failed``: counts of outcomes, passed first."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record.outcome] = counts.get(record.outcome, 0) + 1
    order = sorted(counts, key=lambda outcome: (outcome != "passed", outcome))
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in order) or "none"
