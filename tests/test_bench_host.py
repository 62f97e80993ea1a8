"""The host-overhead benchmark: every call is checked, and the report states the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedops.bench import host
from fusedops.bench.host import LIMIT_US, TARGET_CALL, HostRow, target_of
from fusedops.bench.measurement import Failed, summarize
from fusedops.cli import main


def test_it_times_every_call_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "host.json"
    assert main(["bench", "host", "--rounds", "2", "--calls", "2", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    report = json.loads(path.read_text())
    sizes = {(row["m"], row["dtype"]) for row in report["rows"]}
    assert sizes == {(m, dtype) for m in (1, 4) for dtype in ("float32", "bfloat16")}
    assert len({row["call"] for row in report["rows"]}) == 8
    for row in report["rows"]:
        assert len(row["samples"]) == 2
        assert 0 < row["min_us"] <= row["median_us"]
        assert row["call"] in shown
    assert report["environment"]["versions"]["torch"] == torch.__version__
    (timed,) = (
        row
        for row in report["rows"]
        if (row["call"], row["m"], row["dtype"]) == (TARGET_CALL, 1, "float32")
    )
    target = report["target"]
    assert target["median_us"] == timed["median_us"]
    assert target["ok"] is (timed["median_us"] < LIMIT_US)
    assert f"under {LIMIT_US:g} us: {'met' if target['ok'] else 'missed'}" in shown


@pytest.mark.parametrize(("us", "ok"), [(LIMIT_US - 0.1, True), (LIMIT_US, False), (None, False)])
def test_the_target_is_met_below_its_limit_only(us: float | None, ok: bool) -> None:
    timed = Failed("wrong") if us is None else summarize([us], mode="cpu", launches=1, hot=True)
    rows = [HostRow(TARGET_CALL, 1, "float32", timed), HostRow("torch.mm", 1, "float32", timed)]
    assert target_of(rows)["ok"] is ok
    assert target_of(rows)["median_us"] == us


def test_a_wrong_result_gets_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: Tensor, _weight: Tensor, _eps: float) -> Tensor:
        return x

    monkeypatch.setattr(host, "rms_norm", wrong)
    assert main(["bench", "host", "--rounds", "1", "--calls", "1"]) == 1
    assert "relative error" in capsys.readouterr().out


def test_a_folder_that_is_missing_is_refused_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "measure_host", lambda *_sizes: pytest.fail("it measured"))
    assert main(["bench", "host", "--json", str(tmp_path / "none" / "host.json")]) == 2
    assert "does not exist" in capsys.readouterr().err
