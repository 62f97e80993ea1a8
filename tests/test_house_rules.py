"""Rules that hold for every file: import order, import weight, length, names, docstrings, paths."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module imports only modules of its own slot or of those before it.
IMPORT_ORDER: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "errors",
        "check",
        "epilogue",
        "prologue weight packing",
        "problem",
        "config",
        "jit",
        "cutlass",
        "providers",
        "gemm ops",
        "quant",
        "nn",
        "bench",
        "ladders",
        "fusedops",  # the package itself, by its public names
        "serving_demo",
        "cli __main__",
    )
)
RANK = {name: rank for rank, names in enumerate(IMPORT_ORDER) for name in names}

HEAVY_MODULES = (
    "cuda",
    "cutlass",
    "flashinfer",
    "gguf",
    "jinja2",
    "matplotlib",
    "rich",
    "sympy",
    "transformers",
    "triton",
    "tvm_ffi",
    "tvm_ffi_orcjit",
    "typer",
)

MAX_LINES = {"fusedops": 400, "serving_demo": 400, "scripts": 400, "csrc": 400, "tests": 600}

TEXT_SUFFIXES = {
    *(".py", ".pyi", ".cu", ".cuh", ".h", ".sh", ".toml", ".cfg", ".ini", ".yaml", ".yml"),
    *(".md", ".txt", ".json", ".html", ".j2", ".css", ""),
}
# Split, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.$}-])/(?:ro" + r"ot|ho" + r"me|Use" + r"rs|wo" + r"rk)/[\w.]")
REGISTRY_HOST = re.compile(
    r"\b(?:py" + r"pi\.org|python" + r"hosted\.org|download\.py" + r"torch\.org|deb\.deb"
    r"ian\.org|registry\.np" + r"mjs\.org|(?:extra-)?index" + r"-url)\b"
)
PATH_UPWARDS = re.compile(r"(?<![\w./])((?:\.\./)+[\w./-]*)")

MODULE_NAME = re.compile(r"(?:__init__|__main__|[a-z][a-z0-9_]*)\.py")
KERNEL_NAME = re.compile(r"[a-z][a-z0-9_]*\.(?:cu|cuh)")
NAME_WITHOUT_UNIT = re.compile(r"(?:^|_)(?:time|latency|duration|elapsed|bandwidth)$")


def package_files() -> list[Path]:
    """Every Python file of the two packages."""
    return [path for name in ("fusedops", "serving_demo") for path in sorted_files(name, "*.py")]


def sorted_files(folder: str, pattern: str) -> list[Path]:
    """Files below ``folder``, in a stable order."""
    return sorted(path for path in (ROOT / folder).rglob(pattern) if path.is_file())


def relative(path: Path) -> str:
    """``path`` as a reader of a failure wants it."""
    return path.relative_to(ROOT).as_posix()


def project_files() -> list[Path]:
    """Every file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    paths = [ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name]
    return [path for path in paths if path.is_file()]


