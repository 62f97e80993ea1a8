"""RoPE and the paged append: integers exactly, floats by float64 and torch, nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_call_cases import on_cpu, results_in_poisoned_memory
from cuda_cases import PROVIDER, captured
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES
from fusedops.ops.kv_append import append_paged_kv
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
