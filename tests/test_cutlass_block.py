"""e4m3 with scales a block of 128: code of the kernels, which scale meets which sum, tilings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cutlass_8bit import TILES, problem_of, sass_of
from test_cutlass_compile import needs_dsl

from fusedops.config import (
    DECODE_BUCKETS,
    choose_decode,
    choose_prefill,
    decode_tiles,
    prefill_tiles,
    tuning_key,
)
from fusedops.config.elements import scale_bytes
from fusedops.epilogue.chain import Epilogue
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass import CutlassProvider, choose_candidate, decode_program
from fusedops.providers.cutlass_sm80 import CutlassSm80Provider
from fusedops.providers.kernel_tensors import operands_read
from fusedops.weight import BlockFp8, Int4

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHARED_BYTES = 227 * 1024


def block_problem(
    chain: str,
    m: int,
    dtype: torch.dtype = E4M3,
    n: int = 4096,
    k: int = 4096,
    rows: str = "plain",
) -> GemmProblem:
    dense = problem_of(chain, m, dtype, n=n, k=k)
    spec = replace(dense.spec, weight=BlockFp8(n, k, rows))
    return replace(dense, spec=spec, operand_dtypes=(torch.float32,) * 2 + dense.operand_dtypes)


@needs_dsl
@pytest.mark.parametrize(
    ("name", "chain", "m", "instructions", "sums"),
    [
        ("r64k128", "none", 16, 8, 2 * 8),
        ("r32k128s2", "bias|residual", 64, 8, 2 * 32),
        ("r112k64", "gate|quantize(e4m3,m)", 128, 4, 64),
        ("c128x128m2", "residual", 4096, 4, 64),
        ("c128x192", "bias|act(silu)", 4096, 4, 96),
        ("r64k128", "gate", 64, 8, 2 * 32),
        ("c128x192", "gate(silu)", 4096, 4, 96),
        ("c128x128m2", "gate(silu)", 4096, 4, 64),
        ("p64x144", "none", 4096, 4, 72),
        ("c128x128k4", "quantize(e4m3)", 128, 4, 64),
    ],
)
def test_kernel_promotes_every_sum_of_a_block_and_spills_nothing(
    name: str, chain: str, m: int, instructions: int, sums: int, tmp_path: Path
) -> None:
    rows = "gate_up" if "gate" in chain else "plain"
    code = sass_of(block_problem(chain, m, rows=rows), TILES[name], tmp_path)
    products = re.findall(r"\bQGMMA\.64x\d+x32\.F32\.E4M3\.E4M3 R\d+, gdesc\[UR\d+\], (\w+)", code)
    # The first of four instructions starts from zero.
    assert [source == "RZ" for source in products] == [True, False, False, False] * (
        instructions // 4
    )
    assert len(re.findall(r"\bFFMA ", code)) >= sums


@pytest.mark.parametrize("interleaved", [False, True])
def test_weight_rows_give_each_sum_the_scale_of_its_column(
    interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PTX ISA, "Register Fragments for wgmma.mma_async": column 8 * (j / 4) + j % 2.

    And row 8 * (j / 2 % 2), which is in the second of two interleaved blocks.
    """
    pytest.importorskip("cutlass")
    from fusedops.cutlass import block_scales

    monkeypatch.setattr(block_scales, "Int32", int)
    monkeypatch.setattr(
        block_scales, "read", lambda a, count, _: [a // 4 + i for i in range(count)]
    )
    m_pad, pitch = 48, 96
    stages = SimpleNamespace(
        iterator=SimpleNamespace(toint=lambda: 0), stride=(m_pad, 1, pitch), shape=(2, m_pad, 5)
    )
    scaling = block_scales.WeightRows(m_pad, interleaved)
    column = 6
    for block in range(2):
        scales = scaling.activations(stages, (0, column), 3, block)
        factor = scaling.factors((0, column), scales, [1000, 3000][: scaling.weight_blocks])
        start = 3 * pitch + block * m_pad + column
        for j in range(m_pad // 2):
            weight = 3000 if interleaved and j // 2 % 2 else 1000
            assert factor(j) == weight * (start + 8 * (j // 4) + j % 2)


class _Rows:
    """Scales in shared memory that name their row."""

    def __getitem__(self, at: tuple[int, int, int]) -> int:
        assert at[0] == 0
        assert at[2] == 2
        return at[1]


@pytest.mark.parametrize("rows", ["plain", "gate_up"])
@pytest.mark.parametrize("name", ["c128x128m2", "c256x64n2", "c128x192", "p64x144", "c128x80"])
def test_activation_rows_give_each_sum_the_scales_of_its_row_and_column(
    name: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns as the epilogue has them, which whole results hold on a GPU."""
    pytest.importorskip("cutlass")
    from fusedops.cutlass import block_scales, prefill_epilogue

    monkeypatch.setattr(block_scales, "select_", lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(prefill_epilogue, "as_float", lambda value: value)
    config = TILES[name].problem_config(block_problem("none", 4096, rows=rows))
    block_of = BlockFp8(4096, 4096, rows).block_of_rows(torch.device("cpu")).tolist()
    emission: Any = SimpleNamespace(epilogue=Epilogue())
    epilogue = prefill_epilogue.PrefillEpilogue(config, emission, None, True, None, None, None)  # type: ignore[arg-type]
    scaling = block_scales.ActivationRows(
        config.tile_n, config.blocks, config.sharing * 64, config.interleaved
    )
    for tile_n, thread, group in ((0, 0, 0), (1, 37, 0), (3, 101, config.sharing - 1), (5, 127, 0)):
        place = prefill_epilogue.TilePlace(0, tile_n, group, 0, 0, thread, 0)
        first_row = group * 64 + thread // 32 * 16 + thread % 32 // 4
        at = (first_row, tile_n * config.tile_n)
        first_block = block_of[at[1]]
        scales = scaling.activations(_Rows(), at, 2, 0)
        weight = [1000 * (first_block + i + 1) for i in range(scaling.weight_blocks)]
        factor = scaling.factors(at, scales, weight)
        for block, step in epilogue.steps:
            where = epilogue.coordinates(place, block, step)
            for (i, j), index in epilogue._values(range(10**6), block, step).items():
                expected = where.m[i] * 1000 * (block_of[where.n[j]] + 1)
                assert factor(index) == expected


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: tile.name)
def test_stages_with_scales_fit_an_sm(tile: Any) -> None:
    for m in (1, 33, 128):
        problem = block_problem("none", m)
        if tile.legal(problem) is not None:
            continue
        config = tile.problem_config(problem)
        assert config.block_scaled
        assert config.k % 128 == 0
        is_decode = tile in decode_tiles()
        x_rows, w_rows = (config.m_pad, tile.rows) if is_decode else (tile.tile_m, tile.tile_n)
        stage = (x_rows + w_rows) * config.k + scale_bytes(x_rows, config.k)
        assert scale_bytes(x_rows, config.k) >= x_rows * config.k // 128 * 4
        assert config.stages * stage <= SHARED_BYTES - 2048
        assert config.stages >= 3


def test_prefill_tilings_that_cannot_promote_say_why() -> None:
    problem = block_problem("none", 4096)
    assert "promoted ones at most 96" in str(TILES["c128x256m2"].legal(problem))
    # Tiles of 176 columns start at every multiple of 16.
    odd = replace(TILES["p64x192"], name="t", tile_n=176)
    assert "more than two blocks" in str(odd.legal(problem))
    legal = [tile for tile in prefill_tiles() if tile.legal(problem) is None]
    for tile in legal:
        starts = range(0, 128 * tile.tile_n, tile.tile_n)
        assert max((s + tile.tile_n - 1) // 128 - s // 128 for s in starts) <= 1
    assert len(legal) >= 15


@pytest.mark.parametrize("m", [1, 16, 64, 100, 128, 512, 4096])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1280, 8192), (576, 1536)])
def test_choice_is_legal_and_no_sooner_than_without_blocks(m: int, n: int, k: int) -> None:
    problem, dense = block_problem("none", m, n=n, k=k), problem_of("none", m, E4M3, n=n, k=k)
    for choose in (choose_decode, choose_prefill) if m <= 128 else (choose_prefill,):
        tile = choose(problem, "none")
        assert tile.legal(problem) is None
        assert tile.predicted_us(problem) >= choose(dense, "none").predicted_us(dense)
    if m <= 16:
        assert choose_candidate(problem).name.startswith("r")


@pytest.mark.parametrize("m", DECODE_BUCKETS)
def test_every_padded_m_has_tilings(m: int) -> None:
    assert any(tile.legal(block_problem("residual", m)) is None for tile in decode_tiles())


def test_measured_choices_are_filed_apart_from_those_without_blocks() -> None:
    block, dense = block_problem("none", 16), problem_of("none", 16, E4M3)
    assert tuning_key(block) == f"{tuning_key(dense)} block_fp8"
    assert tuning_key(dense) == "n4096 k4096 m16 float8_e4m3fn plain"


def test_kernels_of_the_formats_differ_and_hold_their_sources() -> None:
    tile = next(tile for tile in decode_tiles() if tile.name == "r64k128")
    block = decode_program(block_problem("none", 16), tile)
    dense = decode_program(problem_of("none", 16, E4M3), tile)
    int8 = decode_program(problem_of("none", 16, torch.int8), tile)
    assert len({block.spec, dense.spec, int8.spec}) == 3
    assert any("elements" in name for name, _ in block.sources.files)


def test_providers_say_what_formats_they_take() -> None:
    assert CutlassProvider().supports(block_problem("bias", 16)).ok
    wrong = CutlassProvider().supports(block_problem("bias", 16, torch.int8))
    assert "blocks of float8_e4m3fn only" in wrong.reason
    gated = block_problem("gate", 16, rows="gate_up")
    assert CutlassProvider().supports(gated).ok
    assert CutlassProvider().supports(replace(gated, m=4096)).ok
    int4 = replace(gated, spec=replace(gated.spec, weight=Int4(4096, 4096)), x_dtype=BF16)
    assert "in the layout wgmma16, got rows" in CutlassProvider().supports(int4).reason
    ampere = CutlassSm80Provider().supports(block_problem("bias", 16))
    assert "no kernel for the weight format block_fp8(4096,4096)" in ampere.reason


@pytest.mark.parametrize("rows", ["plain", "gate_up"])
def test_kernels_read_the_scales_of_a_rows_block(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every row that a thread's first may be: in the decode kernel every 16th, and 8 more."""
    pytest.importorskip("cutlass")
    from fusedops.cutlass import block_scales

    monkeypatch.setattr(block_scales, "_element", lambda scales, row, block: row)
    block_of = BlockFp8(1024, 128, rows).block_of_rows(torch.device("cpu")).tolist()
    decode = block_scales.WeightRows(16, rows == "gate_up")
    prefill = block_scales.ActivationRows(192, 1, 64, rows == "gate_up")
    for row in range(0, 1024, 16):
        for inside in (0, 5):
            read = decode.weight_scales(None, (row + inside, 0), 0)
            expected = [block_of[row + inside], block_of[row + inside + 8]]
            assert read == expected[: len(read)]
            assert (len(read) == 1) == (expected[0] == expected[1])
    for column in range(0, 1024, 192):
        read = prefill.weight_scales(None, (0, column), 0)
        columns = range(column, min(column + 192, 1024), 8)
        assert {block_of[c] for c in columns} <= set(read)


def test_scales_are_handed_over_as_matrices_for_bulk_copies() -> None:
    m, n, k = 5, 256, 384
    epilogue = Epilogue.parse("bias")
    spec = GemmSpec(BlockFp8(n, k), epilogue)
    padded = torch.rand(3, 8)[:, :m]
    w_scale, bias = torch.rand(2, 3), torch.rand(n)
    given = operands_read(spec, [padded, w_scale, bias], m)
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in (padded, w_scale, bias)]
    assert given[1].stride() == (3, 1)
    for scales in (torch.rand(3, m), torch.rand(3, 9)[:, 1:6], torch.rand(m, 3).t()):
        read = operands_read(spec, [scales, w_scale, bias], m)[0]
        assert torch.equal(read, scales)
        assert read.data_ptr() % 16 == 0
        assert read.stride(1) == 1
        assert read.stride(0) % 4 == 0
    one = operands_read(spec, [torch.rand(3, 4)[:, :1], w_scale, bias], 1)[0]
    assert one.stride() == (4, 1)
