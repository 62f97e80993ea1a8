"""What a first GEMM costs: in a new process with a filled store, and when all must be compiled.

Both are measured in processes of their own. A first result counts from ``import fusedops`` on;
torch is imported, the GPU is initialised and the inputs exist by then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from fusedops.bench.environment import repository_root
from fusedops.bench.goal_run import GoalError, GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.gemm_rows import COVERS, MINE
from fusedops.bench.measurement import Outcome, summarize
from fusedops.jit.location import CACHE_VARIABLE, OVERLAY_VARIABLE
from fusedops.jit.store import COMPILE_VARIABLE

__all__ = ["cold_outcomes", "run_process", "warm_outcomes"]

SAMPLES = 3
CORES = 8
MODEL = "llama3-8b"
TIMEOUT_S = 240

FIRST_CALL_COVERS = (
    *COVERS,
    "fusedops/*.py",
    *(
        f"fusedops/{name}"
        for name in ("config", "cutlass", "epilogue", "jit", "nn", "ops", "quant")
    ),
    "fusedops/providers",
)
"""``FIRST_CALL`` runs in another process, and ``import fusedops`` imports all of these."""

Run = Callable[[list[str], Mapping[str, str]], dict[str, Any]]
"""``run(arguments of Python, environment)``: what the process printed last, and ``wall_s``."""

FIRST_CALL = """
import json, time, torch
device = torch.device("cuda")
generator = torch.Generator(device).manual_seed(0)
x, w, residual = (
    torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    for size in ((16, 4096), (4096, 4096), (16, 4096))
)
w.mul_(4096 ** -0.5)
torch.cuda.synchronize()
start = time.perf_counter()
import fusedops
with fusedops.use_provider("cutlass", strict=True) as usage:
    out = fusedops.gemm(x, w, "residual", {"residual": residual})
torch.cuda.synchronize()
seconds = time.perf_counter() - start
wide = x.double() @ w.double().T + residual.double()
error = float((out.double() - wide).norm() / wide.norm())
print(json.dumps({"seconds": seconds, "error": error, "calls": sum(usage.calls.values())}))
"""

_ALLOWED_ERROR = 2.0**-8


def run_process(arguments: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run Python in a new process and read the JSON object in its last line.

    Raises:
        GoalError: it failed, took over ``TIMEOUT_S``, or printed no such line.
    """
    root = repository_root()
    paths = [str(root)] if root is not None else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GoalError(f"a process took over {TIMEOUT_S} s") from error
    wall_s = time.monotonic() - start
    try:
        if done.returncode:
            raise ValueError(f"exit status {done.returncode}")
        printed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise GoalError(f"a process failed ({error}): {last}") from error
    return {**printed, "wall_s": wall_s}


def warm_outcomes(run: GoalRun, processes: Run = run_process) -> dict[str, Outcome]:
    """A first call fills the store; then ``SAMPLES`` new processes may compile nothing."""
    environment = dict(os.environ)
    environment.pop(COMPILE_VARIABLE, None)
    _checked(processes(["-c", FIRST_CALL], environment))
    samples_us = []
    for _ in range(SAMPLES):
        done = _checked(processes(["-c", FIRST_CALL], {**environment, COMPILE_VARIABLE: "0"}))
        run.ran_elsewhere("gemm", done["calls"])
        samples_us.append(done["seconds"] * 1e6)
    return {MINE: summarize(samples_us, mode="process", launches=1, hot=False)}


def _checked(done: dict[str, Any]) -> dict[str, Any]:
    if not done["error"] <= _ALLOWED_ERROR:
        raise GoalError(
            f"the first result is wrong: relative error {done['error']:.3g}, allowed "
            f"{_ALLOWED_ERROR:.3g}"
        )
    return done


def cold_outcomes(run: GoalRun, processes: Run = run_process) -> dict[str, Outcome]:
    """One process compiles every GEMM kernel of a model into an empty store, on ``CORES`` cores.

    Its time includes starting Python and importing torch and the DSL in every worker. The kernels
    that it stored count as what the provider ran: this row is about compiling them.
    """
    with tempfile.TemporaryDirectory(prefix="fusedops-cold-") as folder:
        environment = {**os.environ, CACHE_VARIABLE: folder}
        environment.pop(COMPILE_VARIABLE, None)
        environment.pop(OVERLAY_VARIABLE, None)
        cores = str(CORES)
        command = ["-m", "fusedops.bench.precompile", "--model", MODEL, "--workers", cores]
        done = processes([*command, "--cores", cores], environment)
    if done["failed"] or done["present"]:
        raise GoalError(f"not a cold compile of every kernel: {done}")
    run.ran_elsewhere("gemm", done["compiled"])
    note = f"{done['compiled']} GEMM kernels of {MODEL}"
    row = summarize([done["wall_s"] * 1e6], mode="process", launches=1, hot=False, notes=[note])
    return {MINE: row}


@goal("gemm.warm_first_call_s", provider="cutlass", covers=FIRST_CALL_COVERS)
def warm_first_call(run: GoalRun) -> Reading:
    """Median over new processes."""
    outcomes = run.row("o_residual m16", lambda: warm_outcomes(run))
    return Reading.of(run.mine(outcomes, MINE), run.goal.unit)


@goal("gemm.cold_model_compile_s", provider="cutlass", covers=COVERS)
def cold_model_compile(run: GoalRun) -> Reading:
    """Wall time of the process."""
    cores = len(os.sched_getaffinity(0))
    if cores < CORES:
        raise GoalError(f"not measurable: it needs {CORES} cores, this machine has {cores}")
    outcomes = run.row(MODEL, lambda: cold_outcomes(run))
    return Reading.of(run.mine(outcomes, MINE), run.goal.unit)
