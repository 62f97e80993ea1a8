"""A cache folder on disk: finding entries in it and adding entries to it.

Layout below the root: ``entries/<name>/`` holds one kernel each (``entry.py``), a name that begins
with a dot is an entry being written; ``locks/<name>.lock`` is held while that kernel is built or
removed; ``damaged/<name>/`` keeps the last damaged copy for a look at it. These three folders are
made when they are first needed and never removed, so that what renames into one finds it there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from fusedops.errors import BuildError, FusedOpsError
from fusedops.jit.entry import (
    DamagedEntryError,
    Entry,
    read_entry,
    sync,
    write_manifest,
)
from fusedops.jit.key import KernelKey, is_entry_name
from fusedops.jit.location import CACHE_VARIABLE, OVERLAY_VARIABLE, make_dir, require_own
from fusedops.jit.lock import KeyLock
from fusedops.jit.progress import progress, say

__all__ = [
    "Build",
    "CacheFolder",
    "overlay_errors",
    "run_build",
    "storage_errors",
    "why_no_entry",
]

Build = Callable[[Path], Mapping[str, str]]
"""Compiles a kernel: writes its files (flat, at least one) into the folder given and returns what
the loader wants to be told. Raises BuildError with the last lines of the compiler's log."""

OnDamage = Callable[[Path, str], None]
Result = TypeVar("Result")

_STORAGE_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
)


@contextlib.contextmanager
def storage_errors(folder: Path, remedy: str = CACHE_VARIABLE) -> Iterator[None]:
    """Turn an OSError inside the block into a BuildError that names ``folder`` and ``remedy``."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"cannot keep kernels in {folder}: {error.strerror or error} "
            f"({error.filename or folder}). It takes a folder that you can write, with free space "
            f"and file locks. Set {remedy} to one."
        ) from error


@contextlib.contextmanager
def overlay_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError inside the block, which only reads, into a BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"cannot read the prebuilt kernels in {folder}: {error.strerror or error} "
            f"({error.filename or folder}). Change {OVERLAY_VARIABLE}, or the folder's mode."
        ) from error


def why_no_entry(path: Path) -> str | None:
    """Why what lies at an entry's path is no entry, told without following it.

    None for a folder, and where nothing is.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return "it is a symbolic link, which is not followed"
    return None if stat.S_ISDIR(mode) else "it is not a folder"


def _remove(path: Path) -> None:
    """Remove what lies at ``path``, whatever it is; of a symbolic link the link itself.

    Another process may be removing it at the same time.

    Raises:
        OSError: it cannot be removed.
    """
    while os.path.lexists(path):
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)
        except FileNotFoundError:
            continue  # the other process was faster with a part of it


def run_build(build: Build, folder: Path, key: KernelKey) -> dict[str, str]:
    """Call the compile function; what it raises comes out as a BuildError or as a disk's OSError.

    Raises:
        BuildError: the compile failed or wrote no file.
        OSError: the disk is full or read-only.
    """
    try:
        info = dict(build(folder))
    except FusedOpsError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
            raise
        lines = str(error).strip().splitlines()[-20:] or ["(no message)"]
        raise BuildError(
            "\n".join([f"compiling {key.describe()} failed: {type(error).__name__}:", *lines])
        ) from error
    if not any(folder.iterdir()):
        raise BuildError(f"compiling {key.describe()} failed: it wrote no file")
    return info


