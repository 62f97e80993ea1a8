"""The process that ncu watches: runs steps of one ladder once each, a marker in front of each.

``python -m fusedops.ladders.profiled LADDER PROBLEM STEP...``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.probe import PROBE, PROBE_PARAMETERS
from fusedops.ladders.catalog import load_ladder
from fusedops.ladders.model import Ladder, Step
from fusedops.providers.base import use_provider

__all__ = ["run_profiled"]


def _step_launches(
    ladder: Ladder, problem_name: str, step_ids: Sequence[str], device: int
) -> dict[str, Callable[[], object]]:
    """Each step's launch on one set of buffers."""
    problem = next(each for each in ladder.problems(ladder.size) if each.name == problem_name)
    buffers = problem.make(torch.Generator(f"cuda:{device}").manual_seed(0))
    steps = {step.id: step for step in ladder.steps}

    def launch_of(step: Step) -> Callable[[], object]:
        state = buffers if step.prepare is None else step.prepare(buffers)

        def launch() -> None:
            with use_provider(step.provider, strict=True):
                step.run(state)

        return launch

    return {name: launch_of(steps[name]) for name in step_ids}


def _figure_launches(
    ladder: Ladder, figure_id: str, keys: Sequence[str], device: int
) -> dict[str, Callable[[], object]]:
    """The launch behind each row of a figure."""
    (figure,) = (each for each in ladder.figures if each.id == figure_id)
    probes = {key: make for panel in figure.panels for key, make in panel.probes.items()}
    return {key: probes[key](torch.device("cuda", device)) for key in keys}


def run_profiled(ladder_name: str, problem_name: str, step_ids: Sequence[str]) -> None:
    """Run the steps once outside of the profile (they compile then), and once inside.

    Args:
        problem_name: a problem's name, or the id of a figure.
        step_ids: steps' ids, or keys of the figure's rows.
    """
    ladder = load_ladder(ladder_name)
    device = torch.cuda.current_device()
    if problem_name in [figure.id for figure in ladder.figures]:
        launches = _figure_launches(ladder, problem_name, step_ids, device)
    else:
        launches = _step_launches(ladder, problem_name, step_ids, device)
    module = cuda_module(PROBE, device_arch(device))
    marker = module.kernel(PROBE.kernels[0], PROBE_PARAMETERS)
    dot = torch.ones(1, device=f"cuda:{device}")

    def mark() -> None:
        marker.launch((1, 1, 1), (32, 1, 1), (dot, dot, 1.0, 1))

    mark()
    for launch in launches.values():
        launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for launch in launches.values():
        mark()
        launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    run_profiled(sys.argv[1], sys.argv[2], sys.argv[3:])
