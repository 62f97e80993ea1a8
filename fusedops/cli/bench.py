"""``fusedops bench``: measurements that write a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusedops.cli.output import console, print_table
from serving_demo.files import require_writable_target

__all__ = ["app"]

EXIT_FAILED = 1

app = typer.Typer(help="Measurements that write a report.", no_args_is_help=True)


@app.command()
def host(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each call.")] = 25,
    calls: Annotated[int, typer.Option(min=1, help="Calls in each sample.")] = 300,
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
    if not all(isinstance(row.outcome, Measurement) for row in rows):
        raise typer.Exit(EXIT_FAILED)
