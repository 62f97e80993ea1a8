"""The CuTe DSL kernels as a GEMM provider; nothing here imports the DSL until a kernel compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fusedops.cutlass
from fusedops.config import DECODE_BUCKETS, DecodeTile, choose_decode, m_bucket
from fusedops.epilogue.base import FLOAT_DTYPES, Node
from fusedops.epilogue.spec import dtype_name
from fusedops.errors import ConfigError
from fusedops.jit.dsl import DslProgram, LoadedKernel, dsl_kernel
from fusedops.jit.sources import python_sources
from fusedops.problem import GemmProblem
from fusedops.prologue import NO_PROLOGUE
from fusedops.providers.base import SUPPORTED, Support, not_applicable, unsupported
from fusedops.providers.gemm import GemmRun, register_gemm_provider
from fusedops.weight import Dense

__all__ = ["CutlassProvider", "decode_program", "register"]

_BYTE_DTYPES = (torch.float8_e4m3fn, torch.int8)


def _emits(node: Node) -> bool:
    return type(node).emit is not Node.emit


def _stored(tensor: Tensor) -> Tensor:
    """8-bit results go to the kernel as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in _BYTE_DTYPES else tensor


def decode_program(problem: GemmProblem, tile: DecodeTile) -> DslProgram:
    """The decode kernel of a problem's chain and dtypes in one tiling; M, N and K stay dynamic."""
    spec = problem.spec
    config = tile.config(problem.m, problem.x_dtype.itemsize)
    operand_names = ",".join("-" if d is None else dtype_name(d) for d in problem.operand_dtypes)
    text = (
        f"{spec.epilogue} > {dtype_name(spec.out_dtype)} | x {dtype_name(problem.x_dtype)} "
        f"| operands {operand_names} | {config}"
    )

    def arguments() -> tuple[Any, ...]:
        from fusedops.cutlass.sm90_decode import decode_arguments

        return decode_arguments(
            config, spec.epilogue, problem.x_dtype, spec.out_dtype, problem.operand_dtypes
        )

    sources = python_sources(fusedops.cutlass, *{type(node) for node in spec.epilogue})
    return DslProgram("cutlass/sm90_decode", text, sources, arguments)


class CutlassProvider:
    """Tensor Core kernels emitted through CuTe DSL for sm_90a."""

    name = "cutlass"

    def supports(self, problem: GemmProblem) -> Support:
        if problem.device_type != "cuda":
            return not_applicable(f"runs on CUDA tensors, got {problem.device_type}")
        if problem.arch != "sm_90a":
            return not_applicable(f"is compiled for sm_90a, got {problem.arch}")
        return _first_refusal(problem) or SUPPORTED

    def describe(self, problem: GemmProblem) -> str:
        tile = choose_decode(problem, problem.gpu)
        return (
            f"decode kernel {tile.name}, M padded to {m_bucket(problem.m)}, "
            f"{tile.clusters(problem.spec.n, problem.sm_count)} clusters of {tile.split}, "
            f"predicted {tile.predicted_us(problem):.1f} us"
        )

    def plan(self, problem: GemmProblem) -> GemmRun:
        spec, m, k = problem.spec, problem.m, problem.spec.k
        if 0 in (m, spec.n):
            return lambda x, w, operands, out: list(out) if out else spec.allocate(x)
        tile = choose_decode(problem, problem.gpu)
        kernel: LoadedKernel = dsl_kernel(decode_program(problem, tile), problem.arch)
        clusters = tile.clusters(spec.n, problem.sm_count)
        flat = [operand.axis != "mn" for operand in spec.operands]

        def run(
            x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
        ) -> list[Tensor]:
            results = spec.allocate(x) if out is None else list(out)
            tensors = [
                tensor.reshape(-1) if is_flat else tensor.reshape(m, tensor.shape[-1])
                for tensor, is_flat in zip(operands, flat, strict=True)
                if tensor is not None
            ]
            main = _rows(results[0], m)
            tensors += [_rows(result, m) for result in results[1:]]
            with torch.cuda.device(x.device):
                kernel(w, x.reshape(m, k), main, tuple(tensors) or (main,), clusters)
            return results

        return run


def _rows(result: Tensor, m: int) -> Tensor:
    """A result as (rows, columns), a view of the same memory."""
    stored = _stored(result)
    return stored if stored.dim() == 2 else stored.view(m, stored.shape[-1])


def _first_refusal(problem: GemmProblem) -> Support | None:
    spec = problem.spec
    if not isinstance(spec.weight, Dense):
        return unsupported(f"has no kernel for the weight format {spec.weight}")
    if problem.x_dtype not in (torch.bfloat16, torch.float16):
        return unsupported(f"multiplies bfloat16 and float16, got {problem.x_dtype}")
    if spec.prologue != NO_PROLOGUE:
        return unsupported(f"has no kernel with the prologue {spec.prologue}")
    if problem.m > DECODE_BUCKETS[-1]:
        return unsupported(f"serves M <= {DECODE_BUCKETS[-1]}, got M={problem.m}")
    if spec.k == 0:
        return unsupported("needs K > 0")
    if problem.aligned_bytes < 16:
        return unsupported(
            "loads x and w in bulk: addresses and row pitches must be multiples of 16 bytes, got "
            f"multiples of {problem.aligned_bytes}"
        )
    for node in spec.epilogue:
        if not _emits(node):
            return unsupported(f"the node {node} has no emission (Node.emit)")
        if getattr(node, "mode", None) == "group128":
            return unsupported(f"{node}: no tile of the decode kernel holds whole groups")
    if any(dtype is not None and dtype not in FLOAT_DTYPES for dtype in problem.operand_dtypes):
        return unsupported(f"reads float operands only, got {problem.operand_dtypes}")
    try:
        choose_decode(problem, problem.gpu)
    except ConfigError as error:
        return unsupported(str(error))
    return None


def register() -> None:
    """Add the provider to those that ``fusedops::gemm`` asks."""
    register_gemm_provider(CutlassProvider())
