"""The sources that a kernel is made of, as content hashes: what makes a stored kernel stale.

A hash never holds a path, so two checkouts, two machines and two users share their keys. Where a
source cannot be read, or may differ from the code that is loaded, the kernel may still be compiled
and kept in memory, but not on disk: a stale kernel is worse than a compile.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import itertools
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from fusedops.errors import BuildError
from fusedops.jit.resources import PACKAGE_DIR, csrc_dir

__all__ = ["Sources", "cuda_sources", "python_sources"]

_IMPORTED_AT = time.time()
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


@dataclass(frozen=True)
class Sources:
    """Content hashes of sources, and whether they pin the kernel down.

    Attributes:
        files: sorted pairs (logical name, sha256 in hex); a name is never a path of this machine.
        memory_only: why kernels made of them may not go to disk; empty when they may.
    """

    files: tuple[tuple[str, str], ...] = ()
    memory_only: str = ""

    def __add__(self, other: Sources) -> Sources:
        return Sources(
            tuple(sorted({*self.files, *other.files})), self.memory_only or other.memory_only
        )


def python_sources(*objects: ModuleType | type | Path) -> Sources:
    """Hash the Python sources behind ``objects``.

    Args:
        objects: a package (all its ``.py`` files, subpackages included), a module, a ``.py`` file
            given by path, or a node class. Of a class, the files of its bases are taken too, and of
            a user's class also the files that its module imports from the user's own code. Classes
            of fusedops bring the subpackage they stand in. Not followed: what an installed package
            of the user imports from other installed packages.

    Returns:
        ``Sources``; ``memory_only`` is set for a class without a source file, one defined inside a
        function (its variables are not in the source), and files changed since they were loaded.

    Raises:
        BuildError: a path that cannot be read.
    """
    total = Sources()
    for item in objects:
        if isinstance(item, ModuleType):
            total += _module_sources(item)
        elif isinstance(item, type):
            total += _class_sources(item)
        else:
            try:
                total += _file_sources(item.name, item)
            except OSError as error:
                raise BuildError(f"cannot read the kernel source {item}: {error}") from error
    return total


def cuda_sources(file: str, root: Path | None = None) -> Sources:
    """Hash a CUDA source and, recursively, everything that it includes from csrc.

    ``#include "x"`` is looked up as the compiler does it: beside the including file, beside
    ``file``, then in ``csrc/include``, and must be found there. ``#include <x>`` counts when
    ``csrc/include`` has it; otherwise it is a header of the CUDA toolkit, which the compiler's
    version stands for. Conditions around an include are not evaluated: every one counts.

    Args:
        file: path relative to csrc with forward slashes, e.g. ``"probe.cu"``.
        root: the csrc folder; None takes the one that ships with fusedops.

    Raises:
        BuildError: ``file`` or a quoted include is not in csrc.
    """
    root = (csrc_dir() if root is None else root).resolve()
    main = root / file
    pending = [main]
    found: dict[Path, str] = {}
    while pending:
        path = pending.pop()
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BuildError(f"cannot read the CUDA source {path}: {error}") from error
        found[path] = hashlib.sha256(data).hexdigest()
        for quote, name in _INCLUDE.findall(data.decode("utf-8", "replace")):
            included = _resolve_include(path, main, root, name, quoted=quote == '"')
            if included is not None and included not in found:
                pending.append(included)
    files = sorted((path.relative_to(root).as_posix(), digest) for path, digest in found.items())
    return Sources(tuple(files))


def _resolve_include(
    includer: Path, main: Path, root: Path, name: str, *, quoted: bool
) -> Path | None:
    folders = [includer.parent, main.parent] if quoted else []
    for folder in (*folders, root / "include"):
        path = (folder / name).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path
    if not quoted:
        return None
    raise BuildError(
        f'{includer.relative_to(root)} includes "{name}", which is neither beside it nor in '
        "csrc/include. Put the header there; headers of the CUDA toolkit go in angle brackets."
    )


@lru_cache(maxsize=4096)
def _file_digest(path: Path, _mtime_ns: int, _size_bytes: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _file_sources(name: str, path: Path) -> Sources:
    status = path.stat()
    digest = _file_digest(path, status.st_mtime_ns, status.st_size)
    # Python runs what it read at import. A file edited since then no longer says what runs, and
    # its new text must not become the key of a kernel made by the old one.
    edited = _IMPORTED_AT < status.st_mtime <= time.time()
    reason = f"{path.name} was changed while this process was running" if edited else ""
    return Sources(((name, digest),), reason)


def _source_path(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return None
    path = Path(file)
    return path if path.is_file() else None


def _module_sources(module: ModuleType) -> Sources:
    if not hasattr(module, "__path__"):
        path = _source_path(module)
        if path is None:
            return Sources((), f"module {module.__name__} has no source file")
        return _file_sources(module.__name__, path)
    total = Sources()
    for folder in map(Path, module.__path__):
        for path in sorted(folder.rglob("*.py")):
            total += _file_sources(f"{module.__name__}/{path.relative_to(folder).as_posix()}", path)
    if not total.files:
        return Sources((), f"package {module.__name__} has no source files")
    return total


def _class_sources(cls: type) -> Sources:
    total = Sources()
    for base in cls.__mro__:
        top = base.__module__.partition(".")[0]
        if top in sys.stdlib_module_names or top == "torch":
            continue
        if top == PACKAGE_DIR.name:
            total += _module_sources(_fusedops_part(base))
        else:
            total += _user_class_sources(base)
    return total


def _fusedops_part(cls: type) -> ModuleType:
    parts = cls.__module__.split(".")
    return sys.modules[".".join(parts[:2])]


def _user_class_sources(cls: type) -> Sources:
    module = sys.modules.get(cls.__module__)
    path = None if module is None else _source_path(module)
    if module is None or path is None:
        return _unpinned(cls, "has no source file")
    if "<locals>" in cls.__qualname__:
        return _unpinned(cls, "is defined inside a function, whose variables are not in its source")
    try:
        inspect.getsource(cls)
    except (OSError, TypeError):
        return _unpinned(cls, f"is not in the source of module {cls.__module__}")
    total = Sources()
    for file in _imported_files(module, path):
        # The same file is `__main__` for one program and a module for another.
        total += _file_sources("user", file)
    total += Sources(((f"class {cls.__qualname__}", ""),))
    return total + _unpinned(cls, "") if total.memory_only else total


_tokens: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_token_numbers = itertools.count()
_tokens_lock = threading.Lock()


def _unpinned(cls: type, why: str) -> Sources:
    """Sources of a class that its text does not pin down: a number stands for it here."""
    with _tokens_lock:
        number = _tokens.setdefault(cls, next(_token_numbers))
    reason = f"class {cls.__qualname__} {why}" if why else ""
    return Sources(((f"class {cls.__qualname__} of this process", str(number)),), reason)


def _imported_files(module: ModuleType, path: Path) -> list[Path]:
    """``path`` and the user's own files that it imports, directly or through one another."""
    top = module.__name__.partition(".")[0]
    seen = {path}
    pending = [(getattr(module, "__package__", None) or "", path)]
    while pending:
        package, file = pending.pop()
        for name in _imported_names(file, package):
            target = _find_source(name)
            if target is None or target in seen or not _is_user_code(name, top, target):
                continue
            seen.add(target)
            inner = name if target.name == "__init__.py" else name.rpartition(".")[0]
            pending.append((inner, target))
    return sorted(seen)


def _is_user_code(name: str, own_package: str, path: Path) -> bool:
    top = name.partition(".")[0]
    if top == own_package:
        return True
    path = path.resolve()
    if path.is_relative_to(_STDLIB) or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return top not in _installed_packages()


@cache
def _installed_packages() -> frozenset[str]:
    """Top-level names that some installed distribution brought, wherever it lies."""
    return frozenset(importlib.metadata.packages_distributions())


def _imported_names(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_name(node, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _absolute_name(node: ast.ImportFrom, package: str) -> str:
    name = node.module or ""
    if node.level == 0:
        return name
    parts = package.split(".")
    return ".".join(filter(None, [*parts[: len(parts) - node.level + 1], name]))


def _find_source(name: str) -> Path | None:
    """The source file of a module, found without running it; None where there is none."""
    top = name.partition(".")[0]
    if not name or top in sys.stdlib_module_names or top in ("torch", PACKAGE_DIR.name):
        return None
    module = sys.modules.get(name)
    if module is not None:
        return _source_path(module)
    spec: ModuleSpec | None = None
    folders: list[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)
