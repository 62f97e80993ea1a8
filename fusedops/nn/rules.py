"""Rules: how a class of a model's modules is recognised, and what takes its place.

A model family is a set of rules (``fusedops.nn.families``). A rule states by name where the parts
of its class are; the same few rules serve every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fusedops.check import ACTIVATION_DTYPES
from fusedops.epilogue.activations import activation_from_hf
from fusedops.errors import ConfigError
from fusedops.nn.drop_in import DropInGatedMLP, DropInMLP
from fusedops.nn.linear import FusedLinear
from fusedops.nn.norm import LayerNorm, RMSNorm
from fusedops.nn.quant_blocks import QuantGatedMLP, QuantMLP
from fusedops.nn.quant_linear import QuantLinear
from fusedops.nn.rules_code import computes, has_hooks, other_code
from fusedops.nn.rules_setting import Setting, set_data
from fusedops.quant import Scheme

__all__ = [
    "LINEAR",
    "AttentionRule",
    "GatedMlpRule",
    "LayerNormRule",
    "MlpRule",
    "RmsNormRule",
    "Rule",
    "is_adapter",
]


def is_adapter(module: nn.Module) -> bool:
    """Whether ``module`` wraps a layer with an adapter, as LoRA libraries do."""
    return any(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_embedding_A"))


@dataclass(frozen=True)
class Rule:
    """What happens to the modules whose class is called ``class_name``."""

    class_name: str
    replaces: ClassVar[bool] = True
    """False: the module stays, and only its linear layers are replaced."""

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of children that are linear layers, replaced one by one if the module stays."""
        return ()

    def obstacle(self, module: nn.Module, setting: Setting) -> str | None:
        """Why ``module`` is not what the rule describes and must stay as it is, or None."""
        return _obstacle(module, ("weight", "bias"), setting)

    def schemes(self, setting: Setting) -> dict[str, Scheme]:
        """How each linear layer inside is quantized, by its name; "" for the module itself."""
        return {}

    def build(self, module: nn.Module, setting: Setting) -> nn.Module:
        """The replacement of a module without an obstacle."""
        raise NotImplementedError


def _obstacle(
    module: nn.Module,
    parameters: tuple[str, ...],
    setting: Setting,
    children: tuple[str, ...] = (),
) -> str | None:
    """Why a module of a known class with these parameters and children must stay, or None."""
    if module._load_state_dict_pre_hooks:
        return "it has a hook of load_state_dict, which may be bound to it"
    # The replacement would have none of these, nor their entries in a state_dict.
    for name, buffer in module._buffers.items():
        if buffer is not None:
            return f"it has a buffer {name!r} that its class does not have"
    for name, child in module._modules.items():
        if child is not None and name not in children:
            return f"it has a module {name!r} that its class does not have"
    for name, parameter in module.named_parameters(recurse=False):
        if name not in parameters:
            return f"it has a parameter {name!r} that its class does not have"
        if type(parameter.data) is not Tensor:
            return f"its {name} is a {type(parameter.data).__name__}, not a plain tensor"
        if setting.dtype_of(parameter) not in ACTIVATION_DTYPES:
            return f"its {name} is {_short(parameter.dtype)}"
    return None


