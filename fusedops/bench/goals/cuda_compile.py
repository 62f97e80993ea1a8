"""What the first call of each file of csrc waits for: NVRTC, into a folder that holds nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fusedops.bench.cuda_programs import model_programs
from fusedops.bench.goal_run import GoalRun
from fusedops.bench.goals.cuda_rows import MINE, bounded
from fusedops.bench.measurement import Failed, Outcome, summarize
from fusedops.bench.products import MODELS
from fusedops.errors import FusedOpsError
from fusedops.jit.location import CacheSettings
from fusedops.jit.nvrtc import CudaProgram, compile_program, program_key
from fusedops.jit.store import Store
from fusedops.providers.cuda_activation import plan_act_and_mul
from fusedops.providers.cuda_copy import UNROLLS
from fusedops.providers.cuda_histogram import plan_bincount, plan_expert_histogram
from fusedops.providers.cuda_plan import Gpu, Launch, View
from fusedops.providers.cuda_quantize import plan_quantize
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_sampling import plan_top_k
from fusedops.providers.cuda_transpose import plan_transpose
from fusedops.providers.cuda_transpose_quantize import plan_transpose_cast, plan_transpose_quantize

__all__ = ["COLD_LIMIT_US", "cold_outcomes", "cold_programs"]

COLD_LIMIT_US = 1.5e6
"""What the first call of a kernel may spend in the compiler."""

_HEAD_DIM = 128
_MODEL = "llama3-8b"


@dataclass(frozen=True)
class _Sizes:
    """``ModelSizes`` of a model of ``MODELS``."""

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    activation: str


def _sizes(name: str) -> _Sizes:
    shape = MODELS[name]
    heads, kv_heads = shape.query // _HEAD_DIM, shape.kv // _HEAD_DIM
    return _Sizes(
        *(shape.hidden, heads, kv_heads, _HEAD_DIM),
        *(shape.intermediate, shape.vocabulary, "silu"),
    )


def _view(*shape: int, dtype: torch.dtype = torch.float32) -> View:
    return View(shape, torch.empty(shape, device="meta").stride(), dtype)


def _launches(gpu: Gpu) -> Iterable[Launch]:
    """Of the kernels that goals measure and no model of ``model_programs`` takes."""
    for rows, columns in ((8192, 8192), (8191, 8193), (9999, 3)):
        yield from plan_transpose(_view(rows, columns), gpu).launches
    for op, shape, dim in (
        ("sum", (2**28,), None),
        ("sum", (16384, 16384), (0,)),
        ("logsumexp", (16384, 16384), (1,)),
        ("argmax", (64, 128256), (1,)),
    ):
        yield from plan_reduce(_view(*shape), gpu, op, dim, False).launches
    x = _view(16384, 4096, dtype=torch.bfloat16)
    for granularity in ("token", "block128", "tensor"):
        yield from plan_quantize((x, None, None), gpu, "e4m3", granularity).launches
    for granularity in ("token", "block128"):
        yield from plan_transpose_quantize((x, None, None), gpu, "e4m3", granularity).launches
    yield from plan_transpose_cast((x, None, None), gpu, torch.float32).launches
    yield from plan_act_and_mul((x, None, None), gpu, "silu", "e4m3", "block128").launches
    for bins in (256, 65536, 300_000):
        ids = _view(2**26, dtype=torch.int32)
        yield from plan_bincount((ids,), gpu, bins).launches
    for count in (64, 2**20):
        ids = _view(count, dtype=torch.int32)
        yield from plan_expert_histogram((ids,), gpu, 64).launches
    yield from plan_top_k((_view(64, 128256),), gpu, 50).launches


def cold_programs(gpu: Gpu) -> list[CudaProgram]:
    """At least one program of each file of csrc but the probe, each once."""
    found = model_programs(_sizes(_MODEL), torch.bfloat16, gpu.sms, gpu)
    found += [launch.program for launch in _launches(gpu)]
    found.append(CudaProgram("copy.cu", (f"fusedops::copy<{UNROLLS[0]}>",)))
    return list(dict.fromkeys(found))


def _by_file(programs: Sequence[CudaProgram]) -> Mapping[str, list[CudaProgram]]:
    files: dict[str, list[CudaProgram]] = {}
    for program in programs:
        files.setdefault(program.file, []).append(program)
    return files


def cold_outcomes(
    run: GoalRun, gpu: Gpu, programs: Sequence[CudaProgram] | None = None
) -> dict[str, Outcome]:
    """Microseconds that each file's kernels take to compile, one kernel a program.

    The samples of a file are its kernels. Its slowest one has the bound ``COLD_LIMIT_US``. What was
    compiled counts as what the provider ran.

    Args:
        run: the row's.
        gpu: what to compile for.
        programs: by default ``cold_programs(gpu)``.
    """
    files = _by_file(cold_programs(gpu) if programs is None else programs)
    with tempfile.TemporaryDirectory(prefix="fusedops-cold-") as folder:
        store = Store(CacheSettings(Path(folder)))
        return {
            f"{MINE} {file}": _cold_file(run, gpu, store, kernels)
            for file, kernels in files.items()
        }


def _cold_file(run: GoalRun, gpu: Gpu, store: Store, programs: Sequence[CudaProgram]) -> Outcome:
    samples_us: dict[str, float] = {}
    for program in programs:
        start = time.perf_counter()
        try:
            store.ensure(
                program_key(program, gpu.arch), partial(compile_program, program, gpu.arch)
            )
        except (FusedOpsError, OSError) as error:
            return Failed(f"{program.spec()}: {type(error).__name__}: {error}")
        samples_us[program.spec()] = (time.perf_counter() - start) * 1e6
        run.ran_elsewhere("compile", 1)
    slowest = max(samples_us, key=lambda name: samples_us[name])
    notes = [f"slowest {slowest}: {samples_us[slowest] / 1e6:.2f} s"]
    row = summarize(list(samples_us.values()), mode="compile", launches=1, hot=False, notes=notes)
    return bounded(row, COLD_LIMIT_US, samples_us[slowest])
