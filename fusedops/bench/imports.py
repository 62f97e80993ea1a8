"""Which sources of this package a module runs: what it imports, and what these import in turn.

Imports inside functions count like those at the top. A module that is named by a text only, as for
``importlib.import_module`` or another process, is not found.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from fusedops.errors import ConfigError

__all__ = ["PACKAGE", "imported_files"]

PACKAGE = "fusedops"


def _file(module: str, root: Path) -> Path | None:
    """The file of a module of this package, relative to ``root``; None if there is none."""
    if module.split(".")[0] != PACKAGE:
        return None
    path = Path(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (root / candidate).is_file():
            return candidate
    return None


@functools.lru_cache(maxsize=4096)
def _named(path: Path, _stamp: tuple[int, int]) -> frozenset[str]:
    """Absolute names in the import statements of a file; of ``from a import b`` a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
            # The package's own namespace imports everything, so it counts only where it is named.
            if node.module != PACKAGE:
                names.add(node.module)
    return frozenset(names)


def imported_files(modules: Iterable[str], root: Path, leave_out: Iterable[str] = ()) -> set[Path]:
    """Files of ``modules`` and of all that they import of this package, relative to ``root``.

    Args:
        modules: names of modules; those of other packages give nothing.
        root: the checkout.
        leave_out: modules that are neither listed nor followed.

    Raises:
        ConfigError: the package has no module of a name in ``modules`` or ``leave_out``.
    """
    left_out = set(leave_out)
    todo = list(modules)
    for module in (*left_out, *todo):
        if module.split(".")[0] == PACKAGE and _file(module, root) is None:
            raise ConfigError(f"imported_files: there is no module {module} below the repository.")
    seen: set[str] = set()
    found: set[Path] = set()
    while todo:
        module = todo.pop()
        if module in seen or module in left_out:
            continue
        seen.add(module)
        relative = _file(module, root)
        if relative is None:
            continue
        found.add(relative)
        state = (root / relative).stat()
        todo += _named(root / relative, (state.st_mtime_ns, state.st_size))
    return found
