"""What ``convert`` did: one row a module, printed with the layers of a model folded together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusedops.quant import Scheme

__all__ = ["ConversionReport", "ConvertedModule", "SkippedModule", "scheme_text"]


@dataclass(frozen=True)
class ConvertedModule:
    """A module that was replaced.

    Attributes:
        path: its name in the model.
        old_class, new_class: class names before and after.
        parameters: how many values its parameters hold.
        scheme: how its linear layers are quantized, see ``scheme_text``; empty: they are not.
    """

    path: str
    old_class: str
    new_class: str
    parameters: int
    scheme: str = ""


def scheme_text(schemes: Mapping[str, Scheme]) -> str:
    """The one scheme of a module's layers, or those of each layer; empty without any.

    Args:
        schemes: by the layer's name.
    """
    if all(scheme.weight == "float" for scheme in schemes.values()):
        return ""
    if len(set(schemes.values())) == 1:
        return str(next(iter(schemes.values())))
    return "; ".join(f"{name} {scheme}" for name, scheme in schemes.items())


@dataclass(frozen=True)
class SkippedModule:
    """A module that was left alone, with its ``path``, its ``old_class`` and the ``reason``."""

    path: str
    old_class: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What ``convert`` did to a model; ``str()`` is a table.

    Attributes:
        family: the model's family, or None where only plain linear layers were looked for.
        policy: the policy as it was given.
        converted: the modules that were replaced, in the model's order.
        skipped: the modules that were left alone, in the model's order. Containers whose children
            are listed have no row of their own.
        cast_parameters: how many parameter tensors changed their dtype.
    """

    family: str | None
    policy: str
    converted: tuple[ConvertedModule, ...]
    skipped: tuple[SkippedModule, ...]
    cast_parameters: int

    @property
    def parameters(self) -> int:
        """How many values the parameters of all converted modules hold."""
        return sum(row.parameters for row in self.converted)

    def __str__(self) -> str:
        title = (
            f"{self.family or 'plain linear layers'}, policy {self.policy}: "
            f"{len(self.converted)} modules converted ({self.parameters:,} parameters), "
            f"{len(self.skipped)} left alone, {self.cast_parameters} parameter tensors cast"
        )
        lines = [title]
        rows = [
            (r.path, (r.old_class, r.new_class, r.scheme), r.parameters) for r in self.converted
        ]
        converted = [(*row, f"{sum(sizes):,}") for row, sizes in _fold(rows)]
        heads = ["converted", "from", "to", "scheme", "parameters"]
        if not any(r.scheme for r in self.converted):
            converted = [(*row[:3], row[4]) for row in converted]
            heads.remove("scheme")
        skipped = [
            row for row, _ in _fold([(r.path, (r.old_class, r.reason), 0) for r in self.skipped])
        ]
        if converted:
            lines += ["", *_table(heads, converted)]
        if skipped:
            lines += ["", *_table(("left alone", "class", "reason"), skipped)]
        return "\n".join(lines)


def _fold(
    rows: Sequence[tuple[str, tuple[str, ...], int]],
) -> list[tuple[tuple[str, ...], list[int]]]:
    """Rows that differ in a layer's number only become one: ((path, *texts), their numbers)."""
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, int]]] = {}
    for path, texts, number in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        groups.setdefault((pattern, texts), []).append((path, number))
    return [
        ((_folded_path(pattern, [path for path, _ in members]), *texts), [n for _, n in members])
        for (pattern, texts), members in groups.items()
    ]


def _folded_path(pattern: str, paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    if pattern.count("*") != 1:
        return f"{pattern} ({len(paths)}x)"
    before = len(pattern.partition("*")[0])
    numbers = sorted(int(path[before:].partition(".")[0]) for path in paths)
    return pattern.replace("*", f"{{{_ranges(numbers)}}}")


def _ranges(numbers: list[int]) -> str:
    """``0-3,7`` for [0, 1, 2, 3, 7]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)


def _table(heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns; a column called parameters is right-aligned."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if head == "parameters" else cell.ljust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
