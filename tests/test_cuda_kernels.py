"""The CUDA kernels compiled for each architecture: their SASS, and what plans assume of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.errors import BuildError
from fusedops.jit import resources
from fusedops.jit.nvrtc import CUBIN, CudaProgram, compile_program, lowered_names, program_key
from fusedops.ops.reduce import REDUCTIONS
from fusedops.providers.cuda_copy import UNROLLS
from fusedops.providers.cuda_plan import Gpu, Launch, View
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_reduce_ops import KERNEL_DTYPES, KERNEL_OPS
from fusedops.providers.cuda_transpose import plan_transpose, unaligned_tile

pytestmark = [
    needs_wheels,
    pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed"),
]

_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?)[,\s]", re.MULTILINE)
_WORDS = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def count(sass: str, instruction: str) -> int:
    """Occurrences of an instruction, given as a pattern of its name."""
    return len(re.findall(rf"\b{instruction}\b", sass))


def instructions(sass: str) -> list[str]:
    """Instructions with their operands."""
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+([A-Z@].*);", sass, re.MULTILINE)


def compiled(file: str, kernels: tuple[str, ...], arch: str, folder: Path) -> dict[str, str]:
    """Name expression -> SASS."""
    info = compile_program(CudaProgram(file, kernels), arch, folder)
    command = [str(nvdisasm()), str(folder / CUBIN)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = _SECTION.split(text)
    of_name = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: of_name[mangled] for name, mangled in lowered_names(info).items()}


def launches_of(view: View, arch: str, op: str, *dims: int) -> list[Launch]:
    return list(plan_reduce(view, Gpu(arch, 132), op, dims or None, False).launches)


def sass_of(launches: list[Launch], arch: str, folder: Path) -> dict[str, str]:
    kernels = tuple(sorted({launch.kernel for launch in launches}))
    return compiled(launches[0].program.file, kernels, arch, folder)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("size", _WORDS)
def test_tiles_move_16_bytes_at_a_time_and_turn_in_registers(
    size: int, arch: str, tmp_path: Path
) -> None:
    width = 16 // size
    shape = (1024, 1024)
    x = View(shape, (1024, 1), _WORDS[size])
    (launch,) = plan_transpose(x, Gpu(arch, 132)).launches
    (sass,) = sass_of([launch], arch, tmp_path).values()
    assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") == width
    assert count(sass, r"STS\.128") == count(sass, r"LDS\.128") == width
    assert count(sass, r"STG\.E[\w.]*\.128[\w.]*") == width
    assert count(sass, r"LDG[\w.]*") == count(sass, r"STG[\w.]*") == width
    # One permutation a word for two bytes; two for one byte, of which pairs are shared.
    permutations = {1: range(128, 136), 2: range(32, 36)}.get(size, range(2))
    assert count(sass, "PRMT") in permutations
    assert count(sass, r"LDL[\w.]*") == count(sass, r"STL[\w.]*") == 0


@pytest.mark.parametrize("arch", ARCHES)
def test_no_transpose_kernel_uses_local_memory(arch: str, tmp_path: Path) -> None:
    views = [
        View((rows, columns), (columns, 1), dtype)
        for dtype in _WORDS.values()
        for rows, columns in ((1023, 1023), (99, 99), (9999, 3))
    ]
    launches = [launch for x in views for launch in plan_transpose(x, Gpu(arch, 132)).launches]
    found = sass_of(launches, arch, tmp_path)
    assert len(found) == 12
    for name, sass in found.items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert ("ACQBULK" in sass) is (arch != "sm_80"), name
        assert ("PREEXIT" in sass) is (arch != "sm_80"), name
        if "shifted" in name or "realigned" in name:
            # What a thread reads of an inner tile, all of it before the first is kept.
            accesses = re.findall(r"\b(LDG|STS)\.[\w.]*128", sass)
            loads = {"char": 16, "short": 8}.get(name.rpartition(" ")[2].rstrip(">"), 9)
            assert "L" * loads in "".join(word[0] for word in accesses), name
            stores = 2 if "realigned" in name else 8
            assert count(sass, r"STG\.E[\w.]*\.128[\w.]*") >= stores, name


def test_unaligned_tiles_have_the_rows_and_shared_memory_that_plans_count_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
    lines = ['#include "realigned_tile.cuh"', '#include "shifted_tile.cuh"', "namespace fusedops {"]
    for size in _WORDS:
        planned = unaligned_tile(size)
        tile = f"{'ShiftedTile' if size >= 4 else 'RealignedTile'}<{words[size]}>"
        facts = {"kBytes": planned.shared_bytes, "kRows": planned.rows, "kColumns": planned.columns}
        if size < 4:
            facts["kThreads"] = planned.threads
        for name, value in facts.items():
            lines.append(f'static_assert({tile}::{name} == {value}, "{size}");')
    lines.append("__global__ void nothing() {} }")
    root = tmp_path / "csrc"
    shutil.copytree(resources.csrc_dir(), root)
    monkeypatch.setattr(resources, "PACKAGE_DIR", tmp_path / "fusedops")
    (root / "sizes.cu").write_text("\n".join(lines))
    compile_program(CudaProgram("sizes.cu", ("fusedops::nothing",)), "sm_90a", tmp_path)


@pytest.mark.parametrize(
    ("op", "dtype", "arch"),
    [
        *(("sum", torch.float32, arch) for arch in ARCHES),
        # What needs the most registers.
        ("logsumexp", torch.float64, "sm_80"),
        ("argmax", torch.bfloat16, "sm_90a"),
        ("absmax", torch.int8, "sm_100a"),
    ],
    ids=str,
)
def test_no_reduction_uses_local_memory_or_global_atomics(
    op: str, dtype: torch.dtype, arch: str, tmp_path: Path
) -> None:
    def view(*shape: int) -> View:
        return View(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)

    launches = [
        *launches_of(view(2**28), arch, op),
        *launches_of(view(64, 2**16), arch, op, 1),
        *launches_of(view(2**16, 4096), arch, op, 1),
        *launches_of(view(2**16, 16), arch, op, 1),
        *launches_of(view(4096, 2**14), arch, op, 0),
        *launches_of(view(4096, 999), arch, op, 0),
        *launches_of(View((64, 64, 64), (8192, 64, 2), dtype), arch, op, 1),
    ]
    for name, sass in sass_of(launches, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert count(sass, r"(?:ATOMG?|RED)(?:\.\w+)*") == 0, name
        # The bar that positions in a cluster's row are looked for above.
        has_bar = "reduce_cluster<fusedops::Arg" in name
        assert (count(sass, r"ATOMS[\w.]*") > 0) is has_bar, name
        if "reduce_rows" in name:
            assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") >= 2, name
        if "cluster" in name:
            assert count(sass, r"UCGABAR_ARV|ERRBAR|UCGABAR_WAIT") >= 2, name


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_batch_is_passed_over_at_less_than_two_instructions_an_element(
    arch: str, tmp_path: Path
) -> None:
    launches = launches_of(View((64, 128256), (128256, 1), torch.float32), arch, "argmax", 1)
    assert (launches[0].cluster, launches[0].threads) == (2, 1024)
    (sass,) = sass_of(launches, arch, tmp_path).values()
    # From the last load of a batch of 8 vectors to where it raises the bar, which few do.
    to_bar = re.split(r"\bATOMS\b", sass)[0]
    batch = re.split(r"\bLDG\.E[\w.]*\.128\b", to_bar)[-1]
    assert len(instructions(batch)) < 2 * 32
    # Blackwell's takes three operands. Positions are looked for without another one.
    extremum = {"sm_90a": 31, "sm_100a": 21}[arch]
    assert count(batch, r"FMNMX3?(?:\.\w+)*") == extremum
    assert count(sass, r"FMNMX3?(?:\.\w+)*") == extremum


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64, torch.float64], ids=str)
def test_positions_in_clusters_leave_room_for_two_blocks_of_512_threads(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    launches = launches_of(View((100, 2**16), (2**16, 1), dtype), "sm_90a", "argmin", 1)
    assert (launches[0].cluster, launches[0].threads) == (2, 512)
    (sass,) = sass_of(launches, "sm_90a", tmp_path).values()
    registers = [int(n) for line in instructions(sass) for n in re.findall(r"\bR(\d+)\b", line)]
    assert max(registers) < 65536 // (2 * 512)
    assert count(sass, r"(?:LDL|STL)[\w.]*") == 0


@pytest.mark.parametrize("op", REDUCTIONS)
def test_every_operation_compiles_for_every_dtype_that_it_takes(op: str, tmp_path: Path) -> None:
    dtypes = REDUCTIONS[op].dtypes
    kernels = tuple(f"fusedops::reduce_finish<{KERNEL_OPS[op].name(dtype)}>" for dtype in dtypes)
    info = compile_program(CudaProgram("reduce.cu", kernels), "sm_90a", tmp_path)
    assert set(lowered_names(info)) == set(kernels)


def test_accumulators_and_results_have_the_sizes_that_plans_count_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['#include "reduce_ops.cuh"', "namespace fusedops {"]
    for op, kernel_op in KERNEL_OPS.items():
        for dtype in REDUCTIONS[op].dtypes:
            name = kernel_op.name(dtype)
            accumulator_bytes = kernel_op.accumulator_bytes(dtype)
            result_bytes = kernel_op.result_dtype(dtype).itemsize
            lines.append(f'static_assert(sizeof({name}::Acc) == {accumulator_bytes}, "{name}");')
            lines.append(f'static_assert(sizeof({name}::Out) == {result_bytes}, "{name}");')
    for dtype, word in KERNEL_DTYPES.items():
        lines.append(f'static_assert(sizeof({word}) == {dtype.itemsize}, "{word}");')
    lines.append("__global__ void nothing() {} }")
    root = tmp_path / "csrc"
    shutil.copytree(resources.csrc_dir(), root)
    monkeypatch.setattr(resources, "PACKAGE_DIR", tmp_path / "fusedops")
    (root / "sizes.cu").write_text("\n".join(lines))
    program = CudaProgram("sizes.cu", ("fusedops::nothing",))
    compile_program(program, "sm_90a", tmp_path)
    (root / "sizes.cu").write_text("\n".join(lines).replace("Acc) == 8", "Acc) == 9"))
    with pytest.raises(BuildError, match="static assertion failed"):
        compile_program(program, "sm_90a", tmp_path)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_copy_has_its_loads_in_flight_before_the_first_store(arch: str, tmp_path: Path) -> None:
    names = tuple(f"fusedops::copy<{unroll}>" for unroll in UNROLLS)
    found = compiled("copy.cu", names, arch, tmp_path)
    for unroll, name in zip(UNROLLS, names, strict=True):
        accesses = re.findall(r"\b(LDG|STG)\.E[\w.]*\.128", found[name])
        assert "".join(word[0] for word in accesses).find("L" * unroll + "S" * unroll) >= 0
        assert count(found[name], r"(?:LDL|STL)[\w.]*") == 0


def test_keys_follow_the_headers_that_a_kernel_includes() -> None:
    def files(name: str) -> set[str]:
        program = CudaProgram(name, ("fusedops::any",))
        return {path for path, _ in program_key(program, "sm_90a").sources.files}

    assert files("copy.cu") == {"copy.cu", "include/memory.cuh", "include/pdl.cuh"}
    assert "include/reduce_ops.cuh" in files("reduce.cu") - files("transpose.cu")
    assert "include/register_transpose.cuh" in files("transpose.cu") - files("reduce.cu")