def _no_weight(module: nn.Module) -> str | None:
    return "it has no parameter 'weight'" if module._parameters.get("weight") is None else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LinearRule(Rule):
    """A plain ``nn.Linear`` becomes a ``FusedLinear`` that holds the same Parameter objects.

    Quantized it becomes a ``QuantLinear``.
    """

    def schemes(self, setting: Setting) -> dict[str, Scheme]:
        return {"": setting.scheme_of()}

    def obstacle(self, module: nn.Module, setting: Setting) -> str | None:
        if is_adapter(module):
            return "an adapter wraps it"
        if type(module) is not nn.Linear:
            return f"it is a {type(module).__name__}, not a plain nn.Linear"
        return (
            other_code(module, nn.Linear.__module__, "Linear")
            or _no_weight(module)
            or super().obstacle(module, setting)
        )

    def build(self, module: nn.Module, setting: Setting) -> nn.Module:
        weight, bias = module.get_parameter("weight"), module._parameters["bias"]
        scheme = setting.scheme_of()
        if scheme.weight != "float":
            return QuantLinear.from_weights(weight, bias, scheme, name=f"{setting.path}.weight")
        fused = FusedLinear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        # The same objects, so that a tie to another layer stays a tie.
        if not weight.is_contiguous():
            set_data(weight, Tensor.contiguous)
        fused.weight = weight
        fused.register_parameter("bias", bias)
        return fused


LINEAR = LinearRule("Linear")


@dataclass(frozen=True)
class RmsNormRule(Rule):
    """An RMSNorm class.

    Attributes:
        eps: the attribute that holds epsilon.
        weight_offset: added to the weight (Gemma: 1).
        round_before_weight: the class's rounding order, see ``fusedops.rms_norm``.
    """

    eps: str = "variance_epsilon"
    weight_offset: float = 0.0
    round_before_weight: bool = True

    def obstacle(self, module: nn.Module, setting: Setting) -> str | None:
        found = (
            other_code(module, setting.home or "", self.class_name)
            or _no_weight(module)
            or _obstacle(module, ("weight",), setting)
        )
        if found is not None:
            return found
        if not isinstance(getattr(module, self.eps, None), float):
            return f"it has no attribute {self.eps!r} with its epsilon"
        dtype = setting.dtype_of(module.get_parameter("weight"))
        if self.round_before_weight and dtype != setting.model_dtype:
            # The product with the weight would then have the wider dtype of the two.
            return f"its weight is {_short(dtype)} in a {_short(setting.model_dtype)} model"
        return None

    def build(self, module: nn.Module, setting: Setting) -> nn.Module:
        weight = module.get_parameter("weight")
        norm = RMSNorm(
            weight.numel(),
            getattr(module, self.eps),
            self.weight_offset,
            self.round_before_weight,
            device="meta",
        )
        norm.weight = weight
        return norm


@dataclass(frozen=True)
class LayerNormRule(Rule):
    """``nn.LayerNorm`` over the last dimension."""

    class_name: str = "LayerNorm"

    def obstacle(self, module: nn.Module, setting: Setting) -> str | None:
        if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
            return "it is no nn.LayerNorm over the last dimension"
        return other_code(module, nn.LayerNorm.__module__, "LayerNorm") or super().obstacle(
            module, setting
        )

    def build(self, module: nn.Module, setting: Setting) -> nn.Module:
        old = cast(nn.LayerNorm, module)
        affine, biased = old.weight is not None, old.bias is not None
        norm = LayerNorm(old.normalized_shape[0], old.eps, affine, biased, device="meta")
        norm.weight, norm.bias = old.weight, old.bias
        return norm


