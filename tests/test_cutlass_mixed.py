"""The kernel with narrow weights: tilings, exchange, and its code for sm_90a within its budget."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from narrow_weights import fastest_config, mixed_configs
from sass_products import touched_in_flight
from test_cutlass_compile import extract_cubin, needs_dsl, nvdisasm

from fusedops.config import DECODE_BUCKETS
from fusedops.config.mixed import MixedConfig, NarrowWeight
from fusedops.config.mixed_tiles import mixed_clusters, mixed_config
from fusedops.cutlass.mixed_program import mixed_program
from fusedops.epilogue.chain import Epilogue
from fusedops.errors import ConfigError
from fusedops.jit.dsl import OBJECT, compile_dsl

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INT4 = NarrowWeight("int4", 128)
EVERYTHING = "scale(x_scale,m)|scale(w_scale,n)|bias|act(gelu)|tap|quantize(e4m3,m)"


def sass_of(config: MixedConfig, chain: str, dtype: torch.dtype, folder: Path) -> str:
    """The code of a configuration; it multiplies from registers and does not spill."""
    epilogue = Epilogue.parse(chain)
    operand_dtypes = tuple(dtype if dtype in o.dtypes else o.dtypes[0] for o in epilogue.operands)
    out_dtype = epilogue.result_dtype(BF16 if dtype == E4M3 else dtype)
    program = mixed_program(config, epilogue, dtype, out_dtype, operand_dtypes)
    compile_dsl(program, "sm_90a", folder)
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    cubin = extract_cubin((folder / OBJECT).read_bytes(), folder)
    sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "UTMALDG" in sass
    assert "LDS.128" in sass
    products = re.findall(r"[HQ]GMMA\.64x(\d+)x(?:16|32)\.F32\S* R\d+, (\w+)", sass)
    steps = config.k // config.weight.step
    assert len(products) == steps * (1 + config.multiplies_zeros)
    assert all(n == str(config.m_pad) and a.startswith("R") for n, a in products)
    assert not re.search(r"\b(LDL|STL)\b", sass), "the kernel spills to local memory"
    assert touched_in_flight(sass) == []
    return sass


def main_loop(sass: str) -> list[str]:
    """Names of the instructions of the loop over stages."""
    lines = [line.strip() for line in sass.splitlines()]
    last = max(i for i, line in enumerate(lines) if "GMMA." in line)
    end = next(i for i in range(last, len(lines)) if " BRA " in lines[i])
    label = re.search(r"`\((\.L_x_\d+)\)", lines[end])
    assert label is not None
    start = lines.index(f"{label[1]}:")
    loop = [line for line in lines[start : end + 1] if re.match(r"/\*[0-9a-f]{4,}\*/", line)]
    return [re.sub(r"^/\*\w+\*/\s+(@!?U?P\w+\s+)?", "", line).split()[0] for line in loop]


@needs_dsl
@pytest.mark.parametrize(
    ("weight", "dtype", "k", "zero_products", "logic", "arithmetic", "all_of_8"),
    [
        (INT4, BF16, 256, False, 7.5, 4.0, 18.5),
        (INT4, FP16, 256, False, 5.5, 4.0, 16.5),
        (INT4, BF16, 256, True, 7.5, 0.0, 15.6),
        (INT4, FP16, 256, True, 5.5, 0.0, 13.8),
        (NarrowWeight("int4", 128, True), BF16, 256, True, 8.1, 0.0, 16.5),
        (NarrowWeight("int4", 32, True), BF16, 256, False, 9.2, 4.0, 27.0),
        (NarrowWeight("int8", 0), BF16, 128, False, 10.5, 4.1, 22.5),
        (NarrowWeight("e4m3", 0), BF16, 128, False, 14.9, 4.1, 26.0),
        (NarrowWeight("int4", 128, x_bits=8), E4M3, 256, True, 3.5, 0.0, 9.5),
    ],
    ids=str,
)
def test_conversion_keeps_to_its_budget(
    weight: NarrowWeight,
    dtype: torch.dtype,
    k: int,
    zero_products: bool,
    logic: float,
    arithmetic: float,
    all_of_8: float,
    tmp_path: Path,
) -> None:
    """Instructions for 8 codes of a thread: at 4.7 TB/s there are 25 slots for 4-bit codes."""
    config = mixed_config(weight, 16, 128, k, 4, zero_products=zero_products)
    loop = main_loop(sass_of(config, "residual", dtype, tmp_path))
    eights = k * 64 / 128 / 8

    def of(*prefixes: str) -> float:
        return sum(name.startswith(prefixes) for name in loop) / eights

    assert of("LOP3", "SHF", "PRMT") <= logic
    assert of("HADD2", "HMUL2", "HFMA2") <= arithmetic
    assert len(loop) / eights <= all_of_8


@needs_dsl
@pytest.mark.parametrize(
    ("weight", "m", "rows", "k", "split", "chain", "dtype"),
    [
        (INT4, 8, 64, 256, 2, "residual|row_stat(sumsq,132)", BF16),
        (NarrowWeight("int4", 32, True), 16, 256, 256, 2, "residual|row_stat(sumsq,132)", BF16),
        (NarrowWeight("int4", 0, True, torch.float32), 16, 224, 256, 1, "gate(silu)", FP16),
        (NarrowWeight("int8", 128), 32, 192, 128, 4, EVERYTHING, FP16),
        (NarrowWeight("int4", 32, True), 64, 128, 128, 2, EVERYTHING, BF16),
        (INT4, 128, 64, 128, 1, "bias|residual", BF16),
        (NarrowWeight("int4", 0, True, x_bits=8), 32, 128, 256, 4, "gate(silu)", E4M3),
    ],
    ids=str,
)
def test_kernel_multiplies_from_registers_without_spills(
    weight: NarrowWeight,
    m: int,
    rows: int,
    k: int,
    split: int,
    chain: str,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    sass_of(mixed_config(weight, m, rows, k, split), chain, dtype, tmp_path)


@needs_dsl
@pytest.mark.parametrize(
    ("weight", "m", "rows", "k", "split", "dtype"),
    [
        (INT4, 16, 112, 128, 1, BF16),
        (NarrowWeight("int4", 64, False, FP16), 16, 112, 128, 4, FP16),
        (NarrowWeight("int4", 0, x_bits=8), 8, 112, 256, 1, E4M3),
        (NarrowWeight("int4", 128, x_bits=8), 128, 64, 256, 1, E4M3),
    ],
    ids=str,
)
def test_products_of_zero_points_read_registers_that_stay(
    weight: NarrowWeight,
    m: int,
    rows: int,
    k: int,
    split: int,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """Of a zero point that the compiler knows it fills registers behind the products."""
    config = mixed_config(weight, m, rows, k, split, zero_products=True)
    sass_of(config, "bias|residual", dtype, tmp_path)


@needs_dsl
def test_prefetch_asks_for_codes_scales_and_zero_points(tmp_path: Path) -> None:
    config = mixed_config(NarrowWeight("int4", 64, True), 16, 224, 128, 1)
    sass = sass_of(replace(config, prefetch=4), "gate(silu)", BF16, tmp_path)
    assert sass.count("UTMAPF") == 3


@pytest.mark.parametrize("m", DECODE_BUCKETS)
def test_every_m_has_tilings_that_fit(m: int) -> None:
    for weight in (INT4, NarrowWeight("int4", 32, True), NarrowWeight("e4m3")):
        configs = mixed_configs(weight, m)
        assert {config.split for config in configs} == {1, 2, 4}
        for config in configs:
            stage = config.weight_bytes + config.scale_bytes + config.zero_bytes
            assert config.stages >= 2
            assert config.stages * (stage + config.x_bytes) < 227 * 1024
            assert config.m_pad >= m


def test_choice_is_deterministic_and_fills_the_gpu() -> None:
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        config = fastest_config(INT4, 16, n, k, 132)
        assert config == fastest_config(INT4, 16, n, k, 132)
        assert 120 <= mixed_clusters(config, n, 132) * config.split <= 132


@pytest.mark.parametrize(
    ("weight", "tiling", "reason"),
    [
        (NarrowWeight("int4", 48), (64, 128, 1), "group=48: 32, 64, 128, or 0"),
        (NarrowWeight("int8", 64, True), (64, 128, 1), "only int4 has them"),
        (INT4, (40, 128, 1), "rows=40 is no multiple of 16"),
        (INT4, (64, 192, 1), "k=192 is no multiple"),
        (INT4, (64, 512, 1), "more than one load takes"),
        (NarrowWeight("int8"), (64, 256, 1), "more than one load takes"),
        (INT4, (64, 128, 3), "split=3: 1, 2 or 4"),
        (NarrowWeight("e4m3", 0, x_bits=8), (64, 128, 1), "only int4 has them"),
    ],
)
def test_config_says_why_there_is_no_kernel(
    weight: NarrowWeight, tiling: tuple[int, int, int], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        mixed_config(weight, 16, *tiling)


def test_config_says_that_registers_or_rows_do_not_suffice() -> None:
    with pytest.raises(ConfigError, match="more registers than there are"):
        mixed_config(INT4, 64, 192, 128, 1)
    with pytest.raises(ConfigError, match="at most 128"):
        mixed_config(INT4, 129, 64, 128, 1)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="no nvidia-cutlass-dsl")
@pytest.mark.parametrize(("split", "m_pad"), [(1, 8), (2, 8), (2, 48), (4, 16), (4, 48), (4, 80)])
def test_ranks_own_every_sum_once_and_know_where_it_lies(split: int, m_pad: int) -> None:
    """Accumulator j: row + 8 bit 1, column + bit 0 + 8 (j >> 2) (PTX ISA, wgmma's D fragment)."""
    from fusedops.cutlass.mixed_exchange import Exchange
    from fusedops.cutlass.row_statistics import RowStatistics

    exchange = Exchange(split, m_pad, 128, 64)
    statistics = RowStatistics((), 4, m_pad, split)
    owned = []
    for rank in range(split):
        at = exchange.coordinates(5, 2, 128, rank, (m_pad, 4096))
        for e in range(exchange.owned):
            j = exchange.source(e, rank)
            owned.append(j)
            m, n = at.m[e >> 1], at.n[e & 1]
            assert (m, n) == (2 + (j & 1) + 8 * (j >> 2), 133 + 8 * (j >> 1 & 1))
            assert statistics._owner(m) == rank
    assert sorted(owned) == list(range(m_pad // 2))
