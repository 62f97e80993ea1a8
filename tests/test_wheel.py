"""The wheel: what it holds, and that it works in a clean environment, away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RESOURCE_FOLDERS = ("csrc", "cutlass_configs")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return its output; a failure shows all of it."""
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean_environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def clean_environment() -> dict[str, str]:
    """The environment without what would lead Python back into the checkout."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout with the build backend that is installed here."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("fusedops-*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    """Names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a clean venv that holds the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-index", "--disable-pip-version-check", wheel),
        cwd=folder,
    )
    # Appended to the path, and without the .pth files in it: the editable install is not seen.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    dependencies = Path(torch.__file__).parent.parent
    (Path(site.strip()) / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
    return python


def test_holds_both_packages_and_the_type_marker(contents: set[str]) -> None:
    modules = {
        path.relative_to(ROOT).as_posix()
        for name in ("fusedops", "serving_demo")
        for path in (ROOT / name).rglob("*.py")
    }
    assert "fusedops/__init__.py" in contents
    assert "fusedops/py.typed" in contents
    assert modules <= contents, sorted(modules - contents)


@pytest.mark.parametrize("folder", RESOURCE_FOLDERS)
def test_holds_every_resource_file(contents: set[str], folder: str) -> None:
    source = {
        f"fusedops/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    packed = {name for name in contents if name.startswith(f"fusedops/{folder}/")}
    assert packed == source


def test_holds_nothing_else(contents: set[str]) -> None:
    tops = {name.partition("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fusedops", "serving_demo"}
    assert not [name for name in contents if "test" in Path(name).parts or name.endswith(".pyc")]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents)


def test_imports_from_another_folder(installed_python: Path, tmp_path: Path) -> None:
    code = "import fusedops, serving_demo; print(fusedops.__file__, serving_demo.__file__)"
    where = run(installed_python, "-c", code, cwd=tmp_path).split()
    assert all(Path(path).is_relative_to(installed_python.parent.parent) for path in where)
    assert all(not Path(path).is_relative_to(ROOT) for path in where)


def test_finds_its_cuda_sources(installed_python: Path, tmp_path: Path) -> None:
    code = "from fusedops.jit.resources import csrc_dir; print(csrc_dir())"
    found = Path(run(installed_python, "-c", code, cwd=tmp_path).strip())
    assert found.is_relative_to(installed_python.parent.parent)


def test_command_line_runs(installed_python: Path, tmp_path: Path) -> None:
    command = installed_python.with_name("fusedops")
    output = run(command, "doctor", cwd=tmp_path, FUSEDOPS_CACHE_DIR=str(tmp_path / "cache"))
    assert torch.__version__.partition("+")[0] in output
    assert "reference" in output
