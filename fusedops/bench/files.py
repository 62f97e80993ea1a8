"""Result files: written in one step, updated under a lock, so that runs add up and never tear."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusedops.errors import LoadError

__all__ = ["read_json", "update_json", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old text or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _dumped(data: Any) -> str:
    return json.dumps(data, sort_keys=True, allow_nan=False)


def _laid_out(data: Any, indent: str = "") -> str:
    """JSON with a line for each item, but one line for what holds plain values only."""
    if not isinstance(data, (dict, list)):
        return _dumped(data)
    values = data.values() if isinstance(data, dict) else data
    if not any(isinstance(value, (dict, list)) for value in values):
        return _dumped(data)
    inner = indent + " "
    if isinstance(data, list):
        items = [_laid_out(item, inner) for item in data]
        opening, closing = "[]"
    else:
        items = [f"{json.dumps(key)}: {_laid_out(data[key], inner)}" for key in sorted(data)]
        opening, closing = "{}"
    body = f",\n{inner}".join(items)
    return f"{opening}\n{inner}{body}\n{indent}{closing}"


def write_json(path: Path, data: Any) -> None:
    """Write JSON in one step, with sorted keys so that a change reads well in a diff."""
    write_text(path, _laid_out(data) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an absent file is an empty object.

    Raises:
        LoadError: the file is there but holds no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise LoadError(f"{path}: holds a {type(data).__name__}; expected a JSON object.")
    return data


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive lock on the folder of ``path``; it leaves no file, and dies with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def update_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Read an object, let ``change`` modify it, write it back; two processes take turns."""
    with _locked(path):
        data = read_json(path)
        change(data)
        write_json(path, data)
