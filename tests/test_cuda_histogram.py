"""Plans of the histogram kernels, what their guesses rest on, and their SASS; without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_goals import timed, without_peers
from test_cuda_kernels import compiled, count
from test_cuda_plan import A100, H200, name_of, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.bench import Protocol
from fusedops.bench.goal_run import GoalRun, RowStore
from fusedops.bench.goal_spec import load_goals
from fusedops.bench.goals import cuda_histogram as goals
from fusedops.bench.goals import load_all
from fusedops.bench.goals.cuda_rows import MINE
from fusedops.bench.measurement import Measurement, summarize
from fusedops.errors import UnsupportedError
from fusedops.ops.histogram import HISTOGRAM_DTYPES, MAX_BINS, bin_edges
from fusedops.ops.op import OPS
from fusedops.providers import cuda_histogram
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_call import CallPlan, float64_bits, most_shared_bytes
from fusedops.providers.cuda_histogram import (
    plan_bincount,
    plan_expert_histogram,
    plan_histogram,
)
from fusedops.providers.cuda_plan import Gpu, Launch, View

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)

needs_disassembler = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")

STRUCTS = [
    *(f"fusedops::IndexBins<{word}>" for word in ("int", "long long", "unsigned char")),
    *(f"fusedops::RangeBins<{word}>" for word in ("float", "__nv_bfloat16", "__half", "double")),
]


def names(plan: CallPlan) -> list[str]:
    return [name_of(launch) for launch in plan.launches]


def require_arguments_to_fit(launch: Launch) -> None:
    assert len(launch.tensors) + len(launch.constants) == len(launch.parameters)
    assert all(word == "pointer" for word in launch.parameters[: len(launch.tensors)])
    for word, value in zip(launch.parameters[len(launch.tensors) :], launch.constants, strict=True):
        bits = int(word.removeprefix("int"))
        assert -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
    assert max(launch.blocks) <= 2**31 - 1
    assert min(launch.blocks) >= 1


@pytest.mark.parametrize(
    ("bins", "expected"),
    [
        (1, "histogram_private"),
        (256, "histogram_private"),
        (297, "histogram_private"),
        (298, "histogram_shared"),
        (4096, "histogram_shared"),
        (200_000, "histogram_shared"),
        (MAX_BINS, "histogram_zero"),
    ],
)
def test_the_kernel_follows_from_the_number_of_bins(bins: int, expected: str) -> None:
    plan = plan_bincount([view(1 << 26, dtype=torch.int32)], H200, bins)
    assert names(plan)[0] == expected
    assert names(plan)[1] == ("histogram_global" if bins == MAX_BINS else "histogram_join")
    assert plan.results == (((bins,), torch.int64),)
    for launch in plan.launches:
        require_arguments_to_fit(launch)
        assert launch.shared_bytes <= most_shared_bytes(H200)


@pytest.mark.parametrize("elements", [1 << 10, 1 << 28, 1 << 34])
@pytest.mark.parametrize("gpu", [H200, A100, Gpu("sm_89", 142)])
def test_a_private_counter_of_16_bits_cannot_overflow(gpu: Gpu, elements: int) -> None:
    plan = plan_bincount([view(elements, dtype=torch.uint8)], gpu, 100)
    first, join = plan.launches
    assert name_of(first) == "histogram_private"
    threads = first.blocks[0] * first.threads
    # A thread takes whole vectors, and may meet one more of them and an end.
    assert -(-elements // threads) + 32 < 2**16
    assert plan.work_bytes == first.blocks[0] * 100 * 4
    assert join.constants == (100, first.blocks[0])
    assert first.constants[0] == elements


def test_bins_that_shared_memory_does_not_hold_are_swept_in_groups() -> None:
    for bins in (60_000, 65_536, 200_001):
        first, _ = plan_bincount([view(1 << 20, dtype=torch.int32)], H200, bins).launches
        group, sweeps = first.constants[0], first.blocks[1]
        assert group % 32 == 0
        assert (sweeps - 1) * group < bins <= sweeps * group
        assert first.shared_bytes == group * 4 <= most_shared_bytes(H200)
    few, _ = plan_bincount([view(1 << 16, dtype=torch.int32)], A100, 40_000).launches
    assert few.blocks == (8, 1)


def test_any_order_of_the_elements_serves() -> None:
    x = View((8, 64), (1, 8), torch.int32)
    (first, _) = plan_bincount([x], H200, 9).launches
    assert first.kernel.endswith("IndexBins<int>, false>")
    (first, _) = plan_bincount([View((8, 64), (1, 9), torch.int32)], H200, 9).launches
    assert first.kernel.endswith("IndexBins<int>, true>")
    assert first.constants[-7:] == (1, 64, 8, 0, 0, 9, 1)
    scalar = plan_bincount([view(dtype=torch.int32)], H200, 9).launches[0]
    assert (scalar.constants[0], scalar.blocks) == (1, (1, 1))


def test_b04_no_elements_leave_nothing_but_zeros_to_write() -> None:
    for shape in ((0,), (3, 0)):
        plan = plan_bincount([view(*shape, dtype=torch.int64)], H200, 5)
        assert names(plan) == ["histogram_zero"]


def test_what_the_kernels_cannot_count_is_refused() -> None:
    x = view(8)
    with pytest.raises(UnsupportedError, match="takes a given range"):
        plan_histogram([x], H200, 4, None)
    spread = View((2,) * 5, (1000, 300, 90, 20, 3), torch.int64)
    for plan in (plan_bincount, plan_expert_histogram):
        with pytest.raises(UnsupportedError, match="walks up to 4 dimensions"):
            plan([spread], H200, 4)
    with pytest.raises(UnsupportedError, match=r"up to 4294967295; got 4294967296"):
        plan_expert_histogram([view(2**32, dtype=torch.uint8)], H200, 4)


def test_the_ends_of_a_range_are_rounded_as_samples_compare() -> None:
    for dtype in HISTOGRAM_DTYPES:
        first, _ = plan_histogram([view(64, dtype=dtype)], H200, 10, (0.1, 0.7)).launches
        lo, hi = (0.1, 0.7) if dtype == torch.float64 else map(float, np.float32([0.1, 0.7]))
        assert first.constants[2:5] == tuple(map(float64_bits, (lo, hi, (hi - lo) / 10)))


@given(
    st.integers(1, 5000),
    st.floats(-1e6, 1e6, width=32),
    st.floats(2.0**-20, 2.0**20, width=32),
    st.integers(0, 2**32 - 1),
)
def test_a_guess_outside_the_slack_is_the_bin(
    bins: int, lo: float, width: float, seed: int
) -> None:
    hi = float(np.float32(lo + width))
    if hi <= lo:
        return
    scale, slack = cuda_histogram._guess(lo, hi, bins, False)
    edges = bin_edges(lo, hi, bins, torch.float32, torch.device("cpu")).numpy()
    random = np.random.default_rng(seed)
    near = edges[random.integers(0, bins + 1, 200)]
    samples = np.concatenate((random.uniform(lo, hi, 200).astype(np.float32), near))
    samples = np.concatenate((samples, np.nextafter(near, np.float32(-np.inf))))
    samples = samples[(samples >= np.float32(lo)) & (samples <= np.float32(hi))]
    place = (samples - np.float32(lo)) * np.float32(scale)
    rest = place - np.floor(place)
    sure = (rest > np.float32(slack)) & (rest < np.float32(1.0) - np.float32(slack))
    bin_of = np.minimum(np.searchsorted(edges, samples, side="right") - 1, bins - 1)
    assert (np.floor(place)[sure] == bin_of[sure]).all()


@pytest.mark.parametrize("ends", [(0.0, 1e-44), (-3e38, 3e38), (-2e38, 2e38), (1.0, 1.0 + 2**-23)])
def test_a_range_whose_products_say_nothing_trusts_none(ends: tuple[float, float]) -> None:
    assert cuda_histogram._guess(*ends, 7, False)[1] == 1.0


def test_few_ids_take_one_block_and_many_five_launches() -> None:
    for ids, experts in ((0, 3), (1 << 16, 256), (9, 1700)):
        (launch,) = plan_expert_histogram([view(ids, dtype=torch.int32)], H200, experts).launches
        require_arguments_to_fit(launch)
        assert name_of(launch) == "experts_block"
        assert launch.shared_bytes == (experts + 1) * 32 * 4
    for ids, experts in ((100_000, 256), (9, 5000), (1 << 20, MAX_BINS), (2**32 - 1, 8)):
        plan = plan_expert_histogram([view(ids, dtype=torch.int32)], H200, experts)
        steps = ("zero", "count", "sums", "scan", "scatter")
        assert names(plan) == [f"experts_{step}" for step in steps]
        for launch in plan.launches:
            require_arguments_to_fit(launch)
        chunk, warps = plan.launches[1].constants[1:3]
        assert warps % 16 == 0
        assert chunk * warps >= ids
        assert plan.launches[1].blocks[0] * 8 == warps
        tiles = plan.launches[3].blocks[0]
        assert tiles * 4096 >= (experts + 1) * warps
        assert plan.work_bytes >= tiles * 4096 * 4 + tiles * 4
    assert plan.results == (((8,), torch.int64), ((9,), torch.int64), ((2**32 - 1,), torch.int64))


def test_ids_keep_their_order() -> None:
    ids = View((6, 4), (1, 6), torch.int64)
    (launch,) = plan_expert_histogram([ids], H200, 5).launches
    assert launch.constants[-7:] == (1, 6, 4, 0, 0, 1, 6)


@pytest.mark.parametrize("op", ["bincount", "histogram", "expert_histogram"])
def test_the_kernels_serve_every_call_on_a_gpu(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class CudaTensor(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr("fusedops.providers.cuda_call.machine_refusal", lambda device: None)
    monkeypatch.setattr("fusedops.providers.cuda_call.gpu_of", lambda device: H200)
    x = torch.zeros(8, dtype=torch.float32 if op == "histogram" else torch.int64)
    arguments = (x.as_subclass(CudaTensor), 4, *([[0.0, 1.0]] if op == "histogram" else []))
    supports = OPS[op]._implementations["cuda"][0]
    assert supports(*arguments).ok
    assert not supports(x, *arguments[1:]).applicable


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_private_counters_take_no_atomics_and_overlap_pairs(arch: str, tmp_path: Path) -> None:
    kernels = tuple(
        f"fusedops::histogram_private<{struct}, false>" for struct in (STRUCTS[2], STRUCTS[3])
    )
    for name, sass in compiled("histogram.cu", kernels, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL|ATOMS)[\w.]*") == 0, name
        accesses = "".join(word[0] for word in re.findall(r"\b(LDS|STS)\.U16", sass))
        assert accesses.count("LLSS") * 4 == len(accesses) > 0, name
        assert ("ACQBULK" in sass and "PREEXIT" in sass) is (arch != "sm_80"), name


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_shared_counters_let_the_hardware_join_equal_lanes(arch: str, tmp_path: Path) -> None:
    kernels = tuple(
        f"fusedops::histogram_{kernel}<{STRUCTS[0]}, false>" for kernel in ("shared", "global")
    )
    for name, sass in compiled("histogram.cu", kernels, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert count(sass, r"ATOMS\.POPC\.INC[\w.]*") > 0, name
        assert count(sass, r"ATOMS\.ADD[\w.]*") == 0, name


@needs_wheels
@needs_disassembler
def test_other_elements_are_counted_without_local_memory_too(tmp_path: Path) -> None:
    kernels = tuple(f"fusedops::histogram_shared<{struct}, false>" for struct in STRUCTS[4::2])
    assert len(kernels) == 2
    for name, sass in compiled("histogram.cu", kernels, "sm_90a", tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_the_kernels_for_experts_use_no_local_memory(arch: str, tmp_path: Path) -> None:
    kernels = tuple(
        {
            launch.kernel
            for size in (8, 1 << 20)
            for launch in plan_expert_histogram([view(size, dtype=torch.int64)], H200, 8).launches
        }
    )
    for name, sass in compiled("experts.cu", kernels, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert ("ACQBULK" in sass) is (arch != "sm_80"), name


def test_shared_memory_is_what_an_architecture_has() -> None:
    known = {"sm_80": 160, "sm_86": 96, "sm_89": 96, "sm_90a": 224, "sm_100a": 224, "sm_120a": 96}
    assert {arch: most_shared_bytes(Gpu(arch, 1)) >> 10 for arch in known} == known


# What is measured


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoalRun]:
    """A run on the CPU that pins the reference, with torch as its only peer."""
    without_peers(monkeypatch)
    with use_provider("reference") as usage:
        yield GoalRun(
            load_goals()["cuda.hist.skew"],
            provider="reference",
            device="cpu",
            protocol=QUICK,
            store=RowStore({}, "sources", lambda: None),
            usage=usage,
        )


@pytest.mark.parametrize("name", ["int32", "uint8", "skew"])
def test_each_goal_has_a_function_that_pins_the_kernels(name: str) -> None:
    registered = load_all()[f"cuda.hist.{name}"]
    assert registered.provider == "cuda"
    assert registered.sources()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_a_row_times_us_and_torch_on_checked_counts(run: GoalRun, dtype: torch.dtype) -> None:
    rows = goals.histogram_outcomes(run, dtype, 200, 3000)
    assert timed(rows) == {MINE, "torch.bincount", "torch.scatter_add"}
    counts = torch.zeros(200, dtype=torch.int64)
    assert goals._check((counts,), torch.zeros(3, dtype=dtype), 200) is not None


def test_65536_bins_stand_beside_what_counts(run: GoalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(_run: GoalRun, _dtype: object, bins: int, _count: int) -> dict[str, Measurement]:
        return {MINE: summarize([float(bins)], mode="fake", launches=1, hot=False)}

    def experts(_run: GoalRun, _ids: int, count: int) -> dict[str, Measurement]:
        return outcomes(_run, None, count, 0)

    monkeypatch.setattr(goals, "histogram_outcomes", outcomes)
    monkeypatch.setattr(goals, "expert_outcomes", experts)
    run.goal = load_goals()["cuda.hist.int32"]
    found = goals.int32(run)
    assert found.value == 4096
    assert found.note.endswith("; 3 rows beside")


def test_every_skew_stays_in_the_range_and_the_worst_counts(
    run: GoalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniform = torch.arange(4096, dtype=torch.int32)
    made = {name: skew(uniform, 4096) for name, skew in goals.SKEWS.items()}
    for x in made.values():
        assert (x.min() >= 0, x.max() < 4096) == (True, True)
    sizes = [x.unique().numel() for x in made.values()]
    assert sizes[:3] == [1, 2, 128]
    assert made["steep"].eq(0).sum() > 400
    rows = goals.skew_outcomes(run, torch.int32, 64, 2000)
    assert set(rows) == {f"{MINE} {name}" for name in ("uniform", *goals.SKEWS)}
    assert not [row for row in rows.values() if not isinstance(row, Measurement)]
    times = {f"{MINE} {name}": 10.0 for name in ("uniform", *goals.SKEWS)}
    times[f"{MINE} one bank"] = 14.0

    def measured(_run: GoalRun, *_row: object) -> dict[str, Measurement]:
        return {
            name: summarize([us], mode="fake", launches=1, hot=False) for name, us in times.items()
        }

    monkeypatch.setattr(goals, "skew_outcomes", measured)
    found = goals.skew(run)
    assert found.value == pytest.approx(1.4)
    assert found.note.startswith("worst uint8 256 one bank")
