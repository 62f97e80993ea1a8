"""pytest hooks that shard GPU tests, record their outcomes and list the stale ones.

``tests/gpu/conftest.py`` registers a ``Recorder``. Nothing of pytest is imported: hooks are found
by name, so the package does not need pytest to be installed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedops.bench.environment import git_commit
from fusedops.bench.records import (
    Shard,
    TestRecord,
    add_records,
    covered_hash,
    read_records,
    stale,
    summary,
)

__all__ = ["GPU_MARKS", "Recorder"]

GPU_MARKS = ("gpu", "gpu_large")

_SOURCES = "fusedops_sources"


def _is_gpu_test(item: Any) -> bool:
    return any(item.get_closest_marker(name) is not None for name in GPU_MARKS)


class Recorder:
    """Selects a shard of the gpu-marked tests and writes what happened to them.

    Args:
        root: the checkout.
        record: the file that outcomes are added to, or None to write nothing.
        gpu: name of the device, for the records.
        shard: the part to run, or None for all.
        only_stale: run only tests without a passing record for today's sources.
        list_stale: run nothing, list the stale tests of ``stale_against`` instead.
        stale_against: the file of records that staleness is judged by.
        clock: returns the time of a record.
    """

    def __init__(
        self,
        root: Path,
        *,
        record: Path | None = None,
        gpu: str = "none",
        shard: Shard | None = None,
        only_stale: bool = False,
        list_stale: bool = False,
        stale_against: Path | None = None,
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._root = root
        self._record = record
        self._gpu = gpu
        self._shard = shard
        self._only_stale = only_stale
        self._list_stale = list_stale
        self._stale_against = stale_against
        self._clock = clock
        self._sources: dict[str, str] = {}
        self._stale: dict[str, str] = {}
        self._outcomes: dict[str, tuple[str, float]] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep the shard's tests (or none, when only the stale ones are to be listed)."""
        if self._shard is None and self._stale_against is None:
            return
        hashes: dict[Path, str] = {}
        for item in filter(_is_gpu_test, items):
            module = Path(item.path)
            if module not in hashes:
                covers = getattr(getattr(item, "module", None), "COVERS", None)
                hashes[module] = covered_hash(module, covers, self._root)
            self._sources[item.nodeid] = hashes[module]
            # Reports carry it to a process that collects nothing itself, as with pytest-xdist.
            item.user_properties.append((_SOURCES, hashes[module]))
        known = read_records(self._stale_against) if self._stale_against else {}
        self._stale = stale(self._sources, known)
        kept: list[Any] = []
        dropped: list[Any] = []
        for item in items:
            (kept if self._keeps(item.nodeid) else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def _keeps(self, node: str) -> bool:
        if self._list_stale:
            return False
        if node not in self._sources:
            return True
        if self._only_stale and node not in self._stale:
            return False
        return self._shard is None or self._shard.holds(node)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Fold setup, call and teardown of a test into one outcome."""
        node = report.nodeid
        sources = dict(report.user_properties).get(_SOURCES)
        if sources is not None:
            self._sources[node] = sources
        outcome, seconds = self._outcomes.get(node, ("passed", 0.0))
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
        elif report.skipped and outcome == "passed":
            # An expected failure is reported as skipped too; neither counts as a pass.
            outcome = "skipped"
        self._outcomes[node] = (outcome, seconds + report.duration)
        if report.failed:
            report.sections.append(("repro", f'python3 -m pytest "{node}" -m gpu'))

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Write the records; listing stale tests sets the exit status (1 if there are any)."""
        if self._list_stale:
            session.exitstatus = 1 if self._stale else 0
            return
        if self._record is None or hasattr(session.config, "workerinput"):
            return
        add_records(self._record, self.records())

    def records(self) -> dict[str, TestRecord]:
        """What happened, for the tests that ran here and are marked gpu."""
        commit = git_commit(self._root)
        date = self._clock().isoformat(timespec="seconds")
        return {
            node: TestRecord(
                outcome, self._sources[node], commit, self._gpu, date, round(seconds, 3)
            )
            for node, (outcome, seconds) in self._outcomes.items()
            if node in self._sources
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what is stale, or what was recorded."""
        if self._list_stale:
            terminalreporter.section(f"{len(self._stale)} of {len(self._sources)} GPU tests stale")
            for node, reason in sorted(self._stale.items()):
                terminalreporter.write_line(f"{node}: {reason}")
        elif self._record is not None and self._outcomes:
            counts = summary(self.records().values())
            terminalreporter.write_line(f"GPU tests recorded: {counts}")
