"""The README's tables are what the committed reports say, and its Python examples run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_tables_come_from_the_reports() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "readme.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_python_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/readme.py, reading its reports from a folder of the test's own."""
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "REPORTS", tmp_path)
    return module


def write(folder: Path, name: str, report: dict[str, Any]) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report))


def test_every_table_stands_in_the_readme(script: ModuleType) -> None:
    assert set(re.findall(r"<!-- table (\w+) -->", README)) == set(script.TABLES)


def test_slower_and_failed_steps_stay_in_the_table(script: ModuleType, tmp_path: Path) -> None:
    def row(batch: int, contender: str, provider: str, ms: float | None) -> dict[str, Any]:
        shape = {"shape": "s", "batch": batch, "context": 9, "floor_ms": 1.0}
        plan_us = 1234.0 if contender == "fusedops" else None
        return {**shape, "contender": contender, "provider": provider, "ms": ms, "plan_us": plan_us}

    rows = [
        row(batch, contender, provider, ms)
        for batch, ours in ((1, 2.0), (8, 2.5), (32, None))
        for contender, provider, ms in (("torch graph", "torch", 2.0), ("fusedops", "cublas", ours))
    ]
    # Neither another provider's step nor one without its peer makes a row.
    rows += [row(1, "fusedops", "cutlass", 1.5), row(64, "torch graph", "torch", 2.0)]
    environment = {
        "gpu": "G",
        "commit": "0123456789abcdef" * 2 + "01234567+dirty",
        "driver": "none",
    }
    report = {"environment": {**environment, "versions": {"torch": "2"}}, "rows": rows}
    write(tmp_path, "h200/decode_baseline.json", report)
    write(tmp_path, "h200/decode_cutlass.json", report)
    assert "| s | 1 | 9 | 1.50 | 2.00 | 1.33 | 1.00 |" in script.decode_cutlass()
    _, _, *lines, _, measured = script.decode_baseline().splitlines()
    assert [line.split(" | ") for line in lines] == [
        ["| s", "1", "9", "2.00", "2.00", "2.00", "1.00", "1.23", "yes |"],
        ["| s", "8", "9", "2.50", "2.00", "2.00", "1.00", "1.23", "no |"],
        ["| s", "32", "9", "-", "2.00", "2.00", "1.00", "1.23", "no |"],
    ]
    assert measured == "Measured: gpu G, torch 2, commit 0123456789ab+dirty."


def test_missed_and_failed_goals_stay_in_the_table(script: ModuleType, tmp_path: Path) -> None:
    def entry(ok: bool, value: float | None, date: str) -> dict[str, Any]:
        known = {"ok": ok, "value": value, "low": value, "high": value, "peer": "", "provider": "p"}
        return {**known, "gpu": "G", "commit": "c", "date": date, "versions": {"torch": "2"}}

    goals = {
        "gemm.lm_head.m16": entry(False, None, "2026-01-02T00:00:00"),
        "gemm.qkv_bias.m16": entry(True, 12.0, "2026-01-01T00:00:00"),
        "gemm.o_residual.m16": entry(False, 9.0, "2026-01-01T01:00:00"),
    }
    write(tmp_path, "h200/goals.json", {"goals": goals})
    _, _, *lines, _, measured = script.goals().splitlines()
    assert [(line.split(" | ")[0], line.split(" | ")[-2]) for line in lines] == [
        ("| `gemm.qkv_bias.m16`", "yes"),
        ("| `gemm.o_residual.m16`", "no"),
        ("| `gemm.lm_head.m16`", "no"),
    ]
    assert re.match(r"3 of \d+ goals are measured, 1 of them met\.", measured)
    assert "date 2026-01-01 and 2026-01-02" in measured
