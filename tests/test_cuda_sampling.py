"""Plans of the sampling kernels, the bound on their quick noise, and their SASS; without a GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cuda_goals import timed, without_peers
from test_cuda_histogram import QUICK, require_arguments_to_fit
from test_cuda_kernels import compiled, count
from test_cuda_plan import A100, H200, name_of, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.bench.goal_run import GoalRun, RowStore
from fusedops.bench.goal_spec import load_goals
from fusedops.bench.goals import cuda_sampling as goals
from fusedops.bench.goals import load_all
from fusedops.bench.goals.cuda_rows import MINE
from fusedops.bench.measurement import Absent, Measurement, summarize
from fusedops.errors import BuildError, ConfigError, DeviceError, DTypeError, ShapeError
from fusedops.errors import UnsupportedError as Unsupported
from fusedops.jit import resources
from fusedops.jit.nvrtc import CudaProgram, compile_program
from fusedops.ops.op import OPS
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_plan import Gpu, View
from fusedops.providers.cuda_sampling import (
    MAX_TOP_K,
    SELECT_MEMORY_BYTES,
    plan_greedy,
    plan_sample,
    plan_top_k,
    top_k,
)

MOST_THREADS = 1024
"""Threads of an SM with the registers that the kernels take."""

needs_disassembler = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")


def sampling_views(rows: int, vocabulary: int, seeds: int, cut: bool = True) -> list[View | None]:
    return [
        view(rows, vocabulary),
        view(rows),
        view(seeds, dtype=torch.int64),
        view(rows, dtype=torch.int32) if cut else None,
        view(rows) if cut else None,
    ]


@pytest.mark.parametrize("vocabulary", [1, 5000, 8192, 32_000, 128_256, 262_144, 1 << 23])
def test_the_blocks_of_a_cluster_share_a_row(vocabulary: int) -> None:
    (launch,) = plan_sample(sampling_views(64, vocabulary, 64), H200).launches
    require_arguments_to_fit(launch)
    blocks, threads = (2, 1024) if vocabulary >= 8192 else (1, 512)
    length, chunk = launch.constants[:2]
    assert (length, launch.cluster, launch.blocks) == (vocabulary, blocks, (64 * blocks, 1))
    assert launch.kernel == f"fusedops::sample<float, {blocks}, {threads}>"
    assert launch.threads == threads
    assert chunk * blocks >= vocabulary
    assert chunk % 16 == 0


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_all_rows_run_in_one_round_where_they_can(gpu: Gpu) -> None:
    for rows in range(1, 300):
        for launch in (
            *plan_sample(sampling_views(rows, 128_256, rows), gpu).launches,
            *plan_top_k([view(rows, 128_256)], gpu, 50).launches,
        ):
            at_once = gpu.sms * (MOST_THREADS // launch.threads)
            assert launch.blocks[0] <= at_once or rows > 2 * gpu.sms
            assert launch.cluster == 1 or gpu.has_clusters
            # A cluster may not find its SMs side by side where others share them.
            assert launch.cluster == 1 or launch.blocks[0] <= gpu.sms
            # Two blocks and what the driver keeps of an SM's 228 KiB for each.
            assert 2 * (launch.shared_bytes + 2048) <= 164 << 10


def test_few_rows_are_shared_by_many_blocks() -> None:
    def layout(rows: int) -> tuple[int, int]:
        (launch,) = plan_top_k([view(rows, 128_256)], H200, 50).launches
        return launch.cluster, launch.threads

    expected = {1: (8, 1024), 15: (8, 1024), 16: (4, 1024), 30: (4, 1024), 31: (2, 1024)}
    expected |= {66: (2, 1024), 67: (1, 1024), 132: (1, 1024), 133: (1, 512), 5000: (1, 512)}
    assert {rows: layout(rows) for rows in expected} == expected


def test_a_row_whose_mass_may_not_fit_64_bits_is_refused() -> None:
    with pytest.raises(Unsupported, match="up to 8388608 elements, got 8388609"):
        plan_sample(sampling_views(1, (1 << 23) + 1, 1), H200)
    with pytest.raises(Unsupported, match="rows, got 3000000000"):
        plan_top_k([view(3_000_000_000, 8192)], H200, 3)


def test_seeds_of_rows_are_theirs_or_a_step_apart() -> None:
    own = plan_sample(sampling_views(4, 100, 4), H200).launches[0].constants
    shared = plan_sample(sampling_views(4, 100, 1), H200).launches[0].constants
    assert own[5:7] == (1, 0)
    assert shared[5:7] == (0, 0xD1B54A32D192ED03 - 2**64)
    assert own[2:5] == shared[2:5] == (100, 1, 1)
    single = plan_sample(sampling_views(1, 100, 1, cut=False), H200).launches[0].constants
    assert single[5:] == (1, 0, 0, 0)


def test_rows_more_than_2_to_31_elements_apart_have_64_bit_places() -> None:
    x = View((3, 100), (2**40, 2**33), torch.bfloat16)
    (launch,) = plan_top_k([x], H200, 5).launches
    assert launch.kernel == "fusedops::top_k<__nv_bfloat16, 1, 512>"
    assert launch.constants[2:] == (5, 2**40, 2**33)
    assert launch.parameters[-2:] == ("int64", "int64")


def test_b04_no_rows_take_no_launch() -> None:
    assert plan_sample(sampling_views(0, 50, 1), H200).launches == ()
    assert plan_top_k([view(0, 50)], H200, 4).launches == ()
    assert plan_greedy([view(0, 50)], H200).launches == ()


def test_greedy_is_the_reduction_of_a_row() -> None:
    plan = plan_greedy([view(64, 128_256, dtype=torch.bfloat16)], H200)
    (launch,) = plan.launches
    assert plan.results == (((64,), torch.int64),)
    assert name_of(launch) == "reduce_cluster"
    assert "Arg<__nv_bfloat16, true>" in launch.kernel


def test_the_k_largest_are_refused_where_they_make_no_sense() -> None:
    x = torch.zeros(2, 3000)
    for k in (0, 3001, MAX_TOP_K + 1):
        with pytest.raises(ConfigError, match="no more than 1024"):
            top_k(x, k)
    with pytest.raises(DeviceError, match="accepted are CUDA tensors"):
        top_k(x, 4)
    with pytest.raises(ShapeError):
        top_k(x[0], 4)
    with pytest.raises(DTypeError):
        top_k(x.double(), 4)


def test_the_operations_have_the_kernels() -> None:
    for op in ("greedy", "sample"):
        assert "cuda" in OPS[op].providers


def approximate_noise(bits: np.ndarray) -> np.ndarray:
    """``Noise::approximate`` with float32 logarithms that are off by 2^-21, as the GPU's may be."""
    one = np.float32(1.0)
    off = np.float32(2.0**-21)
    rest = ((~bits).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    total = np.full(rest.shape, one / np.float32(7.0))
    for divisor in (6.0, 5.0, 4.0, 3.0, 2.0):
        total = total * rest + one / np.float32(divisor)
    series = total * rest * rest + rest
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    logarithm = -np.log(np.maximum(uniform, np.float32(2.0**-33))) * (one + off)
    exponential = np.where(rest < np.float32(0.25), series, logarithm)
    return -np.log(exponential) + off


def test_the_quick_noise_is_within_its_slack() -> None:
    ends = np.arange(4096, dtype=np.uint64)
    quarter = np.uint64(3 << 30)
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64)
    near = [ends, np.uint64(2**32 - 1) - ends, quarter + ends, quarter - ends]
    bits = np.concatenate((random, *near)).astype(np.uint32)
    exact = -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32))
    error = np.abs(approximate_noise(bits) - exact).max()
    assert 0 < error < 2e-5
    assert error < 1 / 1024


