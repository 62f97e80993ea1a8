"""Tables of cosines and sines for rotary position embedding, with the usual context extensions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.check import describe_value, require_bool, require_finite, require_integer
from fusedops.errors import ConfigError

__all__ = ["RopeScaling", "rope_table"]

_HF_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
"""Hugging Face's name of a scaling parameter -> the field of RopeScaling."""

_NUMBERS = tuple(name for name in _HF_KEYS.values() if name != "truncate")
"""The fields of RopeScaling that hold a number, or None."""

_HF_KEYS_ELSEWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Keys of the same dict that are arguments of ``rope_table`` (or say which kind it is)."""


@dataclass(frozen=True)
class RopeScaling:
    """How a model stretches its rotary frequencies beyond the context it was first trained on.

    Attributes:
        kind: "linear" (frequencies divided by ``factor``), "llama3" (only long wavelengths are,
            with a ramp) or "yarn" (a ramp over dimensions, and scaled cosines and sines).
        factor: the stretch, >= 1.
        original_max_position: context length before the stretch, tokens; llama3 and yarn need it.
        low_freq_factor, high_freq_factor: llama3; wavelengths above ``original / low`` are
            stretched, those below ``original / high`` kept.
        beta_fast, beta_slow: yarn; rotations over the original context where the ramp ends.
        mscale, mscale_all_dim: yarn; numerator and denominator of the attention factor.
        attention_factor: yarn; factor of cosines and sines; None derives it from the others.
        truncate: yarn; whether the ramp's ends are rounded to whole dimensions.

    Raises:
        ConfigError: the kind is not known, a parameter it needs is absent, or a value is not legal.
    """

    kind: str
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        needed = _NEEDED_FIELDS.get(self.kind) if isinstance(self.kind, str) else None
        if needed is None:
            raise ConfigError(
                f"rope scaling kind {self.kind!r} is not supported; accepted are "
                f"{', '.join(_NEEDED_FIELDS)}, or None. (dynamic and longrope change their "
                "frequencies with the current length, which one table cannot hold.)"
            )
        for name in needed:
            if getattr(self, name) is None:
                raise ConfigError(f"rope scaling {self.kind!r} needs {name}; set it.")
        require_bool("rope scaling", truncate=self.truncate)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                require_finite("rope scaling", name, value)
        if not 1.0 <= self.factor < math.inf:
            raise ConfigError(f"rope scaling: factor is {self.factor}; it must be at least 1.")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not 0 < low < high:
            raise ConfigError(
                f"rope scaling: low_freq_factor {low} and high_freq_factor {high}; accepted is "
                "0 < low < high."
            )
        if self.original_max_position is not None and self.original_max_position < 1:
            raise ConfigError(
                f"rope scaling: original_max_position is {self.original_max_position}; it is a "
                "number of tokens, at least 1."
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ConfigError(
                f"rope scaling: beta_slow {self.beta_slow} and beta_fast {self.beta_fast}; "
                "accepted is 0 < beta_slow <= beta_fast."
            )

    @classmethod
    def from_hf(
        cls, parameters: Mapping[str, Any] | None, max_position_embeddings: int | None = None
    ) -> RopeScaling | None:
        """The scaling that a Hugging Face config's ``rope_parameters`` (``rope_scaling``) names.

        Args:
            parameters: the dict as in the config (of one layer type, where there are several);
                ``rope_theta`` and ``partial_rotary_factor`` in it are arguments of ``rope_table``.
            max_position_embeddings: the config's value; the original context length where the
                dict does not hold one, and with that one yarn's factor where it has none.

        Returns:
            None for the default type, or for no dict at all.

        Raises:
            ConfigError: the type is not supported, or the dict has a key that is not known.
        """
        if not parameters:
            return None
        nested = sorted(key for key, value in parameters.items() if isinstance(value, Mapping))
        if nested:
            raise ConfigError(
                f"rope parameters are nested by layer type ({', '.join(nested)}); pass the dict of "
                "one of them."
            )
        kind = parameters.get("rope_type", parameters.get("type")) or "default"
        given = {key: value for key, value in parameters.items() if value is not None}
        unknown = sorted(set(given) - set(_HF_KEYS) - _HF_KEYS_ELSEWHERE)
        if kind in (*_NEEDED_FIELDS, "default") and unknown:
            raise ConfigError(
                f"rope parameters of type {kind!r} hold {', '.join(unknown)}, which would be "
                f"ignored; accepted keys are {', '.join(sorted({*_HF_KEYS, *_HF_KEYS_ELSEWHERE}))}."
            )
        if kind == "default":
            return None
        fields = {_HF_KEYS[key]: value for key, value in given.items() if key in _HF_KEYS}
        fields.setdefault("original_max_position", max_position_embeddings)
        original = fields["original_max_position"]
        if kind == "yarn" and "factor" not in fields and original and max_position_embeddings:
            fields["factor"] = max_position_embeddings / original
        if kind in _NEEDED_FIELDS and "factor" not in fields:
            raise ConfigError(f"rope parameters of type {kind!r} need factor; set it.")
        fields.setdefault("factor", 1.0)
        return cls(kind, **fields)


_NEEDED_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position",),
}
"""Each kind of scaling and the fields that have no default there."""


def _linear(frequency: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    return frequency / scaling.factor, 1.0


def _llama3(frequency: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    original = _number(scaling.original_max_position)
    low, high = _number(scaling.low_freq_factor), _number(scaling.high_freq_factor)
    # Rotations over the original context: below `low` stretched, above `high` kept, ramp between.
    rotations = original * frequency / (2.0 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor), 1.0


def _yarn(frequency: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    original = _number(scaling.original_max_position)
    rotary_dim = 2 * frequency.shape[0]

    def dimension(rotations: float) -> float:
        """The (fractional) pair index whose frequency turns that often over the context."""
        wavelengths = math.log(original / (rotations * 2.0 * math.pi))
        return rotary_dim * wavelengths / (2.0 * math.log(theta))

    start, end = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rotary_dim - 1)
    pair = torch.arange(frequency.shape[0], dtype=torch.float64)
    width = end - start if end != start else 0.001
    stretched = ((pair - start) / width).clamp(0.0, 1.0)
    frequency = frequency * (1.0 - stretched + stretched / scaling.factor)
    return frequency, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _number(value: float | None) -> float:
    if value is None:
        raise ConfigError("rope scaling lacks a parameter that its kind needs.")
    return float(value)


_KINDS: dict[str, Callable[[Tensor, float, RopeScaling], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


_PEAK_BYTES = 20
"""Memory that making a table takes for each of its elements: the angles, cosines and sines of two
elements and their concatenation in float64, of which the table's own float32 is made."""


