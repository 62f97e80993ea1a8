"""``fusedops prebuild``: compiles a model's GEMM kernels on a machine that need not have a GPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from fusedops.cli.output import console, format_bytes, parse_dtype
from fusedops.cli.tune import compile_all
from fusedops.errors import ConfigError, LoadError
from fusedops.jit.cache import total_bytes
from fusedops.jit.dsl import require_compiler
from fusedops.jit.location import OVERLAY_VARIABLE, CacheSettings
from fusedops.jit.prebuild import KernelPool

if TYPE_CHECKING:
    from fusedops.bench.precompile import Target
    from fusedops.problem import GemmProblem
    from serving_demo.config import ModelConfig

__all__ = ["prebuild"]

EXIT_FAILED = 1
DTYPES = (torch.bfloat16, torch.float16)

_EVERY_M = 64
_BLOCK = 32
"""Beyond 64 rows the model's times and the M that measured choices are filed under change at
multiples of 32 only, but for the bytes of x and of the result, which rise evenly between them."""


def model_config(model: str) -> ModelConfig:
    """The shape of a model that is given by name, or by a folder with its ``config.json``.

    Raises:
        ConfigError: there is neither such a name nor such a folder.
        LoadError: the file cannot be read, or describes no model of this family.
    """
    from serving_demo.config import config_from_hf
    from serving_demo.shapes import SHAPES

    if model in SHAPES:
        return SHAPES[model].config
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"prebuild {model}: neither a folder with a config.json nor one of {', '.join(SHAPES)}."
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise LoadError(f"{path}: holds a {type(values).__name__}; expected a JSON object.")
    return config_from_hf(values, str(path))


def rows_to_ask(most: int) -> list[int]:
    """Rows at which the choice of a tiling may change, up to ``most``."""
    ends = range(_EVERY_M, most + _BLOCK, _BLOCK)
    wanted = {*range(1, _EVERY_M + 1), *ends, *(end + 1 for end in ends), most}
    return sorted(m for m in wanted if m <= most)


def model_problems(
    config: ModelConfig, target: Target, most: int, dtype: torch.dtype
) -> Iterator[GemmProblem]:
    """Every product of a model at every number of rows where its kernel may be another one."""
    from fusedops.bench.precompile import layer_problem
    from fusedops.bench.tune_problems import decoder_layers

    for m in rows_to_ask(most):
        for layer in decoder_layers(config, m, dtype).values():
            yield layer_problem(layer, target)


def prebuild(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, or a shape's name, e.g. llama3-8b.")
    ],
    out: Annotated[Path, typer.Option(help=f"The folder to fill, for {OVERLAY_VARIABLE}.")],
    arch: Annotated[str, typer.Option(help="Architecture to compile for.")] = "sm_90a",
    dtype: Annotated[str, typer.Option(help="bf16 or f16.")] = "bf16",
    rows: Annotated[int, typer.Option(min=1, help="Most tokens of one prefill.")] = 8192,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile; default: one a core.")
    ] = None,
) -> None:
    """Compile the GEMM kernels that a model needs into a folder; needs no GPU.

    On the machine with the GPU, FUSEDOPS_OVERLAY=DIR has them used without compiling.
    """
    from fusedops.bench.precompile import H200, program_of

    if arch != H200.arch:
        raise ConfigError(f"--arch {arch}: accepted is {H200.arch}.")
    x_dtype = parse_dtype("--dtype", dtype)
    if x_dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: the kernels multiply bf16 and f16.")
    config = model_config(model)
    require_compiler()
    target = console()
    with KernelPool(arch, CacheSettings(out.absolute()), shared=True, workers=workers) as pool:
        works = {
            pool.submit(work): work
            for work in (
                functools.partial(program_of, problem)
                for problem in model_problems(config, H200, rows, x_dtype)
            )
        }
        failed = compile_all(pool, works, target)
    size = format_bytes(total_bytes(out.absolute()))
    target.print(
        f"{size} in {out}; use it with {OVERLAY_VARIABLE}={out.absolute()}",
        markup=False,
        soft_wrap=True,
    )
    if failed:
        raise typer.Exit(EXIT_FAILED)
