"""What a quantized layer holds, and how that is moved, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, nn

from fusedops.check import describe
from fusedops.epilogue.activations import lookup
from fusedops.epilogue.base import FLOAT_DTYPES
from fusedops.errors import ConfigError
from fusedops.nn.base import frozen
from fusedops.providers.cutlass_mixed import kernel_layout
from fusedops.quant import QuantizedWeight, quantize_weight
from fusedops.weight import EightBitWeight, GroupedFormat, Int4

__all__ = ["QuantState"]


class QuantState(nn.Module):
    """The parameters of ``QuantLinear``, whose dtypes and forms belong to its scheme.

    A weight with scales in groups that is made on, or moved to, a GPU whose kernel takes it in
    another layout is laid out so, and in rows again when it leaves that GPU; an e4m3 one that holds
    NaN is refused then. ``set_layout`` chooses another layout until the layer moves.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    weight_zero: nn.Parameter | None
    input_scale: nn.Parameter | None
    bias: nn.Parameter | None

    def _hold(
        self,
        stored: QuantizedWeight,
        bias: Tensor | None,
        input_scale: Tensor | None,
        activation: str | None,
        gate: str | None,
    ) -> None:
        for function in (activation, gate):
            if function is not None:
                lookup(function)
        if activation is not None and gate is not None:
            raise ConfigError("QuantLinear: accepted are an activation or a gate, got both.")
        self.scheme, self.format = stored.scheme, stored.format
        if input_scale is not None and not self.scheme.takes_static_scale:
            raise ConfigError(
                f"QuantLinear: scheme {self.scheme} takes no static scale of activations; leave "
                "it out, or choose fp8, fp8-tensor, int8 or w4a8."
            )
        self.out_features, self.in_features = stored.format.n, stored.format.k
        self.activation, self.gate = activation, gate
        self.weight = frozen(stored.weight)
        tensors = {
            "weight_scale": stored.scales.get("w_scale"),
            "weight_zero": stored.scales.get("w_zero"),
            "input_scale": input_scale,
            "bias": bias,
        }
        for name, tensor in tensors.items():
            self.register_parameter(name, None if tensor is None else frozen(tensor))
        self._form = str(stored.format)
        step = f"act({activation})" if activation else f"gate({gate})" if gate else None
        steps = [*self.scheme.scale_steps(input_scale is not None)]
        steps += [part for part in ("bias" if bias is not None else None, step) if part]
        self._steps = "|".join(steps)

    def quantized(self) -> QuantizedWeight:
        """The weight with its scales, sharing memory with the parameters."""
        scales = {"w_scale": self.weight_scale, "w_zero": self.weight_zero}
        given = {name: tensor.detach() for name, tensor in scales.items() if tensor is not None}
        return QuantizedWeight(self.scheme, self.format, self.weight.detach(), given)

    @property
    def _layout(self) -> str:
        return self.format.layout if isinstance(self.format, GroupedFormat) else "rows"

    def _lay_out(self, has_values: bool = True) -> None:
        """Lay the weight out as the kernels of its device take it."""
        form, device = self.format, self.weight.device
        if not isinstance(form, Int4 | EightBitWeight) or device.type == "meta":
            return
        layout = kernel_layout(form, self.scheme.activation_dtype, device) or "rows"
        if layout == form.layout:
            return
        if has_values:
            self.set_layout(layout)
            return
        self.format = form = replace(form, layout=layout)
        self._form = str(form)
        self.weight = frozen(self.weight.new_empty(form.weight_shape()))

    def set_layout(self, layout: str) -> None:
        """Lay a weight with scales in groups out anew, see its format; exact."""
        stored = self.quantized().in_layout(layout)
        self.format, self._form = stored.format, str(stored.format)
        self.weight = frozen(stored.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Module.to(dtype) takes scales and e4m3 weights for parameters of the model's precision.
        def keeping_dtypes(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            free = tensor is self.bias or self.scheme.weight == "float"
            return new if free or new.dtype == tensor.dtype else tensor.to(new.device)

        before = self.weight.device
        moved: Self = super()._apply(keeping_dtypes, recurse)  # type: ignore[no-untyped-call]
        if self.weight.device.type != before.type:
            self._lay_out(has_values=before.type != "meta")
        return moved

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._layout != "rows":
            destination[f"{prefix}weight"] = self.quantized().in_layout("rows").weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if isinstance(given, Tensor):
            try:
                state_dict.update(self._as_stored(given, prefix))
            except (ConfigError, TypeError, ValueError) as error:
                error_msgs.append(f"{key}: {error}")
                return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _as_stored(self, given: Tensor, prefix: str) -> dict[str, Tensor]:
        """What a checkpoint's weight becomes here, by its keys there."""
        shape = (self.out_features, self.in_features)
        plain = given.dtype in FLOAT_DTYPES and tuple(given.shape) == shape
        if plain and self.scheme.weight != "float":
            rows = "plain" if self.gate is None else "gate_up"
            stored = quantize_weight(given, self.scheme, rows=rows)
            stored = stored.in_layout(self._layout) if self._layout != "rows" else stored
            found = {f"{prefix}weight": stored.weight}
            for name, tensor in stored.scales.items():
                found[f"{prefix}{name.replace('w_', 'weight_')}"] = tensor
            return found
        if self.scheme.weight != "float" and given.dtype != self.weight.dtype:
            raise ConfigError(
                f"the checkpoint has {describe(given)}; accepted: "
                f"{str(self.weight.dtype).removeprefix('torch.')} as scheme {self.scheme} stores "
                f"it, or float32, bfloat16 or float16 of shape {shape}, which is quantized."
            )
        if isinstance(self.format, GroupedFormat) and self._layout != "rows" and given.dim() == 2:
            return {f"{prefix}weight": self.format.from_rows(given)}
        return {}
