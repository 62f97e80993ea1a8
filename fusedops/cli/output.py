"""What the commands share: the console, the error line, tables, words for dtypes and devices."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedops.cli.options import shown
from fusedops.errors import ConfigError, DeviceError

__all__ = [
    "DTYPE_WORDS",
    "console",
    "format_age",
    "format_bytes",
    "parse_device",
    "print_error",
    "print_facts",
    "print_table",
    "yes_or_no",
]

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")

DTYPE_WORDS: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "f16": torch.float16,
    "float16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console on today's stdout or stderr; numbers and paths are left as they are.

    Bars and panels that move the cursor need a real terminal: FORCE_COLOR colours a log, but must
    not fill it with cursor movements.
    """
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(
        stderr=stderr,
        quiet=quiet,
        highlight=False,
        force_interactive=None if terminal else False,
    )


def print_error(message: str) -> None:
    """``error: message`` in red on stderr; lines are not wrapped, so that they can be searched."""
    from serving_demo.console import printable

    line = Text("error: ", style="bold red").append(printable(message), style="red")
    console(stderr=True).print(line, soft_wrap=True)


def print_facts(target: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A title, then ``fact  value`` a line; values are not wrapped, so that one can search them."""
    target.print(Text(title, style="bold"))
    facts = list(rows)
    width = max((len(fact) for fact, _ in facts), default=0)
    for fact, value in facts:
        target.print(f"{fact:<{width}}  {value}", markup=False, soft_wrap=True)
    target.print()


def print_table(
    target: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
) -> None:
    """A title, then a table without a frame; cells wrap, and their text is taken literally."""
    target.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    target.print(table)
    target.print()


def yes_or_no(usable: bool) -> Text:
    """A coloured ``yes`` or ``no``."""
    return Text("yes", style="green") if usable else Text("no", style="yellow")


def format_bytes(size_bytes: int) -> str:
    """``1.5 MiB``: a size in the largest binary unit that keeps it at 1 or more."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_age(age_s: float) -> str:
    """``3 h``: an age in whole seconds, minutes, hours or days."""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def parse_device(option: str, word: str) -> str:
    """``word`` if it names a device that this process can use.

    Raises:
        ConfigError: it names no kind of device that fusedops runs on.
        DeviceError: it names a GPU that torch does not see.
    """
    kind, _, index = word.partition(":")
    if not _DEVICE.fullmatch(word):
        raise ConfigError(f"{option} {shown(word)}: accepted are cpu, cuda and cuda:N.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"{option} {word}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA "
            f"device(s) here; use {option} cpu, or run `fusedops doctor` to see why."
        )
    return word
