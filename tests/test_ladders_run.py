"""Running ladders: rows that resume, and counters by a program that stands in for ncu."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ladder_results import ENVIRONMENT, LIMITS
from torch import Tensor

from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Absent, Failed, Measurement
from fusedops.bench.oracles import bitwise
from fusedops.bench.precompile import H200, Target
from fusedops.bench.roofline import Traffic
from fusedops.bench.timer import Protocol
from fusedops.errors import BuildError
from fusedops.ladders import load_ladder
from fusedops.ladders import ncu as ladder_ncu
from fusedops.ladders.counters import METRICS, Counters, by_marker, parse_raw_csv
from fusedops.ladders.model import Ladder, Lesson, Problem, Step
from fusedops.ladders.ncu import (
    Asked,
    CounterReader,
    asked_from_json,
    asked_to_json,
    ncu_command,
    read_counters,
)
from fusedops.ladders.runner import NOT_READ, TIME_IS_UP, Runner, Task, left_of, tasks_of
from fusedops.problem import GemmProblem

QUICK = Protocol(
    samples=1, min_samples=1, min_window_us=0.001, settle_rounds=1, settle_min_s=0, settle_max_s=0
)
LESSON = Lesson("an idea", "memory.", "a lever")

# Made up, in the form of `ncu --csv --page raw`.
SAMPLE = """==PROF== Connected to process 71 (python3.11)
==PROF== Profiling "scale": 0%....50%....100% - 4 passes
"ID","Process ID","Kernel Name","Grid Size","gpu__time_duration.sum",\
"memory_l2_theoretical_sectors_global","memory_l2_theoretical_sectors_global_ideal",\
"launch__registers_per_thread","dram__bytes_read.sum","dram__bytes_write.sum",\
"smsp__inst_executed_op_shared_ld.sum","l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
"","","","","ns","sector","sector","register/thread","byte","byte","inst",""
"0","71","void fusedops::scale<float>(const T1 *)","(1, 1, 1)","1,500","2","2","16","32","0","0","0"
"1","71","transpose_v1(const float *, float *)","(8192, 1, 1)","3,650,000","134,217,728",\
"16,777,216","22","268,435,456","268,435,456","0","0"
"2","71","void fusedops::scale<float>(const T1 *)","(1, 1, 1)","1,400","2","2","16","32","0","0","0"
"3","71","fill(float *)","(1, 1, 1)","2,000","4","4","12","0","0","0","0"
"4","71","transpose_v3(const float *, float *)","(256, 256, 1)","312,000","16,777,216",\
"16,777,216","24","268,435,456","268,435,456","524,288","n/a"
"""


def problem_of(size: int) -> Problem:
    def make(generator: torch.Generator) -> Buffers:
        return Buffers((torch.randn(size, generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0] + 1)

    return Problem("small", make, check, Traffic(4.0 * size, 4.0 * size), size, "additions")


def fake_ladder(**ran: list[int]) -> Ladder:
    """A ladder of torch operations on the CPU; each of ``ran`` notes its calls."""

    def step(name: str, calls: list[int]) -> Step:
        def run(buffers: Buffers) -> Tensor:
            calls.append(1)
            added = 2 if name == "wrong" else 1
            return buffers.inputs[0] + added

        return Step(f"fake.{name}", name, LESSON, run, peer="torch")

    steps = tuple(step(name, calls) for name, calls in ran.items())
    return Ladder("fake", "Fake", "", 64, lambda size: (problem_of(size),), steps)


def run(
    ladder: Ladder,
    folder: Path,
    read: CounterReader | None = None,
    force: bool = False,
    **environment: str,
) -> tuple[Runner, dict[str, dict[str, object]]]:
    """Run all steps; the runner, and the rows as they stand in the file."""
    runner = Runner(
        folder,
        replace(ENVIRONMENT, **environment),
        torch.device("cpu"),
        QUICK,
        force,
        read,
        LIMITS,
    )
    tasks = [Task(ladder, each, step) for each in ladder.problems(64) for step in ladder.steps]
    seen: list[tuple[str, int]] = []
    runner.run(tasks, lambda what, rows: seen.append((what, rows)))
    assert [what for what, rows in seen if rows] == [task.step.id for task in tasks]
    assert sum(rows for _, rows in seen) == len(tasks)
    if read is None:
        assert not [what for what, _ in seen if what.startswith("counters")]
    rows = json.loads(runner.path.read_text("utf-8"))["ladders"]["fake"]["small"]
    return runner, rows


def test_a_row_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    _, rows = run(fake_ladder(right=[], wrong=[]), tmp_path)
    right, wrong = rows["fake.right"], rows["fake.wrong"]
    assert right["outcome"]["median_us"] > 0  # type: ignore[index]
    assert right["counters_absent"] == NOT_READ
    assert {"of_ceiling", "bytes_per_s", "operations_per_s", "intensity", "wall"} <= right.keys()
    assert "expected" in wrong["outcome"]["failed"]  # type: ignore[index]
    assert "wall" not in wrong


def test_a_second_run_only_runs_what_is_missing(tmp_path: Path) -> None:
    first: list[int] = []
    run(fake_ladder(first=first), tmp_path)
    before = len(first)
    second: list[int] = []
    _, rows = run(fake_ladder(first=first, second=second), tmp_path)
    assert len(first) == before
    assert second
    assert set(rows) == {"fake.first", "fake.second"}


def test_force_another_version_and_a_failed_row_run_again(tmp_path: Path) -> None:
    right: list[int] = []
    wrong: list[int] = []
    ladder = fake_ladder(right=right, wrong=wrong)
    counts = []
    for more in ({}, {"force": True}, {"versions": {"torch": "9"}}):
        run(ladder, tmp_path, **more)  # type: ignore[arg-type]
        counts.append((len(right), len(wrong)))
    assert counts[0] < counts[1] < counts[2]
    assert counts[0][1] < counts[1][1] < counts[2][1]


def test_results_of_another_gpu_are_not_mixed_in(tmp_path: Path) -> None:
    run(fake_ladder(first=[]), tmp_path)
    _, rows = run(fake_ladder(second=[]), tmp_path, gpu="another GPU")
    assert set(rows) == {"fake.second"}


def test_counters_are_read_once_for_a_problem_and_kept(tmp_path: Path) -> None:
    asked: list[Asked] = []

    def read(wanted: Sequence[Asked], limit_s: float | None) -> list[dict[str, Counters]]:
        asked.extend(wanted)
        return [{"fake.a": Counters("k", registers=30.0, dram_bytes=64.0)}]

    ladder = fake_ladder(a=[], b=[], wrong=[])
    _, rows = run(ladder, tmp_path, read)
    assert asked == [Asked("fake", "small", ("fake.a", "fake.b"))]
    assert rows["fake.a"]["counters"] == {"kernel": "k", "registers": 30.0, "dram_bytes": 64.0}
    assert rows["fake.a"]["intensity"] == 1.0
    assert "ncu saw no kernel of this step" in str(rows["fake.b"]["counters_absent"])
    found: dict[str, Counters] = {"fake.b": Counters("k")}
    _, rows = run(ladder, tmp_path, lambda wanted, limit_s: asked.extend(wanted) or [found])  # type: ignore[func-returns-value]
    assert asked[1:] == [Asked("fake", "small", ("fake.b",))]
    assert "counters_absent" not in rows["fake.b"]


def again(ladder: Ladder) -> Ladder:
    """The ladder with its problem twice."""
    return replace(
        ladder,
        problems=lambda size: (problem_of(size), replace(problem_of(size), name="again")),
    )


def test_the_problems_are_asked_for_together(tmp_path: Path) -> None:
    calls: list[list[Asked]] = []

    def read(wanted: Sequence[Asked], limit_s: float | None) -> list[dict[str, Counters]] | str:
        calls.append(list(wanted))
        return [{"fake.a": Counters(one.problem)} for one in wanted]

    runner, _ = run(again(fake_ladder(a=[])), tmp_path, read)
    assert calls == [[Asked("fake", name, ("fake.a",)) for name in ("small", "again")]]
    rows = json.loads(runner.path.read_text("utf-8"))["ladders"]["fake"]
    assert rows["small"]["fake.a"]["counters"] == {"kernel": "small"}
    assert rows["again"]["fake.a"]["counters"] == {"kernel": "again"}


def test_a_refusal_holds_for_all(tmp_path: Path) -> None:
    asked: list[str] = []

    def refuse(wanted: Sequence[Asked], limit_s: float | None) -> str:
        asked.extend(one.problem for one in wanted)
        return "no permission"

    _, rows = run(again(fake_ladder(a=[])), tmp_path, refuse)
    assert asked == ["small", "again"]
    assert rows["fake.a"]["counters_absent"] == "no permission"


def climb(
    ladder: Ladder, folder: Path, deadline: float, read: CounterReader | None = None
) -> tuple[list[str], list[str], dict[str, dict[str, object]]]:
    """A run by a clock that gains a second a look: what was begun, what is left, the rows."""
    ticks = iter(range(1000))
    runner = Runner(
        folder,
        ENVIRONMENT,
        torch.device("cpu"),
        QUICK,
        read=read,
        limits=LIMITS,
        deadline=deadline,
        clock=lambda: float(next(ticks)),
    )
    tasks = [Task(ladder, each, step) for each in ladder.problems(64) for step in ladder.steps]
    begun: list[str] = []
    report = runner.run(tasks, lambda what, rows: begun.append(what) if rows else None)
    rows = json.loads(runner.path.read_text("utf-8"))["ladders"]
    return begun, left_of(tasks, report), rows.get("fake", {}).get("small", {})


def test_nothing_is_begun_after_the_deadline_and_a_second_run_goes_on(tmp_path: Path) -> None:
    calls: list[int] = []
    ladder = fake_ladder(a=calls, b=[], c=[])
    assert climb(ladder, tmp_path, 0) == ([], ["fake.a", "fake.b", "fake.c"], {})
    begun, left, rows = climb(ladder, tmp_path, 2)
    assert (begun, left) == (["fake.a", "fake.b"], ["fake.c"])
    # What was timed has its rates, and says why it has no counters.
    assert "of_ceiling" in rows["fake.a"]
    before = len(calls)
    begun, left, _ = climb(ladder, tmp_path, 1)
    assert (begun, left) == (["fake.a", "fake.b", "fake.c"], [])
    assert len(calls) == before


def test_counters_get_what_is_left_of_the_time(tmp_path: Path) -> None:
    limits: list[float | None] = []

    def read(wanted: Sequence[Asked], limit_s: float | None) -> list[dict[str, Counters]]:
        limits.append(limit_s)
        return [{} for _ in wanted]

    _, _, rows = climb(fake_ladder(a=[]), tmp_path / "short", 20, read)
    assert rows["fake.a"]["counters_absent"] == TIME_IS_UP
    climb(fake_ladder(a=[]), tmp_path / "long", 100, read)
    assert limits == [99.0]


def test_a_step_that_breaks_the_device_ends_the_run_and_comes_last_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusedops.ladders.runner._answers", lambda device: False)
    ladder = fake_ladder(wrong=[], right=[])
    begun, left, rows = climb(ladder, tmp_path, 100)
    assert (begun, left) == ([], ["fake.right"])
    assert "failed" in rows["fake.wrong"]["outcome"]  # type: ignore[operator]
    begun, left, rows = climb(ladder, tmp_path, 100)
    assert (begun, left) == (["fake.right"], [])
    assert "median_us" in rows["fake.right"]["outcome"]  # type: ignore[operator]


def test_products_of_the_library_are_compiled_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[GemmProblem] = []

    def note(problems: Sequence[GemmProblem], arch: str) -> None:
        compiled.extend(problems)
        raise BuildError("what fails is left to the step that asks for it")

    monkeypatch.setattr("fusedops.ladders.runner.precompile", note)
    monkeypatch.setattr("fusedops.ladders.runner.missing_wheels", lambda prebuilt: "")
    monkeypatch.setattr("fusedops.ladders.runner._answers", lambda device: True)
    monkeypatch.setattr(Target, "of", lambda device: H200)
    runner = Runner(tmp_path, ENVIRONMENT, torch.device("cuda"), read=None, limits=LIMITS)
    runner = replace(runner, deadline=0.0)
    report = runner.run(tasks_of(["gemm", "small"]), lambda what, rows: None)
    assert not report.ladders
    assert not report.figures
    assert len(compiled) == len(set(compiled)) == 10
    assert sorted({each.m for each in compiled}) == [1, 16, 256, 4096]
    assert str(compiled[1].spec.epilogue) == "bias|act(gelu_tanh)"


@pytest.mark.parametrize("error", [OSError, TypeError, BuildError])
def test_what_a_step_raises_or_cannot_be_asked_for_is_its_row(
    tmp_path: Path, error: type[Exception]
) -> None:
    def refuse(*_: object) -> dict[str, float]:
        raise error("no")

    ladder = fake_ladder(a=[], b=[])
    asked = replace(ladder.steps[0], readings=refuse)
    made = replace(ladder.steps[1], prepare=refuse)
    _, rows = run(replace(ladder, steps=(asked, made)), tmp_path)
    assert rows["fake.a"]["outcome"] == {"failed": f"{error.__name__}: no"}
    assert rows["fake.b"]["outcome"] == {"failed": f"{error.__name__}: no"}


def test_what_a_step_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = replace(fake_ladder(a=[]).steps[0], peer="cub")
    ladder = replace(fake_ladder(a=[]), steps=(step,))
    monkeypatch.setattr(
        "fusedops.ladders.runner.peer_status", lambda names: {names[0]: Absent("not here")}
    )
    _, rows = run(ladder, tmp_path)
    assert rows["fake.a"]["outcome"] == {"absent": "not here"}


def test_the_library_must_have_run(tmp_path: Path) -> None:
    step = replace(fake_ladder(a=[]).steps[0], peer="", operation="transpose")
    ladder = replace(fake_ladder(a=[]), steps=(step,))
    runner, _ = run(ladder, tmp_path)
    report = runner.run([], lambda what, rows: None)
    outcome = report.ladders["fake"]["small"]["fake.a"].outcome
    assert outcome == Failed("transpose was not served by the provider cuda")
    assert not isinstance(outcome, Measurement)


# ncu


def test_the_raw_table_is_read() -> None:
    marker, first, _, fill, second = parse_raw_csv(SAMPLE)
    assert marker.kernel.startswith("void fusedops::scale")
    assert first.excess_sectors == 117_440_512
    assert first.excess_share == pytest.approx(0.875)
    assert first.registers == 22
    assert first.dram_bytes == 2**29
    assert first.tensor_pipe_pct is None
    assert first.load_ways is None
    assert fill.duration_ns == 2000
    assert second.shared_loads == 524_288
    assert second.shared_load_wavefronts is None
    assert second.conflict_share is None
    assert Counters.from_json(first.to_json()) == first


def test_markers_tell_the_steps_apart_and_the_longest_kernel_counts() -> None:
    kernels = parse_raw_csv(SAMPLE)
    found = by_marker([kernels[0], *kernels])
    assert found[0] is None
    names = [each.kernel.partition("(")[0] for each in found[1:] if each is not None]
    assert names == ["transpose_v1", "transpose_v3"]


def test_no_table_is_no_counters() -> None:
    assert parse_raw_csv("==ERROR== nothing was profiled\n") == []


def test_the_profiler_leaves_the_clocks_alone() -> None:
    command = ncu_command("ncu", Path("log.csv"), ["python", "-m", "x"])
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--page") + 1] == "raw"
    assert "--csv" in command
    metrics = command[command.index("--metrics") + 1].split(",")
    assert len(metrics) == len(set(metrics)) == sum(map(len, METRICS.values()))
    assert command[-3:] == ["python", "-m", "x"]


def stand_in(folder: Path, body: str) -> str:
    """A program in the place of ncu."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n", "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


