"""What is said of a ladder's rows: its end against the library, the pattern of V1 to V4, orders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from ladder_results import LIMITS, timed, write_results

from fusedops.bench.measurement import Failed
from fusedops.ladders import built, load_ladder, specified
from fusedops.ladders.ceilings import float32_flops_per_s
from fusedops.ladders.counters import Counters
from fusedops.ladders.figure_table import figure_tables
from fusedops.ladders.figures import FigureResult, FigureRow
from fusedops.ladders.findings import against_library, findings_of, record_findings
from fusedops.ladders.histogram import PRIVATE_THREADS, private_blocks
from fusedops.ladders.model import Ladder
from fusedops.ladders.pages import html_page, markdown
from fusedops.ladders.report import ResultRow, read_report
from fusedops.ladders.walls import Wall

TRANSPOSE, GEMM = load_ladder("transpose"), load_ladder("gemm")
(SQUARE,) = (problem.name for problem in TRANSPOSE.problems(TRANSPOSE.size))


def rows(us: Mapping[str, float], **counters: Counters) -> dict[str, ResultRow]:
    return {
        f"transpose.{name}": ResultRow(replace(timed(value), median_us=value), counters.get(name))
        for name, value in us.items()
    }


# Against the library


def own_and_library(ladder: Ladder) -> tuple[str, str]:
    last = [step.id for step in ladder.steps if step.kernels][-1]
    return last, next(step.id for step in ladder.steps if step.operation)


@pytest.mark.parametrize("name", ["transpose", "reduce", "histogram"])
@pytest.mark.parametrize(("us", "is_close"), [(101.9, True), (102.1, False), (50.0, True)])
def test_the_last_own_step_is_held_to_the_library(name: str, us: float, is_close: bool) -> None:
    ladder = load_ladder(name)
    last, library = own_and_library(ladder)
    problem = ladder.problems(ladder.size)[0].name
    found = {last: ResultRow(replace(timed(1.0), median_us=us))}
    found[library] = ResultRow(replace(timed(1.0), median_us=100.0))
    (line,) = against_library(ladder, {problem: found})
    assert (line.step, line.library) == (last, library)
    assert line.ratio == pytest.approx(us / 100)
    assert line.is_close is is_close
    said = findings_of(ladder, {problem: found})[-1]
    assert (f"not so for {last} on {problem}" in said.text) is not is_close
    assert said.lines[0][-2:] == (f"{us / 100:.3f}", "yes" if is_close else "no")


def test_a_ladder_that_ends_with_the_library_says_so() -> None:
    kinds = {problem.kind: problem.name for problem in GEMM.problems(GEMM.size)}
    row = ResultRow(timed(200.0))
    found = {name: {"gemm.v5": row, "gemm.v7": row} for name in kinds.values()}
    del found[kinds["float32"]]["gemm.v7"]
    lines = against_library(GEMM, found)
    # In float32 no step calls the library.
    assert [line.problem for line in lines] == [
        kinds["bfloat16"],
        kinds["bfloat16, bias and GELU"],
    ]
    assert {(line.step, line.library, line.ratio) for line in lines} == {
        ("gemm.v7", "gemm.v7", 1.0)
    }
    assert "gemm.v7 is the library's kernel itself" in findings_of(GEMM, found)[-1].text


def test_without_both_times_nothing_is_said_of_the_library() -> None:
    failed = {"transpose.v8": ResultRow(Failed("no")), "transpose.library": ResultRow(timed(9.0))}
    assert against_library(TRANSPOSE, {SQUARE: failed}) == []
    earlier = {**failed, "transpose.v7": ResultRow(timed(9.0))}
    assert against_library(TRANSPOSE, {SQUARE: earlier})[0].step == "transpose.v7"


def test_what_is_said_stands_on_the_pages_and_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(path)
    report = read_report(path)
    record_findings(path, [TRANSPOSE], report.ladders)
    said = json.loads(path.read_text("utf-8"))["findings"]
    page, text = html_page(report, ["transpose"]), markdown(report, ["transpose"])
    found = findings_of(TRANSPOSE, report.ladders["transpose"])
    assert [each["title"] for each in said["transpose"]] == [each.title for each in found]
    for each in said["transpose"]:
        assert f"<h3>{each['title']}</h3>" in page
        assert f"### {each['title']}" in text
    assert read_report(path) == report


# V1 to V4


def test_the_pattern_of_the_first_transposes_comes_from_their_counters() -> None:
    counted = {
        "v1": Counters("k", sectors=134.0, ideal_sectors=17.0),
        "v2": Counters("k", sectors=75.0, ideal_sectors=17.0),
        "v3": Counters(
            "k", sectors=17.0, ideal_sectors=17.0, shared_loads=2.0, shared_load_wavefronts=65.0
        ),
        "v4": Counters(
            "k", sectors=17.0, ideal_sectors=17.0, shared_loads=8.0, shared_load_wavefronts=8.0
        ),
    }
    us = {"v1": 1500.0, "v2": 1000.0, "v3": 160.0, "v4": 150.0}
    (found,) = findings_of(TRANSPOSE, {SQUARE: rows(us, **counted)})
    assert "V1 takes 10.0 times V4" in found.text
    assert "Excess sectors go from 117 over 58 to 0." in found.text
    assert "takes 32.5 turns in V3, 1.0 in V4" in found.text
    assert found.lines[0][:5] == ("transpose.v1", "1500.00", "10.0", "117", "87%")


def test_a_pattern_without_counters_or_times_is_no_pattern() -> None:
    (found,) = findings_of(TRANSPOSE, {SQUARE: rows({"v1": 1500.0, "v4": 150.0})})
    assert "V1 takes 10.0 times V4" in found.text
    assert "Counters were not read for all four." in found.text
    (found,) = findings_of(TRANSPOSE, {SQUARE: rows({"v1": 1500.0})})
    assert "V1 and V4 have no times yet" in found.text
    assert found.lines[3][1:4] == ("-", "-", "-")


# Orders


def test_pages_keep_the_catalogs_order_whatever_the_file_sorts(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(path)
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")), sort_keys=True), "utf-8")
    report = read_report(path)
    pages = (
        (markdown(report, built()), "### {}\n", "| {} |"),
        (html_page(report, built()), "<h3>{}</h3>", "<td>{}</td>"),
    )
    for page, heading, cell in pages:
        for ladder in map(load_ladder, built()):
            titles = [problem.name for problem in ladder.problems(ladder.size)]
            starts = [page.index(heading.format(title)) for title in titles]
            assert starts == sorted(starts)
            for start, title in zip(starts, titles, strict=True):
                steps = ladder.steps_on(title)
                places = [page.index(cell.format(step.id), start) for step in steps]
                assert places == sorted(places)


@pytest.mark.parametrize("figure", load_ladder("small").figures, ids=lambda figure: figure.id)
def test_panels_are_shown_in_the_figures_order(figure) -> None:  # type: ignore[no-untyped-def]
    names = [panel.name for panel in figure.panels]
    result = FigureResult({name: (FigureRow("s", "1"),) for name in sorted(names, reverse=True)})
    tables = figure_tables(figure, result)
    assert [table.panel.name for table in tables] == names
    assert all(table.rows for table in tables)


def test_the_cases_of_histograms_go_from_even_to_uneven() -> None:
    cases = [problem.name.partition(", ")[2] for problem in load_ladder("histogram").problems(64)]
    assert cases == ["uniform", "skewed", "one value"]


def test_the_last_transpose_is_the_one_without_conflicts() -> None:
    titles = list(specified()["transpose"].steps.values())
    assert [title.split()[0] for title in titles[-5:]] == [
        *("tiles", "persistent", "16", "vectors", "fusedops.transpose")
    ]


# Ceilings and launches


def test_the_float32_peak_counts_lanes_and_clock() -> None:
    assert float32_flops_per_s(132, (9, 0), 1.98e9) == pytest.approx(66.9e12, rel=1e-3)
    assert float32_flops_per_s(108, (8, 0), 1.41e9) == pytest.approx(19.5e12, rel=1e-3)
    assert LIMITS.under(Wall.FMA_PIPE).bf16_flops_per_s == LIMITS.float32_flops_per_s
    assert LIMITS.under(Wall.TENSOR_PIPE) == LIMITS


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("count", [0, 1, 15, 4099, 25_158_912, 25_158_913, 2**31, 2**32 + 7])
def test_no_private_counter_can_overflow(count: int, sms: int) -> None:
    blocks = private_blocks(count, sms)
    threads = blocks * PRIVATE_THREADS
    assert blocks >= sms
    assert 16 * -(-(count // 16) // threads) + 1 < 2**16
