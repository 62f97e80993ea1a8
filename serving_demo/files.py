"""Small files: JSON in, and text out without ever leaving half a file behind."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fusedops.errors import ConfigError, LoadError

__all__ = ["read_json", "require_writable_target", "write_atomically"]


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
        raise LoadError(f"{path} holds no JSON object.")
    return values


def require_writable_target(path: Path) -> None:
    """Raise ConfigError unless a file can be made at ``path``; said before any long work."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file for the report.")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} of {path.name} does not exist; make it first.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the folder {path.parent} is not writable; name another place.")


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
