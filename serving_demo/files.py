"""Small files: JSON in, and text out without ever leaving half a file behind."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fusedops.errors import ConfigError, LoadError
from serving_demo.check import require_type

__all__ = [
    "read_json",
    "require_content",
    "require_writable_target",
    "write_atomically",
    "written_line",
]

_LFS_POINTER = b"version https://git-lfs"
"""How the text file begins that Git leaves where a large file was not fetched."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        LoadError: the file is missing, no JSON, or holds something else than an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise LoadError(f"{path} is damaged or no JSON: {error}.") from None
    if not isinstance(values, dict):
        raise LoadError(f"{path} holds no JSON object but a {type(values).__name__}.")
    return values


def require_content(path: Path) -> None:
    """Refuse a file that only stands for its content: an empty one, or a Git LFS pointer.

    Raises:
        LoadError: it is such a file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if not start:
        raise LoadError(f"{path} is empty (0 bytes). Fetch the file again.")
    if start == _LFS_POINTER:
        raise LoadError(
            f"{path} is a Git LFS pointer, not the file itself. Fetch the content, e.g. with "
            "`git lfs pull`."
        )


def require_writable_target(path: Path, option: str = "--json") -> None:
    """Raise ConfigError unless a file can be made at ``path``; said before any long work.

    Args:
        path: the file to be made or replaced.
        option: where the user named it, for the message.
    """
    require_type(option, path, Path, "is a Path")
    elsewhere = f"name another file with {option}."
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; {elsewhere}")
    if path.exists() and not path.is_file():
        # Renaming over a device or a pipe would take it away.
        raise ConfigError(f"{path} is no plain file, and would be replaced; {elsewhere}")
    if not path.parent.is_dir():
        if path.parent.exists():
            raise ConfigError(f"{path.parent} is no folder, so it cannot hold a file; {elsewhere}")
        raise ConfigError(
            f"the folder {path.parent} of {path.name} does not exist; make it, or {elsewhere}"
        )
    try:
        # Made without a name. Permissions alone do not tell: root has them everywhere.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"the folder {path.parent} takes no file ({error.strerror or error}); {elsewhere}"
        ) from None


def written_line(path: Path) -> str:
    """What every command that wrote a file ends with."""
    return f"file written: {path}"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds either its old content or all of the new one.

    Raises:
        ConfigError: the folder is missing or not writable, or the disk is full.
    """
    require_writable_target(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes 0600; a report is for whoever the umask lets read it.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None
