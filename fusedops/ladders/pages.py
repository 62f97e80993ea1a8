"""Ladders as a page: HTML that needs no other file, Markdown, and a lesson for the terminal."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fusedops.bench.environment import Environment
from fusedops.bench.files import write_text
from fusedops.ladders.catalog import built, load_ladder, specified
from fusedops.ladders.figure_plot import panel_svg
from fusedops.ladders.figure_table import figure_tables
from fusedops.ladders.figures import Figure
from fusedops.ladders.findings import findings_of
from fusedops.ladders.model import Finding, Ladder, Problem, Step, source_text
from fusedops.ladders.report import Report, ResultRow, classified
from fusedops.ladders.roofline_plot import roofline_svg
from fusedops.ladders.table import HEADINGS, counters_notes, table_rows

__all__ = ["explain", "html_page", "markdown", "not_built", "write_pages"]

TITLE = "Ladders: kernel optimisations step by step"

_FIGURES_OF = "Times and shares in the lessons are those of an NVIDIA H200."

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --roof: #c0392b; --dot: #2471a3; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .6rem; font-size: 12px; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
svg { max-width: 760px; width: 100%; }
svg text { font-size: 11px; fill: currentColor; text-anchor: middle; }
svg text.end { text-anchor: end; } svg text.start { text-anchor: start; }
svg .frame { fill: none; stroke: currentColor; }
svg .grid, svg .lead { stroke: var(--line); stroke-width: .6; }
svg .roof { stroke: var(--roof); stroke-width: 2; } svg .roof-label { fill: var(--roof); }
svg circle { fill: var(--dot); }
"""


def not_built() -> list[str]:
    """A line for each ladder that is specified and has no module yet."""
    there = built()
    return [
        f"{name} ({ladder.title}): not built yet, {len(ladder.steps)} steps"
        for name, ladder in specified().items()
        if name not in there
    ]


def _facts(about: Environment) -> list[tuple[str, str]]:
    return [
        ("GPU", f"{about.gpu}, driver {about.driver}"),
        ("CPU", about.cpu),
        ("versions", ", ".join(f"{k} {v}" for k, v in sorted(about.versions.items()))),
        ("commit", about.commit),
        ("date", about.date),
        ("command", about.command),
    ]


def _parts(ladder: Ladder, report: Report) -> list[tuple[Problem, Mapping[str, ResultRow]]]:
    """The ladder's problems with what was recorded of them, in the order of the steps."""
    recorded = report.ladders.get(ladder.name, {})
    found: list[tuple[Problem, Mapping[str, ResultRow]]] = []
    for problem in ladder.problems(ladder.size):
        rows = recorded.get(problem.name, {})
        found.append(
            (problem, {step.id: rows[step.id] for step in ladder.steps if step.id in rows})
        )
    return found


def _findings(ladder: Ladder, report: Report) -> tuple[Finding, ...]:
    """What the recorded rows of a ladder say together."""
    return findings_of(ladder, report.ladders.get(ladder.name, {}))


def _lessons(step: Step | Figure) -> tuple[tuple[str, str], ...]:
    lesson = step.lesson
    return (("Idea", lesson.idea), ("Wall", lesson.wall), ("Lever", lesson.lever))


# HTML


def _html_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    def row(tag: str, values: Sequence[str]) -> str:
        inner = "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)
        return f"<tr>{inner}</tr>"

    body = "\n".join([row("th", headings), *(row("td", line) for line in lines)])
    return f'<div class="scroll"><table>\n{body}\n</table></div>'


def _files(step: Step | Figure) -> list[str]:
    """The files of its own kernels, each once."""
    return list(dict.fromkeys(kernel.file for kernel in step.kernels))


def _html_step(step: Step | Figure) -> str:
    terms = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in _lessons(step))
    code = "".join(
        f"<details><summary>csrc/{file}, {step.lesson.lines} lines of code</summary>"
        f"<pre>{html.escape(source_text(file))}</pre></details>"
        for file in _files(step)
    )
    title = f"{html.escape(step.id)}: {html.escape(step.title)}"
    return f'<section class="step" id="{step.id}"><h4>{title}</h4><dl>{terms}</dl>{code}</section>'


def _html_figure(figure: Figure, report: Report) -> str:
    parts = [_html_step(figure)]
    for table in figure_tables(figure, report.figures.get(figure.id)):
        parts.append(f"<h5>{html.escape(table.panel.name)}</h5>")
        parts.append(_html_table(table.headings, table.lines))
        parts += [f"<p>{html.escape(note)}</p>" for note in table.notes]
        parts.append(panel_svg(table.panel, table.rows))
    return "\n".join(filter(None, parts))


