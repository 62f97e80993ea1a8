"""Records of GPU test runs: shards, hashes, staleness, merging, and the pytest hooks."""

from __future__ import annotations

import ast
import datetime
import itertools
import json
from pathlib import Path

import pytest

from fusedops.bench import merge
from fusedops.bench.environment import source_files
from fusedops.bench.records import (
    Shard,
    TestRecord,
    add_records,
    covered_hash,
    read_records,
    stale,
    summary,
)
from fusedops.errors import ConfigError

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent


def record(outcome: str = "passed", sources: str = "aa", day: int = 1) -> TestRecord:
    date = datetime.datetime(2026, 1, day, tzinfo=datetime.UTC).isoformat()
    return TestRecord(outcome, sources, "abc", "NVIDIA H200", date, 0.5)


# Shards


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_test_belongs_to_one_shard(count: int) -> None:
    nodes = [f"tests/gpu/test_x.py::test_{i}[{i % 7}]" for i in range(400)]
    parts = [
        [node for node in nodes if Shard(index, count).holds(node)] for index in range(1, count + 1)
    ]
    assert sorted(itertools.chain.from_iterable(parts)) == sorted(nodes)
    assert all(len(part) > 400 / count * 0.6 for part in parts)


def test_a_shard_is_read_from_text() -> None:
    assert Shard.parse("2/4") == Shard(2, 4)
    for bad in ("0/4", "5/4", "2", "a/b", "2/4/6", "-1/4"):
        with pytest.raises(ConfigError, match="i/n"):
            Shard.parse(bad)


# Records


