"""The goals and their harness, with fake measuring functions on the CPU."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.bench import Buffers, Contender, Protocol, goals
from fusedops.bench.chain import ChainContender, ChainSpec, DependentChain
from fusedops.bench.environment import Environment
from fusedops.bench.goal_harness import NOT_BUILT, Harness, select, table
from fusedops.bench.goal_run import GoalError, GoalRun, Reading
from fusedops.bench.goal_spec import GOALS_FILE, Goal, load_goals, sync_goals
from fusedops.bench.goals import REGISTRY, Registered, goal
from fusedops.bench.measurement import Bound, summarize
from fusedops.errors import ConfigError, LoadError
from fusedops.providers.base import current_policy

ROOT = Path(__file__).resolve().parent.parent
COVERS = ("fusedops/bench/goal_run.py",)
QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
ENVIRONMENT = Environment(
    "NVIDIA H200", "580.1", "cpu", "3.12", {"torch": "2.11"}, "abc", "goals.py", "2026-01-01"
)
ADD = Goal("fake.add", "an addition", "us", "<=", 1e9, 0.5, "torch 2", "fake")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows of a few microseconds gain nothing from a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ran_provider(times: int = 1) -> None:
    """What ``Op._run`` does when a provider serves a call."""
    policy = current_policy()
    assert policy.strict
    assert policy.usage is not None
    policy.usage.calls["add", policy.pinned or ""] += times


def buffers(generator: torch.Generator) -> Buffers:
    return Buffers((torch.randn(16, generator=generator), torch.randn(16, generator=generator)))


def is_sum(results: tuple[Tensor, ...], made: Buffers) -> str | None:
    return None if torch.equal(results[0], made.inputs[0] + made.inputs[1]) else "not the sum"


def contender(function: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Contender:
    def run(made: Buffers) -> Tensor:
        ran_provider()
        return function(*made.inputs)

    return Contender("ours", run, is_sum)


def measured(run: GoalRun) -> Reading:
    rows = run.measure("16", [contender()], buffers)
    return Reading.of(run.mine(rows, "ours"), run.goal.unit)


def harness(tmp_path: Path, function: Any = measured, **options: Any) -> Harness:
    registry = {ADD.id: Registered(function, "reference", COVERS)} if function else {}
    options.setdefault("protocol", QUICK)
    return Harness(tmp_path / "h200", ENVIRONMENT, registry, device="cpu", **options)


# The list


def test_the_projects_goals_are_well_formed() -> None:
    found = load_goals()
    assert len(found) > 50
    for entry in found.values():
        assert entry.id.split(".")[0] == entry.part
        if entry.floor is not None:
            # A goal never asks for more than the hardware has.
            assert entry.goal >= entry.floor if entry.op == "<=" else entry.goal <= entry.floor


def test_the_projects_goals_hold_goals_and_nothing_about_their_origin() -> None:
    assert set(json.loads(GOALS_FILE.read_text())) == {"gpu", "goals"}
    assert ".md" not in GOALS_FILE.read_text()


def test_every_registered_function_measures_a_goal_and_covers_sources() -> None:
    known = load_goals()
    for name, registered in goals.load_all().items():
        assert name in known
        assert registered.sources()


@pytest.mark.parametrize(
    ("op", "value", "met"),
    [("<=", 1.0, True), ("<=", 1.1, False), (">=", 1.0, True), (">=", 0.9, False)],
)
def test_a_goal_is_met_on_its_side(op: str, value: float, met: bool) -> None:
    assert Goal("a", "", "us", op, 1.0, None, None, "a").met(value) is met
    assert not Goal("a", "", "us", op, 1.0, None, None, "a").met(float("nan"))


def test_sync_copies_goals_only_and_names_what_changed(tmp_path: Path) -> None:
    entry = {"id": "a.b", "what": "w", "unit": "us", "op": "<=", "goal": 1, "floor": None}
    entry |= {"best_peer": None, "part": "a"}
    source, target = tmp_path / "source.json", tmp_path / "target.json"
    source.write_text(json.dumps({"gpu": "G", "read": "notes.md", "goals": [entry]}))
    assert sync_goals(source, target) == (1, ["a.b"])
    assert set(json.loads(target.read_text())) == {"gpu", "goals"}
    assert sync_goals(source, target) == (1, [])
    source.write_text(json.dumps({"gpu": "G", "goals": [entry | {"goal": 2}, entry | {"id": "c"}]}))
    assert sync_goals(source, target) == (2, ["a.b", "c"])


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"goals": [{"id": "a"}]}', '{"goals": [1]}'],
)
def test_a_malformed_list_is_refused_and_the_projects_kept(tmp_path: Path, text: str) -> None:
    source, target = tmp_path / "source.json", tmp_path / "target.json"
    source.write_text(text)
    target.write_text('{"goals": []}')
    with pytest.raises(LoadError):
        sync_goals(source, target)
    assert target.read_text() == '{"goals": []}'


def test_patterns_select_ids() -> None:
    found = {name: Goal(name, "", "us", "<=", 1, None, None, "") for name in ("a.x", "a.y", "b.x")}
    assert [g.id for g in select(found, [])] == ["a.x", "a.y", "b.x"]
    assert [g.id for g in select(found, ["a.*", "*.x"])] == ["a.x", "a.y", "b.x"]
    assert [g.id for g in select(found, ["b.x"])] == ["b.x"]
    with pytest.raises(ConfigError, match="no goal's id matches 'c"):
        select(found, ["a.x", "c*"])


# Registration


def test_a_function_is_registered_once_for_a_known_provider() -> None:
    try:
        goal("fake.once", provider="reference", covers=COVERS)(measured)
        assert REGISTRY["fake.once"].function is measured
        with pytest.raises(ConfigError, match="registered already"):
            goal("fake.once", provider="reference", covers=COVERS)
        with pytest.raises(ConfigError, match="unknown provider"):
            goal("fake.other", provider="magic", covers=COVERS)
        with pytest.raises(ConfigError, match="covers is empty"):
            goal("fake.other", provider="reference", covers=())
    finally:
        REGISTRY.pop("fake.once", None)


# Measuring


def test_a_met_goal_is_ok_and_recorded_with_all_that_it_depends_on(tmp_path: Path) -> None:
    run = harness(tmp_path)
    entry = run.run(ADD)
    assert entry["status"] == "ok"
    assert entry["ok"] is True
    recorded = json.loads(run.goals_path.read_text())["goals"]["fake.add"]
    assert recorded == entry
    assert 0 < entry["low"] <= entry["value"] <= entry["high"]
    wanted = {"provider": "reference", "gpu": "NVIDIA H200", "driver": "580.1", "commit": "abc"}
    assert wanted.items() <= entry.items()
    assert entry["versions"] == {"torch": "2.11"}
    assert len(entry["sources"]) == 16
    assert entry["date"].startswith("20")
    rows = json.loads(run.rows_path.read_text())["rows"]["fake.add"]
    assert len(rows["16"]["outcomes"]["ours"]["samples"]) == QUICK.samples


def test_a_missed_goal_keeps_its_value(tmp_path: Path) -> None:
    hard = Goal("fake.add", "", "us", "<=", 1e-9, None, None, "fake")
    entry = harness(tmp_path).run(hard)
    assert entry["status"] == "missed"
    assert entry["ok"] is False
    assert entry["value"] > 0


def test_an_id_that_nothing_measures_is_not_built_and_not_recorded(tmp_path: Path) -> None:
    run = harness(tmp_path, function=None)
    assert run.run(ADD) == {"status": NOT_BUILT}
    assert not run.goals_path.exists()


def test_a_wrong_result_is_failed_and_never_a_value(tmp_path: Path) -> None:
    def wrong(run: GoalRun) -> Reading:
        rows = run.measure("16", [contender(torch.sub)], buffers)
        return Reading.of(run.mine(rows, "ours"), "us")

    entry = harness(tmp_path, wrong).run(ADD)
    assert entry["status"] == "failed"
    assert entry["value"] is None
    assert entry["note"] == "ours: not the sum"


def test_a_function_that_raises_is_failed_with_its_words(tmp_path: Path) -> None:
    def broken(run: GoalRun) -> Reading:
        raise RuntimeError("no such kernel")

    entry = harness(tmp_path, broken).run(ADD)
    assert (entry["status"], entry["note"]) == ("failed", "RuntimeError: no such kernel")
    assert entry["value"] is None


def test_a_row_that_another_provider_served_is_failed(tmp_path: Path) -> None:
    def elsewhere(run: GoalRun) -> Reading:
        silent = Contender("ours", lambda made: torch.add(*made.inputs), is_sum)
        return Reading.of(run.mine(run.measure("16", [silent], buffers), "ours"), "us")

    entry = harness(tmp_path, elsewhere).run(ADD)
    assert entry["status"] == "failed"
    assert "'reference' never ran" in entry["note"]


def test_a_function_that_measures_no_row_is_failed(tmp_path: Path) -> None:
    entry = harness(tmp_path, lambda run: Reading(1.0, 1.0, 1.0)).run(ADD)
    assert entry["status"] == "failed"
    assert "measured no row" in entry["note"]


def test_a_reading_that_is_not_finite_is_failed(tmp_path: Path) -> None:
    def ratio(run: GoalRun) -> Reading:
        run.measure("16", [contender()], buffers)
        return Reading(float("nan"), 0.0, 0.0)

    entry = harness(tmp_path, ratio).run(ADD)
    assert entry["status"] == "failed"
    assert "not finite" in entry["note"]


def test_another_process_can_count_its_calls(tmp_path: Path) -> None:
    def cold(run: GoalRun) -> Reading:
        def measure_row() -> dict[str, Any]:
            run.ran_elsewhere("add", 3)
            return {"ours": summarize([5e5], mode="process", launches=1, hot=False)}

        return Reading.of(run.mine(run.row("cold", measure_row), "ours"), "s")

    assert harness(tmp_path, cold).run(ADD)["value"] == 0.5


def test_a_chain_is_a_row(tmp_path: Path) -> None:
    def chained(run: GoalRun) -> Reading:
        def contenders(chain: DependentChain) -> list[ChainContender]:
            def launch(x: Tensor, index: int, out: Tensor) -> None:
                ran_provider()
                torch.mm(x, chain.weights[index].T, out=out)

            def check(x: Tensor, index: int, out: Tensor) -> str | None:
                return None if torch.equal(out, x @ chain.weights[index].T) else "wrong"

            return [ChainContender("ours", launch, check)]

        spec = ChainSpec(2, 32, 48, weight_bytes=120_000_000)
        rows = run.chain("o", lambda: DependentChain(spec, "cpu"), contenders)
        return Reading.of(run.mine(rows, "ours"), "us")

    assert harness(tmp_path, chained).run(ADD)["status"] == "ok"


def test_units_of_time_are_converted_and_others_refused() -> None:
    row = summarize([2e3], mode="cpu", launches=1, hot=True, notes=["cut"])
    assert Reading.of(row, "ms").value == 2.0
    assert Reading.of(row, "s", note="cold").note == "cold; cut"
    with pytest.raises(ConfigError, match="unit 'ratio'"):
        Reading.of(row, "ratio")


def test_the_best_of_several_peers_must_have_a_time() -> None:
    rows = {
        "a": summarize([3.0], mode="cpu", launches=1, hot=True),
        "b": summarize([2.0], mode="cpu", launches=1, hot=True),
    }
    assert GoalRun.best(rows, ["a", "b", "c"])[0] == "b"
    with pytest.raises(GoalError, match="none of the peers c has a time"):
        GoalRun.best(rows, ["c"])


# Resuming


def counted() -> tuple[list[str], Callable[[GoalRun], Reading]]:
    measured_rows: list[str] = []

    def three_rows(run: GoalRun) -> Reading:
        readings = []
        for key in ("a", "b", "c"):

            def measure_row(name: str = key) -> dict[str, Any]:
                measured_rows.append(name)
                ran_provider()
                return {"ours": summarize([1.0, 2.0], mode="cpu", launches=1, hot=True)}

            readings.append(run.mine(run.row(key, measure_row), "ours").median_us)
        return Reading(max(readings), min(readings), max(readings))

    return measured_rows, three_rows


def test_what_is_recorded_for_todays_sources_is_not_measured_again(tmp_path: Path) -> None:
    rows, function = counted()
    first = harness(tmp_path, function).run(ADD)
    assert harness(tmp_path, function).run(ADD) == first
    assert rows == ["a", "b", "c"]
    harness(tmp_path, function, force=True).run(ADD)
    assert rows == ["a", "b", "c"] * 2


def test_changed_sources_are_measured_again(tmp_path: Path) -> None:
    rows, function = counted()
    run = harness(tmp_path, function)
    run.run(ADD)
    other = Harness(
        run.folder,
        ENVIRONMENT,
        {ADD.id: Registered(function, "reference", ("fusedops/bench/timer.py",))},
        device="cpu",
        protocol=QUICK,
    )
    other.run(ADD)
    assert len(rows) == 6


def test_a_run_that_is_cut_off_goes_on_at_the_next_row(tmp_path: Path) -> None:
    rows, function = counted()
    ticks = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    cut = harness(tmp_path, function, deadline=1.5, clock=lambda: next(ticks))
    entry = cut.run(ADD)
    assert entry == {"status": "not run", "reason": "the time budget was spent"}
    assert rows == ["a", "b"]
    assert not cut.goals_path.exists()
    assert harness(tmp_path, function).run(ADD)["status"] == "ok"
    assert rows == ["a", "b", "c"]


def test_a_failed_goal_is_measured_again(tmp_path: Path) -> None:
    attempts: list[int] = []

    def flaky(run: GoalRun) -> Reading:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("driver reset")
        return measured(run)

    assert harness(tmp_path, flaky).run(ADD)["status"] == "failed"
    assert harness(tmp_path, flaky).run(ADD)["status"] == "ok"


def test_goals_of_another_schema_are_refused(tmp_path: Path) -> None:
    run = harness(tmp_path)
    run.folder.mkdir(parents=True)
    run.goals_path.write_text('{"schema": 9, "goals": {}}')
    with pytest.raises(ConfigError, match="schema 9"):
        run.run(ADD)


# The table and the script


def test_the_table_shows_goal_floor_peer_measured_spread_and_ok(tmp_path: Path) -> None:
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    entry = harness(tmp_path, now=lambda: noon).run(ADD) | {"value": 2.0, "low": 1.9, "high": 2.1}
    failed = {"status": "failed", "note": "ours: not the sum", "value": None}
    missing = Goal("fake.none", "", "ratio", ">=", 1.25, None, None, "fake")
    text = table([(ADD, entry), (ADD, failed), (missing, {"status": NOT_BUILT})]).splitlines()
    assert text[0].split() == ["id", "goal", "floor", "peer", "measured", "spread", "ok"]
    assert text[1].split("  ")[0] == "fake.add"
    for cell in ("<= 1000000000 us", "0.5", "torch 2", "2 us", "10.0%"):
        assert cell in text[1]
    assert text[1].endswith("ok")
    assert text[2].endswith("failed")
    assert text[3].endswith("not built")
    assert text[4] == "fake.add: ours: not the sum"


def test_rows_with_a_bound_are_in_the_entry_and_follow_their_goal(tmp_path: Path) -> None:
    def beside(run: GoalRun) -> Reading:
        def measure_row() -> dict[str, Any]:
            ran_provider()
            row = summarize([0.5], mode="cpu", launches=1, hot=True)
            return {
                "ours": replace(row, bound=Bound(0.7, 0.5)),
                "ours b": replace(row, bound=Bound(0.7, 0.9)),
            }

        return Reading.of(run.mine(run.row("visible", measure_row), "ours"), "us")

    entry = harness(tmp_path, beside).run(ADD)
    assert entry["bounds"] == {
        "visible: ours": {"limit_us": 0.7, "value_us": 0.5, "ok": True},
        "visible: ours b": {"limit_us": 0.7, "value_us": 0.9, "ok": False},
    }
    goal_line, first, second = table([(ADD, entry)]).splitlines()[1:]
    assert goal_line.endswith("ok")
    assert " ".join(first.split()) == "visible: ours <= 0.7 us - - 0.5 us - ok"
    assert second.split()[:3] == ["visible:", "ours", "b"]
    assert second.endswith("missed")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # What the script sets for its process must not outlive a test.
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "")
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    spec = importlib.util.spec_from_file_location("goals_script", ROOT / "scripts" / "goals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_lists_ids_that_nothing_measures(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert script.main(["--list", "--reports", str(tmp_path), "gemm.8192*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("gemm.8192_over_cublas")
    assert os.environ["FLASHINFER_DISABLE_JIT"] == "1"


def test_the_script_refuses_bad_input_in_one_line(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert script.main(["nothing.like.this"]) == 2
    assert script.main(["--sync", str(tmp_path / "none.json")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: ") for line in errors)
