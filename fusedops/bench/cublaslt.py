"""The product of a linear layer through cuBLASLt, and the list of algorithms it can run with.

torch exposes cuBLASLt's first choice only, which is not always its best, so a fair baseline has to
rank the list that ``cublasLtMatmulAlgoGetHeuristic`` returns. This binding covers that: bf16 or
fp16 in and out (or float32 out), float32 accumulation, an optional epilogue and an optional addend.

Row-major tensors are passed as transposed column-major matrices. ``out = x @ w.T`` with x (M, K),
w (N, K) and out (M, N), all row-major, is the column-major product ``D = A^T B`` with A = w seen as
(K, N), B = x seen as (K, M) and D = out seen as (N, M); a bias, which cuBLASLt adds along the rows
of D, then has N elements.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.cublaslt_abi import (
    COMPUTE_32F,
    DATA_TYPES,
    DESC_BIAS_POINTER,
    DESC_EPILOGUE,
    DESC_TRANSA,
    EPILOGUES,
    OP_T,
    PREF_MAX_WORKSPACE_BYTES,
    PREF_MIN_ALIGNMENT,
    HeuristicResult,
    MatmulAlgo,
    checked,
    load_library,
)
from fusedops.check import describe
from fusedops.errors import (
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)

__all__ = ["WORKSPACE_BYTES", "Algorithm", "LtMatmul"]

WORKSPACE_BYTES = 64 << 20
MAX_ALIGNMENT = 256
"""The alignment that cuBLASLt assumes unless told otherwise; torch's allocations have it."""


@dataclass(frozen=True)
class Algorithm:
    """One entry of the heuristics list.

    Attributes:
        rank: its position in cuBLASLt's own order, 0 first.
        blob: the 64 bytes of cublasLtMatmulAlgo_t.
        workspace_bytes: workspace that it needs.
    """

    rank: int
    blob: bytes
    workspace_bytes: int


