"""Quantized linear layers as they are measured: weights, launches, and what a result must be.

A ``QuantLayer`` is a ``Layer`` under a scheme. Its product is judged against float64 on the values
that the stored numbers stand for, so that quantization itself is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fusedops.bench.oracles import relative_error, within
from fusedops.bench.precompile import H200, Target, quantized_problem
from fusedops.bench.products import ACTIVATIONS, Layer
from fusedops.bench.roofline import Ceilings, Floor, Traffic, floor
from fusedops.epilogue.base import E4M3_MAX
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.outputs import GROUP
from fusedops.packing import unpack_gate_up
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.base import use_provider
from fusedops.providers.cutlass_mixed import fitting_layout
from fusedops.quant import QuantizedWeight, Scheme, quantize_weight
from fusedops.weight.int4_layout import pack_nibbles, unpack_nibbles

__all__ = ["Activations", "Expected", "QuantLayer"]

_HALF_UNIT = 2.0**-8
"""Rounding to bfloat16, relative."""

_ROUNDINGS = 3
"""How often a peer rounds to bfloat16 between the product and the result, at most."""

_CUT = 2.0**-13
"""What Hopper's tensor cores cut off a running sum of e4m3 products, each 32 columns of K (see
``fusedops.cutlass.products``)."""

_SUM_ERROR = {torch.int8: 2.0**-22, torch.float8_e4m3fn: 2.0**-11}
_WIDE_SUM_ERROR = 2.0**-10
"""Error of a product relative to the sum of its terms' magnitudes, by the activations' dtype; the
one for 16-bit activations has room for peers that round scaled weights to bfloat16."""

_STEEPEST = 1.13
"""The largest slope of an activation (that of GELU)."""

_E4M3_ROUNDING = 2.0**-4
_E4M3_SMALLEST = 2.0**-10
"""Half a unit of e4m3's mantissa, relative, and half of its smallest number."""


@dataclass(frozen=True)
class Activations:
    """Activations as a scheme takes them.

    Attributes:
        values: (M, K), quantized or as they are.
        scale: their scale or scales; None where they are not quantized.
    """

    values: Tensor
    scale: Tensor | None

    def wide(self) -> Tensor:
        """The values that they stand for, float64 (M, K)."""
        wide = self.values.double()
        if self.scale is None:
            return wide
        scale = self.scale.double()
        if scale.dim() < 2:
            return wide * (scale.unsqueeze(1) if scale.dim() else scale)
        return wide * scale.t().repeat_interleave(GROUP, dim=1)[:, : wide.shape[1]]


@dataclass(frozen=True)
class Expected:
    """What a result must be.

    Attributes:
        exact: (M, columns_out) float64.
        error: how far each element may lie off.
        share: how far the whole may lie off, relative in the Euclidean norm.
    """

    exact: Tensor
    error: Tensor
    share: float

    def verdict(self, result: Tensor) -> str | None:
        """What is wrong with a result, or None."""
        wrong = within(result, self.exact, self.error)
        if wrong is not None:
            return wrong
        found = relative_error(result, self.exact)
        if found <= self.share:
            return None
        return f"relative error {found:.3g}, allowed {self.share:.3g}"

    def quantized_verdict(self, result: Tensor, scale: Tensor) -> str | None:
        """What is wrong with an e4m3 result that ``scale`` belongs to, or None."""
        unit = scale.double()
        largest = float(unit) * E4M3_MAX
        exact = self.exact.clamp(-largest, largest)
        error = self.error + (exact.abs() + self.error) * _E4M3_ROUNDING + unit * _E4M3_SMALLEST
        return within(result.double() * unit, exact, error)


Call = Callable[[Activations, QuantizedWeight, Mapping[str, Tensor], Tensor], None]
"""``call(activations, weight, other operands, out)``: one launch of ``fusedops::gemm_out``."""


