"""Checks of plain values: what was got, what is accepted, and the name under which to change it."""

from __future__ import annotations

import math
from typing import Any

from fusedops.errors import ConfigError

__all__ = ["require_finite", "require_int", "require_type"]

_MOST = 2**63 - 1
"""Sizes, counts and seeds are handed to torch as int64."""


def require_int(
    name: str, value: Any, minimum: int | None = None, maximum: int = _MOST, hint: str = ""
) -> None:
    """Raise ConfigError unless ``value`` is an int (no bool) from ``minimum`` to ``maximum``.

    Without bounds an int64 is accepted. ``hint`` ends the message.
    """
    low = -_MOST - 1 if minimum is None else minimum
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and low <= value <= maximum:
        return
    bounds = "" if minimum is None else f" from {minimum:,}"
    if maximum != _MOST:
        bounds += f" to {maximum:,}"
    elif is_int and (minimum is None or value > maximum):
        bounds = f" from {'-2^63' if minimum is None else f'{minimum:,}'} to 2^63 - 1 (int64)"
    text = f"{name} is {_shown(value)}; accepted are integers{bounds}."
    raise ConfigError(f"{text} {hint}" if hint else text)


def require_finite(name: str, value: Any, minimum: float) -> None:
    """Raise ConfigError unless ``value`` is a finite int or float (no bool) >= ``minimum``."""
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and minimum <= value < math.inf
    ):
        return
    raise ConfigError(f"{name} is {_shown(value)}; accepted are finite numbers from {minimum:g}.")


def require_type(name: str, value: Any, accepted: type | tuple[type, ...], words: str) -> None:
    """Raise ConfigError unless ``value`` is an ``accepted``, which ``words`` describe."""
    if not isinstance(value, accepted):
        raise ConfigError(f"{name} is {_shown(value)}; accepted {words}.")


def _shown(value: Any) -> str:
    """``'7' (str)``; of a number the value alone, of anything long its type alone."""
    kind = type(value).__name__
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an {kind} of {value.bit_length()} bits"
    text = repr(value)
    if len(text) > 60 or not text.isprintable():
        return f"a value of type {kind}"
    return text if isinstance(value, (int, float)) else f"{text} ({kind})"
