"""Damaged and vanishing entries of the store."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from store_worker import FakeCompiler, entry_dir, fake_key, fake_object, fill, load

from fusedops.errors import BuildError, KernelMissingError
from fusedops.jit import cache
from fusedops.jit.entry import Entry
from fusedops.jit.folder import CacheFolder
from fusedops.jit.location import CacheSettings
from fusedops.jit.lock import KeyLock
from fusedops.jit.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path) -> Store:
    return Store(CacheSettings(root))


def truncate(folder: Path) -> None:
    os.truncate(folder / "kernel.o", 1000)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "kernel.o").read_bytes())
    data[17] ^= 1
    (folder / "kernel.o").write_bytes(data)


def delete_a_file(folder: Path) -> None:
    (folder / "symbols.txt").unlink()


def delete_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def empty_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 0)


def alter_the_manifest(folder: Path) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    body["info"]["entry_point"] = "run_b"
    (folder / "manifest.json").write_text(json.dumps(body))


def make_the_manifest_a_list(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def put_another_kernel_there(folder: Path) -> None:
    fill(folder.parent.parent, "b")
    shutil.rmtree(folder)
    (folder.parent / fake_key("b").name).rename(folder)


def put_a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no entry")


def put_a_link_in_its_place(folder: Path) -> None:
    elsewhere = folder.parent.parent / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere, target_is_directory=True)


def put_a_dangling_link_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "nowhere")


def put_a_link_to_itself_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def put_a_pipe_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    os.mkfifo(folder)


def empty_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def make_the_manifest_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def make_a_file_a_folder(folder: Path) -> None:
    (folder / "kernel.o").unlink()
    (folder / "kernel.o").mkdir()


def make_a_file_a_pipe(folder: Path) -> None:
    (folder / "kernel.o").unlink()
    os.mkfifo(folder / "kernel.o")


def make_the_manifest_a_pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def make_the_manifest_a_link_to_itself(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("manifest.json")


def nest_the_manifest_deeply(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 200_000)


OTHER_KINDS = [
    put_a_file_in_its_place,
    put_a_link_in_its_place,
    put_a_dangling_link_in_its_place,
    put_a_link_to_itself_in_its_place,
    put_a_pipe_in_its_place,
]
"""Damages after which no folder lies at the entry's path."""

UNREADABLE = [
    make_the_manifest_a_folder,
    make_the_manifest_a_pipe,
    make_the_manifest_a_link_to_itself,
    nest_the_manifest_deeply,
]
"""Damages that show as soon as the manifest is read."""

