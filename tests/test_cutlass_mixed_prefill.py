"""The kernel for many rows with narrow weights: tilings, choices, and its code for sm_90a."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sass_products import touched_in_flight
from test_cutlass_compile import extract_cubin, needs_dsl, nvdisasm
from test_cutlass_mixed_provider import FORMATS, mixed_problem

from fusedops.config import MixedPrefillTile, mixed_prefill_tiles
from fusedops.config.files import SHARED_BYTES
from fusedops.config.mixed import NarrowWeight
from fusedops.config.mixed_prefill import MixedPrefillConfig, mixed_prefill_config
from fusedops.cutlass.mixed_program import mixed_prefill_program
from fusedops.epilogue.chain import Epilogue
from fusedops.jit.dsl import OBJECT, compile_dsl
from fusedops.problem import GemmProblem
from fusedops.providers.cutlass import CutlassProvider, choose_candidate
from fusedops.providers.cutlass_mixed import MixedCandidate
from fusedops.providers.cutlass_mixed_prefill import MixedPrefillCandidate, takes_bulk_stores
from fusedops.weight import GroupedFormat, Int4

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INT4 = NarrowWeight("int4", 128)
EVERYTHING = "scale(x_scale,m)|scale(w_scale,n)|bias|act(gelu)|tap|quantize(e4m3,m)"
SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))


def sass_of(
    config: MixedPrefillConfig, chain: str, dtype: torch.dtype, aligned: bool, folder: Path
) -> str:
    """The code of a configuration; it multiplies from registers and does not spill."""
    epilogue = Epilogue.parse(chain)
    wide = BF16 if dtype == E4M3 else dtype
    operand_dtypes = tuple(wide if wide in o.dtypes else o.dtypes[0] for o in epilogue.operands)
    program = mixed_prefill_program(
        config, epilogue, dtype, epilogue.result_dtype(wide), operand_dtypes, aligned
    )
    compile_dsl(program, "sm_90a", folder)
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    cubin = extract_cubin((folder / OBJECT).read_bytes(), folder)
    sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "UTMALDG" in sass
    assert ("UTMALDG.2D.MULTICAST" in sass) == (config.cluster > 1)
    assert "LDS.128" in sass
    products = re.findall(r"[HQ]GMMA\.64x(\d+)x(?:16|32)\.F32\S* R\d+, (\w+)", sass)
    steps = config.span * config.k // config.weight.step
    assert len(products) == steps * (1 + config.multiplies_zeros)
    assert all(n == str(config.tile_m) and a.startswith("R") for n, a in products)
    assert not re.search(r"\b(LDL|STL)\b", sass), "the kernel spills to local memory"
    assert touched_in_flight(sass) == []
    return sass


def main_loop(sass: str) -> list[str]:
    """The instructions of the loop over stages."""
    lines = [line.strip() for line in sass.splitlines()]
    products = [i for i, line in enumerate(lines) if "GMMA." in line]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    for end in range(products[-1], len(lines)):
        branch = re.search(r" BRA `\((\.L_x_\d+)\)", lines[end])
        if branch and labels[branch[1]] < products[0]:
            start = labels[branch[1]]
            break
    loop = [line for line in lines[start : end + 1] if re.match(r"/\*[0-9a-f]{4,}\*/", line)]
    return [re.sub(r"^/\*\w+\*/\s+(@!?U?P\w+\s+)?|\s*;.*$", "", line) for line in loop]


@needs_dsl
@pytest.mark.parametrize(
    ("weight", "tile_m", "k", "cluster", "chain", "dtype", "most"),
    [
        (INT4, 128, 128, 2, "residual|row_stat(sumsq,132)", BF16, 250),
        (INT4, 128, 128, 1, "gate(silu)", BF16, 245),
        (INT4, 192, 128, 2, "bias|residual", BF16, 300),
        (INT4, 64, 128, 1, "none", FP16, 190),
        (NarrowWeight("int4", 32, True), 128, 128, 2, "none", BF16, 490),
        (NarrowWeight("int4", 64, True), 128, 128, 2, "bias|gate(silu)|residual", BF16, 340),
        (NarrowWeight("int4", 0, True), 256, 64, 2, "gate(silu)", BF16, 240),
        (NarrowWeight("int8"), 256, 64, 1, "bias", BF16, 280),
        (NarrowWeight("e4m3", 64), 128, 128, 2, "bias", BF16, 380),
        (NarrowWeight("int4", 0, True, x_bits=8), 128, 128, 2, "gate(silu)", E4M3, 260),
        (NarrowWeight("int4", 128, x_bits=8), 128, 128, 2, EVERYTHING, E4M3, 200),
    ],
    ids=str,
)
def test_products_run_from_registers_and_are_not_serialized(
    weight: NarrowWeight,
    tile_m: int,
    k: int,
    cluster: int,
    chain: str,
    dtype: torch.dtype,
    most: int,
    tmp_path: Path,
) -> None:
    """Where ptxas serializes products, it waits for all of them after each.

    ``most`` are instructions of a warp for 128 columns. A scheduler has two warps, and they have
    ``8 tile_m`` cycles.
    """
    config = mixed_prefill_config(weight, tile_m, k, cluster, 8, chain.count("row_stat"))
    sass = sass_of(config, chain, dtype, True, tmp_path)
    assert "UTMASTG" in sass
    assert ("LDSM" in sass) == ("residual" in chain)
    loop = main_loop(sass)
    waits = [line for line in loop if line.startswith("WARPGROUP.DEPBAR")]
    units = config.span * config.k // config.unit
    all_of_them = sum(line.endswith("0x0") for line in waits)
    # One at the end of the loop; where there is one set of group sums one for each group too.
    assert all_of_them == 1 + (config.sum_groups if config.group_sums == 1 else 0)
    assert len(waits) == units + all_of_them
    assert not any(line.startswith(("WARPSYNC", "R2UR")) for line in loop)
    assert len(loop) * 128 / (config.span * config.k) <= most


@needs_dsl
def test_unaligned_results_are_stored_directly(tmp_path: Path) -> None:
    config = mixed_prefill_config(NarrowWeight("int4"), 64, 64, 1, 8)
    sass = sass_of(config, "bias|residual", FP16, False, tmp_path)
    assert "UTMASTG" not in sass
    assert "STG.E.U16" in sass


def test_named_tilings_have_names_of_their_sizes_and_fit() -> None:
    assert mixed_prefill_tiles()
    for tile in mixed_prefill_tiles():
        cluster = f"c{tile.cluster}" if tile.cluster > 1 else ""
        assert tile.name == f"w{tile.tile_m}k{tile.k}{cluster}"
        for weight in (INT4, NarrowWeight("int8"), NarrowWeight("int4", 32, True)):
            config = mixed_prefill_config(weight, tile.tile_m, tile.k, tile.cluster, tile.group)
            staging = 2 * 2 * 64 * 128
            assert config.stages * config.stage_bytes + staging < SHARED_BYTES
            if config.illegal() is None:
                assert config.skew < config.stages < 2 * config.skew


@pytest.mark.parametrize("k", [8, 128, 4096, 14336, 4224])
def test_a_tile_has_whole_spans_of_stages(k: int) -> None:
    for weight in (INT4, NarrowWeight("int4", 64), NarrowWeight("int8")):
        config = mixed_prefill_config(weight, 128, 128, 1, 8)
        stages = config.k_stages(k)
        assert stages % config.span == 0
        assert (stages - config.span) * 128 < k <= stages * 128
        if config.group_sums == 2:
            assert config.span * config.sum_groups % 2 == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 96}, "tile_m=96 is no multiple of 64"),
        ({"tile_m": 256}, "more registers than there are"),
        ({"k": 64}, "k=64 is no multiple of 64 and of the group"),
        ({"cluster": 4}, "cluster=4: 1 or 2"),
        ({"rows": 64}, "the kernel has tiles of 128"),
        ({"stages": 2}, "fewer than 3 stages"),
        ({"weight": NarrowWeight("int8", 64, True)}, "only int4 has them"),
        ({"weight": NarrowWeight("int4", 0, x_bits=8), "k": 64}, "k=64 is no multiple"),
    ],
)
def test_config_says_why_there_is_no_kernel(changes: dict[str, object], reason: str) -> None:
    config = replace(mixed_prefill_config(INT4, 128, 128, 1, 8), **changes)  # type: ignore[arg-type]
    assert reason in (config.illegal() or "")


@pytest.mark.parametrize(("weight", "dtype"), FORMATS, ids=str)
@pytest.mark.parametrize("m", [129, 512, 4096])
def test_every_format_is_served_with_many_rows(
    weight: GroupedFormat, dtype: torch.dtype, m: int
) -> None:
    pytest.importorskip("cutlass")
    problem = mixed_problem(weight, dtype, m, "bias|residual")
    assert CutlassProvider().supports(problem).ok
    candidate = choose_candidate(problem)
    assert isinstance(candidate, MixedPrefillCandidate)
    assert candidate.tile.legal(problem) is None
    assert f"prefill kernel {candidate.name}" in CutlassProvider().describe(problem)


def int4_problem(n: int, k: int, m: int, chain: str = "none") -> GemmProblem:
    return mixed_problem(Int4(n, k, 128, "none", "wgmma16"), m=m, chain=chain)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_kernel_predicted_faster_serves(n: int, k: int) -> None:
    families = []
    for m in (16, 64, 128, 129, 512, 4096):
        candidate = choose_candidate(int4_problem(n, k, m))
        assert candidate.name == choose_candidate(int4_problem(n, k, m)).name
        families.append(type(candidate))
    assert families[0] is MixedCandidate
    assert families[-3:] == [MixedPrefillCandidate] * 3


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_predictions_are_of_the_right_size(n: int, k: int) -> None:
    """Between what tensor cores need at 990 TFLOPS and twice what they need at 700."""
    for m in (1024, 4096):
        needed_us = 2 * m * n * k / 990e6
        assert needed_us < choose_candidate(int4_problem(n, k, m)).predicted_us < 2.9 * needed_us


def test_what_a_tiling_refuses() -> None:
    tile = MixedPrefillTile("w128k128c2", 128, 128, 2, 8)
    assert tile.legal(int4_problem(4096, 4096, 512)) is None
    few = int4_problem(4096, 4096, 512, "row_stat(sumsq,63)")
    assert "too few parts" in (tile.legal(few) or "")
    assert tile.legal(int4_problem(4096, 4096, 512, "row_stat(sumsq,64)")) is None
    groups = int4_problem(4096, 4096, 512, "quantize(e4m3,group128)")
    assert "whole groups" in (tile.legal(groups) or "")
    assert "needs more SMs" in (tile.legal(replace(int4_problem(64, 64, 9), sm_count=1)) or "")


def test_bulk_stores_take_aligned_results_and_residuals() -> None:
    out = torch.empty(130, 4096, dtype=BF16)
    assert takes_bulk_stores(out, [torch.empty(4096), out])
    assert not takes_bulk_stores(out[:, 1:], [])
    assert not takes_bulk_stores(torch.empty(130, 4097, dtype=BF16), [])
    assert not takes_bulk_stores(out, [torch.empty(1, 4096).expand(130, 4096)])
    assert not takes_bulk_stores(out, [out[:, 4:]])


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_staging_has_every_value_in_its_place(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stmatrix.trans, from its description: row r of matrix i goes to the address of lane 8 i + r.

    Of a transposed matrix, lane 4 c + r // 2 has the value of row r, column c, in half r % 2.
    """
    pytest.importorskip("cutlass")
    from fusedops.cutlass import transposed_staging as module
    from fusedops.cutlass.staging import Staging

    calls: list[list[Any]] = []
    arch = SimpleNamespace(inline_ptx=lambda code, read_only_args: calls.append(read_only_args))
    monkeypatch.setattr(module, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(module, "Int32", lambda value: value)
    monkeypatch.setattr(module, "packed_pair", lambda low, high, dtype: (low, high))
    monkeypatch.setattr(module, "storage_value", lambda value, dtype: value)
    staging = Staging(dtype, 32 * columns, 2, 2)
    base, first, found = 1 << 16, 32, {}
    for warp in range(4):
        by_lane = []
        for lane in range(32):
            calls.clear()
            column = warp * 8 * columns + lane // 4
            values = {
                (i, j): (first + 8 * (i >> 1) + 2 * (lane % 4) + (i & 1), column + 8 * j)
                for i in range(8)
                for j in range(columns)
            }
            tile: Any = SimpleNamespace(values=values)
            module.write_transposed(staging, tile, base, warp * 32 + lane, first)
            by_lane.append(list(calls))
        if dtype == E4M3:
            found.update({address: value for stores in by_lane for address, value in stores})
            continue
        for instruction in range(columns):
            for matrix, row, column in itertools.product(range(4), range(8), range(8)):
                address = by_lane[8 * matrix + row][instruction][0]
                holder = by_lane[4 * column + row // 2][instruction]
                found[address + 2 * column] = holder[1 + matrix][row % 2]
    assert found == {
        base + staging.offset(row, column * dtype.itemsize): (row, column)
        for row in range(first, first + 32)
        for column in range(32 * columns)
    }
