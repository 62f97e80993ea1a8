"""``fusedops cache``: where compiled kernels are kept, what is there, whether it is sound."""

from __future__ import annotations

from typing import Annotated

import typer

from fusedops.cli.options import flag, number, shown, text
from fusedops.cli.output import console, format_age, format_bytes, print_table
from fusedops.cli.usage import help_when_alone
from fusedops.jit import cache as kernel_cache
from fusedops.jit.location import CACHE_VARIABLE

__all__ = ["app", "describe_cache"]

EXIT_DAMAGED = 1
SECONDS_A_DAY = 86_400.0

app = typer.Typer(
    help="The cache of compiled kernels.",
    callback=help_when_alone,
    invoke_without_command=True,
)


def _where() -> str:
    path = kernel_cache.cache_path()
    return (
        f"a temporary folder ({CACHE_VARIABLE} and HOME are not set)" if path is None else f"{path}"
    )


def describe_cache() -> str:
    """The cache's place, number of kernels and size, in one line.

    Raises:
        BuildError: the folder is not this user's own, or cannot be read.
    """
    kernels = kernel_cache.entries()
    return f"{_where()}: {len(kernels)} kernel(s), {format_bytes(kernel_cache.total_bytes())}"


@app.command()
def path() -> None:
    """Print the cache folder."""
    console().print(_where(), markup=False, soft_wrap=True)


@app.command("list")
def list_kernels() -> None:
    """List the stored kernels, oldest first."""
    kernels = kernel_cache.entries()
    rows = (
        (
            kernel.name[:12],
            kernel.family or "?",
            kernel.arch or "?",
            format_bytes(kernel.size_bytes),
            format_age(kernel.age_s),
            f"damaged: {kernel.damage}" if kernel.damage else kernel.spec,
        )
        for kernel in kernels
    )
    target = console()
    if kernels:
        print_table(
            target, "Stored kernels", ("name", "family", "arch", "size", "age", "spec"), rows
        )
    target.print(describe_cache(), markup=False, soft_wrap=True)


@app.command()
def verify() -> None:
    """Read every file of every kernel and compare it with its checksum; exit code 1 on damage."""
    target = console()
    count = len(kernel_cache.entries())
    damages = kernel_cache.verify()
    for damage in damages:
        target.print(f"{damage.path}: {damage.reason}", markup=False, soft_wrap=True)
    if damages:
        target.print(
            f"{len(damages)} of {count} kernel(s) are damaged; each is compiled anew when it is "
            "asked for, and `fusedops cache clear --damaged` removes them now",
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_DAMAGED)
    target.print(f"{count} kernel(s), all sound")


@app.command()
def clear(
    family: Annotated[
        str | None, text("--family", "Only kernels of this family, as listed", default="all")
    ] = None,
    arch: Annotated[
        str | None, text("--arch", "Only kernels for this architecture, as listed", default="all")
    ] = None,
    older_than_days: Annotated[
        float | None,
        number("--older-than-days", "Only kernels built longer ago", minimum=0, default="all"),
    ] = None,
    damaged: Annotated[bool, flag("--damaged", "Only damaged kernels")] = False,
    leftovers: Annotated[
        bool, flag("--leftovers", "No sound kernel, only what killed builds left")
    ] = False,
) -> None:
    """Remove stored kernels (all, without options); one that is being built right now stays."""
    target = console()
    kernels = kernel_cache.entries()
    for option, wanted, known in (
        ("--family", family, {kernel.family for kernel in kernels}),
        ("--arch", arch, {kernel.arch for kernel in kernels}),
    ):
        if wanted is not None and wanted not in known:
            there = ", ".join(sorted(filter(None, known))) or "none"
            line = f"{option} {shown(wanted)}: no stored kernel has it; there are: {there}"
            target.print(line, markup=False, soft_wrap=True)
    names = [damage.name for damage in kernel_cache.verify()] if damaged else None
    cleared = kernel_cache.clear(
        family=family,
        arch=arch,
        older_than_s=None if older_than_days is None else older_than_days * SECONDS_A_DAY,
        names=names,
        leftovers_only=leftovers,
    )
    target.print(
        f"removed {cleared.kernels} kernel(s) and {cleared.leftovers} leftover(s), "
        f"{format_bytes(cleared.size_bytes)}"
    )
    for name in cleared.busy:
        target.print(f"kept {name}: a process is building it", markup=False, soft_wrap=True)
