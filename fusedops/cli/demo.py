"""``fusedops demo``: a real model answers prompts through fusedops (see ``serving_demo``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fusedops.errors import UnsupportedError

__all__ = ["demo"]


def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeat it to decode several at once.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens for each prompt.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A GGUF file or a Hugging Face folder; default: SmolLM2-135M-Instruct."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 decodes greedily.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    compare: Annotated[
        bool | None,
        typer.Option("--compare/--no-compare", help="Run plain transformers on the same prompts."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Decode prompts with a real model, and show tokens/s, ms a step and GB/s."""
    given: dict[str, Any] = {
        "prompts": tuple(prompt) if prompt else None,
        "max_new_tokens": max_new_tokens,
        "model": model,
        "device": device,
        "dtype": dtype,
        "temperature": temperature,
        "seed": seed,
        "compare": compare,
        "json_path": json_path,
    }
    try:
        from serving_demo.options import DemoOptions
        from serving_demo.run import run_demo

        run_demo(DemoOptions(**{name: value for name, value in given.items() if value is not None}))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("fusedops", "serving_demo"):
            raise
        raise UnsupportedError(
            f"the demo needs the Python package {error.name!r}, which is not installed; "
            "install fusedops with its extra `demo`, or run `make demo` in a checkout"
        ) from error
