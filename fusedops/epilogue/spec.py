"""Text form of the parts of a GEMM specification.

Every part (an epilogue node, a prologue, a weight format) is a frozen dataclass whose canonical
text is ``name(arg, ...)`` with trailing defaults left out, so that ``parse(str(part)) == part``.
The text is what crosses ``torch.ops``: it means the same in another process, with no registration
of objects there.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from fusedops.errors import ConfigError

__all__ = ["DTYPES", "DTYPE_NAMES", "SpecItem", "dtype_from_name", "dtype_name", "split_chain"]

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "int8",
    torch.int32: "int32",
}
"""Dtypes that may stand in a specification, with their names there."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ITEM = re.compile(r"([a-z][a-z0-9_]*)(?:\(([^()|>]*)\))?")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in a specification; ConfigError if it may not stand in one."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise ConfigError(f"{dtype} has no place in a spec; accepted: {', '.join(DTYPES)}.")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """The torch dtype that a specification calls ``name``; ConfigError if there is none."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ConfigError(f"unknown dtype {name!r} in a spec; accepted: {', '.join(DTYPES)}.")
    return dtype


def split_chain(text: str, separator: str) -> list[str]:
    """Split ``text`` at ``separator`` and strip blanks; an empty part is a ConfigError."""
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts):
        raise ConfigError(f"spec {text!r} has an empty part between {separator!r}.")
    return parts


@dataclass(frozen=True)
class SpecItem:
    """A frozen dataclass with a canonical text.

    Subclasses set ``spec_name`` and have fields of type ``str``, ``int`` or ``float`` only.
    Defining a subclass registers it: its text is understood from then on, in its own ``kind``
    (the class that declares ``registry``: nodes, prologues and weight formats do not mix).
    """

    spec_name: ClassVar[str] = ""
    registry: ClassVar[dict[str, type[SpecItem]]] = {}
    kind: ClassVar[str] = "part"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("spec_name", "")
        if not name:
            return
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"spec_name {name!r} of {cls.__qualname__} must match {_NAME.pattern}"
            )
        known = cls.registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ConfigError(
                f"{cls.kind} {name!r} is defined twice: {known.__module__}.{known.__qualname__} "
                f"and {cls.__module__}.{cls.__qualname__}; give one another spec_name."
            )
        cls.registry[name] = cls

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
        match = _ITEM.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{cls.kind} {text!r} is malformed; write name or name(argument,...)."
            )
        name, arguments = match.groups()
        item_class = cls.registry.get(name)
        if item_class is None:
            raise ConfigError(
                f"unknown {cls.kind} {name!r}; accepted are {', '.join(sorted(cls.registry))}."
            )
        raw = split_chain(arguments, ",") if arguments and arguments.strip() else []
        fields = dataclasses.fields(item_class)
        if len(raw) > len(fields):
            raise ConfigError(
                f"{cls.kind} {text!r} has {len(raw)} arguments; {name} takes at most {len(fields)}:"
                f" {', '.join(f.name for f in fields)}."
            )
        types = typing.get_type_hints(item_class)
        values = {
            f.name: _parse_value(text, f.name, types[f.name], value)
            for f, value in zip(fields, raw, strict=False)
        }
        try:
            return typing.cast(Self, item_class(**values))
        except TypeError as error:
            raise ConfigError(f"{cls.kind} {text!r}: {error}.") from error


def _format_value(value: object) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _parse_value(text: str, name: str, kind: Any, raw: str) -> object:
    if kind is str:
        if not re.fullmatch(r"[A-Za-z0-9_]+", raw):
            raise ConfigError(f"{text!r}: {name}={raw!r} must be made of letters, digits and _.")
        return raw
    try:
        return kind(raw)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {name}={raw!r} is not of type {kind.__name__}.") from error
