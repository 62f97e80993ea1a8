"""Every step of every ladder gives torch's result, in eager launches and as a run records it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusedops.bench.data import Buffers, poison
from fusedops.bench.environment import collect_environment
from fusedops.bench.measurement import Absent, Measurement
from fusedops.bench.peers import Available, peer_status
from fusedops.bench.timer import Protocol
from fusedops.ladders import built, load_ladder
from fusedops.ladders.ceilings import LadderCeilings, device_ceilings
from fusedops.ladders.gemm_problem import product_problem
from fusedops.ladders.histogram import BINS, PRIVATE_THREADS, launch_private, private_blocks
from fusedops.ladders.model import Ladder, Problem, Step
from fusedops.ladders.ncu import Asked, read_counters
from fusedops.ladders.profiled import run_profiled
from fusedops.ladders.runner import Runner, Task
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/include",
    "csrc/ladders",
    "csrc/transpose.cu",
    "csrc/reduce.cu",
    "csrc/histogram.cu",
    "fusedops/cutlass",
    "fusedops/ladders",
)

pytestmark = pytest.mark.gpu

STEPS = [(name, step) for name in built() for step in load_ladder(name).steps]
STEPPED = [name for name in built() if load_ladder(name).steps]
SMALL = {"transpose": 256, "reduce": 1_000_003, "histogram": 1_000_003, "gemm": 256}
SIZES = {"reduce": (1, 255, 4_099), "histogram": (1, 15, 33_333)}


def skip_unless_it_can_run(step: Step) -> None:
    """Skip a step whose peer is absent or that needs a newer GPU."""
    if step.recorded:
        pytest.skip(step.recorded)
    if step.peer:
        status = peer_status([step.peer])[step.peer]
        if not isinstance(status, Available):
            pytest.skip(f"{step.peer}: {status.reason}")
    if torch.cuda.get_device_capability() < step.capability:
        pytest.skip(f"needs compute capability {step.capability}")


def verdict(step: Step, problem: Problem, buffers: Buffers) -> str | None:
    """What is wrong with the step's result, run twice on poisoned outputs."""
    state = buffers if step.prepare is None else step.prepare(buffers)
    check = step.check_of(problem)
    with use_provider(step.provider, strict=True) as usage:
        for _ in range(2):
            for output in buffers.outputs:
                poison(output)
            result = step.run(state)
            results = buffers.outputs if result is None else result
            found = check(results if isinstance(results, tuple) else (results,), buffers)
            if found is not None:
                return found
    if step.operation:
        assert usage.count(step.operation, step.provider) == 2
    return None


@pytest.mark.parametrize(("name", "step"), STEPS, ids=[step.id for _, step in STEPS])
def test_a_step_equals_torch(name: str, step: Step) -> None:
    skip_unless_it_can_run(step)
    ladder = load_ladder(name)
    for size in (SMALL[name], *SIZES.get(name, ())):
        for problem in filter(step.solves, ladder.problems(size)):
            buffers = problem.make(torch.Generator("cuda").manual_seed(size))
            assert verdict(step, problem, buffers) is None, (problem.name, size)


@pytest.mark.parametrize("step", load_ladder("transpose").steps, ids=lambda step: step.id)
def test_a_transpose_takes_matrices_that_are_not_square(step: Step) -> None:
    skip_unless_it_can_run(step)
    problem = load_ladder("transpose").problems(64)[0]
    for rows, columns in ((64, 1024), (1344, 128)):
        x = torch.randn(rows, columns, device="cuda")
        buffers = Buffers((x,), (torch.empty(columns, rows, device="cuda"),))
        assert verdict(step, problem, buffers) is None, (rows, columns)


def test_the_second_pass_is_bitwise_repeatable() -> None:
    ladder = load_ladder("reduce")
    step = next(each for each in ladder.steps if each.id == "reduce.v8")
    buffers = ladder.problems(5_000_001)[0].make(torch.Generator("cuda").manual_seed(3))
    assert step.prepare is not None
    state = step.prepare(buffers)
    first = torch.as_tensor(step.run(state)).clone()
    assert all(torch.equal(torch.as_tensor(step.run(state)), first) for _ in range(20))


