"""``fusedops tune``: measures tilings on this GPU and keeps the fastest of each product."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fusedops.cli.options import choice, flag, number, path, text, whole, whole_numbers
from fusedops.cli.output import console, print_table
from fusedops.config.files import tuned_path
from fusedops.errors import ConfigError, DeviceError
from fusedops.jit.dsl import require_compiler
from fusedops.jit.location import CacheSettings
from fusedops.jit.prebuild import KernelPool
from fusedops.quant import SCHEMES, as_scheme
from serving_demo.files import require_writable_target, written_line
from serving_demo.shapes import SHAPES

if TYPE_CHECKING:
    from fusedops.bench.tune_problems import TuneProblem

__all__ = ["compile_all", "progress_bar", "tune"]

DEFAULT_ROWS = "1,16,32,64,128,256,512,1024,2048,4096,8192"
EXIT_FAILED = 1


def parse_rows(text: str) -> list[int]:
    """The row counts of a list like ``16,64``.

    Raises:
        ConfigError: something in it is no positive integer.
    """
    return whole_numbers("--m", text)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Progress]:
    """A bar on stderr with one task; nothing on anything but a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    target = console(stderr=True)
    with Progress(*columns, console=target, disable=not target.is_interactive) as bar:
        bar.add_task(what, total=total)
        yield bar


def compile_all(pool: KernelPool, works: Mapping[str, Any], target: Console) -> int:
    """Wait for submitted kernels behind a bar, tell what became of them, return how many failed.

    Args:
        pool: compiles them.
        works: name in the pool -> what was submitted.
        target: where the summary goes.
    """
    started = time.monotonic()
    with progress_bar("compiling", len(works)) as bar:
        task = bar.task_ids[0]
        for name in works:
            pool.when_done(name, lambda: bar.advance(task))
        results = [pool.result(name, work) for name, work in works.items()]
    counts = dict.fromkeys(("compiled", "disk", "overlay", "failed"), 0)
    for result in results:
        counts[result.origin] += 1
    # What keeps one kernel from being made mostly keeps all of them, and is worth one line.
    for reason, count in Counter(result.reason for result in results if not result.ok).items():
        target.print(f"{count} kernel(s): {reason}", markup=False, soft_wrap=True)
    target.print(
        f"{len(results)} kernel(s) in {time.monotonic() - started:.1f} s: "
        f"{counts['compiled']} compiled, {counts['disk'] + counts['overlay']} there already, "
        f"{counts['failed']} failed"
    )
    return counts["failed"]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _print_choices(
    target: Console, rows: Sequence[tuple[TuneProblem, Mapping[str, Any] | None]]
) -> None:
    """The table that a run ends with: one line a problem."""

    def line(problem: TuneProblem, row: Mapping[str, Any] | None) -> tuple[str, ...]:
        if row is None:
            return (problem.label, "not reached", *([""] * 6))
        model, second = row["model_choice"], row["runner_up"]
        return (
            problem.label,
            row["config"] or "none ran right",
            _us(row.get("us")),
            f"{second['config']} {_us(second['us'])}" if second else "-",
            f"{model['config']} {_us(model['us'])}",
            _us(row["cublas_us"]),
            _us(row["cublaslt_us"]),
            ", ".join(row["failed"]) or "-",
        )

    columns = ("product", "choice", "us", "runner-up", "by model", "torch", "cuBLASLt", "failed")
    print_table(target, "Choices", columns, [line(problem, row) for problem, row in rows])


