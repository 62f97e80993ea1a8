"""The command ``fusedops``: doctor, demo, explain, tune, prebuild, cache, bench.

Errors that fusedops raises on purpose, and the operating system's, come out as one line
``error: ...`` on stderr with exit code 2; ``FUSEDOPS_DEBUG=1`` shows the traceback instead. Ctrl-C
ends a command with exit code 130.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

import fusedops
from fusedops.cli import bench, cache, demo, doctor, explain, prebuild, tune
from fusedops.cli.output import print_error
from fusedops.errors import FusedOpsError

__all__ = ["app", "main"]

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="fusedops",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fusedops {fusedops.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Fused operators for LLM serving on NVIDIA GPUs."""


app.command()(doctor.doctor)
app.command()(demo.demo)
app.command()(explain.explain)
app.command()(tune.tune)
app.command()(prebuild.prebuild)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")


def _exit_code(leaving: SystemExit) -> int:
    return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with ``arguments`` (default: those of the process).

    Returns:
        the exit code: 0, 2 for bad input, 130 after Ctrl-C.
    """
    try:
        app(args=arguments, prog_name="fusedops")
    except SystemExit as leaving:
        return _exit_code(leaving)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (FusedOpsError, OSError) as error:
        if os.environ.get("FUSEDOPS_DEBUG", "0") not in ("", "0"):
            raise
        print_error(str(error))
        return EXIT_BAD_INPUT
    return 0
