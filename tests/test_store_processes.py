"""The store shared by processes: one compile a key, killed builds, a cache being cleared."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_worker import FakeCompiler, Worker, fake_key, fake_object

from fusedops.jit import cache
from fusedops.jit.location import CacheSettings
from fusedops.jit.store import Store

PROCESSES = 8
ROUNDS = 20


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Worker()) for _ in range(PROCESSES)]


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_b56_eight_processes_compile_each_key_once(workers: list[Worker], tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "compiled.txt"
    for round_number in range(ROUNDS):
        spec = f"round {round_number}"
        for worker in workers:
            worker.send("get", root=str(root), spec=spec, log=str(log), seconds=0.01)
        answers = [worker.receive() for worker in workers]
        assert all(answer["right"] for answer in answers), answers
        origins = sorted(origin for answer in answers for origin in answer["counts"])
        assert origins == ["compiled"] + ["disk"] * (PROCESSES - 1)
    assert log.read_text().splitlines() == [f"round {i}" for i in range(ROUNDS)]
    assert cache.verify(root) == []
    assert len(cache.entries(root)) == ROUNDS


def test_b56_loading_while_others_clear_and_rebuild(workers: list[Worker], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    times = 60
    for worker in workers[:2]:
        worker.send("clear_repeatedly", root=str(root), times=times)
    for worker in workers[2:]:
        worker.send("get_repeatedly", root=str(root), spec="a", times=times)
    answers = [worker.receive() for worker in workers]
    assert all(answer["right"] for answer in answers), answers
    removed = sum(answer["removed"] for answer in answers[:2])
    assert removed >= 1
    # A kernel is compiled anew only after it was removed.
    assert 1 <= sum(answer["compiled"] for answer in answers[2:]) <= removed + 1


def test_b56_loading_while_the_entry_is_damaged_and_rebuilt(
    workers: list[Worker], tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    Store(CacheSettings(root)).ensure(fake_key("a"), FakeCompiler("a"))
    for round_number in range(5):
        os.truncate(root / "entries" / fake_key("a").name / "kernel.o", 100)
        for worker in workers:
            worker.send("get", root=str(root), spec="a", seconds=0.01)
        answers = [worker.receive() for worker in workers]
        assert all(answer["right"] for answer in answers), answers
        origins = sorted(origin for answer in answers for origin in answer["counts"])
        assert origins == ["compiled"] + ["disk"] * (PROCESSES - 1), round_number


def test_a_build_killed_half_way_frees_its_lock_and_leaves_no_entry(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "compiled.txt"
    with Worker() as doomed, Worker() as next_worker:
        doomed.send("get", root=str(root), spec="a", log=str(log), seconds=60)
        wait_for(log)
        next_worker.send("get", root=str(root), spec="a")
        time.sleep(0.2)
        assert cache.entries(root) == []
        assert cache.clear(root).leftovers == 0  # a build under way is left alone
        doomed.process.kill()
        answer = next_worker.receive()
    assert answer == {"right": True, "counts": {"compiled": 1}}
    leftovers = [path for path in (root / "entries").iterdir() if path.name.startswith(".")]
    assert len(leftovers) == 1
    assert (leftovers[0] / "kernel.o").read_bytes() == fake_object("a")
    assert [kernel.damage for kernel in cache.entries(root)] == [""]
    cleared = cache.clear(root, leftovers_only=True)
    assert (cleared.kernels, cleared.leftovers) == (0, 1)
    assert not leftovers[0].exists()
    assert Store(CacheSettings(root)).find(fake_key("a")) is not None


def test_waiting_for_another_process_is_announced(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "compiled.txt"
    with Worker() as first, Worker() as second:
        first.send("get", root=str(root), spec="a", log=str(log), seconds=1.2)
        wait_for(log)
        second.send("get", root=str(root), spec="a")
        assert second.receive()["counts"] == {"disk": 1}
        assert first.receive()["counts"] == {"compiled": 1}
        assert "waiting for another process to compile fake [a] for sm_90a ..." in second.finish()
        assert "compiling fake [a] for sm_90a ..." in first.finish()
