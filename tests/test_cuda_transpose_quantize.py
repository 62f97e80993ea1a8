"""Plans and SASS of the transposes that cast or quantize, and when they serve a call."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_kernels import compiled, count
from test_cuda_rows import CudaTensor, on_gpu, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.errors import UnsupportedError
from fusedops.jit import resources
from fusedops.jit.nvrtc import CudaProgram, compile_program, program_key
from fusedops.ops.op import OPS
from fusedops.providers.cuda_call import CallPlan
from fusedops.providers.cuda_plan import Gpu, Launch, View
from fusedops.providers.cuda_rows import KERNEL_FLOATS
from fusedops.providers.cuda_transpose import tile_side
from fusedops.providers.cuda_transpose_quantize import (
    TRANSPOSE_QUANTIZE,
    plan_transpose_cast,
    plan_transpose_quantize,
)

H200 = Gpu("sm_90a", 132)
A100 = Gpu("sm_80", 108)
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
ONE = View((), (), F32)
LOAD_16 = r"LDG\.E[\w.]*\.128[\w.]*"
STORE_16 = r"STG\.E[\w.]*\.128[\w.]*"

needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")


def quantized(
    x: View, dtype: str, granularity: str, given: View | None = None, gpu: Gpu = H200
) -> CallPlan:
    return plan_transpose_quantize((x, given, None), gpu, dtype, granularity)


def cast(x: View, dtype: torch.dtype, gpu: Gpu = H200) -> CallPlan:
    return plan_transpose_cast((x, None, None), gpu, dtype)


def name_of(launch: Launch) -> str:
    return launch.kernel.removeprefix("fusedops::").partition("<")[0]


def names_of(plan: CallPlan) -> list[str]:
    return [name_of(launch) for launch in plan.launches]


# Plans


@pytest.mark.parametrize(
    ("x", "width"),
    [
        (view(256, 512), 8),
        (view(256, 256, aligned=4), 2),
        (view(256, 255), 1),
        (view(256, 250), 2),
        (view(3, 256, 256, strides=(256 * 256 + 4, 256, 1)), 4),
        # Aligned vectors of rows that start between them, where most tiles have neighbours.
        (view(256, 512, aligned=4), 0),
        (view(256, 257), 0),
        (view(256, 129, dtype=F32), 0),
        (view(256, 512, strides=(1024, 2)), 1),
        (view(256, 512, dtype=F32), 4),
        (view(256, 127, dtype=F32), 1),
        (view(7, 256, 512, strides=(0, 512, 1)), 8),
    ],
)
def test_elements_are_read_together_where_every_row_allows_it(x: View, width: int) -> None:
    for plan in (quantized(x, "e4m3", "block128"), cast(x, F16)):
        (launch,) = plan.launches
        assert name_of(launch) == "turn_tiles"
        assert launch.kernel.endswith(f"{KERNEL_FLOATS[x.dtype]}, {width}, true>")


def test_16_bytes_are_written_where_rows_of_the_result_allow_it() -> None:
    for rows, sizes in ((256, (1, 2, 4)), (264, (2, 4)), (260, (4,)), (259, ())):
        x = view(rows, 64)
        plans = {1: quantized(x, "int8", "block128"), 2: cast(x, F16), 4: cast(x, F32)}
        for size, plan in plans.items():
            assert plan.launches[0].kernel.endswith(f"{str(size in sizes).lower()}>")


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_tiles_cover_the_matrix_once(dtype: torch.dtype) -> None:
    side = tile_side(dtype.itemsize)
    for rows, columns in ((128, side), (129, side + 1), (40_000, 2 * side + 8)):
        for plan, size in (
            (quantized(view(3, rows, columns, dtype=dtype), "e4m3", "block128"), 1),
            (cast(view(3, rows, columns, dtype=dtype), F32), 4),
        ):
            (launch,) = plan.launches
            row_tiles, column_tiles, group, all_rows, known, pitch = launch.constants[4:10]
            assert (row_tiles - 1) * 128 < rows <= row_tiles * 128
            assert (column_tiles - 1) * side < columns <= column_tiles * side
            assert group == min(row_tiles, 1024 // size)
            assert launch.blocks == (3 * row_tiles * column_tiles, 1)
            assert launch.shared_bytes == 128 * side * size <= 64 << 10
            assert (all_rows, known) == (3 * columns, 0)
            assert 0 <= pitch - all_rows < 4
            assert pitch % 4 == 0
            assert len(launch.tensors) + len(launch.constants) == len(launch.parameters)


def test_groups_and_given_scales_take_one_pass_and_a_scale_a_row_takes_two() -> None:
    x = view(2, 130, 136)
    groups = quantized(x, "e4m3", "block128")
    assert names_of(groups) == ["turn_tiles"]
    assert groups.launches[0].tensors == (0, 1, 3, 4)
    assert [shape for shape, _ in groups.results] == [(2, 136, 130), (2, 272)]
    given = quantized(x, "int8", "token", View((272,), (2,), F32))
    assert names_of(given) == ["turn_tiles"]
    assert given.launches[0].tensors == (0, 1, 3, 2)
    assert given.launches[0].constants[8] == 2
    assert len(given.results) == 1
    token = quantized(x, "e4m3", "token")
    assert names_of(token) == ["reduce_columns", "turn_tiles"]
    assert [launch.tensors for launch in token.launches] == [(0, 5), (0, 5, 3, 4)]
    assert token.results == (
        ((2, 136, 130), torch.float8_e4m3fn),
        ((2, 136), F32),
        ((2, 136), BF16),
    )
    split = quantized(view(60_000, 136), "e4m3", "token")
    assert names_of(split) == ["reduce_columns", "reduce_finish", "turn_tiles"]
    assert [launch.tensors for launch in split.launches] == [(0, 6), (6, 5), (0, 5, 3, 4)]
    assert split.work_bytes > 0


@pytest.mark.parametrize(
    "x",
    [
        view(64, 48, strides=(1, 64)),
        view(3, 64, 48, strides=(48 * 64, 1, 64)),
        view(1, 77),
        view(5, 77, 1),
    ],
)
def test_what_lies_in_order_already_is_read_as_rows(x: View) -> None:
    for granularity in ("token", "block128"):
        assert names_of(quantized(x, "e4m3", granularity)) == ["quantize_rows"]
    assert names_of(quantized(x, "e4m3", "tensor", ONE)) == ["quantize_rows"]
    (launch,) = cast(x, F32).launches
    assert name_of(launch) == "cast_packs"
    width = int(launch.kernel.split(", ")[2])
    assert launch.constants[0] * width == math.prod(x.shape)
    assert width == (8 if x.shape[-1] == 48 else 1)


def test_rows_that_quantize_would_refuse_are_turned() -> None:
    for gpu, rows in ((H200, 65_537), (A100, 8_193)):
        x = view(rows, 8, strides=(1, rows))
        assert names_of(quantized(x, "e4m3", "token", gpu=gpu))[-1] == "turn_tiles"
        assert names_of(quantized(x, "e4m3", "block128", gpu=gpu)) == ["quantize_rows"]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (2, 0, 4)], ids=str)
def test_b04_empty_matrices_have_results(shape: tuple[int, ...]) -> None:
    *batch, rows, columns = shape
    assert cast(view(*shape), F32) == CallPlan((((*batch, columns, rows), F32),))
    for granularity in ("token", "block128"):
        plan = quantized(view(*shape), "int8", granularity)
        assert plan.results[0] == ((*batch, columns, rows), torch.int8)
        assert "turn_tiles" not in names_of(plan)
        # Rows without elements have scales all the same.
        assert bool(plan.launches) is (rows == 0 and columns > 0)


def test_more_than_2_to_31_elements_have_64_bit_places() -> None:
    (launch,) = quantized(view(70_000, 70_000), "e4m3", "block128").launches
    assert launch.parameters.count("int64") == len(launch.parameters) - 7
    assert launch.constants[:4] == (70_000, 70_000, 70_000, 1)


def test_too_many_dimensions_or_tiles_are_refused() -> None:
    x = view(*(2,) * 5, 16, 16, strides=(9000, 4000, 1900, 900, 400, 16, 1))
    many = view(2**31, 8, 8, strides=(0, 8, 1))
    for granularity in ("token", "block128"):
        with pytest.raises(UnsupportedError, match="up to 4"):
            quantized(x, "e4m3", granularity)
    with pytest.raises(UnsupportedError, match="up to 4 batch dimensions"):
        cast(x, F32)
    with pytest.raises(UnsupportedError, match="2147483647 tiles, got 2147483648"):
        cast(many, F32)
    with pytest.raises(UnsupportedError, match="2147483647 tiles"):
        quantized(many, "e4m3", "block128")
    with pytest.raises(UnsupportedError, match="scales that lie evenly"):
        quantized(view(3, 64, 48), "e4m3", "token", View((3, 48), (100, 1), F32))


# The provider


def calls() -> dict[str, tuple[Any, ...]]:
    x = on_gpu(torch.randn(64, 48))
    return {"transpose_cast": (x, BF16), "transpose_quantize": (x, None, "e4m3", "block128")}


@pytest.mark.parametrize("op", calls())
def test_the_kernels_serve_every_call_on_a_gpu(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedops.providers.cuda_call.gpu_of", lambda device: H200)
    monkeypatch.setattr("fusedops.providers.cuda_call.machine_refusal", lambda device: None)
    args = calls()[op]
    assert isinstance(args[0], CudaTensor)
    assert OPS[op].answers(*args)["cuda"].ok


def test_largest_magnitudes_are_not_returned() -> None:
    x = torch.randn(130, 8)
    tensors, options = TRANSPOSE_QUANTIZE.split(x, None, "e4m3", "token")
    assert tensors == (x, None, None)
    results = tuple(
        torch.zeros(shape, dtype=dtype)
        for shape, dtype in quantized(view(130, 8), "e4m3", "token").results
    )
    wrapped = TRANSPOSE_QUANTIZE.wrap(results, options)
    assert [each.shape for each in wrapped] == [(8, 130), (8,)]
    padded = (torch.zeros(3, 5, 130), torch.zeros(2, 16))
    assert TRANSPOSE_QUANTIZE.wrap(padded, ("e4m3", "block128"))[1].shape == (2, 15)


# SASS


def sass_of(plans: dict[str, CallPlan], arch: str, folder: Path) -> dict[str, str]:
    last = {name: plan.launches[-1] for name, plan in plans.items()}
    kernels = tuple(sorted({launch.kernel for launch in last.values()}))
    found = compiled("transpose_quantize.cu", kernels, arch, folder)
    return {name: found[launch.kernel] for name, launch in last.items()}


@needs_wheels
@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHES)
def test_tiles_move_16_bytes_at_a_time(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    x, wide = view(8192, 8192), view(8192, 8192, dtype=F32)
    plans = {
        "group": quantized(x, "e4m3", "block128", gpu=gpu),
        "token": quantized(x, "e4m3", "token", gpu=gpu),
        "given": quantized(x, "int8", "tensor", ONE, gpu),
        "wide group": quantized(wide, "e4m3", "block128", gpu=gpu),
        "narrowed": cast(wide, BF16, gpu),
        "widened": cast(x, F32, gpu),
    }
    writes = {"wide group": 2, "narrowed": 4, "widened": 16}
    for name, sass in sass_of(plans, arch, tmp_path).items():
        assert count(sass, LOAD_16) == 8, name
        assert count(sass, r"LDG[\w.]*") == (9 if name in ("token", "given") else 8), name
        assert count(sass, STORE_16) == writes.get(name, 4), name
        # Beside the values the scales of groups and rows.
        scales = name in ("group", "token", "wide group")
        assert count(sass, r"STG[\w.]*") == writes.get(name, 4) + scales, name
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert ("ACQBULK" in sass) is (arch != "sm_80"), name
        assert ("PREEXIT" in sass) is (arch != "sm_80"), name
        if arch != "sm_80" and name in ("group", "token"):
            # The conversion of two floats to e4m3 is one instruction.
            assert count(sass, r"F2FP\.[\w.]*E4M3[\w.]*") == 32, name


@needs_wheels
@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHES)
def test_no_kernel_uses_local_memory(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    odd, wide = view(8191, 8193), view(8191, 8193, dtype=F32)
    plans = {
        "token": quantized(odd, "e4m3", "token", gpu=gpu),
        "wide group": quantized(wide, "int8", "block128", gpu=gpu),
        "widened": cast(odd, F32, gpu),
        "strided": cast(view(8192, 8192, strides=(16384, 2)), F32, gpu),
        "packs": cast(view(8192, 8192, strides=(1, 8192)), F32, gpu),
    }
    for name, sass in sass_of(plans, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert count(sass, r"(?:ATOM|ATOMG|ATOMS|RED)(?:\.[\w.]*)?") == 0, name


@needs_wheels
def test_tiles_have_the_shared_memory_that_plans_count_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['#include "turned_tile.cuh"', "namespace fusedops {"]
    for dtype in (F32, BF16):
        columns = f"kTile<{KERNEL_FLOATS[dtype]}>"
        x = view(256, 256, dtype=dtype)
        for plan in (quantized(x, "int8", "block128"), cast(x, F16), cast(x, F32)):
            (launch,) = plan.launches
            size = plan.results[0][1].itemsize
            tile = f"TurnedTile<{size}, {columns}>"
            lines.append(f'static_assert({tile}::kBytes == {launch.shared_bytes}, "{tile}");')
    lines.append("__global__ void nothing() {} }")
    root = tmp_path / "csrc"
    shutil.copytree(resources.csrc_dir(), root)
    monkeypatch.setattr(resources, "PACKAGE_DIR", tmp_path / "fusedops")
    (root / "sizes.cu").write_text("\n".join(lines))
    compile_program(CudaProgram("sizes.cu", ("fusedops::nothing",)), "sm_90a", tmp_path)


@needs_wheels
def test_the_keys_follow_the_headers() -> None:
    program = CudaProgram("transpose_quantize.cu", ("fusedops::any",))
    files = {path for path, _ in program_key(program, "sm_90a").sources.files}
    assert {"include/turned_tile.cuh", "include/row_store.cuh", "include/tiles.cuh"} <= files
