"""A linear layer with a quantized weight: what quantized blocks are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fusedops.check import (
    require_dtype,
    require_same_device,
    require_shape,
    require_tensor,
)
from fusedops.epilogue.base import FLOAT_DTYPES
from fusedops.errors import ConfigError
from fusedops.nn.base import autocast_dtype, require_bias, require_sizes, run_gemm
from fusedops.nn.norm import RMSNorm, require_norm
from fusedops.nn.quant_state import QuantState
from fusedops.ops.fused_quantize import rms_norm_quantize
from fusedops.quant import QuantizedWeight, Scheme, as_scheme, empty_weight, quantize_weight
from fusedops.weight import BlockFp8

__all__ = ["QuantLinear", "QuantizedActivations"]


class QuantizedActivations(NamedTuple):
    """Activations as a quantized layer takes them.

    Attributes:
        q: (..., K) e4m3 or int8.
        scale: float32, as ``fusedops.quantize`` gives it for the layer's scheme; () where static.
        dtype: the layer's result dtype.
    """

    q: Tensor
    scale: Tensor
    dtype: torch.dtype


class QuantLinear(QuantState):
    """``step(x @ weight.T + bias) + residual`` as one kernel, the weight quantized by a scheme.

    Where the scheme quantizes activations, that is one kernel in front (inside the norm's, where a
    norm is given), or none where the layer before writes them quantized (``into``).

    Parameters, all frozen: ``weight`` as its format stores it; ``weight_scale`` and, with zero
    points, ``weight_zero`` (shapes: ``fusedops.quant.QuantizedWeight``); ``input_scale`` () float32
    where activations have a static scale; ``bias`` (out_features,) or None.

    On a GPU whose kernel takes int4 or 8-bit weights with scales in groups (sm_90a) they lie in the
    order of its registers, ``wgmma16`` or beside e4m3 activations ``wgmma8``, from when the layer
    is made there or moved there on; elsewhere in rows. ``set_layout`` changes that.

    ``module.to(dtype)`` casts the bias only: the dtypes of the others are the scheme's.
    ``state_dict()`` holds weights in rows, whatever the layout here. ``load_state_dict`` also
    takes a floating-point ``weight`` of (out_features, in_features), and quantizes it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme | str | None,
        bias: bool = False,
        *,
        activation: str | None = None,
        gate: str | None = None,
        static: bool = False,
        layout: str = "rows",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer without values yet.

        Args:
            in_features, out_features: K and N.
            scheme: a scheme, its name, or None for an unquantized weight of ``dtype``.
            bias: whether there is one, of ``dtype``.
            activation: applied to the result.
            gate: the activation of a gated pair; the weight's rows are those of ``pack_gate_up``,
                and the result has half as many columns.
            static: one scale for all activations, a parameter, instead of dynamic ones.
            layout: of a weight with scales in groups, see ``fusedops.weight``; ``rows`` stands for
                what the device's kernel takes.
            dtype, device: of the parameters that the scheme does not decide.

        Raises:
            ConfigError: an argument is not as described, or the scheme has no static scales.
        """
        super().__init__()
        sizes = {"in_features": in_features, "out_features": out_features}
        require_sizes("QuantLinear", dtype, **sizes)
        found = as_scheme(scheme)
        rows = "plain" if gate is None else "gate_up"
        options: dict[str, Any] = {"rows": rows, "layout": layout, "dtype": dtype, "device": device}
        empty = empty_weight(found, out_features, in_features, **options)
        scale = torch.empty((), dtype=torch.float32, device=device) if static else None
        of_bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._hold(empty, of_bias, scale, activation, gate)
        if layout == "rows":
            self._lay_out(has_values=False)

    @classmethod
    def from_weights(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        scheme: Scheme | str | None = "fp8",
        *,
        activation: str | None = None,
        gate: str | None = None,
        input_scale: Tensor | None = None,
        name: str = "weight",
    ) -> Self:
        """Quantize an nn.Linear's weight (out, in) by round-to-nearest; ``bias`` (out,) is kept.

        Args:
            weight, bias: of the layer; ``name`` is what errors call the weight.
            scheme, activation, gate: as for the constructor.
            input_scale: a static scale of the activations, float32 ().

        Raises:
            ConfigError, DTypeError, ShapeError: an argument is not as described, or the weight
                holds NaN or an infinity.
        """
        rows = "plain" if gate is None else "gate_up"
        stored = quantize_weight(weight, as_scheme(scheme), rows=rows, name=name)
        return cls.from_quantized(
            stored, bias, activation=activation, gate=gate, input_scale=input_scale
        )

    @classmethod
    def from_quantized(
        cls,
        stored: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        gate: str | None = None,
        input_scale: Tensor | None = None,
    ) -> Self:
        """A layer that takes over a quantized weight.

        Scales of float16 or bfloat16 where the scheme has float32 ones are converted, exactly.

        Raises:
            ConfigError, DTypeError, ShapeError, DeviceError: an argument is not as described.
        """
        op = "QuantLinear"
        n, k = stored.format.n, stored.format.k
        require_bias(op, "bias", bias, n)
        rows = stored.format.rows if isinstance(stored.format, BlockFp8) else "plain"
        like = empty_weight(stored.scheme, n, k, rows=rows, device="meta")
        scales = {}
        for name, empty in like.scales.items():
            require_tensor(op, name, stored.scales.get(name))
            given = stored.scales[name]
            require_dtype(op, name, given, (torch.uint8,) if name == "w_zero" else FLOAT_DTYPES)
            shape = tuple(empty.shape)
            same = ((n,), (1, n), (n, 1)) if shape in ((n,), (1, n)) else ()
            require_shape(op, name, given, [shape, *same], f"scheme {stored.scheme}")
            require_same_device(op, "weight", stored.weight, **{name: given})
            wide = given.float() if empty.dtype == torch.float32 else given
            scales[name] = wide.reshape(shape)
        zero = scales.get("w_zero")
        if zero is not None and zero.numel() and not zero.is_meta and int(zero.max()) > 16:
            raise ConfigError(
                f"{op}: w_zero holds {int(zero.max())}; accepted are zero points 0 to 16."
            )
        if input_scale is not None:
            require_tensor(op, "input_scale", input_scale)
            require_dtype(op, "input_scale", input_scale, (torch.float32,))
            require_shape(op, "input_scale", input_scale, [(), (1,)], "one static scale")
            input_scale = input_scale.reshape(())
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        of_bias = None if bias is None else bias.reshape(-1)
        module._hold(replace(stored, scales=scales), of_bias, input_scale, activation, gate)
        module._lay_out()
        return module

    def quantize(self, x: Tensor, norm: RMSNorm | None = None) -> QuantizedActivations:
        """x, or norm(x), as this layer takes it; one kernel, but for dynamic scales per tensor."""
        static = self.input_scale
        scheme = self.scheme
        require_norm(norm)
        if norm is None or (static is None and scheme.granularity == "tensor"):
            y = x if norm is None else norm.normalize(x)
            return QuantizedActivations(*scheme.quantize_activations(y, static), x.dtype)
        q, scale = rms_norm_quantize(
            x,
            norm.weight,
            norm.eps,
            weight_offset=norm.weight_offset,
            round_before_weight=norm.round_before_weight,
            dtype=scheme.activation or "",
            granularity=scheme.granularity if static is None else "tensor",
            scale=static,
        )
        return QuantizedActivations(q, scale, x.dtype)

    def forward(
        self,
        x: Tensor | QuantizedActivations,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """x (..., in_features) -> (..., out_features) in x's dtype, plus ``residual``.

        ``norm`` is applied to x first. Under ``torch.autocast`` x is cast to its dtype, which is
        that of the result.
        """
        results, _ = self._run(x, residual, norm, None)
        return results[0]

    def into(
        self, consumer: QuantLinear, x: Tensor | QuantizedActivations, norm: RMSNorm | None = None
    ) -> Tensor | QuantizedActivations:
        """The result as ``consumer`` takes it: quantized in the epilogue where that can be.

        A static scale and 1 x 128 groups can: the value is then rounded once, not twice. A dynamic
        scale of a token needs all of its row, so a kernel follows.
        """
        quantize = consumer._quantize_step()
        results, dtype = self._run(x, None, norm, quantize, consumer.input_scale)
        if quantize is not None:
            static = consumer.input_scale
            return QuantizedActivations(results[0], results[1] if static is None else static, dtype)
        if consumer.scheme.activation is None:
            return results[0]
        return consumer.quantize(results[0])

    def _quantize_step(self) -> str | None:
        """The epilogue node with which a layer before this one quantizes, or None."""
        scheme = self.scheme
        if self.input_scale is not None:
            return f"quantize({scheme.activation},scalar)"
        if scheme.activation is not None and scheme.granularity == "block128":
            return f"quantize({scheme.activation},group128)"
        return None

    def _run(
        self,
        x: Tensor | QuantizedActivations,
        residual: Tensor | None,
        norm: RMSNorm | None,
        quantize: str | None,
        out_scale: Tensor | None = None,
    ) -> tuple[list[Tensor], torch.dtype]:
        """All results, and the dtype that the result has or would have without ``quantize``."""
        require_norm(norm)
        prologue = None
        operands: dict[str, Tensor | None] = {
            "w_scale": self.weight_scale,
            "w_zero": self.weight_zero,
            "bias": self.bias,
            "residual": residual,
            "out_scale": out_scale,
        }
        if not isinstance(x, QuantizedActivations):
            if not isinstance(x, Tensor):
                require_tensor("QuantLinear", "x", x)
            x, norm = _behind_autocast(x, norm)
            if self.scheme.activation is not None:
                x = self.quantize(x, norm)
            elif norm is not None:
                prologue, operands["norm_weight"] = norm.prologue, norm.weight
        if isinstance(x, QuantizedActivations):
            x, operands["x_scale"], dtype = x
        else:
            dtype = x.dtype
        parts = (self._steps, "residual" if residual is not None else None, quantize)
        chain = "|".join(part for part in parts if part) or "none"
        weight: Tensor = self.weight
        if self.scheme.weight == "float" and autocast_dtype(x) is not None:
            weight = weight.to(x.dtype)  # as torch does with a layer's weight there
        out_dtype = None if quantize else dtype
        return run_gemm(x, weight, self._form, chain, operands, out_dtype, prologue), dtype

    def extra_repr(self) -> str:
        """Sizes, scheme and epilogue, for ``print(model)``."""
        static = ", static scale" if self.input_scale is not None else ""
        steps = self._steps or "none"
        return (
            f"{self.in_features}, {self.out_features}, scheme={self.scheme}{static}, "
            f"epilogue={steps!r}"
        )


def _behind_autocast(x: Tensor, norm: RMSNorm | None) -> tuple[Tensor, RMSNorm | None]:
    """x as a product takes it under autocast, which casts nothing that goes into a norm."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, norm
    if norm is not None:
        x, norm = norm.normalize(x), None
    return x.to(dtype), norm