@pytest.mark.parametrize("short", [0, 1, 5])
def test_private_counters_hold_the_most_that_their_thread_may_meet(short: int) -> None:
    step = next(each for each in load_ladder("histogram").steps if each.id == "histogram.v7")
    skip_unless_it_can_run(step)
    count = PRIVATE_THREADS * (2**16 - 2 - 16) - short
    assert (private_blocks(count, 1), private_blocks(count + short + 1, 1)) == (1, 2)
    x = torch.full((count,), 255, dtype=torch.uint8, device="cuda")
    counts = torch.zeros(BINS, dtype=torch.int32, device="cuda")
    launch_private(step.kernels[0], x, counts, 1)
    assert counts[255] == count
    assert counts.sum() == count


def test_the_float32_peak_is_that_of_the_device() -> None:
    limits = device_ceilings(torch.device("cuda", torch.cuda.current_device()))
    assert 1e12 < limits.float32_flops_per_s < limits.bf16_flops_per_s
    if torch.cuda.get_device_name() == "NVIDIA H200":
        assert limits.float32_flops_per_s == pytest.approx(132 * 128 * 2 * 1.98e9)


GEMM = load_ladder("gemm")


@pytest.mark.parametrize("step", GEMM.steps, ids=lambda step: step.id)
def test_a_product_takes_matrices_that_are_not_square(step: Step) -> None:
    skip_unless_it_can_run(step)
    for kind in (problem.kind for problem in GEMM.problems(128)):
        for m, n, k in ((128, 384, 64), (640, 128, 1088)):
            problem = product_problem(kind, m, n, k)
            if step.solves(problem):
                buffers = problem.make(torch.Generator("cuda").manual_seed(m))
                assert verdict(step, problem, buffers) is None, problem.name


@pytest.mark.parametrize(
    "step", [step for step in GEMM.steps if step.readings], ids=lambda step: step.id
)
def test_a_product_loads_what_the_formula_says(step: Step) -> None:
    assert step.readings is not None
    found = step.readings(torch.device("cuda", torch.cuda.current_device()))
    assert found["loads"] == found["predicted_loads"] > 0


@pytest.mark.parametrize("name", STEPPED)
def test_the_process_that_is_profiled_runs_its_steps(name: str) -> None:
    ladder = load_ladder(name)
    here = torch.cuda.get_device_capability()
    own = [step for step in ladder.steps if not step.peer and not step.recorded]
    asked = []
    for problem in ladder.problems(ladder.size):
        steps = [step for step in own if step.capability <= here and step.solves(problem)]
        asked.append(Asked(name, problem.name, tuple(step.id for step in steps)))
    assert run_profiled(asked) == {}


def test_counters_tell_why_a_transpose_is_slow() -> None:
    steps = ("transpose.v1", "transpose.v3", "transpose.v4")
    (problem,) = load_ladder("transpose").problems(8192)
    found = read_counters([Asked("transpose", problem.name, steps)], 120.0)
    if isinstance(found, str):
        pytest.skip(found)
    (counters,) = found
    assert set(counters) == set(steps)
    # 32 sectors a request instead of 4, for each of the 2^21 loads and 2^21 stores of a warp.
    assert counters["transpose.v1"].excess_sectors == 2 * 2**21 * 28
    assert counters["transpose.v3"].excess_sectors == 0
    assert (counters["transpose.v3"].load_ways or 0) > 16
    assert (counters["transpose.v4"].load_ways or 0) < 2


@pytest.mark.parametrize("name", STEPPED)
def test_a_run_records_every_step(name: str, tmp_path: Path) -> None:
    ladder: Ladder = load_ladder(name)
    protocol = Protocol(samples=3, min_samples=1, cap_s=0.1, settle_max_s=0.05)
    limits = LadderCeilings(
        torch.cuda.get_device_name(), 4e12, 3.5e12, 700e12, 1.2, float32_flops_per_s=6e13
    )
    device = torch.device("cuda", torch.cuda.current_device())
    runner = Runner(tmp_path, collect_environment(), device, protocol, read=None, limits=limits)
    every = ladder.problems({"transpose": 1024, "gemm": 1024}.get(name, 1 << 22))
    problems = every if name == "gemm" else every[:1]
    tasks = [Task(ladder, each, step) for each in problems for step in ladder.steps]
    tasks = [task for task in tasks if task.step.solves(task.problem)]
    recorded = runner.run(tasks, lambda what, rows: None).ladders[name]
    wrong = {
        task.step.id: row.outcome
        for task in tasks
        for row in [recorded[task.problem.name][task.step.id]]
        if not isinstance(row.outcome, Measurement | Absent)
    }
    assert not wrong
    assert sum(map(len, recorded.values())) == len(tasks)
