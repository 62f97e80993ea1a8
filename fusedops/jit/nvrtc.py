"""Compiling ``csrc/*.cu`` in process with NVRTC: no nvcc, no GPU, about 0.1 s a kernel.

The compiler comes with pip (``nvidia-cuda-nvrtc``), the headers with ``nvidia-cuda-runtime`` or the
wheels that torch brings. Source of the options: the NVRTC documentation, "Supported Compile
Options".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fusedops.errors import BuildError, ConfigError
from fusedops.jit.key import KernelKey, distribution_versions
from fusedops.jit.resources import csrc_dir
from fusedops.jit.sources import cuda_sources

__all__ = ["CUBIN", "CudaProgram", "compile_program", "cuda_include_dir", "program_key"]

CUBIN = "kernel.cubin"
"""Name of the binary's file in an entry."""

_INSTALL = 'pip install "fusedops[cuda]"'
_STANDARD = "c++17"
_LOG_LINES = 30
_INFO_PREFIX = "kernel "


@dataclass(frozen=True)
class CudaProgram:
    """What is compiled into one cubin.

    Attributes:
        file: path relative to csrc with forward slashes, e.g. ``"probe.cu"``.
        kernels: C++ name expressions of the kernels wanted, which instantiate the templates, e.g.
            ``"fusedops::scale<float>"``.
        defines: pairs (macro, value).
        max_registers: upper limit of registers a thread; None leaves it to the compiler.
        fast_math: approximate division, square root and exponential, and flush denormals.
    """

    file: str
    kernels: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()
    max_registers: int | None = None
    fast_math: bool = False

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ConfigError(
                f"csrc/{self.file}: kernels is empty; name at least one kernel to compile."
            )

    def spec(self) -> str:
        """Canonical string of the kernels and defines."""
        defines = [f"{name}={value}" for name, value in self.defines]
        return " | ".join([", ".join(self.kernels), *defines])

    def flags(self) -> tuple[str, ...]:
        """The compiler flags, as NVRTC spells them; part of the key."""
        flags = [f"--std={_STANDARD}"]
        if self.max_registers is not None:
            flags.append(f"--maxrregcount={self.max_registers}")
        if self.fast_math:
            flags.append("--use_fast_math")
        return tuple(flags)


def program_key(program: CudaProgram, arch: str) -> KernelKey:
    """The key of a program's cubin for ``arch``; needs neither compiler nor GPU.

    Raises:
        BuildError: the source or one of its includes is missing.
        ConfigError: ``arch`` is no architecture's name.
    """
    return KernelKey(
        family=f"csrc/{program.file}",
        spec=program.spec(),
        arch=arch,
        sources=cuda_sources(program.file),
        toolchain={"nvrtc": _compiler_version()},
        flags=program.flags(),
    )


def lowered_names(info: Mapping[str, str]) -> dict[str, str]:
    """Name expression -> mangled name, from what ``compile_program`` returned."""
    return {
        name.removeprefix(_INFO_PREFIX): mangled
        for name, mangled in info.items()
        if name.startswith(_INFO_PREFIX)
    }


def compile_program(program: CudaProgram, arch: str, folder: Path) -> dict[str, str]:
    """Compile ``program`` for ``arch`` and write the cubin into ``folder`` as ``CUBIN``.

    Args:
        program: source and kernels.
        arch: e.g. ``"sm_90a"``; independent of the GPU of this machine, which may have none.
        folder: an existing folder.

    Returns:
        the entry's info: the mangled name of each kernel, see ``lowered_names``.

    Raises:
        BuildError: the compiler refuses the source (with the last lines of its log), or a wheel is
            missing (the message names it).
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise _missing("cuda-core", str(error)) from error
    include_dir = cuda_include_dir()
    if include_dir is None:
        raise _missing("nvidia-cuda-runtime", "the header cuda_bf16.h was found in no wheel")
    root = csrc_dir()
    main = root / program.file
    before = cuda_sources(program.file)
    options = ProgramOptions(
        name=Path(program.file).name,
        arch=arch,
        std=_STANDARD,
        include_path=[str(main.parent), str(root / "include"), str(include_dir)],
        # NVRTC would search the current folder first, and with it whatever the user keeps there.
        no_source_include=True,
        define_macro=list(program.defines) or None,
        max_register_count=program.max_registers,
        use_fast_math=program.fast_math or None,
    )
    try:
        compiled = Program(main.read_text("utf-8"), "c++", options).compile(
            "cubin", name_expressions=program.kernels
        )
    except Exception as error:
        raise _explain(program, arch, error) from error
    if cuda_sources(program.file) != before:
        raise BuildError(
            f"csrc/{program.file} or a file that it includes was changed while it was being "
            "compiled. Call again."
        )
    (folder / CUBIN).write_bytes(compiled.code)
    mapping = compiled.symbol_mapping
    return {
        f"{_INFO_PREFIX}{name}": mangled.decode() if isinstance(mangled, bytes) else mangled
        for name, mangled in mapping.items()
    }


def _explain(program: CudaProgram, arch: str, error: Exception) -> BuildError:
    if "DynamicLib" in type(error).__name__ or "libnvrtc" in str(error):
        return _missing("nvidia-cuda-nvrtc", str(error).strip().splitlines()[-1])
    log = str(error).replace("\0", "")  # NVRTC ends its log with one
    lines = [line for line in log.splitlines() if line.strip()][-_LOG_LINES:]
    return BuildError("\n".join([f"NVRTC cannot compile csrc/{program.file} for {arch}:", *lines]))


def _missing(distribution: str, detail: str) -> BuildError:
    return BuildError(
        f"compiling CUDA kernels needs the package {distribution} ({detail}). "
        f"Install it with `{_INSTALL}`, or use kernels built by `fusedops prebuild`."
    )


def cuda_include_dir() -> Path | None:
    """The folder with the CUDA headers of an installed wheel; None where there is none.

    CUDA 13 wheels, torch's among them, share ``nvidia/cu13/include``; older ones have
    ``nvidia/cuda_runtime/include``.
    """
    spec = find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return None
    for part in ("cu13", "cuda_runtime"):
        for base in spec.submodule_search_locations:
            folder = Path(base) / part / "include"
            if (folder / "cuda_bf16.h").is_file():
                return folder
    return None


@cache
def _compiler_version() -> str | None:
    """Version of NVRTC and of the headers; None when one of them or cuda-core is missing."""
    include_dir = cuda_include_dir()
    nvrtc = distribution_versions("nvidia-cuda-nvrtc")["nvidia-cuda-nvrtc"] or _loaded_version()
    if include_dir is None or nvrtc is None or not _has_cuda_core():
        return None
    header = (include_dir / "cuda_runtime_api.h").read_text("utf-8", "replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header)
    return f"{nvrtc} headers {match.group(1) if match else 'unknown'}"


def _has_cuda_core() -> bool:
    try:
        return find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        return False


def _loaded_version() -> str | None:
    """Version of an NVRTC that does not come as a wheel, asked of the library itself."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return None
    return f"{major}.{minor}"
