"""Wrong usage in one line: what was typed, what the command accepts, and where it is described."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import typer

__all__ = ["EXIT_BAD_INPUT", "UsageError", "help_when_alone", "usage_line"]

EXIT_BAD_INPUT = 2

UsageError = cast(type[Exception], typer.BadParameter.__base__)
"""What typer raises for options, arguments and commands that it does not know or misses; older
versions take it from click, newer ones bring it along, and neither exports it."""

_NEGATIVE_NUMBER = re.compile(r"-[0-9]")


def help_when_alone(context: typer.Context) -> None:
    """Show the help of a command that was typed without one of its commands."""
    if context.invoked_subcommand is None:
        # Typer draws the help itself and returns nothing, or returns it to be printed.
        described = context.get_help()
        if described:
            typer.echo(described)
        raise typer.Exit(EXIT_BAD_INPUT)


def _command(app: typer.Typer, program: str, words: Sequence[str]) -> tuple[str, Any]:
    """The command that ``words`` begin with, and what is typed to reach it."""
    command: Any = typer.main.get_command(app)
    path = [program]
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command, path = inner, [*path, word]
    return " ".join(path), command


def _pieces(path: str, command: Any) -> str:
    """``Usage: fusedops explain [OPTIONS] M N K``."""
    with command.make_context(path, [], resilient_parsing=True) as context:
        return "Usage: " + " ".join([path, *command.collect_usage_pieces(context)])


def usage_line(error: Exception, app: typer.Typer, program: str, words: Sequence[str]) -> str:
    """What is wrong with ``words``, in one line.

    Args:
        error: a ``UsageError``.
        app: the program's commands.
        program: its name.
        words: what was typed behind it.
    """
    path, command = _command(app, program, words)
    commands = getattr(command, "commands", None)
    what = " ".join(cast(Any, error).format_message().split()).rstrip(".")
    what = what[:1].lower() + what[1:]
    option = str(getattr(error, "option_name", ""))
    parameter = getattr(error, "param", None) or _parameter(command, option)
    if _NEGATIVE_NUMBER.match(option):
        what = f"{option} is no option, and a negative number is not accepted here"
        accepted = _pieces(path, command)
    elif parameter is not None:
        accepted = str(parameter.help or _pieces(path, command)).rstrip(".")
    elif option:
        names = [name for known in command.params for name in _names(known)]
        accepted = f"Accepted are {', '.join([*names, '--help'])}"
    elif commands:
        accepted = f"Accepted are {', '.join(commands)}"
    else:
        accepted = _pieces(path, command)
    end = "" if what.endswith("?") else "."
    return f"{path}: {what}{end} {accepted}. `{path} --help` tells more."


def _names(parameter: Any) -> list[str]:
    """``--compare`` and ``--no-compare``; none of an argument, which is typed without its name."""
    names = (*parameter.opts, *parameter.secondary_opts)
    return [name for name in names if name.startswith("--")]


def _parameter(command: Any, option: str) -> Any | None:
    """The option of that name, if the command has it."""
    return next((known for known in command.params if option in _names(known)), None)