def _require_memory(rotary_dim: int, max_position: int) -> None:
    """Raise ConfigError where making the table takes more than all memory of this machine."""
    needed_bytes = _PEAK_BYTES * rotary_dim * max_position
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > memory_bytes:
        raise ConfigError(
            f"rope_table: {max_position} positions of {rotary_dim} elements are a table of "
            f"{4 * rotary_dim * max_position:,} bytes, and making it takes {needed_bytes:,}; this "
            f"machine has {memory_bytes:,}. Accepted is a smaller max_position."
        )


def rope_table(
    rotary_dim: int, max_position: int, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> Tensor:
    """The table of cosines and sines that ``rope`` reads.

    Angles, cosines and sines are float64 until they are rounded to float32 once, so a long context
    does not drift. Yarn's attention factor is multiplied into both.

    Args:
        rotary_dim: R, elements of a head that rotate; even, >= 2.
        max_position: P, number of positions.
        theta: base of the frequencies ``theta ** (-2 i / R)``.
        scaling: the model's context extension; None for none.

    Returns:
        (P, R) float32 on the CPU, row p = [cos(R/2) | sin(R/2)].

    Raises:
        ConfigError: an argument is not as described, or the table does not fit in this machine's
            memory.

    Sources: Su et al., "RoFormer", 2021; Chen et al., "Extending Context Window of Large Language
    Models via Positional Interpolation", 2023 (linear); Peng et al., "YaRN", 2023; Grattafiori et
    al., "The Llama 3 Herd of Models", 2024.
    """
    require_integer("rope_table", "rotary_dim", rotary_dim, 2)
    if rotary_dim % 2:
        raise ConfigError(f"rope_table: rotary_dim is {rotary_dim}; it must be even and >= 2.")
    require_integer("rope_table", "max_position", max_position, 1)
    require_finite("rope_table", "theta", theta)
    if scaling is not None and not isinstance(scaling, RopeScaling):
        raise ConfigError(
            f"rope_table: scaling is {describe_value(scaling)}; accepted: a RopeScaling (of a "
            "Hugging Face config's dict: RopeScaling.from_hf), or None."
        )
    if not 1.0 < theta < math.inf:
        raise ConfigError(f"rope_table: theta is {theta}; it must be finite and > 1.")
    _require_memory(rotary_dim, max_position)
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequency = theta**-exponent
    factor = 1.0
    if scaling is not None:
        frequency, factor = _KINDS[scaling.kind](frequency, theta, scaling)
    angle = torch.arange(max_position, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).mul_(factor).float()
