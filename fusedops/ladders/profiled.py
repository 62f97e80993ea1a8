"""The process that ncu watches: runs steps of ladders once each, a marker in front of each.

``python -m fusedops.ladders.profiled JSON``, with what ``asked_to_json`` made.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence

import torch

from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.probe import PROBE, PROBE_PARAMETERS
from fusedops.ladders.catalog import load_ladder
from fusedops.ladders.model import Ladder, Step
from fusedops.ladders.ncu import Asked, asked_from_json
from fusedops.providers.base import use_provider

__all__ = ["run_profiled"]

Launch = Callable[[], object]


def _step_launches(
    ladder: Ladder, problem_name: str, step_ids: Sequence[str], device: torch.device
) -> dict[str, Callable[[], Launch]]:
    """What makes each step's launch, on one set of buffers."""
    problem = next(each for each in ladder.problems(ladder.size) if each.name == problem_name)
    buffers = problem.make(torch.Generator(device).manual_seed(0))
    steps = {step.id: step for step in ladder.steps}

    def make(step: Step) -> Launch:
        state = buffers if step.prepare is None else step.prepare(buffers)

        def launch() -> None:
            with use_provider(step.provider, strict=True):
                step.run(state)

        return launch

    return {name: functools.partial(make, steps[name]) for name in step_ids}


def _figure_launches(
    ladder: Ladder, figure_id: str, keys: Sequence[str], device: torch.device
) -> dict[str, Callable[[], Launch]]:
    """What makes the launch behind each row of a figure."""
    (figure,) = (each for each in ladder.figures if each.id == figure_id)
    probes = {key: make for panel in figure.panels for key, make in panel.probes.items()}
    return {key: functools.partial(probes[key], device) for key in keys}


def _launches(asked: Asked, device: torch.device) -> dict[str, Callable[[], Launch]]:
    ladder = load_ladder(asked.ladder)
    is_figure = asked.problem in [figure.id for figure in ladder.figures]
    make = _figure_launches if is_figure else _step_launches
    return make(ladder, asked.problem, asked.steps, device)


def _marker(device: torch.device) -> Launch:
    module = cuda_module(PROBE, device_arch(device.index))
    kernel = module.kernel(PROBE.kernels[0], PROBE_PARAMETERS)
    dot = torch.ones(1, device=device)
    return lambda: kernel.launch((1, 1, 1), (32, 1, 1), (dot, dot, 1.0, 1))


def _ready(make: Callable[[], Launch]) -> Launch:
    """A launch that has run once, outside of the profile: it compiles then."""
    launch = make()
    launch()
    torch.cuda.synchronize()
    return launch


def _watched(mark: Launch, launch: Launch | None) -> None:
    torch.cuda.profiler.start()
    try:
        mark()
        if launch is not None:
            launch()
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def run_profiled(asked: Sequence[Asked], until: float | None = None) -> dict[str, str]:
    """Run each step once outside of the profile and once inside.

    A step that fails has a marker and no kernel, and the others run all the same.

    Args:
        asked: the steps.
        until: as ``time.time``; no step is begun later.

    Returns:
        "problem, step" -> what went wrong, for those that failed.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    failed: dict[str, str] = {}
    mark = _marker(device)
    mark()
    for one in asked:
        makes = _launches(one, device)
        for step in one.steps:
            if until is not None and time.time() >= until:
                return failed
            launch: Launch | None = None
            try:
                try:
                    launch = _ready(makes[step])
                finally:
                    _watched(mark, launch)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
                failed[f"{one.problem}, {step}"] = f"{type(error).__name__}: {error}"
    return failed


if __name__ == "__main__":
    for place, reason in run_profiled(*asked_from_json(sys.argv[1])).items():
        print(f"{place}: {reason}", file=sys.stderr)
