"""What a conversion will do to a model, found out before anything is changed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from fusedops.errors import ConfigError
from fusedops.nn.families import Family
from fusedops.nn.linear import FusedGatedMLP, FusedLinear, FusedMLP, FusedQKV
from fusedops.nn.norm import LayerNorm, RMSNorm
from fusedops.nn.quant_blocks import QuantGatedMLP, QuantMLP, QuantQKV
from fusedops.nn.quant_linear import QuantLinear
from fusedops.nn.report import SkippedModule
from fusedops.nn.rules import LINEAR, Rule, is_adapter
from fusedops.nn.rules_setting import Setting
from fusedops.quant import Scheme

__all__ = ["Planner"]

_FUSED = (
    *(FusedLinear, FusedGatedMLP, FusedMLP, FusedQKV, LayerNorm, RMSNorm),
    *(QuantLinear, QuantGatedMLP, QuantMLP, QuantQKV),
)


@dataclass
class Planner:
    """Walks over a model and decides what to replace, changing nothing.

    Attributes:
        family: None looks for plain linear layers only.
        setting: what rules need to know.
        head: the output embedding, or None.
        convert_head: whether it is to be replaced.
        planned: (path, module, rule) of what is to be replaced, in the model's order.
        skipped: what stays.
        schemes: of the planned modules by path, those of their layers by name.
    """

    family: Family | None
    setting: Setting
    head: nn.Module | None
    convert_head: bool
    planned: list[tuple[str, nn.Module, Rule]] = field(default_factory=list)
    skipped: list[SkippedModule] = field(default_factory=list)
    schemes: dict[str, dict[str, Scheme]] = field(default_factory=dict)
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
            setting = self.setting.at(path)
            reason = rule.obstacle(module, setting)
            if reason is None:
                self._plan(path, module, rule)
                self.schemes[path] = rule.schemes(setting)
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

    def require_matches(self) -> None:
        """Raise ConfigError for an override that matches no layer."""
        layers = [
            f"{path}.{name}" if name else path
            for path, schemes in self.schemes.items()
            for name in schemes
        ]
        for pattern, _ in self.setting.overrides:
            if not any(fnmatchcase(layer, pattern) for layer in layers):
                raise ConfigError(
                    f"convert: overrides[{pattern!r}] matches no layer; accepted are patterns of "
                    f"converted linear layers, e.g. {', '.join(layers[:3]) or 'none here'}."
                )

    def require_finite(self) -> None:
        """Raise ConfigError where a weight to be quantized holds NaN or an infinity."""
        for path, module, _ in self.planned:
            for name, scheme in self.schemes[path].items():
                weight = module.get_submodule(name).get_parameter("weight")
                if scheme.weight != "float" and not bool(weight.isfinite().all()):
                    layer = f"{path}.{name}" if name else path
                    raise ConfigError(
                        f"convert: {layer}.weight holds NaN or infinities and cannot be quantized; "
                        f"accepted are finite weights, or overrides={{{layer!r}: None}}."
                    )

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
