"""scripts/gpu.sh without a GPU: its syntax, its steps in a dry run, its refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu.sh"


def bash(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": "tmp"}
    return subprocess.run(
        ["bash", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    for name in ("dsl", "flashinfer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "setup.sh").write_text("exit 1\n")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "gguf-1.0-py3-none-any.whl").touch()
    return tmp_path


def test_the_script_is_valid_bash_and_executable() -> None:
    assert bash("-n", SCRIPT).returncode == 0
    assert os.access(SCRIPT, os.X_OK)


def test_help_lists_every_option() -> None:
    text = bash(SCRIPT, "--help").stdout
    for line in SCRIPT.read_text().splitlines():
        option = line.strip().partition(")")[0]
        if option.startswith("--") and " " not in option:
            assert option in text
    assert "set -euo" not in text


def test_a_dry_run_prints_the_steps_in_order_and_does_nothing(packs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bash(
        SCRIPT,
        *("--packs", packs, "--out", out, "--shard", "2/4", "--goals", "cuda.*,gemm.lm_head.m16"),
        *("--only-stale", "--large", "--budget-s", "300", "--site", "SITE", "--dry-run"),
    )
    assert done.returncode == 0, done.stderr
    steps = done.stdout.splitlines()
    assert steps[:2] == [
        f"+ bash {packs / name / 'setup.sh'} SITE" for name in ("dsl", "flashinfer")
    ]
    assert steps[2] == "+ source SITE/env_flashinfer.sh"
    assert "--no-index --no-deps" in steps[3]
    assert "--target SITE/site-packages" in steps[3]
    assert steps[4] == f"+ mkdir -p {out}"
    assert "-m pytest tests/gpu" in steps[5]
    assert "--record reports/GPU/tests.json --shard 2/4 --only-stale" in steps[5]
    assert "gpu\\ or\\ gpu_large" in steps[5]
    assert steps[6].endswith(
        "scripts/goals.py cuda.\\* gemm.lm_head.m16 --reports reports/GPU --budget-s 300"
    )
    assert [step.split("/")[-1] for step in steps[7:10]] == [
        "tests.json",
        "goals.json",
        "goals_rows.json",
    ]
    assert not out.exists()


def test_only_the_steps_that_were_asked_for_are_run(tmp_path: Path) -> None:
    only_goals = bash(SCRIPT, "--out", tmp_path, "--what", "goals", "--dry-run").stdout
    assert "scripts/goals.py" in only_goals
    assert "-m pytest" not in only_goals
    assert "setup.sh" not in only_goals
    only_tests = bash(SCRIPT, "--out", tmp_path, "--what", "tests", "--dry-run").stdout
    assert "gpu\\ and\\ not\\ gpu_large" in only_tests
    assert "goals.py" not in only_tests
    only_setup = bash(SCRIPT, "--out", tmp_path, "--what", "setup", "--dry-run").stdout
    assert only_setup.splitlines() == [f"+ mkdir -p {tmp_path}"]


def test_the_sanitizer_watches_every_family_with_the_tools_that_suit_it(tmp_path: Path) -> None:
    steps = bash(SCRIPT, "--out", tmp_path, "--what", "sanitize", "--dry-run").stdout.splitlines()
    runs = [step for step in steps if "scripts/sanitize.py" in step]
    assert runs[0].endswith("python3 scripts/sanitize.py")
    assert [run.partition("--tool ")[2] for run in runs[1:]] == [
        f"{tool} --error-exitcode 9 {only}python3 scripts/sanitize.py {families}"
        for tool, only, families in (
            ("memcheck", "--report-api-errors no ", "gemm quant csrc"),
            ("racecheck", "", "gemm quant csrc"),
            ("initcheck", "", "csrc"),
        )
    ]


def test_the_demo_runs_on_both_devices_in_a_dry_run(tmp_path: Path) -> None:
    for name in ("g1", "g2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    arguments = ("--packs", tmp_path, "--out", "o", "--what", "demo", "--site", "SITE")
    steps = bash(SCRIPT, *arguments, "--model", "/m.gguf", "--dry-run").stdout.splitlines()
    copied = [step for step in steps if step.startswith("+ cp")]
    assert copied == [f"+ cp {tmp_path / n / 'part'} SITE/model/{n}.part" for n in ("g1", "g2")]
    runs = [step.partition("-m fusedops ")[2] for step in steps if "-m fusedops" in step]
    assert runs == [
        f"demo --device {device} --dtype {dtype} --model /m.gguf --json {ROOT}/o/demo_{name}.json"
        for device, dtype, name in (
            ("cuda", "float32", "float32"),
            ("cuda", "bfloat16", "bfloat16"),
            ("cpu", "float32", "cpu"),
        )
    ]
    assert not any("tests.json" in step or "goals.json" in step for step in steps)


@pytest.fixture
def no_gpu_python(tmp_path: Path) -> Path:
    """An interpreter that sees no GPU and writes down what else it is asked to run."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$1" in\n'
        f"-) cat >{os.devnull}; echo reports/none;;\n"
        "-c) exit 1;;\n"
        f'*) echo "commit $FUSEDOPS_COMMIT: $*" >>"{tmp_path}/asked"; exit "${{FAKE_EXIT:-0}}";;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return path