def tune(
    model: Annotated[
        list[str] | None,
        choice(
            "--model", "A model's products, by its shape", SHAPES, default="none", repeatable=True
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        text(
            "--shape",
            "One product, with KIND bias, residual or gate; N and K are multiples of 8; repeatable",
            "N,K[,KIND]",
            default="none",
        ),
    ] = None,
    m: Annotated[
        str,
        text(
            "--m",
            "Rows of the activations: whole numbers from 1",
            "M[,M...]",
            default=DEFAULT_ROWS.replace(",", ", "),
        ),
    ] = DEFAULT_ROWS,
    scheme: Annotated[
        str | None,
        choice("--scheme", "Quantize the weights by it", SCHEMES, default="none"),
    ] = None,
    minutes: Annotated[
        float | None,
        number("--minutes", "Begin no problem after this time", minimum=0, default="no limit"),
    ] = None,
    top: Annotated[
        int,
        whole("--top", "Tilings of each kernel to try, by predicted time", minimum=1),
    ] = 6,
    out: Annotated[
        Path | None,
        path("--out", "The file for the choices", default="the one that fusedops reads"),
    ] = None,
    compile_only: Annotated[
        bool, flag("--compile-only", "Compile the candidates; needs no GPU")
    ] = False,
    workers: Annotated[
        int | None,
        whole("--workers", "Processes that compile", minimum=1, default="one a core, at most 32"),
    ] = None,
    force: Annotated[bool, flag("--force", "Measure current rows again")] = False,
) -> None:
    """Measure tilings of the GEMM kernels on this GPU and keep the fastest for each product."""
    from fusedops.bench import tune as tuning
    from fusedops.bench.environment import collect_environment
    from fusedops.bench.precompile import H200
    from fusedops.bench.tune_file import TuneFile, sources_hash
    from fusedops.bench.tune_measure import measure_on_gpu
    from fusedops.bench.tune_problems import (
        candidate_work,
        parse_shape,
        target_of,
        tune_problems,
    )

    started = time.monotonic()
    if not model and not shape:
        raise ConfigError("tune: nothing to tune; give --model NAME or --shape N,K.")
    rows_m = parse_rows(m)
    models = [(name, SHAPES[name].config) for name in model or ()]
    # What is written wrong is named before what this machine lacks.
    for one in shape or ():
        parse_shape(one, rows_m[0])
    if out is not None:
        require_writable_target(out, "--out")
    if not torch.cuda.is_available() and not compile_only:
        raise DeviceError("tune: torch sees no CUDA device; --compile-only needs none.")
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    gpu = target_of(device) if has_gpu else H200
    quantized = None if scheme is None else as_scheme(scheme)
    problems = tune_problems(models, shape or (), rows_m, gpu, quantized)
    if not problems:
        raise ConfigError(
            f"tune: no kernel multiplies weights of scheme {scheme} at --m {m}; give fewer rows."
        )
    require_compiler()
    target = console()
    with KernelPool(gpu.arch, CacheSettings.from_environment(), workers=workers) as pool:
        if compile_only:
            works = {
                kernel: candidate_work(candidate)
                for compilation in tuning.compile_candidates(problems, top, pool)
                for candidate, kernel in zip(compilation.tried, compilation.kernels, strict=True)
            }
            if compile_all(pool, works, target):
                raise typer.Exit(EXIT_FAILED)
            return
        committed = tuned_path(gpu.gpu)
        chosen = out or committed
        file = TuneFile(chosen, collect_environment(), sources_hash(), start=committed)
        deadline = None if minutes is None else started + 60 * minutes
        with progress_bar("tuning", len(problems)) as bar:
            task = bar.task_ids[0]

            def show(problem: TuneProblem, row: Mapping[str, Any] | None) -> None:
                bar.update(task, advance=1, description=problem.label)
                if row is not None and not target.is_interactive:
                    line = f"{problem.label}: {row['config']} {_us(row.get('us'))} us"
                    target.print(line, markup=False, soft_wrap=True)

            done = tuning.tune(
                problems,
                file,
                measure=lambda problem, tried: measure_on_gpu(problem, tried, device),
                pool=pool,
                top=top,
                deadline=deadline,
                force=force,
                on_problem=show,
            )
    everything = {**file.failures, **file.choices}
    left = set(done.left)
    _print_choices(
        target,
        [(one, None if one.key in left else everything.get(one.key)) for one in problems],
    )
    target.print(
        f"{len(done.measured)} measured, {len(done.skipped)} current, {len(done.left)} left, in "
        f"{time.monotonic() - started:.0f} s"
    )
    if done.measured:
        target.print(written_line(chosen), markup=False, soft_wrap=True)
