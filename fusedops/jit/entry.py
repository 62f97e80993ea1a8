"""One stored kernel on disk: a folder with the binary's files and a manifest that pins them down.

An entry appears whole or not at all: it is written under a temporary name beside its place, synced
to disk and renamed. The manifest holds size and sha256 of every file and a checksum of itself, so
that a truncated or altered entry is told from a good one before anything in it is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedops.jit.key import KernelKey

__all__ = [
    "DamagedEntryError",
    "Entry",
    "Manifest",
    "read_entry",
    "read_manifest",
    "sync",
    "write_manifest",
]

MANIFEST = "manifest.json"
_FORMAT = 1

_DAMAGE_ERRNOS = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV})
"""Something of another kind lies where an entry has a file: a link to itself, a socket, a device,
or a file in the folder's place."""


class DamagedEntryError(Exception):
    """An entry does not hold what its manifest says. Stays inside the store, which rebuilds it."""


@dataclass(frozen=True)
class Manifest:
    """What an entry says about itself.

    Attributes:
        fields: the hashed fields of the kernel's key (family, spec, arch, flags, sources).
        toolchain: versions of the tools that built it.
        files: file name -> (size in bytes, sha256 in hex).
        info: what the compile function wants to be told at load time, e.g. mangled names.
        created_s: seconds since the epoch when it was built.
    """

    fields: Mapping[str, Any]
    toolchain: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    info: Mapping[str, str]
    created_s: float


@dataclass(frozen=True)
class Entry:
    """A kernel that was found or built, verified.

    Attributes:
        folder: where its files lie.
        info: what the compile function returned.
        origin: ``"overlay"``, ``"disk"``, ``"compiled"`` or ``"memory only"``.
    """

    folder: Path
    info: Mapping[str, str]
    origin: str
    files: Mapping[str, tuple[int, str]] = field(repr=False)

    @classmethod
    def of_unstored(cls, folder: Path, info: Mapping[str, str]) -> Entry:
        """The files of a kernel that is not stored, which need no verifying."""
        return cls(folder, info, "memory only", _hash_files(folder))

    def read(self, name: str) -> bytes:
        """The bytes of one file, checked against the manifest once more.

        Raises:
            FileNotFoundError: the entry was removed meanwhile (the store then looks it up again).
            DamagedEntryError: the file changed since the entry was verified.
        """
        data = _read_file(self.folder / name)
        size, digest = self.files[name]
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise DamagedEntryError(f"{name} changed")
        return data

    def path(self, name: str) -> Path:
        """Path of one file, for loaders that take a path."""
        return self.folder / name


@contextlib.contextmanager
def _damage_by_kind(name: str) -> Iterator[None]:
    """Have an OSError that only something of another kind than a file gives count as damage."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE_ERRNOS:
            raise
        raise DamagedEntryError(f"{name} is not a file: {error.strerror}") from None


def _read_file(path: Path) -> bytes:
    """The bytes of one file of an entry, whatever lies there: a pipe is never waited for.

    Raises:
        FileNotFoundError: nothing lies there.
        DamagedEntryError: what lies there is no file.
    """
    with _damage_by_kind(path.name):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedEntryError(f"{path.name} is not a file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_files(folder: Path) -> dict[str, tuple[int, str]]:
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        files[path.name] = (len(data), hashlib.sha256(data).hexdigest())
    return files


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(
    folder: Path, key: KernelKey, info: Mapping[str, str], file_mode: int = 0o600
) -> None:
    """Write the manifest for the files that lie in ``folder``, and sync all of it to disk."""
    files = _hash_files(folder)
    for name in files:
        (folder / name).chmod(file_mode)
        sync(folder / name)
    body = {
        "format": _FORMAT,
        "key": key.fields,
        "toolchain": dict(key.toolchain),
        "files": files,
        "info": dict(info),
        "created_s": round(time.time(), 3),
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({**body, "checksum": _checksum(body)}, indent=1), "utf-8")
    manifest.chmod(file_mode)
    sync(manifest)
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read and check an entry's manifest, not its files.

    Raises:
        FileNotFoundError: there is no such entry.
        DamagedEntryError: the manifest is missing, no file, cannot be parsed or fails its checksum.
    """
    try:
        text = _read_file(folder / MANIFEST)
    except FileNotFoundError:
        if not folder.is_dir():
            raise
        raise DamagedEntryError("its manifest is missing") from None
    try:
        body = json.loads(text)
        checksum = body.pop("checksum")
        is_sound = checksum == _checksum(body) and body.get("format") == _FORMAT
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise DamagedEntryError("its manifest cannot be parsed") from None
    if not is_sound:
        raise DamagedEntryError("its manifest fails its checksum")
    files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
    return Manifest(body["key"], body["toolchain"], files, body["info"], body["created_s"])


def read_entry(
    folder: Path, origin: str, require: Callable[[Path], None] | None = None
) -> tuple[Entry, Manifest]:
    """Read an entry and verify every file of it.

    Args:
        folder: the entry's folder.
        origin: what ``Entry.origin`` is to say.
        require: called with the folder and each file before it is read; raises on a bad owner.

    Raises:
        FileNotFoundError: there is no such entry.
        DamagedEntryError: something in it is missing, truncated or altered.
    """
    if require is not None:
        require(folder)
        # Where there is no manifest, read_manifest says what that means.
        with _damage_by_kind(MANIFEST), contextlib.suppress(FileNotFoundError):
            require(folder / MANIFEST)
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        try:
            if require is not None:
                with _damage_by_kind(name):
                    require(path)
            data = _read_file(path)
        except FileNotFoundError:
            if not folder.is_dir():
                raise
            raise DamagedEntryError(f"{name} is missing") from None
        if len(data) != size:
            raise DamagedEntryError(f"{name} has {len(data)} bytes instead of {size}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise DamagedEntryError(f"{name} fails its checksum")
    return Entry(folder, manifest.info, origin, manifest.files), manifest