@functools.cache
def _handle(device_index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        checked(
            load_library().cublasLtCreate(ctypes.byref(handle)),
            "cublasLtCreate",
            f"cuda:{device_index}",
        )
    return handle


@functools.cache
def _workspace(device_index: int) -> Tensor:
    # One for all plans: it never moves, so captured graphs stay valid, and plans of one stream
    # run one after the other.
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")


def _pitch(name: str, tensor: Tensor) -> int:
    """Elements from one row to the next of a row-major matrix."""
    if tensor.dim() != 2:
        raise ShapeError(f"LtMatmul: {name} is {describe(tensor)}; it needs 2 dimensions.")
    rows, columns = tensor.shape
    if columns > 1 and tensor.stride(1) != 1:
        raise LayoutError(
            f"LtMatmul: {name} is {describe(tensor)} with strides {tuple(tensor.stride())}; its "
            f"last dimension must have stride 1. Call {name}.contiguous() first."
        )
    return max(int(tensor.stride(0)), columns) if rows > 1 else columns


def _alignment(tensor: Tensor) -> int:
    address = tensor.data_ptr() | MAX_ALIGNMENT
    return address & -address


class LtMatmul:
    """A plan of ``out = epilogue(x @ w.T + addend)`` for given shapes, pitches and alignments.

    Args:
        x: (M, K), bf16 or fp16, rows contiguous.
        w: (N, K), the same dtype.
        out: (M, N), the same dtype or float32.
        epilogue: a key of ``EPILOGUES``.
        addend: (M, N) of out's dtype, added to the product before the epilogue, or None.

    The tensors give shapes, pitches and alignments; ``run`` takes any others that agree with them.

    Raises:
        DeviceError, DTypeError, LayoutError, ShapeError: the tensors are not as described.
        UnsupportedError: no cuBLASLt here.
    """

    def __init__(
        self, x: Tensor, w: Tensor, out: Tensor, epilogue: str = "", addend: Tensor | None = None
    ) -> None:
        if epilogue not in EPILOGUES:
            raise UnsupportedError(
                f"LtMatmul: cuBLASLt has no epilogue {epilogue!r}; accepted are "
                f"{', '.join(repr(name) for name in EPILOGUES)}."
            )
        matrices = [("w", w), ("x", x), ("addend", addend if addend is not None else out)]
        matrices.append(("out", out))
        for name, tensor in matrices:
            if not tensor.is_cuda or tensor.device != x.device:
                raise DeviceError(
                    f"LtMatmul: {name} is {describe(tensor)}; all tensors must be on x's device, "
                    f"{x.device}, a CUDA device."
                )
        if x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
            raise DTypeError(
                f"LtMatmul: x is {describe(x)} and w is {describe(w)}; accepted: bfloat16 or "
                "float16, both the same."
            )
        if out.dtype not in (x.dtype, torch.float32):
            raise DTypeError(
                f"LtMatmul: out is {describe(out)}; accepted: {x.dtype} or torch.float32."
            )
        self.m, self.k, self.n = x.shape[0], x.shape[-1], w.shape[0]
        self.epilogue = epilogue
        self.has_addend = addend is not None
        self.has_bias = "bias" in epilogue
        self._device = x.device.index
        self._library = load_library()
        pitches = [_pitch(name, tensor) for name, tensor in matrices]
        wanted = [(self.n, self.k), (self.m, self.k), (self.m, self.n), (self.m, self.n)]
        for (name, tensor), shape in zip(matrices, wanted, strict=True):
            if tuple(tensor.shape) != shape:
                raise ShapeError(
                    f"LtMatmul: {name} is {describe(tensor)}; accepted shape: {shape}."
                )
        self.alignments = tuple(_alignment(tensor) for _, tensor in matrices)
        self.pitches = tuple(pitches)
        self.dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in (x, out))
        self._layouts = [
            self._layout(tensor, pitch)
            for (_, tensor), pitch in zip(matrices, pitches, strict=True)
        ]
        self._desc = ctypes.c_void_p()
        self._call(
            "cublasLtMatmulDescCreate",
            ctypes.byref(self._desc),
            COMPUTE_32F,
            DATA_TYPES[torch.float32],
        )
        self._set_desc(DESC_TRANSA, ctypes.c_int32(OP_T))
        self._set_desc(DESC_EPILOGUE, ctypes.c_uint32(EPILOGUES[epilogue]))
        self._one = ctypes.c_float(1.0)
        self._beta = ctypes.c_float(1.0 if self.has_addend else 0.0)

    @property
    def key(self) -> str:
        """Everything that the heuristics list depends on, as text."""
        return (
            f"m{self.m} n{self.n} k{self.k} {'->'.join(self.dtypes)} "
            f"epilogue={self.epilogue or 'none'} addend={int(self.has_addend)} "
            f"pitch={','.join(map(str, self.pitches))} align={','.join(map(str, self.alignments))}"
        )

    def _call(self, name: str, *arguments: Any) -> None:
        what = f"m={self.m} n={self.n} k={self.k} epilogue={self.epilogue!r}"
        checked(getattr(self._library, name)(*arguments), name, what)

    def _layout(self, tensor: Tensor, pitch: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        rows, columns = tensor.shape
        self._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            DATA_TYPES[tensor.dtype],
            columns,
            rows,
            pitch,
        )
        return layout

    def _set_desc(self, attribute: int, value: Any) -> None:
        self._call(
            "cublasLtMatmulDescSetAttribute",
            self._desc,
            attribute,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )

    def algorithms(self, limit: int = 8, bias: Tensor | None = None) -> list[Algorithm]:
        """The first ``limit`` algorithms of the heuristics list that support the problem.

        Args:
            limit: entries asked for.
            bias: (N,) of out's dtype where the epilogue has one; the list depends on its
                alignment.
        """
        self._set_bias(bias)
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            settings: list[tuple[int, Any]] = [
                (PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES)),
                *zip(PREF_MIN_ALIGNMENT, map(ctypes.c_uint32, self.alignments), strict=True),
            ]
            for attribute, value in settings:
                self._call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    attribute,
                    ctypes.byref(value),
                    ctypes.sizeof(value),
                )
            results = (HeuristicResult * limit)()
            count = ctypes.c_int()
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(self._device),
                self._desc,
                *self._layouts,
                preference,
                limit,
                results,
                ctypes.byref(count),
            )
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [
            Algorithm(rank, bytes(result.algo), int(result.workspaceSize))
            for rank, result in enumerate(results[: count.value])
            if result.state == 0
        ]

    def _set_bias(self, bias: Tensor | None) -> None:
        if self.has_bias != (bias is not None):
            raise ShapeError(
                f"LtMatmul: the epilogue is {self.epilogue!r} and bias is "
                f"{'given' if bias is not None else 'missing'}; they must agree."
            )
        if bias is not None:
            if bias.numel() != self.n or str(bias.dtype) != f"torch.{self.dtypes[1]}":
                raise ShapeError(
                    f"LtMatmul: bias is {describe(bias)}; accepted: {self.dtypes[1]} ({self.n},)."
                )
            self._set_desc(DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))

    def run(
        self,
        algorithm: Algorithm,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
    ) -> None:
        """Launch on the current stream of x's device. Tensors must agree with the plan's.

        Raises:
            LaunchError: cuBLASLt refused.
            ShapeError: bias or addend are given or missing against the plan.
        """
        if (addend is not None) != self.has_addend:
            raise ShapeError("LtMatmul: addend must be given exactly where the plan has one.")
        self._set_bias(bias)
        workspace = _workspace(self._device)
        algo = MatmulAlgo.from_buffer_copy(algorithm.blob)
        added = addend if addend is not None else out
        w_layout, x_layout, added_layout, out_layout = self._layouts
        self._call(
            "cublasLtMatmul",
            _handle(self._device),
            self._desc,
            ctypes.byref(self._one),
            w.data_ptr(),
            w_layout,
            x.data_ptr(),
            x_layout,
            ctypes.byref(self._beta),
            added.data_ptr(),
            added_layout,
            out.data_ptr(),
            out_layout,
            ctypes.byref(algo),
            workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream(self._device).cuda_stream,
        )

    def __del__(self) -> None:
        # A constructor that raised leaves some of these unset; module globals may be gone at exit.
        library = getattr(self, "_library", None)
        if library is None:
            return
        for layout in getattr(self, "_layouts", []):
            library.cublasLtMatrixLayoutDestroy(layout)
        if getattr(self, "_desc", None):
            library.cublasLtMatmulDescDestroy(self._desc)
