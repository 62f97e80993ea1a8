"""Where the cache folder is, who may own it, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_worker import NOBODY_UID, FakeCompiler, Worker, fake_key, fake_object, load

from fusedops.errors import BuildError, ConfigError
from fusedops.jit import entry, location
from fusedops.jit.location import CacheSettings
from fusedops.jit.store import Store

VARIABLES = ("FUSEDOPS_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "FUSEDOPS_OVERLAY")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def get(root: Path | None, *overlays: Path) -> bytes:
    return Store(CacheSettings(root, overlays)).get(fake_key("a"), FakeCompiler("a"), load)


# --- which folder


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FUSEDOPS_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"FUSEDOPS_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/fusedops"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/fusedops"),
        ({"HOME": "/h"}, "/h/.cache/fusedops"),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_the_first_variable_that_is_set_names_the_folder(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    root = CacheSettings.from_environment().root
    assert (None if root is None else str(root)) == expected


def test_a_relative_folder_is_taken_from_where_the_program_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", "kernels")
    monkeypatch.setenv("FUSEDOPS_OVERLAY", os.pathsep.join(["prebuilt", "/opt/kernels"]))
    settings = CacheSettings.from_environment()
    assert settings.root == tmp_path / "kernels"
    assert settings.overlays == (tmp_path / "prebuilt", Path("/opt/kernels"))


def test_b58_home_unset_takes_a_private_temporary_folder_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(location, "_temporary", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = CacheSettings.from_environment()
    with pytest.warns(RuntimeWarning, match="HOME is not set") as caught:
        folder = settings.resolve_root()
    assert len(caught) == 1
    assert "FUSEDOPS_CACHE_DIR" in str(caught[0].message)
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings.resolve_root() == folder
        first, second = Store(settings), Store(settings)
        assert first.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
        assert second.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")
    assert (first.counts, second.counts) == ({"compiled": 1}, {"disk": 1})


def test_b58_home_unset_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**dict.fromkeys(VARIABLES), "TMPDIR": str(tmp_path)}
    with Worker(environment) as worker:
        assert worker.ask("get", spec="a")["counts"] == {"compiled": 1}
        assert worker.ask("get", spec="b")["right"]
        assert len(list(tmp_path.iterdir())) == 1
        assert worker.finish().count("HOME is not set") == 1
    assert list(tmp_path.iterdir()) == []


def test_b58_a_missing_folder_is_created_and_only_for_this_user(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    old_umask = os.umask(0o022)
    try:
        assert get(root) == fake_object("a")
    finally:
        os.umask(old_umask)
    assert root.stat().st_mode & 0o777 == 0o700
    assert root.parent.stat().st_mode & 0o777 == 0o755


def test_looking_for_a_kernel_creates_no_folder(tmp_path: Path) -> None:
    assert Store(CacheSettings(tmp_path / "cache")).find(fake_key("a")) is None
    assert list(tmp_path.iterdir()) == []


# --- who owns it


def test_a_folder_of_another_user_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr("fusedops.jit.folder.read_entry", pytest.fail)
    with pytest.raises(BuildError, match=r"belongs to uid \d+.*FUSEDOPS_CACHE_DIR"):
        get(tmp_path / "cache")


@needs_root
def test_a_folder_that_another_user_really_owns_is_refused(tmp_path: Path) -> None:
    get(tmp_path / "cache")
    os.chown(tmp_path / "cache", NOBODY_UID, NOBODY_UID)
    with pytest.raises(BuildError, match=f"belongs to uid {NOBODY_UID}"):
        get(tmp_path / "cache")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    get(root)
    root.chmod(mode)
    with pytest.raises(BuildError, match=rf"mode {mode:04o}: others can write.*chmod go-w"):
        get(root)
    root.chmod(0o755)
    assert get(root) == fake_object("a")


def test_an_empty_folder_that_others_can_write_is_refused_too(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(BuildError, match="others can write"):
        get(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("part", [".", "entries/{name}", "entries/{name}/kernel.o"])
def test_an_overlay_that_everyone_can_write_is_refused(part: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    get(overlay)
    path = overlay / part.format(name=fake_key("a").name)
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(BuildError, match="FUSEDOPS_OVERLAY"):
        get(tmp_path / "cache", overlay)


def test_an_overlay_of_another_user_than_root_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "overlay"
    get(overlay)
    uid = overlay.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if uid == 0:
        location.require_trusted(overlay)  # root's is everybody's
        os.chown(overlay, NOBODY_UID, NOBODY_UID)
    with pytest.raises(BuildError, match="or root that not everyone can write"):
        location.require_trusted(overlay)


def test_an_overlay_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for overlay in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"prebuilt kernels in .*FUSEDOPS_OVERLAY"):
            location.require_overlay(overlay)
        with pytest.raises(ConfigError, match=r"prebuilt kernels in .*FUSEDOPS_OVERLAY"):
            get(tmp_path / "cache", overlay)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(ConfigError, match=r"may not read it.*FUSEDOPS_OVERLAY"):
        location.require_overlay(tmp_path)
    with pytest.raises(BuildError, match=r"may not read it.*FUSEDOPS_CACHE_DIR"):
        location.require_own(tmp_path)


@needs_root
def test_a_folder_of_mode_0_is_refused_by_who_is_not_root() -> None:
    # Not below tmp_path: how many of its parents are root's alone is up to pytest.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        closed = Path(folder) / "closed"
        closed.mkdir()
        os.chown(closed, NOBODY_UID, NOBODY_UID)
        closed.chmod(0)
        with Worker({"FUSEDOPS_CACHE_DIR": str(closed)}) as worker:
            answer = worker.ask("as_nobody", spec="a")
    assert answer["error"] == "BuildError"
    assert "may not read it" in answer["message"]
    assert "FUSEDOPS_CACHE_DIR" in answer["message"]


def test_an_overlay_whose_entries_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "overlay"
    get(overlay)
    monkeypatch.setattr(Path, "lstat", fail_with(errno.EACCES))
    with pytest.raises(BuildError, match=r"cannot read the prebuilt kernels.*FUSEDOPS_OVERLAY"):
        get(tmp_path / "cache", overlay)


# --- a folder that cannot be written


def test_b58_a_file_in_the_folders_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BuildError, match="FUSEDOPS_CACHE_DIR"):
            get(root)


def fail_with(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ((Path, "mkdir"), errno.EACCES),
        ((Path, "mkdir"), errno.EROFS),
        ((entry.os, "fsync"), errno.ENOSPC),
        ((entry.os, "fsync"), errno.EDQUOT),
        ((Path, "write_text"), errno.ENOSPC),
        ((Path, "rename"), errno.EROFS),
        ((entry.os, "open"), errno.EACCES),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else errno.errorcode[value],
)
def test_b58_an_unwritable_or_full_folder_is_an_error_that_names_the_variable(
    target: tuple[object, str], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(target[0], target[1], fail_with(number))
        with pytest.raises(BuildError, match="FUSEDOPS_CACHE_DIR") as caught:
            get(root)
    assert os.strerror(number) in str(caught.value)
    assert str(root) in str(caught.value)
    if (root / "entries").exists():
        assert list((root / "entries").iterdir()) == []
    assert get(root) == fake_object("a")


def test_b58_a_disk_that_fills_up_while_compiling_is_told_from_a_failed_compile(
    tmp_path: Path,
) -> None:
    store = Store(CacheSettings(tmp_path / "cache"))
    with pytest.raises(BuildError, match=r"No space left.*\n?.*FUSEDOPS_CACHE_DIR"):
        store.get(fake_key("a"), fail_with(errno.ENOSPC), load)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=r"compiling fake \[a\] for sm_90a failed: FileNotFound"):
        store.get(fake_key("a"), fail_with(errno.ENOENT), load)  # type: ignore[arg-type]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 KiB, less than one of the fake kernels."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=700", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_b58_a_full_disk_is_an_error_and_is_left_clean(small_disk: Path) -> None:
    with pytest.raises(BuildError, match=r"No space left.*\n?.*FUSEDOPS_CACHE_DIR"):
        get(small_disk / "cache")
    assert list((small_disk / "cache" / "entries").iterdir()) == []


def test_b58_a_read_only_disk_serves_what_it_has(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    root = small_disk / "cache"
    get(root)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert get(root) == fake_object("a")
    store = Store(CacheSettings(root))
    with pytest.raises(BuildError, match="Read-only file system"):
        store.get(fake_key("b"), FakeCompiler("b"), load)
    overlaid = Store(CacheSettings(small_disk / "other", (root,)))
    assert overlaid.get(fake_key("a"), FakeCompiler("a"), load) == fake_object("a")


@needs_root
def test_b58_a_read_only_home_is_an_error_for_an_ordinary_user() -> None:
    home = Path(tempfile.mkdtemp(prefix="fusedops-home-"))
    try:
        home.chmod(0o555)
        environment = {**dict.fromkeys(VARIABLES), "HOME": str(home)}
        with Worker(environment) as worker:
            answer = worker.ask("as_nobody", spec="a")
        assert answer["error"] == "BuildError"
        assert "Permission denied" in answer["message"]
        assert "FUSEDOPS_CACHE_DIR" in answer["message"]
        assert list(home.iterdir()) == []
    finally:
        shutil.rmtree(home)
