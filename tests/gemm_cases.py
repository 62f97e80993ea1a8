"""Inputs for GEMM tests: random tensors with the operands a chain asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.epilogue.chain import Epilogue
from fusedops.problem import GemmSpec
from fusedops.weight import Dense

CHAINS = (
    "none",
    "bias",
    "act(relu)",
    "act(gelu)",
    "act(gelu_tanh)",
    "act(silu)",
    "act(quick_gelu)",
    "act(relu2)",
    "act(sigmoid)",
    "act",
    "residual",
    "residual(0.5)",
    "softcap(5.0)",
    "scale",
    "scale(x_scale,m)",
    "scale(w_scale,n)",
    "gate",
    "gate(gelu_tanh)",
    "gate(relu)",
    "tap|act(silu)",
    "row_stat",
    "residual|row_stat(absmax)",
    "scale(x_scale,m)|scale(w_scale,n)|bias|act(silu)|residual",
    "bias|gate|residual",
    "bias|act(gelu)|tap(mid,f32)|residual|row_stat(sumsq,4)",
    "residual|row_stat(sumsq,132)",
    "gate|tap|row_stat(absmax,132)",
)
"""Chains that every provider is tested on, each with a float output."""

QUANTIZING = (
    "quantize",
    "quantize(int8)",
    "quantize(e4m3,m)",
    "bias|quantize(int8,m)",
    "quantize(e4m3,group128)",
    "gate|quantize(int8,group128)",
)


@dataclass
class Case:
    """Tensors of one GEMM."""

    spec: GemmSpec
    x: Tensor
    w: Tensor
    operands: list[Tensor | None]

    @property
    def text(self) -> str:
        return self.spec.text


def to_e4m3(values: Tensor) -> Tensor:
    """The nearest finite e4m3 numbers; casts of torch 2.11 make NaN of what is beyond 448."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def make_case(
    chain: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    *,
    out_dtype: torch.dtype | None = None,
    seed: int = 0,
    integers: bool = False,
    device: str = "cpu",
) -> Case:
    """Random tensors for ``chain``; ``integers`` draws whole numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    epilogue = Epilogue.parse(chain)
    spec = GemmSpec(Dense(n, k), epilogue, epilogue.result_dtype(out_dtype or dtype))

    def draw(*shape: int, positive: bool = False) -> Tensor:
        if integers:
            whole = torch.randint(-2, 3, shape, generator=generator).float()
            return whole.abs() + 1 if positive else whole
        values = torch.randn(shape, generator=generator)
        return values.abs() + 0.1 if positive else values

    x = draw(m, k).to(dtype)
    w = (draw(n, k) if integers else draw(n, k) / max(k, 1) ** 0.5).to(dtype)
    operands: list[Tensor | None] = []
    for operand, width in zip(spec.operands, spec.operand_widths, strict=True):
        shape = {"scalar": (), "m": (m,), "n": (width,), "mn": (m, width)}[operand.axis]
        preferred = dtype if dtype in operand.dtypes else operand.dtypes[0]
        is_scale = "scale" in operand.name
        operands.append(draw(*shape, positive=is_scale).to(preferred).to(device))
    return Case(spec, x.to(device), w.to(device), operands)
