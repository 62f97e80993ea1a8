"""Text form of the parts of a GEMM specification.

Every part (an epilogue node, a prologue, a weight format) is a frozen dataclass whose canonical
text is ``name(arg, ...)`` with trailing defaults left out, so that ``parse(str(part)) == part``.
The text is what crosses ``torch.ops``: it means the same in another process, with no registration
of objects there.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from fusedops.errors import ConfigError

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "SpecItem",
    "dtype_from_name",
    "dtype_name",
    "forget_when_redefined",
    "split_chain",
]

_FORGET: list[Callable[[], None]] = []


def forget_when_redefined(forget: Callable[[], None]) -> None:
    """Call ``forget`` when a class takes another's name (a notebook's cell run again, a reload).

    What was made of a text would otherwise keep the old class's math.
    """
    _FORGET.append(forget)


DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "int8",
}
"""Dtypes that may stand in a specification, with their names there."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_]+")
_ITEM = re.compile(r"([a-z][a-z0-9_]*)(?:\(([^()|>]*)\))?")


_FIELD_KINDS: dict[object, type] = {
    kind: typ for typ in (str, int, float) for kind in (typ, typ.__name__)
}
"""A field's annotation, as a class or as text, and the type that it stands for."""

_FLOAT32_MAX = torch.finfo(torch.float32).max


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in a specification; ConfigError if it may not stand in one."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise ConfigError(f"{dtype} has no place in a spec; accepted: {', '.join(DTYPES)}.")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """The torch dtype that a specification calls ``name``; ConfigError if there is none."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ConfigError(f"unknown dtype {name!r} in a spec; accepted: {', '.join(DTYPES)}.")
    return dtype


