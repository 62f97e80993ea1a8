"""cuBLASLt's C interface: numbers, structures, prototypes, and where the library is.

The numbers are those of cublasLt.h, library_types.h and cublas_api.h (CUDA 13.0, cuBLAS 13.1),
printed by a C compiler from those headers; they belong to the library's ABI.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusedops.errors import LaunchError, UnsupportedError

__all__ = [
    "COMPUTE_32F",
    "DATA_TYPES",
    "DESC_BIAS_POINTER",
    "DESC_EPILOGUE",
    "DESC_TRANSA",
    "EPILOGUES",
    "OP_T",
    "PREF_MAX_WORKSPACE_BYTES",
    "PREF_MIN_ALIGNMENT",
    "HeuristicResult",
    "MatmulAlgo",
    "checked",
    "find_library",
    "library_version",
    "load_library",
]

# cublasComputeType_t (cublas_api.h): float32 accumulation of half-precision inputs.
COMPUTE_32F = 68
# cudaDataType_t (library_types.h).
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
# cublasOperation_t (cublas_api.h); OP_N, which is 0, is every descriptor's default.
OP_T = 1
# cublasLtMatmulDescAttributes_t (cublasLt.h).
DESC_TRANSA = 3
DESC_EPILOGUE = 7
DESC_BIAS_POINTER = 8
# cublasLtMatmulPreferenceAttributes_t (cublasLt.h); the four alignments are A, B, C, D.
PREF_MAX_WORKSPACE_BYTES = 1
PREF_MIN_ALIGNMENT = (5, 6, 7, 8)
# cublasLtEpilogue_t (cublasLt.h). Its GELU is the tanh form.
EPILOGUES = {
    "": 1,
    "relu": 2,
    "bias": 4,
    "bias|relu": 6,
    "gelu_tanh": 32,
    "bias|gelu_tanh": 36,
}
"""Epilogue name -> value. There is no SiLU and no gate in cuBLASLt."""

# cublasStatus_t (cublas_api.h).
STATUS_NAMES = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}


class MatmulAlgo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: 64 opaque bytes, which may be stored for the same library version."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: 96 bytes."""

    _fields_ = (
        ("algo", MatmulAlgo),
        ("workspaceSize", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def _loaded_by_this_process() -> Path | None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.search(r"(/\S*/libcublasLt\.so[.\d]*)$", line)
        if match:
            return Path(match.group(1))
    return None


def find_library(search: Sequence[Path] | None = None) -> Path:
    """The cuBLASLt that torch loaded, else the one of NVIDIA's wheels beside torch.

    Args:
        search: folders to look into instead (tests).

    Raises:
        UnsupportedError: there is none; the message lists the folders that were searched.
    """
    if search is None:
        loaded = _loaded_by_this_process()
        if loaded is not None:
            return loaded
        packages = Path(torch.__file__).resolve().parents[1] / "nvidia"
        search = [packages / "cu13" / "lib", packages / "cublas" / "lib"]
    for folder in search:
        found = sorted(folder.glob("libcublasLt.so.*"))
        if found:
            return found[-1]
    folders = ", ".join(str(folder) for folder in search)
    raise UnsupportedError(
        f"cuBLASLt: no libcublasLt.so is loaded or found in {folders}; install a CUDA build of "
        "torch, which brings it."
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library with its prototypes declared.

    Raises:
        UnsupportedError: there is no library.
    """
    try:
        library = ctypes.CDLL(str(find_library()))
    except OSError as error:
        raise UnsupportedError(f"cuBLASLt: the library cannot be loaded: {error}") from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    prototypes: dict[str, list[Any]] = {
        "cublasLtCreate": [ctypes.POINTER(pointer)],
        "cublasLtMatmulDescCreate": [ctypes.POINTER(pointer), ctypes.c_int, ctypes.c_int],
        "cublasLtMatmulDescDestroy": [pointer],
        "cublasLtMatmulDescSetAttribute": [pointer, ctypes.c_int, pointer, size],
        "cublasLtMatrixLayoutCreate": [
            ctypes.POINTER(pointer),
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int64,
        ],
        "cublasLtMatrixLayoutDestroy": [pointer],
        "cublasLtMatmulPreferenceCreate": [ctypes.POINTER(pointer)],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": [pointer, ctypes.c_int, pointer, size],
        "cublasLtMatmulAlgoGetHeuristic": [
            *[pointer] * 7,
            ctypes.c_int,
            ctypes.POINTER(HeuristicResult),
            ctypes.POINTER(ctypes.c_int),
        ],
        # handle, desc, alpha, A, its layout, B, its, beta, C, its, D, its, algo, workspace
        "cublasLtMatmul": [*[pointer] * 12, ctypes.POINTER(MatmulAlgo), pointer, size, pointer],
    }
    for name, arguments in prototypes.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    library.cublasLtGetVersion.argtypes = []
    library.cublasLtGetVersion.restype = size
    return library


def library_version() -> int:
    """``CUBLAS_VERSION`` of the loaded library, e.g. 130100."""
    return int(load_library().cublasLtGetVersion())


def checked(status: int, call: str, what: str) -> None:
    """Raise LaunchError unless a call of the library returned success."""
    if status != 0:
        name = STATUS_NAMES.get(status, "an unknown status")
        raise LaunchError(f"cuBLASLt: {call} returned {status} ({name}) for {what}")
