"""``fusedops demo``: a model runs through fusedops (see ``serving_demo``).

Two modes share the command: a real model answers prompts, or (``--shape``) the decode step of a
real model's shape is measured with random weights on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fusedops.cli.options import choice, flag, number, path, text, whole, whole_numbers
from fusedops.cli.output import console
from fusedops.errors import ConfigError, UnsupportedError
from fusedops.providers.gemm import GEMM_PROVIDERS
from serving_demo.options import (
    ATTENTIONS,
    DEFAULT_MODEL,
    DEVICES,
    DTYPES,
    DemoOptions,
    ShapeOptions,
)
from serving_demo.shapes import SHAPES

__all__ = ["demo"]

EXIT_FAILED = 1
_MODEL, _SHAPE = "Real model", "Random weights of a real shape (--shape)"
_BATCHES = ",".join(map(str, ShapeOptions.batches))


def demo(
    prompt: Annotated[
        list[str] | None,
        text(
            "--prompt",
            "A prompt, any text; repeat it for several at once, up to 64",
            default=f"{len(DemoOptions.prompts)} of the demo's own",
            panel=_MODEL,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        whole(
            "--max-new-tokens",
            "Tokens for each prompt",
            minimum=1,
            default=str(DemoOptions.max_new_tokens),
            panel=_MODEL,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        path(
            "--model",
            "A GGUF file, or a folder as Hugging Face lays it out, on this machine",
            default=DEFAULT_MODEL,
            panel=_MODEL,
        ),
    ] = None,
    device: Annotated[
        str | None,
        choice("--device", "Where it runs", DEVICES, default=DemoOptions.device, panel=_MODEL),
    ] = None,
    dtype: Annotated[
        str | None,
        choice(
            "--dtype",
            "Of weights, activations and cache",
            DTYPES,
            default=f"{DemoOptions.dtype}: float32 on the CPU, bfloat16 on a GPU",
            panel=_MODEL,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        number(
            "--temperature",
            "Of the sampling, where 0 decodes greedily",
            minimum=0,
            default=f"{DemoOptions.temperature:g}",
            panel=_MODEL,
        ),
    ] = None,
    compare: Annotated[
        bool | None,
        flag(
            "--compare/--no-compare",
            "Run plain transformers on the same prompts, or not",
            default="compare",
            panel=_MODEL,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        choice("--shape", "Measure this shape's decode step", SHAPES, default="none", panel=_SHAPE),
    ] = None,
    batch: Annotated[
        list[str] | None,
        text(
            "--batch",
            "Requests a step: whole numbers from 1; repeatable",
            "N[,N...]",
            default=_BATCHES,
            panel=_SHAPE,
        ),
    ] = None,
    context: Annotated[
        int | None,
        whole(
            "--context",
            "Length of each request",
            minimum=1,
            default=str(ShapeOptions.context),
            panel=_SHAPE,
        ),
    ] = None,
    provider: Annotated[
        str | None,
        choice(
            "--provider",
            "Who runs the products",
            GEMM_PROVIDERS,
            default=ShapeOptions.provider,
            panel=_SHAPE,
        ),
    ] = None,
    attention: Annotated[
        str | None,
        choice(
            "--attention",
            "Who runs attention",
            ATTENTIONS,
            default=ShapeOptions.attention,
            panel=_SHAPE,
        ),
    ] = None,
    tensor_cores: Annotated[
        bool | None,
        flag(
            "--tensor-cores",
            "FlashInfer's tensor-core decode kernel",
            default="its CUDA-core one",
            panel=_SHAPE,
        ),
    ] = None,
    replays: Annotated[
        int | None,
        whole(
            "--replays",
            "Timed steps a row",
            minimum=1,
            default=str(ShapeOptions.replays),
            panel=_SHAPE,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        whole("--seed", "Seed of the sampling, or of the weights", default=str(DemoOptions.seed)),
    ] = None,
    json_path: Annotated[
        Path | None, path("--json", "Also write the figures to this file", default="no file")
    ] = None,
    quiet: Annotated[bool, flag("--quiet", "Print errors only")] = False,
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
        "batches": _sizes(batch or ()),
        "context": context,
        "provider": provider,
        "attention": attention,
        "tensor_cores": tensor_cores,
        "replays": replays,
    }
    _refuse_other_mode(shape, of_model if shape is not None else of_shape)
    of_both = {"seed": seed, "json_path": json_path}
    target = console(quiet=quiet)
    if shape is not None:
        from serving_demo.step_bench import run_shapes

        rows = run_shapes(ShapeOptions(shape, **_given(of_shape | of_both)), target)
        if any(row.ms is None for row in rows):
            raise typer.Exit(EXIT_FAILED)
        return
    try:
        from serving_demo.run import run_demo

        run_demo(DemoOptions(**_given(of_model | of_both)), target)
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


def _sizes(texts: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers of ``--batch 1,8 --batch 32``; None where it was not given."""
    return tuple(size for text in texts for size in whole_numbers("--batch", text)) or None


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
