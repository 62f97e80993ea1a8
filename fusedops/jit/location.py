"""Where compiled kernels are kept, and whether that folder may be trusted.

A stored kernel is code that this process runs, so a folder that others can write is refused before
anything in it is read.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from fusedops.errors import BuildError, ConfigError

__all__ = [
    "CACHE_VARIABLE",
    "OVERLAY_VARIABLE",
    "CacheSettings",
    "make_dir",
    "require_overlay",
    "require_own",
    "require_trusted",
]

CACHE_VARIABLE = "FUSEDOPS_CACHE_DIR"
OVERLAY_VARIABLE = "FUSEDOPS_OVERLAY"


@dataclass(frozen=True)
class CacheSettings:
    """What the environment says about the cache.

    Attributes:
        root: the cache folder, absolute; None when neither FUSEDOPS_CACHE_DIR nor XDG_CACHE_HOME
            nor HOME is set.
        overlays: prebuilt read-only folders, searched in order before the cache.
    """

    root: Path | None
    overlays: tuple[Path, ...] = ()

    @classmethod
    def from_environment(cls) -> CacheSettings:
        """Read FUSEDOPS_CACHE_DIR, XDG_CACHE_HOME, HOME and FUSEDOPS_OVERLAY; touch no disk.

        FUSEDOPS_OVERLAY is a list of folders separated like PATH.
        """
        overlays = os.environ.get(OVERLAY_VARIABLE, "").split(os.pathsep)
        return cls(
            _root_from_environment(), tuple(Path(text).absolute() for text in overlays if text)
        )

    def resolve_root(self) -> Path:
        """``root``, or a temporary folder of this process (with one warning) when it is None."""
        return self.root if self.root is not None else _temporary_root()


def _root_from_environment() -> Path | None:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():  # the XDG specification has relative ones ignored
        return Path(xdg) / "fusedops"
    home = os.environ.get("HOME")
    return Path(home).absolute() / ".cache" / "fusedops" if home else None


_temporary_lock = threading.Lock()
_temporary: Path | None = None


def _temporary_root() -> Path:
    global _temporary
    with _temporary_lock:
        if _temporary is not None:
            return _temporary
        try:
            _temporary = Path(tempfile.mkdtemp(prefix="fusedops-"))  # mkdtemp makes it 0700
        except OSError as error:
            raise BuildError(
                f"HOME is not set and no temporary folder can be made ({error}). Set "
                f"{CACHE_VARIABLE} to a folder that you can write."
            ) from error
        atexit.register(_remove_temporary, _temporary, os.getpid())
        folder = _temporary
    warnings.warn(
        f"HOME is not set: compiled kernels go to {folder} and are gone when this process ends. "
        f"Set {CACHE_VARIABLE} to a folder to keep them.",
        RuntimeWarning,
        stacklevel=3,
    )
    return folder


def _remove_temporary(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take its parent's folder away
        shutil.rmtree(folder, ignore_errors=True)


def make_dir(folder: Path, mode: int = 0o700) -> None:
    """Create ``folder`` with exactly ``mode`` if it is absent; its parents get the usual one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=mode)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        folder.chmod(mode)  # mkdir takes the umask's bits away


def require_own(folder: Path) -> bool:
    """Check that the cache folder is this user's and nobody else can write it.

    Returns:
        False when the folder does not exist.

    Raises:
        BuildError: it is no folder, it cannot be read, another user owns it, or group or others
            may write it.
    """
    status = _status_of_folder(folder)
    if status is None:
        return False
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"the kernel cache {folder} belongs to uid {status.st_uid}, this process runs as uid "
            f"{os.geteuid()}; kernels are only loaded from a folder of one's own. Set "
            f"{CACHE_VARIABLE} to another folder."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"the kernel cache {folder} has mode {stat.S_IMODE(status.st_mode):04o}: others can "
            f"write it, so what it holds cannot be trusted. Run `chmod go-w {folder}` if you know "
            f"what is in it, or set {CACHE_VARIABLE} to another folder."
        )
    return True


def _status_of_folder(folder: Path) -> os.stat_result | None:
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(
            f"cannot use {folder} as the kernel cache: {error.strerror}. Set {CACHE_VARIABLE} to a "
            "folder that you can write."
        ) from error
    why = _why_not_readable(folder)
    if why is not None:
        raise BuildError(
            f"cannot use {folder} as the kernel cache: {why}. Set {CACHE_VARIABLE} to a folder "
            "that you can write."
        )
    return status


def require_overlay(folder: Path) -> None:
    """``require_trusted`` for a folder named by the user, which must exist.

    Raises:
        ConfigError: it does not exist, is no folder, or cannot be read.
        BuildError: another user owns it, or everyone may write it.
    """
    try:
        require_trusted(folder)
        why = _why_not_readable(folder)
    except OSError as error:
        why = error.strerror or str(error)
    if why is not None:
        raise ConfigError(
            f"cannot use the prebuilt kernels in {folder}: {why}. Change {OVERLAY_VARIABLE}; it "
            "takes existing folders made by `fusedops prebuild`."
        )


def _why_not_readable(folder: Path) -> str | None:
    """Why nothing can be read in ``folder``, which exists; None where it can."""
    if not folder.is_dir():
        return "it is not a folder"
    as_effective = os.access in os.supports_effective_ids
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=as_effective):
        return "this process may not read it"
    return None


def require_trusted(path: Path) -> None:
    """Check that a prebuilt folder or file is this user's or root's and not writable by all.

    Raises:
        BuildError: another user owns it, or everyone may write it.
        OSError: it does not exist, or cannot be looked at.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise BuildError(
            f"the prebuilt kernels in {path} belong to uid {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):04o}; accepted are folders and files of uid "
            f"{os.geteuid()} or root that not everyone can write. Change their owner or mode, or "
            f"{OVERLAY_VARIABLE}."
        )