DAMAGES = [
    *OTHER_KINDS,
    *UNREADABLE,
    empty_the_folder,
    make_a_file_a_folder,
    make_a_file_a_pipe,
    truncate,
    flip_a_byte,
    delete_a_file,
    delete_the_manifest,
    empty_the_manifest,
    alter_the_manifest,
    make_the_manifest_a_list,
    put_another_kernel_there,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_set_aside_and_rebuilt_once(
    damage: Callable[[Path], None], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(root, "a")
    damage(entry_dir(root))
    store, compiler = Store(CacheSettings(root)), FakeCompiler("a")
    assert store.get(fake_key("a"), compiler, load) == fake_object("a")
    assert compiler.calls == 1
    assert os.path.lexists(root / "damaged" / fake_key("a").name)
    assert entry_dir(root).is_dir()
    assert not entry_dir(root).is_symlink()
    assert "is damaged" in capsys.readouterr().err
    after = Store(CacheSettings(root))
    assert after.get(fake_key("a"), compiler, load) == fake_object("a")
    assert after.counts == {"disk": 1}
    damage(entry_dir(root))  # a second copy replaces the first one set aside
    Store(CacheSettings(root)).get(fake_key("a"), compiler, load)
    assert compiler.calls == 2


@pytest.mark.parametrize("damage", [*UNREADABLE, make_a_file_a_folder, make_a_file_a_pipe])
def test_the_tools_count_one_damaged_entry_among_sound_ones(
    damage: Callable[[Path], None], root: Path
) -> None:
    fill(root, "a", "b")
    damage(entry_dir(root))
    listed = {kernel.name: kernel.damage for kernel in cache.entries(root)}
    assert set(listed) == {fake_key("a").name, fake_key("b").name}
    assert listed[fake_key("b").name] == ""
    assert bool(listed[fake_key("a").name]) == (damage in UNREADABLE)
    (found,) = cache.verify(root)
    assert found.path == entry_dir(root)
    assert "is not a file" in found.reason or "cannot be parsed" in found.reason
    cleared = cache.clear(root, names=[found.name])
    assert (cleared.kernels, cleared.busy) == (1, ())
    assert not entry_dir(root).exists()
    assert cache.clear(root).kernels == 1


def test_an_entry_that_may_not_be_read_is_one_damaged_entry(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, "a", "b")
    open_file = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if Path(path).is_relative_to(entry_dir(root)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    (found,) = cache.verify(root)
    assert found.reason == "manifest.json cannot be read: Permission denied"
    damages = {kernel.path: kernel.damage for kernel in cache.entries(root)}
    assert damages == {entry_dir(root): found.reason, entry_dir(root, "b"): ""}


def test_a_link_is_set_aside_without_a_look_at_what_it_points_to(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(root, "a")
    put_a_link_in_its_place(entry_dir(root))
    (root / "elsewhere" / "kernel.o").write_bytes(b"what somebody else put there")
    before = sorted((path, path.stat().st_mtime_ns) for path in (root / "elsewhere").rglob("*"))
    assert Store(CacheSettings(root)).get(fake_key("a"), FakeCompiler("a"), load) == fake_object(
        "a"
    )
    assert "it is a symbolic link, which is not followed" in capsys.readouterr().err
    kept = root / "damaged" / fake_key("a").name
    assert kept.is_symlink()
    put_a_file_in_its_place(entry_dir(root))  # what is set aside next takes the link's place
    Store(CacheSettings(root)).get(fake_key("a"), FakeCompiler("a"), load)
    assert kept.read_text() == "no entry"
    after = sorted((path, path.stat().st_mtime_ns) for path in (root / "elsewhere").rglob("*"))
    assert before == after


@pytest.mark.parametrize("damage", OTHER_KINDS)
def test_what_is_no_folder_is_damage_of_the_cache_and_no_kernel_of_an_overlay(
    damage: Callable[[Path], None], tmp_path: Path, root: Path
) -> None:
    overlay = tmp_path / "overlay"
    for folder in (overlay, root):
        fill(folder, "a", "b")
        damage(entry_dir(folder))
    listed = {kernel.name: kernel.damage for kernel in cache.entries(root)}
    assert set(listed) == {fake_key("a").name, fake_key("b").name}
    assert {one.name: one.reason for one in cache.verify(root)} == {
        fake_key("a").name: listed[fake_key("a").name]
    }
    assert listed[fake_key("a").name]
    assert not listed[fake_key("b").name]
    cache.clear(root, names=[fake_key("a").name])
    assert [kernel.name for kernel in cache.entries(root)] == [fake_key("b").name]
    store = Store(CacheSettings(tmp_path / "other", (overlay,)))
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
    assert store.counts == {"compiled": 1}
    assert os.path.lexists(entry_dir(overlay))  # an overlay is never written


def test_a_damaged_overlay_is_passed_over_and_named_when_nothing_else_serves(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "overlay"
    fill(overlay, "a")
    flip_a_byte(entry_dir(overlay))
    store = Store(CacheSettings(root, (overlay,)))
    monkeypatch.setenv("FUSEDOPS_COMPILE", "0")
    with pytest.raises(KernelMissingError, match=r"kernel\.o fails its checksum"):
        store.get(fake_key("a"), FakeCompiler("a"), load)
    monkeypatch.delenv("FUSEDOPS_COMPILE")
    assert store.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
    assert store.counts == {"compiled": 1}
    assert entry_dir(overlay).is_dir()


def test_a_disk_that_returns_other_bytes_is_an_error_and_not_a_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = CacheFolder._put

    def put_and_damage(self: CacheFolder, temporary: Path, final: Path) -> None:
        put(self, temporary, final)
        flip_a_byte(final)

    monkeypatch.setattr(CacheFolder, "_put", put_and_damage)
    compiler = FakeCompiler("a")
    with pytest.raises(BuildError, match="not what was written"):
        store.get(fake_key("a"), compiler, load)
    assert compiler.calls == 1


def test_an_entry_that_vanishes_before_it_is_loaded_is_compiled_again(
    store: Store, root: Path
) -> None:
    compiler, loads = FakeCompiler("a"), []

    def clear_first(entry: Entry) -> bytes:
        loads.append(cache.clear(root).kernels)
        return load(entry)

    assert store.get(fake_key("a"), compiler, clear_first) == fake_object("a")
    assert loads == [1, 0]  # the second time it is loaded under its lock, which `clear` respects

    def vanish_always(entry: Entry) -> bytes:
        shutil.rmtree(entry.folder)
        return load(entry)

    with pytest.raises(BuildError, match="vanished"):
        store.get(fake_key("b"), FakeCompiler("b"), vanish_always)


def test_where_locks_do_not_lock_the_first_entry_stays(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyLock, "acquire", lambda self, wait=True: True)

    def overtaken(folder: Path) -> dict[str, str]:
        fill(root, "a")
        return dict(FakeCompiler("a")(folder))

    assert store.get(fake_key("a"), overtaken, load) == fake_object("a")
    assert [path.name for path in (root / "entries").iterdir()] == [fake_key("a").name]
