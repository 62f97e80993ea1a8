"""The command ``fusedops``: doctor, demo, explain, tune, prebuild, ladder, cache, bench.

Wrong usage, errors that fusedops raises on purpose, and the operating system's, come out as one
line ``error: ...`` on stderr with exit code 2; ``FUSEDOPS_DEBUG=1`` shows the traceback instead.
Ctrl-C ends a command with exit code 130.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import fusedops
from fusedops.cli import bench, cache, demo, doctor, explain, ladder, prebuild, tune
from fusedops.cli.output import print_error
from fusedops.cli.usage import EXIT_BAD_INPUT, UsageError, help_when_alone, usage_line
from fusedops.errors import FusedOpsError

__all__ = ["app", "main"]

PROGRAM = "fusedops"
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fusedops {fusedops.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Fused operators for LLM serving on NVIDIA GPUs."""
    help_when_alone(context)


app.command()(doctor.doctor)
app.command()(demo.demo)
app.command()(explain.explain)
app.command()(tune.tune)
app.command()(prebuild.prebuild)
app.command()(ladder.ladder)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with ``arguments`` (default: those of the process).

    Returns:
        the exit code: 0, 1 where a command says so, 2 for bad input, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=words, prog_name=PROGRAM, standalone_mode=False)
    except SystemExit as leaving:
        # Typer leaves so when the reader of a pipe has gone.
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except UsageError as error:
        print_error(usage_line(error, app, PROGRAM, words))
        return EXIT_BAD_INPUT
    except (FusedOpsError, OSError) as error:
        if os.environ.get("FUSEDOPS_DEBUG", "0") not in ("", "0"):
            raise
        print_error(str(error))
        return EXIT_BAD_INPUT
    return code if isinstance(code, int) else 0