@needs_wheels
def test_sizes_that_plans_count_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        '#include "row_select.cuh"',
        "namespace fusedops {",
        f'static_assert(sizeof(SelectMemory) == {SELECT_MEMORY_BYTES}, "memory");',
        f'static_assert(kCandidates >= 2 * {MAX_TOP_K}, "what is listed beside the k largest");',
        f'static_assert(kMostThreads == {MOST_THREADS} && kMostBlocks == 8, "launches");',
        "__global__ void nothing() {} }",
    ]
    root = tmp_path / "csrc"
    shutil.copytree(resources.csrc_dir(), root)
    monkeypatch.setattr(resources, "PACKAGE_DIR", tmp_path / "fusedops")
    (root / "sizes.cu").write_text("\n".join(lines))
    program = CudaProgram("sizes.cu", ("fusedops::nothing",))
    compile_program(program, "sm_90a", tmp_path)
    (root / "sizes.cu").write_text("\n".join(lines).replace(f"== {MOST_THREADS}", "== 511"))
    with pytest.raises(BuildError, match="static assertion failed"):
        compile_program(program, "sm_90a", tmp_path)


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_selecting_uses_no_local_memory(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    launches = [*plan_sample(sampling_views(64, 128_256, 64), gpu).launches]
    if arch == "sm_90a":
        for rows in (16, 256):
            launches += plan_sample(sampling_views(rows, 128_256, rows), gpu).launches
        for rows in (1, 64):
            x = view(rows, 128_256, dtype=torch.bfloat16)
            launches += plan_sample([x, *sampling_views(rows, 1, rows)[1:]], gpu).launches
            launches += plan_top_k([x], gpu, 50).launches
    kernels = tuple(launch.kernel for launch in launches)
    for name, sass in compiled("sampling.cu", kernels, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        # MOST_THREADS of them take the 65536 registers of an SM.
        assert max(map(int, re.findall(r"\bR(\d+)\b", sass))) < 65536 // MOST_THREADS, name
        in_flight = 4 if re.search(r"<\w+, 8, ", name) else 8
        assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") >= in_flight, name
        assert count(sass, r"ATOMS\.POPC\.INC[\w.]*") > 0, name
        if gpu.has_clusters:
            assert "ACQBULK" in sass, name
            assert "PREEXIT" in sass, name
            has_cluster = not re.search(r"<\w+, 1, ", name)
            assert (count(sass, r"UCGABAR_ARV|UCGABAR_WAIT") >= 4) == has_cluster, name


# What is measured


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalRun]:
    """A run on the CPU that pins the reference, with torch as its only peer."""
    without_peers(monkeypatch)
    with use_provider("reference") as usage:
        yield GoalRun(
            load_goals()["cuda.sampling"],
            provider="reference",
            device="cpu",
            protocol=QUICK,
            store=RowStore({}, "sources", lambda: None),
            usage=usage,
        )


@pytest.mark.parametrize("name", ["sampling", "topk50"])
def test_each_goal_has_a_function_that_pins_the_kernels(name: str) -> None:
    registered = load_all()[f"cuda.{name}"]
    assert registered.provider == "cuda"
    assert registered.sources()


@pytest.mark.parametrize("cut", goals.CUTS)
def test_a_row_times_us_and_torch_on_tokens_that_may_be_drawn(run: GoalRun, cut: str) -> None:
    rows = goals.sampling_outcomes(run, (3, 500), *goals.CUTS[cut])
    assert timed(rows) == {MINE, "torch"}


def test_a_token_that_may_not_be_drawn_is_told() -> None:
    buffers = goals.Buffers((torch.tensor([[5.0, 4.0, 3.0, -9.0]]),))
    words = {3: "rank 3", 4: "outside", -1: "outside"}
    for token, word in words.items():
        found = goals._allowed(2, 0.9)((torch.tensor([token]),), buffers)
        assert found is not None
        assert word in found
    assert goals._allowed(2, 0.9)((torch.tensor([1]),), buffers) is None
    assert "mass before" in str(goals._allowed(None, 0.5)((torch.tensor([1]),), buffers))
    assert goals._allowed(None, 0.8)((torch.tensor([1]),), buffers) is None


def test_the_slowest_cut_counts(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(_run: GoalRun, _shape: object, k: int | None, p: float | None) -> object:
        times = {MINE: 10.0, "flashinfer": 30.0 if k is None else 25.0 if p is None else 40.0}
        return {
            name: summarize([us], mode="fake", launches=1, hot=False) for name, us in times.items()
        }

    monkeypatch.setattr(goals, "sampling_outcomes", outcomes)
    found = goals.sampling(run)
    assert found.value == pytest.approx(2.5)
    assert "top-k 10.0 us, flashinfer 25.0 us" in found.note


def test_a_row_of_the_largest_checks_values_and_indices(run: GoalRun) -> None:
    def ours(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        goals.sample(x[:, :3], torch.ones(4), torch.ones(4, dtype=torch.int64))  # is counted
        values, indices = x.topk(k, dim=1)
        return values, indices

    def wrong(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = ours(x, k)
        return values, indices.flip(1)

    rows = goals.top_k_outcomes(run, (4, 300), 7, ours)
    assert timed(rows) == {MINE, "torch"}
    assert rows[goals.RADIX_SELECT] == Absent("left out")
    assert not isinstance(goals.top_k_outcomes(run, (4, 301), 7, wrong)[MINE], Measurement)
