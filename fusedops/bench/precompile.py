"""Kernels of known problems compiled in parallel processes, before the first of them is timed.

Compiling a kernel takes one core for seconds and needs no GPU, so it may also run on another
machine whose cache folder is then taken along::

    python -m fusedops.bench.precompile 'gemm.small_m.*'    # kernels of goals
    python -m fusedops.bench.precompile --model llama3-8b --cores 8
    python -m fusedops.bench.precompile --model llama3-8b --scheme int4

Only GEMMs of the provider ``cutlass`` are covered.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from fusedops.bench.products import Layer
from fusedops.epilogue.chain import Epilogue
from fusedops.errors import ConfigError, FusedOpsError
from fusedops.jit.dsl import DslProgram
from fusedops.jit.launch import device_arch
from fusedops.jit.location import CacheSettings
from fusedops.jit.prebuild import KernelPool
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass import choose_candidate
from fusedops.providers.cutlass_mixed import fitting_layout
from fusedops.quant import Scheme, as_scheme, empty_weight, weight_format
from fusedops.weight import Dense

__all__ = [
    "H200",
    "Precompiled",
    "Target",
    "layer_problem",
    "main",
    "precompile",
    "program_of",
    "quantized_problem",
]


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are chosen and compiled for.

    Attributes:
        gpu: torch's name of the device.
        arch: architecture to compile for.
        sm_count: its multiprocessors.
    """

    gpu: str
    arch: str
    sm_count: int

    @classmethod
    def of(cls, device: torch.device | str) -> Target:
        """The target that a CUDA device is."""
        index = torch.device(device).index or 0
        properties = torch.cuda.get_device_properties(index)
        return cls(properties.name, device_arch(index), properties.multi_processor_count)


H200 = Target("NVIDIA H200", "sm_90a", 132)


@dataclass(frozen=True)
class Precompiled:
    """What became of the kernels.

    Attributes:
        compiled: kernels that were compiled now.
        present: kernels that the store had.
        failed: what was to be compiled -> why it was not.
        wall_s: seconds that all of it took.
    """

    compiled: int
    present: int
    failed: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0


def layer_problem(layer: Layer, target: Target) -> GemmProblem:
    """The problem that ``fusedops.gemm`` meets when it serves a layer on ``target``."""
    chain = Epilogue.parse(layer.chain_text)
    spec = GemmSpec(Dense(layer.N, layer.K), chain, chain.result_dtype(layer.dtype))
    operand_dtypes = tuple(layer.dtype for _ in spec.operands)
    return GemmProblem(
        spec,
        layer.M,
        layer.dtype,
        operand_dtypes,
        device_type="cuda",
        sm_count=target.sm_count,
        aligned_bytes=layer.aligned_bytes,
        arch=target.arch,
        gpu=target.gpu,
    )


def quantized_problem(layer: Layer, scheme: Scheme, target: Target) -> GemmProblem:
    """The problem that a ``QuantLinear`` of the scheme poses on ``target`` in place of a layer.

    Its weight is laid out as kernels take it, and its result of the layer's dtype.
    """
    rows = "gate_up" if layer.gated else "plain"
    x_dtype = scheme.activation_dtype or layer.dtype
    layout = fitting_layout(weight_format(scheme, layer.N, layer.K), x_dtype) or "rows"
    made = empty_weight(scheme, layer.N, layer.K, rows=rows, layout=layout, device="meta")
    steps = (*scheme.scale_steps(), *(layer.chain_text,) * (layer.chain_text != "none"))
    spec = GemmSpec(made.format, Epilogue.parse("|".join(steps) or "none"), layer.dtype)
    dtypes = {name: scale.dtype for name, scale in made.scales.items()}
    dtypes["x_scale"] = torch.float32
    pitch_bits = 16 | layer.K * x_dtype.itemsize
    return replace(
        layer_problem(layer, target),
        spec=spec,
        x_dtype=x_dtype,
        operand_dtypes=tuple(dtypes.get(name, layer.dtype) for name in spec.operand_names),
        aligned_bytes=pitch_bits & -pitch_bits,
    )


def program_of(problem: GemmProblem) -> DslProgram:
    """The program that the provider ``cutlass`` compiles when it first serves ``problem``.

    Raises:
        ConfigError: no kernel or no tiling fits.
    """
    return choose_candidate(problem).program()


