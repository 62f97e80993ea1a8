"""e4m3 and int8 through the sm_90a kernels: they compile to the right code; tilings fit them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sass_products import touched_in_flight
from test_cutlass_compile import extract_cubin, make_problem, needs_dsl, nvdisasm

from fusedops.bench.tune_problems import candidates
from fusedops.config import (
    DecodeTile,
    PrefillTile,
    choose_decode,
    choose_prefill,
    decode_tiles,
    prefill_tiles,
)
from fusedops.config.elements import LARGEST_INT8_K
from fusedops.jit.dsl import OBJECT, compile_dsl
from fusedops.problem import GemmProblem
from fusedops.prologue import RmsNormPrologue
from fusedops.providers.cutlass import CutlassProvider, choose_candidate, decode_program
from fusedops.providers.cutlass_prefill import prefill_program
from fusedops.providers.cutlass_sm80 import CutlassSm80Provider
from fusedops.providers.kernel_tensors import as_bytes, loaded

E4M3, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
INSTRUCTIONS = {E4M3: "QGMMA", INT8: "IGMMA"}
TILES: dict[str, DecodeTile | PrefillTile] = {
    tile.name: tile for tile in (*decode_tiles(), *prefill_tiles())
}
ROW_BY_CHANNEL = "scale(x_scale,m)|scale(w_scale,n)"


def problem_of(
    chain: str, m: int, dtype: torch.dtype, out_dtype: torch.dtype = BF16, **changes: Any
) -> GemmProblem:
    """A problem of 8-bit x and weight; its result is ``out_dtype`` unless the chain forces it."""
    problem = make_problem(chain, m, dtype=dtype, **changes)
    result = problem.spec.epilogue.result_dtype(out_dtype)
    return replace(problem, spec=replace(problem.spec, out_dtype=result))


def sass_of(problem: GemmProblem, tile: DecodeTile | PrefillTile, folder: Path) -> str:
    """The code of a tiling; without spills to local memory."""
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    assert tile.legal(problem) is None
    if isinstance(tile, DecodeTile):
        program = decode_program(problem, tile)
    else:
        program = prefill_program(problem, tile, aligned=True)
    compile_dsl(program, "sm_90a", folder)
    cubin = extract_cubin((folder / OBJECT).read_bytes(), folder)
    code = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "UTMALDG" in code
    assert not re.search(r"\b(LDL|STL)\b", code), "the kernel spills to local memory"
    assert touched_in_flight(code) == []
    return code


@needs_dsl
@pytest.mark.parametrize(
    ("name", "dtype", "chain", "m", "out_dtype", "products"),
    [
        ("r64k128", E4M3, f"{ROW_BY_CHANNEL}|bias|act(silu)", 16, BF16, 8),
        ("r112k64", E4M3, "scale|quantize(e4m3,m)", 96, BF16, 4),
        ("r64k128s2", INT8, f"{ROW_BY_CHANNEL}|residual|row_stat(sumsq,132)", 33, torch.float32, 8),
        ("c128x256m2", E4M3, f"{ROW_BY_CHANNEL}|bias", 4096, torch.float16, 8),
        ("p128x192m2", E4M3, f"{ROW_BY_CHANNEL}|gate", 4096, BF16, 16),
        ("p128x128m2", INT8, f"{ROW_BY_CHANNEL}|quantize(int8,group128)", 4096, BF16, 16),
        ("c128x128k4", INT8, "scale|residual", 128, BF16, 8),
    ],
)
def test_kernel_multiplies_bytes_and_spills_nothing(
    name: str,
    dtype: torch.dtype,
    chain: str,
    m: int,
    out_dtype: torch.dtype,
    products: int,
    tmp_path: Path,
) -> None:
    code = sass_of(problem_of(chain, m, dtype, out_dtype), TILES[name], tmp_path)
    assert len(re.findall(rf"\b{INSTRUCTIONS[dtype]}\.64x\d+x32", code)) == products
    assert "HGMMA" not in code


@needs_dsl
def test_sums_of_a_split_of_int8_are_added_as_integers(tmp_path: Path) -> None:
    """Each CTA has 32 of the tile's 128 columns: 16 conversions, 3 peers' sums of 16."""
    code = sass_of(problem_of("none", 128, INT8, torch.float32), TILES["c128x128k4"], tmp_path)
    assert "FADD" not in code
    assert len(re.findall(r"\bI2FP?\.F32\.S32 ", code)) >= 16


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: tile.name)
def test_stages_hold_as_many_bytes_as_of_16_bit_elements(
    tile: DecodeTile | PrefillTile, dtype: torch.dtype
) -> None:
    if isinstance(tile, DecodeTile):
        wide, narrow = tile.config(33, 2), tile.config(33, 1)
        assert narrow.k == 2 * wide.k
        assert narrow.k % 128 == 0
    else:
        wide = tile.problem_config(problem_of("none", 128, BF16))  # type: ignore[assignment]
        narrow = tile.problem_config(problem_of("none", 128, dtype))  # type: ignore[assignment]
        assert (wide.k, narrow.k) == (64, 128)
    assert narrow.stages == wide.stages


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("m", [1, 16, 64, 100, 128, 512, 4096])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1280, 8192), (48, 64), (8, 16)])
def test_choice_is_legal_deterministic_and_sooner_than_of_wide_elements(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    problem = problem_of("none", m, dtype, n=n, k=k)
    wide = problem_of("none", m, BF16, n=n, k=k)
    for choose in (choose_decode, choose_prefill) if m <= 128 else (choose_prefill,):
        tile = choose(problem, "none")
        assert tile.legal(problem) is None
        assert tile == choose(problem_of("none", m, dtype, n=n, k=k), "none")
        assert tile.predicted_us(problem) <= choose(wide, "none").predicted_us(wide)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336)])
def test_few_rows_take_the_decode_kernel_and_many_whole_tiles(
    n: int, k: int, dtype: torch.dtype
) -> None:
    for m in (1, 16, 64):
        assert choose_candidate(problem_of("none", m, dtype, n=n, k=k)).name.startswith("r")
    tile = choose_prefill(problem_of("none", 8192, dtype, n=n, k=k), "none")
    assert tile.size >= 128 * 112


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_tuning_has_candidates_of_both_families(dtype: torch.dtype) -> None:
    names = [candidate.name for candidate in candidates(problem_of("none", 64, dtype), 3)]
    assert any(name.startswith("r") for name in names)
    assert choose_candidate(problem_of("none", 64, dtype)).name in names


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"k": LARGEST_INT8_K + 1, "dtype": INT8}, "holds the sums of K <= 131071"),
        ({"aligned_bytes": 8}, "multiples of 16 bytes"),
        ({"k": 0}, "needs K > 0"),
        ({"arch": "sm_89"}, "compiled for sm_90a"),
    ],
)
def test_provider_says_why_it_cannot(changes: dict[str, Any], reason: str) -> None:
    answer = CutlassProvider().supports(problem_of("none", 16, **{"dtype": E4M3, **changes}))
    assert not answer.ok
    assert reason in answer.reason


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("m", [0, 1, 130])
def test_provider_serves_long_and_odd_products(m: int, dtype: torch.dtype) -> None:
    assert CutlassProvider().supports(problem_of("none", m, dtype, n=1001, k=131056)).ok


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_ampere_style_kernel_refuses_8_bit_elements(dtype: torch.dtype) -> None:
    answer = CutlassSm80Provider().supports(problem_of("none", 16, dtype))
    assert not answer.ok
    assert f"multiplies bfloat16 and float16, got {dtype}" in answer.reason


def test_norm_inside_is_refused_for_8_bit_elements() -> None:
    """The spec refuses it before; a tiling that is asked says so too."""
    problem = problem_of("none", 16, E4M3, prologue=RmsNormPrologue(1e-5))
    for tile in decode_tiles():
        assert "for bfloat16 and float16 only" in str(tile.legal(problem))
    for tile in prefill_tiles():
        assert "no kernel has" in str(tile.legal(problem))


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_bytes_of_strided_rows_are_views(dtype: torch.dtype) -> None:
    rows = torch.arange(96).reshape(3, 32).to(dtype)[:, :16]
    given = as_bytes(loaded(rows, 16))
    assert given.dtype == torch.uint8
    assert given.data_ptr() == rows.data_ptr()
    assert given.stride() == (32, 1)
    assert torch.equal(given.view(dtype).float(), rows.float())
    dense = (torch.arange(72).reshape(3, 24) % 16).to(dtype)
    copied = as_bytes(loaded(dense, 16))
    assert copied.stride() == (32, 1)
    assert torch.equal(copied.view(dtype).float(), dense.float())