def test_records_of_shards_and_days_add_up(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "tests.json"
    add_records(path, {"x.py::a": record(), "x.py::b": record("failed")})
    add_records(path, {"x.py::b": record("passed", day=2), "x.py::c": record("skipped")})
    found = read_records(path)
    assert {node: entry.outcome for node, entry in found.items()} == {
        "x.py::a": "passed",
        "x.py::b": "passed",
        "x.py::c": "skipped",
    }
    assert found["x.py::b"] == record("passed", day=2)
    assert summary(found.values()) == "2 passed, 1 skipped"


def test_records_of_another_schema_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "tests.json"
    path.write_text('{"schema": 7, "tests": {}}')
    with pytest.raises(ConfigError, match="schema 7; this version reads 2"):
        add_records(path, {"x.py::a": record()})
    assert json.loads(path.read_text())["schema"] == 7


def test_a_test_is_stale_until_it_passed_on_todays_sources() -> None:
    records = {
        "passed": record(),
        "failed": record("failed"),
        "skipped": record("skipped"),
        "old": record(sources="bb"),
        "gone": record(),
    }
    wanted = dict.fromkeys(["passed", "failed", "skipped", "old", "new"], "aa")
    assert stale(wanted, records) == {
        "failed": "failed",
        "skipped": "skipped",
        "old": "sources changed since it ran",
        "new": "never run",
    }


def test_the_covered_hash_follows_the_covered_sources_and_the_module(tmp_path: Path) -> None:
    for name in ("fusedops/a.py", "fusedops/b.py", "csrc/k.cu", "tests/gpu/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    module = tmp_path / "tests/gpu/test_a.py"

    def both() -> tuple[str, str]:
        some = covered_hash(module, ["fusedops/a.py"], tmp_path)
        return some, covered_hash(module, None, tmp_path)

    start = both()
    (tmp_path / "fusedops/b.py").write_text("changed")
    after_other = both()
    assert after_other[0] == start[0]
    assert after_other[1] != start[1]
    (tmp_path / "csrc/k.cu").write_text("changed")
    assert both()[1] != after_other[1]
    module.write_text("changed")
    assert both()[0] != start[0]
    with pytest.raises(ConfigError, match=r"matches 'csrc/typo\.cu'"):
        covered_hash(module, ["csrc/typo.cu"], tmp_path)


def test_what_gpu_tests_cover_exists() -> None:
    for module in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERS":
                assert source_files(ast.literal_eval(node.value), ROOT), module.name


def test_merging_takes_the_newer_record_into_the_gpus_folder(tmp_path: Path) -> None:
    reports, brought = tmp_path / "reports", tmp_path / "out"
    add_records(
        reports / "h200" / "tests.json", {"x.py::a": record(day=3), "x.py::b": record(day=1)}
    )
    add_records(
        brought / "tests.json",
        {"x.py::a": record("failed", day=2), "x.py::b": record("failed", day=2)},
    )
    assert merge.merge(brought, reports) == {"h200/tests.json": 1}
    found = read_records(reports / "h200" / "tests.json")
    assert (found["x.py::a"].outcome, found["x.py::b"].outcome) == ("passed", "failed")


def test_merging_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tests\.json nor goals\.json"):
        merge.merge(tmp_path, tmp_path / "reports")


# Hooks

CONFTEST = """
import sys
from pathlib import Path
from fusedops.bench.pytest_recorder import Recorder
from fusedops.bench.records import Shard

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: for this test")
    root, record = Path(__file__).parent, Path(__file__).parent / "tests.json"
    shard = config.getoption("--part")
    config.pluginmanager.register(Recorder(
        root,
        record=None if config.getoption("--show") else record,
        gpu="NVIDIA H200",
        shard=Shard.parse(shard) if shard else None,
        only_stale=config.getoption("--rest"),
        list_stale=config.getoption("--show"),
        stale_against=record,
    ))

def pytest_addoption(parser):
    parser.addoption("--part")
    parser.addoption("--rest", action="store_true")
    parser.addoption("--show", action="store_true")
"""
TESTS = """
import pytest
COVERS = ("lib.py",)
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(6))
def test_good(n):
    pass

def test_bad():
    assert False

def test_left_out():
    pytest.skip("no second GPU")

@pytest.fixture
def broken():
    raise RuntimeError

def test_setup(broken):
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDOPS_COMMIT", "abc")
    root = pytester.path
    (root / "conftest.py").write_text(CONFTEST)
    (root / "test_kernels.py").write_text(TESTS)
    (root / "test_other.py").write_text("def test_cpu():\n    pass\n")
    (root / "lib.py").write_text("version = 1\n")
    return root


def run_pytest(pytester: pytest.Pytester, *options: str) -> tuple[int, str]:
    """A session inside this process: torch is loaded already."""
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *options)
    return int(result.ret), "\n".join([*result.outlines, *result.errlines])


def test_runs_are_recorded_sharded_and_listed_when_stale(
    project: Path, pytester: pytest.Pytester
) -> None:
    status, text = run_pytest(pytester, "--part", "1/2")
    assert status == 1
    first = read_records(project / "tests.json")
    status, text = run_pytest(pytester, "--part", "2/2")
    both = read_records(project / "tests.json")
    assert set(first) < set(both)
    assert len(both) == 9, "only gpu-marked tests are recorded"
    outcomes = {node.split("::")[1]: entry.outcome for node, entry in both.items()}
    assert outcomes["test_good[0]"] == "passed"
    assert outcomes["test_bad"] == "failed"
    assert outcomes["test_left_out"] == "skipped"
    assert outcomes["test_setup"] == "error"
    assert both["test_kernels.py::test_bad"].commit == "abc"
    assert both["test_kernels.py::test_bad"].gpu == "NVIDIA H200"
    assert "GPU tests recorded:" in text

    status, text = run_pytest(pytester, "--show")
    assert status == 1
    assert "3 of 9 GPU tests stale" in text
    assert "test_kernels.py::test_bad: failed" in text
    assert "test_good" not in text

    (project / "lib.py").write_text("version = 2\n")
    status, text = run_pytest(pytester, "--show")
    assert "9 of 9 GPU tests stale" in text
    assert "test_good[3]: sources changed since it ran" in text


def test_tests_that_run_in_other_processes_are_recorded_too(
    project: Path, pytester: pytest.Pytester
) -> None:
    pytest.importorskip("xdist")
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-n", "1")
    parallel = read_records(project / "tests.json")
    (project / "tests.json").unlink()
    run_pytest(pytester)
    alone = read_records(project / "tests.json")
    assert len(parallel) == 9
    assert {node: (entry.outcome, entry.sources) for node, entry in parallel.items()} == {
        node: (entry.outcome, entry.sources) for node, entry in alone.items()
    }


def test_a_failing_case_prints_its_repro_and_the_rest_is_run_alone(
    project: Path, pytester: pytest.Pytester
) -> None:
    _, text = run_pytest(pytester)
    assert 'python3 -m pytest "test_kernels.py::test_bad" -m gpu' in text
    (project / "test_kernels.py").write_text(TESTS.replace("assert False", "assert True"))
    run_pytest(pytester)
    status, text = run_pytest(pytester, "--rest")
    # What passed on these sources is left out; tests that are not for the GPU always run.
    assert "7 deselected" in text
    assert status == 1
    good = TESTS.split("@pytest.fixture")[0].replace("assert False", "assert True")
    (project / "test_kernels.py").write_text(good.replace('pytest.skip("no second GPU")', "pass"))
    assert run_pytest(pytester)[0] == 0
    status, text = run_pytest(pytester, "--show")
    assert status == 0
    assert "0 of 8 GPU tests stale" in text
