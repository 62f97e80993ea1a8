"""The store within one process: where kernels come from, failed and refused compiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from store_worker import FakeCompiler, entry_dir, fake_key, fake_object, fill, load

from fusedops.errors import BuildError, ConfigError, KernelMissingError, LaunchError
from fusedops.jit import location
from fusedops.jit.entry import Entry
from fusedops.jit.location import CacheSettings
from fusedops.jit.sources import Sources
from fusedops.jit.store import Store, default_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path) -> Store:
    return Store(CacheSettings(root))


# --- where a kernel comes from


def test_a_kernel_comes_from_the_compiler_then_memory_then_disk(store: Store, root: Path) -> None:
    compiler = FakeCompiler("a")
    first = store.get(fake_key("a"), compiler, load)
    assert first == fake_object("a")
    assert store.get(fake_key("a"), compiler, load) is first
    assert store.counts == {"compiled": 1}
    again = Store(CacheSettings(root))
    assert again.get(fake_key("a"), compiler, load) == first
    assert again.counts == {"disk": 1}
    assert compiler.calls == 1


def test_the_loader_gets_what_the_compiler_returned(store: Store, root: Path) -> None:
    for expected in ("compiled", "disk"):
        entry = Store(CacheSettings(root)).ensure(fake_key("a"), FakeCompiler("a"))
        assert entry.origin == expected
        assert entry.info == {"entry_point": "run_a"}
        assert entry.path("symbols.txt").read_text() == "a"


def test_an_overlay_serves_before_disk_and_is_never_written(tmp_path: Path, root: Path) -> None:
    overlay = tmp_path / "overlay"
    fill(overlay, "a")
    before = sorted((path, path.stat().st_mtime_ns) for path in overlay.rglob("*"))
    store = Store(CacheSettings(root, (tmp_path, overlay)))
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
    assert store.counts == {"overlay": 1}
    assert not root.exists()
    store.get(fake_key("b"), FakeCompiler("b"), load)
    assert store.counts == {"overlay": 1, "compiled": 1}
    assert entry_dir(root, "b").is_dir()
    assert before == sorted((path, path.stat().st_mtime_ns) for path in overlay.rglob("*"))


def test_the_environment_names_the_overlays_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    fill(first, "a")
    fill(second, "a", "b")
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEDOPS_OVERLAY", os.pathsep.join([str(first), "", str(second)]))
    store = default_store()
    assert store is default_store()
    found = [store.find(fake_key(spec)) for spec in "ab"]
    assert [entry and entry.folder.parent.parent for entry in found] == [first, second]
    monkeypatch.delenv("FUSEDOPS_OVERLAY")
    assert default_store().find(fake_key("a")) is None


def test_a_missing_overlay_is_an_error_that_names_the_variable(tmp_path: Path, root: Path) -> None:
    store = Store(CacheSettings(root, (tmp_path / "nowhere",)))
    with pytest.raises(ConfigError, match=r"nowhere.*FUSEDOPS_OVERLAY"):
        store.get(fake_key("a"), FakeCompiler("a"), load)


def test_a_shared_store_is_readable_by_everyone_and_a_normal_one_by_nobody(tmp_path: Path) -> None:
    old_umask = os.umask(0o027)
    try:
        Store(CacheSettings(tmp_path / "shared"), shared=True).ensure(
            fake_key("a"), FakeCompiler("a")
        )
        fill(tmp_path / "private", "a")
    finally:
        os.umask(old_umask)
    shared, private = entry_dir(tmp_path / "shared"), entry_dir(tmp_path / "private")
    folders = [shared, *list(shared.parents)[:2]]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in shared.iterdir()} == {0o644}
    folders = [private, *list(private.parents)[:2]]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in private.iterdir()} == {0o600}


def test_b60_without_the_compiler_any_build_of_the_same_sources_serves(root: Path) -> None:
    fill(root, "a")
    absent = fake_key("a", toolchain={"fake": None})
    assert absent.missing_tools == ("fake",)
    entry = Store(CacheSettings(root)).find(absent)
    assert entry is not None
    assert entry.read("kernel.o") == fake_object("a")
    for other in (fake_key("b", toolchain={"fake": None}), fake_key("a", toolchain={"fake": "2"})):
        assert Store(CacheSettings(root)).find(other) is None
    two_tools = fake_key("c", toolchain={"fake": "1.0", "loader": "7"})
    Store(CacheSettings(root)).ensure(two_tools, FakeCompiler("c"))
    for loader, found in (("7", True), ("8", False)):
        key = fake_key("c", toolchain={"fake": None, "loader": loader})
        assert (Store(CacheSettings(root)).find(key) is not None) is found


# --- failing and refused compiles


def test_a_failed_compile_leaves_nothing_and_is_tried_again(store: Store, root: Path) -> None:
    def fail(folder: Path) -> dict[str, str]:
        (folder / "half.o").write_bytes(b"half")
        raise RuntimeError("\n".join(f"log line {i}" for i in range(100)))

    with pytest.raises(BuildError, match=r"fake \[a\] for sm_90a failed: RuntimeError") as caught:
        store.get(fake_key("a"), fail, load)
    assert "log line 99" in str(caught.value)
    assert "log line 10\n" not in str(caught.value)
    assert list((root / "entries").iterdir()) == []
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")


def test_a_compiler_that_writes_nothing_is_an_error(store: Store) -> None:
    with pytest.raises(BuildError, match="wrote no file"):
        store.get(fake_key("a"), lambda folder: {}, load)


def test_errors_of_the_loader_come_out_as_they_are(store: Store) -> None:
    def refuse(entry: Entry) -> bytes:
        raise LaunchError("the driver says no")

    with pytest.raises(LaunchError, match="says no"):
        store.get(fake_key("a"), FakeCompiler("a"), refuse)
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")


def test_compile_0_raises_and_names_the_command_and_the_variable(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, "a")
    monkeypatch.setenv("FUSEDOPS_COMPILE", "0")
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
    compiler = FakeCompiler("b")
    with pytest.raises(KernelMissingError, match="fusedops prebuild") as caught:
        store.get(fake_key("b"), compiler, load)
    for part in ("FUSEDOPS_COMPILE=0", "FUSEDOPS_OVERLAY", "fake [b] for sm_90a", str(root)):
        assert part in str(caught.value)
    with pytest.raises(KernelMissingError, match=r"built with \{'fake': '1.0'\}, installed here"):
        store.get(fake_key("a", toolchain={"fake": "2.0"}), FakeCompiler("a"), load)
    assert compiler.calls == 0
    monkeypatch.setenv("FUSEDOPS_COMPILE", "1")
    assert store.get(fake_key("b"), compiler, load) == fake_object("b")


def test_b30_a_miss_during_graph_capture_raises_and_never_compiles(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, "stored")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert store.get(fake_key("stored"), FakeCompiler("stored"), load) == fake_object("stored")
    compiler = FakeCompiler("a")
    with pytest.raises(KernelMissingError, match="warm-up call: run decode_step"):
        store.get(fake_key("a"), compiler, load, warm_up="run decode_step() once")
    unstored = fake_key("a", sources=Sources((), "its class has no source file"))
    with pytest.raises(KernelMissingError, match="warm-up call"):
        store.get(unstored, compiler, load)
    assert compiler.calls == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert store.get(fake_key("a"), compiler, load) == fake_object("a")


def test_an_uninitialised_cuda_is_never_asked_about_a_capture(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise AssertionError("asked although CUDA is not initialised")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")


def test_a_memory_only_kernel_touches_no_folder(
    store: Store, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    key = fake_key("a", sources=Sources((("n", "1"),), "class N has no source file"))
    compiler = FakeCompiler("a")
    first = store.get(key, compiler, load)
    assert first == fake_object("a")
    assert store.get(key, compiler, load) is first
    assert store.counts == {"memory only": 1}
    assert compiler.calls == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BuildError, match="class N has no source file"):
        store.ensure(key, compiler)
    monkeypatch.setenv("FUSEDOPS_COMPILE", "0")
    other = Store(CacheSettings(root))
    with pytest.raises(KernelMissingError, match="never stored: class N has no source file"):
        other.get(key, compiler, load)


def test_the_default_store_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv(location.CACHE_VARIABLE, str(tmp_path / name))
        default_store().get(fake_key("a"), FakeCompiler("a"), load)
        assert entry_dir(tmp_path / name).is_dir()
