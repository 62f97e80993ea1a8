"""The store under threads and forks, and the line that tells of a long compile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_worker import FakeCompiler, fake_key, fake_object, load

from fusedops.errors import BuildError, KernelMissingError
from fusedops.jit import progress
from fusedops.jit.location import CacheSettings
from fusedops.jit.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path) -> Store:
    return Store(CacheSettings(root))


def run_in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001 - handed to the test, which asserts on it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_b33_eight_threads_compile_each_key_once(store: Store) -> None:
    for round_number in range(20):
        spec = f"round {round_number}"
        compiler = FakeCompiler(spec, seconds=0.002)
        results: list[bytes] = []

        def get(_: int, compiler: FakeCompiler = compiler, results: list[bytes] = results) -> None:
            results.append(store.get(fake_key(compiler.spec), compiler, load))

        errors = run_in_threads(8, get)
        assert errors == []
        assert compiler.calls == 1
        assert all(data is results[0] for data in results)
        assert results[0] == fake_object(spec)


def test_b33_threads_compile_different_keys_side_by_side(store: Store) -> None:
    barrier = threading.Barrier(4, timeout=10)

    def get(index: int) -> None:
        compiler = FakeCompiler(str(index))

        def build(folder: Path) -> dict[str, str]:
            barrier.wait()  # passes only when all four are compiling at once
            return dict(compiler(folder))

        assert store.get(fake_key(str(index)), build, load) == fake_object(str(index))

    assert run_in_threads(4, get) == []


def test_threads_share_the_error_of_one_failed_compile(store: Store) -> None:
    calls = []

    def fail(folder: Path) -> dict[str, str]:
        calls.append(1)
        time.sleep(0.1)
        raise BuildError("line 3: no such thing")

    errors = run_in_threads(4, lambda _: store.get(fake_key("a"), fail, load))
    assert [str(error) for error in errors] == ["line 3: no such thing"] * 4
    assert len(calls) == 1


def test_a_refusal_in_one_thread_does_not_stop_another(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = threading.Event()
    thread_of_capture: list[int] = []

    def is_capturing() -> bool:
        if threading.get_ident() not in thread_of_capture:
            return False
        capturing.set()
        time.sleep(0.1)  # the other thread is waiting for this one by now
        return True

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    compiler = FakeCompiler("a")

    def get(index: int) -> None:
        if index == 0:
            thread_of_capture.append(threading.get_ident())
        else:
            assert capturing.wait(10)
        store.get(fake_key("a"), compiler, load)

    errors = run_in_threads(2, get)
    assert [type(error) for error in errors] == [KernelMissingError]
    assert compiler.calls == 1


def test_a_forked_child_starts_with_an_empty_memory_and_free_locks(store: Store) -> None:
    store.get(fake_key("a"), FakeCompiler("a"), load)
    with store._lock:  # as another thread might hold it at the moment of the fork
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                store.get(fake_key("a"), FakeCompiler("a"), load)
                status = 0 if store.counts == {"disk": 1} else 2
            finally:
                os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.counts == {"compiled": 1}


# --- the progress line


@pytest.mark.parametrize(
    ("variable", "lines"), [("0", 2), ("1", 0)], ids=["talkative", "FUSEDOPS_QUIET=1"]
)
def test_a_long_compile_says_what_it_does_and_how_long_it_took(
    store: Store,
    variable: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "ANNOUNCE_AFTER_S", 0.05)
    monkeypatch.setenv("FUSEDOPS_QUIET", variable)
    store.get(fake_key("a"), FakeCompiler("a", seconds=0.3), load)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == lines
    if lines:
        assert written[0] == "fusedops: compiling fake [a] for sm_90a ..."
        assert written[1].startswith("fusedops: compiling fake [a] for sm_90a: finished in 0.")


def test_a_short_compile_says_nothing_and_a_failed_one_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.get(fake_key("a"), FakeCompiler("a"), load)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "ANNOUNCE_AFTER_S", 0.02)

    def fail(folder: Path) -> dict[str, str]:
        time.sleep(0.2)
        raise BuildError("no")

    with pytest.raises(BuildError, match="no"):
        store.get(fake_key("b"), fail, load)
    assert "failed after 0." in capsys.readouterr().err


def test_a_closed_stderr_does_not_fail_a_compile(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "ANNOUNCE_AFTER_S", 0.02)
    closed = (tmp_path / "stderr").open("w")
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    compiler = FakeCompiler("a", seconds=0.1)
    assert store.get(fake_key("a"), compiler, load) == fake_object("a")
    monkeypatch.setattr("sys.stderr", None)
    compiler = FakeCompiler("b", seconds=0.1)
    assert store.get(fake_key("b"), compiler, load) == fake_object("b")
