"""The ladder of products: reuse in shared memory and registers, copies ahead, tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.data import Buffers
from fusedops.bench.products import Layer
from fusedops.errors import ShapeError, UnsupportedError
from fusedops.gemm import gemm
from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.nvrtc import CudaProgram
from fusedops.ladders.catalog import specified
from fusedops.ladders.gemm_findings import NAME, SIZE, TILES, findings, recorded_words
from fusedops.ladders.gemm_problem import (
    BF16,
    BF16_FUSED,
    FLOAT32,
    predicted_loads,
    product_problem,
)
from fusedops.ladders.lines import python_lines, with_imports
from fusedops.ladders.model import (
    FOLDER,
    Ladder,
    LadderKernel,
    Lesson,
    Problem,
    Step,
    lesson_of,
)

__all__ = ["LADDER", "counting_program"]

KINDS = (FLOAT32, BF16, BF16_FUSED)
COUNT_SIZE = 512
"""Loads are counted on a product of this size, one by one; the formula holds for every size."""

_TITLES = specified()[NAME].steps
_PARAMETERS = ("pointer", "pointer", "pointer", "int32", "int32")
_LIBRARY = "cutlass/sm90_prefill.py"
_TRITON = "ladders/gemm_triton.py"


@dataclass(frozen=True)
class _Block:
    """What a block of threads computes: ``columns`` x ``rows`` of the result, ``depth`` of K at a
    time."""

    columns: int
    rows: int
    depth: int
    threads: tuple[int, int, int]

    def grid(self, buffers: Buffers) -> tuple[int, int, int]:
        """Blocks for a product.

        Raises:
            ShapeError: it does not divide into them.
        """
        x, w = buffers.inputs[:2]
        (m, k), n = x.shape, w.shape[0]
        if m % self.rows or n % self.columns or k % self.depth:
            raise ShapeError(
                f"ladder {NAME}: the product is {m} x {n} x {k}; this step takes multiples of "
                f"{self.rows} x {self.columns} x {self.depth}."
            )
        return n // self.columns, m // self.rows, 1


def _arguments(buffers: Buffers) -> tuple[Tensor | int, ...]:
    (x, w), (out,) = buffers.inputs[:2], buffers.outputs
    return x, w, out, w.shape[0], w.shape[1]


def _run(kernel: LadderKernel, block: _Block, buffers: Buffers) -> None:
    kernel.launch(block.grid(buffers), block.threads, _arguments(buffers))


def counting_program(kernel: LadderKernel) -> CudaProgram:
    """A kernel of the ladder that counts the elements that it loads."""
    names = (f"fusedops::{kernel.name}", "fusedops::take_loads")
    return CudaProgram(kernel.file, names, (("COUNT_LOADS", "1"),))


def _count_loads(
    kernel: LadderKernel, block: _Block, tile: tuple[int, int], kind: str, device: torch.device
) -> dict[str, float]:
    """Elements that the kernel loads for a product of ``COUNT_SIZE``, and the prediction."""
    size = (COUNT_SIZE,) * 3
    buffers = product_problem(kind, *size).make(torch.Generator(device).manual_seed(0))
    program = counting_program(kernel)
    module = cuda_module(program, device_arch(device.index or 0))
    product, take = (
        module.kernel(name, parameters)
        for name, parameters in zip(program.kernels, (_PARAMETERS, ("pointer",)), strict=True)
    )
    count = torch.zeros(1, dtype=torch.int64, device=device)
    product.launch(block.grid(buffers), block.threads, _arguments(buffers))
    take.launch((1, 1, 1), (1, 1, 1), (count,))
    return {"loads": float(count.item()), "predicted_loads": predicted_loads(*size, *tile)}


def _own(version: str, block: _Block, kind: str = FLOAT32, template: str = "") -> Step:
    name = f"{NAME}.{version}"
    base = f"{NAME}_{version.partition('_')[0]}"
    kernel = LadderKernel(f"{FOLDER}/{base}.cu", base + template, _PARAMETERS)
    return Step(
        name,
        _TITLES[name],
        lesson_of(kernel.file),
        functools.partial(_run, kernel, block),
        kernels=(kernel,),
        files=(kernel.file,),
        kinds=(kind,),
        readings=functools.partial(_count_loads, kernel, block, TILES[name], kind),
    )


def _square(tile: int) -> _Block:
    return _Block(tile, tile, tile, (tile, tile, 1))


def _slabs(depth: int) -> _Block:
    return _Block(128, 128, depth, (256, 1, 1))


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _by_torch(buffers: Buffers) -> Tensor:
    x, w, *bias = buffers.inputs
    with _without_tf32():
        product = F.linear(x, w, *bias)
    return F.gelu(product, approximate="tanh") if bias else product


def _by_triton(buffers: Buffers) -> None:
    from fusedops.ladders.gemm_triton import TILE, product

    x, w, *bias = buffers.inputs
    _Block(TILE, TILE, 64, (1, 1, 1)).grid(buffers)
    product(x, w, bias[0] if bias else None, buffers.outputs[0])


def _only(results: Tensor | list[Tensor]) -> Tensor:
    return results if isinstance(results, Tensor) else results[0]


def _by_library(buffers: Buffers) -> Tensor:
    """The product by the library; bias and GELU, where the problem has them, apart."""
    x, w, *bias = buffers.inputs
    product = _only(gemm(x, w))
    return F.gelu(product + bias[0], approximate="tanh") if bias else product


def _fused(buffers: Buffers) -> Tensor:
    x, w, bias = buffers.inputs
    return _only(gemm(x, w, "bias|act(gelu_tanh)", {"bias": bias}))


def _library(
    version: str,
    lesson: Lesson,
    run: Callable[[Buffers], Tensor],
    kinds: tuple[str, ...],
    layer: Layer,
    is_apart: bool = False,
) -> Step:
    name = f"{NAME}.{version}"
    return Step(
        name,
        _TITLES[name],
        lesson,
        run,
        operation="gemm",
        provider="cutlass",
        capability=(9, 0),
        kinds=kinds,
        modules=with_imports(_LIBRARY),
        layers=(layer,),
        is_apart=is_apart,
    )


def _never_run(state: object) -> None:
    raise UnsupportedError(
        f"ladder {NAME}: the step {NAME}.cutlass_emitter is a record of an earlier run; its "
        f"sources are not part of this project. Run {NAME}.v8 instead."
    )


def _problems(size: int) -> tuple[Problem, ...]:
    return tuple(product_problem(kind, size, size, size) for kind in KINDS)


_TORCH = Step(
    f"{NAME}.torch",
    _TITLES[f"{NAME}.torch"],
    Lesson(
        "NVIDIA's library through torch; TF32 is off for float32, and GELU is a kernel of its own.",
        "tensor pipe. In float32 it is the FMA pipe of the CUDA cores instead.",
        "Climb to it; what it does not fuse is where a kernel of one's own can pass it.",
    ),
    _by_torch,
    peer="torch",
    is_apart=True,
)

_TRITON_STEP = Step(
    f"{NAME}.triton",
    _TITLES[f"{NAME}.triton"],
    Lesson(
        "The same tile of 128 x 128 in Triton: the compiler places shared memory, copies ahead and "
        "tensor cores.",
        "tensor pipe. How near it comes is the compiler's choice, not the author's: in float32 it "
        "reads shared memory with bank conflicts.",
        "None but the tile, the warps and the stages.",
        python_lines([_TRITON]),
    ),
    _by_triton,
    peer="triton",
    modules=(_TRITON,),
)

_EMITTER = Step(
    f"{NAME}.cutlass_emitter",
    _TITLES[f"{NAME}.cutlass_emitter"],
    Lesson(
        "C++ templates generated from Python and built by nvcc, with an epilogue visitor tree.",
        "tensor pipe. And a minute of compilation a kernel, before the first launch.",
        "The CuTe DSL: the same layouts and copies, compiled in the process that launches them.",
    ),
    _never_run,
    kinds=(BF16_FUSED,),
    recorded=recorded_words(),
)

LADDER = Ladder(
    NAME,
    specified()[NAME].title,
    "2 MNK operations on MK + NK + MN elements: far above the ridge point, so arithmetic is the "
    "roof: in float32 the multiply-adds of the CUDA cores, in bfloat16 the tensor cores. What is "
    "lost is lost in loads: one thread an element loads two values for every multiply-add, and "
    "each level of memory has to be climbed by reuse. w is (N, K), as a linear layer stores it.",
    SIZE,
    _problems,
    (
        _TORCH,
        _own("v1", _Block(32, 8, 1, (32, 8, 1))),
        *(_own(f"v2_{tile}", _square(tile), template=f"<{tile}>") for tile in (16, 32)),
        _own("v3", _square(32)),
        _own("v4", _slabs(16)),
        _own("v5", _slabs(16)),
        _own("v6", _slabs(32), BF16),
        _library(
            "v7",
            Lesson(
                "The copy engine keeps a ring of tiles full for one warp's asking, and groups of "
                "four warps multiply from shared memory by wgmma: fusedops.gemm by CuTe DSL.",
                "tensor pipe. It stands near what cuBLAS reaches.",
                "Do what follows the product before it leaves the registers.",
                python_lines(with_imports(_LIBRARY)),
            ),
            _by_library,
            (BF16, BF16_FUSED),
            Layer(SIZE, SIZE, SIZE),
            is_apart=True,
        ),
        _library(
            "v8",
            Lesson(
                "Bias and GELU in the epilogue, on the float32 sums in registers, while other "
                "warps multiply the next tile; the result is written once and rounded once.",
                "tensor pipe. Apart, bias and GELU read and write the result twice more.",
                "None: the product and what follows it are one kernel.",
                python_lines(with_imports(_LIBRARY)),
            ),
            _fused,
            (BF16_FUSED,),
            Layer(SIZE, SIZE, SIZE, bias=True, activation="gelu_tanh"),
        ),
        _TRITON_STEP,
        _EMITTER,
    ),
    findings,
)
"""Products in float32, in bfloat16, and in bfloat16 with bias and GELU behind them."""