def _is_served(problem: GemmProblem) -> bool:
    try:
        choose_candidate(problem)
    except ConfigError:
        return False
    return True


def precompile(
    problems: Iterable[GemmProblem],
    arch: str,
    workers: int | None = None,
    *,
    open_pool: Callable[..., KernelPool] = KernelPool,
) -> Precompiled:
    """Compile into the store what ``problems`` need and it lacks; the GPU is not touched.

    Problems that no tiling fits are left out: whoever measures them learns the reason. A kernel
    that fails is named in the result; the others are compiled all the same.

    Args:
        problems: what will be asked; several may share a kernel.
        arch: architecture to compile for.
        workers: processes, see ``KernelPool``. Each imports torch and the DSL first (seconds).
        open_pool: replaces ``KernelPool`` (tests).

    Raises:
        ConfigError, BuildError: ``workers`` is not positive; the store's folders are not usable.
    """
    start = time.monotonic()
    counts = {"compiled": 0, "present": 0}
    failed: dict[str, str] = {}
    with open_pool(arch, CacheSettings.from_environment(), workers=workers) as pool:
        asked: dict[str, GemmProblem] = {}
        for problem in filter(_is_served, problems):
            asked.setdefault(pool.submit(partial(program_of, problem)), problem)
        for name, problem in asked.items():
            done = pool.result(name, partial(program_of, problem))
            if done.ok:
                counts["compiled" if done.origin == "compiled" else "present"] += 1
            else:
                failed[f"{problem.spec} m{problem.m}"] = done.reason
    return Precompiled(**counts, failed=failed, wall_s=round(time.monotonic() - start, 3))


def _problems(options: argparse.Namespace, target: Target) -> list[GemmProblem]:
    """The problems that the command line names; ``--scheme`` is for layers not yet quantized."""
    from fusedops.bench.goals.gemm_layers import GOAL_ROWS, model_layers
    from fusedops.bench.goals.quant_layers import QUANT_ROWS

    layers: list[Layer] = []
    found: list[GemmProblem] = []
    for model in options.model:
        layers += model_layers(model)
    for pattern in options.goals:
        names, quantized = (fnmatch.filter(rows, pattern) for rows in (GOAL_ROWS, QUANT_ROWS))
        if not names and not quantized:
            raise ConfigError(
                f"precompile: no goal's id matches {pattern!r}; accepted are patterns of "
                f"{', '.join((*GOAL_ROWS, *QUANT_ROWS))}."
            )
        layers += [row.layer for name in names for row in GOAL_ROWS[name]()]
        found += [row.made.problem(target) for name in quantized for row in QUANT_ROWS[name]()]
    problem_of = layer_problem
    if options.scheme is not None:
        problem_of = partial(quantized_problem, scheme=as_scheme(options.scheme))
    found += [problem_of(layer, target=target) for layer in layers]
    if not found:
        raise ConfigError("precompile: nothing to compile; name goals or --model NAME.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: prints one JSON line; exit status 0, 1 a kernel failed, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedops.bench.precompile",
        description="Compiles the GEMM kernels that goals or a model need into the kernel cache.",
    )
    parser.add_argument("goals", nargs="*", metavar="PATTERN", help="ids of goals, shell style")
    parser.add_argument("--model", action="append", default=[], metavar="NAME")
    parser.add_argument("--scheme", metavar="NAME", help="quantize the layers' weights by it")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: cores, at most 32)"
    )
    parser.add_argument("--cores", type=int, metavar="N", help="run on the first N cores only")
    parser.add_argument("--gpu", default=H200.gpu, help="device name (default: %(default)s)")
    parser.add_argument("--arch", default=H200.arch, help="(default: %(default)s)")
    parser.add_argument("--sm-count", type=int, default=H200.sm_count, help="(%(default)s)")
    options = parser.parse_args(arguments)
    try:
        target = Target(options.gpu, options.arch, options.sm_count)
        problems = _problems(options, target)
        if options.cores is not None:
            cores = sorted(os.sched_getaffinity(0))
            if not 1 <= options.cores <= len(cores):
                raise ConfigError(
                    f"precompile: --cores {options.cores}; accepted: 1 to {len(cores)}."
                )
            os.sched_setaffinity(0, cores[: options.cores])
        done = precompile(problems, target.arch, options.workers)
    except FusedOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(done)))
    return 1 if done.failed else 0


if __name__ == "__main__":
    sys.exit(main())
