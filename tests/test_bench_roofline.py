"""Floors and walls by rule; ceilings on a small scale; known readings; the environment's hashes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusedops.bench import roofline
from fusedops.bench.environment import (
    collect_environment,
    git_commit,
    gpu_slug,
    repository_root,
    source_files,
    source_hash,
)
from fusedops.bench.measurement import summarize
from fusedops.bench.readings import void_reason
from fusedops.bench.roofline import (
    PUBLISHED_CEILINGS,
    Ceilings,
    Traffic,
    Wall,
    ceilings,
    classify,
    floor,
    measure_ceilings,
)
from fusedops.errors import ConfigError

H200 = PUBLISHED_CEILINGS["NVIDIA H200"]


def row(us: float, hot: bool = False):
    return summarize([us], mode="cuda graph", launches=1, hot=hot)


@pytest.mark.parametrize(
    ("traffic", "us"),
    [
        # Llama-3-8B's output projection, M = 16: the weight decides, writes are 0.4 %.
        (Traffic(4096 * 4096 * 2 + 16 * 4096 * 2, 16 * 4096 * 2, 2 * 16 * 4096 * 4096), 7.24),
        # A transpose of 8192^2 float32 reads and writes.
        (Traffic(8192**2 * 4, 8192**2 * 4), 125.4),
        # A sum of 2^28 float32 only reads.
        (Traffic(2**28 * 4, 4), 229.9),
        # A product of 8192^3 computes.
        (Traffic(2 * 8192**2 * 2, 8192**2 * 2, 2 * 8192**3), 1570.7),
    ],
)
def test_floors_of_known_work(traffic: Traffic, us: float) -> None:
    assert floor(traffic, H200).us == pytest.approx(us, rel=2e-3)


def test_a_tenth_of_writes_switches_the_bandwidth() -> None:
    below = floor(Traffic(901, 99), H200)
    at = floor(Traffic(900, 100), H200)
    assert below.us == pytest.approx(1000 / 4.67e12 * 1e6)
    assert at.us == pytest.approx(1000 / 4.28e12 * 1e6)


def test_work_that_moves_nothing_has_no_floor() -> None:
    with pytest.raises(ConfigError, match="moves nothing"):
        floor(Traffic(0), H200)


def test_the_fraction_is_the_floor_over_the_time() -> None:
    assert floor(Traffic(4.67e6), H200).fraction(2.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("us", "hot", "traffic", "wall"),
    [
        (2.0, False, Traffic(1e3), Wall.LAUNCH),
        (10.0, False, Traffic(4.67e12 * 9e-6), Wall.MEMORY),
        (10.0, False, Traffic(4.67e12 * 5e-6), Wall.LATENCY),
        (10.0, True, Traffic(4.67e12 * 15e-6), Wall.CACHE),
        (100.0, False, Traffic(1e6, 0, 700e12 * 90e-6), Wall.TENSOR_CORE),
    ],
)
def test_the_wall_follows_from_the_rule(us: float, hot: bool, traffic: Traffic, wall: Wall) -> None:
    assert classify(row(us, hot), traffic, H200) is wall


def test_ceilings_are_measured_and_say_how() -> None:
    found = measure_ceilings("cpu", stream_bytes=1 << 22, product_size=64)
    assert found.gpu == "cpu"
    assert 1e8 < found.read_bytes_per_s < 1e13
    assert 1e8 < found.read_write_bytes_per_s < 1e13
    assert found.bf16_flops_per_s > 1e6
    assert found.launch_us > 0
    assert len(found.details) == 4


def test_ceilings_are_measured_once_and_never_under_published_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    def slow(device: object) -> Ceilings:
        calls.append(device)
        return Ceilings("NVIDIA H200", 4.2e12, 4.5e12, 650e12, 1.5)

    monkeypatch.setattr(roofline, "measure_ceilings", slow)
    monkeypatch.setattr(roofline, "_measured", {})
    first, second = ceilings("cuda"), ceilings("cuda")
    assert first is second
    assert len(calls) == 1
    assert first.read_bytes_per_s == 4.67e12
    assert first.read_write_bytes_per_s == 4.5e12
    assert first.bf16_flops_per_s == 700e12
    assert first.launch_us == 1.17


def test_a_contender_far_slower_than_its_slowest_reading_voids_the_row() -> None:
    at = {"gpu": "NVIDIA H200", "M": 16, "N": 6144, "K": 4096}
    assert void_reason(**at, best=row(18.4)) is None
    assert "void" in (void_reason(**at, best=row(18.6)) or "")
    assert void_reason("NVIDIA H100", 16, 6144, 4096, row(99.0)) is None
    assert void_reason("NVIDIA H200", 4096, 6144, 4096, row(9999.0)) is None


# Environment


def test_the_environment_names_versions_and_the_command() -> None:
    found = collect_environment(command="make bench")
    assert found.versions["torch"] == torch.__version__
    assert found.command == "make bench"
    assert found.date.endswith("+00:00")
    assert (found.gpu == "none") == (not torch.cuda.is_available())


def test_the_command_holds_no_path_of_this_machine() -> None:
    root = repository_root()
    assert root is not None
    assert str(root) not in collect_environment().command.split()[0]


def test_the_commit_can_be_named_where_git_did_not_travel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FUSEDOPS_COMMIT", raising=False)
    assert git_commit(tmp_path) == "unknown"
    monkeypatch.setenv("FUSEDOPS_COMMIT", "abc123")
    assert git_commit(tmp_path) == "abc123"


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("NVIDIA L4", "l4")],
)
def test_reports_of_a_gpu_have_a_folder(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("lib/a.py", "lib/b.toml", "lib/sub/c.cu", "lib/data.json", "other/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_patterns_name_files_folders_and_globs(sources: Path) -> None:
    def names(*patterns: str) -> list[str]:
        return [path.as_posix() for path in source_files(patterns, sources)]

    assert names("lib") == ["lib/a.py", "lib/b.toml", "lib/sub/c.cu"]
    assert names("lib/a.py", "other/*.py") == ["lib/a.py", "other/d.py"]
    with pytest.raises(ConfigError, match="no source file matches 'lib/zzz'"):
        names("lib/a.py", "lib/zzz")


def test_the_hash_follows_contents_names_and_extra_text(sources: Path) -> None:
    before = source_hash(["lib"], sources)
    assert source_hash(["lib"], sources) == before
    (sources / "lib" / "data.json").write_text("changed")
    (sources / "other" / "d.py").write_text("changed")
    assert source_hash(["lib"], sources) == before
    assert source_hash(["lib"], sources, extra="x") != before
    (sources / "lib" / "a.py").write_text("lib/A.py")
    changed = source_hash(["lib"], sources)
    assert changed != before
    (sources / "lib" / "a.py").rename(sources / "lib" / "z.py")
    assert source_hash(["lib"], sources) not in (before, changed)
