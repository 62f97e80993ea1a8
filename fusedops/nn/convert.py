"""``convert``: turn a Hugging Face decoder into one whose parts run as fused kernels.

Norms, MLPs and linear layers are replaced by modules with the same inputs, outputs, checkpoint
names and hooks; everything else stays the model's own code.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fusedops.check import require_bool, require_choice
from fusedops.errors import ConfigError, DeviceError, UnsupportedError
from fusedops.nn.families import Family, accepted_model_types, family_of
from fusedops.nn.linear import FusedGatedMLP, FusedLinear, FusedMLP, FusedQKV
from fusedops.nn.norm import LayerNorm, RMSNorm
from fusedops.nn.report import ConversionReport, ConvertedModule, SkippedModule
from fusedops.nn.rules import LINEAR, Rule, Setting, is_adapter, set_data

__all__ = ["POLICIES", "convert"]

POLICIES: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "keep": None,
}
"""What ``convert`` casts parameters to, by policy; ``keep`` casts nothing."""

_FUSED = (FusedLinear, FusedGatedMLP, FusedMLP, FusedQKV, LayerNorm, RMSNorm)


def convert(
    model: nn.Module, policy: str = "bf16", *, lm_head: bool = False, strict: bool = True
) -> ConversionReport:
    """Replace a model's norms, MLPs and linear layers by fused modules, in place.

    Accepted are Hugging Face decoders of the families in ``fusedops.nn.families``. Afterwards:

    * each MLP is two kernels (``FusedGatedMLP`` or ``FusedMLP``), each norm one, and each
      projection one with its bias; rounding follows the model's own modules, except that an MLP
      rounds once between its products instead of up to three times;
    * every parameter is frozen: fusedops is inference only. Cast and frozen parameters stay the
      same objects, so tied embeddings stay tied, and the embedding's values are only cast;
    * ``state_dict()`` has the keys and values of the unconverted model (so ``save_pretrained``
      writes a checkpoint that plain transformers loads) and ``load_state_dict`` takes such a one.
      The layers inside an MLP have no modules of their own any more. A gated MLP holds their
      weights packed, so ``state_dict()`` gives copies of all its tensors, and a checkpoint whose
      gate and up differ in dtype is refused (DTypeError); the tensors of every other module share
      memory with its parameters, as always;
    * forward hooks of replaced modules are kept; an MLP with hooks on its inner layers stays;
    * under ``torch.autocast`` linear layers and MLPs give what ``nn.Linear`` gives there: they cast
      x and their weights to autocast's dtype, at every call. A policy of that dtype casts the
      weights once, which is quicker. Norms keep the dtype of x;
    * a module that is not what its class in transformers (or torch) says stays, with a reason in
      the report: a subclass, another ``forward`` (of the instance or assigned to the class), a
      parameter, buffer or child more;
    * layers wrapped by an adapter (LoRA) are left alone with all inside them, and so is an MLP
      around one. A converted linear layer is an ``nn.Linear`` and can be wrapped later.

    A second call finds nothing to replace. A model that is refused is left unchanged. The mode
    around the call does not matter: parameters made under ``torch.inference_mode()`` stay such,
    which only that mode can change later, and others stay ordinary ones.

    Args:
        model: in evaluation mode, with its weights loaded. Buffers keep their dtype: rotary
            frequencies need float32.
        policy: ``bf16``, ``fp16`` or ``fp32`` cast every floating-point parameter; ``keep`` casts
            none.
        lm_head: also convert the output embedding; a tie to the input embedding is kept.
        strict: False accepts any model: of one that belongs to no family, the plain ``nn.Linear``
            layers are converted and nothing else.

    Returns:
        a report of what was replaced, and what was left alone for which reason.

    Raises:
        ConfigError: unknown policy, ``lm_head`` or ``strict`` is no bool, model in training mode,
            no output embedding to convert, or a parameter that the policy's dtype cannot hold.
        DeviceError: parameters are on the meta device, so they have no values yet.
        UnsupportedError: the model belongs to no family (and ``strict``), or is quantized.
    """
    require_choice("convert", "policy", policy, tuple(POLICIES))
    require_bool("convert", lm_head=lm_head, strict=strict)
    config = getattr(model, "config", None)
    family = family_of(getattr(config, "model_type", None))
    _check(model, family, strict)
    head = _output_embedding(model)
    if lm_head and head is None:
        raise ConfigError(
            f"convert: lm_head=True, but {type(model).__name__} has no output embedding "
            "(get_output_embeddings() gives none); accepted: lm_head=False."
        )
    dtype = POLICIES[policy]
    home = family.home if family else None
    setting = Setting(config, dtype, dtype or _model_dtype(model), home)
    planner = _Planner(family, setting, head, lm_head)
    planner.visit("", model)
    _require_in_range(model, policy, setting)
    return _apply(model, policy, planner)


def _check(model: nn.Module, family: Family | None, strict: bool) -> None:
    """Raise unless ``model`` can be converted."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"convert: got a {type(model).__name__}; accepted: an nn.Module.")
    if model.training:
        raise ConfigError(
            "convert: the model is in training mode, and fusedops is inference only; call "
            "model.eval() first."
        )
    config = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) or getattr(model, "hf_quantizer", None):
        raise UnsupportedError(
            "convert: the model is already quantized; accepted are models with float32, bfloat16 "
            "or float16 weights. Load it without a quantization_config."
        )
    if family is None and strict:
        kind = getattr(config, "model_type", None)
        raise UnsupportedError(
            f"convert: {type(model).__name__} has model_type {kind!r}; accepted are "
            f"{accepted_model_types()}. strict=False converts only the plain nn.Linear layers of "
            "any model; fusedops/nn/families.py is where a family is added."
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise DeviceError(
                f"convert: {name} is on the meta device and has no values; accepted are models "
                "with their weights loaded: load_state_dict(..., assign=True), or from_pretrained "
                "without a device_map that offloads."
            )


def _require_in_range(model: nn.Module, policy: str, setting: Setting) -> None:
    """Raise ConfigError if a finite parameter would become infinite when it is cast."""
    if setting.dtype is None:
        return
    largest = torch.finfo(setting.dtype).max
    for name, parameter in model.named_parameters():
        if not setting.casts(parameter) or torch.finfo(parameter.dtype).max <= largest:
            continue
        value = _largest_magnitude(parameter.detach())
        # Between the largest and infinity lie those that are rounded down.
        if torch.tensor(value, dtype=torch.float64, device="cpu").to(setting.dtype).isinf():
            dtype = str(setting.dtype).removeprefix("torch.")
            raise ConfigError(
                f"convert: {name} holds a value of magnitude {value:g}, which policy={policy!r} "
                f"would make infinite: {dtype} ends at {largest:g}. Accepted are a policy whose "
                "dtype holds it (keep casts nothing), or a model with smaller weights."
            )


def _largest_magnitude(tensor: Tensor) -> float:
    """The largest magnitude of the finite elements; 0 when there is none."""
    if tensor.numel() == 0:
        return 0.0
    low, high = (bound.item() for bound in torch.aminmax(tensor))  # makes no copy, as abs() would
    value = max(-low, high)
    return value if math.isfinite(value) else _largest_magnitude(tensor[tensor.isfinite()])


def _output_embedding(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def _model_dtype(model: nn.Module) -> torch.dtype:
    """Dtype of the first floating-point parameter: the embedding, which starts the activations."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


@dataclass
class _Planner:
    """Walks over a model and decides what to replace, changing nothing.

    Attributes:
        family: None looks for plain linear layers only.
        setting: what rules need to know.
        head: the output embedding, or None.
        convert_head: whether it is to be replaced.
        planned: (path, module, rule) of what is to be replaced, in the model's order.
        skipped: what stays.
    """

    family: Family | None
    setting: Setting
    head: nn.Module | None
    convert_head: bool
    planned: list[tuple[str, nn.Module, Rule]] = field(default_factory=list)
    skipped: list[SkippedModule] = field(default_factory=list)
    _seen: set[nn.Module] = field(default_factory=set)

    def visit(self, path: str, module: nn.Module, is_linear: bool = False) -> None:
        """Plan ``module`` and all below it; ``is_linear``: its parent's rule names it a layer."""
        if module in self._seen:
            return
        self._seen.add(module)
        reason = self._reason_to_stay(module)
        if reason is not None:
            self._skip(path, module, reason)
            return
        rule = self._rule(module, is_linear)
        if rule is not None and rule.replaces:
            reason = rule.obstacle(module, self.setting)
            if reason is None:
                self._plan(path, module, rule)
                return
            self._skip(path, module, reason)
        elif _has_own_work(module):
            self._skip(path, module, self._unknown(module))
        for name, child in module.named_children():
            self.visit(
                f"{path}.{name}" if path else name,
                child,
                rule is not None and name in rule.linears,
            )

    def take(self) -> deque[tuple[str, nn.Module, Rule]]:
        """What is planned, which the planner forgets: it must not keep old weights alive."""
        planned = deque(self.planned)
        self.planned.clear()
        self._seen.clear()
        return planned

    def _reason_to_stay(self, module: nn.Module) -> str | None:
        """Why ``module`` and all below it stay, whatever the rules say, or None."""
        if isinstance(module, _FUSED):
            return "already converted"
        if is_adapter(module):
            return "an adapter (LoRA) wraps its layer; merge it into the layer to convert it"
        if module is self.head and not self.convert_head:
            return "the output embedding; lm_head=True converts it"
        return None

    def _rule(self, module: nn.Module, is_linear: bool) -> Rule | None:
        if is_linear or module is self.head:
            return LINEAR
        if self.family is None:
            return LINEAR if type(module) is nn.Linear else None
        return self.family.by_class.get(type(module).__name__)

    def _plan(self, path: str, module: nn.Module, rule: Rule) -> None:
        if not path:
            raise ConfigError(
                f"convert: the model is itself a {type(module).__name__}, which would be replaced "
                "and cannot be replaced in place; pass the module that holds it."
            )
        self.planned.append((path, module, rule))
        self._seen.update(module.modules())

    def _skip(self, path: str, module: nn.Module, reason: str) -> None:
        self.skipped.append(SkippedModule(path, type(module).__name__, reason))

    def _unknown(self, module: nn.Module) -> str:
        if isinstance(module, nn.Embedding):
            return "an embedding stays as it is"
        if self.family is None:
            return "no family: plain nn.Linear layers only"
        return f"not in the table of {self.family.name}"


def _has_own_work(module: nn.Module) -> bool:
    """Whether ``module`` is more than a container of its children: a leaf, or with parameters."""
    no_children = next(module.children(), None) is None
    return no_children or next(module.parameters(recurse=False), None) is not None


def _apply(model: nn.Module, policy: str, planner: _Planner) -> ConversionReport:
    """Cast, freeze and replace as planned."""
    setting, planned = planner.setting, planner.take()
    places = _places(model, {module for _, module, _ in planned})
    n_cast = _cast(model, setting)
    model.requires_grad_(False)
    converted: list[ConvertedModule] = []
    while planned:
        # Nothing else holds the old module: its weights are freed before the next one is packed.
        path, old, rule = planned.popleft()
        # What is packed is of the kind of what it is packed from, whatever the mode here.
        is_inference = any(parameter.is_inference() for parameter in old.parameters())
        with torch.inference_mode(is_inference), torch.no_grad():
            new = rule.build(old, setting)
        _inherit(new, old)
        n_parameters = sum(parameter.numel() for parameter in old.parameters())
        converted.append(
            ConvertedModule(path, type(old).__name__, type(new).__name__, n_parameters)
        )
        for parent, name in places.pop(old):
            setattr(parent, name, new)
    family = planner.family.name if planner.family else None
    return ConversionReport(family, policy, tuple(converted), tuple(planner.skipped), n_cast)


def _places(
    model: nn.Module, modules: set[nn.Module]
) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Where each of ``modules`` is registered: (parent, name), more than once if it is shared."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in modules}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and child in places:
                places[child].append((parent, name))
    return places


def _cast(model: nn.Module, setting: Setting) -> int:
    """Cast the parameters in place; how many there were."""
    dtype = setting.dtype
    if dtype is None:
        return 0
    parameters = [parameter for parameter in model.parameters() if setting.casts(parameter)]
    for parameter in parameters:
        set_data(parameter, lambda data: data.to(dtype))
    return len(parameters)


def _inherit(new: nn.Module, old: nn.Module) -> None:
    """Give ``new`` the mode and the hooks of ``old``: the same dicts, as handles refer to them."""
    new.train(old.training)
    for name, value in vars(old).items():
        if "_hooks" in name:
            vars(new)[name] = value
