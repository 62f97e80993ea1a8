"""Every panel of the small ladder measured on a stand-in for a GPU, whose kernels are torch's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ladder_results import LIMITS
from torch import Tensor

from fusedops.bench.runner import CpuRunner
from fusedops.bench.timer import Protocol
from fusedops.errors import LaunchError
from fusedops.ladders import (
    load_ladder,
    small_attention,
    small_fusion,
    small_host,
    small_memory,
    small_warps,
)
from fusedops.ladders.figures import Bench, FigureRow, Panel
from fusedops.ladders.model import LadderKernel

FIGURES = {figure.id: figure for figure in load_ladder("small").figures}
MEASURED = [
    (figure.id, panel)
    for figure in FIGURES.values()
    if figure.id != "small.calls"
    for panel in figure.panels
]
QUICK = Protocol(
    samples=1, min_samples=1, min_window_us=0.001, settle_rounds=1, settle_min_s=0, settle_max_s=0
)
ROWS = {
    "Rate against length": {"scalar": 2, "16 bytes": 2, "torch": 2},
    "Tail and alignment": {"scalar": 3, "16 bytes": 3, "torch": 3},
    "Time against paths": {"by lane": 6, "by warp": 6},
    "Useful rate against stride": {"read": 6, "write": 6},
    "Registers: __launch_bounds__(256, blocks)": {"256 threads": 5},
    "Shared memory and the rate of one load a thread": {"one load a thread": 7},
    "Carve-out": {"16 KiB a block": 4},
    "Clusters": {"portable": 4, "clusters": 1},
    "Rate against size": {
        f"{way} GPU, {kind}": 2 for way in ("to", "from") for kind in ("pinned", "pageable")
    },
    "Overlap with a kernel": {"pinned": 4, "pageable": 4},
    "What each clock says of one kernel": {
        "graph of many": 4,
        "host, not waiting": 4,
        "host, waiting": 4,
        "events around one": 4,
        "events around many": 4,
    },
    "Time against N": {
        "torch, eager": 2,
        "eager": 2,
        "eager, dependent": 2,
        "graph": 2,
        "graph, dependent": 2,
        "one kernel": 2,
    },
    "Traffic against length": {"materialised": 2, "online, 16 rows": 2, "online, 128 rows": 2},
    "Traffic against memory on chip": {"online": 4},
    "gate_up + SwiGLU": {"gate_up + SwiGLU": 2},
    "norm + quantize": {"norm + quantize": 2},
    "add + norm": {"add + norm": 2},
}
"""Panel -> series -> rows, with the sizes that ``a_gpu`` leaves."""


# Kernels


def _saxpy(x: Tensor, y: Tensor, out: Tensor, a: float, count: int) -> None:
    torch.add(y, x, alpha=a, out=out)


def _strided_read(x: Tensor, out: Tensor, stride: int, count: int) -> None:
    out.copy_(x[::stride])


def _strided_write(x: Tensor, out: Tensor, stride: int, count: int) -> None:
    out[::stride] = x


def _divergence(x: Tensor, out: Tensor, paths: int, by_warp: int, *_: int) -> None:
    out.copy_(small_warps.branch_reference(x, paths, by_warp))


def _mix(x: Tensor, out: Tensor, rounds: int, count: int) -> None:
    out.copy_(small_warps.mix_reference(x))


def _one_load(x: Tensor, out: Tensor, count: int, *, threads: int) -> None:
    out[:threads] = small_warps.strided_sums(x, threads)


def _chain(x: Tensor, rounds: int, count: int) -> None:
    x.copy_(small_host.chain_reference(x, rounds))


def _attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, moved: Tensor, *_: float) -> None:
    out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v))
    moved += q.numel()


def _scores(q: Tensor, k: Tensor, scores: Tensor, moved: Tensor, scale: float, length: int) -> None:
    scores.copy_(q @ k.mT * scale)
    moved += scores.numel()


def _softmax(scores: Tensor, moved: Tensor, length: int) -> None:
    scores.copy_(scores.softmax(-1))
    moved += 2 * scores.numel()


def _values(weights: Tensor, v: Tensor, out: Tensor, moved: Tensor, length: int) -> None:
    out.copy_(weights @ v)
    moved += weights.numel()


KERNELS: dict[str, Callable[..., None]] = {
    "small_saxpy_scalar": _saxpy,
    "small_saxpy_vector": _saxpy,
    "small_strided_read": _strided_read,
    "small_strided_write": _strided_write,
    "small_divergence": _divergence,
    "small_registers": _mix,
    "small_spin": lambda out, cycles: out.fill_(cycles + 3),
    "small_chain": _chain,
    "small_attention_online": _attention,
    "small_attention_scores": _scores,
    "small_attention_softmax": _softmax,
    "small_attention_values": _values,
}


def launched(kernel: LadderKernel, grid: Any, block: Any, args: Any, cluster: Any) -> None:
    """Do what the kernel does; arguments are as many as it declares."""
    assert len(args) == len(kernel.parameters)
    for parameter, arg in zip(kernel.parameters, args, strict=True):
        assert isinstance(arg, Tensor) == (parameter == "pointer")
    if kernel.name == "small_one_load":
        _one_load(*args, threads=grid[0] * block[0])
    elif kernel.name == "small_cluster":
        index = torch.arange(grid[0], dtype=torch.int32)
        args[0].copy_(index // cluster[0] * cluster[0] + (index + 1) % cluster[0])
    else:
        KERNELS[kernel.name.partition("<")[0]](*args)


class _Event:
    """An event that lies 5 us behind the one before."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Nothing is on its way."""

    synchronize = record

    def elapsed_time(self, stop: _Event) -> float:
        """In ms, as torch has it."""
        return 5e-3


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a GPU of 16 multiprocessors; sizes are small."""

    def loaded(kernel: LadderKernel, device: torch.device) -> Any:
        def launch(grid: Any, block: Any, args: Any, **options: Any) -> None:
            launched(kernel, grid, block, args, options.get("cluster"))

        return SimpleNamespace(launch=launch, name=kernel.name)

    def clusters_at_once(*values: Any) -> int:
        if values[-1] > 8:
            raise LaunchError("no clusters of 16")
        return 2

    properties = SimpleNamespace(multi_processor_count=16, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(LadderKernel, "loaded", loaded)
    for name, value in {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: None,
        "Event": _Event,
        "Stream": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, answer in {
        "blocks_per_sm": lambda kernel, device, threads, shared: 8 if shared < 1 << 15 else 2,
        "carve_out": lambda *_: contextlib.nullcontext(),
        "clusters_at_once": clusters_at_once,
        "local_bytes": lambda *_: 0,
        "registers": lambda *_: 64,
    }.items():
        monkeypatch.setattr(small_warps, name, answer)
    copy_pair = small_host.copy_pair
    monkeypatch.setattr(
        small_host, "copy_pair", lambda way, kind, *rest: copy_pair(way, "pageable", *rest)
    )
    monkeypatch.setattr(small_host, "graph_of", lambda call: call)
    monkeypatch.setattr(small_fusion, "use_provider", lambda name: contextlib.nullcontext())
    for module, sizes in (
        (small_memory, {"_COUNTS": (100, 4096), "_ODD": 4099, "_ACCESSES": 256}),
        (small_warps, {"_THREADS_IN_ALL": 512, "_MIX_COUNT": 64, "_ONE_LOAD_COUNT": 10_000}),
        (small_host, {"COPY_BYTES": (64, 1000), "_OVERLAP_BYTES": 500, "NUMBERS": (1, 4)}),
        (small_attention, {"LENGTHS": (64, 128), "_LENGTH": 64}),
        (small_fusion, {"SIZES_M": (1, 16), "HIDDEN": 64, "GATED_K": 32, "GATED_F": 16}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def rows_of(panel: Panel) -> list[FigureRow]:
    """What a panel measures on the stand-in."""
    device = torch.device("cpu")
    return list(panel.measure(Bench(device, LIMITS, CpuRunner(), QUICK)))  # type: ignore[arg-type]


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(("figure", "panel"), MEASURED, ids=[panel.name for _, panel in MEASURED])
def test_a_panel_measures_every_series_at_every_place(figure: str, panel: Panel) -> None:
    if panel.name == "gate_up + SwiGLU" and small_fusion.PAIRS[0].needs():
        pytest.skip(small_fusion.PAIRS[0].needs())
    rows = rows_of(panel)
    assert not [row for row in rows if row.failed]
    assert Counter(row.series for row in rows) == ROWS[panel.name]
    for row in rows:
        assert row.absent or set(row.values) == set(panel.columns)
    assert len({row.key for row in rows}) == len(rows)
    # Where sizes are those of a run, the rows with a probe are the rows there are.
    if figure in ("small.divergence", "small.coalescing"):
        assert {row.key for row in rows} == panel.probes.keys()


def test_every_panel_has_its_rows_listed() -> None:
    assert [panel.name for _, panel in MEASURED] == list(ROWS)


@pytest.fixture
def broken(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write nothing."""
    monkeypatch.setattr(
        LadderKernel,
        "loaded",
        lambda kernel, device: SimpleNamespace(launch=lambda *_, **__: None, name=kernel.name),
    )


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    "panel",
    [
        panel
        for figure, panel in MEASURED
        if figure not in ("small.copies", "small.fusion") and panel.name != "Time against N"
    ],
    ids=lambda panel: panel.name,
)
def test_a_kernel_that_writes_nothing_gets_no_time(panel: Panel) -> None:
    kernels = [row for row in rows_of(panel) if row.series != "torch" and not row.absent]
    assert kernels
    assert all(row.failed and not row.values for row in kernels)


@pytest.mark.usefixtures("broken")
def test_launches_that_do_nothing_are_failed_rows() -> None:
    (panel,) = FIGURES["small.launches"].panels
    rows = rows_of(panel)
    assert {row.series for row in rows if row.values} == {"torch, eager"}
    assert sum(bool(row.failed) for row in rows) == 10


@pytest.mark.usefixtures("a_gpu")
def test_traffic_is_what_the_threads_counted() -> None:
    panel = FIGURES["small.attention"].panels[0]
    rows = {row.key: row.values for row in rows_of(panel)}
    scores = small_attention.HEADS * 128 * 128
    assert rows["materialised, 128"]["counted MB"] == pytest.approx(4 * 4 * scores / 1e6)
    terms = small_attention.materialised_terms(128) * small_attention.HEADS
    assert rows["materialised, 128"]["counted / formula"] == pytest.approx(4 * scores / terms)
