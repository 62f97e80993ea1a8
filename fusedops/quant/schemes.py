"""Quantization schemes: what a linear layer's weight and activations are stored as.

| scheme | activations | weight | scales are applied |
| --- | --- | --- | --- |
| ``fp8`` | e4m3 per token | e4m3 per output channel | in the epilogue, along m and n |
| ``fp8-tensor`` | e4m3, one scale | e4m3, one scale | in the epilogue |
| ``fp8-block`` | e4m3 1 x 128 | e4m3 128 x 128 | every 128 of K, in float32 |
| ``int8`` | int8 per token | int8 per output channel | in the epilogue, along m and n |
| ``int4`` | as they are | int4 in groups of K | on the weight's values |
| ``int8-wo``, ``fp8-wo`` | as they are | int8, e4m3 per row or in groups | on the weight's values |
| ``w4a8`` | e4m3 per token | int4 in groups of K | on the weight's values, and along m |

A layer may be given one static scale for its activations, except in ``fp8-block``; the others are
computed at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from fusedops.check import describe_value, require_bool
from fusedops.errors import ConfigError
from fusedops.ops.quantize import quantize
from fusedops.weight import GROUP_SIZES

__all__ = ["SCHEMES", "UNQUANTIZED", "Scheme", "as_scheme", "scheme"]

Stored = Literal["e4m3", "int8", "int4", "float"]
Sharing = Literal["tensor", "channel", "block", "group", "none"]


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is quantized.

    Attributes:
        name: its name in ``SCHEMES``.
        weight: what the weight's values are stored as; ``float``: as they are.
        sharing: what of the weight shares a scale: all of it, a row (output channel), 128 x 128
            values, or ``group`` columns of a row.
        activation: what activations are quantized to, or None: they stay in 16 bits.
        granularity: what of the activations shares a dynamic scale, see ``fusedops.quantize``.
        group: columns of a group: 32, 64, 128, or 0 for a whole row.
        zero_points: int4 with a zero point for each group beside its scale.

    Raises:
        ConfigError: the scheme has no groups or zero points but is given some.
    """

    name: str
    weight: Stored
    sharing: Sharing
    activation: Literal["e4m3", "int8"] | None = None
    granularity: Literal["token", "tensor", "block128"] = "token"
    group: int = 0
    zero_points: bool = False

    def __post_init__(self) -> None:
        require_bool(f"scheme {self.name}", zero_points=self.zero_points)
        accepted = (0, *GROUP_SIZES) if self.sharing == "group" else (0,)
        if self.group not in accepted:
            why = "" if self.sharing == "group" else " (its scales have no groups along K)"
            raise ConfigError(
                f"scheme {self.name}: group={self.group!r}; accepted: "
                f"{', '.join(map(str, accepted))}{why}."
            )
        if self.zero_points and self.weight != "int4":
            raise ConfigError(
                f"scheme {self.name}: zero_points=True; accepted: False, as only int4 weights "
                "have them."
            )

    def __str__(self) -> str:
        if self.sharing != "group":
            return self.name
        shared = f"groups of {self.group}" if self.group else "per row"
        return f"{self.name} ({shared}{', zero points' if self.zero_points else ''})"

    @property
    def takes_static_scale(self) -> bool:
        """Whether a static scale of the activations is accepted."""
        return self.activation is not None and self.granularity != "block128"

    def scale_steps(self, static: bool = False) -> tuple[str, ...]:
        """The epilogue nodes that apply scales; ``static``: one scale for all activations.

        Their operands are ``x_scale`` and ``w_scale``; scales that a weight format reads itself
        are not among them.
        """
        steps = []
        if self.activation is not None and self.granularity != "block128":
            per_token = self.granularity == "token" and not static
            steps.append("scale(x_scale,m)" if per_token else "scale(x_scale)")
        if self.sharing == "tensor":
            steps.append("scale(w_scale)")
        elif self.sharing == "channel":
            steps.append("scale(w_scale,n)")
        return tuple(steps)

    def quantize_activations(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(q, scale) of x (..., K), see ``fusedops.quantize``; ``scale``: a static one, of ().

        Raises:
            ConfigError: activations of this scheme are not quantized, or take no static scale.
        """
        if self.activation is None:
            raise ConfigError(f"scheme {self.name}: activations stay as they are.")
        if scale is None:
            return quantize(x, self.activation, granularity=self.granularity)
        if not self.takes_static_scale:
            raise ConfigError(f"scheme {self.name}: accepted are dynamic scales only, got one.")
        return quantize(x, self.activation, granularity="tensor", scale=scale)

    @property
    def activation_dtype(self) -> torch.dtype | None:
        """The dtype of quantized activations, or None."""
        dtypes = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
        return None if self.activation is None else dtypes[self.activation]


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        found.name: found
        for found in (
            Scheme("fp8", "e4m3", "channel", "e4m3"),
            Scheme("fp8-tensor", "e4m3", "tensor", "e4m3", "tensor"),
            Scheme("fp8-block", "e4m3", "block", "e4m3", "block128"),
            Scheme("int8", "int8", "channel", "int8"),
            Scheme("int4", "int4", "group", group=128),
            Scheme("int8-wo", "int8", "group"),
            Scheme("fp8-wo", "e4m3", "group"),
            Scheme("w4a8", "int4", "group", "e4m3", group=128),
        )
    }
)
"""Every scheme by name, with its default options."""


UNQUANTIZED = Scheme("none", "float", "none")
"""A layer whose weight stays in the model's dtype, beside others that are quantized."""


def scheme(name: str, *, group: int | None = None, zero_points: bool | None = None) -> Scheme:
    """The scheme of that name, with other groups or with zero points where they are given.

    Raises:
        ConfigError: there is no such scheme, or it does not have that option.
    """
    found = SCHEMES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"scheme {describe_value(name)}; accepted are {', '.join(SCHEMES)}, or a Scheme."
        )
    if group is not None:
        found = replace(found, group=group)
    return found if zero_points is None else replace(found, zero_points=zero_points)


def as_scheme(value: Scheme | str | None) -> Scheme:
    """``value``, or the scheme that it names; None: unquantized. ConfigError for anything else."""
    if value is None:
        return UNQUANTIZED
    return value if isinstance(value, Scheme) else scheme(value)
