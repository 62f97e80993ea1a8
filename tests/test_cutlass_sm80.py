"""The Ampere-style kernel: compiles for every architecture, tile choice, provider, index maps."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_cases import make_case
from test_cutlass_compile import extract_cubin, make_problem, needs_dsl, nvdisasm

from fusedops.config.sm80 import DEVICES, MmaTile, choose_mma, mma_tiles
from fusedops.errors import ConfigError
from fusedops.jit.dsl import OBJECT, compile_dsl
from fusedops.problem import GemmProblem
from fusedops.providers import cutlass_sm80
from fusedops.providers.base import PROVIDER_ORDER
from fusedops.providers.cutlass_sm80 import CutlassSm80Provider, mma_program

TABLES = ("sm80.toml", "sm100.toml")
NAMED = {table: {tile.name: tile for tile in mma_tiles(table)} for table in TABLES}

FULL_CHAIN = "scale(x_scale,m)|scale(w_scale,n)|bias|act(gelu)|tap|residual|quantize(int8,m)"


def sass(problem: GemmProblem, tile: MmaTile, folder: Path, paired: bool = True) -> str:
    """The machine code of the kernel for a problem in a tiling."""
    program = mma_program(problem, tile, paired)
    compile_dsl(program, DEVICES[problem.arch].build, folder)
    cubin = extract_cubin((folder / OBJECT).read_bytes(), folder)
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


def opcodes(code: str) -> set[str]:
    """Mnemonics without their modifiers."""
    return set(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)", code))


@needs_dsl
@pytest.mark.parametrize(
    ("arch", "chain", "m", "align_bytes", "dtype"),
    [
        ("sm_80", "residual|row_stat(sumsq,64)", 4096, 16, torch.bfloat16),
        ("sm_80", FULL_CHAIN, 1, 4, torch.float16),
        ("sm_86", "bias|softcap(5.0)", 16, 2, torch.bfloat16),
        ("sm_89", "bias|gate|quantize(e4m3,m)", 256, 8, torch.float16),
        ("sm_90a", "none", 17, 2, torch.bfloat16),
        ("sm_90a", "gate|residual(0.5)|row_stat(absmax,512)", 4096, 16, torch.bfloat16),
        ("sm_100a", "quantize(e4m3,group128)", 512, 16, torch.bfloat16),
        ("sm_100a", "bias|act(silu)", 16, 4, torch.float16),
    ],
)
def test_kernel_is_tensor_core_code_without_spills(
    arch: str, chain: str, m: int, align_bytes: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    problem = make_problem(chain, m, arch=arch, aligned_bytes=align_bytes, dtype=dtype)
    code = sass(problem, choose_mma(problem), tmp_path)
    found = opcodes(code)
    assert re.search(rf"\.target\s+{DEVICES[arch].build}\b", code)
    assert {"HMMA", "LDSM"} <= found
    assert ("LDGSTS" in found) == (align_bytes > 2)
    assert not found & {"LDL", "STL"}, "the kernel spills to local memory"
    # griddepcontrol.wait and .launch_dependents exist from sm_90 on.
    assert ({"ACQBULK", "PREEXIT"} <= found) == DEVICES[arch].pdl


@needs_dsl
@pytest.mark.parametrize(
    ("arch", "chain", "tile"),
    [
        ("sm_80", "bias|act(gelu)|residual|row_stat(sumsq,64)", "m128n128k32"),
        ("sm_90a", "bias|act(gelu)|residual|row_stat(sumsq,64)", "m256n128k64"),
        ("sm_90a", "bias|gate|quantize(int8,group128)", "m64n256k32g"),
        ("sm_100a", "scale(w_scale,n)|residual", "m128n256k64"),
    ],
)
def test_largest_tiles_do_not_spill(arch: str, chain: str, tile: str, tmp_path: Path) -> None:
    problem = make_problem(chain, 4096, arch=arch)
    chosen = NAMED[DEVICES[arch].table][tile]
    assert chosen.config(16).accumulators == 128
    assert chosen.legal(problem) is None
    assert not opcodes(sass(problem, chosen, tmp_path, paired=False)) & {"LDL", "STL"}


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("align_bytes", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("chain", "m", "n", "k"),
    [
        ("none", 1, 1, 1),
        ("bias", 2, 4, 3),
        ("residual", 1, 705, 705),
        ("none", 16, 4096, 4096),
        ("gate|tap", 130, 28672, 4096),
        ("none", 5, 7, 0),
        ("residual|row_stat(sumsq,132)", 4096, 4096, 14336),
        ("quantize(int8,group128)", 33, 1000, 4096),
        ("none", 100000, 128256, 4096),
    ],
)
def test_choice_is_legal_and_deterministic(
    arch: str, align_bytes: int, chain: str, m: int, n: int, k: int
) -> None:
    problem = make_problem(chain, m, n, k, arch=arch, aligned_bytes=align_bytes)
    tile = choose_mma(problem)
    assert tile.legal(problem) is None
    assert tile == choose_mma(replace(problem))
    assert tile.shared_bytes(problem) <= DEVICES[arch].shared_bytes
    assert tile.config(align_bytes).align_bytes == align_bytes
    memory_us = problem.minimum_bytes / (DEVICES[arch].sm_bytes_us * problem.sm_count)
    assert memory_us < tile.predicted_us(problem) < 1e7


def test_few_rows_take_flat_tiles_and_many_take_square_ones() -> None:
    flat = choose_mma(make_problem("none", 16, 4096, 4096, arch="sm_80", sm_count=108))
    square = choose_mma(make_problem("none", 8192, 8192, 4096, arch="sm_80", sm_count=108))
    assert flat.tile_m == 16
    assert square.tile_m * square.tile_n >= 128 * 128


def test_shared_memory_of_the_device_bounds_the_tile() -> None:
    tile = NAMED["sm80.toml"]["m256n128k64"]
    for arch, fits in (("sm_80", True), ("sm_86", False), ("sm_89", False), ("sm_90a", True)):
        reason = tile.legal(make_problem("none", 4096, arch=arch))
        assert (reason is None) == fits
        assert fits or "shared memory" in str(reason)


@pytest.mark.parametrize("table", TABLES)
def test_tables_have_the_same_kinds_of_tiles(table: str) -> None:
    names = [tile.name for tile in mma_tiles(table)]
    assert len(names) == len(set(names))
    assert {tile.tile_m for tile in mma_tiles(table)} == {16, 32, 64, 128, 256}


@pytest.mark.parametrize(
    "changes",
    [{"tile_k": 48}, {"stages": 1}, {"tile_m": 24}, {"tile_n": 40}, {"warps_n": 1, "tile_k": 128}],
)
def test_tile_that_the_kernel_cannot_run_is_a_config_error(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be 32, 64 or 128"):
        replace(NAMED["sm80.toml"]["m16n32k64"], **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu", "arch": ""}, "runs on CUDA tensors"),
        ({"arch": "sm_75"}, "compiled for sm_80, sm_86"),
        ({"dtype": torch.float32}, "multiplies bfloat16 and float16"),
        ({"m": 2**31 - 1}, "serves M, N and K up to"),
        ({"chain": "row_stat", "arch": "sm_80"}, "fewer parts than"),
        ({"chain": "quantize(e4m3)", "arch": "sm_80"}, "e4m3 on sm_89 and later only, got sm_80"),
        ({"chain": "tap(t,e4m3)", "arch": "sm_86"}, "e4m3 on sm_89 and later only, got sm_86"),
        ({"chain": "gate|quantize(int8,group128)", "aligned_bytes": 2}, "no registers for copies"),
    ],
)
def test_provider_says_why_it_cannot(changes: dict[str, object], reason: str) -> None:
    answer = CutlassSm80Provider().supports(make_problem(**{"chain": "none", **changes}))  # type: ignore[arg-type]
    assert not answer.ok
    assert reason in answer.reason


@needs_dsl
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("align_bytes", [2, 4, 8, 16])
def test_b08_b10_any_size_and_alignment_is_served(arch: str, align_bytes: int) -> None:
    for m, n, k in ((2, 4, 3), (1, 705, 705), (36, 36, 64), (1, 1, 1), (17, 33, 65), (3, 5, 0)):
        problem = make_problem("bias|residual", m, n, k, arch=arch, aligned_bytes=align_bytes)
        assert CutlassSm80Provider().supports(problem).ok
        text = CutlassSm80Provider().describe(problem)
        assert f"for {DEVICES[arch].build}" in text
        assert f"copies of {align_bytes} bytes" in text


def test_provider_stands_behind_cublas_which_is_faster_on_large_products() -> None:
    order = PROVIDER_ORDER.index
    assert order("cutlass") < order("cublas") < order(CutlassSm80Provider.name)


# What a launch passes on


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, tuple[Any, ...]]]:
    """Records (paired, arguments) of launches in place of a GPU; the result is the product."""
    calls: list[tuple[bool, tuple[Any, ...]]] = []

    def fake_kernel(program: Any, arch: str) -> Callable[..., None]:
        def launch(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor, tensors: Any) -> None:
            calls.append((" pairs " in program.spec, (w, x, out, tensors)))
            out.copy_(x.float() @ w.float().t())

        return launch

    monkeypatch.setattr(cutlass_sm80, "dsl_kernel", fake_kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return calls


def run(
    problem: GemmProblem,
    x: torch.Tensor,
    w: torch.Tensor,
    operands: Sequence[torch.Tensor] = (),
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    return CutlassSm80Provider().plan(problem)(x, w, operands, out)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 5, 9), (4, 1, 9), (4, 5, 1), (1, 1, 1), (3, 5, 0), (4, 6, 8)]
)
def test_dimensions_of_one_are_passed_with_unit_stride(
    launched: list[tuple[bool, tuple[Any, ...]]], m: int, n: int, k: int
) -> None:
    # Column 0 of wide tensors, transposed: every dimension of one has an odd stride.
    x = torch.randn(max(k, 1) * 7, m * 3)[: k * 7 : 7, ::3].t().to(torch.bfloat16)
    x = x if m > 1 and k <= 1 else x.contiguous()
    w = torch.randn(n, k).to(torch.bfloat16)
    out = torch.full((m, 9), 7.0, dtype=torch.bfloat16)[:, :n]
    problem = make_problem("none", m, n, k, aligned_bytes=2)
    (result,) = run(problem, x, w, (), [out])
    _, (seen_w, seen_x, seen_out, tensors) = launched[0]
    assert result is out
    assert tuple(seen_x.shape) == (m, k)
    assert tuple(seen_w.shape) == (n, k)
    assert all(t.stride(1) == 1 for t in (seen_w, seen_x, seen_out))
    assert seen_out.data_ptr() == out.data_ptr()
    assert tensors == (seen_out,)
    assert torch.equal(out.float(), (x.float() @ w.float().t()).to(torch.bfloat16).float())


def test_rows_that_reshape_must_copy_keep_the_promised_alignment(
    launched: list[tuple[bool, tuple[Any, ...]]],
) -> None:
    x = torch.randn(2, 3, 5, 24).to(torch.bfloat16)[:, :, 1, :21]
    x = torch.as_strided(x, (2, 3, 21), (400, 24, 1))
    problem = make_problem("none", 6, 4, 21, aligned_bytes=16)
    run(problem, x, torch.randn(4, 24).to(torch.bfloat16)[:, :21])
    _, (w, seen, _, _) = launched[0]
    for matrix in (w, seen):
        assert matrix.stride(0) * 2 % 16 == 0
    assert torch.equal(seen, x.reshape(6, 21))


def test_operands_come_flat_or_with_unit_stride_and_pairs_need_alignment(
    launched: list[tuple[bool, tuple[Any, ...]]],
) -> None:
    case = make_case("scale(x_scale,m)|bias|tap|residual", 4, 8, 16, torch.bfloat16)
    problem = make_problem("scale(x_scale,m)|bias|tap|residual", 4, 8, 16)
    scale, bias, residual = (t for t in case.operands if t is not None)
    apart = torch.empty(8, 4, dtype=torch.bfloat16).t().copy_(residual)
    odd = torch.empty(9, dtype=torch.bfloat16)[1:].copy_(bias)
    run(problem, case.x, case.w, (scale[:, None], bias[None], residual))
    run(problem, case.x, case.w, (scale, bias, apart))
    run(problem, case.x, case.w, (scale, odd, residual))
    assert [paired for paired, _ in launched] == [True, True, False]
    for _, (_, _, _, tensors) in launched:
        assert [tuple(t.shape) for t in tensors] == [(4,), (8,), (4, 8), (4, 8)]
        assert torch.equal(tensors[1], bias)
        assert torch.equal(tensors[2], residual)
        assert tensors[2].stride(1) == 1


def test_8_bit_results_are_passed_as_bytes_of_the_same_memory(
    launched: list[tuple[bool, tuple[Any, ...]]],
) -> None:
    problem = make_problem("quantize(int8)", 2, 8, 16)
    x, w = torch.randn(2, 16).to(torch.bfloat16), torch.randn(8, 16).to(torch.bfloat16)
    (result,) = run(problem, x, w, (torch.ones(()),))
    _, (_, _, out, _) = launched[0]
    assert result.dtype == torch.int8
    assert out.dtype == torch.uint8
    assert out.data_ptr() == result.data_ptr()


@pytest.fixture
def nan_in_new_tensors() -> Iterator[None]:
    """torch.empty holds NaN, so that what nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_tensors")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("m", "n"), [(0, 16), (3, 0), (0, 0)])
