"""Ladders without a GPU: ids, lessons, kernels that compile, walls, pages, the command."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_results import LIMITS, timed, write_results

from fusedops.bench.measurement import Absent, Failed
from fusedops.bench.roofline import Traffic
from fusedops.cli import main
from fusedops.errors import ConfigError, LoadError, ShapeError
from fusedops.jit.nvrtc import CUBIN, compile_program, program_key
from fusedops.jit.probe import PROBE
from fusedops.jit.resources import csrc_dir
from fusedops.ladders import built, load_ladder, specified
from fusedops.ladders import model as ladder_model
from fusedops.ladders import report as ladder_report
from fusedops.ladders.counters import Counters
from fusedops.ladders.model import LadderKernel, Lesson, Step, lesson_of
from fusedops.ladders.pages import explain, html_page, markdown, not_built
from fusedops.ladders.reduce import passes
from fusedops.ladders.report import Report, committed_reports, read_report
from fusedops.ladders.runner import select_steps, tasks_of
from fusedops.ladders.transpose import LADDER as TRANSPOSE
from fusedops.ladders.walls import Wall, wall_of

STEPS = [step for name in built() for step in load_ladder(name).steps]
RUNGS = [rung for name in built() for rung in load_ladder(name).rungs]
KERNELS = sorted({kernel for rung in RUNGS for kernel in rung.kernels}, key=lambda k: k.name)
STEPPED = [name for name in built() if load_ladder(name).steps]
needs_wheels = pytest.mark.skipif(
    program_key(PROBE, "sm_90a").missing_tools != (),
    reason='needs NVRTC and the CUDA headers: pip install "fusedops[cuda]"',
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPU")

RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Runs ``fusedops ladder`` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(("ladder", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def committed(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """The checkout's results are those below ``root``."""
    monkeypatch.setattr(ladder_report, "repository_root", lambda: root)


# Steps


def test_three_ladders_are_built_and_all_five_are_specified() -> None:
    assert tuple(specified()) == ("transpose", "reduce", "gemm", "histogram", "small")
    assert set(built()) >= {"transpose", "reduce", "histogram"}
    assert len(not_built()) == len(specified()) - len(built())


@pytest.mark.parametrize("name", built())
def test_a_ladder_has_exactly_the_steps_that_are_specified(name: str) -> None:
    wanted = specified()[name].steps
    found = {rung.id: rung.title for rung in load_ladder(name).rungs}
    assert list(found.items()) == list(wanted.items())
    assert all(step.startswith(f"{name}.") for step in found)


@pytest.mark.parametrize("name", ["gemm2", ""])
def test_an_unknown_ladder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; accepted are transpose"):
        load_ladder(name)


def test_every_kernel_of_the_folder_is_a_step() -> None:
    files = {f"ladders/{path.name}" for path in (csrc_dir() / "ladders").glob("*.cu")}
    assert {kernel.file for kernel in KERNELS} == files


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
def test_a_lesson_names_idea_wall_and_lever(step: Step) -> None:
    lesson = step.lesson
    assert min(map(len, (lesson.idea, lesson.wall, lesson.lever))) > 10
    assert lesson.expected in Wall
    assert bool(step.kernels or step.modules) == (lesson.lines > 0)
    # Own code, a peer, the library's operation, or a record: each step is exactly one of them.
    kinds = (step.kernels, step.peer, step.operation, step.recorded)
    assert list(map(bool, kinds)).count(True) == 1


def test_a_file_without_its_lesson_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some.cu").write_text("// Idea: one\n// Wall: memory\n\nint x;\n", "utf-8")
    monkeypatch.setattr(ladder_model, "csrc_dir", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"csrc/some\.cu: its first comment lacks Lever:"):
        lesson_of("some.cu")
    with pytest.raises(ConfigError, match="begins with no name; accepted are launch, memory"):
        _ = Lesson("a", "the moon", "b").expected


def test_the_code_of_headers_beside_a_kernel_counts() -> None:
    lines = {step.id: step.lesson.lines for step in STEPS}
    assert lines["transpose.v2"] < lines["transpose.v1"] < lines["transpose.v4"]
    assert lines["transpose.v5"] > 60