# Import order


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` except what stands under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield child
        yield from runtime_nodes(child)


def imported_slots(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name in IMPORT_ORDER, line) of every import of the project's own modules that may run."""
    for node in runtime_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "fusedops":
            names = [f"fusedops.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for name in names:
            first, *rest = name.split(".")
            if first == "serving_demo":
                yield first, node.lineno  # type: ignore[attr-defined]
            elif first == "fusedops":
                is_module = bool(rest) and module_exists(rest[0])
                yield (rest[0] if is_module else "fusedops"), node.lineno  # type: ignore[attr-defined]


def module_exists(name: str) -> bool:
    """Whether fusedops has a module or subpackage of that name."""
    return (ROOT / "fusedops" / f"{name}.py").exists() or (ROOT / "fusedops" / name).is_dir()


def slot_of(path: Path) -> str:
    """The name in IMPORT_ORDER under which a file stands."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "fusedops" and parts[1] != "__init__" else parts[0]


def order_violations(slot: str, source: str) -> list[str]:
    """What in ``source``, a module of ``slot``, imports something that stands after it."""
    return [
        f"line {line}: {slot} imports {imported}, which stands after it"
        for imported, line in imported_slots(ast.parse(source))
        if RANK[imported] > RANK[slot]
    ]


def test_every_module_has_a_place_in_the_import_order() -> None:
    unknown = {slot_of(path) for path in package_files()} - RANK.keys()
    assert not unknown, f"give {sorted(unknown)} a slot in IMPORT_ORDER"


def test_modules_import_only_what_stands_before_them() -> None:
    found = [
        f"{relative(path)} {violation}"
        for path in package_files()
        if slot_of(path) in RANK
        for violation in order_violations(slot_of(path), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from fusedops.providers.base import choose",
        "from fusedops import gemm",
        "import fusedops",
        "def f():\n    import serving_demo.run",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import fusedops.ops.op",
    ],
)
def test_an_import_of_a_later_module_is_seen(source: str) -> None:
    assert order_violations("epilogue", source)


@pytest.mark.parametrize(
    "source",
    [
        "from fusedops.errors import ShapeError",
        "from fusedops import check, errors",
        "if TYPE_CHECKING:\n    from fusedops.gemm import gemm",
        "from torch import Tensor",
    ],
)
def test_an_import_of_an_earlier_module_is_accepted(source: str) -> None:
    assert not order_violations("epilogue", source)


def test_relative_imports_are_not_used() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in package_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not found, found


# Import weight


def loaded_by(statement: str) -> tuple[set[str], bool]:
    """Top-level modules in a fresh process after ``statement``; whether torch started CUDA."""
    code = (
        f"{statement}\n"
        "import json, sys, torch\n"
        "names = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print(json.dumps([names, torch.cuda.is_initialized()]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names, cuda_started = json.loads(run.stdout)
    return set(names), cuda_started


def test_import_loads_nothing_heavy_and_starts_no_cuda() -> None:
    alone, _ = loaded_by("import torch")
    loaded, cuda_started = loaded_by("import fusedops")
    brought = (loaded - alone) & set(HEAVY_MODULES)
    assert "fusedops" in loaded
    # torch._dynamo takes a second and shows as sympy, which it brings.
    assert not brought, f"`import fusedops` loads {sorted(brought)}"
    assert not cuda_started


# Files


def test_files_are_short() -> None:
    found = []
    for folder, limit in MAX_LINES.items():
        for path in sorted_files(folder, "*"):
            if path.suffix in {".py", ".sh", ".cu", ".cuh"}:
                lines = len(path.read_text(encoding="utf-8").splitlines())
                if lines > limit:
                    found.append(f"{relative(path)} has {lines} lines; the limit is {limit}")
    assert not found, "\n".join(found)


def test_files_are_named_alike() -> None:
    wrong = [
        relative(path)
        for folder in ("fusedops", "serving_demo", "scripts", "tests")
        for path in sorted_files(folder, "*.py")
        if not MODULE_NAME.fullmatch(path.name)
    ]
    wrong += [
        relative(path)
        for pattern in ("*.cu", "*.cuh")
        for path in sorted_files("csrc", pattern)
        if not KERNEL_NAME.fullmatch(path.name)
    ]
    assert not wrong, wrong


def text_violations(text: str, folder: Path) -> list[str]:
    """Machine paths, registry hosts and paths out of the repository in a file of ``folder``."""
    found = [
        f"line {number}: {match.group(0)!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATH, REGISTRY_HOST)
        for match in pattern.finditer(line)
    ]
    for match in PATH_UPWARDS.finditer(text):
        if not (folder / match.group(1)).resolve().is_relative_to(ROOT):
            found.append(f"{match.group(1)!r} leads out of the repository")
    return found


def test_no_file_names_a_machine_path_or_a_registry_host() -> None:
    found = []
    for path in project_files():
        if path.suffix in TEXT_SUFFIXES:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{relative(path)} {v}" for v in text_violations(text, path.parent)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see /ho" + "me/someone/x",
        "cache = '/ro" + "ot/.cache'",
        "pip install --index" + "-url X",
        "from .." + "/.." + "/elsewhere/x",
    ],
)
def test_a_machine_path_or_a_registry_host_is_seen(text: str) -> None:
    assert text_violations(text, ROOT / "tests")


# Names and docstrings


def exported(tree: ast.Module) -> list[str] | None:
    """The names in ``__all__``, or None where a module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def test_every_module_and_every_public_name_has_a_docstring() -> None:
    found = []
    for path in package_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            found.append(f"{relative(path)} has no module docstring")
        names = set(exported(tree) or ())
        for node in tree.body:
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name in names
                and ast.get_docstring(node) is None
            ):
                found.append(f"{relative(path)}:{node.lineno} {node.name} has no docstring")
    assert not found, "\n".join(found)


def test_public_names_exist_and_are_listed_once() -> None:
    found = []
    for path in package_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = exported(tree) or []
        bound = set(bound_names(tree))
        missing = [name for name in names if name not in bound and "__getattr__" not in bound]
        if missing or len(set(names)) != len(names):
            found.append(f"{relative(path)}: __all__ names {missing} in vain, or names one twice")
    assert not found, "\n".join(found)


def bound_names(tree: ast.Module | ast.If | ast.Try) -> Iterator[str]:
    """Names that a module binds at its top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from bound_names(node)


def test_fields_that_hold_a_time_or_a_rate_carry_their_unit() -> None:
    found = [
        f"{relative(path)}:{field.lineno} {node.name}.{field.target.id}"
        for path in package_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and NAME_WITHOUT_UNIT.search(field.target.id)
        and re.search(r"\b(?:int|float)\b", ast.unparse(field.annotation))
    ]
    assert not found, f"name the unit (_us, _ms, _s, _gb_per_s): {found}"