@dataclass(frozen=True)
class AttentionRule(Rule):
    """An attention class: it stays, and its projections become one ``FusedLinear`` each.

    Separate q, k and v projections stay separate modules: adapters address them one by one and a
    merge may assign ``weight.data``, which no view of a joint weight would survive.
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    replaces: ClassVar[bool] = False

    @property
    def linears(self) -> tuple[str, ...]:
        return self.projections


@dataclass(frozen=True)
class _MlpRule(Rule):
    """What MLP classes share: linear layers around an activation that the config names.

    Attributes:
        activation_module: the child that applies the activation.
        activation_key: the config's entry with the activation's name.
    """

    activation_module: str = "act_fn"
    activation_key: str = "hidden_act"

    def obstacle(self, module: nn.Module, setting: Setting) -> str | None:
        found = other_code(module, setting.home or "", self.class_name) or _obstacle(
            module, (), setting, (*self.linears, self.activation_module)
        )
        if found is not None:
            return found
        for name in self.linears:
            layer = getattr(module, name, None)
            if not isinstance(layer, nn.Module):
                return f"it has no layer {name!r}"
            found = LINEAR.obstacle(layer, setting)
            if found is not None:
                return f"{name}: {found}"
        for name in (*self.linears, self.activation_module):
            if has_hooks(getattr(module, name, None)):
                return f"{name}: a hook is registered on it, and the fused block has no such layer"
        tensors = list(self._tensors(module).values())
        if len({(t.device, setting.dtype_of(t)) for t in tensors}) > 1:
            return "its layers differ in device or dtype"
        return self._activation_obstacle(module, setting)

    def schemes(self, setting: Setting) -> dict[str, Scheme]:
        return {name: setting.scheme_of(name) for name in self.linears}

    def _is_quantized(self, setting: Setting) -> bool:
        return any(scheme.weight != "float" for scheme in self.schemes(setting).values())

    def _tensors(self, module: nn.Module) -> dict[str, Tensor]:
        return {
            f"{name}.{kind}": parameter
            for name in self.linears
            for kind, parameter in module.get_submodule(name).named_parameters()
        }

    def _activation(self, setting: Setting) -> str:
        hf_name = getattr(setting.config, self.activation_key, None)
        return activation_from_hf(str(hf_name))

    def _activation_obstacle(self, module: nn.Module, setting: Setting) -> str | None:
        try:
            name = self._activation(setting)
        except ConfigError as error:
            return str(error)
        function = getattr(module, self.activation_module, None)
        if not callable(function):
            return f"it has no activation {self.activation_module!r}"
        if "forward" in vars(function):
            return f"{self.activation_module}: its forward was replaced on the instance"
        if isinstance(function, nn.Module) and (
            [*function.parameters(), *function.buffers()] != []
        ):
            return f"its {self.activation_module} has parameters or buffers"
        if not computes(function, name):
            return f"its {self.activation_module} does not compute {name}"
        return None


@dataclass(frozen=True)
class GatedMlpRule(_MlpRule):
    """A gated MLP, ``down(act(gate(x)) * up(x))``, becomes two kernels.

    Attributes:
        halves: the layers (gate, up), or the one layer that holds gate above up.
        down: the layer behind them.
    """

    halves: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"

    @property
    def linears(self) -> tuple[str, ...]:
        return (*self.halves, self.down)

    def schemes(self, setting: Setting) -> dict[str, Scheme]:
        found = super().schemes(setting)
        joint = [found[name] for name in self.halves]
        if len(set(joint)) > 1:
            raise ConfigError(
                f"convert: {setting.path}: {', '.join(self.halves)} have the schemes "
                f"{', '.join(map(str, joint))}; accepted: one scheme, as one kernel holds them. "
                "Change overrides."
            )
        return found

    def build(self, module: nn.Module, setting: Setting) -> nn.Module:
        tensors, act = self._tensors(module), self._activation(setting)
        if not self._is_quantized(setting):
            return DropInGatedMLP.from_tensors(tensors, self.halves, self.down, act)
        schemes = self.schemes(setting)
        return QuantGatedMLP.from_tensors(tensors, self.halves, self.down, act, schemes)


@dataclass(frozen=True)
class MlpRule(_MlpRule):
    """An MLP without a gate, ``down(act(up(x)))``, becomes two kernels."""

    layers: tuple[str, str] = ("up_proj", "down_proj")

    @property
    def linears(self) -> tuple[str, ...]:
        return self.layers

    def build(self, module: nn.Module, setting: Setting) -> nn.Module:
        tensors, act = self._tensors(module), self._activation(setting)
        if not self._is_quantized(setting):
            return DropInMLP.from_tensors(tensors, self.layers, act)
        return QuantMLP.from_tensors(tensors, self.layers, act, self.schemes(setting))
