"""``fusedops demo``: a model runs through fusedops (see ``serving_demo``).

Two modes share the command: a real model answers prompts, or (``--shape``) the decode step of a
real model's shape is measured with random weights on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fusedops.errors import ConfigError, UnsupportedError
from serving_demo.shapes import SHAPES

__all__ = ["demo"]

EXIT_FAILED = 1
_MODEL, _SHAPE = "Real model", "Random weights of a real shape (--shape)"


def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt; repeat it for several at once.", rich_help_panel=_MODEL),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens for each prompt.", rich_help_panel=_MODEL)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file or a Hugging Face folder; default: SmolLM2-135M-Instruct.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_MODEL)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 decodes greedily.", rich_help_panel=_MODEL)
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Run plain transformers on the same prompts.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Measure this shape's decode step: {', '.join(SHAPES)}.", rich_help_panel=_SHAPE
        ),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]", help="Requests a step; repeatable.", rich_help_panel=_SHAPE
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Length of each request.", rich_help_panel=_SHAPE)
    ] = None,
    provider: Annotated[
        str | None, typer.Option(help="Who runs the products.", rich_help_panel=_SHAPE)
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="auto, flashinfer or torch.", rich_help_panel=_SHAPE)
    ] = None,
    tensor_cores: Annotated[
        bool | None,
        typer.Option(
            "--tensor-cores",
            help="FlashInfer's tensor-core decode kernel.",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    replays: Annotated[
        int | None, typer.Option(help="Timed steps a row.", rich_help_panel=_SHAPE)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling, or of the weights.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Decode prompts with a real model, and show tokens/s, ms a step and GB/s.

    With --shape: measure a decode step on a GPU; exit code 1 where a contender failed its check.
    """
    of_model: dict[str, Any] = {
        "prompts": tuple(prompt) if prompt else None,
        "max_new_tokens": max_new_tokens,
        "model": model,
        "device": device,
        "dtype": dtype,
        "temperature": temperature,
        "compare": compare,
    }
    of_shape: dict[str, Any] = {
        "batches": _sizes(batch) if batch else None,
        "context": context,
        "provider": provider,
        "attention": attention,
        "tensor_cores": tensor_cores,
        "replays": replays,
    }
    _refuse_other_mode(shape, of_model if shape is not None else of_shape)
    of_both = {"seed": seed, "json_path": json_path}
    console = Console(quiet=quiet)
    if shape is not None:
        from serving_demo.step_bench import ShapeOptions, run_shapes

        rows = run_shapes(ShapeOptions(shape, **_given(of_shape | of_both)), console)
        if any(row.ms is None for row in rows):
            raise typer.Exit(EXIT_FAILED)
        return
    try:
        from serving_demo.options import DemoOptions
        from serving_demo.run import run_demo

        run_demo(DemoOptions(**_given(of_model | of_both)), console)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("fusedops", "serving_demo"):
            raise
        raise UnsupportedError(
            f"the demo needs the Python package {error.name!r}, which is not installed; "
            "install fusedops with its extra `demo`, or run `make demo` in a checkout"
        ) from error


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave; the others keep the demo's defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _sizes(texts: list[str]) -> tuple[int, ...]:
    """The numbers of ``--batch 1,8 --batch 32``."""
    try:
        return tuple(int(size) for text in texts for size in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--batch {' '.join(texts)}: accepted are whole numbers, e.g. --batch 1,8 or "
            "--batch 1 --batch 8."
        ) from None


_FLAGS = {"prompts": "--prompt", "batches": "--batch", "compare": "--compare/--no-compare"}
"""Options whose name differs from that of their value."""


def _refuse_other_mode(shape: str | None, foreign: dict[str, Any]) -> None:
    """Raise ConfigError where an option of the mode that does not run is given."""
    flags = [_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in _given(foreign)]
    if not flags:
        return
    if shape is None:
        raise ConfigError(f"{', '.join(flags)}: accepted with --shape only; name a shape.")
    raise ConfigError(
        f"{', '.join(flags)}: not accepted with --shape, which measures random weights in bfloat16 "
        "on the current GPU; leave one of them out."
    )
