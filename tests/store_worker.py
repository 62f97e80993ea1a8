"""What the store tests share, and the process that they start to have one more user of a store.

As a program it reads one JSON request a line from stdin and answers each with one JSON line. It
loads ``fusedops.jit`` without the package's ``__init__``, which would import torch: eight of them
start in the time of one.
"""

# The stand-in for the package must be in place before the imports from it.
# ruff: noqa: E402

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
NOBODY_UID = 65534
OBJECT_BYTES = 40_000

if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    package = types.ModuleType("fusedops")
    package.__path__ = [str(REPOSITORY / "fusedops")]
    sys.modules["fusedops"] = package

from fusedops.errors import FusedOpsError
from fusedops.jit import cache
from fusedops.jit.entry import Entry
from fusedops.jit.key import KernelKey
from fusedops.jit.location import CacheSettings
from fusedops.jit.nvrtc import compile_program
from fusedops.jit.nvrtc import program_key as nvrtc_key
from fusedops.jit.probe import PROBE
from fusedops.jit.sources import Sources
from fusedops.jit.store import Store


def fake_key(spec: str, arch: str = "sm_90a", **changes: Any) -> KernelKey:
    """A key of a kernel that ``FakeCompiler`` compiles."""
    fields: dict[str, Any] = {
        "family": "fake",
        "spec": spec,
        "arch": arch,
        "sources": Sources((("fake.py", "00ff"),)),
        "toolchain": {"fake": "1.0"},
        **changes,
    }
    return KernelKey(**fields)


def fake_object(spec: str) -> bytes:
    """The binary of a kernel: any truncation or flipped byte shows in it."""
    block = hashlib.sha256(spec.encode()).digest()
    return (block * (OBJECT_BYTES // len(block) + 1))[:OBJECT_BYTES]


@dataclass
class FakeCompiler:
    """A compile function that takes its time and writes a line for each compile into ``log``."""

    spec: str
    log: Path | None = None
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, folder: Path) -> Mapping[str, str]:
        self.calls += 1
        (folder / "kernel.o").write_bytes(fake_object(self.spec))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{self.spec}\n")
        time.sleep(self.seconds)
        (folder / "symbols.txt").write_text(self.spec)
        return {"entry_point": f"run_{self.spec}"}


def load(entry: Entry) -> bytes:
    """A loader that has the store check the bytes."""
    return entry.read("kernel.o")


def entry_dir(root: Path, spec: str = "a") -> Path:
    """Where a cache folder keeps the kernel of ``fake_key(spec)``."""
    return root / "entries" / fake_key(spec).name


def fill(root: Path, *specs: str) -> None:
    """Put kernels into a cache folder."""
    for spec in specs:
        Store(CacheSettings(root)).ensure(fake_key(spec), FakeCompiler(spec))


def _get(request: dict[str, Any]) -> dict[str, Any]:
    store = Store(_settings(request))
    log = Path(request["log"]) if "log" in request else None
    compiler = FakeCompiler(request["spec"], log, request.get("seconds", 0.0))
    data = store.get(fake_key(request["spec"]), compiler, load)
    return {"right": data == fake_object(request["spec"]), "counts": dict(store.counts)}


def _get_repeatedly(request: dict[str, Any]) -> dict[str, Any]:
    answers = [_get(request) for _ in range(request["times"])]
    compiled = sum(answer["counts"].get("compiled", 0) for answer in answers)
    return {"right": all(answer["right"] for answer in answers), "compiled": compiled}


def _clear_repeatedly(request: dict[str, Any]) -> dict[str, Any]:
    removed = 0
    for _ in range(request["times"]):
        removed += cache.clear(Path(request["root"])).kernels
        time.sleep(0.005)
    return {"right": True, "removed": removed}


def _nvrtc(request: dict[str, Any]) -> dict[str, Any]:
    """Look the probe up in the environment's store and compile it if it is not there."""
    arch = request["arch"]
    store = Store(CacheSettings.from_environment())
    key = nvrtc_key(PROBE, arch)
    entry = store.ensure(key, lambda folder: compile_program(PROBE, arch, folder))
    return {"origin": entry.origin, "name": key.name, "tools": dict(key.toolchain)}


def _settings(request: dict[str, Any]) -> CacheSettings:
    if "root" not in request:
        return CacheSettings.from_environment()
    return CacheSettings(Path(request["root"]))


def _as_nobody(request: dict[str, Any]) -> dict[str, Any]:
    """``get`` without root's right to read and write everything."""
    os.setegid(NOBODY_UID)
    os.seteuid(NOBODY_UID)
    return _get(request)


_OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "get": _get,
    "get_repeatedly": _get_repeatedly,
    "clear_repeatedly": _clear_repeatedly,
    "nvrtc": _nvrtc,
    "as_nobody": _as_nobody,
}


class Worker:
    """A running worker process; a context manager."""

    def __init__(
        self,
        environment: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        python: tuple[str, ...] = (sys.executable,),
    ) -> None:
        variables = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            [*python, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={name: value for name, value in variables.items() if value is not None},
        )

    def send(self, operation: str, **request: Any) -> None:
        """Give it a request; it starts at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"operation": operation, **request}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer to the oldest request."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker died: {self.process.communicate()[1]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, operation: str, **request: Any) -> dict[str, Any]:
        """``send`` and ``receive``."""
        self.send(operation, **request)
        return self.receive()

    def finish(self) -> str:
        """Let it end, and return what it wrote to stderr."""
        return self.process.communicate(timeout=60)[1]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def main() -> None:
    """Serve requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _OPERATIONS[request["operation"]](request)
        except FusedOpsError as error:
            answer = {"right": False, "error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
