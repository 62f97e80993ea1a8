"""Running ladders: rows that resume, and counters by a program that stands in for ncu."""

from __future__ import annotations

import json
import stat
import sys
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
from fusedops.bench.roofline import Traffic
from fusedops.bench.timer import Protocol
from fusedops.ladders import counters as ladder_counters
from fusedops.ladders import load_ladder
from fusedops.ladders.counters import (
    METRICS,
    Counters,
    by_step,
    ncu_command,
    parse_raw_csv,
    read_counters,
)
from fusedops.ladders.model import Ladder, Lesson, Problem, Step
from fusedops.ladders.runner import NOT_READ, CounterReader, Runner, Task

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
    asked: list[tuple[str, str, list[str]]] = []

    def read(ladder: str, problem: str, steps: Sequence[str]) -> dict[str, Counters] | str:
        asked.append((ladder, problem, list(steps)))
        return {"fake.a": Counters("k", registers=30.0, dram_bytes=64.0)}

    ladder = fake_ladder(a=[], b=[], wrong=[])
    _, rows = run(ladder, tmp_path, read)
    assert asked == [("fake", "small", ["fake.a", "fake.b"])]
    assert rows["fake.a"]["counters"] == {"kernel": "k", "registers": 30.0, "dram_bytes": 64.0}
    assert rows["fake.a"]["intensity"] == 1.0
    assert rows["fake.b"]["counters_absent"] == "ncu saw no kernel of this step"
    run(ladder, tmp_path, read)
    assert asked[1:] == [("fake", "small", ["fake.b"])]


def test_a_refusal_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def refuse(ladder: str, problem: str, steps: Sequence[str]) -> str:
        asked.append(problem)
        return "no permission"

    ladder = fake_ladder(a=[])
    twice = replace(
        ladder,
        problems=lambda size: (problem_of(size), replace(problem_of(size), name="again")),
    )
    run(twice, tmp_path, refuse)
    assert asked == ["small"]


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
    found = by_step(parse_raw_csv(SAMPLE), ["transpose.v1", "transpose.v3", "transpose.v4"])
    assert {step: each.kernel.partition("(")[0] for step, each in found.items()} == {
        "transpose.v1": "transpose_v1",
        "transpose.v3": "transpose_v3",
    }


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


def test_counters_come_from_the_log_of_the_profiler(tmp_path: Path) -> None:
    body = f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({SAMPLE!r})"
    found = read_counters("t", "p", ["t.a", "t.b"], stand_in(tmp_path, body))
    assert isinstance(found, dict)
    assert set(found) == {"t.a", "t.b"}


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
    assert read_counters("t", "p", ["t.a"], stand_in(tmp_path, body)) == reason


def test_a_missing_profiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert "neither on the PATH nor in CUDA_HOME" in str(read_counters("t", "p", ["t.a"]))
    (tmp_path / "bin").mkdir()
    program = stand_in(tmp_path / "bin", "pass")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert ladder_counters.find_ncu() == program
    assert "does not start" in str(read_counters("t", "p", ["t.a"], str(tmp_path / "none")))


def test_the_marker_is_no_step_of_a_ladder() -> None:
    names = [
        kernel.name
        for name in ("transpose", "reduce", "histogram")
        for step in load_ladder(name).steps
        for kernel in step.kernels
    ]
    assert names
    assert not [name for name in names if "scale" in name]
