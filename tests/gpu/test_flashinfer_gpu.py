"""FlashInfer on a GPU: each operation pinned in strict mode, against float64 and the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oracles
import pytest
import torch
from flashinfer_calls import LAYOUTS, answer, reference, values
from torch import Tensor

import fusedops
from fusedops.errors import UnsupportedError
from fusedops.ops.rope_table import rope_table
from fusedops.providers import flashinfer_base
from fusedops.providers.flashinfer import FlashInferDecode

COVERS = ("fusedops/providers/flashinfer*.py",)
HALF = (torch.bfloat16, torch.float16)

# One rounding of a float32 result: half an ulp, and the error of float32 itself.
ONE_ROUNDING = 0.52

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"
    ),
]


@contextmanager
def pinned(op: str) -> Iterator[None]:
    """Pin FlashInfer in strict mode and assert that it served one call of ``op``, and no other."""
    with fusedops.use_provider("flashinfer") as usage:
        yield
    assert usage.calls == {(op, "flashinfer"): 1}


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return values(*shape, dtype=dtype, seed=seed).cuda()


def eps_off(got: Tensor, expected: Tensor) -> float:
    """The largest relative distance in units of the dtype's machine epsilon."""
    distance = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-3)
    return float(distance.max()) / torch.finfo(got.dtype).eps


def needs_built(kernels: str) -> None:
    reason = flashinfer_base.absent() or flashinfer_base.unbuilt(kernels)
    if reason is not None:
        pytest.skip(f"FlashInfer: {reason}")


# Norms and activations


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 576), (3, 5, 4096), (130, 1000), (7, 8192)])
def test_rms_norm(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    x, weight = cuda(*shape, dtype=dtype), cuda(shape[-1], dtype=dtype, seed=1)
    exact = oracles.rms_norm(x, weight, 1e-5, offset)
    for llama in (False, True):
        options = {"eps": 1e-5, "weight_offset": offset, "round_before_weight": llama}
        with pinned("rms_norm"):
            y = fusedops.rms_norm(x, weight, **options)
        assert oracles.ulps_off(y, exact) <= ONE_ROUNDING
        assert eps_off(y, reference(fusedops.rms_norm, x, weight, **options)) <= 1.51


def test_rms_norm_of_strided_rows_and_without_a_pin() -> None:
    x, weight = cuda(33, 2048)[:, :1024], cuda(1024, seed=1)
    with pinned("rms_norm"):
        y = fusedops.rms_norm(x, weight, round_before_weight=False)
    assert oracles.ulps_off(y, oracles.rms_norm(x, weight, 1e-6)) <= ONE_ROUNDING
    assert answer("rms_norm", x, weight, 1e-6, 0.0, False, pinned=False).ok
    assert not answer("rms_norm", x, weight, 1e-6, 0.0, True, pinned=False).ok


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 576), (2, 3, 4096), (130, 1000)])
def test_fused_add_rms_norm(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    x, residual = cuda(*shape, dtype=dtype), cuda(*shape, dtype=dtype, seed=1)
    weight = cuda(shape[-1], dtype=dtype, seed=2)
    exact = oracles.rms_norm(x.double() + residual.double(), weight, 1e-5, offset)
    options = {"eps": 1e-5, "weight_offset": offset, "round_before_weight": False}
    with pinned("fused_add_rms_norm"):
        y, total = fusedops.fused_add_rms_norm(x, residual, weight, **options)
    assert torch.equal(total, x + residual)
    assert oracles.ulps_off(y, exact) <= ONE_ROUNDING
    right, _ = reference(fusedops.fused_add_rms_norm, x, residual, weight, **options)
    assert eps_off(y, right) <= 2.01
    with pinned("fused_add_rms_norm_"):
        fusedops.fused_add_rms_norm_(x, residual, weight, **options)
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 3072), (3, 5, 1024), (130, 250)])
def test_act_and_mul(shape: tuple[int, ...], act: str, dtype: torch.dtype) -> None:
    needs_built(f"{act}_and_mul")
    x = cuda(*shape, dtype=dtype)
    with pinned("act_and_mul"):
        y = fusedops.act_and_mul(x, act)
    gate, up = (oracles.floats(part) for part in x.chunk(2, -1))
    # 1 + erf (or tanh) cancels below 0, so small results carry float32's absolute error; fast
    # arithmetic in its tanh adds up to an eighth of a float16 step.
    exact = oracles.activation(act, gate) * up
    assert oracles.ulps_off(y, exact, floor=2.0**-5) <= (0.65 if act == "gelu_tanh" else 0.6)