def test_no_rows_or_columns_launch_nothing_and_statistics_are_zero(
    launched: list[tuple[bool, tuple[Any, ...]]], m: int, n: int, given: bool
) -> None:
    problem = make_problem("row_stat(sumsq,2)", m, n, 8)
    x, w = (torch.ones(rows, 8, dtype=torch.bfloat16) for rows in (m, n))
    out = problem.spec.allocate(x) if given else None
    assert torch.empty(2, 3).isnan().all()
    main, stats = results = run(problem, x, w, (), out)
    assert not launched
    assert main.shape == (m, n)
    torch.testing.assert_close(stats, torch.zeros(2, m), rtol=0, atol=0)
    if out is not None:
        assert all(result is target for result, target in zip(results, out, strict=True))


# Index maps, on plain integers


@needs_dsl
@pytest.mark.parametrize("tile_k", [32, 64, 128])
def test_swizzle_is_a_permutation_without_bank_conflicts(tile_k: int) -> None:
    from fusedops.cutlass.sm80_copy import UNIT, UNIT_BYTES, unit_swizzle

    per_row = tile_k // UNIT
    place = {
        (row, unit): row * per_row + (unit ^ unit_swizzle(row, tile_k))
        for row in range(64)
        for unit in range(per_row)
    }
    assert sorted(place.values()) == list(range(64 * per_row))
    for first in range(0, 64, 8):
        for unit in range(per_row):
            banks = {place[first + i, unit] % (128 // UNIT_BYTES) for i in range(8)}
            assert len(banks) == 8, "eight rows of a matrix share a bank"


@needs_dsl
@pytest.mark.parametrize("group_columns", [1, 128])
@pytest.mark.parametrize("tile", ["m16n32k64", "m64n128k64g", "m128n128k64"])
def test_threads_hold_every_element_once_and_gate_partners_together(
    tile: str, group_columns: int
) -> None:
    from cutlass import BFloat16

    from fusedops.cutlass.sm80_fragments import WarpTile

    config = NAMED["sm80.toml"][tile].config(16)
    warp = WarpTile(config, BFloat16)
    sizes = (1000, 2000)
    held: list[tuple[int, int]] = []
    for thread in range(config.threads):
        index = thread // 32
        row = index % config.warps_m * config.warp_m
        column = index // config.warps_m * config.warp_n
        for part in warp.parts(group_columns):
            at = warp.coordinates(row, column, part, thread, sizes)
            held += [(m, n) for m in at.m for n in at.n]
            assert all(at.n[j + 1] == at.n[j] + 1 for j in range(0, len(at.n), 2))
            assert sorted(j for pair in at.pairs for j in pair) == list(range(len(at.n)))
            for gate, up in at.pairs:
                assert at.n[up] == at.n[gate] + 8
                assert at.n[gate] % 16 < 8
    assert sorted(held) == [(m, n) for m in range(config.tile_m) for n in range(config.tile_n)]
