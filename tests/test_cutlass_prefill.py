"""The prefill kernel compiles for sm_90a without a GPU; its tilings, order and choice are right."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from sass_products import touched_in_flight
from test_cutlass_compile import extract_cubin, make_problem, needs_dsl, nvdisasm

from fusedops.config import (
    DECODE_BUCKETS,
    PrefillTile,
    choose_prefill,
    decode_tiles,
    prefill_tiles,
    tuning_key,
)
from fusedops.config.prefill import store_columns
from fusedops.errors import ConfigError
from fusedops.jit.dsl import OBJECT, compile_dsl
from fusedops.problem import GemmProblem
from fusedops.providers import cutlass, cutlass_prefill
from fusedops.providers.cutlass import CutlassProvider, choose_candidate
from fusedops.providers.cutlass_prefill import prefill_candidate, prefill_program

TILES = {tile.name: tile for tile in prefill_tiles()}
SHARED_BYTES = 227 * 1024
ROW_SHAPES = [(4096, 4096), (28672, 4096), (4096, 14336), (48, 64), (1000, 200), (8, 8)]


def sass_of(problem: GemmProblem, tile: PrefillTile, folder: Path, *, aligned: bool = True) -> str:
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    folder.mkdir(exist_ok=True)
    compile_dsl(prefill_program(problem, tile, aligned), "sm_90a", folder)
    cubin = extract_cubin((folder / OBJECT).read_bytes(), folder)
    sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert touched_in_flight(sass) == []
    return sass


@needs_dsl
@pytest.mark.parametrize(
    ("name", "chain", "changes", "products"),
    [
        ("c128x256m2", "none", {}, 8),
        ("p128x192m2", "gate", {}, 16),
        ("c256x128n2", "bias|act(silu)|residual", {"dtype": torch.float16}, 16),
        (
            "p64x256",
            "scale(x_scale,m)|scale(w_scale,n)|bias|act(silu)|residual|row_stat(sumsq,32)",
            {},
            8,
        ),
        ("c128x32n2", "residual", {}, 8),
        ("p128x128m2", "bias|quantize(e4m3,group128)", {}, 16),
        ("c128x128k4", "bias|residual|row_stat(sumsq,132)", {}, 8),
        ("c128x256k2", "gate", {}, 8),
        ("c128x224k2", "bias|act(silu)|residual", {}, 8),
    ],
)
def test_aligned_kernel_stores_in_bulk_and_spills_nothing(
    name: str, chain: str, changes: dict[str, Any], products: int, tmp_path: Path
) -> None:
    tile = TILES[name]
    problem = make_problem(chain, 4096 if tile.split == 1 else 128, **changes)
    sass = sass_of(problem, tile, tmp_path)
    assert len(re.findall(r"\bHGMMA\.", sass)) == products
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass
    assert ("MULTICAST" in sass) == (tile.cluster_m * tile.cluster_n > 1)
    assert not re.search(r"\b(LDL|STL)\b", sass), "the kernel spills to local memory"
    config = tile.problem_config(problem)
    assert f"TRY_ALLOC.CTAPOOL UP0, {config.consumer_registers:#x}" in sass
    assert f"DEALLOC.CTAPOOL {config.producer_registers:#x}" in sass


@needs_dsl
def test_kernel_for_any_alignment_uses_no_bulk_store(tmp_path: Path) -> None:
    problem = make_problem("bias|tap|act(relu)|residual", 130, n=1001)
    sass = sass_of(problem, TILES["c128x128n2"], tmp_path, aligned=False)
    assert "HGMMA" in sass
    assert "UTMALDG" in sass
    assert "UTMASTG" not in sass
    assert not re.search(r"\b(LDL|STL)\b", sass), "the kernel spills to local memory"


def test_names_are_unique_over_both_families() -> None:
    names = [tile.name for tile in (*prefill_tiles(), *decode_tiles())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("tile", prefill_tiles(), ids=lambda tile: tile.name)
@pytest.mark.parametrize("chain", ["none", "gate", "quantize"])
def test_resources_fit_an_sm(tile: PrefillTile, chain: str) -> None:
    # A cluster that splits K has one tile.
    problem = make_problem(chain, 4096 if tile.split == 1 else 128, n=2048)
    config = tile.problem_config(problem)
    if chain == "gate" and tile.tile_n // tile.split % 32:
        assert "columns, no multiple of 16" in str(tile.legal(problem))
        return
    assert tile.legal(problem) is None
    assert config.stages >= 3
    # The register file has 65536; 384 threads are launched with 168 each.
    assert 128 * (2 * config.consumer_registers + config.producer_registers) == 168 * 384
    assert config.accumulators + 40 <= config.consumer_registers
    stages = config.stages * (tile.tile_m + tile.tile_n) * 64 * 2
    out_bytes = problem.spec.out_dtype.itemsize
    row_bytes = store_columns(tile.out_columns(problem), out_bytes) * out_bytes
    assert row_bytes <= 128
    # Two buffers of 64 rows for each of two warpgroups, and the barriers with their alignment.
    assert stages + 2 * 2 * 64 * row_bytes + 1024 <= SHARED_BYTES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 96}, "no multiple of 128"),
        ({"tile_n": 100}, "accepted: multiples of 16"),
        ({"cluster_m": 2, "cluster_n": 2}, "one or two CTAs"),
        ({"mode": "both"}, "accepted: cooperative"),
        ({"tile_m": 512}, "accumulators"),
        ({"split": 3}, "accepted: 1, 2, 4, 8"),
        ({"split": 2, "mode": "pingpong"}, "cooperative tile of 128 rows"),
        ({"split": 2, "tile_m": 256, "tile_n": 64}, "cooperative tile of 128 rows"),
        ({"split": 2, "cluster_n": 2}, "share nothing else"),
        ({"split": 4, "tile_n": 96}, "multiple of 16 columns"),
    ],
)
def test_impossible_tiling_is_refused(changes: dict[str, Any], reason: str) -> None:
    facts = {"tile_m": 128, "tile_n": 256, "cluster_m": 1, "cluster_n": 1, "mode": "cooperative"}
    with pytest.raises(ConfigError, match=reason):
        PrefillTile("t", **{**facts, **changes}, group=8)


def test_tiling_says_why_it_cannot_serve_a_problem() -> None:
    tile = TILES["p128x192m2"]
    assert "too few parts" in str(tile.legal(make_problem("row_stat", 512)))
    assert "whole groups" in str(tile.legal(make_problem("quantize(e4m3,group128)", 512)))
    assert "SMs" in str(tile.legal(make_problem("none", 512, sm_count=1)))
    split = TILES["c128x128k4"]
    assert "more tiles than 33 clusters" in str(split.legal(make_problem("none", 256)))
    assert "fewer k-tiles" in str(split.legal(make_problem("none", 128, k=192)))
    assert "too few parts" in str(split.legal(make_problem("row_stat(sumsq,32)", 128)))
    decode = decode_tiles()[0]
    assert "whole groups" in str(decode.legal(make_problem("quantize(e4m3,group128)")))


@pytest.mark.parametrize("m", [65, 100, 257, 1000, 8192, 100_000])
@pytest.mark.parametrize(("n", "k"), ROW_SHAPES)
def test_choice_is_legal_and_deterministic(m: int, n: int, k: int) -> None:
    problem = make_problem("none", m, n, k)
    tile = choose_prefill(problem, problem.gpu)
    assert tile.legal(problem) is None
    assert tile == choose_prefill(make_problem("none", m, n, k), problem.gpu)
    clusters = tile.clusters(m, n, 132)
    assert 1 <= clusters <= 132 // (tile.cluster_m * tile.cluster_n)
    assert clusters <= tile.cluster_tiles(m, n)
    if m > DECODE_BUCKETS[-1]:
        assert choose_candidate(problem).name == tile.name


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336)])
def test_few_rows_keep_the_decode_kernel(m: int, n: int, k: int) -> None:
    assert choose_candidate(make_problem("none", m, n, k)).name.startswith("r")


def test_measured_choice_of_either_family_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem("none", 64)
    for name in ("p64x64n2", "r16k128"):
        choices = {tuning_key(problem): {"config": name}}
        monkeypatch.setattr("fusedops.config.files.tuned_choices", lambda gpu, c=choices: c)
        monkeypatch.setattr(cutlass, "tuned_choices", lambda gpu, c=choices: c)
        assert choose_candidate(problem).name == name


def test_measured_choices_are_filed_by_rows() -> None:
    keys = [tuning_key(make_problem("none", m)) for m in (65, 96, 97, 128, 129, 192, 8000, 8192)]
    rows = [re.search(r" m(\d+) ", key).group(1) for key in keys]  # type: ignore[union-attr]
    assert rows == ["80", "96", "112", "128", "192", "192", "8192", "8192"]


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({"m": 65}, True),
        ({"m": 4096, "chain": "gate|quantize(int8,group128)"}, True),
        ({"m": 0}, True),
        ({"m": 4096, "chain": "row_stat"}, False),
        ({"m": 4096, "aligned_bytes": 8}, False),
    ],
)
def test_provider_serves_many_rows(changes: dict[str, Any], serves: bool) -> None:
    assert CutlassProvider().supports(make_problem(**{"chain": "none", **changes})).ok == serves


def test_explain_shows_the_prefill_configuration() -> None:
    text = CutlassProvider().describe(make_problem("gate", 4096, n=28672))
    assert "prefill kernel" in text
    assert "clusters of" in text


@pytest.mark.parametrize("name", ["c128x256m2", "c128x64n2", "p64x256", "c256x192m2"])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (130, 1000), (1000, 130), (5000, 7000)])
def test_raster_visits_every_tile_once(name: str, m: int, n: int) -> None:
    pytest.importorskip("cutlass")
    from fusedops.cutlass.raster import Raster

    tile = TILES[name]
    raster = Raster(tile.tile_m, tile.tile_n, tile.cluster_m, tile.cluster_n, 3)
    counts = raster.counts(m, n)
    assert counts[0] * counts[1] == tile.cluster_tiles(m, n)
    places = [
        tuple(int(getattr(i, "value", i)) for i in raster.locate(index, counts, rank))
        for index in range(counts[0] * counts[1])
        for rank in range(tile.cluster_m * tile.cluster_n)
    ]
    rows, columns = counts[0] * tile.cluster_m, counts[1] * tile.cluster_n
    assert sorted(places) == [(i, j) for i in range(rows) for j in range(columns)]


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        (torch.bfloat16, 64),
        (torch.float16, 32),
        (torch.bfloat16, 16),
        (torch.float32, 32),
        (torch.int8, 128),
        (torch.int8, 16),
    ],
)
def test_staging_addresses_follow_the_swizzle_of_bulk_copies(
    dtype: torch.dtype, columns: int
) -> None:
    """CUDA driver API, CUtensorMapSwizzle: 16-byte units of a row are xored with its number."""
    pytest.importorskip("cutlass")
    from fusedops.cutlass.staging import Staging

    staging = Staging(dtype, columns, 2, 2)
    width = columns * dtype.itemsize
    seen = set()
    for row in range(64):
        for column in range(0, columns, 2):
            lane, step = 2 * (column // 2 % 4), column // 8 * 8
            address = staging.offset(row, lane * dtype.itemsize) ^ (step * dtype.itemsize)
            linear = row * width + column * dtype.itemsize
            assert address == linear ^ ((linear >> 7) % (width // 16) << 4)
            seen.add(address)
    assert len(seen) == 64 * columns // 2


def test_launch_picks_the_kernel_by_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, launched = [], []

    def load(program: Any, arch: str) -> Any:
        loaded.append(program.spec.rsplit(" ", 1)[-1])
        return lambda *arguments: launched.append(program.spec.rsplit(" ", 1)[-1])

    monkeypatch.setattr(cutlass_prefill, "dsl_kernel", load)
    m, n, k = 100, 64, 64
    problem = make_problem("scale(x_scale,m)|residual|row_stat(sumsq,4)", m, n, k)
    launch = prefill_candidate(problem).launcher()
    assert loaded == ["aligned"]

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.zeros(size + offset, dtype=dtype)[offset:].view(shape)

    x, w, out = tensor(m, k), tensor(n, k), tensor(m, n)
    statistic = tensor(4, m + 1, dtype=torch.float32)[:, 1:]
    scale = tensor(m, dtype=torch.float32, offset=1)
    launch(x, w, out, (scale, tensor(m, n)), (statistic,))
    launch(x, w, out, (scale, tensor(m, n, offset=1)), (statistic,))
    launch(x, w, tensor(m, n + 1)[:, :n], (scale, tensor(m, n)), (statistic,))
    assert launched == ["aligned", "alignment", "alignment"]
    assert loaded == ["aligned", "alignment"]


@needs_dsl
@pytest.mark.parametrize(
    ("name", "chain", "fragments"),
    [
        ("p128x128n2", "bias|act(silu)|residual", 16),
        ("p128x192m2", "gate|residual", 12),
        ("p128x176n2", "residual|softcap(30.0)", 22),
    ],
)
def test_in_ping_pong_a_residual_comes_by_bulk_loads(
    name: str, chain: str, fragments: int, tmp_path: Path
) -> None:
    tile, problem = TILES[name], make_problem(chain, 4096)
    sass = sass_of(problem, tile, tmp_path / "aligned")
    # One load of 16 x 16 values where one store of them is: the results take the operand's place.
    assert len(re.findall(r"\bLDSM\.", sass)) == len(re.findall(r"\bSTSM\.", sass)) == fragments
    assert not re.search(r"\b(LDL|STL)\b", sass), "the kernel spills to local memory"
    pairs = len(re.findall(r"\bLDG\.", sass))
    assert pairs == (tile.tile_n // 4 if "bias" in chain else 0)
    sass = sass_of(problem, tile, tmp_path / "any", aligned=False)
    assert "LDSM" not in sass
