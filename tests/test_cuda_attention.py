"""Decode attention by csrc without a GPU: plans, how keys are shared, and its kernels' SASS."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cuda_kernels import compiled, count
from test_cuda_plan import H200, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.errors import UnsupportedError
from fusedops.jit import resources
from fusedops.jit.nvrtc import CudaProgram, compile_program
from fusedops.ops.op import OPS
from fusedops.providers.cuda_attention import (
    HEAD_DIMS,
    UNIT,
    WARPS,
    blocks_an_sm,
    heads_a_cluster,
    plan_paged_attention,
)
from fusedops.providers.cuda_base import view_of
from fusedops.providers.cuda_plan import Gpu, Launch, View

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CODES = (torch.float8_e4m3fn, torch.int8)
A100 = Gpu("sm_80", 108)
RTX = Gpu("sm_120a", 188)
needs_disassembler = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")


def views(
    batch: int = 1,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    *,
    context: int = 1024,
    page_size: int = 16,
    dtype: torch.dtype = BF16,
    cached: torch.dtype | None = None,
    layout: str = "NHD",
    query_start: View | None = None,
) -> list[View | None]:
    query_heads, kv_heads = heads
    inner = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    cache = view(99, *inner, head_dim, dtype=cached or dtype)
    scale = View((kv_heads,), (1,), F32) if cache.dtype in CODES else None
    table = view(batch, -(-context // page_size), dtype=torch.int32)
    lengths = view(batch, dtype=torch.int32)
    q = view(batch, query_heads, head_dim, dtype=dtype)
    return [q, cache, cache, table, lengths, query_start, scale, scale]


def launch_of(
    given: list[View | None],
    gpu: Gpu = H200,
    *,
    scale: float = 0.125,
    window: int = 0,
    softcap: float = 0.0,
    layout: str = "NHD",
) -> Launch:
    plan = plan_paged_attention(given, gpu, 1, scale, True, window, softcap, layout)
    (launch,) = plan.launches
    assert plan.results == ((given[0].shape, given[0].dtype),)
    return launch


def require_arguments_to_fit(launch: Launch) -> None:
    assert len(launch.tensors) + len(launch.constants) == len(launch.parameters)
    assert set(launch.parameters[: len(launch.tensors)]) == {"pointer"}
    words = launch.parameters[len(launch.tensors) :]
    for word, value in zip(words, launch.constants, strict=True):
        size = int(word.lstrip("uint"))
        least = 0 if word.startswith("u") else -(2 ** (size - 1))
        assert least <= value < least + 2**size


@pytest.mark.parametrize(
    ("batch", "cluster"), [(1, 16), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1), (64, 1), (256, 1)]
)
def test_small_batches_share_each_request_among_blocks_that_run_at_once(
    batch: int, cluster: int
) -> None:
    launch = launch_of(views(batch))
    require_arguments_to_fit(launch)
    assert (launch.cluster, launch.blocks, launch.threads) == (cluster, (8 * cluster, batch), 128)
    warp = "fusedops::MmaWarp<__nv_bfloat16, __nv_bfloat16, 128, 16, false>"
    assert launch.kernel == f"fusedops::attention_decode<{warp}, {cluster}>"
    assert launch.tensors == (0, 1, 2, 3, 4, 0, 0, 8)
    # 32 query heads of 8: 4 in one cluster; 16 MB of units are asked for early, at least one each.
    ahead = launch.constants[6]
    assert launch.constants[:6] == (8, 4, 99, 1, 1024, 0)
    assert ahead == 1 or ahead * batch * 8 * cluster * WARPS * 8192 <= 2**24
    assert launch.constants[9:11] == (32 * 128, 128)
    assert launch.constants[11:17] == (16 * 8 * 256, 8 * 256, 256) * 2


def test_a_cluster_has_no_more_blocks_than_find_keys() -> None:
    assert [launch_of(views(context=n)).cluster for n in (1024, 1008, 512, 64, 16)] == [
        *(16, 8, 8, 1, 1)
    ]
    assert launch_of(views(context=8192), window=240).cluster == 4
    assert launch_of(views(context=0)).blocks == (8, 1)


def test_clusters_follow_what_the_architecture_has() -> None:
    assert launch_of(views(), A100).cluster == 1
    assert launch_of(views(), RTX).cluster == 8


@pytest.mark.parametrize(("group", "dtype", "tiles"), [(1, BF16, 1), (7, F16, 1), (9, BF16, 2)])
def test_heads_of_a_group_share_a_cluster_up_to_eight(
    group: int, dtype: torch.dtype, tiles: int
) -> None:
    launch = launch_of(views(8, (2 * group, 2), dtype=dtype))
    assert launch.blocks == (2 * tiles * launch.cluster, 8)
    assert launch.constants[1] == group
    single = launch_of(views(8, (2 * group, 2), dtype=F32))
    assert single.blocks == (2 * -(-group // 4) * single.cluster, 8)
    assert single.kernel.startswith("fusedops::attention_decode<fusedops::FmaWarp<float, 128,")


def test_both_layouts_become_strides_in_bytes() -> None:
    launch = launch_of(views(layout="HND", page_size=32, head_dim=64), layout="HND")
    assert launch.constants[2:5] == (99, 2, 1024)
    assert launch.constants[11:17] == (8 * 32 * 128, 128, 32 * 128) * 2


@pytest.mark.parametrize("cached", CODES, ids=str)
def test_8_bit_caches_bring_their_scales(cached: torch.dtype) -> None:
    given = views(cached=cached)
    given[6] = View((), (), F32)
    launch = launch_of(given)
    require_arguments_to_fit(launch)
    assert launch.tensors == (0, 1, 2, 3, 4, 6, 7, 8)
    assert launch.constants[-2:] == (0, 1)
    word = "signed char" if cached is torch.int8 else "__nv_fp8_e4m3"
    assert f"<__nv_bfloat16, {word}, 128, 16, false>" in launch.kernel


def test_views_that_begin_anywhere_are_read_in_smaller_pieces() -> None:
    def aligned(cache: torch.Tensor) -> str:
        given = views(heads=(4, 2), head_dim=64)
        given[1] = view_of(cache)
        return launch_of(given).kernel.split(", ")[3]

    base = torch.empty(9 * 16 * 2 * 72 + 64, dtype=BF16)
    base = base[(-base.data_ptr() // 2) % 8 :]
    shape, strides = (9, 16, 2, 64), (16 * 2 * 72, 2 * 72, 72, 1)
    assert aligned(base.as_strided(shape, strides)) == "16"
    assert aligned(base.as_strided(shape, strides, 4)) == "8"
    assert aligned(base.as_strided(shape, strides, 1)) == "2"
    assert aligned(base.as_strided(shape, (16 * 2 * 70, 2 * 70, 70, 1))) == "4"


def test_scores_are_powers_of_two_with_and_without_a_cap() -> None:
    def factors(**options: float) -> list[float]:
        bits = np.array(launch_of(views(), **options).constants[7:9], dtype=np.uint32)
        return bits.view(np.float32).tolist()

    log2_e = np.log2(np.e)
    assert factors(scale=0.5) == pytest.approx([0.5 * log2_e, 0.0], rel=1e-7)
    assert factors(scale=0.5, softcap=30.0) == pytest.approx([0.5 / 30, 30 * log2_e], rel=1e-7)
    with pytest.raises(UnsupportedError, match="float32 holds"):
        launch_of(views(), scale=1.0, softcap=1e-300)


def test_windows_beyond_int32_are_none() -> None:
    launch = launch_of(views(), window=2**40)
    require_arguments_to_fit(launch)
    assert launch.constants[5] == 2**31 - 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query_start": view(2, dtype=torch.int32)}, "decode steps"),
        ({"head_dim": 80}, "head dims"),
        ({"page_size": 8}, "multiple of 16 slots, got 8"),
        ({"batch": 65536}, "up to 65535 requests"),
        ({"context": 2**31}, "slots each"),
    ],
)
def test_what_has_no_kernel_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        launch_of(views(**change))


def test_elements_that_lie_apart_are_refused() -> None:
    for place in (0, 2):
        given = views()
        apart = given[place]
        given[place] = View(apart.shape, (*apart.strides[:-1], 2), apart.dtype)
        with pytest.raises(UnsupportedError, match="side by side"):
            launch_of(given)


def test_nothing_is_launched_for_no_request() -> None:
    assert plan_paged_attention(views(0), H200, 1, 1.0, True, 0, 0.0, "NHD").launches == ()


def test_the_operation_asks_the_provider() -> None:
    q = torch.zeros(1, 4, 64)
    cache, table = torch.zeros(2, 16, 2, 64), torch.zeros(1, 1, dtype=torch.int32)
    options = (None, None, None, 1, 1.0, True, 0, 0.0, "NHD")
    answer = OPS["paged_attention"].answers(q, cache, cache, table, table[0], *options)["cuda"]
    assert not answer.ok
    assert "got one on cpu" in answer.reason


# How keys are shared: the rule of decode_split.cuh, and that rule in CUDA


def shares(length: int, window: int, capacity: int, parts: int) -> tuple[int, int, Any, Any]:
    """(first visible position, end, first unit and number of units of each part)."""
    low, high = max(0, length - window) if window else 0, min(length, capacity)
    first = low // UNIT + np.arange(parts)
    units = -(-high // UNIT) if high > low else 0
    return low, high, first, np.maximum(0, -(-(units - first) // parts))


@pytest.mark.parametrize("window", [0, 1, 100, 1024])
@pytest.mark.parametrize("cluster", [1, 2, 16])
def test_shares_cover_every_visible_key_once_and_are_even(cluster: int, window: int) -> None:
    parts = cluster * WARPS
    for length in range(4098):
        low, high, first, counts = shares(length, window, 4096, parts)
        step = np.arange(counts.max(initial=0))
        units = (first[:, None] + parts * step)[step < counts[:, None]]
        begins = np.maximum(units * UNIT, low)
        ends = np.minimum((units + 1) * UNIT, high)
        assert (ends > begins).all()
        order = np.argsort(units)
        assert (begins[order][1:] == ends[order][:-1]).all()
        visible = max(0, min(length, 4096) - (max(0, length - window) if window else 0))
        assert (ends - begins).sum() == visible
        assert counts.max() - counts.min() <= 1
        # A block's warps together, too.
        of_blocks = counts.reshape(WARPS, cluster).sum(0)
        assert of_blocks.max() - of_blocks.min() <= 1


@needs_wheels
def test_the_kernel_shares_keys_by_that_rule_and_has_the_sizes_that_plans_count_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['#include "attention_combine.cuh"', '#include "attention_fma.cuh"']
    lines += ['#include "attention_mma.cuh"', '#include "decode_split.cuh"', "namespace fusedops {"]
    for length in (-5, 0, 1, 15, 16, 17, 1000, 1024, 1025, 4096, 4097, 5000, 2**31 - 1):
        for window in (0, 1, 33, 1000, 2**31 - 1):
            for parts, capacity in ((4, 4096), (64, 1024)):
                low, high, first, counts = shares(length, window, capacity, parts)
                for part in (0, 3, parts - 1):
                    call = f"share_of({length}, {window}, {capacity}, {part}, {parts})"
                    lines.append(f'static_assert({call}.count == {counts[part]}, "");')
                    if counts[part]:
                        lines.append(
                            f'static_assert({call}.unit(1, {parts}) == {first[part] + parts}, "");'
                        )
                        lines.append(f'static_assert({call}.low == {low}, "");')
                        lines.append(f'static_assert({call}.high == {high}, "");')
    facts = {"kUnit": UNIT, "kAttentionWarps": WARPS}
    words = {BF16: "__nv_bfloat16", torch.int8: "signed char", F32: "float"}
    for dtype, cached in ((BF16, BF16), (BF16, torch.int8), (F32, F32), (F32, torch.int8)):
        for head_dim in HEAD_DIMS:
            types = f"{words[cached]}, {head_dim}, 16, false"
            types = f"FmaWarp<{types}>" if dtype is F32 else f"MmaWarp<{words[dtype]}, {types}>"
            facts[f"{types}::kBlocks"] = blocks_an_sm(dtype, cached, head_dim)
            facts[f"{types}::kHeads"] = heads_a_cluster(dtype)
    lines += [f'static_assert({name} == {value}, "");' for name, value in facts.items()]
    lines.append("__global__ void nothing() {} }")
    root = tmp_path / "csrc"
    shutil.copytree(resources.csrc_dir(), root)
    monkeypatch.setattr(resources, "PACKAGE_DIR", tmp_path / "fusedops")
    (root / "facts.cu").write_text("\n".join(lines))
    compile_program(CudaProgram("facts.cu", ("fusedops::nothing",)), "sm_90a", tmp_path)


# SASS


def sass_of(launches: list[Launch], arch: str, folder: Path) -> dict[str, str]:
    kernels = tuple(sorted({launch.kernel for launch in launches}))
    return compiled(launches[0].program.file, kernels, arch, folder)


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_keys_go_from_memory_to_tensor_cores_by_registers(arch: str, tmp_path: Path) -> None:
    launch = launch_of(views(), Gpu(arch, 132))
    (sass,) = sass_of([launch], arch, tmp_path).values()
    # 8 products for the scores of 16 keys, and 8 for each half of the weights.
    assert count(sass, r"HMMA\.16816\.F32\.BF16") == 24
    # The first unit by its hint, once more where that was wrong, and the next one in the loop.
    assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") == 3 * 16
    assert count(sass, r"MOVM[\w.]*") == 4
    assert count(sass, r"LDSM[\w.]*") == count(sass, r"(?:LDL|STL)[\w.]*") == 0
    assert count(sass, r"(?:ATOM|ATOMG|ATOMS|RED)[\w.]*") == 0
    assert ("ACQBULK" in sass) is ("PREEXIT" in sass) is (arch != "sm_80")
    assert (count(sass, r"UBLKPF[\w.]*") > 0) is (arch != "sm_80")
    if arch != "sm_80":
        # A prefetch of the cache may stand before the wait, a load of it not.
        waits = sass.index("ACQBULK")
        assert re.search(r"LDG\.E[\w.]*\.128", sass[:waits]) is None
        assert count(sass, r"UCGABAR_ARV|ERRBAR|UCGABAR_WAIT") >= 2


VARIANTS = [
    *((BF16, BF16, 30.0), (F16, F16, 0.0), (F32, F32, 0.0)),
    *((BF16, torch.int8, 0.0), (F16, torch.float8_e4m3fn, 0.0), (F32, torch.float8_e4m3fn, 0.0)),
]


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize(("dtype", "cached", "softcap"), VARIANTS, ids=str)
def test_no_variant_uses_local_memory(
    dtype: torch.dtype, cached: torch.dtype, softcap: float, tmp_path: Path
) -> None:
    launches = [
        launch_of(views(batch, head_dim=head_dim, dtype=dtype, cached=cached), softcap=softcap)
        for batch, head_dim in ((1, 256), (64, 128))
    ]
    for name, sass in sass_of(launches, "sm_90a", tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert (count(sass, r"HMMA[\w.]*") > 0) is (dtype is not F32), name
