"""The FlashInfer provider without FlashInfer: refusals, argument mapping, lazy import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flashinfer_calls import LAYOUTS, answer, both, close, reference, refused, values
from flashinfer_fake import Fake, forget, install

import fusedops
from fusedops.errors import BuildError, KernelMissingError, UnsupportedError
from fusedops.ops.rope_table import rope_table
from fusedops.providers import flashinfer_base, flashinfer_ops
from fusedops.providers.base import use_provider

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    yield install(monkeypatch)
    forget()


# Import and availability


def test_importing_fusedops_imports_no_flashinfer() -> None:
    code = (
        "import sys, torch, fusedops\n"
        "from fusedops.ops.op import OPS\n"
        "from fusedops.providers.flashinfer import register\n"
        "register(OPS)\n"
        "fusedops.rms_norm(torch.ones(2, 8), torch.ones(8))\n"
        "assert not [m for m in sys.modules if m.partition('.')[0] == 'flashinfer']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cpu_tensors_are_not_its_business_and_strict_mode_does_not_count_them() -> None:
    x, weight = values(2, 64), values(64)
    support = answer("rms_norm", x, weight, 1e-6, 0.0, False, pinned=False)
    assert not support.ok
    assert not support.applicable
    assert "got one on cpu" in support.reason
    assert fusedops.rms_norm(x, weight, round_before_weight=False).shape == x.shape


def test_absence_is_the_answer_and_is_looked_up_once(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[str] = []

    def find_spec(name: str) -> None:
        lookups.append(name)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    forget()
    for _ in range(2):
        refused(
            "flashinfer is not installed", "rms_norm", values(2, 64), values(64), 0.0, 0.0, False
        )
    assert lookups == ["flashinfer"]


def test_a_failing_import_is_the_answer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", import_module)
    forget()
    refused("OSError: libcudart.so.13", "rms_norm", values(2, 64), values(64), 0.0, 0.0, False)


def test_strict_mode_shows_the_reason(fake: Fake) -> None:
    with use_provider("flashinfer"), pytest.raises(UnsupportedError) as raised:
        fusedops.rms_norm(torch.ones(2, 8), torch.ones(8), round_before_weight=False)
    assert "takes bfloat16 and float16" in raised.value.reasons["flashinfer"]


# When kernels may be built


def test_an_unpinned_call_does_not_wait_for_nvcc_but_a_pinned_one_may(fake: Fake) -> None:
    fake.built = False
    call = (values(2, 64), values(64), 1e-6, 0.0, False)
    refused("kernels are not built, which takes nvcc minutes", "rms_norm", *call, pinned=False)
    assert answer("rms_norm", *call).ok
    with use_provider("flashinfer"):
        fusedops.rms_norm(call[0], call[1], round_before_weight=False)
    assert answer("rms_norm", *call, pinned=False).ok


def test_norms_from_the_dsl_need_no_nvcc_but_more_alignment(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.built = False
    monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    forget()
    storage = values(512)
    first = -storage.data_ptr() % 128 // 2
    call = (values(64), 1e-6, 0.0, False)
    assert answer("rms_norm", storage[first:][:128].view(2, 64), *call, pinned=False).ok
    later = storage[first + 8 :][:128].view(2, 64)
    refused("x to start at a multiple of 128 bytes", "rms_norm", later, *call)


def test_a_broken_build_description_is_the_answer(fake: Fake) -> None:
    def gen_rope_module() -> None:
        raise RuntimeError("FlashInfer requires GPUs with sm75 or higher")

    fake.modules["flashinfer.jit.rope"].gen_rope_module = gen_rope_module
    refused("requires GPUs with sm75", "rope", *rope_call(), pinned=False)


def test_nothing_is_built_inside_a_capture(fake: Fake) -> None:
    call = (values(2, 64), values(64), 1e-6, 0.0, False)
    fake.capturing = True
    refused("run the call once before the capture", "rms_norm", *call)
    fake.capturing = False
    with use_provider("flashinfer"):
        fusedops.rms_norm(call[0], call[1], round_before_weight=False)
    fake.capturing = True
    assert answer("rms_norm", *call).ok
    refused("run the call once", "rms_norm", values(2, 128), values(128), 1e-6, 0.0, False)
    with pytest.raises(KernelMissingError, match="before the capture"):
        flashinfer_base.call("new", lambda: None)


def test_a_failing_first_call_is_a_build_error_and_is_tried_again(fake: Fake) -> None:
    def rmsnorm(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("Ninja build failed.\n" + "\n".join(f"line {i}" for i in range(40)))

    good = fake.modules["flashinfer.norm"].rmsnorm
    x, weight = values(2, 64), values(64)
    fake.modules["flashinfer.norm"].rmsnorm = rmsnorm
    with use_provider("flashinfer"), pytest.raises(BuildError, match="line 39") as raised:
        fusedops.rms_norm(x, weight, round_before_weight=False)
    assert "line 12" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    fake.modules["flashinfer.norm"].rmsnorm = good
    with use_provider("flashinfer"):
        fusedops.rms_norm(x, weight, round_before_weight=False)


def test_running_out_of_memory_is_not_called_a_build_error(fake: Fake) -> None:
    def allocate() -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    with pytest.raises(torch.OutOfMemoryError):
        flashinfer_base.call("new", allocate)


# Norms


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("offset", "kernel"), [(0.0, "rmsnorm"), (1.0, "gemma_rmsnorm")])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
def test_rms_norm_in_gemma_order(
    fake: Fake, shape: tuple[int, ...], offset: float, kernel: str, dtype: torch.dtype
) -> None:
    x, weight = values(*shape, dtype=dtype), values(64, dtype=dtype, seed=1)
    options = {"eps": 1e-3, "weight_offset": offset, "round_before_weight": False}
    got, expected = both(fusedops.rms_norm, x, weight, **options)
    assert fake.calls == [kernel]
    assert got.is_contiguous()
    close(got, expected, 1.0)
    assert answer("rms_norm", x, weight, 1e-3, offset, False, pinned=False).ok


def test_rms_norm_in_llama_order_is_opt_in(fake: Fake) -> None:
    x, weight = values(5, 64), values(64, seed=1)
    refused("rounds once", "rms_norm", x, weight, 1e-6, 0.0, True, pinned=False)
    got, expected = both(fusedops.rms_norm, x, weight)
    close(got, expected, 1.5)


def test_rms_norm_takes_strided_rows_and_empty_tensors(fake: Fake) -> None:
    x = values(6, 128)[:, :64]
    with use_provider("flashinfer"):
        got = fusedops.rms_norm(x, values(64), round_before_weight=False)
        assert fusedops.rms_norm(x[:0], values(64), round_before_weight=False).shape == (0, 64)
    assert got.is_contiguous()
    expected = reference(fusedops.rms_norm, x, values(64), round_before_weight=False)
    close(got, expected, 1.0)
    assert fake.calls == ["rmsnorm"]


def test_norms_refuse_what_the_kernels_do_not_read(fake: Fake) -> None:
    x, weight = values(4, 64), values(64)
    tail = (1e-6, 0.0, False)
    refused("takes bfloat16 and float16", "rms_norm", x.float(), weight.float(), *tail)
    refused("in the dtype of x", "rms_norm", x, weight.float(), *tail)
    refused("not weight_offset=0.5", "rms_norm", x, weight, 1e-6, 0.5, False)
    refused("units of 16 bytes, but weight", "rms_norm", x, values(65)[1:], *tail)
    refused("multiple of 16 bytes", "rms_norm", values(321)[1:257].view(4, 64), weight, *tail)
    refused("units of 16 bytes, but x", "rms_norm", values(4, 68)[:, :64], weight, *tail)
    refused("units of 16 bytes, but x", "rms_norm", values(64, 4).t(), weight, *tail)
    refused("neither", "rms_norm", values(4, 4, 128)[..., :64], weight, *tail)
    huge = torch.empty(2**15 + 1, 2**16, dtype=torch.bfloat16, device="meta")[:, :64]
    refused("2^31 or more", "rms_norm", huge, weight, *tail)
    residual = values(4, 68)[:, :64]
    for op in ("fused_add_rms_norm", "fused_add_rms_norm_"):
        refused("units of 16 bytes, but residual", op, x, residual, weight, *tail)
        long, w = values(1, 32776), values(32776)
        refused("at most 32768", op, long, long, w, *tail)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("llama", [True, False])
def test_fused_add_is_opt_in_and_maps_in_place_and_functional(
    fake: Fake, offset: float, llama: bool
) -> None:
    x, residual, weight = values(2, 3, 64), values(2, 3, 64, seed=1), values(64, seed=2)
    options = {"eps": 1e-5, "weight_offset": offset, "round_before_weight": llama}
    tail = (1e-5, offset, llama)
    for op in ("fused_add_rms_norm", "fused_add_rms_norm_"):
        refused("before it is rounded", op, x, residual, weight, *tail, pinned=False)
    kept = x.clone(), residual.clone()
    (y, total), (y_expected, total_expected) = both(
        fusedops.fused_add_rms_norm, x, residual, weight, **options
    )
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    assert torch.equal(total, total_expected)
    close(y, y_expected, 2.5)
    written, expected = both(fusedops.fused_add_rms_norm_, x, residual, weight, **options)
    assert torch.equal(written[1], expected[1])
    assert torch.equal(written[0], y)
    name = "gemma_fused_add_rmsnorm" if offset else "fused_add_rmsnorm"
    assert fake.calls == [name, name]
    with use_provider("flashinfer"):
        fusedops.fused_add_rms_norm_(x[:0], residual[:0], weight, **options)
    assert fake.calls == [name, name]


# Gated activations


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul_is_opt_in(fake: Fake, act: str) -> None:
    x = values(2, 3, 80)
    refused("the operation rounds the activation first", "act_and_mul", x, act, pinned=False)
    got, expected = both(fusedops.act_and_mul, x, act)
    assert fake.calls == [f"{act}_and_mul"]
    close(got, expected, 1.5)
    with use_provider("flashinfer"):
        assert fusedops.act_and_mul(x[:, :0], act).shape == (2, 0, 40)
    assert fake.calls == [f"{act}_and_mul"]


def test_act_and_mul_refuses_what_the_kernel_does_not_read(fake: Fake) -> None:
    refused("takes bfloat16 and float16", "act_and_mul", torch.ones(2, 8), "silu")
    refused(
        "has silu, gelu, gelu_tanh; the call asks for relu", "act_and_mul", values(2, 8), "relu"
    )
    refused("ignores strides", "act_and_mul", values(2, 32)[:, :16], "silu")
    refused("multiple of 16 bytes", "act_and_mul", values(33)[1:], "silu")


# RoPE


def rope_call(
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    rotary_dim: int = 64,
    style: str = "halves",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    q = values(5, heads[0], head_dim, dtype=dtype)
    k = values(5, heads[1], head_dim, dtype=dtype, seed=1)
    return q, k, torch.tensor([3, 0, 7, 2, 2]), rope_table(rotary_dim, 8), style


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_serves_unpinned(fake: Fake, rotary_dim: int, dtype: torch.dtype) -> None:
    q, k, positions, table, style = call = rope_call(rotary_dim=rotary_dim, dtype=dtype)
    assert answer("rope", *call, pinned=False).ok
    assert answer("rope_", *call, pinned=False).ok
    got, expected = both(fusedops.rope, q, k, positions, table, style=style)
    written, _ = both(fusedops.rope_, q, k, positions.int(), table, style=style)
    for result, in_place, right in zip(got, written, expected, strict=False):
        close(result, right, 1.0)
        assert torch.equal(result, in_place)
    assert fake.calls == ["apply_rope_with_cos_sin_cache"] * 2


def test_rope_of_views_of_one_qkv_tensor_writes_only_them(fake: Fake) -> None:
    qkv = values(5, 8, 64)
    before = qkv.clone()
    q, k = qkv[:, :4], qkv[:, 4:6]
    _, _, positions, table, _ = rope_call()
    with use_provider("flashinfer"):
        fusedops.rope_(q, k, positions, table)
    expected = reference(fusedops.rope, before[:, :4], before[:, 4:6], positions, table)
    close(q, expected[0], 1.0)
    close(k, expected[1], 1.0)
    assert torch.equal(qkv[:, 6:], before[:, 6:])


def test_rope_never_hands_a_position_outside_the_table_to_the_kernel(fake: Fake) -> None:
    q, k, _, table, style = rope_call()
    positions = torch.tensor([3, -1, 8, 2**31, 7])
    outside = [1, 2, 3]
    got = flashinfer_ops.rope(q, k, positions, table, style)
    expected = reference(fusedops.rope, q[[0, 4]], k[[0, 4]], torch.tensor([3, 7]), table)
    for result, right in zip(got, expected, strict=True):
        assert not result[outside].any()
        close(result[[0, 4]], right, 1.0)
    in_place = q.clone(), k.clone()
    flashinfer_ops.rope_(*in_place, positions, table, style)
    for written, original, result in zip(in_place, (q, k), got, strict=True):
        assert torch.equal(written[outside], original[outside])
        assert torch.equal(written[[0, 4]], result[[0, 4]])


def test_rope_of_no_tokens_launches_nothing(fake: Fake) -> None:
    q, k, positions, table, _ = rope_call()
    with use_provider("flashinfer"):
        out = fusedops.rope(q[:0], k[:0], positions[:0], table)
        fusedops.rope_(q[:0], k[:0], positions[:0], table)
    assert [tuple(t.shape) for t in out] == [(0, 4, 64), (0, 2, 64)]
    assert fake.calls == []


def test_rope_refuses_what_the_kernel_does_not_read(fake: Fake) -> None:
    q, k, positions, table, _ = rope_call()
    refused("past the last row", "rope", *rope_call(style="interleaved"))
    refused("got 80", "rope", *rope_call(head_dim=80, rotary_dim=80))
    refused("must be a multiple of 16; got 24", "rope", *rope_call(rotary_dim=24))
    refused("must be a multiple of 32; got 16", "rope", *rope_call(head_dim=512, rotary_dim=16))
    refused("takes bfloat16", "rope", q.float(), k.float(), positions, table, "halves")
    refused("at least one head", "rope", q, k[:, :0], positions, table, "halves")
    refused("contiguous cos_sin", "rope", q, k, positions, table.t().contiguous().t(), "halves")
    shifted = values(5, 3, 68)[..., :64]
    refused("but k has strides", "rope_", q, shifted, positions, table, "halves")
    tall = torch.empty(2**25, 64, device="meta")
    refused("2147483648", "rope", q, k, positions, tall, "halves")


# Paged append


def append_call(layout: str = "NHD", head_dim: int = 64, heads: int = 2) -> tuple[Any, ...]:
    """Requests 0 and 1; tokens with a place, a padding row, and places outside every table."""
    pages, page_size, max_pages = 6, 4, 2
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    k, v = values(7, heads, head_dim), values(7, heads, head_dim, seed=1)
    caches = [values(pages, *inner, head_dim, seed=s) for s in (2, 3)]
    table = torch.tensor([[5, 0], [3, 9]], dtype=torch.int32)
    assert table.shape[1] == max_pages
    request = torch.tensor([0, 0, 1, 1, 1, 1, 2], dtype=torch.int32)
    positions = torch.tensor([2, 4, 0, -1, 8, 5, 0])
    return k, v, *caches, table, request, positions, None, None, layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_writes_the_tokens_that_have_a_place_and_no_other(fake: Fake, layout: str) -> None:
    k, v, k_cache, v_cache, table, request, positions, *_ = append_call(layout)
    expected = k_cache.clone(), v_cache.clone()
    for cache, new in zip(expected, (k, v), strict=True):
        slots = cache if layout == "NHD" else cache.transpose(1, 2)
        slots[5, 2], slots[0, 0], slots[3, 0] = new[0], new[1], new[2]
    tokens = (table, request, positions, None, None, layout)
    flashinfer_ops.append_paged_kv(k, v, k_cache, v_cache, *tokens)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert fake.calls == ["append_paged_kv_cache"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_agrees_with_the_reference(fake: Fake, layout: str) -> None:
    k, v, k_cache, v_cache, table, request, positions, *_ = append_call(layout)
    positions[3:] = -1
    got, expected = both(
        fusedops.append_paged_kv, k, v, k_cache, v_cache, table, request, positions, layout=layout
    )
    assert torch.equal(got[2], expected[2])
    assert torch.equal(got[3], expected[3])


def test_append_of_padding_alone_launches_nothing(fake: Fake) -> None:
    k, v, k_cache, v_cache, table, request, positions, *rest = append_call()
    before = k_cache.clone()
    nowhere = torch.full_like(positions, -1)
    for call in (
        (k, v, k_cache, v_cache, table, request, nowhere, *rest),
        (k[:0], v[:0], k_cache, v_cache, table, request[:0], positions[:0], *rest),
        (k, v, k_cache, v_cache, table[:, :0], request, positions, *rest),
    ):
        flashinfer_ops.append_paged_kv(*call)
    assert fake.calls == []
    assert torch.equal(k_cache, before)


def test_append_refusals(fake: Fake) -> None:
    k, v, k_cache, v_cache, *rest = call = append_call()
    refused("dropped on the host", "append_paged_kv", *call, pinned=False)
    floats = (k.float(), v.float(), k_cache.float(), v_cache.float())
    refused("takes bfloat16 and float16", "append_paged_kv", *floats, *rest)
    refused("got 32", "append_paged_kv", *append_call(head_dim=32))
    refused("takes 1 to 128 heads of 64; got 129", "append_paged_kv", *append_call(heads=129))
    other = v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    refused("equal strides of both caches", "append_paged_kv", k, v, k_cache, other, *rest)
    codes, scale = torch.zeros_like(k_cache, dtype=torch.int8), torch.ones(())
    coded = (codes, codes.clone(), *rest[:3], scale, scale, "NHD")
    refused("appends without scales, to caches of torch.bfloat16", "append_paged_kv", k, v, *coded)
    shifted = values(7, 2, 68)[..., :64]
    refused("but v has strides", "append_paged_kv", k, shifted, k_cache, v_cache, *rest)
    wide = torch.empty(1, dtype=torch.int32).expand(2, 2**29)
    refused("counts slots", "append_paged_kv", k, v, k_cache, v_cache, wide, *rest[1:])
    fake.capturing = True
    refused("a capture forbids", "append_paged_kv", *call)