def test_sources_follow_the_file_or_the_installed_versions() -> None:
    steps = {step.id: step for step in STEPS}
    own, peer = steps["transpose.v1"], steps["transpose.torch"]
    assert own.sources({"torch": "1"}) == own.sources({"torch": "2"})
    assert peer.sources({"torch": "1"}) != peer.sources({"torch": "2"})
    assert own.sources({}) != replace(own, files=("ladders/transpose_v2.cu",)).sources({})


def test_a_sum_takes_passes_until_one_is_left() -> None:
    launches = passes(torch.zeros(70_000), lambda count: -(-count // 256))
    assert [(count, blocks) for _, _, count, blocks in launches] == [
        (70_000, 274),
        (274, 2),
        (2, 1),
    ]
    assert launches[1][0] is launches[0][1]


def test_a_tile_step_refuses_what_it_has_no_tiles_for() -> None:
    problem = TRANSPOSE.problems(40)[0]
    buffers = problem.make(torch.Generator().manual_seed(0))
    steps = {step.id: step for step in TRANSPOSE.steps}
    for name in ("transpose.v3", "transpose.v7"):
        with pytest.raises(ShapeError, match=r"multiples of (32|64)"):
            steps[name].run(buffers)


@pytest.mark.parametrize("name", STEPPED)
def test_a_peer_solves_the_problems_and_a_wrong_answer_is_seen(name: str) -> None:
    ladder = load_ladder(name)
    step = next(each for each in ladder.steps if each.peer == "torch")
    for problem in ladder.problems({"transpose": 64, "gemm": 128}.get(name, 4096)):
        buffers = problem.make(torch.Generator().manual_seed(1))
        result = step.run(buffers)
        results = buffers.outputs if result is None else (result,)
        check = step.check_of(problem)
        assert check(results, buffers) is None  # type: ignore[arg-type]
        assert check((results[0] + 1000,), buffers) is not None  # type: ignore[operator]


# Kernels


@needs_wheels
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_compiles_for_hopper(kernel: LadderKernel, tmp_path: Path) -> None:
    names = compile_program(kernel.program, "sm_90a", tmp_path)
    assert len(names) == 1
    assert (tmp_path / CUBIN).read_bytes().startswith(b"\x7fELF")


def disassembled(name: str, folder: Path) -> str:
    """SASS of a kernel for sm_90a."""
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    tools = [Path(place) / "cu13" / "bin" / "nvdisasm" for place in places or ()]
    tool = next((path for path in tools if path.is_file()), shutil.which("nvdisasm"))
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    kernel = next(each for each in KERNELS if each.name == name)
    compile_program(kernel.program, "sm_90a", folder)
    command = [str(tool), str(folder / CUBIN)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_wheels
def test_the_padding_takes_the_wide_shared_load_apart(tmp_path: Path) -> None:
    # 8192 x 8192 elements by 32 lanes of 4 each: the 524,288 shared loads of the lesson.
    assert "LDS.128" in disassembled("transpose_v3", tmp_path)
    assert "LDS.128" not in disassembled("transpose_v4", tmp_path)


@needs_wheels
def test_tiles_come_by_the_copy_engine_and_no_kernel_spills(tmp_path: Path) -> None:
    for name in ("transpose_v5", "transpose_v6"):
        sass = disassembled(name, tmp_path)
        assert "UTMALDG" in sass
        assert not re.search(r"\b(LDL|STL)\b", sass)


def instructions(sass: str, pattern: str) -> int:
    return len(re.findall(rf"\s{pattern}\b", sass))


@needs_wheels
def test_additions_of_one_are_those_that_hardware_joins(tmp_path: Path) -> None:
    sass = disassembled("histogram_v3", tmp_path)
    assert instructions(sass, r"ATOMS\.POPC\.INC\.32") >= 16
    assert not instructions(sass, r"ATOMS\.ADD")
    # Of other numbers, as the runs of sorted values have them, it joins none.
    assert instructions(disassembled("histogram_v6", tmp_path), r"ATOMS\.ADD")


@needs_wheels
def test_private_counters_take_a_load_and_a_store_a_byte(tmp_path: Path) -> None:
    sass = disassembled("histogram_v7", tmp_path)
    # Four vectors of 16 bytes, and one of the tail; no atomics and no spills.
    assert instructions(sass, r"LDS\.U16") == instructions(sass, r"STS\.U16") == 65
    assert instructions(sass, r"LDG\.E\.NA\.128\.CONSTANT") == 8
    assert not instructions(sass, "(ATOMS|LDL|STL)")
    # From a byte to the address of its counter, in a row of 768 bytes, it is one multiply-add.
    assert len(re.findall(r"\sIMAD R\d+, [^;]*0x300, R", sass)) >= 65


@needs_wheels
def test_sums_keep_four_loads_under_way_and_all_blocks_of_the_grid(tmp_path: Path) -> None:
    for name in ("reduce_v7", "reduce_v8"):
        sass = disassembled(name, tmp_path)
        loads = [sass.index(found) for found in re.findall(r"LDG\.E\.NA\.128.*", sass)]
        assert len(loads) == 4
        assert not instructions(sass[loads[0] : loads[-1]], "FADD")
        # Eight blocks of 256 threads a multiprocessor leave 32 registers, which are enough.
        assert not instructions(sass, "(LDL|STL)")
    # The second launch of reduce_v8 waits for the first one, whose blocks let it start.
    assert instructions(sass, "PREEXIT") == instructions(sass, "ACQBULK") == 1


# Walls


TRAFFIC = Traffic(read_bytes=4e8, write_bytes=4e8)
OPERATIONS = 1e8


def named_wall(us: float, **counted: float) -> Wall | None:
    counters = Counters("k", **counted) if counted else None
    return wall_of(timed(us), TRAFFIC, OPERATIONS, LIMITS, counters)


@pytest.mark.parametrize(
    ("us", "counted", "expected"),
    [
        (2.0, {}, Wall.LAUNCH),
        (250.0, {}, Wall.MEMORY),
        (280.0, {"sectors": 100.0, "ideal_sectors": 22.0}, Wall.MEMORY),
        (300.0, {"sectors": 100.0, "ideal_sectors": 22.0}, Wall.EXCESS_SECTORS),
        (900.0, {}, None),
        (900.0, {"sectors": 100.0, "ideal_sectors": 22.0}, Wall.EXCESS_SECTORS),
        (900.0, {"sectors": 100.0, "ideal_sectors": 90.0}, Wall.LATENCY),
        (
            900.0,
            {
                "bank_conflicts": 60.0,
                "shared_load_wavefronts": 80.0,
                "shared_store_wavefronts": 20.0,
            },
            Wall.BANK_CONFLICTS,
        ),
        (900.0, {"active_threads": 12.0}, Wall.DIVERGENCE),
        (900.0, {"active_threads": 12.0, "issue_slots_pct": 80.0}, Wall.DIVERGENCE),
        (900.0, {"active_threads": 12.0, "issue_slots_pct": 40.0}, Wall.LATENCY),
        (900.0, {"active_threads": 30.0}, Wall.LATENCY),
        (900.0, {"global_atomics": 1e8 / 32}, Wall.GLOBAL_ATOMICS),
        (900.0, {"shared_atomics": 1e8 / 32, "global_atomics": 8192.0}, Wall.SHARED_ATOMICS),
        (900.0, {"shared_atomics": 1e8 / 32, "load_units_pct": 90.0}, Wall.SHARED_ATOMICS),
        (900.0, {"shared_atomics": 1e8 / 32, "load_units_pct": 17.0}, Wall.LATENCY),
        (900.0, {"tensor_pipe_pct": 75.0}, Wall.TENSOR_PIPE),
        (
            900.0,
            {"sectors": 100.0, "ideal_sectors": 22.0, "active_threads": 8.0},
            Wall.EXCESS_SECTORS,
        ),
    ],
)
def test_the_wall_follows_from_time_and_counters(
    us: float, counted: dict[str, float], expected: Wall | None
) -> None:
    assert named_wall(us, **counted) is expected


# Choosing steps


def test_steps_are_chosen_by_pattern() -> None:
    ladders = [load_ladder(name) for name in built()]
    chosen = select_steps(ladders, "*.v[12]")
    assert [step.id for step in chosen["reduce"]] == ["reduce.v1", "reduce.v2"]
    with pytest.raises(ConfigError, match=r"--steps v9: no step's id matches; .* transpose\.v1"):
        select_steps(ladders, "v9")
    assert len(tasks_of(["histogram"])) == 3 * len(specified()["histogram"].steps)


# Pages


class Ids(html.parser.HTMLParser):
    """Ids of the page's steps, and what it would load from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("class") == "step":
            self.steps.append(values["id"] or "")
        self.outside += [f"{tag} {name}" for name in ("src", "href") if name in values]
        if tag not in ("meta", "line", "rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is left open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_every_step_once_and_needs_no_other_file(tmp_path: Path) -> None:
    write_results(tmp_path / "ladders.json")
    report = read_report(tmp_path / "ladders.json")
    page = html_page(report, built())
    found = Ids(page)
    assert found.steps == [step for name in built() for step in specified()[name].steps]
    assert found.outside == []
    assert found.open == []
    assert "<script" not in page
    assert "http" not in page
    assert page.count("<svg") == sum(map(len, report.ladders.values()))
    assert "ncu is &lt;not&gt; here" in page
    for line in not_built():
        assert line in page


def test_a_plot_shows_every_timed_step(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json", other={"transpose.v3": Failed("wrong | result")})
    page = html_page(read_report(tmp_path / "r.json"), ["transpose"])
    (svg,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    labels = re.findall(r'class="start"[^>]*>([^<]+)<', svg)
    assert sorted(labels) == sorted(set(specified()["transpose"].steps) - {"transpose.v3"})
    places = sorted(float(y) for y in re.findall(r'class="start" x="[^"]*" y="([^"]+)"', svg))
    assert all(b - a > 12 for a, b in itertools.pairwise(places))
    assert "read and write 3.50 TB/s" in svg


def test_markdown_has_every_step_and_its_losses(tmp_path: Path) -> None:
    lost = {
        "reduce.cub": Absent("the package cuda-cccl is not installed"),
        "reduce.v2": Failed("a | b"),
    }
    write_results(tmp_path / "r.json", other=lost)
    text = markdown(read_report(tmp_path / "r.json"), built())
    for name in built():
        for step in specified()[name].steps:
            assert f"- **{step}** (" in text
    assert "| reduce.cub | absent: the package cuda-cccl is not installed |" in text
    assert "| reduce.v2 | failed: a \\| b |" in text
    widths = {
        line.replace("\\|", "").count("|")
        for line in text.splitlines()
        if line.startswith("| reduce.v")
    }
    assert widths == {15}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("transpose", "268.4 MB read and 268.4 MB written for 6.711e+07"),
        # 1.07 GB at 4 TB/s, and 137 GFLOP at 700 TFLOP/s.
        ("reduce", "0.25 additions a byte. The floor is 268.4 us, by memory."),
        # Float32 is held to the 70 TFLOP/s of the CUDA cores.
        ("gemm", "682.7 FLOP a byte, above the ridge point of 20. The floor is 1963.4 us, by the"),
        ("gemm", "1365 FLOP a byte, above the ridge point of 200. The floor is 196.3 us, by the"),
    ],
)
def test_a_problem_is_classified_first(tmp_path: Path, name: str, part: str) -> None:
    write_results(tmp_path / "r.json")
    report = read_report(tmp_path / "r.json")
    assert part in markdown(report, [name])
    assert part in html_page(report, [name])


def test_steps_that_did_not_run_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_results(path)
    data = json.loads(path.read_text("utf-8"))
    for rows in data["ladders"]["transpose"].values():
        del rows["transpose.v4"]
    path.write_text(json.dumps(data), "utf-8")
    assert "| transpose.v4 | not run |" in markdown(read_report(path), ["transpose"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not readable as JSON"),
        ("{}", "no results there"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', "schema 1; this version reads 2"),
        ('{"schema": 2, "ladders": {}}', "incomplete"),
    ],
)
def test_damaged_results_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "ladders.json"
    path.write_text(text, "utf-8")
    with pytest.raises(LoadError, match=match):
        read_report(path)


# The command


def test_explain_tells_every_step(cli: RunCommand) -> None:
    code, out, err = cli("--explain")
    assert (code, err) == (0, "")
    for name in built():
        assert explain(load_ladder(name)) in out
        for step, title in specified()[name].steps.items():
            assert f"{step}: {title}" in out
    assert "csrc/ladders/transpose_v3.cu" in out
    for line in not_built():
        assert line in out


def test_explain_of_one_ladder_is_about_that_one(cli: RunCommand) -> None:
    _, out, _ = cli("Reduce", "--explain")
    assert "reduce.v1" in out
    assert "transpose.v1" not in out


def test_explain_of_some_steps_is_about_those(cli: RunCommand) -> None:
    _, out, _ = cli("--explain", "--steps", "*.v3")
    assert "reduce.v3" in out
    assert "transpose.v3" in out
    assert "reduce.v1:" not in out
    assert "small." not in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("nothing",), "ladder 'nothing' is unknown; accepted are transpose, reduce"),
        (("nothing",), "histogram, small, all."),
        (("--minutes", "-1"), "--minutes -1: accepted are numbers from 0"),
        (("--out", __file__), "is a file; accepted is a folder"),
        (("--steps", "v9"), "--steps v9"),
        (("--what",), "--what"),
    ],
)
def test_wrong_usage_is_one_line(cli: RunCommand, arguments: tuple[str, ...], part: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


@needs_no_gpu
def test_without_a_gpu_and_results_it_says_what_helps(
    cli: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(monkeypatch, tmp_path)
    code, out, err = cli("--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "sees no CUDA device" in err
    assert "--explain" in err
    assert not (tmp_path / "out").exists()


@needs_no_gpu
def test_without_a_gpu_the_newest_committed_results_are_shown(
    cli: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results(tmp_path / "reports" / "a" / "ladders.json", date="2026-03-04")
    write_results(tmp_path / "reports" / "b" / "ladders.json", date="2026-02-01")
    committed(monkeypatch, tmp_path)
    assert len(committed_reports()) == 2
    out_folder = tmp_path / "out"
    code, out, err = cli("transpose", "--out", str(out_folder))
    assert (code, err) == (0, "")
    assert "no CUDA device here: results of test GPU, committed, read on 2026-03-04" in out
    assert "transpose.v8" in out
    assert "The last own step may take 2% longer than the library's kernel" in out
    assert "reduce.v1" not in out
    assert "2026-03-04" in (out_folder / "ladders.md").read_text("utf-8")
    assert "transpose.v8" in (out_folder / "ladders.html").read_text("utf-8")


@needs_no_gpu
def test_a_failed_step_is_exit_code_1(
    cli: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reports" / "a" / "ladders.json"
    write_results(path, other={"transpose.v1": Failed("element (0, 0) is wrong")})
    committed(monkeypatch, tmp_path)
    code, out, _ = cli("transpose", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "element (0, 0) is wrong" in out


def test_a_run_that_was_cut_off_names_what_is_left(
    cli: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results(tmp_path / "r.json")
    whole = read_report(tmp_path / "r.json")
    rows = {
        problem: {step: row for step, row in each.items() if step != "transpose.v4"}
        for problem, each in whole.ladders["transpose"].items()
    }
    report = replace(whole, ladders={"transpose": rows})
    deadlines: list[float] = []

    def run(*arguments: Any) -> Report:
        deadlines.append(arguments[-1])
        return report

    monkeypatch.setattr(sys.modules["fusedops.cli.ladder"], "_run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = time.monotonic()
    code, out, _ = cli("transpose", "--minutes", "2", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "not begun: transpose.v4; run again" in out
    assert before + 120 <= deadlines[0] <= time.monotonic() + 120


def test_help_names_every_ladder(cli: RunCommand) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    assert all(name in out for name in (*specified(), "all"))