def require_text(what: str, text: object) -> None:
    """Raise ConfigError unless ``text`` is a str."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} {text!r} is a {type(text).__name__}; accepted: a str.")


def split_chain(text: str, separator: str) -> list[str]:
    """Split ``text`` at ``separator`` and strip blanks; an empty part is a ConfigError."""
    require_text("spec", text)
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts):
        raise ConfigError(f"spec {text!r} has an empty part between {separator!r}.")
    return parts


@dataclass(frozen=True)
class SpecItem:
    """A frozen dataclass with a canonical text.

    Subclasses set ``spec_name``, are decorated with ``@dataclass(frozen=True)`` and have fields of
    type ``str``, ``int`` or ``float`` only. Defining a subclass registers it: its text is
    understood from then on, in its own ``kind`` (the class that declares ``registry``: nodes,
    prologues and weight formats do not mix).

    Values are checked whenever an object is made, before the subclass's own ``__post_init__``: a
    float field takes a number that is finite in float32, an int field an integer, a str field
    letters, digits and underscores.

    Raises:
        ConfigError: a class that lacks one of these, when it is first used; a value that its field
            does not take.
    """

    spec_name: ClassVar[str] = ""
    registry: ClassVar[dict[str, type[SpecItem]]] = {}
    kind: ClassVar[str] = "part"
    _replaced: ClassVar[type[SpecItem] | None] = None
    """The finished class whose name this one took: its text stands for it until this is one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__post_init__" in cls.__dict__:
            setattr(cls, "__post_init__", _behind_field_checks(cls.__post_init__))  # noqa: B010
        name = cls.__dict__.get("spec_name", "")
        if not name:
            return
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"spec_name {name!r} of {cls.__qualname__}: accepted is text that matches "
                f"{_NAME.pattern}."
            )
        known = _finished(cls.registry.get(name))
        if known is not None and (known.__module__, known.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ConfigError(
                f"{cls.kind} {name!r} is defined twice: {known.__module__}.{known.__qualname__} "
                f"and {cls.__module__}.{cls.__qualname__}; give one another spec_name."
            )
        cls._replaced = known
        cls.registry[name] = cls
        if known is not None:
            known._replaced = None
            for forget in _FORGET:
                forget()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _require_complete(cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_fields(self)

    def __str__(self) -> str:
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        defaults = [f.default for f in dataclasses.fields(self)]
        while values and values[-1] == defaults[-1]:
            values.pop()
            defaults.pop()
        if not values:
            return self.spec_name
        return f"{self.spec_name}({','.join(_format_value(v) for v in values)})"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The part that ``text`` describes.

        Raises:
            ConfigError: the name is not known, or its arguments do not fit.
        """
        require_text(cls.kind, text)
        match = _ITEM.fullmatch(text.strip())
        if match is None:
            joined = "; nodes are joined by |" if cls.kind == "epilogue node" else ""
            raise ConfigError(
                f"{cls.kind} {text!r} is malformed; write name or name(argument,...){joined}."
            )
        name, arguments = match.groups()
        item_class = _finished(cls.registry.get(name)) or cls.registry.get(name)
        if item_class is None:
            known = sorted(key for key, found in cls.registry.items() if _finished(found))
            raise ConfigError(f"unknown {cls.kind} {name!r}; accepted are {', '.join(known)}.")
        _require_complete(item_class)
        raw = split_chain(arguments, ",") if arguments and arguments.strip() else []
        fields = dataclasses.fields(item_class)
        if len(raw) > len(fields):
            raise ConfigError(
                f"{cls.kind} {text!r} has {len(raw)} arguments; {name} takes at most {len(fields)}:"
                f" {', '.join(f.name for f in fields)}."
            )
        values = {
            f.name: _parse_value(text, f.name, _FIELD_KINDS[f.type], value, fields)
            for f, value in zip(fields, raw, strict=False)
        }
        try:
            return typing.cast(Self, item_class(**values))
        except TypeError as error:
            raise ConfigError(f"{cls.kind} {text!r}: {error}.") from error


def _finished(cls: type[SpecItem] | None) -> type[SpecItem] | None:
    """``cls``, or while it is no dataclass the class whose name it took, if there is one.

    A class registers itself before its decorator has run, and the decorator may fail.
    """
    if cls is None or "__dataclass_fields__" in cls.__dict__:
        return cls
    return cls._replaced


def _format_value(value: object) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _parse_value(
    text: str, name: str, kind: Any, raw: str, fields: tuple[dataclasses.Field[Any], ...]
) -> object:
    if kind is str:
        return raw
    try:
        return kind(raw)
    except ValueError as error:
        form = ", ".join(f.name for f in fields)
        raise ConfigError(
            f"{text!r}: {name}={raw!r} is not of type {kind.__name__}; the arguments are, in this "
            f"order, {form}."
        ) from error


_complete: set[type] = set()
"""Classes that ``_require_complete`` has passed."""


def _require_complete(cls: type[SpecItem]) -> None:
    """Raise ConfigError unless ``cls`` states what its text and its checks are made from.

    Without a decorator of its own it would have its base's fields, and without a name of its own
    its text would stand for its base.
    """
    if cls in _complete:
        return
    who = f"{cls.kind} class {cls.__qualname__}"
    if not cls.__dict__.get("spec_name"):
        raise ConfigError(
            f"{who} has no spec_name of its own; add e.g. "
            f'spec_name: ClassVar[str] = "{cls.__name__.lower()}" to it.'
        )
    if "__dataclass_fields__" not in cls.__dict__:
        raise ConfigError(f"{who} is no dataclass; decorate it with @dataclass(frozen=True).")
    for field in dataclasses.fields(cls):
        if field.type not in _FIELD_KINDS or field.name == "spec_name":
            raise ConfigError(
                f"{who}: field {field.name!r} is of type {field.type!r}; accepted are str, int and "
                "float. Annotate what is no field, spec_name too, as ClassVar."
            )
    _complete.add(cls)


def _behind_field_checks(own: Callable[[SpecItem], None]) -> Callable[[SpecItem], None]:
    @functools.wraps(own)
    def check_all(self: SpecItem) -> None:
        _check_fields(self)
        own(self)

    return check_all


def _check_fields(item: SpecItem) -> None:
    """Raise ConfigError unless each field holds a value of its type; makes 2 a 2.0 where due."""
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        convert, accepted = _ACCEPTED_VALUES[_FIELD_KINDS[field.type]]
        converted = convert(value)
        if converted is None:
            raise ConfigError(f"{item.spec_name}: {field.name} is {value!r}; accepted: {accepted}.")
        if converted is not value:
            object.__setattr__(item, field.name, converted)


def _as_word(value: Any) -> str | None:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def _as_integer(value: Any) -> int | None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return None
    return int(value)


def _as_float(value: Any) -> float | None:
    # A NaN fails the comparison; kernels compute in float32, where a larger number is infinite.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number and -_FLOAT32_MAX <= value <= _FLOAT32_MAX else None


_ACCEPTED_VALUES: dict[type, tuple[Callable[[Any], object], str]] = {
    str: (_as_word, "text made of letters, digits and _"),
    int: (_as_integer, "an integer"),
    float: (_as_float, "a number that is finite in float32"),
}
"""What a field of each type takes: the value to keep, None for one that it does not take."""