def _html_ladder(ladder: Ladder, report: Report) -> str:
    parts = [f"<h2>{html.escape(ladder.title)}</h2>", f"<p>{html.escape(ladder.intro)}</p>"]
    for problem, rows in _parts(ladder, report):
        parts.append(f"<h3>{html.escape(problem.name)}</h3>")
        parts.append(f"<p>{html.escape(classified(problem, report.ceilings))}</p>")
        parts.append(_html_table(HEADINGS, table_rows(ladder, problem.name, rows)))
        parts += [f"<p>{html.escape(note)}</p>" for note in counters_notes(rows)]
        parts.append(roofline_svg(problem, rows, report.ceilings))
    for finding in _findings(ladder, report):
        parts.append(f"<h3>{html.escape(finding.title)}</h3>")
        parts.append(f"<p>{html.escape(finding.text)}</p>")
        parts.append(_html_table(finding.headings, finding.lines))
    if ladder.steps:
        parts.append("<h3>The steps</h3>")
    parts += map(_html_step, ladder.steps)
    parts += [_html_figure(figure, report) for figure in ladder.figures]
    return "\n".join(filter(None, parts))


def html_page(report: Report, names: Sequence[str]) -> str:
    """The page of some ladders; it refers to nothing outside of itself."""
    body = [
        f"<h1>{TITLE}</h1>",
        _html_table(("read with", ""), _facts(report.environment)),
        f"<p>{html.escape(_how_to_read(report))}</p>",
        *(_html_ladder(load_ladder(name), report) for name in names),
        *(f"<p>{html.escape(line)}</p>" for line in not_built()),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{TITLE}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _how_to_read(report: Report) -> str:
    limits = report.ceilings
    return (
        "Times are medians of cold launches in CUDA graphs; spread is from the 10th to the 90th "
        "percentile over the median. TB/s are the least bytes over the time. The ceiling is "
        f"{limits.read_bytes_per_s / 1e12:.2f} TB/s for reads and "
        f"{limits.read_write_bytes_per_s / 1e12:.2f} TB/s for reads and writes "
        f"({'; '.join(limits.details)}); rates in TFLOP/s are held to the tensor cores' "
        f"{limits.bf16_flops_per_s / 1e12:.0f} TFLOP/s in bfloat16 and to the CUDA cores' "
        f"{limits.float32_flops_per_s / 1e12:.1f} in float32. Counters are those of a step's "
        "longest kernel, read in a run of their own; the wall follows from them by rule. "
        f"{_FIGURES_OF}"
    )


# Markdown


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return [*head, *("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)]


def markdown(report: Report, names: Sequence[str]) -> str:
    """The tables and lessons of some ladders as Markdown."""
    lines = [f"# {TITLE}", "", *_markdown_table(("read with", ""), _facts(report.environment))]
    lines += ["", _how_to_read(report)]
    for name in names:
        ladder = load_ladder(name)
        lines += ["", f"## {ladder.title}", "", ladder.intro]
        for problem, rows in _parts(ladder, report):
            lines += ["", f"### {problem.name}", "", classified(problem, report.ceilings), ""]
            lines += _markdown_table(HEADINGS, table_rows(ladder, problem.name, rows))
            lines += [f"\n{note}" for note in counters_notes(rows)]
        for finding in _findings(ladder, report):
            lines += ["", f"### {finding.title}", "", _escaped(finding.text), ""]
            lines += _markdown_table(finding.headings, finding.lines)
        lines.append("")
        for step in ladder.rungs:
            lesson = " ".join(f"*{part}:* {text}" for part, text in _lessons(step))
            lines.append(f"- **{step.id}** ({step.title}). {_escaped(lesson)}")
        for figure in ladder.figures:
            for table in figure_tables(figure, report.figures.get(figure.id)):
                lines += ["", f"### {figure.id}: {table.panel.name}", ""]
                lines += _markdown_table(table.headings, table.lines)
                lines += [f"\n{note}" for note in table.notes]
    lines += ["", *(f"{line}\n" for line in not_built())]
    return "\n".join(lines).rstrip() + "\n"


def write_pages(report: Report, names: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Write ``ladders.html`` and ``ladders.md`` into ``folder``; returns both paths."""
    page, text = folder / "ladders.html", folder / "ladders.md"
    write_text(page, html_page(report, names))
    write_text(text, markdown(report, names))
    return page, text


def explain(ladder: Ladder, rungs: Sequence[Step | Figure] | None = None) -> str:
    """The lesson of a ladder as plain text; of some of its steps only where they are given."""
    lines = [ladder.title, "", ladder.intro, _FIGURES_OF]
    for step in ladder.rungs if rungs is None else rungs:
        lines += ["", f"{step.id}: {step.title}"]
        lines += [f"  {part.lower():<5}  {text}" for part, text in _lessons(step)]
        lines += [f"  code   csrc/{file}, {step.lesson.lines} lines" for file in _files(step)]
    return "\n".join(lines)
