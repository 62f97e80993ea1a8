"""Options and arguments of the commands: what a value may be is said once, for help and for errors.

A value that is not accepted becomes one line that names the option, what was given and what is
accepted; the same words stand in the option's help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer

from fusedops.errors import ConfigError, FusedOpsError

__all__ = [
    "OptionError",
    "choice",
    "flag",
    "number",
    "path",
    "shown",
    "size",
    "text",
    "whole",
    "whole_numbers",
]

Value = TypeVar("Value")

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,40}")
_MOST = 2**63 - 1
"""Sizes, counts and seeds are handed to torch as int64."""


_SHOWN = 60
"""Characters of a refused value that its error line repeats."""


class OptionError(FusedOpsError):
    """The value of an option or argument is not accepted.

    No ValueError, unlike ``ConfigError``: typer turns those of a parser into words of its own.
    """


def shown(value: str) -> str:
    """``value`` as an error line holds it: cut short, and quoted where it would not be one word."""
    if len(value) > _SHOWN:
        value = f"{value[:_SHOWN]}..."
    return value if value.isprintable() and value and " " not in value else repr(value)


def refusal(name: str, value: str, accepted: str) -> OptionError:
    """The error for a value that is not ``accepted``."""
    return OptionError(f"{name} {shown(value)}: accepted {accepted}.")


def listed(words: Iterable[str]) -> str:
    """``are a, b``, or ``is a`` for one word."""
    names = list(words)
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _range(kind: str, minimum: float | None, maximum: float | None) -> str:
    bounds = "" if minimum is None else f" from {minimum:,}"
    return f"{kind}{bounds}" + ("" if maximum is None else f" to {maximum:,}")


def _parse_whole(name: str, value: str, minimum: int | None, maximum: int | None) -> int:
    word = value.strip()
    if _WHOLE_NUMBER.fullmatch(word):
        found = int(word)
        low = -_MOST if minimum is None else minimum
        if low <= found <= (_MOST if maximum is None else maximum):
            return found
        if found > _MOST and maximum is None:
            maximum = _MOST
    raise refusal(name, value, f"are {_range('whole numbers', minimum, maximum)}")


def whole_numbers(name: str, value: str, minimum: int = 1) -> list[int]:
    """The numbers of a list like ``16,64``.

    Raises:
        ConfigError: something in it is no whole number of ``minimum`` or more.
    """
    try:
        return [_parse_whole(name, word, minimum, None) for word in value.split(",")]
    except OptionError:
        words = _range("whole numbers", minimum, None)
        raise ConfigError(
            f"{name} {shown(value)}: accepted are {words}, separated by commas, e.g. 1,8,64."
        ) from None


def _parser(parse: Callable[[str], Value]) -> Callable[[Any], Value]:
    """Typer hands a default through the parser as well, and that one needs no reading."""
    return lambda value: parse(value) if isinstance(value, str) else value


def _option(name: str, what: str, default: str, metavar: str, **more: Any) -> Any:
    if default:
        # Where the value is None, or the default is not what a reader should see.
        more["show_default"] = default
    return typer.Option(name, help=what, metavar=metavar, **more)


def whole(
    name: str,
    what: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    default: str = "",
    panel: str | None = None,
) -> Any:
    """An option that takes a whole number.

    Args:
        name: e.g. ``--rounds``.
        what: what it is, without a full stop.
        minimum, maximum: bounds, inclusive.
        default: what help shows as the default, where the parameter's own default does not tell.
        panel: heading under which help lists it.
    """
    words = _range("whole numbers", minimum, maximum)
    parser = _parser(lambda value: _parse_whole(name, value, minimum, maximum))
    return _option(name, f"{what}: {words}.", default, "N", parser=parser, rich_help_panel=panel)


def size(name: str, what: str) -> Any:
    """An argument that takes a whole number from 0."""
    parser = _parser(lambda value: _parse_whole(name, value, 0, None))
    return typer.Argument(help=f"{what}: whole numbers from 0.", metavar=name, parser=parser)


def number(
    name: str, what: str, *, minimum: float, default: str = "", panel: str | None = None
) -> Any:
    """An option that takes a finite number of ``minimum`` or more; see ``whole``."""
    words = _range("numbers", minimum, None)

    def parse(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not minimum <= found < math.inf:
            raise refusal(name, value, f"are {words}")
        return found

    parser = _parser(parse)
    return _option(name, f"{what}: {words}.", default, "X", parser=parser, rich_help_panel=panel)


def choice(
    name: str,
    what: str,
    accepted: Iterable[str],
    *,
    default: str = "",
    panel: str | None = None,
    repeatable: bool = False,
) -> Any:
    """An option that takes one of the ``accepted`` words, in any case; see ``whole``."""
    words = tuple(accepted)

    def parse(value: str) -> str:
        if value.lower() not in words:
            raise refusal(name, value, listed(words))
        return value.lower()

    again = "; repeatable" if repeatable else ""
    return _option(
        name,
        f"{what}: {', '.join(words)}{again}.",
        default,
        "WORD",
        parser=_parser(parse),
        rich_help_panel=panel,
    )


def text(
    name: str, what: str, metavar: str = "TEXT", *, default: str = "", panel: str | None = None
) -> Any:
    """An option that takes a text; ``what`` says which, and the command checks it."""
    return _option(name, f"{what}.", default, metavar, rich_help_panel=panel)


def path(name: str, what: str, *, default: str = "", panel: str | None = None) -> Any:
    """An option that takes a file or folder; ``what`` says which, and the command checks it."""
    return _option(name, f"{what}.", default, "PATH", rich_help_panel=panel)


def flag(name: str, what: str, *, default: str = "", panel: str | None = None) -> Any:
    """An option without a value, ``--yes`` or ``--yes/--no``."""
    shown_default: dict[str, Any] = {"show_default": default} if default else {}
    return typer.Option(name, help=f"{what}.", rich_help_panel=panel, **shown_default)