class CacheFolder:
    """A root folder with entries.

    Args:
        root: the folder; created when something is added.
        shared: entries become readable for everyone (for a folder that is handed on, as prebuilt
            kernels are); otherwise only for this user.
    """

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        self.root = root
        self.entries_dir = root / "entries"
        self.locks_dir = root / "locks"
        self.damaged_dir = root / "damaged"
        self._dir_mode, self._file_mode = (0o755, 0o644) if shared else (0o700, 0o600)

    def find(
        self,
        key: KernelKey,
        origin: str,
        on_damage: OnDamage,
        require: Callable[[Path], None] | None = None,
    ) -> Entry | None:
        """The verified entry of ``key``, or None.

        Args:
            key: the kernel asked for.
            origin: what ``Entry.origin`` is to say.
            on_damage: called with the folder and the reason for each damaged entry of this key.
            require: called with each folder and file before it is read; raises on a bad owner.
        """
        for folder in self._candidates(key):
            why = why_no_entry(folder)
            if why is not None:
                on_damage(folder, why)
                continue
            try:
                entry, manifest = read_entry(folder, origin, require)
            except FileNotFoundError:
                continue
            except DamagedEntryError as error:
                on_damage(folder, str(error))
                continue
            if manifest.fields != key.fields:
                on_damage(folder, "its manifest belongs to another kernel")
            elif key.accepts_toolchain(manifest.toolchain):
                return entry
        return None

    def _candidates(self, key: KernelKey) -> list[Path]:
        exact = self.entries_dir / key.name
        if not key.missing_tools:
            return [exact]
        # Without the compiler its version is unknown, so any build of the same sources will do.
        return [exact, *(path for path in self.builds_of_same_sources(key) if path != exact)]

    def builds_of_same_sources(self, key: KernelKey) -> list[Path]:
        """Folders of this kernel built with any versions of the tools, in a fixed order."""
        return sorted(self.entries_dir.glob(f"{key.prefix}*"), reverse=True)

    def names(self) -> list[str]:
        """Names of all that lies where entries do, sorted: damage too, such as a file or a link."""
        if not self.entries_dir.is_dir():
            return []
        return sorted(path.name for path in self.entries_dir.iterdir() if is_entry_name(path.name))

    def make(self) -> None:
        """Create the folders and check that the root is this user's.

        Raises:
            BuildError: the root is not a folder of this user's own.
            OSError: it cannot be made.
        """
        require_own(self.root)
        make_dir(self.root, self._dir_mode)
        require_own(self.root)
        for folder in (self.entries_dir, self.locks_dir):
            make_dir(folder, self._dir_mode)

    def lock(self, name: str) -> KeyLock:
        """The lock under which the entry ``name`` is built or removed; not taken yet."""
        return KeyLock(self.locks_dir / f"{name}.lock")

    def find_or_add(
        self, key: KernelKey, build: Build, origin: str, use: Callable[[Entry], Result]
    ) -> Result:
        """Use the entry of ``key``, compiled here if no other process has done so meanwhile.

        Args:
            key: the kernel asked for.
            build: compiles it.
            origin: what ``Entry.origin`` is to say when nothing had to be compiled; otherwise it
                says ``"compiled"``.
            use: called with the entry while its lock is held, so that nobody removes it meanwhile.

        Returns:
            what ``use`` returns.

        Raises:
            BuildError: the compile failed, or the folder cannot be written.
        """
        lock = self.lock(key.name)
        with storage_errors(self.root):
            self.make()
            if not lock.acquire(wait=False):
                with progress(f"waiting for another process to compile {key.describe()}"):
                    lock.acquire()
        try:
            with storage_errors(self.root):
                entry = self.find(key, origin, self._set_aside) or self._add(key, build)
            return use(entry)
        finally:
            lock.release()

    def _set_aside(self, folder: Path, why: str) -> None:
        """Move a damaged entry, whose lock must be held, to where the last damaged copy is kept.

        ``remove_damaged`` leaves it alone while the lock is held and keeps the folder itself, which
        is therefore there from the first damage on.
        """
        make_dir(self.damaged_dir, self._dir_mode)
        kept = self.damaged_dir / folder.name
        _remove(kept)
        folder.rename(kept)
        say(f"the stored kernel {folder.name} is damaged ({why}): moved to {kept}, rebuilding")

    def _add(self, key: KernelKey, build: Build) -> Entry:
        final = self.entries_dir / key.name
        temporary = self.entries_dir / f".{key.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        temporary.mkdir(mode=0o700)
        try:
            with progress(f"compiling {key.describe()}"):
                info = run_build(build, temporary, key)
            write_manifest(temporary, key, info, self._file_mode)
            temporary.chmod(self._dir_mode)
            self._put(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(self.entries_dir)
        try:
            return read_entry(final, "compiled")[0]
        except DamagedEntryError as error:
            raise BuildError(
                f"{key.describe()} was compiled, but what came back from {final} is not what was "
                f"written ({error}). Set {CACHE_VARIABLE} to a folder on a sound disk."
            ) from error

    def _put(self, temporary: Path, final: Path) -> None:
        try:
            temporary.rename(final)
        except OSError as error:
            # Only where locks do not lock (some network file systems): another process was faster.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            shutil.rmtree(temporary)

    def remove_entry(self, name: str) -> bool:
        """Remove the entry ``name``, whatever lies there, unless a process holds its lock.

        Returns:
            False when a process does.

        Raises:
            OSError: it cannot be removed.
        """
        lock = self.lock(name)
        if not lock.acquire(wait=False):
            return False
        try:
            # Renamed first, so that no other process ever sees half an entry.
            doomed = self.entries_dir / f".{name}.0.removed"
            _remove(doomed)
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                (self.entries_dir / name).rename(doomed)
            _remove(doomed)
        finally:
            lock.release(delete=True)
        return True

    def damaged(self) -> list[Path]:
        """The damaged copies that were set aside, sorted."""
        return sorted(self.damaged_dir.iterdir()) if self.damaged_dir.is_dir() else []

    def remove_damaged(self, copy: Path) -> bool:
        """Remove one of ``damaged()``, unless a process holds the lock of its entry.

        Returns:
            False when a process does.

        Raises:
            OSError: it cannot be removed.
        """
        if not is_entry_name(copy.name):  # no process of ours put it there
            _remove(copy)
            return True
        lock = self.lock(copy.name)
        if not lock.acquire(wait=False):
            return False
        try:
            _remove(copy)
        finally:
            lock.release(delete=True)
        return True

    def remove_leftovers(self, name: str) -> int:
        """Remove what builds of ``name`` left behind when they were killed; its lock must be held.

        Returns:
            the number of folders removed.

        Raises:
            OSError: one cannot be removed.
        """
        leftovers = list(self.entries_dir.glob(f".{name}.*"))
        for folder in leftovers:
            _remove(folder)
        return len(leftovers)

    def names_of_leftovers(self) -> list[str]:
        """Names of the kernels that a build is under way for, or was when it was killed."""
        hidden = self.entries_dir.glob(".*.*.*.*")
        return sorted({path.name[1:].rsplit(".", 2)[0] for path in hidden})
