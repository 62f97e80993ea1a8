"""Lines of code of Python modules: without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable

from fusedops.jit.resources import PACKAGE_DIR

__all__ = ["code_lines", "python_lines", "with_imports"]

_EMPTY = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines of a module's text that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _EMPTY:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A statement that is nothing but text is a docstring.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _text(module: str) -> str:
    return (PACKAGE_DIR / module).read_text(encoding="utf-8")


def python_lines(modules: Iterable[str]) -> int:
    """``code_lines`` of files of fusedops, given relative to the package."""
    return sum(code_lines(_text(module)) for module in modules)


def with_imports(module: str) -> tuple[str, ...]:
    """A file of fusedops and what it imports, at any depth, from the folder that it stands in."""
    folder = module.rpartition("/")[0]
    package = f"{PACKAGE_DIR.name}.{folder.replace('/', '.')}."
    found: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(_text(name))):
            imported = node.module if isinstance(node, ast.ImportFrom) else None
            if imported is not None and imported.startswith(package):
                pending.append(f"{folder}/{imported.removeprefix(package)}.py")
    return tuple(sorted(found))
