"""The probe: one small kernel compiled, and on a GPU launched, to see whether the chain works."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fusedops.jit.nvrtc import CUBIN, CudaProgram, compile_program, program_key

__all__ = ["PROBE", "PROBE_PARAMETERS", "ProbeReport", "compile_probe"]

PROBE = CudaProgram(
    "probe.cu",
    (
        "fusedops::scale<float>",
        "fusedops::scale<__half>",
        "fusedops::scale<__nv_bfloat16>",
    ),
)
"""``scale<T>(x, out, factor, count)``: out = x * factor."""

PROBE_PARAMETERS = ("pointer", "pointer", "float32", "int64")


@dataclass(frozen=True)
class ProbeReport:
    """What compiling the probe took.

    Attributes:
        arch: the architecture compiled for.
        compiler: versions of NVRTC and of the headers.
        compile_s: seconds, without the store.
        cubin_bytes: size of the binary.
    """

    arch: str
    compiler: str
    compile_s: float
    cubin_bytes: int


def compile_probe(arch: str) -> ProbeReport:
    """Compile the probe for ``arch``, past the store; needs no GPU.

    Raises:
        BuildError: NVRTC, the headers or the CUDA sources are missing, or the compile fails.
        ConfigError: ``arch`` is no architecture's name.
    """
    compiler = program_key(PROBE, arch).toolchain["nvrtc"]
    with tempfile.TemporaryDirectory(prefix="fusedops-") as name:
        start = time.perf_counter()
        compile_program(PROBE, arch, Path(name))
        compile_s = time.perf_counter() - start
        cubin_bytes = (Path(name) / CUBIN).stat().st_size
    return ProbeReport(arch, compiler or "unknown", compile_s, cubin_bytes)
