"""``fusedops ladder``: classic kernel optimisations, run and explained on this GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from fusedops.cli.options import flag, number, path, text
from fusedops.cli.output import console, print_table
from fusedops.cli.prebuild import make_folder, require_folder_to_fill
from fusedops.cli.tune import progress_bar
from fusedops.errors import ConfigError, DeviceError
from fusedops.ladders.catalog import built, load_ladder, specified
from serving_demo.files import written_line

if TYPE_CHECKING:
    from fusedops.ladders.figure_run import FigureTask
    from fusedops.ladders.figures import Figure
    from fusedops.ladders.report import Report
    from fusedops.ladders.runner import Task

__all__ = ["ladder"]

ALL = "all"
EXIT_FAILED = 1
_COLUMNS = ("step", "us", "spread", "rate", "of ceiling", "wall")


def _names(word: str) -> tuple[str, ...]:
    """The ladders that a word asks for.

    Raises:
        ConfigError: it asks for one that is not built.
    """
    name = word.lower()
    if name == ALL:
        return built()
    if name not in specified():
        accepted = ", ".join((*built(), ALL))
        raise ConfigError(f"ladder {word!r} is unknown; accepted are {accepted}.")
    load_ladder(name)
    return (name,)


def _print_tables(target: Console, report: Report, names: tuple[str, ...]) -> int:
    """The short table of each problem; returns how many rows failed."""
    from fusedops.bench.measurement import Failed
    from fusedops.ladders.findings import findings_of
    from fusedops.ladders.table import HEADINGS, counters_notes, table_rows

    places = [HEADINGS.index(column) for column in _COLUMNS]
    failed = 0
    for name in names:
        this = load_ladder(name)
        recorded = report.ladders.get(name, {})
        for problem in (each.name for each in this.problems(this.size)):
            rows = recorded.get(problem)
            if rows is None:
                continue
            lines = [[row[place] for place in places] for row in table_rows(this, problem, rows)]
            _print_lines(target, f"{name}: {problem}", _COLUMNS, lines, 1)
            for note in counters_notes(rows):
                target.print(note, markup=False, soft_wrap=True)
            failed += sum(isinstance(row.outcome, Failed) for row in rows.values())
        for finding in findings_of(this, recorded):
            print_table(target, f"{name}: {finding.title}", finding.headings, finding.lines)
            target.print(finding.text, markup=False, soft_wrap=True)
        failed += _print_figures(target, report, this.figures)
        if not recorded and not any(figure.id in report.figures for figure in this.figures):
            target.print(f"{name}: no results", markup=False)
    return failed


def _print_lines(
    target: Console,
    title: str,
    headings: Sequence[str],
    lines: Iterable[Sequence[str]],
    place: int,
) -> None:
    """A table; why a row has no figures, which stands in its cell at ``place``, comes below it."""
    short: list[list[str]] = []
    reasons: list[str] = []
    for line in lines:
        state, colon, reason = line[place].partition(": ")
        short.append([*line[:place], state, *line[place + 1 :]])
        if colon:
            reasons.append(f"{', '.join(line[:place])} {state}: {reason}")
    print_table(target, title, headings, short)
    for reason in reasons:
        target.print(reason, markup=False, soft_wrap=True)


def _print_figures(target: Console, report: Report, figures: Sequence[Figure]) -> int:
    """The tables of the figures that were run; returns how many of their rows failed."""
    from fusedops.ladders.figure_table import figure_tables

    failed = 0
    for figure in figures:
        result = report.figures.get(figure.id)
        if result is None:
            continue
        for table in figure_tables(figure, result):
            title = f"{figure.id}: {table.panel.name}"
            _print_lines(target, title, table.headings, table.lines, 2)
            for note in table.notes[bool(table.panel.note) :]:
                target.print(note, markup=False, soft_wrap=True)
        failed += result.failed
    return failed


def _print_not_built(target: Console) -> None:
    from fusedops.ladders.pages import not_built

    for line in not_built():
        target.print(line, markup=False, soft_wrap=True)


def _committed() -> Path:
    """The newest results that come with the checkout.

    Raises:
        DeviceError: there are none.
    """
    from fusedops.ladders.report import committed_reports, read_report

    found = committed_reports()
    if not found:
        raise DeviceError(
            f"ladder: torch {torch.__version__} sees no CUDA device, and no results are committed "
            "here (a ladders.json below reports/); run it on a GPU, or read the lessons with "
            "--explain."
        )
    return max(found, key=lambda file: read_report(file).environment.date)


def _run(
    target: Console,
    tasks: Sequence[Task | FigureTask],
    out: Path,
    profile: bool,
    force: bool,
    deadline: float | None,
) -> Report:
    from fusedops.bench.environment import collect_environment
    from fusedops.ladders.ncu import read_counters
    from fusedops.ladders.runner import Runner

    device = torch.device("cuda", torch.cuda.current_device())
    reader = read_counters if profile else None
    runner = Runner(out, collect_environment(), device, force=force, read=reader, deadline=deadline)
    started = time.monotonic()
    with progress_bar("ladders", len(tasks)) as bar:
        task_id = bar.task_ids[0]

        def show(what: str, rows: int) -> None:
            bar.update(task_id, advance=rows, description=what)
            # A log shows what was begun when, so that a run that is cut off tells where.
            if not rows and not target.is_interactive:
                line = f"{time.monotonic() - started:6.1f} s  {what}"
                target.print(line, markup=False, highlight=False)

        return runner.run(tasks, show)


def ladder(
    name: Annotated[
        str,
        typer.Argument(metavar="LADDER", help=f"One of {', '.join((*specified(), ALL))}."),
    ] = ALL,
    explain: Annotated[
        bool, flag("--explain", "Print what the steps teach, and run nothing")
    ] = False,
    out: Annotated[Path, path("--out", "Folder for ladders.html, .md and .json")] = Path("ladders"),
    counters: Annotated[
        bool, flag("--counters/--no-counters", "Read hardware counters with ncu where it may")
    ] = True,
    steps: Annotated[
        str | None,
        text(
            "--steps", 'Run only steps whose id matches, e.g. "*.v[1-4]"', "PATTERN", default="all"
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        number(
            "--minutes",
            "Begin nothing after this time; a run into the same folder goes on",
            minimum=0,
            default="no limit",
        ),
    ] = None,
    force: Annotated[
        bool, flag("--force", "Run again what the folder holds for today's sources")
    ] = False,
) -> None:
    """Climb kernels step by step: time, counters, the wall each step hits, the next lever.

    Exit code 1 where a step's result is wrong. Without a GPU the committed results are shown.
    """
    from fusedops.ladders import pages
    from fusedops.ladders.report import read_report
    from fusedops.ladders.runner import left_of, select_steps, tasks_of

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    names = _names(name)
    target = console()
    if explain:
        chosen = select_steps([load_ladder(each) for each in names], steps)
        for each, rungs in chosen.items():
            if rungs:
                target.print(pages.explain(load_ladder(each), rungs), markup=False, soft_wrap=True)
                target.print()
        _print_not_built(target)
        return
    tasks = tasks_of(names, steps)
    # What is written wrong is named before what this machine lacks.
    require_folder_to_fill(out)
    committed = None if torch.cuda.is_available() else _committed()
    make_folder(out)
    left: list[str] = []
    if committed is None:
        report = _run(target, tasks, out, counters, force, deadline)
        left = left_of(tasks, report)
    else:
        report = read_report(committed)
        about = report.environment
        target.print(
            f"no CUDA device here: results of {about.gpu}, committed, read on {about.date}",
            markup=False,
            soft_wrap=True,
        )
    failed = _print_tables(target, report, names)
    written = [*pages.write_pages(report, names, out)]
    if committed is None:
        written.append(out / "ladders.json")
    _print_not_built(target)
    for file in written:
        target.print(written_line(file), markup=False, soft_wrap=True)
    if left:
        target.print(
            f"not begun: {', '.join(left)}; run again with the same --out to go on.",
            markup=False,
            soft_wrap=True,
        )
    if failed:
        raise typer.Exit(EXIT_FAILED)
