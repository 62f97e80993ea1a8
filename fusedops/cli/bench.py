"""``fusedops bench``: measurements that write a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusedops.cli.options import path, whole
from fusedops.cli.output import console, print_table
from fusedops.cli.usage import help_when_alone
from serving_demo.files import require_writable_target, written_line

__all__ = ["app"]

EXIT_FAILED = 1

app = typer.Typer(
    help="Measurements that write a report.",
    callback=help_when_alone,
    invoke_without_command=True,
)


@app.command()
def host(
    json_path: Annotated[
        Path | None, path("--json", "Also write the figures to this file", default="no file")
    ] = None,
    rounds: Annotated[int, whole("--rounds", "Samples of each call", minimum=1)] = 25,
    calls: Annotated[int, whole("--calls", "Calls in each sample", minimum=1)] = 300,
) -> None:
    """Microseconds that a small call takes on the CPU; exit code 1 where a result is wrong."""
    from fusedops.bench.host import K, N, measure_host, target_of, write_host
    from fusedops.bench.measurement import Measurement

    if json_path is not None:
        require_writable_target(json_path)
    rows = measure_host(rounds, calls)
    target = target_of(rows)
    cells = []
    for row in rows:
        timed = row.outcome
        times = (
            (f"{min(timed.samples):.2f}", f"{timed.median_us:.2f}")
            if isinstance(timed, Measurement)
            else ("-", timed.reason)
        )
        cells.append((row.call, str(row.m), row.dtype, *times))
    out = console()
    columns = ("call", "M", "dtype", "min", "median")
    print_table(out, f"Microseconds a call on the CPU, N={N}, K={K}", columns, cells)
    verdict = "met" if target["ok"] else "missed"
    wanted = "target: {call}, M={m}, {dtype}, under {limit_us:g} us".format_map(target)
    out.print(f"{wanted}: {verdict}", soft_wrap=True)
    if json_path is not None:
        write_host(json_path, rows, target)
        out.print(written_line(json_path), markup=False, soft_wrap=True)
    if not all(isinstance(row.outcome, Measurement) for row in rows):
        raise typer.Exit(EXIT_FAILED)
