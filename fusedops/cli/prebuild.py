"""``fusedops prebuild``: compiles a model's kernels on a machine that need not have a GPU."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from fusedops.cli.options import choice, path, whole
from fusedops.cli.output import DTYPE_WORDS, console, format_bytes
from fusedops.cli.tune import compile_all
from fusedops.config import DECODE_BUCKETS
from fusedops.errors import ConfigError
from fusedops.jit.cache import total_bytes
from fusedops.jit.dsl import require_compiler
from fusedops.jit.location import OVERLAY_VARIABLE, CacheSettings, make_dir
from fusedops.jit.prebuild import KernelPool, Work
from serving_demo.shapes import SHAPES

if TYPE_CHECKING:
    from fusedops.bench.precompile import Target
    from fusedops.jit.nvrtc import CudaProgram
    from fusedops.problem import GemmProblem
    from serving_demo.config import ModelConfig

__all__ = ["prebuild"]

EXIT_FAILED = 1
READABLE_FOR_ALL = 0o755
ARCHS = ("sm_90a",)
DTYPES = tuple(
    word for word, dtype in DTYPE_WORDS.items() if dtype in (torch.bfloat16, torch.float16)
)

_EVERY_M = 64
_BLOCK = 32
"""Beyond 64 rows the model's times, and the M that measured choices are filed under, change behind
a padded M of the decode kernels (``DECODE_BUCKETS``) and behind multiples of 32 only, but for the
bytes of x and of the result, which rise evenly between them."""


def model_config(model: str) -> ModelConfig:
    """The shape of a model that is given by name, or by a folder with its ``config.json``.

    Raises:
        ConfigError: there is neither such a name nor such a folder.
        LoadError: the file cannot be read, or describes no model of this family.
    """
    from serving_demo.config import config_from_hf
    from serving_demo.files import read_json

    if model in SHAPES:
        return SHAPES[model].config
    file = Path(model) / "config.json"
    if not file.is_file():
        state = f"the folder {model} has no config.json" if Path(model).is_dir() else "no folder"
        raise ConfigError(
            f"prebuild {model}: {state}; accepted are a folder with a config.json on this machine "
            f"(nothing is downloaded), and the names {', '.join(SHAPES)}."
        )
    return config_from_hf(read_json(file), str(file))


def require_folder_to_fill(folder: Path) -> None:
    """Raise ConfigError unless kernels can be put into ``folder``, there already or to be made."""
    other = "name another folder with --out"
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {folder}: {nearest} is a file; accepted is a folder, so {other}.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: {nearest} is not writable; {other}.")
    if nearest != folder:
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"--out {folder}: the folder belongs to uid {status.st_uid}; accepted is one of uid "
            f"{os.geteuid()}, whose kernels are yours; {other}."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"--out {folder}: the folder has mode {stat.S_IMODE(status.st_mode):04o}, so others "
            f"can write it; run `chmod go-w {folder}`, or {other}."
        )


def make_folder(folder: Path) -> None:
    """Make the folder as the store would; one line here, instead of one for every kernel.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        make_dir(folder.absolute(), READABLE_FOR_ALL)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: the folder cannot be made ({error.strerror or error}); name another "
            "one with --out."
        ) from None


def rows_to_ask(most: int) -> list[int]:
    """Rows at which the choice of a tiling may change, up to ``most``."""
    ends = {*DECODE_BUCKETS, *range(_BLOCK, most + _BLOCK, _BLOCK)}
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


def itself(program: CudaProgram) -> CudaProgram:
    """Work that has been done: the program."""
    return program


def prebuild(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"A folder with a config.json, or a shape: {', '.join(SHAPES)}."
        ),
    ],
    out: Annotated[
        Path, path("--out", f"The folder to fill, new or existing, for {OVERLAY_VARIABLE}")
    ],
    arch: Annotated[str, choice("--arch", "Architecture to compile for", ARCHS)] = ARCHS[0],
    dtype: Annotated[str, choice("--dtype", "Dtype of activations and weights", DTYPES)] = "bf16",
    rows: Annotated[int, whole("--rows", "Most tokens of one prefill", minimum=1)] = 8192,
    workers: Annotated[
        int | None,
        whole("--workers", "Processes that compile", minimum=1, default="one a core, at most 32"),
    ] = None,
) -> None:
    """Compile the kernels that a model needs into a folder; needs no GPU.

    On the machine with the GPU, FUSEDOPS_OVERLAY=DIR has them used without compiling.
    """
    from fusedops.bench.cuda_programs import model_programs
    from fusedops.bench.precompile import H200, program_of
    from fusedops.providers.cuda_plan import Gpu

    config = model_config(model)
    require_folder_to_fill(out)
    require_compiler()
    make_folder(out)
    target = console()
    with KernelPool(arch, CacheSettings(out.absolute()), shared=True, workers=workers) as pool:
        problems = model_problems(config, H200, rows, DTYPE_WORDS[dtype])
        programs = model_programs(config, DTYPE_WORDS[dtype], rows, Gpu(arch, H200.sm_count))
        wanted: list[Work] = [functools.partial(program_of, problem) for problem in problems]
        wanted += [functools.partial(itself, program) for program in programs]
        works = {pool.submit(work): work for work in wanted}
        failed = compile_all(pool, works, target)
    size = format_bytes(total_bytes(out.absolute()))
    target.print(f"use them with {OVERLAY_VARIABLE}={out.absolute()}", markup=False, soft_wrap=True)
    target.print(f"folder written: {out} ({size})", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(EXIT_FAILED)
