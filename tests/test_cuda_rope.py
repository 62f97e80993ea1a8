"""Plans of the kernel for RoPE and the paged append, and its SASS; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cuda_histogram import require_arguments_to_fit
from test_cuda_kernels import compiled, count
from test_cuda_plan import H200, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.errors import UnsupportedError
from fusedops.ops.op import OPS
from fusedops.ops.rope_kv import ROPE_STYLES
from fusedops.providers.cuda_base import view_of
from fusedops.providers.cuda_plan import Launch, View
from fusedops.providers.cuda_rope import plan_append, plan_rope, plan_rope_, plan_rope_append

needs_disassembler = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")

BF16 = torch.bfloat16
NO_SCALES = (None, None)
PLAIN = "fusedops::Plain"


def heads(
    tokens: int = 3, q_heads: int = 4, k_heads: int = 2, head_dim: int = 64
) -> tuple[View, View, View]:
    """q, k and v of one QKV product."""
    width = (q_heads + 2 * k_heads) * head_dim
    counts = (q_heads, k_heads, k_heads)
    q, k, v = (View((tokens, n, head_dim), (width, head_dim, 1), BF16) for n in counts)
    return q, k, v


def rope_launch(
    head_dim: int = 64, rotary_dim: int = 64, style: str = "halves", tokens: int = 3
) -> Launch:
    q, k, _ = heads(tokens, head_dim=head_dim)
    positions, cos_sin = view(tokens, dtype=torch.int64), view(99, rotary_dim)
    (launch,) = plan_rope_([q, k, positions, cos_sin], H200, style).launches
    return launch


def cache_views(
    layout: str = "NHD", head_dim: int = 64, pages: int = 7, dtype: torch.dtype = BF16
) -> tuple[View, View]:
    inner = (16, 2) if layout == "NHD" else (2, 16)
    cache = view(pages, *inner, head_dim, dtype=dtype)
    return cache, cache


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "width"),
    [(64, 64, 8), (128, 128, 8), (96, 48, 8), (80, 32, 8), (64, 8, 4), (20, 20, 2), (6, 2, 1)],
)
def test_as_many_elements_move_at_once_as_pairs_allow(
    head_dim: int, rotary_dim: int, width: int
) -> None:
    for style, flag in (("halves", "false"), ("interleaved", "true")):
        launch = rope_launch(head_dim, rotary_dim, style)
        require_arguments_to_fit(launch)
        assert launch.kernel == (
            f"fusedops::rope_append<__nv_bfloat16, {width}, {flag}, true, false, true, {PLAIN}>"
        )
        assert rotary_dim // 2 % width == (head_dim - rotary_dim) % width == 0


def test_strides_and_addresses_limit_what_moves_at_once() -> None:
    base = torch.empty(5, 10, 72, dtype=BF16)
    base = base[(-base.data_ptr() // 2) % 8 :] if base.data_ptr() % 16 else base
    positions, cos_sin = view(5, dtype=torch.int32), view(99, 64)

    def width(q: torch.Tensor) -> str:
        views = [view_of(q), view_of(base[..., :64]), positions, cos_sin]
        (launch,) = plan_rope(views, H200, "halves").launches
        return launch.kernel.split(", ")[1]

    assert width(base[..., :64]) == "8"
    assert width(base[..., 4:68]) == "4"
    assert width(base[..., 1:65]) == "1"
    assert width(torch.empty(5, 64, 10, dtype=BF16).transpose(1, 2)) == "1"
    assert width(torch.empty(5, 10, 66, dtype=BF16)[..., :64]) == "2"


def test_rope_writes_new_tensors_and_rope_in_place_its_arguments() -> None:
    q, k, _ = heads()
    views = [q, k, view(3, dtype=torch.int64), view(99, 64)]
    new, old = plan_rope(views, H200, "halves"), plan_rope_(views, H200, "halves")
    assert new.results == ((q.shape, BF16), (k.shape, BF16))
    assert old.results == ()
    assert new.launches[0].tensors[5:7] == (4, 5)
    assert old.launches[0].tensors[5:7] == (0, 1)
    assert new.launches[0].constants[19:25] == (256, 64, 1, 128, 64, 1)
    assert old.launches[0].constants[19:25] == (512, 64, 1, 512, 64, 1)
    assert old.launches[0].constants[:8] == (4, 2, 64, 64, 1, 99, 0, 1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_both_layouts_of_the_cache_become_strides(layout: str) -> None:
    q, k, v = heads(tokens=5)
    table, ones = view(4, 9, dtype=torch.int32), view(5, dtype=torch.int32)
    caches = cache_views(layout)
    slot, head = (128, 64) if layout == "NHD" else (64, 16 * 64)
    views = [q, k, v, ones, view(99, 64), *caches, table, ones, *NO_SCALES]
    (launch,) = plan_rope_append(views, H200, "halves", layout).launches
    require_arguments_to_fit(launch)
    assert launch.tensors == (0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10)
    assert launch.constants[5:10] == (99, 7, 16, 4, 9)
    assert launch.constants[25:33] == (2048, slot, head, 1) * 2
    views = [k, v, *caches, table, ones, ones, *NO_SCALES]
    (launch,) = plan_append(views, H200, layout).launches
    require_arguments_to_fit(launch)
    assert launch.tensors == (0, 0, 1, 6, 0, 0, 0, 2, 3, 4, 5, 7, 8)
    assert launch.constants[:10] == (0, 2, 64, 0, 0, 0, 7, 16, 4, 9)
    assert launch.constants[25:33] == (2048, slot, head, 1) * 2
    assert launch.kernel.endswith(f"false, false, true, false, {PLAIN}>")
    assert launch.constants[-2:] == (0, 0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("dtype", "sink"),
    [
        (torch.float8_e4m3fn, "fusedops::Given<fusedops::E4m3>"),
        (torch.int8, "fusedops::Given<fusedops::Int8>"),
    ],
    ids=str,
)
def test_8_bit_caches_are_stored_with_given_scales(
    dtype: torch.dtype, sink: str, layout: str
) -> None:
    q, k, v = heads(tokens=5)
    table, ones = view(4, 9, dtype=torch.int32), view(5, dtype=torch.int32)
    caches = cache_views(layout, dtype=dtype)
    one, of_head = View((), (), torch.float32), View((2,), (3,), torch.float32)
    views = [q, k, v, ones, view(99, 64), *caches, table, ones, one, of_head]
    (launch,) = plan_rope_append(views, H200, "halves", layout).launches
    require_arguments_to_fit(launch)
    assert launch.kernel == (
        f"fusedops::rope_append<__nv_bfloat16, 8, false, true, true, true, {sink}>"
    )
    assert launch.constants[-2:] == (0, 3)
    views = [k, v, *caches, table, ones, ones, of_head, one]
    (launch,) = plan_append(views, H200, layout).launches
    require_arguments_to_fit(launch)
    assert launch.kernel.endswith(f"false, false, true, false, {sink}>")
    assert launch.constants[-2:] == (3, 0)


@pytest.mark.parametrize(("aligned_bytes", "width"), [(16, 8), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_codes_need_no_more_alignment_than_they_have_bytes(aligned_bytes: int, width: int) -> None:
    _, k, v = heads(tokens=5)
    table, ones = view(4, 9, dtype=torch.int32), view(5, dtype=torch.int32)
    cache = view(7, 16, 2, 64, dtype=torch.int8, aligned_bytes=aligned_bytes)
    scale = View((), (), torch.float32)
    views = [k, v, cache, cache, table, ones, ones, scale, scale]
    (launch,) = plan_append(views, H200, "NHD").launches
    assert launch.kernel.split(", ")[1] == str(width)


def test_threads_cover_every_head_of_a_token() -> None:
    launch = rope_launch(head_dim=128, rotary_dim=128, tokens=7)
    assert launch.blocks == (7, 1)  # (4 + 2) heads x 8 packs of pairs
    q, k, v = heads(2, q_heads=64, k_heads=8, head_dim=128)
    views = [q, k, v, view(2, dtype=torch.int32), view(99, 128), *cache_views(head_dim=128)]
    views += [view(4, 9, dtype=torch.int32), view(2, dtype=torch.int32), *NO_SCALES]
    (launch,) = plan_rope_append(views, H200, "halves", "NHD").launches
    assert launch.blocks == (2, -(-(72 * 8 + 8 * 16) // 256))


def test_b04_nothing_to_do_takes_no_launch() -> None:
    q, k, v = heads(tokens=0)
    none = view(0, dtype=torch.int64)
    assert plan_rope([q, k, none, view(9, 64)], H200, "halves").launches == ()
    q, k, v = heads(tokens=2)
    no_pages, ones = view(4, 0, dtype=torch.int32), view(2, dtype=torch.int32)
    views = [k, v, *cache_views(), no_pages, ones, ones, *NO_SCALES]
    assert plan_append(views, H200, "NHD").launches == ()
    # Without a page nothing is stored, but q and k still turn.
    views = [q, k, v, ones, view(9, 64), *cache_views(), no_pages, ones, *NO_SCALES]
    assert len(plan_rope_append(views, H200, "halves", "NHD").launches) == 1


def test_more_than_2_to_31_elements_have_64_bit_places_and_too_many_tokens_are_refused() -> None:
    launch = rope_launch(tokens=2**30)
    require_arguments_to_fit(launch)
    assert launch.blocks[0] == 2**30
    with pytest.raises(UnsupportedError, match="takes up to 2147483647 tokens"):
        rope_launch(tokens=2**31)


def test_the_operations_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class CudaTensor(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr("fusedops.providers.cuda_call.machine_refusal", lambda device: None)
    monkeypatch.setattr("fusedops.providers.cuda_call.gpu_of", lambda device: H200)
    q = torch.zeros(2, 4, 8).as_subclass(CudaTensor)
    cache = torch.zeros(3, 4, 4, 8)
    table, ones = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    rope = (q, q, ones, torch.zeros(9, 8), "halves")
    append = (q, q, cache, cache, table, ones, ones, *NO_SCALES, "NHD")
    rotated = (q, q, q, ones, torch.zeros(9, 8))
    both = (*rotated, cache, cache, table, ones, *NO_SCALES, "halves", "NHD")
    codes, scale = cache.to(torch.int8), torch.ones(())
    coded = (*rotated, codes, codes, table, ones, scale, torch.ones(4), "halves", "NHD")
    assert OPS["rope_append_paged_kv_"]._implementations["cuda"][0](*coded).ok
    calls = {"rope": rope, "rope_": rope, "append_paged_kv": append, "rope_append_paged_kv_": both}
    for op, arguments in calls.items():
        assert OPS[op]._implementations["cuda"][0](*arguments).ok


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_pairs_move_16_bytes_at_a_time_without_local_memory(arch: str, tmp_path: Path) -> None:
    q, k, v = heads(head_dim=128)
    ones = view(3, dtype=torch.int32)
    views = [q, k, v, ones, view(99, 128), *cache_views(head_dim=128)]
    views += [view(4, 9, dtype=torch.int32), ones, *NO_SCALES]
    kernels = tuple(
        launch.kernel
        for style in ("halves", "interleaved")
        for launch in plan_rope_append(views, H200, style, "NHD").launches
    )
    for name, sass in compiled("rope_append.cu", kernels, arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        # Loads: a pair's two, one behind the rotary part, one of v. Stores: each into q or k, too.
        assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") >= 4, name
        assert count(sass, r"STG\.E[\w.]*\.128[\w.]*") >= 6, name
        assert ("ACQBULK" in sass) is (arch != "sm_80"), name
        assert ("PREEXIT" in sass) is (arch != "sm_80"), name


@needs_wheels
@needs_disassembler
@pytest.mark.parametrize("arch", ARCHES)
def test_codes_leave_registers_8_bytes_at_a_time(arch: str, tmp_path: Path) -> None:
    q, k, v = heads(head_dim=128)
    ones, scale = view(3, dtype=torch.int32), View((2,), (1,), torch.float32)
    kernels = []
    for dtype in (torch.float8_e4m3fn, torch.int8):
        caches = cache_views(head_dim=128, dtype=dtype)
        places = (*caches, view(4, 9, dtype=torch.int32), ones)
        views = [q, k, v, ones, view(99, 128), *places, scale, scale]
        plans = [plan_rope_append(views, H200, style, "NHD") for style in ROPE_STYLES]
        plans.append(plan_append([k, v, *places, ones, scale, scale], H200, "NHD"))
        kernels += [launch.kernel for plan in plans for launch in plan.launches]
    for name, sass in compiled("rope_append.cu", tuple(kernels), arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        # Into a cache: a pair's two, one behind the rotary part, one of v. Without RoPE the latter.
        turns = "false, false, true" not in name
        assert count(sass, r"STG\.E[\w.]*\.64[\w.]*") >= (4 if turns else 2), name
        if "E4m3" in name:
            assert ("E4M3" in sass) is (arch != "sm_80"), name
        assert ("ACQBULK" in sass) is (arch != "sm_80"), name