@dataclass(frozen=True)
class QuantLayer:
    """A linear layer whose weight, and maybe whose activations, are quantized.

    Attributes:
        layer: sizes and epilogue; its dtype is that of results, and of activations that are not
            quantized.
        scheme: how it is quantized.
        quantizes: the result is quantized to e4m3 by a static scale, the operand ``out_scale``.
    """

    layer: Layer
    scheme: Scheme
    quantizes: bool = False

    def problem(self, target: Target) -> GemmProblem:
        """The problem that it poses on a target."""
        plain = quantized_problem(self.layer, self.scheme, target)
        if not self.quantizes:
            return plain
        chain = Epilogue.parse(f"{plain.spec.epilogue}|quantize(e4m3)")
        spec = GemmSpec(plain.spec.weight, chain, torch.float8_e4m3fn)
        return replace(plain, spec=spec, operand_dtypes=(*plain.operand_dtypes, torch.float32))

    @cached_property
    def spec(self) -> GemmSpec:
        """What ``fusedops.gemm`` computes for it."""
        return self.problem(H200).spec

    @property
    def x_dtype(self) -> torch.dtype:
        """Dtype of the activations that the product reads."""
        return self.scheme.activation_dtype or self.layer.dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight with its scales."""
        return self.spec.weight.stored_bytes(self.x_dtype)

    def floor(self, limits: Ceilings) -> Floor:
        """The time under which it cannot go: bytes, and FLOPs, of which 8-bit products do twice."""
        layer, columns = self.layer, self.layer.M * self.layer.columns_out
        read = self.stored_bytes + layer.M * layer.K * self.x_dtype.itemsize
        read += columns * layer.dtype.itemsize if layer.residual else 0
        flops = 2.0 * layer.M * layer.N * layer.K / (2 if self.x_dtype.itemsize == 1 else 1)
        return floor(Traffic(read, columns * self.spec.out_dtype.itemsize, flops), limits)

    def activations(self, x: Tensor) -> Activations:
        """Quantize activations (M, K) as the scheme does."""
        if self.scheme.activation is None:
            return Activations(x, None)
        # Whoever measures has pinned a provider of products.
        with use_provider("torch" if x.is_cuda else "reference"):
            return Activations(*self.scheme.quantize_activations(x))

    def stored(self, weight: Tensor) -> QuantizedWeight:
        """A weight (N, K), gate rows above up rows, quantized and laid out as kernels take it.

        Those of W4A8 hold -7 to 7, so that a peer that has no -8 multiplies the same ones.
        """
        rows = "gate_up" if self.layer.gated else "plain"
        made = quantize_weight(self.layer.packed(weight), self.scheme, rows=rows)
        if self.scheme.weight == "int4" and self.scheme.activation is not None:
            codes = unpack_nibbles(made.weight, self.layer.K).clamp(min=1)
            made = replace(made, weight=pack_nibbles(codes))
        layout = fitting_layout(made.format, self.x_dtype)
        return made if layout is None else made.in_layout(layout)

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows of a weight, or what there is one of for each, in the order of the layer again."""
        if not self.layer.gated:
            return rows
        return torch.cat(unpack_gate_up(rows, self.layer.N // 2))

    def call(self) -> Call:
        """One launch by ``fusedops``."""
        names, text = self.spec.operand_names, self.spec.text
        run = torch.ops.fusedops.gemm_out.default

        def launch(
            x: Activations, weight: QuantizedWeight, others: Mapping[str, Tensor], out: Tensor
        ) -> None:
            run(x.values, weight.weight, self.operands(names, x, weight, others), text, [out])

        return launch

    @staticmethod
    def operands(
        names: tuple[str, ...],
        x: Activations,
        weight: QuantizedWeight,
        others: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """What a product reads beside x and the weight, in the order of ``names``."""
        named = {**weight.scales, **others}
        if x.scale is not None:
            named["x_scale"] = x.scale
        return [named[name] for name in names]

    def values(self, weight: QuantizedWeight) -> Tensor:
        """What a stored weight stands for, float32 (N, K) in the order of the layer."""
        return self.in_order(weight.dequantize())

    def expected(
        self,
        x: Activations,
        values: Tensor,
        residual: Tensor | None = None,
        rounded: bool = False,
    ) -> Expected:
        """The layer in float64 on what the stored numbers stand for, and the error allowed.

        Args:
            x: activations.
            values: the weight's ``values``.
            residual: (M, columns_out) where the layer has one.
            rounded: who multiplies has rounded both to 16 bits.
        """
        wide_x, wide_w = x.wide(), values.double()
        product = wide_x @ wide_w.T
        cut = self._cut()
        error = product.abs() * (cut + _HALF_UNIT)
        own = _SUM_ERROR.get(self.x_dtype, _WIDE_SUM_ERROR)
        share_of_sum = max(own, _WIDE_SUM_ERROR) if rounded else own
        error += (wide_x.abs_() @ wide_w.abs_().T) * share_of_sum
        exact = self.layer.epilogue(product, None if residual is None else residual.double())
        activation = ACTIVATIONS[self.layer.activation]
        if self.layer.gated:
            (gate, up), (gate_error, up_error) = product.chunk(2, -1), error.chunk(2, -1)
            error = _STEEPEST * gate_error * (up.abs() + up_error)
            error += activation(gate).abs() * up_error
        elif self.layer.activation:
            error *= _STEEPEST
        error += exact.abs() * (_ROUNDINGS * _HALF_UNIT)
        share = torch.finfo(self.layer.dtype).eps + cut * (2 if self.layer.gated else 1)
        return Expected(exact, error, share)

    def _cut(self) -> float:
        """What sums of e4m3 products over all of K lose, relative; promoted ones lose nothing."""
        whole = self.scheme.sharing in ("tensor", "channel")
        if self.x_dtype != torch.float8_e4m3fn or not whole:
            return 0.0
        return self.layer.K / 32 * _CUT