ONE = Asked("t", "p", ("t.a",))
WRITE = f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({SAMPLE!r})"


def test_the_child_is_told_what_is_asked() -> None:
    asked = [ONE, Asked("small", "small.x", ("s, 4", "t, 8"))]
    assert asked_from_json(asked_to_json(asked, None)) == (asked, None)
    assert asked_from_json(asked_to_json([], 5.0)) == ([], 5.0)


@pytest.mark.parametrize("end", ["", "sys.exit(1)"])
def test_counters_come_from_the_log_of_the_profiler(tmp_path: Path, end: str) -> None:
    asked = [ONE, Asked("t", "q", ("t.a", "t.b"))]
    found = read_counters(asked, None, stand_in(tmp_path, f"{WRITE}\n{end}"))
    # The third of them was not reached.
    assert [list(each) for each in found] == [["t.a"], ["t.a"]]


def test_a_metric_that_the_profiler_does_not_know_costs_no_other(tmp_path: Path) -> None:
    body = (
        "asked = sys.argv[sys.argv.index('--metrics') + 1].split(',')\n"
        "if 'dram__bytes_read.sum' in asked:\n"
        "    sys.exit('==ERROR== Failed to find metric dram__bytes_read.sum')\n"
        f"{WRITE}"
    )
    (found,) = read_counters([ONE], None, stand_in(tmp_path, body))
    assert isinstance(found, dict)
    assert found["t.a"].sectors == 134_217_728


