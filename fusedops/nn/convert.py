"""``convert``: turn a Hugging Face decoder into one whose parts run as fused kernels.

Norms, MLPs and linear layers are replaced by modules with the same inputs, outputs, checkpoint
names and hooks; everything else stays the model's own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusedops.check import require_bool, require_choice
from fusedops.errors import ConfigError, DeviceError, UnsupportedError
from fusedops.nn.families import Family, accepted_model_types, family_of
from fusedops.nn.planner import Planner
from fusedops.nn.quant_linear import QuantLinear
from fusedops.nn.report import ConversionReport, ConvertedModule, scheme_text
from fusedops.nn.rules_setting import Setting, set_data
from fusedops.quant import SCHEMES, Scheme, as_scheme

__all__ = ["POLICIES", "convert"]

POLICIES: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "keep": None,
}
"""What ``convert`` casts parameters to, by policy; ``keep`` casts nothing."""


def convert(
    model: nn.Module,
    policy: str | Scheme = "bf16",
    *,
    quantize: str | Scheme | None = None,
    overrides: Mapping[str, str | Scheme | None] | None = None,
    lm_head: bool = False,
    strict: bool = True,
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

    Quantized layers (``fusedops.quant``) are made from the cast weights by round-to-nearest, with
    dynamic scales of activations. For them,

    * a projection becomes a ``QuantLinear`` and an MLP a ``QuantGatedMLP`` or ``QuantMLP``, biases
      kept; norms and embeddings stay in 16 bits;
    * ``state_dict()`` holds the quantized weights and their scales, under the names of those
      modules; a model converted alike loads it, and one of the unconverted model too;
    * a quantized output embedding that was tied is tied no more: the input embedding stays as it
      is, bit for bit, and ``config.tie_word_embeddings`` becomes False.

    A second call finds nothing to replace. A model that is refused is left unchanged. The mode
    around the call does not matter: parameters made under ``torch.inference_mode()`` stay such,
    which only that mode can change later, and others stay ordinary ones.

    Args:
        model: in evaluation mode, with its weights loaded. Buffers keep their dtype: rotary
            frequencies need float32.
        policy: ``bf16``, ``fp16`` or ``fp32`` cast every floating-point parameter; ``keep`` casts
            none. A scheme or its name (``fp8``, ``fp8-block``, ``int8``, ``int4``, ``w4a8``, ...)
            stands for ``bf16`` with ``quantize`` = that scheme.
        quantize: the scheme of linear layers; None: they stay unquantized.
        overrides: schemes by the names of layers in the unconverted model, with the wildcards of
            ``fnmatch``, e.g. ``{"*.down_proj": "int8", "model.layers.0.*": None}``; the first that
            matches counts, None leaves a layer unquantized. Layers that become one kernel (gate and
            up) need one scheme.
        lm_head: also convert the output embedding; a tie to the input embedding is kept, unless it
            is quantized.
        strict: False accepts any model: of one that belongs to no family, the plain ``nn.Linear``
            layers are converted and nothing else.

    Returns:
        a report of what was replaced, and what was left alone for which reason.

    Raises:
        ConfigError: unknown policy or scheme, ``lm_head`` or ``strict`` is no bool, model in
            training mode, no output embedding to convert, a parameter that the policy's dtype
            cannot hold or a weight to quantize with NaN or infinities, an override that matches no
            layer, or two schemes in one kernel.
        DeviceError: parameters are on the meta device, so they have no values yet.
        UnsupportedError: the model belongs to no family (and ``strict``), or is quantized.
    """
    given = str(policy)
    if isinstance(policy, Scheme) or policy in SCHEMES:
        if quantize is not None:
            raise ConfigError(
                f"convert: policy={given!r} is a scheme and quantize={quantize!r} is given; "
                "accepted: one of them. Name the dtype of the rest as policy, e.g. bf16."
            )
        policy, quantize = "bf16", policy
    require_choice("convert", "policy", policy, (*POLICIES, *SCHEMES))
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
    setting = Setting(
        config,
        dtype,
        dtype or _model_dtype(model),
        home,
        as_scheme(quantize),
        _as_overrides(overrides),
    )
    planner = Planner(family, setting, head, lm_head)
    planner.visit("", model)
    planner.require_matches()
    _require_in_range(model, policy, setting)
    planner.require_finite()
    was_tied = head is not None and _is_tied(model, head)
    report = _apply(model, given, planner)
    if was_tied and isinstance(_output_embedding(model), QuantLinear) and config is not None:
        config.tie_word_embeddings = False
    return report


def _as_overrides(overrides: object) -> tuple[tuple[str, Scheme], ...]:
    if overrides is None:
        return ()
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(
            f"convert: overrides is {overrides!r}; accepted: schemes by the names of layers, e.g. "
            '{"*.down_proj": "int8"}, or None.'
        )
    return tuple((pattern, as_scheme(value)) for pattern, value in overrides.items())


def _is_tied(model: nn.Module, head: nn.Module) -> bool:
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    own = head._parameters.get("weight")
    return own is not None and embedding is not None and embedding._parameters.get("weight") is own


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


def _apply(model: nn.Module, policy: str, planner: Planner) -> ConversionReport:
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
            new = rule.build(old, setting.at(path))
        _inherit(new, old)
        n_parameters = sum(parameter.numel() for parameter in old.parameters())
        scheme = scheme_text(planner.schemes[path])
        converted.append(
            ConvertedModule(path, type(old).__name__, type(new).__name__, n_parameters, scheme)
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
