"""Where and with what a figure was read: GPU, driver, versions, commit, sources, command, date."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedops.errors import ConfigError

__all__ = [
    "PEER_VARIABLES",
    "Environment",
    "collect_environment",
    "git_commit",
    "gpu_slug",
    "repository_root",
    "set_peer_variables",
    "source_files",
    "source_hash",
]

PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cublas",
    "flashinfer-python",
    "quack-kernels",
    "cuda-cccl",
    "cupy-cuda13x",
    "transformers",
)
"""Packages whose versions go into every report, where installed."""

SOURCE_SUFFIXES = frozenset({".py", ".cu", ".cuh", ".h", ".toml"})
"""Files that decide what a kernel does; data and results beside them do not count."""

DATA_SUFFIXES = frozenset({".json"})
"""Files that count where a pattern names them by their suffix: measured choices of tilings."""

PEER_VARIABLES = {"FLASHINFER_DISABLE_JIT": "1"}
"""Environment variables with which peers are timed. What FlashInfer has no built kernel for is then
an error at once, not minutes of nvcc in a run. They are part of every report where they are set."""


@dataclass(frozen=True)
class Environment:
    """What a reader needs to judge or repeat a figure.

    Attributes:
        gpu: torch's name of the device, or ``none``.
        driver: the driver's version, or ``none``.
        cpu: the processor's name.
        python: interpreter version.
        versions: package -> version, of ``PACKAGES`` that are installed.
        commit: git commit, with ``+dirty`` where files outside reports/ differ from it; ``unknown``
            where there is no repository and ``FUSEDOPS_COMMIT`` is unset.
        command: the exact command line.
        date: ISO 8601, UTC, to the second.
        variables: name -> value, of ``PEER_VARIABLES`` that are set.
    """

    gpu: str
    driver: str
    cpu: str
    python: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    variables: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with these fields."""
        return asdict(self)


def repository_root() -> Path | None:
    """The checkout that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """Standard output of a command, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def git_commit(root: Path | None = None) -> str:
    """The checkout's commit; ``FUSEDOPS_COMMIT`` names it where git's folder did not travel."""
    named = os.environ.get("FUSEDOPS_COMMIT")
    if named:
        return named
    root = root or repository_root()
    if root is None or not (root / ".git").exists():
        return "unknown"
    commit = _output("git", "rev-parse", "HEAD", cwd=root)
    if commit is None:
        return "unknown"
    # Reports are results: writing them does not make the code another one.
    changed = _output("git", "status", "--porcelain", "--", ".", ":!reports", cwd=root)
    return f"{commit}+dirty" if changed else commit


def _driver() -> str:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else "none"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # torch's own string names its build (+cpu, +cu130), which the metadata may not.
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _command() -> str:
    root = repository_root()
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path(sys.executable)
    if root is not None and program.is_absolute() and program.is_relative_to(root):
        program = program.relative_to(root)
    elif program.is_absolute():
        program = Path(program.name)
    # Where the reader's machine differs anyway: of a folder elsewhere only the last name is kept.
    arguments = [Path(text).name if Path(text).is_absolute() else text for text in sys.argv[1:]]
    return shlex.join([str(program), *arguments])


def collect_environment(command: str | None = None) -> Environment:
    """The environment of this process; ``command`` replaces the command line where it misleads."""
    has_gpu = torch.cuda.is_available()
    return Environment(
        gpu=torch.cuda.get_device_name() if has_gpu else "none",
        driver=_driver() if has_gpu else "none",
        cpu=_cpu(),
        python=platform.python_version(),
        versions=_versions(),
        commit=git_commit(),
        command=command or _command(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        variables={name: os.environ[name] for name in PEER_VARIABLES if name in os.environ},
    )


def set_peer_variables() -> None:
    """Set ``PEER_VARIABLES`` that are unset, for the whole process: FlashInfer as a provider, too.

    So it is the caller of a run that times peers who does so, before they are imported.
    """
    for name, value in PEER_VARIABLES.items():
        os.environ.setdefault(name, value)


def gpu_slug(name: str) -> str:
    """The folder of a GPU's reports: ``NVIDIA H200`` -> ``h200``."""
    words = name.lower().replace("nvidia", "").split()
    return "_".join(words) or "none"


def source_files(patterns: Iterable[str], root: Path) -> list[Path]:
    """Source files that ``patterns`` name, relative to ``root``, sorted.

    A pattern is a file, a folder (everything below it) or a glob. Files of ``DATA_SUFFIXES`` count
    where the pattern ends with their suffix, and never as part of a folder.

    Raises:
        ConfigError: a pattern names no source file, so that a typing error cannot make a hash that
            never changes.
    """
    found: set[Path] = set()
    for pattern in patterns:
        folder = root / pattern
        matches = folder.rglob("*") if folder.is_dir() else root.glob(pattern)
        suffixes = SOURCE_SUFFIXES | (DATA_SUFFIXES & {Path(pattern).suffix})
        files = {
            path
            for path in matches
            if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
        }
        if not files:
            raise ConfigError(
                f"no source file matches {pattern!r} below the repository; accepted are a file, a "
                f"folder or a glob of {', '.join(sorted(SOURCE_SUFFIXES))} files."
            )
        found |= files
    return sorted(path.relative_to(root) for path in found)


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, _stamp: tuple[int, int]) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def source_hash(patterns: Sequence[str], root: Path | None = None, extra: str = "") -> str:
    """Hash of the files that ``patterns`` name (paths and contents) and of the text ``extra``.

    Returns:
        16 hexadecimal digits.

    Raises:
        ConfigError: a pattern names no source file, or there is no checkout.
    """
    root = root or repository_root()
    if root is None:
        raise ConfigError("source_hash: fusedops runs from a wheel; run from a checkout.")
    digest = hashlib.sha256(extra.encode())
    for relative in source_files(patterns, root):
        path = root / relative
        state = path.stat()
        digest.update(relative.as_posix().encode() + b"\0")
        digest.update(_file_digest(path, (state.st_mtime_ns, state.st_size)))
    return digest.hexdigest()[:16]
