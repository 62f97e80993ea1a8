"""RoPE and the paged append: integers exactly, floats by float64 and torch, nothing beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_call_cases import on_cpu, results_in_poisoned_memory
from cuda_cases import PROVIDER, captured
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES
from fusedops.ops.attention import paged_attention
from fusedops.ops.kv_append import append_paged_kv
from fusedops.ops.kv_scale import CODE_DTYPES
from fusedops.ops.rope_append import rope_append_paged_kv_
from fusedops.ops.rope_kv import ROPE_STYLES, rope, rope_
from fusedops.ops.rope_table import rope_table
from fusedops.providers import cuda_rope
from fusedops.providers.base import Usage, use_provider

COVERS = (
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_call_cases.py",
    "csrc/rope_append.cu",
    "fusedops/ops/kv_append.py",
    "fusedops/ops/kv_scale.py",
    "fusedops/ops/rope_append.py",
    "fusedops/ops/rope_kv.py",
)

pytestmark = pytest.mark.gpu

SHAPES = ((64, 64), (128, 128), (96, 48), (80, 32), (256, 64), (20, 20), (6, 2), (64, 8))
LAYOUTS = ("NHD", "HND")


@pytest.fixture(autouse=True)
def usage() -> Iterator[Usage]:
    with use_provider(PROVIDER) as found:
        yield found
    assert sum(found.calls.values()) > 0
    assert {provider for _, provider in found.calls} == {PROVIDER}


def integers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator, device="cuda").to(dtype)


def exact_table(rows: int, rotary_dim: int) -> Tensor:
    """Cosines and sines of whole numbers: every product and sum is exact."""
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randint(-1, 2, (rows, rotary_dim), generator=generator, device="cuda").float()


def heads(tokens: int, head_dim: int, dtype: torch.dtype, gap: int = 0) -> list[Tensor]:
    """q, k and v as views of one QKV tensor, whose rows have ``gap`` elements between heads."""
    qkv = integers(tokens, 12, head_dim + gap, dtype=dtype)[..., :head_dim]
    return [qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]]


@pytest.mark.parametrize("style", ROPE_STYLES)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_integers_rotate_exactly(dtype: torch.dtype, style: str) -> None:
    for head_dim, rotary_dim in SHAPES:
        table = exact_table(50, rotary_dim)
        for tokens, index, gap in (
            (1, torch.int32, 0),
            (37, torch.int64, 1),
            (300, torch.int32, 8),
        ):
            q, k, _ = heads(tokens, head_dim, dtype, gap)
            positions = torch.randint(0, 50, (tokens,), device="cuda").to(index)
            got = rope(q, k, positions, table, style=style)
            expected = on_cpu(rope, q, k, positions, table, style=style)
            call = cuda_rope.ROPE.call
            again = results_in_poisoned_memory(call, (q, k, positions, table), style)
            for result, right, second in zip(got, expected, again, strict=True):
                assert result.is_contiguous()
                assert torch.equal(result.cpu(), right)
                assert torch.equal(second, result)
            whole = torch.full((tokens, 13, head_dim + gap), 99.0, dtype=dtype, device="cuda")
            inside = whole[:, 1:11, :head_dim]
            inside[:, :8], inside[:, 8:] = q, k
            rope_(inside[:, :8], inside[:, 8:], positions, table, style=style)
            assert torch.equal(inside[:, :8], got[0])
            assert torch.equal(inside[:, 8:], got[1])
            assert whole[:, 0].eq(99).all()
            assert whole[:, 11:].eq(99).all()
            assert whole[..., head_dim:].eq(99).all()


@pytest.mark.parametrize("style", ROPE_STYLES)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_random_values_are_within_their_bound_and_torchs_error(
    dtype: torch.dtype, style: str
) -> None:
    table = rope_table(128, 4096).cuda()
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(200, 8, 128, generator=generator, device="cuda").to(dtype)
    k = torch.randn(200, 2, 128, generator=generator, device="cuda").to(dtype)
    positions = torch.randint(0, 4096, (200,), generator=generator, device="cuda")
    ours = rope(q, k, positions, table, style=style)
    with use_provider("torch"):
        torchs = rope(q, k, positions, table, style=style)
    cosine, sine = table[positions].double()[:, None].chunk(2, 2)
    for x, mine, peer in zip((q, k), ours, torchs, strict=True):
        wide = x.double()
        pairs = wide.chunk(2, 2) if style == "halves" else (wide[..., ::2], wide[..., 1::2])
        turned = (pairs[0] * cosine - pairs[1] * sine, pairs[1] * cosine + pairs[0] * sine)
        if style == "halves":
            exact = torch.cat(turned, 2)
        else:
            exact = torch.stack(turned, 3).flatten(2)
        magnitude = pairs[0].abs() + pairs[1].abs()
        scale = torch.cat((magnitude, magnitude), 2)
        if style == "interleaved":
            scale = torch.stack((magnitude, magnitude), 3).flatten(2)
        error = (mine.double() - exact).abs()
        half_ulp = torch.finfo(dtype).eps / 2
        assert error.le(half_ulp * exact.abs() + 2.0**-23 * scale + 1e-7).all()
        least = (half_ulp * exact / 4).norm()
        assert error.norm() <= 2 * max((peer.double() - exact).norm(), least)


def test_positions_outside_the_table_read_and_write_nothing() -> None:
    table = exact_table(5, 64)
    q, k, _ = heads(4, 64, torch.bfloat16)
    q, k = q.clone(), k.clone()
    positions = torch.tensor([-1, 2, 5, 2**40], device="cuda")
    outside = [0, 2, 3]
    for result in rope(q, k, positions, table):
        assert result[outside].eq(0).all()
        assert result[1].ne(0).any()
    before = q.clone(), k.clone()
    rope_(q, k, positions, table)
    assert torch.equal(q[outside], before[0][outside])
    assert torch.equal(k[outside], before[1][outside])


def paged(
    layout: str, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Two caches of 40 pages of 16 slots for 2 heads, and a table of 3 requests."""
    shape = (40, 16, 2, head_dim) if layout == "NHD" else (40, 2, 16, head_dim)
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(40, generator=generator, device="cuda").int()
    k_cache = torch.full(shape, 50.0, dtype=dtype, device="cuda")
    return k_cache, k_cache.clone(), order[:36].view(3, 12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_keys_and_values_get_to_their_slots(dtype: torch.dtype, layout: str) -> None:
    for head_dim, rotary_dim in SHAPES:
        table = exact_table(192, rotary_dim)
        for tokens, gap, style in ((1, 0, "halves"), (64, 1, "interleaved"), (190, 8, "halves")):
            q, k, v = (x.clone() if gap == 0 else x for x in heads(tokens, head_dim, dtype, gap))
            slots = torch.randperm(3 * 192, device="cuda")[:tokens]
            request, positions = (slots // 192).int(), slots % 192
            positions[tokens // 2] = -1
            k_cache, v_cache, blocks = paged(layout, head_dim, dtype)
            arguments = (k, v, k_cache, v_cache, blocks, request, positions)
            expected = [x.cpu() for x in arguments]
            append_paged_kv(*arguments, layout=layout)
            on_cpu(append_paged_kv, *expected, layout=layout)
            assert torch.equal(k_cache.cpu(), expected[2])
            assert torch.equal(v_cache.cpu(), expected[3])
            k_cache, v_cache, blocks = paged(layout, head_dim, dtype, seed=1)
            rotated = (q, k, v, positions, table, k_cache, v_cache, blocks, request)
            expected = [x.cpu() for x in rotated]
            rope_append_paged_kv_(*rotated, style=style, layout=layout)
            on_cpu(rope_append_paged_kv_, *expected, style=style, layout=layout)
            for place in (0, 1, 2, 5, 6):
                assert torch.equal(rotated[place].cpu(), expected[place])


UNTOUCHED = 0x2A


def coded_caches(layout: str, head_dim: int, code: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ``paged``, of a code that marks what nothing has written."""
    shape = (40, 16, 2, head_dim) if layout == "NHD" else (40, 2, 16, head_dim)
    caches = [torch.full(shape, UNTOUCHED, dtype=torch.uint8, device="cuda") for _ in range(2)]
    return caches[0].view(code), caches[1].view(code)


def scales(of_head: bool) -> dict[str, Tensor]:
    """Of keys and of values; no power of two, so that inverses and products round."""
    if of_head:
        # Every other value of a tensor: scales may have strides.
        of_keys = torch.tensor([0.3, 9.0, 0.013, 9.0], device="cuda")[::2]
        return {"k_scale": of_keys, "v_scale": torch.tensor([0.7, 0.1], device="cuda")}
    of_keys = torch.tensor(0.07, device="cuda")
    return {"k_scale": of_keys, "v_scale": torch.tensor(0.3, device="cuda")}


def assert_same_codes(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(got.view(torch.uint8).cpu(), expected.view(torch.uint8).cpu())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", CODE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_8_bit_caches_get_the_codes_of_the_definition(
    dtype: torch.dtype, code: torch.dtype, layout: str
) -> None:
    for index, (head_dim, rotary_dim) in enumerate(SHAPES):
        table = exact_table(192, rotary_dim)
        given = scales(of_head=index % 2 == 0)
        for tokens, gap, style in ((1, 0, "halves"), (64, 1, "interleaved"), (190, 8, "halves")):
            q, k, v = (x.clone() if gap == 0 else x for x in heads(tokens, head_dim, dtype, gap))
            slots = torch.randperm(3 * 192, device="cuda")[:tokens]
            request, positions = (slots // 192).int(), slots % 192
            positions[tokens // 2] = -1
            blocks = paged(layout, head_dim, dtype)[2]
            caches = coded_caches(layout, head_dim, code)
            arguments = (k, v, *caches, blocks, request, positions)
            expected = [x.cpu() for x in arguments]
            append_paged_kv(*arguments, **given, layout=layout)
            on_cpu(append_paged_kv, *expected, **given, layout=layout)
            for cache, right in zip(caches, expected[2:4], strict=True):
                assert_same_codes(cache, right)
            if tokens > 1:
                assert caches[0].view(torch.uint8).ne(UNTOUCHED).any()
            caches = coded_caches(layout, head_dim, code)
            rotated = (q, k, v, positions, table, *caches, blocks, request)
            expected = [x.cpu() for x in rotated]
            rope_append_paged_kv_(*rotated, **given, style=style, layout=layout)
            on_cpu(rope_append_paged_kv_, *expected, **given, style=style, layout=layout)
            assert torch.equal(q.cpu(), expected[0])
            assert torch.equal(k.cpu(), expected[1])
            for cache, right in zip(caches, expected[5:7], strict=True):
                assert_same_codes(cache, right)


@pytest.mark.parametrize("code", CODE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_random_values_are_stored_within_half_a_step(dtype: torch.dtype, code: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    k, v = torch.randn(2, 500, 2, 128, generator=generator, device="cuda").to(dtype)
    blocks = paged("NHD", 128, dtype)[2]
    slots = torch.randperm(3 * 192, device="cuda")[:500]
    request, positions = (slots // 192).int(), slots % 192
    given = scales(of_head=True)
    ours, torchs = coded_caches("NHD", 128, code), coded_caches("NHD", 128, code)
    append_paged_kv(k, v, *ours, blocks, request, positions, **given)
    with use_provider("torch"):
        append_paged_kv(k, v, *torchs, blocks, request, positions, **given)
    where = blocks[request.long(), positions // 16].long(), positions % 16
    largest = 448.0 if code is torch.float8_e4m3fn else 127.0
    for cache, peer, new, scale in zip(ours, torchs, (k, v), given.values(), strict=True):
        assert_same_codes(cache, peer)
        unit = scale.double()[:, None]
        exact = new.double().clamp(-largest * unit, largest * unit)
        step = unit.expand_as(exact)
        if code is torch.float8_e4m3fn:
            step = 2.0 ** (exact / unit).abs().log2().floor().clamp(min=-6) / 8 * unit
        read = cache.view(torch.uint8)[where].view(code).float().double() * unit
        assert (read - exact).abs().le(0.5 * step * (1 + 1e-4)).all()


@pytest.mark.parametrize("code", CODE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_codes_saturate_keep_nan_and_round_ties_to_even(
    dtype: torch.dtype, code: torch.dtype
) -> None:
    odd = [448.0, 464.0, 480.0, 6e4, math.inf, -449.0, -math.inf, math.nan, -math.nan, -0.0, 0.5]
    odd += [1.5, 2.5, -0.5, -2.5, 126.5, 127.5, -127.5, -128.0, 2.0**-10, 3 * 2.0**-10, 17.0]
    for head_dim in (24, 23):  # vectors, and elements one by one
        values = torch.zeros(1, 2, head_dim, dtype=dtype, device="cuda")
        values[0, :, : len(odd)] = torch.tensor(odd, device="cuda").to(dtype)
        caches = coded_caches("NHD", head_dim, code)
        blocks = paged("NHD", head_dim, dtype)[2]
        first = torch.zeros(1, dtype=torch.int32, device="cuda")
        one = torch.ones((), device="cuda")
        arguments = (values, values, *caches, blocks, first, first)
        expected = [x.cpu() for x in arguments]
        append_paged_kv(*arguments, k_scale=one, v_scale=one)
        on_cpu(append_paged_kv, *expected, k_scale=one, v_scale=one)
        for cache, right in zip(caches, expected[2:4], strict=True):
            assert_same_codes(cache, right)
        stored = caches[0].view(torch.uint8)[blocks[0, 0].long(), 0, 0]
        if code is torch.float8_e4m3fn:
            assert stored[:9].tolist() == [0x7E] * 5 + [0xFE] * 2 + [0x7F] * 2
        else:
            assert stored[:9].tolist() == [127] * 5 + [256 - 127] * 2 + [0] * 2
            ties = stored[10:19].view(torch.int8).tolist()
            assert ties == [0, 2, 2, 0, -2, 126, 127, -127, -127]


@pytest.mark.parametrize("code", CODE_DTYPES, ids=str)
def test_attention_reads_the_codes_that_were_appended(code: torch.dtype) -> None:
    q, k, v = (x.clone() for x in heads(150, 64, torch.bfloat16))
    table, given = rope_table(64, 192).cuda(), scales(of_head=True)
    blocks, caches = paged("NHD", 64, torch.bfloat16)[2], coded_caches("NHD", 64, code)
    request = torch.arange(150, device="cuda").div(50, rounding_mode="floor").int()
    positions = torch.arange(150, device="cuda") % 50
    rope_append_paged_kv_(q, k, v, positions, table, *caches, blocks, request, **given)
    starts = torch.tensor([0, 50, 100, 150], dtype=torch.int32, device="cuda")
    call: tuple[Any, ...] = (q, *caches, blocks, torch.full_like(starts[1:], 50), starts)
    with use_provider("torch"):
        out = paged_attention(*call, **given, max_query_len=50)
    expected = on_cpu(paged_attention, *call, **given, max_query_len=50)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(out.cpu(), expected, rtol=2**-7, atol=2**-7)


def test_8_bit_caches_replay_with_other_scales_and_leave_padding_alone() -> None:
    blocks = paged("NHD", 64, torch.bfloat16)[2]
    caches = coded_caches("NHD", 64, torch.int8)
    _, k, v = (x.clone() for x in heads(2, 64, torch.bfloat16))
    v.fill_(6.0)
    request = torch.zeros(2, dtype=torch.int32, device="cuda")
    positions = torch.tensor([3, -1], device="cuda")
    one, of_head = torch.ones((), device="cuda"), torch.ones(2, device="cuda")
    graph, _ = captured(
        lambda: append_paged_kv(
            k, v * 1.0, *caches, blocks, request, positions, k_scale=one, v_scale=of_head
        )
    )
    for divisor in (1.0, 2.0, 3.0):
        of_head.copy_(torch.tensor([divisor, divisor / 2], device="cuda"))
        graph.replay()
        stored = caches[1][blocks[0, 0].long(), 3]
        assert stored[0].eq(int(6 / divisor)).all()
        assert stored[1].eq(int(12 / divisor)).all()
        assert caches[1].ne(UNTOUCHED).sum() == 2 * 64


def test_tokens_without_a_place_write_nothing() -> None:
    k_cache, v_cache, blocks = paged("NHD", 64, torch.bfloat16)
    blocks[1, 0], blocks[2, 1] = 40, -5
    q, k, v = (x.clone() for x in heads(8, 64, torch.bfloat16))
    k[:], v[:] = 1.0, 2.0
    request = torch.tensor([0, 3, -1, 1, 2, 0, 0, 0], dtype=torch.int32, device="cuda")
    positions = torch.tensor([0, 0, 0, 3, 17, 192, -4, 2**40], device="cuda")
    append_paged_kv(k, v, k_cache, v_cache, blocks, request, positions)
    assert k_cache.eq(1).sum() == v_cache.eq(2).sum() == 2 * 64
    assert k_cache[blocks[0, 0], 0].eq(1).all()
    # A position behind the table of angles is not stored either, nor turned.
    k_cache, v_cache, blocks = paged("NHD", 64, torch.bfloat16)
    before = q.clone()
    positions = torch.tensor([4, 5, -1, 4, 4, 9, 4, 4], device="cuda")
    request = torch.tensor([0, 0, 0, 3, 3, 1, 3, 3], dtype=torch.int32, device="cuda")
    table = exact_table(5, 64)
    rope_append_paged_kv_(q, k, v, positions, table, k_cache, v_cache, blocks, request)
    assert v_cache.ne(50).sum() == 2 * 64
    assert torch.equal(q[[1, 5]], before[[1, 5]])


def test_empty_calls_write_nothing() -> None:
    q, k, v = heads(0, 64, torch.bfloat16)
    none = torch.zeros(0, dtype=torch.int32, device="cuda")
    k_cache, v_cache, blocks = paged("NHD", 64, torch.bfloat16)
    assert rope(q, k, none, exact_table(5, 64))[0].shape == (0, 8, 64)
    append_paged_kv(k, v, k_cache, v_cache, blocks, none, none)
    assert k_cache.eq(50).all()


def test_captured_steps_replay_with_other_positions() -> None:
    k_cache, v_cache, blocks = paged("NHD", 128, torch.bfloat16)
    table = rope_table(128, 192).cuda()
    q, k, v = (x.clone() for x in heads(3, 128, torch.bfloat16))
    request = torch.arange(3, dtype=torch.int32, device="cuda")
    positions = torch.zeros(3, dtype=torch.int64, device="cuda")

    def step() -> None:
        values = v * 1.0
        rope_append_paged_kv_(q, k, values, positions, table, k_cache, v_cache, blocks, request)

    graph, _ = captured(step)
    for position in (1, 17, 191):
        positions.fill_(position)
        v.fill_(float(position))
        graph.replay()
        pages = blocks[:, position // 16].long()
        assert v_cache[pages, position % 16].eq(position).all()


def test_it_works_under_torch_compile() -> None:
    table = exact_table(50, 64)
    q, k, _ = heads(5, 64, torch.bfloat16)
    positions = torch.arange(5, device="cuda")
    compiled = torch.compile(lambda a, b: rope(a * 1, b, positions, table), fullgraph=True)
    for got, expected in zip(compiled(q, k), rope(q, k, positions, table), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    tokens = 2**31 // (8 * 128) + 5
    q = torch.ones(tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.ones(tokens, 1, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[2.0] * 64 + [1.0] * 64], device="cuda")
    positions = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    positions[7] = 5
    rope_(q, k, positions, table)
    assert q[-1, -1].tolist() == [1.0] * 64 + [3.0] * 64
    assert q[7].eq(1).all()
    assert q[..., 0].eq(1).all()
    assert q[..., 64].eq(3).sum() == (tokens - 1) * 8
    cache = torch.zeros(tokens // 16 + 1, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    blocks = torch.arange(cache.shape[0], dtype=torch.int32, device="cuda")[None]
    request = torch.zeros(1, dtype=torch.int32, device="cuda")
    last = torch.tensor([tokens - 1], device="cuda")
    append_paged_kv(q[-1:], q[-1:], cache, torch.empty_like(cache), blocks, request, last)
    assert torch.equal(cache.view(-1, 8, 128)[tokens - 1], q[-1])
