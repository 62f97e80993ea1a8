"""Looking at the kernel cache and tidying it: what the command ``fusedops cache`` runs.

Every function takes ``root``: the folder to look at; None takes the one that the environment names.
Nothing here compiles or loads a kernel, and only ``clear`` writes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.jit.entry import DamagedEntryError, Manifest, read_entry, read_manifest
from fusedops.jit.folder import CacheFolder, storage_errors
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
        found = [_describe(folder.entries_dir / name) for name in folder.names()]
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
            try:
                read_entry(path, "disk")
            except FileNotFoundError:
                continue  # removed meanwhile
            except DamagedEntryError as error:
                damages.append(Damage(name, path, str(error)))
    return damages


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
            if _remove_entry(folder, kernel.path):
                removed += 1
                size_bytes += kernel.size_bytes
            else:
                busy.append(kernel.name)
        for name in folder.names_of_leftovers():
            count, bytes_removed = _remove_leftovers(folder, name)
            leftovers += count
            size_bytes += bytes_removed
        if folder.damaged_dir.is_dir():
            leftovers += len(list(folder.damaged_dir.iterdir()))
            size_bytes += _size_bytes(folder.damaged_dir)
            shutil.rmtree(folder.damaged_dir)
    return Cleared(removed, leftovers, size_bytes, tuple(busy))


def _existing(root: Path | None) -> CacheFolder | None:
    path = cache_path() if root is None else root
    if path is None or not require_own(path):
        return None
    return CacheFolder(path)


def _describe(path: Path) -> CachedKernel:
    size_bytes = _size_bytes(path)
    try:
        manifest = read_manifest(path)
    except (DamagedEntryError, FileNotFoundError) as error:
        return CachedKernel(path.name, path, "", "", "", {}, size_bytes, 0.0, str(error))
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


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except FileNotFoundError:
            continue  # removed meanwhile
    return total


def _remove_entry(folder: CacheFolder, path: Path) -> bool:
    lock = folder.lock(path.name)
    if not lock.acquire(wait=False):
        return False
    try:
        # Renamed first, so that no other process ever sees half an entry.
        doomed = path.with_name(f".{path.name}.0.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    except FileNotFoundError:
        pass  # another process removed it
    finally:
        lock.release(delete=True)
    return True


def _remove_leftovers(folder: CacheFolder, name: str) -> tuple[int, int]:
    lock = folder.lock(name)
    if not lock.acquire(wait=False):
        return 0, 0  # its build is still running
    try:
        size_bytes = sum(map(_size_bytes, folder.entries_dir.glob(f".{name}.*")))
        return folder.remove_leftovers(name), size_bytes
    finally:
        lock.release()