def test_a_child_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder_ncu, "_GRACE_S", 0.3)
    late = tmp_path / "late"
    inner = f"import time; time.sleep(0.7); open({str(late)!r}, 'w')"
    body = f"import subprocess\nsubprocess.run([sys.executable, '-c', {inner!r}])"
    assert read_counters([ONE], 0.0, stand_in(tmp_path, body)) == "ncu took more than 0 s"
    time.sleep(0.6)
    assert not late.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')\nsys.exit(1)",
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM)",
        ),
        (
            "print('==ERROR== Failed to find metric x')\nprint('more')\nsys.exit(1)",
            "ncu read nothing: Failed to find metric x",
        ),
        (
            "sys.stderr.write('RuntimeError: boom')\nsys.exit(3)",
            "ncu read nothing: RuntimeError: boom",
        ),
        ("pass", "ncu read nothing: it said nothing"),
    ],
)
def test_what_keeps_the_profiler_from_counting_is_said(
    tmp_path: Path, body: str, reason: str
) -> None:
    assert read_counters([ONE], None, stand_in(tmp_path, body)) == reason


def test_a_missing_profiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert "neither on the PATH nor in CUDA_HOME" in str(read_counters([ONE]))
    (tmp_path / "bin").mkdir()
    program = stand_in(tmp_path / "bin", "pass")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert ladder_ncu.find_ncu() == program
    assert "does not start" in str(read_counters([ONE], None, str(tmp_path / "none")))


def test_the_marker_is_no_step_of_a_ladder() -> None:
    names = [
        kernel.name
        for name in ("transpose", "reduce", "histogram")
        for step in load_ladder(name).steps
        for kernel in step.kernels
    ]
    assert names
    assert not [name for name in names if "scale" in name]
