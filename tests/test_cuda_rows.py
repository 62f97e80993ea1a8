"""Plans of norms, gated activations and quantization: layouts, results, refusals, answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_store_launch import OnGpu

from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.errors import UnsupportedError
from fusedops.ops.op import OPS
from fusedops.ops.quantize import FORMATS as OP_FORMATS
from fusedops.ops.quantize import SCALE_ROW_ALIGNMENT as OP_ALIGNMENT
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_activation import KERNEL_ACTIVATIONS, plan_act_and_mul
from fusedops.providers.cuda_call import CallPlan
from fusedops.providers.cuda_norm import plan_norm
from fusedops.providers.cuda_plan import Gpu, View
from fusedops.providers.cuda_quantize import plan_quantize
from fusedops.providers.cuda_rows import (
    MOST_CLUSTER,
    MOST_COLUMNS,
    SCALE_ROW_ALIGNMENT,
    RowLayout,
    access_width,
    row_layout,
    rows_of,
)
from fusedops.providers.cuda_sinks import FORMATS, float32_bits, given_stride

H200 = Gpu("sm_90a", 132)
A100 = Gpu("sm_80", 108)
BF16 = torch.bfloat16


def view(
    *shape: int,
    dtype: torch.dtype = BF16,
    strides: tuple[int, ...] | None = None,
    aligned: int = 16,
) -> View:
    strides = strides or torch.empty(shape, device="meta").stride()
    return View(shape, strides, dtype, aligned)


def norm_plan(x: View, gpu: Gpu = H200, **options: Any) -> CallPlan:
    columns = x.shape[-1]
    tensors = {"residual": None, "weight": view(columns), "bias": None, "given": None}
    views = [x, *(options.pop(name, default) for name, default in tensors.items()), None]
    order = {
        "eps": 1e-6,
        "weight_offset": 0.0,
        "round_before_weight": True,
        "is_centered": False,
        "in_place": False,
        "dtype": None,
        "granularity": None,
    }
    return plan_norm(views, gpu, *({**order, **options}).values())


# Layouts


def packs_of(layout: RowLayout, part: int, thread: int) -> list[int]:
    """The packs of a row that a thread keeps: the arithmetic of csrc/include/row.cuh."""
    lane = thread % layout.lanes
    first = part * layout.packs * layout.lanes
    if layout.run == 1:
        return [first + p * layout.lanes + lane for p in range(layout.packs)]
    warps = layout.lanes // 32
    return [
        first
        + ((p // layout.run * warps + lane // 32) * layout.run + p % layout.run) * 32
        + lane % 32
        for p in range(layout.packs)
    ]


def assert_covers(layout: RowLayout, packs: int) -> None:
    held = Counter(
        pack
        for part in range(layout.parts)
        for thread in range(layout.lanes)
        for pack in packs_of(layout, part, thread)
    )
    assert set(held.values()) == {1}
    assert set(range(packs)) <= set(held)


WIDTHS = st.sampled_from([(1, 2), (2, 2), (4, 2), (8, 2), (1, 4), (2, 4), (4, 4)])


@given(
    st.sampled_from([1, 5, 64, 108, 132, 133, 1000, 16384]),
    st.one_of(st.integers(0, 40), st.integers(1, 5000)),
    WIDTHS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([H200, A100]),
)
def test_threads_share_the_packs_of_a_row(
    rows: int, packs: int, width: tuple[int, int], joins: bool, groups: bool, gpu: Gpu
) -> None:
    each, element_bytes = width
    columns = packs * each
    options = {"element_bytes": element_bytes, "joins": joins, "groups": groups}
    longest = MOST_COLUMNS * (MOST_CLUSTER if gpu.has_clusters else 1)
    if joins and columns > longest and (rows <= gpu.sms or packs > 128):
        with pytest.raises(UnsupportedError, match=f"rows of up to {longest} elements"):
            row_layout(rows, columns, each, gpu, **options)
        return
    layout = row_layout(rows, columns, each, gpu, **options)
    assert_covers(layout, packs)
    assert layout.threads % 32 == 0
    assert layout.threads <= 1024
    assert layout.threads % layout.lanes == 0
    assert layout.lanes == layout.threads or layout.lanes in (1, 2, 4, 8, 16, 32)
    assert layout.packs * each * element_bytes <= 64
    assert layout.parts == layout.cluster or (layout.cluster == 1 and not joins)
    assert layout.cluster in ((1, 2, 4, 8) if gpu.has_clusters else (1,))
    assert layout.blocks(rows) == -(-rows // (layout.threads // layout.lanes)) * layout.parts


@pytest.mark.parametrize(("width", "element_bytes"), [(1, 2), (2, 2), (4, 2), (8, 2), (4, 4)])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("columns", [64, 128, 136, 1000, 1024, 4096, 7168, 14336])
def test_a_group_of_128_lies_in_one_warp(
    columns: int, joins: bool, width: int, element_bytes: int
) -> None:
    for rows in (1, 5000):
        layout = row_layout(
            rows, columns, width, H200, element_bytes=element_bytes, joins=joins, groups=True
        )
        owner: dict[int, set[tuple[int, int, int]]] = {}
        lanes = min(layout.lanes, 32)
        joined = min(128 // width, lanes)
        for part in range(layout.parts):
            for thread in range(layout.lanes):
                for p, pack in enumerate(packs_of(layout, part, thread)):
                    if pack < columns // width:
                        group = pack * width // 128
                        place = (part, thread // joined, p // layout.run)
                        owner.setdefault(group, set()).add(place)
        assert all(len(places) == 1 for places in owner.values())
        assert len(owner) == -(-columns // 128)


def test_every_length_that_is_not_refused_has_a_layout() -> None:
    for gpu, longest in ((H200, 65536), (A100, 8192)):
        for rows in (1, gpu.sms, 5000):
            for width, element_bytes in ((1, 2), (8, 2), (1, 4), (4, 4)):
                for groups in (False, True):
                    layout = row_layout(
                        rows,
                        longest,
                        width,
                        gpu,
                        element_bytes=element_bytes,
                        joins=True,
                        groups=groups,
                    )
                    kept = layout.lanes * layout.packs * layout.parts
                    assert kept * width >= longest


def test_few_rows_get_more_threads_and_many_rows_more_bytes_a_thread() -> None:
    def norm(rows: int, columns: int) -> RowLayout:
        return row_layout(rows, columns, 8, H200, element_bytes=2, joins=True)

    assert norm(16, 4096) == RowLayout(512, 512, 1, is_early=True)
    assert norm(64, 4096) == RowLayout(512, 512, 1, is_early=True)
    assert norm(65, 4096) == RowLayout(512, 512, 1)
    assert norm(16384, 4096) == RowLayout(128, 128, 4)
    assert norm(524288, 128) == RowLayout(128, 16, 1)
    assert norm(16384, 1024) == RowLayout(128, 32, 4)
    assert norm(16, 14336) == RowLayout(224, 224, 1, parts=8, cluster=8, is_early=True)
    small = row_layout(16, 14336, 8, H200, element_bytes=2, joins=False, packs_at_most=2)
    large = row_layout(16384, 14336, 8, H200, element_bytes=2, joins=False, packs_at_most=2)
    assert (small.packs, small.blocks(16)) == (1, 224)
    # 1792 packs fill seven blocks of 256, and not four of 512.
    assert (large.threads, large.packs, large.parts) == (128, 2, 7)


def test_many_plain_rows_get_more_threads_than_those_with_several_passes() -> None:
    def layout(columns: int, rows: int = 16384, **options: Any) -> RowLayout:
        x = view(rows, columns)
        if options.pop("adds", False):
            options["residual"] = x
        (launch,) = norm_plan(x, **options).launches
        numbers = launch.kernel.partition("RowLayout<")[2].split(", ")
        return RowLayout(*map(int, numbers[:3]))

    assert layout(4096) == RowLayout(256, 256, 2)
    assert layout(4096, adds=True) == RowLayout(512, 512, 1)
    assert layout(8192) == layout(8192, adds=True) == RowLayout(512, 512, 2)
    assert layout(2048, adds=True) == RowLayout(256, 256, 1)
    assert layout(16384) == layout(16384, adds=True) == RowLayout(512, 512, 4)
    assert layout(1024) == layout(1024, adds=True) == RowLayout(128, 32, 4)
    # Several passes over a row, or results bit by bit.
    assert layout(4096, is_centered=True) == RowLayout(128, 128, 4)
    assert layout(4096, dtype="e4m3", granularity="token") == RowLayout(128, 128, 4)
    # Few rows as before.
    assert layout(4096, rows=132) == layout(4096, rows=132, adds=True) == RowLayout(512, 512, 1)


def test_the_next_kernel_starts_early_behind_few_rows() -> None:
    for rows, flag in ((1, "true"), (64, "true"), (65, "false"), (16384, "false")):
        for plan in (
            norm_plan(view(rows, 4096)),
            norm_plan(view(rows, 4096), dtype="int8", granularity="block128"),
            plan_act_and_mul((view(rows, 8192), None, None), H200, "silu", None, None),
        ):
            layout = plan.launches[0].kernel.partition("RowLayout<")[2].partition(">")[0]
            assert layout.split(", ")[-1] == flag


def test_a_grid_that_is_too_large_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="2147483647 blocks"):
        RowLayout(128, 128, 1, parts=2).blocks(2**30)


def test_accesses_are_as_wide_as_every_tensor_allows() -> None:
    def width(*views: View, vectors: tuple[View, ...] = (), columns: int = 4096) -> int:
        return access_width([rows_of(each) for each in views], list(vectors), columns)

    x = view(4, 4096)
    assert width(x) == 8
    assert width(view(4, 4096, dtype=torch.float32)) == 4
    assert width(view(4, 4096, aligned=8)) == 4
    assert width(view(4, 4096, strides=(4100, 1))) == 4
    assert width(view(4, 4096, strides=(4097, 1))) == 1
    assert width(view(4, 4096, strides=(8192, 2))) == 1
    assert width(x, view(4, 4096, aligned=4)) == 2
    assert width(view(4, 3420), columns=3420) == 4
    assert width(x, vectors=(view(4096, aligned=2),)) == 1
    # A float32 weight beside bfloat16 is read in two steps of 16 bytes.
    assert width(x, vectors=(view(4096, dtype=torch.float32),)) == 8
    assert width(x, vectors=(view(4096, dtype=torch.float32, aligned=8),)) == 2
    # Batch dimensions of size one have strides that nobody follows.
    assert width(view(1, 4, 4096, strides=(3, 4096, 1))) == 8


# Plans


def test_facts_of_the_kernels_are_those_of_the_operations() -> None:
    assert SCALE_ROW_ALIGNMENT == OP_ALIGNMENT
    assert {name: dtype for name, (_, dtype) in FORMATS.items()} == {
        name: fmt.dtype for name, fmt in OP_FORMATS.items()
    }
    assert set(KERNEL_ACTIVATIONS) == set(ACTIVATIONS)


def test_a_norm_writes_what_the_operation_returns() -> None:
    x, residual = view(2, 3, 4096), view(2, 3, 4096, strides=(20000, 5000, 1))
    plan = norm_plan(x, residual=residual)
    assert plan.results == (((2, 3, 4096), BF16), ((2, 3, 4096), BF16))
    (launch,) = plan.launches
    assert launch.tensors == (0, 1, 2, 3, 4, 6, 7, 5)
    assert launch.blocks == (6, 1)
    quantized = norm_plan(x, residual=residual, dtype="e4m3", granularity="block128")
    assert quantized.results == (
        ((2, 3, 4096), torch.float8_e4m3fn),
        ((32, 8), torch.float32),
        ((2, 3, 4096), BF16),
    )
    # Two rows behind the last one write the padding.
    assert quantized.launches[0].blocks == (8, 1)
    assert quantized.launches[0].tensors == (0, 1, 2, 3, 4, 6, 8, 7)
    in_place = norm_plan(x, residual=residual, in_place=True)
    assert in_place.results == ()
    assert in_place.launches[0].tensors == (0, 1, 2, 3, 4, 0, 1, 5)


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({}, "Rms<false, 0>"),
        ({"weight_offset": 0.5}, "Rms<false, 1>"),
        ({"weight": view(64, dtype=torch.float32)}, "Rms<false, 1>"),
        ({"round_before_weight": False}, "Rms<false, 2>"),
        ({"residual": view(5, 64)}, "Rms<true, 0>"),
        ({"is_centered": True, "weight": None}, "Layer"),
    ],
)
def test_a_norm_rounds_where_the_operation_does(options: dict[str, Any], norm: str) -> None:
    (launch,) = norm_plan(view(5, 64), **options).launches
    assert f"fusedops::{norm}," in launch.kernel


def test_a_float32_norm_rounds_once() -> None:
    (launch,) = norm_plan(view(5, 64, dtype=torch.float32)).launches
    assert "Rms<false, 2>" in launch.kernel


@pytest.mark.parametrize(
    ("plan", "launches", "results"),
    [
        (lambda: norm_plan(view(0, 64)), 0, 1),
        (lambda: norm_plan(view(3, 0)), 0, 1),
        (lambda: norm_plan(view(3, 0), dtype="int8", granularity="token"), 1, 2),
        (lambda: plan_quantize((view(0, 64), None, None), H200, "e4m3", "token"), 0, 2),
        (lambda: plan_quantize((view(3, 0), None, None), H200, "e4m3", "token"), 1, 2),
        (lambda: plan_quantize((view(0, 64), None, None), H200, "e4m3", "tensor"), 2, 2),
        (lambda: plan_act_and_mul((view(0, 64), None, None), H200, "silu", None, None), 0, 1),
        (lambda: plan_act_and_mul((view(3, 0), None, None), H200, "silu", None, None), 0, 1),
    ],
)
def test_b04_empty_inputs_launch_only_what_writes_scales(
    plan: Callable[[], CallPlan], launches: int, results: int
) -> None:
    found = plan()
    assert len(found.launches) == launches
    assert len(found.results) == results
    assert all(launch.blocks[0] >= 1 for launch in found.launches)


def test_a_tensor_scale_takes_two_launches_and_no_counter() -> None:
    plan = plan_quantize((view(16384, 4096), None, None), H200, "e4m3", "tensor")
    first, second = plan.launches
    assert first.tensors == (0, 5)
    assert second.tensors == (0, 5, 3, 4)
    assert first.blocks == second.blocks
    assert plan.work_bytes == 4 * first.blocks[0]
    assert plan.results == (((16384, 4096), torch.float8_e4m3fn), ((), torch.float32))


def test_given_scales_may_lie_apart_but_evenly() -> None:
    assert given_stride(None) == 0
    assert given_stride(view(dtype=torch.float32)) == 0
    assert given_stride(view(6, dtype=torch.float32, strides=(3,))) == 3
    assert given_stride(view(2, 3, dtype=torch.float32)) == 1
    assert given_stride(view(1, dtype=torch.float32)) == 1
    assert given_stride(view(4, dtype=torch.float32, strides=(0,))) == 0
    with pytest.raises(UnsupportedError, match=r"evenly, got strides \(8, 2\)"):
        given_stride(view(2, 3, dtype=torch.float32, strides=(8, 2)))


def test_what_the_kernels_cannot_is_refused_with_its_reason() -> None:
    with pytest.raises(UnsupportedError, match="up to 65536 elements in registers, got 65537"):
        norm_plan(view(2, 65537))
    with pytest.raises(UnsupportedError, match="up to 8192 elements in registers, got 16384"):
        norm_plan(view(2, 16384), A100)
    with pytest.raises(UnsupportedError, match="contiguous weight and bias, got one with stride 2"):
        norm_plan(view(2, 64), weight=view(64, strides=(2,)))
    scattered = view(2, 2, 2, 2, 2, 64, strides=(9000, 4000, 1800, 800, 300, 1))
    with pytest.raises(UnsupportedError, match="up to 4 dimensions of x"):
        norm_plan(scattered)
    with pytest.raises(UnsupportedError, match="up to 4 dimensions"):
        plan_act_and_mul((scattered, None, None), H200, "silu", None, None)


def test_long_rows_that_share_no_scale_are_not_refused() -> None:
    x = view(3, 2 * 10**6)
    assert plan_act_and_mul((x, None, None), A100, "silu", None, None).launches
    assert plan_act_and_mul((x, None, None), A100, "silu", "e4m3", "block128").launches
    assert plan_quantize((x, None, None), A100, "int8", "tensor").launches
    with pytest.raises(UnsupportedError, match="in registers"):
        plan_quantize((x, None, None), A100, "int8", "token")


def test_numbers_travel_as_the_bits_of_a_float32() -> None:
    assert float32_bits(1.0) == 0x3F800000
    assert float32_bits(-0.5) == 0xBF000000


# The provider


class CudaTensor(OnGpu):
    is_cuda = True  # type: ignore[assignment]


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    tensor = x.as_subclass(CudaTensor)
    tensor.index = 0
    return tensor


def calls() -> dict[str, tuple[Any, ...]]:
    x, weight = on_gpu(torch.randn(3, 64)), on_gpu(torch.randn(64))
    rms = (1e-6, 0.0, True)
    return {
        "rms_norm": (x, weight, *rms),
        "rms_norm_quantize": (x, weight, None, *rms, "e4m3", "token"),
        "fused_add_rms_norm": (x, x, weight, *rms),
        "fused_add_rms_norm_": (x, x, weight, *rms),
        "fused_add_rms_norm_quantize": (x, x, weight, None, *rms, "e4m3", "token"),
        "layer_norm": (x, weight, None, 1e-5),
        "layer_norm_quantize": (x, None, None, None, 1e-5, "e4m3", "block128"),
        "act_and_mul": (x, "silu"),
        "act_and_mul_quantize": (x, None, "silu", "int8", "token"),
        "quantize": (x, "e4m3", "tensor"),
        "quantize_static": (x, on_gpu(torch.ones(())), "e4m3"),
    }


@pytest.mark.parametrize("op", calls())
def test_the_kernels_serve_every_call_on_a_gpu(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedops.providers.cuda_call.gpu_of", lambda device: H200)
    monkeypatch.setattr("fusedops.providers.cuda_call.machine_refusal", lambda device: None)
    args = calls()[op]
    assert OPS[op].answers(*args)["cuda"].ok


def test_a_cpu_tensor_is_not_for_the_kernels() -> None:
    with use_provider("cuda"), pytest.raises(UnsupportedError, match="got one on cpu"):
        torch.ops.fusedops.act_and_mul(torch.randn(2, 4), "silu")


def test_results_have_the_shapes_that_the_operations_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []

    def bind(launch: Any, device: int) -> Callable[..., None]:
        return lambda *addresses: launched.append(launch.kernel)

    monkeypatch.setattr("fusedops.providers.cuda_call.bind_launch", bind)
    monkeypatch.setattr("fusedops.providers.cuda_call.gpu_of", lambda device: H200)
    monkeypatch.setattr("fusedops.providers.cuda_call.current_device", lambda: None)
    monkeypatch.setattr("fusedops.providers.cuda_call.machine_refusal", lambda device: None)
    for op, args in calls().items():
        plain = tuple(a.as_subclass(torch.Tensor) if torch.is_tensor(a) else a for a in args)
        with use_provider("reference"):
            promised = OPS[op]._run_fake(*plain)
        got = OPS[op]._implementations["cuda"][1](*args)
        assert type(got) is type(promised)
        listed = [got] if torch.is_tensor(got) else list(got or ())
        expected = [promised] if torch.is_tensor(promised) else list(promised or ())
        for one, other in zip(listed, expected, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (
                other.shape,
                other.dtype,
                other.stride(),
            )
    assert len(launched) == len(calls()) + 1  # quantize of a tensor takes two
