"""Kernels of known problems compiled in parallel processes, before the first of them is timed.

Compiling a kernel takes one core for seconds and needs no GPU, so it may also run on another
machine whose cache folder is then taken along::

    python -m fusedops.bench.precompile 'gemm.small_m.*'    # kernels of goals
    python -m fusedops.bench.precompile --model llama3-8b --cores 8

Only GEMMs of the provider ``cutlass`` are covered.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field

import torch

from fusedops.bench.products import Layer
from fusedops.epilogue.chain import Epilogue
from fusedops.errors import ConfigError, FusedOpsError
from fusedops.jit.dsl import DslProgram, compile_dsl, dsl_key
from fusedops.jit.launch import device_arch
from fusedops.jit.store import default_store
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass import choose_candidate
from fusedops.providers.cutlass_decode import DecodeCandidate, decode_program
from fusedops.providers.cutlass_prefill import PrefillCandidate, prefill_program
from fusedops.weight import Dense

__all__ = [
    "H200",
    "Precompiled",
    "Target",
    "layer_problem",
    "main",
    "missing_programs",
    "precompile",
    "program_of",
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
        arch=target.arch,
        gpu=target.gpu,
    )


def program_of(problem: GemmProblem) -> DslProgram:
    """The program that the provider ``cutlass`` compiles when it first serves ``problem``.

    Raises:
        ConfigError: no tiling is legal, or the family has no rule here.
    """
    candidate = choose_candidate(problem)
    if isinstance(candidate, DecodeCandidate):
        return decode_program(problem, candidate.tile)
    if isinstance(candidate, PrefillCandidate):
        # What torch allocates starts aligned, so its columns alone decide.
        spec = problem.spec
        whole = spec.n % 8 == 0 and spec.out_n % 8 == 0
        aligned = whole and spec.out_n * spec.out_dtype.itemsize % 16 == 0
        return prefill_program(problem, candidate.tile, aligned)
    raise ConfigError(
        f"precompile: no rule for {type(candidate).__name__}; add its program to program_of()."
    )


def missing_programs(problems: Iterable[GemmProblem]) -> tuple[list[GemmProblem], int]:
    """One problem for each kernel that the store lacks, and the number of kernels that it has.

    Problems that no tiling fits are left out: whoever measures them learns the reason.
    """
    wanted: dict[str, GemmProblem] = {}
    present: set[str] = set()
    store = default_store()
    for problem in problems:
        try:
            key = dsl_key(program_of(problem), problem.arch)
        except ConfigError:
            continue
        if key.digest in wanted or key.digest in present:
            continue
        if not key.memory_only and store.find(key) is not None:
            present.add(key.digest)
        else:
            wanted[key.digest] = problem
    return list(wanted.values()), len(present)


def _compile(problem: GemmProblem) -> str:
    """Compile one kernel into the store; an empty string, or the reason why it was not."""
    try:
        program = program_of(problem)
        default_store().ensure(
            dsl_key(program, problem.arch),
            lambda folder: compile_dsl(program, problem.arch, folder),
        )
    except FusedOpsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _processes(workers: int) -> Executor:
    # Forked children would inherit the parent's CUDA context, which they cannot use.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def precompile(
    problems: Iterable[GemmProblem],
    workers: int | None = None,
    *,
    make_pool: Callable[[int], Executor] = _processes,
    compile_one: Callable[[GemmProblem], str] = _compile,
) -> Precompiled:
    """Compile into the store what ``problems`` need and it lacks; the GPU is not touched.

    Args:
        problems: what will be asked; several may share a kernel.
        workers: processes, by default one a core. Each imports torch and the DSL first (seconds).
        make_pool: makes the pool of workers (tests).
        compile_one: replaces the compilation (tests).

    A kernel that fails is named in the result; the others are compiled all the same.
    """
    start = time.monotonic()
    wanted, present = missing_programs(problems)
    failed: dict[str, str] = {}
    if wanted:
        with make_pool(min(workers or _cores(), len(wanted))) as pool:
            reasons = list(pool.map(compile_one, wanted))
        for problem, reason in zip(wanted, reasons, strict=True):
            if reason:
                failed[f"{problem.spec} m{problem.m}"] = reason
    return Precompiled(
        len(wanted) - len(failed), present, failed, round(time.monotonic() - start, 3)
    )


def _layers(options: argparse.Namespace) -> list[Layer]:
    """The layers that the command line names."""
    from fusedops.bench.goals.gemm_layers import GOAL_ROWS, model_layers

    found: list[Layer] = []
    for model in options.model:
        found += model_layers(model)
    for pattern in options.goals:
        names = fnmatch.filter(GOAL_ROWS, pattern)
        if not names:
            raise ConfigError(
                f"precompile: no goal's id matches {pattern!r}; accepted are patterns of "
                f"{', '.join(GOAL_ROWS)}."
            )
        found += [row.layer for name in names for row in GOAL_ROWS[name]()]
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
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: cores)")
    parser.add_argument("--cores", type=int, metavar="N", help="run on the first N cores only")
    parser.add_argument("--gpu", default=H200.gpu, help="device name (default: %(default)s)")
    parser.add_argument("--arch", default=H200.arch, help="(default: %(default)s)")
    parser.add_argument("--sm-count", type=int, default=H200.sm_count, help="(%(default)s)")
    options = parser.parse_args(arguments)
    try:
        layers = _layers(options)
        if options.cores is not None:
            if not 1 <= options.cores <= _cores():
                raise ConfigError(
                    f"precompile: --cores {options.cores}; accepted: 1 to {_cores()}."
                )
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        target = Target(options.gpu, options.arch, options.sm_count)
        done = precompile([layer_problem(layer, target) for layer in layers], options.workers)
    except FusedOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(done)))
    return 1 if done.failed else 0


if __name__ == "__main__":
    sys.exit(main())
