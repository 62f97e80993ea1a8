"""Running figures: what is recorded, what runs again, and counters for rows that have a probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_results import ENVIRONMENT, LIMITS

from fusedops.bench.files import read_json
from fusedops.errors import BuildError
from fusedops.ladders import load_ladder
from fusedops.ladders.counters import Counters
from fusedops.ladders.figure_run import FigureTask, add_counters, run_figures, uncounted
from fusedops.ladders.figure_table import figure_tables
from fusedops.ladders.figures import Bench, Figure, FigureResult, FigureRow, Panel
from fusedops.ladders.model import Lesson
from fusedops.ladders.ncu import Asked
from fusedops.ladders.runner import NOT_READ, Runner, tasks_of

FIGURES = {figure.id: figure for figure in load_ladder("small").figures}
ROW = FigureRow("s", "4", 4.0, {"us": 2.5}, counters=Counters("k", sectors=8.0))


def stand_in(
    rows: Sequence[FigureRow], calls: list[str], probes: Sequence[str] = (), broken: bool = False
) -> FigureTask:
    """A figure of one panel that gives ``rows`` and notes when it is measured."""

    def measure(bench: Bench) -> Iterator[FigureRow]:
        calls.append("measured")
        yield from rows
        if broken:
            raise BuildError("no kernel")

    panel = Panel(
        "p",
        "x",
        ("us",),
        ("us",),
        measure,
        probes={key: lambda device: lambda: None for key in probes},
        counted={"sectors": lambda counters: counters.sectors},
    )
    lesson = Lesson("an idea", "memory.", "a lever")
    return FigureTask("small", Figure("small.fake", "Fake", lesson, (panel,)))


def run(
    task: FigureTask, folder: Path, read: Any = None, force: bool = False
) -> tuple[FigureResult, list[tuple[str, int]]]:
    """Run one figure on a bench that no measurement asks for anything."""
    path = folder / "ladders.json"
    seen: list[tuple[str, int]] = []
    run_figures(
        [task],
        path,
        torch.device("cuda"),
        LIMITS,
        {"torch": "1"},
        force=force,
        advance=lambda what, rows: seen.append((what, rows)),
        make_bench=lambda device, limits: Bench(device, limits, None),  # type: ignore[arg-type]
    )
    keys = uncounted(path, task)
    if keys:
        found = NOT_READ if read is None else read([Asked("small", "small.fake", keys)], None)
        add_counters(path, task, found if isinstance(found, str) else found[0])
    return FigureResult.from_json(read_json(path)["figures"]["small.fake"]), seen


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures find a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_a_figure_is_run_once_and_again_when_forced(tmp_path: Path) -> None:
    calls: list[str] = []
    task = stand_in([replace(ROW, counters=None)], calls)
    result, seen = run(task, tmp_path)
    assert result.panels["p"] == (replace(ROW, counters=None),)
    assert seen[0] == ("small.fake", 0)
    assert seen[-1] == ("small.fake", 1)
    run(task, tmp_path)
    assert len(calls) == 1
    run(task, tmp_path, force=True)
    assert len(calls) == 2


def test_what_was_absent_is_looked_for_again(tmp_path: Path) -> None:
    calls: list[str] = []
    task = stand_in([FigureRow("s", "-", absent="no g++")], calls)
    for _ in range(2):
        result, _ = run(task, tmp_path)
        assert [row.absent for row in result.rows] == ["no g++"]
    assert len(calls) == 2


def test_counters_that_were_refused_are_asked_for_again_alone(tmp_path: Path) -> None:
    calls: list[str] = []
    task = stand_in([replace(ROW, counters=None)], calls, ["s, 4"])
    assert run(task, tmp_path)[0].counters_absent == NOT_READ
    assert run(task, tmp_path)[0].counters_absent == NOT_READ
    result, _ = run(task, tmp_path, lambda *_: [{"s, 4": Counters("k", sectors=8.0)}])
    assert (result.rows, result.counters_absent) == ([ROW], "")
    assert len(calls) == 1


def test_what_stops_a_panel_is_its_last_row_and_it_runs_again(tmp_path: Path) -> None:
    calls: list[str] = []
    task = stand_in([replace(ROW, counters=None)], calls, broken=True)
    result, _ = run(task, tmp_path)
    assert [row.failed for row in result.rows] == ["", "BuildError: no kernel"]
    run(task, tmp_path)
    assert len(calls) == 2


def test_an_older_gpu_is_told_what_the_figure_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    result, _ = run(stand_in([ROW], []), tmp_path)
    assert [row.absent for row in result.rows] == ["needs compute capability 8.0; this GPU has 7.5"]


def test_counters_are_read_for_rows_with_a_probe(tmp_path: Path) -> None:
    asked: list[Asked] = []

    def read(wanted: Sequence[Asked], limit_s: float | None) -> list[dict[str, Counters]]:
        asked.extend(wanted)
        return [{"s, 4": Counters("k", sectors=8.0)}]

    rows = [replace(ROW, counters=None), FigureRow("s", "8", 8.0, {"us": 1.0})]
    result, _ = run(stand_in(rows, [], ["s, 4"]), tmp_path, read)
    assert asked == [Asked("small", "small.fake", ("s, 4",))]
    assert result.panels["p"][0] == ROW
    assert result.panels["p"][1].counters is None
    assert result.counters_absent == ""


def test_rows_that_were_not_reached_are_asked_for_again(tmp_path: Path) -> None:
    rows = [replace(ROW, counters=None), FigureRow("s", "8", 8.0, {"us": 1.0})]
    task = stand_in(rows, [], ["s, 4", "s, 8"])
    result, _ = run(task, tmp_path, lambda *_: [{"s, 4": Counters("k", sectors=8.0)}])
    assert result.counters_absent == "not read for 1 of 2 rows"
    assert uncounted(tmp_path / "ladders.json", task) == ("s, 8",)
    result, _ = run(task, tmp_path, lambda *_: [{"s, 8": Counters("k", sectors=4.0)}])
    assert result.counters_absent == ""
    assert [row.counters and row.counters.sectors for row in result.rows] == [8.0, 4.0]


def test_figures_that_never_ran_come_first_and_none_is_begun_late(tmp_path: Path) -> None:
    order: list[str] = []

    def task(name: str) -> FigureTask:
        one = stand_in([FigureRow("s", "-", absent="no g++")], [])
        return replace(one, figure=replace(one.figure, id=name))

    def climb(names: str, allowed: int) -> None:
        begun: list[int] = []
        run_figures(
            [task(name) for name in names],
            tmp_path / "ladders.json",
            torch.device("cuda"),
            LIMITS,
            {},
            force=False,
            advance=lambda what, rows: order.append(what) if rows else None,
            may_begin=lambda: begun.append(1) or len(begun) <= allowed,  # type: ignore[func-returns-value]
            make_bench=lambda device, limits: Bench(device, limits, None),  # type: ignore[arg-type]
        )

    climb("abc", 1)
    assert order == ["a"]
    climb("abc", 2)
    assert order == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("read", "reason"), [(None, NOT_READ), (lambda *_: "no permission", "no permission")]
)
def test_a_reason_for_no_counters_is_kept(tmp_path: Path, read: Any, reason: str) -> None:
    task = stand_in([replace(ROW, counters=None)], [], ["s, 4"])
    result, _ = run(task, tmp_path, read)
    assert result.counters_absent == reason
    (table,) = figure_tables(task.figure, result)
    assert table.lines == (("s", "4", "2.50", "-"),)
    assert table.notes == (f"No counters for small.fake: {reason}.",)


def test_the_runner_takes_figures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tasks_of(["small"], "small.s*")
    assert [task.figure.id for task in tasks if isinstance(task, FigureTask)] == ["small.saxpy"]
    figure = replace(FIGURES["small.saxpy"], panels=stand_in([ROW], []).figure.panels)
    monkeypatch.setattr(
        "fusedops.ladders.figure_run._bench",
        lambda device, limits: Bench(device, limits, None),  # type: ignore[arg-type]
    )
    monkeypatch.setattr("fusedops.ladders.runner._answers", lambda device: True)
    runner = Runner(tmp_path, ENVIRONMENT, torch.device("cuda"), read=None, limits=LIMITS)
    report = runner.run([FigureTask("small", figure)], lambda what, rows: None)
    assert report.figures["small.saxpy"].rows == [ROW]
