"""Kernels written in CuTe DSL: compiled for an explicit architecture, exported, loaded without it.

Compiling imports the DSL (about 3 s) and needs no GPU. What is stored is an object file with a
tvm-ffi entry point; a warm process loads it in memory through ``apache-tvm-ffi-orcjit`` and never
imports the DSL. The object file needs the DSL's small runtime library (``libcute_dsl_runtime.so``
of the wheel ``nvidia-cutlass-dsl-libs-cu13``) to be loaded first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.errors import BuildError, UnsupportedError
from fusedops.jit.entry import Entry
from fusedops.jit.key import KernelKey, distribution_versions
from fusedops.jit.sources import Sources
from fusedops.jit.store import Store, default_store

__all__ = [
    "DslProgram",
    "LoadedKernel",
    "compile_dsl",
    "dsl_kernel",
    "dsl_key",
    "missing_wheels",
    "require_compiler",
]

OBJECT = "kernel.o"
ENTRY_POINT = "kernel"
_FLAGS = ("--enable-tvm-ffi",)
_LOADING = {"apache-tvm-ffi": "tvm_ffi", "apache-tvm-ffi-orcjit": "tvm_ffi_orcjit"}
_COMPILING = {"nvidia-cutlass-dsl": "cutlass"}
"""Wheels of the extra cuda that kernels of the DSL need, each with the module that it brings."""

_INSTALL = "install fusedops with its extra cuda, in a checkout: pip install -e '.[cuda]'"

LoadedKernel = Callable[..., Any]
"""A launchable kernel: tensors by position, launched on the current stream of their device."""


@dataclass(frozen=True)
class DslProgram:
    """What is compiled into one object file.

    Attributes:
        family: kernel family, e.g. ``"cutlass/sm90_decode"``.
        spec: canonical string of everything that the traced kernel depends on beside its sources.
        sources: the sources of the family and of every node class in its chain.
        arguments: imports the kernel and returns the function to trace with its arguments (fakes).
    """

    family: str
    spec: str
    sources: Sources
    arguments: Callable[[], tuple[Any, ...]]


def dsl_key(program: DslProgram, arch: str) -> KernelKey:
    """The key of a program's object file for ``arch``; needs neither the DSL nor a GPU."""
    versions = distribution_versions("nvidia-cutlass-dsl", "apache-tvm-ffi")
    return KernelKey(
        family=program.family,
        spec=program.spec,
        arch=arch,
        sources=program.sources,
        toolchain=versions,
        flags=_FLAGS,
    )


@functools.cache
def require_compiler() -> None:
    """Raise UnsupportedError where this process cannot compile kernels of the DSL."""
    missing = missing_wheels(prebuilt=False)
    if missing:
        raise UnsupportedError(missing)


def missing_wheels(prebuilt: bool) -> str:
    """Why kernels of the DSL cannot be had in this process, or an empty string.

    Args:
        prebuilt: folders of prebuilt kernels are configured, so that compiling may not be needed.
    """
    wheels = _LOADING if prebuilt else {**_LOADING, **_COMPILING}
    absent = [wheel for wheel, module in wheels.items() if importlib.util.find_spec(module) is None]
    if not absent:
        return ""
    work = "loading" if prebuilt else "compiling and loading"
    are = "is" if len(absent) == 1 else "are"
    return f"{work} a kernel needs {', '.join(absent)}, which {are} absent; {_INSTALL}"


def compile_dsl(program: DslProgram, arch: str, folder: Path) -> dict[str, str]:
    """Trace and compile ``program`` for ``arch``; write the object file into ``folder``.

    Raises:
        BuildError: the DSL is not installed, or it failed; the message holds its last lines.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise BuildError(
            f"{program.family}: compiling needs nvidia-cutlass-dsl, which is absent; {_INSTALL}."
        )
    from cutlass import cute

    options = " ".join(("--gpu-arch", arch, *_FLAGS))
    try:
        compiled = cute.compile(*program.arguments(), options=options)
        compiled.export_to_c(str(folder / OBJECT), function_name=ENTRY_POINT)
    except Exception as error:
        last_lines = "\n".join(str(error).strip().splitlines()[-20:])
        raise BuildError(
            f"{program.family} {program.spec} for {arch} failed to compile:\n{last_lines}"
        ) from error
    return {}


def dsl_kernel(program: DslProgram, arch: str, store: Store | None = None) -> LoadedKernel:
    """The compiled and loaded kernel of a program; one object per process.

    Raises:
        BuildError, KernelMissingError, ConfigError: as ``Store.get``.
    """
    return (store or default_store()).get(
        dsl_key(program, arch),
        lambda folder: compile_dsl(program, arch, folder),
        lambda entry: _load(entry, f"{program.family} for {arch}"),
    )


def _load(entry: Entry, label: str) -> LoadedKernel:
    session = _session()
    entry.read(OBJECT)  # checks the bytes against the manifest; the loader takes a path
    try:
        module = session.load_module(str(entry.path(OBJECT)))
        kernel: LoadedKernel = module[ENTRY_POINT]
    except Exception as error:
        raise BuildError(f"{label} cannot be loaded: {error}") from error
    return kernel


@functools.cache
def _session() -> Any:
    """The in-process loader, with the DSL's runtime library in place.

    Raises:
        BuildError: a wheel is missing; the message says which one and how to install it.
    """
    try:
        import tvm_ffi_orcjit
    except ImportError as error:
        raise BuildError(
            f"loading a compiled kernel needs apache-tvm-ffi-orcjit ({error}); {_INSTALL}."
        ) from error
    ctypes.CDLL(str(_runtime_library()), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi_orcjit.default_session()


def _runtime_library() -> Path:
    """``libcute_dsl_runtime.so`` of the installed wheel, found without importing the DSL."""
    relative = Path("nvidia_cutlass_dsl") / "cu13" / "lib" / "libcute_dsl_runtime.so"
    for root in sys.path:
        candidate = Path(root or os.curdir) / relative
        if candidate.is_file():
            return candidate
    raise BuildError(
        f"{relative.name} of nvidia-cutlass-dsl-libs-cu13 is absent from sys.path; {_INSTALL}."
    )
