"""Listing, verifying and clearing the kernel cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from store_worker import OBJECT_BYTES, FakeCompiler, entry_dir, fake_key, fake_object, load

from fusedops.errors import BuildError
from fusedops.jit import cache
from fusedops.jit.folder import CacheFolder
from fusedops.jit.location import CacheSettings
from fusedops.jit.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    store = Store(CacheSettings(root))
    store.ensure(fake_key("a"), FakeCompiler("a"))
    store.ensure(fake_key("b", arch="sm_80"), FakeCompiler("b"))
    store.ensure(fake_key("c", family="other"), FakeCompiler("c"))
    return root


def specs(root: Path) -> list[str]:
    return sorted(kernel.spec for kernel in cache.entries(root))


def make_older(root: Path, spec: str, seconds: float) -> None:
    """Let an entry say that it was built earlier."""
    from fusedops.jit.entry import _checksum

    (path,) = [kernel.path for kernel in cache.entries(root) if kernel.spec == spec]
    body = json.loads((path / "manifest.json").read_text())
    del body["checksum"]
    body["created_s"] -= seconds
    (path / "manifest.json").write_text(json.dumps({**body, "checksum": _checksum(body)}))


def test_entries_tell_what_is_stored_oldest_first(root: Path) -> None:
    make_older(root, "c", 3600.0)
    kernels = cache.entries(root)
    assert kernels[0].spec == "c"
    by_spec = {kernel.spec: kernel for kernel in kernels}
    b = by_spec["b"]
    assert (b.family, b.arch, b.damage, b.toolchain) == ("fake", "sm_80", "", {"fake": "1.0"})
    assert b.name == fake_key("b", arch="sm_80").name == b.path.name
    assert OBJECT_BYTES < b.size_bytes < OBJECT_BYTES + 2000
    assert 0 <= b.age_s < 60
    assert by_spec["c"].age_s == pytest.approx(3600, abs=60)
    assert cache.total_bytes(root) >= sum(kernel.size_bytes for kernel in kernels)


def test_files_and_links_in_the_place_of_entries_are_damage_that_clear_removes(
    root: Path, tmp_path: Path
) -> None:
    file, link, gone = (kernel.path for kernel in cache.entries(root))
    elsewhere = tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    for path in (file, gone):
        shutil.rmtree(path)
    file.write_bytes(b"12345")
    gone.symlink_to(tmp_path / "nothing")
    reasons = {
        file: "it is not a folder",
        link: "it is a symbolic link, which is not followed",
        gone: "it is a symbolic link, which is not followed",
    }
    assert {kernel.path: kernel.damage for kernel in cache.entries(root)} == reasons
    assert {damage.path: damage.reason for damage in cache.verify(root)} == reasons
    cleared = cache.clear(root, names=[damage.name for damage in cache.verify(root)])
    assert (cleared.kernels, cleared.size_bytes) == (3, 5)
    assert cache.entries(root) == []
    assert (elsewhere / "manifest.json").is_file()


def test_verify_names_what_is_damaged_and_changes_nothing(root: Path) -> None:
    assert cache.verify(root) == []
    broken, unreadable = (kernel.path for kernel in cache.entries(root) if kernel.spec in "ab")
    (broken / "kernel.o").write_bytes(b"short")
    (unreadable / "manifest.json").write_bytes(b"{")
    damages = {damage.path: damage.reason for damage in cache.verify(root)}
    assert damages == {
        broken: f"kernel.o has 5 bytes instead of {OBJECT_BYTES}",
        unreadable: "its manifest cannot be parsed",
    }
    listed = {kernel.path: kernel.damage for kernel in cache.entries(root)}
    assert listed[unreadable] == "its manifest cannot be parsed"
    assert len(listed) == 3
    cleared = cache.clear(root, names=[damage.name for damage in cache.verify(root)])
    assert cleared.kernels == 2
    assert specs(root) == ["c"]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({}, []),
        ({"arch": "sm_80"}, ["a", "c"]),
        ({"family": "fake"}, ["c"]),
        ({"family": "fake", "arch": "sm_90a"}, ["b", "c"]),
        ({"older_than_s": 1800.0}, ["b", "c"]),
        ({"names": []}, ["a", "b", "c"]),
        ({"leftovers_only": True}, ["a", "b", "c"]),
    ],
)
def test_clear_removes_what_all_filters_choose(
    root: Path, filters: dict[str, object], left: list[str]
) -> None:
    make_older(root, "a", 3600.0)
    size_bytes = cache.total_bytes(root)
    cleared = cache.clear(root, **filters)  # type: ignore[arg-type]
    assert specs(root) == left
    assert cleared.kernels == 3 - len(left)
    assert cleared.size_bytes == size_bytes - cache.total_bytes(root)
    assert cleared.busy == ()


def test_clear_leaves_a_kernel_that_is_being_built(root: Path) -> None:
    name = fake_key("a").name
    with CacheFolder(root).lock(name):
        cleared = cache.clear(root)
    assert cleared.busy == (name,)
    assert specs(root) == ["a"]
    assert cache.clear(root).kernels == 1


def test_the_environment_names_the_folder_and_an_absent_one_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nowhere"
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(folder))
    assert cache.cache_path() == folder
    assert cache.entries() == []
    assert cache.verify() == []
    assert cache.total_bytes() == 0
    assert cache.clear() == cache.Cleared(0, 0, 0)
    assert not folder.exists()
    for name in ("FUSEDOPS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache.cache_path() is None
    assert cache.entries() == []


def test_a_folder_of_somebody_else_is_neither_listed_nor_cleared(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    for look in (cache.entries, cache.verify, cache.clear):
        with pytest.raises(BuildError, match="belongs to uid"):
            look(root)


# Another process at the same time, always at the worst moment


def test_b56_setting_a_damaged_kernel_aside_survives_a_clear(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(entry_dir(root) / "kernel.o", 3)
    rename, cleared = Path.rename, []

    def clear_and_rename(path: Path, target: Path) -> Path:
        if target.parent.name == "damaged":
            cleared.append(cache.clear(root))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", clear_and_rename)
    store = Store(CacheSettings(root))
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
    assert [c.busy for c in cleared] == [(fake_key("a").name,)]
    assert (root / "damaged" / fake_key("a").name).is_dir()
    with CacheFolder(root).lock(fake_key("a").name):
        assert cache.clear(root, leftovers_only=True).leftovers == 0
    assert cache.clear(root, leftovers_only=True).leftovers == 1
    assert list((root / "damaged").iterdir()) == []


def test_b56_two_clears_at_once_remove_everything_between_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec in "ab":  # one set aside, and one that a killed build left behind
        os.truncate(entry_dir(root) / "kernel.o", 3)
        Store(CacheSettings(root)).ensure(fake_key("a"), FakeCompiler("a"))
        (root / "entries" / f".{fake_key(spec).name}.1.00ff").mkdir()
    for method in ("remove_entry", "remove_damaged", "remove_leftovers"):
        own = getattr(CacheFolder, method)

        def late(folder: CacheFolder, what: str, method: str = method, own: object = own) -> object:
            monkeypatch.setattr(CacheFolder, method, own)
            cache.clear(root)
            return own(folder, what)  # type: ignore[operator]

        monkeypatch.setattr(CacheFolder, method, late)
    cache.clear(root)
    for folder in ("entries", "damaged"):
        assert list((root / folder).iterdir()) == []


@pytest.mark.parametrize("call", ["entries", "verify", "total_bytes", "clear"])
@pytest.mark.parametrize("before", ["scandir", "open"])
def test_what_vanishes_while_it_is_looked_at_is_not_there(
    root: Path, call: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = entry_dir(root)
    look = getattr(os, before)

    def remove_and_look(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path) in (str(doomed), str(doomed / "manifest.json")):
            monkeypatch.undo()
            shutil.rmtree(doomed)
        return look(path, *rest, **more)

    monkeypatch.setattr(os, before, remove_and_look)
    result = getattr(cache, call)(root)
    monkeypatch.undo()
    if call == "entries":
        assert [kernel.spec for kernel in result] == ["b", "c"]
    elif call == "verify":
        assert result == []
    elif call == "total_bytes":
        assert result == cache.total_bytes(root)
    else:
        assert (specs(root), result.busy) == ([], ())
