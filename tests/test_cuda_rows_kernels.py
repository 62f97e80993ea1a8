"""The kernels that keep rows in registers, compiled for each architecture: what their SASS says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_kernels import compiled, count
from test_cuda_rows import norm_plan, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.jit.nvrtc import CudaProgram, compile_program, lowered_names, program_key
from fusedops.providers.cuda_activation import plan_act_and_mul
from fusedops.providers.cuda_call import CallPlan
from fusedops.providers.cuda_plan import Gpu, Launch
from fusedops.providers.cuda_quantize import plan_quantize

pytestmark = [
    needs_wheels,
    pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed"),
]

TOKEN = {"dtype": "e4m3", "granularity": "token"}
GROUP = {"dtype": "e4m3", "granularity": "block128"}
LOAD_16 = r"LDG\.E[\w.]*\.128[\w.]*"
STORE_16 = r"STG\.E[\w.]*\.128[\w.]*"
STORE_8 = r"STG\.E[\w.]*\.64[\w.]*"


def act_plan(gpu: Gpu, rows: int, columns: int, *storage: str, act: str = "silu") -> CallPlan:
    dtype, granularity = storage or (None, None)
    return plan_act_and_mul((view(rows, 2 * columns), None, None), gpu, act, dtype, granularity)


def sass_of(arch: str, folder: Path, **plans: CallPlan) -> dict[str, str]:
    """Name -> SASS of the last launch of each plan; one compilation for all, of one file."""
    last: dict[str, Launch] = {name: plan.launches[-1] for name, plan in plans.items()}
    (file,) = {launch.program.file for launch in last.values()}
    kernels = tuple(sorted({launch.kernel for launch in last.values()}))
    found = compiled(file, kernels, arch, folder)
    return {name: found[launch.kernel] for name, launch in last.items()}


def assert_sound(sass: dict[str, str], arch: str) -> None:
    """No local memory, no atomics, and both halves of a programmatic dependent launch."""
    for name, text in sass.items():
        assert count(text, r"(?:LDL|STL)[\w.]*") == 0, name
        assert count(text, r"(?:ATOM|ATOMG|ATOMS|RED)(?:\.[\w.]*)?") == 0, name
        assert ("ACQBULK" in text) is (arch != "sm_80"), name
        assert ("PREEXIT" in text) is (arch != "sm_80"), name


@pytest.mark.parametrize("arch", ARCHES)
def test_norms_read_and_write_16_bytes_at_a_time(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    x = view(16384, 4096)
    sass = sass_of(
        arch,
        tmp_path,
        rms=norm_plan(x, gpu),
        added=norm_plan(x, gpu, residual=x),
        small=norm_plan(view(16, 4096), gpu),
        token=norm_plan(x, gpu, **TOKEN),
        gemma=norm_plan(
            x,
            gpu,
            residual=x,
            weight=view(4096, dtype=torch.float32),
            round_before_weight=False,
            **GROUP,
        ),
        layer=norm_plan(x, gpu, is_centered=True, bias=view(4096), **TOKEN),
    )
    assert_sound(sass, arch)
    # Two packs of x and of the weight a thread; one of them and of the residual; or four.
    assert count(sass["rms"], LOAD_16) == count(sass["rms"], r"LDG[\w.]*") == 4
    assert count(sass["rms"], STORE_16) == count(sass["rms"], r"STG[\w.]*") == 2
    assert count(sass["added"], LOAD_16) == 3
    assert count(sass["added"], STORE_16) == count(sass["added"], r"STG[\w.]*") == 2
    assert count(sass["small"], LOAD_16) == 2
    assert count(sass["small"], STORE_16) == 1
    for name, loads in {"token": 8, "layer": 12, "gemma": 16}.items():
        assert count(sass[name], LOAD_16) == loads, name
        assert count(sass[name], STORE_8) == 4, name
    if arch != "sm_80":
        # The next kernel may start at the entry of a small one, and behind the wait of a large one.
        assert sass["small"].index("PREEXIT") < sass["small"].index("ACQBULK")
        assert sass["rms"].index("PREEXIT") > sass["rms"].index("ACQBULK")
        # The conversion of two floats to e4m3 is one instruction.
        assert count(sass["token"], r"F2FP\.[\w.]*E4M3[\w.]*") == 16


@pytest.mark.parametrize("arch", ARCHES)
def test_norms_of_any_rows_use_no_local_memory(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    half, wide = torch.float16, torch.float32
    longest = 65536 if gpu.has_clusters else 8192

    def odd(*shape: int, **options: Any) -> CallPlan:
        return norm_plan(view(*shape, aligned=2), gpu, weight=view(shape[-1], aligned=2), **options)

    x = view(5000, longest)
    sass = sass_of(
        arch,
        tmp_path,
        longest=norm_plan(x, gpu, residual=x, **GROUP),
        few=norm_plan(view(16, longest), gpu, **TOKEN),
        odd=odd(5000, 3421, **GROUP),
        odd_longest=odd(5000, longest - 1, residual=view(5000, longest - 1)),
        heads=norm_plan(
            view(4096, 32, 128, dtype=half, strides=(6144, 128, 1)),
            gpu,
            weight=view(128, dtype=half),
        ),
        wide=norm_plan(
            view(5000, 4096, dtype=wide),
            gpu,
            is_centered=True,
            weight=view(4096, dtype=wide),
            bias=view(4096, dtype=wide),
            dtype="int8",
            granularity="block128",
        ),
    )
    assert_sound(sass, arch)
    if gpu.has_clusters:
        for name in ("longest", "few", "odd_longest"):
            assert count(sass[name], r"UCGABAR_ARV|UCGABAR_WAIT") >= 2, name


@pytest.mark.parametrize("arch", ARCHES)
def test_gated_activations_have_their_loads_in_flight_together(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    sass = sass_of(
        arch,
        tmp_path,
        plain=act_plan(gpu, 16384, 14336),
        group=act_plan(gpu, 16384, 14336, "e4m3", "block128"),
        few=act_plan(gpu, 16, 14336, "e4m3", "block128"),
        token=act_plan(gpu, 16384, 4096, "int8", "token", act="gelu"),
        odd=act_plan(gpu, 16384, 1715, "e4m3", "token", act="gelu_tanh"),
    )
    assert_sound(sass, arch)
    assert count(sass["token"], LOAD_16) == 8
    for name, packs in {"plain": 2, "group": 2, "few": 1}.items():
        loads = [line for line in sass[name].splitlines() if " LDG" in line or "MUFU.EX2" in line]
        assert count(sass[name], LOAD_16) == 2 * packs, name
        assert all(" LDG" in line for line in loads[: 2 * packs]), name
    assert count(sass["plain"], STORE_16) == 2
    assert count(sass["group"], STORE_8) == 2


@pytest.mark.parametrize("arch", ARCHES)
def test_quantization_uses_no_local_memory(arch: str, tmp_path: Path) -> None:
    gpu = Gpu(arch, 132)
    x = view(16384, 4096)

    def plan(x: Any, dtype: str, granularity: str) -> CallPlan:
        return plan_quantize((x, None, None), gpu, dtype, granularity)

    given = plan_quantize((x, view(dtype=torch.float32), None), gpu, "e4m3", None)
    sass = sass_of(
        arch,
        tmp_path,
        token=plan(x, "e4m3", "token"),
        group=plan(x, "int8", "block128"),
        odd=plan(view(16384, 3421), "e4m3", "block128"),
        tensor=plan(x, "e4m3", "tensor"),
        given=given,
    )
    assert_sound(sass, arch)
    for name in ("token", "group", "tensor", "given"):
        assert count(sass[name], LOAD_16) == 4, name
        assert count(sass[name], STORE_8) == 4, name
    first = plan(x, "e4m3", "tensor").launches[0]
    largest = compiled(first.program.file, (first.kernel,), arch, tmp_path)
    assert_sound(largest, arch)
    assert count(largest[first.kernel], LOAD_16) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_activation_compiles(dtype: torch.dtype, tmp_path: Path) -> None:
    x = view(64, 512, dtype=dtype)
    kernels = tuple(
        plan_act_and_mul((x, None, None), Gpu("sm_90a", 132), act, None, None).launches[0].kernel
        for act in ACTIVATIONS
    )
    info = compile_program(CudaProgram("activation.cu", kernels), "sm_90a", tmp_path)
    assert set(lowered_names(info)) == set(kernels)


def test_the_keys_follow_the_headers() -> None:
    def files(name: str) -> set[str]:
        program = CudaProgram(name, ("fusedops::any",))
        return {path for path, _ in program_key(program, "sm_90a").sources.files}

    assert {"include/row.cuh", "include/row_store.cuh", "include/pack.cuh"} <= files("norm.cu")
    assert "include/activations.cuh" in files("activation.cu") - files("quantize.cu")