def test_parts_of_the_model_add_up_over_calls_and_run_on_the_cpu(
    tmp_path: Path, no_gpu_python: Path
) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    common = ("--python", no_gpu_python, "--out", out, "--site", site, "--commit", "c0ffee")
    for name in ("g1", "g2"):
        (tmp_path / f"packs_{name}" / name).mkdir(parents=True)
        (tmp_path / f"packs_{name}" / name / "part").write_text(name)
    first = bash(SCRIPT, *common, "--packs", tmp_path / "packs_g1", "--what", "setup")
    assert first.returncode == 0, first.stderr
    assert not (tmp_path / "asked").exists()
    second = bash(SCRIPT, *common, "--packs", tmp_path / "packs_g2", "--what", "demo")
    assert second.returncode == 0, second.stderr
    assert "joined from g1 g2" in second.stdout
    model = site / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert model.read_text() == "g1g2"
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked == (
        "commit c0ffee: -m fusedops demo --device cpu --dtype float32 "
        f"--model {model} --json {out / 'demo_cpu.json'}"
    )
    assert "demo     demo_cpu ran" in second.stdout
    assert (out / "demo_cpu.log").exists()


def test_a_demo_that_fails_shows_in_the_status(
    tmp_path: Path, no_gpu_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXIT", "2")
    common = ("--python", no_gpu_python, "--out", tmp_path / "out", "--site", tmp_path / "site")
    done = bash(SCRIPT, *common, "--what", "demo")
    assert done.returncode == 1
    assert "demo     demo_cpu failed" in done.stdout
    assert "--model" not in (tmp_path / "asked").read_text()


def test_tests_and_goals_need_a_gpu(tmp_path: Path, no_gpu_python: Path) -> None:
    common = ("--python", no_gpu_python, "--out", tmp_path / "out", "--site", tmp_path / "site")
    done = bash(SCRIPT, *common, "--what", "demo,goals")
    assert done.returncode == 3
    assert "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out DIR is missing"),
        (("--out",), "--out needs a value"),
        (("--out", "x", "--what", "tests,lunch"), "unknown step 'lunch'"),
        (("--out", "x", "--shard", "two"), "accepted is i/n"),
        (("--out", "x", "--packs", "no/such/folder"), "is no folder"),
        (("--fast",), "unknown option --fast"),
    ],
)
def test_bad_input_is_refused_with_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = bash(SCRIPT, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_pack_that_cannot_be_set_up_stops_the_run(packs: Path, tmp_path: Path) -> None:
    done = bash(SCRIPT, "--packs", packs, "--out", tmp_path / "out", "--site", tmp_path / "site")
    assert done.returncode == 3
    assert "setup.sh failed" in done.stderr
    assert not (tmp_path / "out").exists()


def test_status_and_merge_call_the_records(tmp_path: Path) -> None:
    status = bash(SCRIPT, "--status", "--dry-run", "--python", sys.executable).stdout
    assert "-m pytest tests/gpu" in status
    assert "--stale reports/GPU/tests.json" in status
    merged = bash(SCRIPT, "--merge", tmp_path, "--dry-run").stdout
    assert merged.strip().endswith(f"-m fusedops.bench.merge {tmp_path}")