# RoPE


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_rope(tokens: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    qkv = cuda(tokens, 12, head_dim, dtype=dtype)
    before = qkv.clone()
    q, k = qkv[:, :6], qkv[:, 6:9]
    table = rope_table(rotary_dim, 512).cuda()
    positions = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(1))
    frequencies = [10000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    with pinned("rope"):
        results = fusedops.rope(q, k, positions.cuda(), table)
    for got, x in zip(results, (q, k), strict=True):
        exact = oracles.rope(x, positions.tolist(), frequencies, "halves")
        assert oracles.ulps_off(got, exact, floor=2.0**-5) <= 0.6
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    with pinned("rope_"):
        fusedops.rope_(q, k, positions.int().cuda(), table)
    assert torch.equal(q, results[0])
    assert torch.equal(k, results[1])
    assert torch.equal(qkv[:, 9:], before[:, 9:])


def test_rope_outside_the_table_captured_and_replayed() -> None:
    q, k, table = cuda(6, 4, 64), cuda(6, 2, 64, seed=1), rope_table(64, 16).cuda()
    positions = torch.tensor([3, -1, 16, 0, -(2**40), 15], device="cuda")
    q[1], q[2] = torch.nan, torch.inf
    with pinned("rope"):
        fusedops.rope(q, k, positions, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pinned("rope"):
        got = fusedops.rope(q, k, positions, table)
    for shift in (0, 1):
        positions.copy_(positions.roll(shift))
        q.copy_(q.roll(shift, 0))
        graph.replay()
        expected = reference(fusedops.rope, q, k, positions, table)
        outside = (positions < 0) | (positions >= 16)
        for result, right in zip(got, expected, strict=True):
            assert not result[outside].any()
            torch.testing.assert_close(result, right, rtol=2.0**-7, atol=2.0**-9)
    written = q.clone(), k.clone()
    with pinned("rope_"):
        fusedops.rope_(*written, positions, table)
    outside = (positions < 0) | (positions >= 16)
    assert torch.equal(written[0][outside].view(torch.int16), q[outside].view(torch.int16))
    assert torch.equal(written[1][outside], k[outside])


# Paged append


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_append_writes_bit_for_bit_what_the_reference_writes(
    head_dim: int, dtype: torch.dtype, layout: str
) -> None:
    pages, page_size, heads, requests, tokens = 40, 16, 3, 4, 90
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    table = table[: requests * 3].view(requests, 3).int()
    table[3, 2] = pages
    request = torch.arange(tokens) % requests
    positions = torch.arange(tokens) // requests * 2
    positions[::7] = -1
    positions[5], request[6], positions[50] = 48, requests, 2**31
    k, v = (cuda(tokens, heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
    arguments = (table.cuda(), request.int().cuda(), positions.cuda())
    caches = []
    for name in ("flashinfer", "torch"):
        poisoned = [
            torch.full((pages, *inner, head_dim), torch.nan, dtype=dtype, device="cuda")
            for _ in range(2)
        ]
        with fusedops.use_provider(name) as usage:
            fusedops.append_paged_kv(k, v, *poisoned, *arguments, layout=layout)
        assert usage.calls == {("append_paged_kv", name): 1}
        caches.append([cache.view(torch.int16) for cache in poisoned])
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])


# Paged attention


def paged(
    lengths: list[int], heads: int, head_dim: int, layout: str, page_size: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """(k_cache, v_cache, block table): slots that no request uses hold NaN or Inf."""
    requests, max_pages = len(lengths), -(-max(lengths) // page_size) + 1
    pages = requests * max_pages + 3
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    table = order[: requests * max_pages].view(requests, max_pages).int()
    caches = []
    for seed, poison in ((11, torch.nan), (12, torch.inf)):
        slots = torch.full((pages, page_size, heads, head_dim), poison, dtype=torch.bfloat16)
        for row, length in zip(table.tolist(), lengths, strict=True):
            stored = values(length, heads, head_dim, seed=seed + length)
            for first in range(0, length, page_size):
                count = min(page_size, length - first)
                slots[row[first // page_size], :count] = stored[first : first + count]
        caches.append(slots.cuda() if layout == "NHD" else slots.transpose(1, 2).cuda())
    if layout == "HND":
        caches = [cache.contiguous() for cache in caches]
    return caches[0], caches[1], table.cuda()


def check_attention(
    got: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: list[int],
    starts: list[int],
    layout: str,
    causal: bool = True,
) -> None:
    """Assert that ``got`` is within 1.6 eps of sum(weight * |v|) of the float64 result.

    Half an eps each: the final rounding, that of a split's partial result, and on tensor cores that
    of the weights to bfloat16 before the product.
    """
    eps = torch.finfo(q.dtype).eps
    slots = [c if layout == "NHD" else c.transpose(1, 2) for c in caches]
    group = q.shape[1] // slots[0].shape[2]
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if not length:
            assert not got[rows].any()
            continue
        k, v = (
            s[table[request].long()].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for s in slots
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * q.shape[2] ** -0.5
        if causal:
            count = rows.stop - rows.start
            own = torch.arange(length - count, length, device="cuda")[:, None]
            scores.masked_fill_(torch.arange(length, device="cuda") > own, -torch.inf)
        weights = scores.softmax(-1)
        exact = torch.einsum("hqk,khd->qhd", weights, v)
        bound = 1.6 * eps * torch.einsum("hqk,khd->qhd", weights, v.abs())
        assert torch.all((got[rows].double() - exact).abs() <= bound)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((32, 8), 128), ((4, 4), 64)])
def test_eager_decode(heads: tuple[int, int], head_dim: int, layout: str) -> None:
    lengths = [1, 16, 0, 17, 700, 33]
    k_cache, v_cache, table = paged(lengths, heads[1], head_dim, layout)
    q = cuda(len(lengths), heads[0], head_dim)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    with pinned("paged_attention"):
        got = fusedops.paged_attention(q, k_cache, v_cache, table, seq_lens, layout=layout)
    starts = list(range(len(lengths) + 1))
    check_attention(got, q, (k_cache, v_cache), table, lengths, starts, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_eager_prefill(causal: bool, layout: str) -> None:
    lengths, counts = [40, 0, 16, 300, 5], [40, 2, 1, 129, 0]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    k_cache, v_cache, table = paged(lengths, 3, 64, layout)
    q = cuda(starts[-1] + 4, 9, 64)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    with pinned("paged_attention"):
        got = fusedops.paged_attention(
            q,
            k_cache,
            v_cache,
            table,
            seq_lens,
            start,
            max_query_len=129,
            causal=causal,
            layout=layout,
        )
    assert not got[starts[-1] :].any()
    check_attention(got, q, (k_cache, v_cache), table, lengths, starts, layout, causal)


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("heads", [(9, 3), (16, 2)])
def test_decode_step_captured_and_replayed_with_changed_inputs(
    heads: tuple[int, int], tensor_cores: bool
) -> None:
    longest = [500, 1, 96, 33]
    k_cache, v_cache, table = paged(longest, heads[1], 64, "NHD")
    q = cuda(4, heads[0], 64)
    decode = FlashInferDecode(
        batch=4,
        pages=k_cache.shape[0],
        page_size=16,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_dim=64,
        dtype=torch.bfloat16,
        device="cuda",
        block_table=table,
        tensor_cores=tensor_cores,
    )
    decode.plan([1, 1, 1, 1])
    decode.run(q, k_cache, v_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.run(q, k_cache, v_cache)
    starts = list(range(5))
    for step, lengths in enumerate(([1, 1, 1, 1], longest, [16, 0, 17, 32], [499, 1, 95, 0])):
        q.copy_(cuda(4, heads[0], 64, seed=step))
        if step == 3:
            # Another placement of the same tokens: the table and the pool change under the graph.
            order = torch.randperm(k_cache.shape[0], device="cuda")
            k_cache[order], v_cache[order] = k_cache.clone(), v_cache.clone()
            table.copy_(order[table.long()].int())
        decode.plan(lengths)
        graph.replay()
        first = out.clone()
        check_attention(first, q, (k_cache, v_cache), table, lengths, starts, "NHD")
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 15.0}])
def test_decode_with_a_window_or_a_soft_cap(options: dict[str, Any]) -> None:
    bf16, window = torch.bfloat16, "window" in options
    kernel = (bf16, bf16, bf16, torch.int32, 64, 64, 0, window, not window)
    if not flashinfer_base.module("jit").gen_batch_decode_module(*kernel).is_compiled:
        pytest.skip("FlashInfer: this variant of its decode kernel is not prebuilt")
    lengths = [1, 16, 100, 37]
    k_cache, v_cache, table = paged(lengths, 3, 64, "NHD")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    call = (cuda(4, 9, 64), k_cache, v_cache, table, seq_lens)
    with pinned("paged_attention"):
        got = fusedops.paged_attention(*call, **options)
    expected = reference(fusedops.paged_attention, *call, **options)
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=2.0**-8)


# Captures


def test_what_needs_the_host_refuses_a_capture_by_name() -> None:
    k_cache, v_cache, table = paged([5], 2, 64, "NHD")
    q, k = cuda(1, 4, 64), cuda(1, 2, 64)
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    attempts: list[Callable[[], Any]] = [
        lambda: fusedops.paged_attention(q, k_cache, v_cache, table, one),
        lambda: fusedops.append_paged_kv(k, k, k_cache, v_cache, table, one - 1, one),
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), fusedops.use_provider("flashinfer"):
        q.add_(1)
        for attempt in attempts:
            with pytest.raises(UnsupportedError, match="a capture forbids"):
                attempt()
    graph.replay()
    torch.cuda.synchronize()
