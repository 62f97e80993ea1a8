"""``fusedops ladder``: classic kernel optimisations, run and explained on this GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from fusedops.cli.options import flag, path, text
from fusedops.cli.output import console, print_table
from fusedops.cli.prebuild import make_folder, require_folder_to_fill
from fusedops.cli.tune import progress_bar
from fusedops.errors import DeviceError
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
    if word == ALL:
        return built()
    load_ladder(word)
    return (word,)


def _print_tables(target: Console, report: Report, names: tuple[str, ...]) -> int:
    """The short table of each problem; returns how many rows failed."""
    from fusedops.bench.measurement import Failed
    from fusedops.ladders.table import HEADINGS, counters_notes, table_rows

    places = [HEADINGS.index(column) for column in _COLUMNS]
    failed = 0
    for name in names:
        this = load_ladder(name)
        for problem, rows in report.ladders.get(name, {}).items():
            lines = [[row[place] for place in places] for row in table_rows(this, problem, rows)]
            print_table(target, f"{name}: {problem}", _COLUMNS, lines)
            for note in counters_notes(rows):
                target.print(note, markup=False, soft_wrap=True)
            failed += sum(isinstance(row.outcome, Failed) for row in rows.values())
        failed += _print_figures(target, report, this.figures)
    return failed


def _print_figures(target: Console, report: Report, figures: Sequence[Figure]) -> int:
    """The tables of the figures that were run; returns how many of their rows failed."""
    from fusedops.ladders.figure_table import figure_tables

    failed = 0
    for figure in figures:
        result = report.figures.get(figure.id)
        if result is None:
            continue
        for table in figure_tables(figure, result):
            lines = [list(line) for line in table.lines]
            print_table(target, f"{figure.id}: {table.panel.name}", table.headings, lines)
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
            "here (reports/<gpu>/ladders.json); run it on a GPU, or read the lessons with "
            "--explain."
        )
    return max(found, key=lambda file: read_report(file).environment.date)


def _run(tasks: Sequence[Task | FigureTask], out: Path, profile: bool, force: bool) -> Report:
    from fusedops.bench.environment import collect_environment
    from fusedops.ladders.counters import read_counters
    from fusedops.ladders.runner import Runner

    device = torch.device("cuda", torch.cuda.current_device())
    reader = read_counters if profile else None
    runner = Runner(out, collect_environment(), device, force=force, read=reader)
    with progress_bar("ladders", len(tasks)) as bar:
        task_id = bar.task_ids[0]
        return runner.run(
            tasks,
            lambda what, rows: bar.update(task_id, advance=rows, description=what),
        )


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
    force: Annotated[
        bool, flag("--force", "Run again what the folder holds for today's sources")
    ] = False,
) -> None:
    """Climb kernels step by step: time, counters, the wall each step hits, the next lever.

    Exit code 1 where a step's result is wrong. Without a GPU the committed results are shown.
    """
    from fusedops.ladders import pages
    from fusedops.ladders.report import read_report
    from fusedops.ladders.runner import tasks_of

    names = _names(name)
    target = console()
    if explain:
        for each in names:
            target.print(pages.explain(load_ladder(each)), markup=False, soft_wrap=True)
            target.print()
        _print_not_built(target)
        return
    tasks = tasks_of(names, steps)
    has_gpu = torch.cuda.is_available()
    committed = None if has_gpu else _committed()
    require_folder_to_fill(out)
    make_folder(out)
    if committed is None:
        report = _run(tasks, out, counters, force)
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
    if failed:
        raise typer.Exit(EXIT_FAILED)
