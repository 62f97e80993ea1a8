"""The process that ncu watches: runs steps of one ladder once each, a marker in front of each.

``python -m fusedops.ladders.profiled LADDER PROBLEM STEP...``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.probe import PROBE, PROBE_PARAMETERS
from fusedops.ladders.catalog import load_ladder
from fusedops.providers.base import use_provider

__all__ = ["run_profiled"]


def run_profiled(ladder_name: str, problem_name: str, step_ids: Sequence[str]) -> None:
    """Run the steps once outside of the profile (they compile then), and once inside."""
    ladder = load_ladder(ladder_name)
    device = torch.cuda.current_device()
    problem = next(each for each in ladder.problems(ladder.size) if each.name == problem_name)
    buffers = problem.make(torch.Generator(f"cuda:{device}").manual_seed(0))
    steps = {step.id: step for step in ladder.steps}
    states = {}
    for name in step_ids:
        prepare = steps[name].prepare
        states[name] = buffers if prepare is None else prepare(buffers)
    module = cuda_module(PROBE, device_arch(device))
    marker = module.kernel(PROBE.kernels[0], PROBE_PARAMETERS)
    dot = torch.ones(1, device=f"cuda:{device}")

    def mark() -> None:
        marker.launch((1, 1, 1), (32, 1, 1), (dot, dot, 1.0, 1))

    def run(name: str) -> None:
        with use_provider(steps[name].provider, strict=True):
            steps[name].run(states[name])

    mark()
    for name in step_ids:
        run(name)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for name in step_ids:
        mark()
        run(name)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    run_profiled(sys.argv[1], sys.argv[2], sys.argv[3:])
