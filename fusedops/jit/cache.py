"""Looking at the kernel cache and tidying it: what the command ``fusedops cache`` runs.

Every function takes ``root``: the folder to look at; None takes the one that the environment names.
Nothing here compiles or loads a kernel, and only ``clear`` writes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.jit.entry import DamagedEntryError, Manifest, read_entry, read_manifest
from fusedops.jit.folder import CacheFolder, storage_errors, why_no_entry
from fusedops.jit.location import CacheSettings, require_own

__all__ = [
    "CachedKernel",
    "Cleared",
    "Damage",
    "cache_path",
    "clear",
    "entries",
    "total_bytes",
    "verify",
]


@dataclass(frozen=True)
class CachedKernel:
    """One stored kernel, as ``fusedops cache list`` shows it.

    Attributes:
        name: name of its folder, the key's hash.
        path: its folder.
        family, spec, arch: what it is; empty when ``damage`` says that the manifest is unreadable.
        toolchain: versions of the tools that built it.
        size_bytes: bytes of all its files.
        age_s: seconds since it was built.
        damage: why it cannot be used; empty when its manifest is sound (``verify`` reads the files
            too).
    """

    name: str
    path: Path
    family: str
    spec: str
    arch: str
    toolchain: Mapping[str, Any]
    size_bytes: int
    age_s: float
    damage: str = ""


@dataclass(frozen=True)
class Damage:
    """A stored kernel whose content is not what its manifest says."""

    name: str
    path: Path
    reason: str


@dataclass(frozen=True)
class Cleared:
    """What ``clear`` removed.

    Attributes:
        kernels: number of entries removed.
        leftovers: number of folders removed that killed builds or damage left behind.
        size_bytes: bytes of all of them.
        busy: names of entries that stay because a process is building them right now.
    """

    kernels: int
    leftovers: int
    size_bytes: int
    busy: tuple[str, ...] = ()


def cache_path() -> Path | None:
    """The cache folder that the environment names; None when it would be a temporary one."""
    return CacheSettings.from_environment().root


def entries(root: Path | None = None) -> list[CachedKernel]:
    """Every stored kernel, oldest first; empty when there is no folder yet.

    Raises:
        BuildError: the folder is not this user's own, or cannot be read.
    """
    folder = _existing(root)
    if folder is None:
        return []
    with storage_errors(folder.root):
        described = [_describe(folder.entries_dir / name) for name in folder.names()]
    found = [kernel for kernel in described if kernel is not None]
    return sorted(found, key=lambda kernel: (-kernel.age_s, kernel.name))


def total_bytes(root: Path | None = None) -> int:
    """Bytes of everything below the cache folder: kernels, leftovers, damaged copies."""
    folder = _existing(root)
    return 0 if folder is None else _size_bytes(folder.root)


def verify(root: Path | None = None) -> list[Damage]:
    """Read every file of every stored kernel and compare it with its manifest; changes nothing.

    Returns:
        the damaged ones; each would be set aside and compiled anew when it is asked for.

    Raises:
        BuildError: as ``entries``.
    """
    folder = _existing(root)
    damages: list[Damage] = []
    if folder is None:
        return damages
    with storage_errors(folder.root):
        for name in folder.names():
            path = folder.entries_dir / name
            # Once more where it fails: it may have been removed and built anew between two files.
            if _why_damaged(path) is not None:
                why = _why_damaged(path)
                if why is not None:
                    damages.append(Damage(name, path, why))
    return damages


def _why_damaged(path: Path) -> str | None:
    """Why the entry at ``path`` cannot be used; None when it is sound, or removed meanwhile."""
    why = why_no_entry(path)
    if why is not None:
        return why
    try:
        read_entry(path, "disk")
    except FileNotFoundError:
        return None
    except DamagedEntryError as error:
        return str(error)
    except OSError as error:
        return _why_unreadable(error)
    return None


def _why_unreadable(error: OSError) -> str:
    return f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"


def clear(
    root: Path | None = None,
    *,
    family: str | None = None,
    arch: str | None = None,
    older_than_s: float | None = None,
    names: Collection[str] | None = None,
    leftovers_only: bool = False,
) -> Cleared:
    """Remove stored kernels, and what killed builds and damage left behind.

    A kernel that another process is building stays. A process that has loaded a kernel keeps it.

    Args:
        root: the folder; None takes the one that the environment names.
        family: only kernels of this family; with the other filters, all must hold.
        arch: only kernels for this architecture.
        older_than_s: only kernels built longer ago than this many seconds.
        names: only kernels of these names, e.g. those that ``verify`` found damaged.
        leftovers_only: remove no sound kernel, only leftovers and damaged copies.

    Raises:
        BuildError: the folder is not this user's own, or cannot be written.
    """
    folder = _existing(root)
    if folder is None:
        return Cleared(0, 0, 0)

    def chosen(kernel: CachedKernel) -> bool:
        return (
            (family is None or kernel.family == family)
            and (arch is None or kernel.arch == arch)
            and (older_than_s is None or kernel.age_s > older_than_s)
            and (names is None or kernel.name in names)
        )

    kernels = [] if leftovers_only else [kernel for kernel in entries(root) if chosen(kernel)]
    removed, leftovers, size_bytes = 0, 0, 0
    busy: list[str] = []
    with storage_errors(folder.root):
        folder.make()
        for kernel in kernels:
            if folder.remove_entry(kernel.name):
                removed += 1
                size_bytes += kernel.size_bytes
            else:
                busy.append(kernel.name)
        for name in folder.names_of_leftovers():
            count, bytes_removed = _remove_leftovers(folder, name)
            leftovers += count
            size_bytes += bytes_removed
        for copy in folder.damaged():
            bytes_removed = _size_bytes(copy)
            if folder.remove_damaged(copy):
                leftovers += 1
                size_bytes += bytes_removed
    return Cleared(removed, leftovers, size_bytes, tuple(busy))


def _existing(root: Path | None) -> CacheFolder | None:
    path = cache_path() if root is None else root
    if path is None or not require_own(path):
        return None
    return CacheFolder(path)


def _describe(path: Path) -> CachedKernel | None:
    """The stored kernel at ``path``; None when it was removed meanwhile."""
    size_bytes = _size_bytes(path)
    why = why_no_entry(path)
    if why is not None:
        return CachedKernel(path.name, path, "", "", "", {}, size_bytes, 0.0, why)
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return None
    except (DamagedEntryError, OSError) as error:
        why = _why_unreadable(error) if isinstance(error, OSError) else str(error)
        return CachedKernel(path.name, path, "", "", "", {}, size_bytes, 0.0, why)
    return _from_manifest(path, manifest, size_bytes)


def _from_manifest(path: Path, manifest: Manifest, size_bytes: int) -> CachedKernel:
    fields = manifest.fields
    return CachedKernel(
        path.name,
        path,
        fields["family"],
        fields["spec"],
        fields["arch"],
        manifest.toolchain,
        size_bytes,
        max(0.0, time.time() - manifest.created_s),
    )


def _size_bytes(top: Path) -> int:
    """Bytes of the files below a folder, or of a file; links are not followed."""
    # os.walk passes over a folder that another process removes meanwhile, but follows its first.
    walked = () if top.is_symlink() else os.walk(top)
    files = [Path(folder, name) for folder, _, names in walked for name in names]
    total = 0
    for path in files or [top]:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _remove_leftovers(folder: CacheFolder, name: str) -> tuple[int, int]:
    lock = folder.lock(name)
    if not lock.acquire(wait=False):
        return 0, 0  # its build is still running
    try:
        size_bytes = sum(map(_size_bytes, folder.entries_dir.glob(f".{name}.*")))
        return folder.remove_leftovers(name), size_bytes
    finally:
        lock.release()
