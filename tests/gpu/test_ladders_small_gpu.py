"""Every figure of the small ladder on a GPU: kernels against torch, rows, queries, counters."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch

from fusedops.bench.data import poison
from fusedops.bench.environment import collect_environment
from fusedops.bench.oracles import bitwise
from fusedops.ladders import load_ladder, small_calls
from fusedops.ladders.ceilings import LadderCeilings
from fusedops.ladders.figure_run import FigureTask
from fusedops.ladders.figure_table import figure_tables
from fusedops.ladders.figures import Figure, FigureResult, FigureRow
from fusedops.ladders.ncu import Asked
from fusedops.ladders.occupancy import blocks_per_sm, carve_out, clusters_at_once, warps_per_sm
from fusedops.ladders.profiled import run_profiled
from fusedops.ladders.runner import Runner
from fusedops.ladders.small_attention import (
    DIM,
    HEADS,
    RUNS,
    check_attention,
    counted_elements,
    make_attention,
)
from fusedops.ladders.small_host import (
    CHAIN,
    chain_reference,
    check_way,
    event_us,
    launch_ways,
    spin_of,
)
from fusedops.ladders.small_memory import (
    SAXPY_RUNS,
    STRIDES,
    check_saxpy,
    make_saxpy,
    make_strided,
    strided_contender,
)
from fusedops.ladders.small_warps import branch_contender, make_branch, make_mix, mix_contender

COVERS = (
    "csrc/include",
    "csrc/ladders",
    "csrc/norm.cu",
    "csrc/quantize.cu",
    "csrc/activation.cu",
    "fusedops/cutlass",
    "fusedops/ladders",
)

pytestmark = pytest.mark.gpu

FIGURES = {figure.id: figure for figure in load_ladder("small").figures}
PROBED = [figure for figure in FIGURES.values() if any(panel.probes for panel in figure.panels)]


def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


# Kernels


@pytest.mark.parametrize("shift", range(5))
@pytest.mark.parametrize("name", SAXPY_RUNS)
def test_saxpy_of_any_length_and_address(name: str, shift: int) -> None:
    for count in (1, 3, 4, 5, 255, 4099, 1_000_003):
        buffers = make_saxpy(count, shift, generator())
        poison(buffers.outputs[0])
        SAXPY_RUNS[name](buffers)
        assert check_saxpy(buffers.outputs, buffers) is None, count


@pytest.mark.parametrize("series", ["read", "write"])
@pytest.mark.parametrize("stride", STRIDES)
def test_strided_accesses_move_what_they_should_and_nothing_else(series: str, stride: int) -> None:
    buffers = make_strided(series, stride, 1001, generator())
    contender = strided_contender(series, stride, 1001)
    (out,) = buffers.outputs
    poison(out)
    result = contender.run(buffers)
    assert isinstance(result, torch.Tensor)
    assert contender.check((result,), buffers) is None
    assert int((~out.isnan()).sum()) == 1001


@pytest.mark.parametrize("paths", [1, 3, 32])
@pytest.mark.parametrize("series", ["by lane", "by warp"])
def test_divergent_paths_give_the_same_work(series: str, paths: int) -> None:
    contender = branch_contender(series, paths)
    buffers = make_branch(10_001, generator())
    poison(buffers.outputs[0])
    contender.run(buffers)
    assert contender.check(buffers.outputs, buffers) is None


@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_spilled_values_are_still_right(blocks: int) -> None:
    contender = mix_contender(blocks)
    buffers = make_mix(1001, generator())
    contender.run(buffers)
    assert contender.check(buffers.outputs, buffers) is None


@pytest.mark.parametrize("name", RUNS)
def test_attention_equals_torch_and_counts_what_it_must(name: str) -> None:
    length = 384
    buffers = make_attention(length, generator())
    poison(buffers.outputs[0])
    moved = counted_elements(name, buffers)
    assert check_attention(buffers.outputs, buffers) is None
    assert counted_elements(name, buffers) == moved
    ends = 2 * HEADS * length * DIM  # queries are read, results are written
    if name == "materialised":
        blocks = length // 64
        products = 2 * blocks * HEADS * length * DIM
        # Scores: written, read and written by the softmax, read again.
        assert moved == ends + products + 4 * HEADS * length * length
    else:
        rows = int(name.split()[1])
        assert moved == ends + 2 * (length // rows) * HEADS * length * DIM


def test_attention_takes_scores_that_overflow_without_a_maximum() -> None:
    buffers = make_attention(128, generator())
    buffers.inputs[0].mul_(100)
    for name in RUNS:
        RUNS[name](buffers)
        assert not buffers.outputs[0].isnan().any(), name


@pytest.mark.parametrize("steps", [1, 5, 64])
def test_every_way_to_launch_does_the_same_steps(steps: int) -> None:
    x = torch.randn(8192, device="cuda")
    for call in launch_ways(x, steps).values():
        for _ in range(3):
            check_way(call, x, steps)


# Queries


def test_the_driver_answers_for_occupancy() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    kernel = CHAIN.loaded(device())
    threads = 256
    most = warps_per_sm(device()) * 32 // threads
    assert blocks_per_sm(kernel, device(), threads, 0) == most
    few = blocks_per_sm(kernel, device(), threads, 100 << 10)
    assert 1 <= few < most
    with carve_out(kernel, device(), 25):
        assert 1 <= blocks_per_sm(kernel, device(), threads, 16 << 10) <= most
    found = [clusters_at_once(kernel, device(), threads, 0, size) for size in (1, 2, 8, 16)]
    assert found == sorted(found, reverse=True)
    assert found[-1] >= 1


# Paths from Python


@pytest.mark.parametrize("name", [name for name in small_calls.PATHS if "pybind11" not in name])
def test_a_path_launches_the_kernel_or_says_what_lacks(name: str) -> None:
    row = small_calls.path_row(name, small_calls.PATHS[name], device())
    assert row.failed == ""
    assert row.absent or row.values["us a call"] < 1000


def test_a_path_follows_the_current_stream() -> None:
    x = torch.zeros(256, device="cuda")
    call, _ = small_calls.bound_call(device())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            call(x)
    side.synchronize()
    assert bitwise(x, chain_reference(torch.zeros(256, device="cuda"), 20)) is None


# Runs


@functools.cache
def result_of(figure_id: str, folder: Path) -> FigureResult:
    """One figure as a run records it."""
    limits = LadderCeilings(
        torch.cuda.get_device_name(), 4.6e12, 4.2e12, 700e12, 1.2, float32_flops_per_s=6e13
    )
    runner = Runner(folder, collect_environment(), device(), read=None, limits=limits)
    task = FigureTask("small", FIGURES[figure_id])
    return runner.run([task], lambda what, rows: None).figures[figure_id]


def rows_of(figure_id: str, folder: Path, panel: int = 0) -> list[FigureRow]:
    result = result_of(figure_id, folder)
    return list(result.panels[FIGURES[figure_id].panels[panel].name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladders")


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda figure: figure.id)
def test_a_run_records_every_row_and_none_fails(figure: Figure, folder: Path) -> None:
    result = result_of(figure.id, folder)
    # The file sorts names; what is shown has the figure's order.
    names = [panel.name for panel in figure.panels]
    assert sorted(result.panels) == sorted(names)
    assert [table.panel.name for table in figure_tables(figure, result)] == names
    assert [row.failed for row in result.rows if row.failed] == []
    assert all(row.values or row.absent for row in result.rows)
    times = [
        row.values[name]
        for row in result.rows
        for name in ("us", "us a call")
        if name in row.values
    ]
    assert all(us > 0 for us in times)


@pytest.mark.parametrize("figure", PROBED, ids=lambda figure: figure.id)
def test_the_process_that_is_profiled_launches_a_figures_rows(figure: Figure) -> None:
    keys = [key for panel in figure.panels for key in panel.probes]
    assert run_profiled([Asked("small", figure.id, tuple(keys[:2]))]) == {}


def test_divergence_costs_within_warps_only(folder: Path) -> None:
    us = {row.key: row.values["us"] for row in rows_of("small.divergence", folder)}
    assert us["by lane, 32"] > 8 * us["by lane, 1"]
    assert us["by warp, 32"] < 3 * us["by warp, 1"]


def test_strides_cost_useful_bandwidth(folder: Path) -> None:
    rate = {row.key: row.values["useful TB/s"] for row in rows_of("small.coalescing", folder)}
    for series in ("read", "write"):
        assert rate[f"{series}, 1"] > 2 * rate[f"{series}, 32"]


def test_a_clock_that_does_not_wait_misses_a_long_kernel(folder: Path) -> None:
    us = {row.key: row.values["us"] for row in rows_of("small.clocks", folder)}
    for cycles in ("200,000", "2,000,000"):
        assert us[f"host, not waiting, {cycles}"] < us[f"host, waiting, {cycles}"] / 2


@pytest.mark.timing
def test_events_around_many_kernels_see_what_a_waiting_host_sees() -> None:
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    spin = spin_of(out, 2_000_000)

    def many() -> None:
        for _ in range(10):
            spin()

    many()
    shares = []
    # Both clocks are held to the same stretch of time, in which other processes may use the GPU.
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        seen_us = event_us(many, 1)
        shares.append(seen_us / (time.perf_counter() - start) / 1e6)
    assert 0.9 < max(shares) < 1.01
    assert int(out) >= 2_000_000


def test_fewer_launches_take_less(folder: Path) -> None:
    us = {row.key: row.values["us"] for row in rows_of("small.launches", folder)}
    assert us["one kernel, 256"] < us["graph, 256"] < us["eager, 256"]


def test_a_pinned_copy_leaves_the_host_alone(folder: Path) -> None:
    rows = {row.key: row.values for row in rows_of("small.copies", folder, 1)}
    pinned = rows["pinned, copy alone"]
    assert pinned["host us"] < pinned["us"] / 4


def test_the_online_form_moves_less_with_more_memory(folder: Path) -> None:
    moved = [row.values["counted MB"] for row in rows_of("small.attention", folder, 1)]
    assert moved == sorted(moved, reverse=True)
    lengths = rows_of("small.attention", folder)
    ratios = [row.values["counted / formula"] for row in lengths if row.series == "materialised"]
    assert max(ratios) < 2 * min(ratios)
