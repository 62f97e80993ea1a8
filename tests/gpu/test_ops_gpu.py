"""Norm, activation, embedding, rope, KV append, attention and sampling on a GPU, in torch.

Each call pins the provider ``torch``: these tests hold the reference path on CUDA to the CPU's
results and to float64, and capture it; kernels have tests of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles import PagedBatch, paged_batch
from torch import Tensor

from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.errors import DeviceError
from fusedops.ops.activation import act_and_mul
from fusedops.ops.attention import paged_attention
from fusedops.ops.embedding import embedding
from fusedops.ops.kv_append import append_paged_kv
from fusedops.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, layer_norm, rms_norm
from fusedops.ops.rope_kv import ROPE_STYLES, rope, rope_
from fusedops.ops.rope_table import rope_table
from fusedops.ops.sampling import greedy, sample
from fusedops.providers.base import use_provider

COVERS = (
    "fusedops/check.py",
    "fusedops/epilogue/activations.py",
    "fusedops/ops/activation.py",
    "fusedops/ops/attention*.py",
    "fusedops/ops/embedding.py",
    "fusedops/ops/guards.py",
    "fusedops/ops/kv_append.py",
    "fusedops/ops/norm.py",
    "fusedops/ops/op.py",
    "fusedops/ops/paged.py",
    "fusedops/ops/rope*.py",
    "fusedops/ops/sampling.py",
    "fusedops/providers/base.py",
)
DEVICE = "cuda"
PROVIDER = "torch"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    """Pin the provider in strict mode and require that it, and no other, ran on the GPU."""
    with use_provider(PROVIDER) as usage:
        yield
    assert usage.calls, "no operation ran"
    assert {provider for _, provider in usage.calls} == {PROVIDER}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values on the CPU, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    """Copies on the GPU."""
    return [tensor.to(DEVICE, copy=True) for tensor in tensors]


def outputs(result: Any) -> tuple[Tensor, ...]:
    """A call's results as a tuple."""
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal shapes, dtypes and values, a NaN equal to a NaN."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.cpu(), other.cpu()
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def assert_near_cpu(got: Tensor, expected: Tensor) -> None:
    """As near to the CPU's result as two float32 computations with one rounding each are."""
    assert got.device.type == DEVICE
    assert (got.shape, got.dtype, got.stride()) == (
        expected.shape,
        expected.dtype,
        expected.stride(),
    )
    if not got.dtype.is_floating_point:
        assert torch.equal(got.cpu(), expected)
        return
    assert torch.equal(got.cpu().isnan(), expected.isnan())
    got, expected = got.nan_to_num(), expected.nan_to_num()
    # The inputs are of size 1, and some results are small differences of terms of that size.
    limit, floor = (8.0, 1.0) if got.dtype == torch.float32 else (2.0, 2.0**-6)
    assert oracles.ulps_off(got, oracles.floats(expected), floor=floor) <= limit


# One entry a call: a function of tensors, and the tensors of two different inputs for it.

Case = tuple[Callable[..., Any], list[Tensor], list[Tensor]]
CASES: dict[str, Callable[[torch.dtype], Case]] = {}


def case(build: Callable[[torch.dtype], Case]) -> Callable[[torch.dtype], Case]:
    """Register a case under its function's name."""
    CASES[build.__name__] = build
    return build


@case
def rms_norm_llama(dtype: torch.dtype) -> Case:
    weight = (1 + 0.1 * normal(576, seed=9)).to(dtype)
    one, other = ([normal(5, 576, dtype=dtype, seed=seed), weight] for seed in (1, 2))
    return rms_norm, one, other


@case
def rms_norm_gemma(dtype: torch.dtype) -> Case:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, weight_offset=1.0, round_before_weight=False)

    one, other = ([normal(2, 3, 130, dtype=dtype, seed=s), normal(130, seed=9)] for s in (1, 2))
    return call, one, other


@case
def added_norm(dtype: torch.dtype) -> Case:
    weight = (1 + 0.1 * normal(576, seed=9)).to(dtype)
    one, other = (
        [normal(5, 576, dtype=dtype, seed=s), normal(5, 576, dtype=dtype, seed=s + 10), weight]
        for s in (1, 2)
    )
    return fused_add_rms_norm, one, other


@case
def added_norm_in_place(dtype: torch.dtype) -> Case:
    _, one, other = added_norm(dtype)
    return fused_add_rms_norm_, one, other


@case
def layer_norm_mixed(dtype: torch.dtype) -> Case:
    parameters = [normal(200, seed=8).to(dtype), normal(200, seed=9)]
    one, other = ([normal(7, 200, dtype=dtype, seed=seed), *parameters] for seed in (1, 2))
    return layer_norm, one, other


@case
def layer_norm_plain(dtype: torch.dtype) -> Case:
    return layer_norm, [normal(7, 200, dtype=dtype)], [normal(7, 200, dtype=dtype, seed=1)]


@case
def swiglu(dtype: torch.dtype) -> Case:
    return act_and_mul, [normal(5, 3072, dtype=dtype)], [normal(5, 3072, dtype=dtype, seed=1)]


@case
def token_embedding(dtype: torch.dtype) -> Case:
    weight = normal(50, 64, dtype=dtype)
    ids = torch.arange(12).view(3, 4)
    return embedding, [ids * 3, weight], [ids * 4 + 1, weight]


def rope_inputs(dtype: torch.dtype, seed: int) -> list[Tensor]:
    positions = torch.arange(6) * (seed + 1) + seed
    q, k = normal(6, 9, 64, dtype=dtype, seed=seed), normal(6, 3, 64, dtype=dtype, seed=seed + 10)
    return [q, k, positions, rope_table(32, 64)]


@case
def rope_functional(dtype: torch.dtype) -> Case:
    return rope, rope_inputs(dtype, 1), rope_inputs(dtype, 2)


@case
def rope_in_place(dtype: torch.dtype) -> Case:
    def call(*tensors: Tensor) -> None:
        rope_(*tensors, style="interleaved")

    return call, rope_inputs(dtype, 1), rope_inputs(dtype, 2)


def append_inputs(dtype: torch.dtype, seed: int) -> list[Tensor]:
    caches = [torch.full((8, 3, 4, 16), 1234.0, dtype=dtype) for _ in range(2)]
    tokens = [normal(5, 3, 16, dtype=dtype, seed=seed + i) for i in (0, 10)]
    table = torch.tensor([[3, 0], [6, 1], [2, 7]], dtype=torch.int32)
    request_index = torch.tensor([0, 1, 2, 2, 0], dtype=torch.int32)
    positions = torch.tensor([2, 5, 0, 1, -1]) + (0 if seed == 1 else 2)
    return [*tokens, *caches, table, request_index, positions]


@case
def append_hnd(dtype: torch.dtype) -> Case:
    def call(*tensors: Tensor) -> None:
        append_paged_kv(*tensors, layout="HND")

    return call, append_inputs(dtype, 1), append_inputs(dtype, 2)


def attention_inputs(batch: PagedBatch, mixed: bool) -> list[Tensor]:
    tensors = [batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens]
    return [*tensors, batch.query_start] if mixed else tensors


@case
def attention_decode(dtype: torch.dtype) -> Case:
    batch = paged_batch([9, 1, 16], heads=(9, 3), head_dim=64, dtype=dtype)
    shorter = replace(batch, q=-batch.q, seq_lens=torch.tensor([7, 0, 13], dtype=torch.int32))
    return paged_attention, attention_inputs(batch, False), attention_inputs(shorter, False)


@case
def attention_mixed(dtype: torch.dtype) -> Case:
    def call(*tensors: Tensor) -> Tensor:
        return paged_attention(*tensors, max_query_len=6, window=7, softcap=20.0)

    batch = paged_batch([9, 5, 12], [5, 1, 4], heads=(10, 2), head_dim=32, dtype=dtype)
    other = replace(batch, counts=[2, 3, 5], seq_lens=torch.tensor([9, 4, 11], dtype=torch.int32))
    return call, attention_inputs(batch, True), attention_inputs(other, True)


@case
def greedy_token(dtype: torch.dtype) -> Case:
    return greedy, [normal(4, 5000, dtype=dtype)], [normal(4, 5000, dtype=dtype, seed=1)]


def sample_inputs(dtype: torch.dtype, seed: int) -> list[Tensor]:
    logits = (2 * normal(6, 5000, seed=seed)).to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0, 2.0])
    return [logits, temperature, torch.arange(6) + 1000 * seed]


@case
def sample_free(dtype: torch.dtype) -> Case:
    return sample, sample_inputs(dtype, 1), sample_inputs(dtype, 2)


@case
def sample_limited(dtype: torch.dtype) -> Case:
    def call(*tensors: Tensor) -> Tensor:
        logits, temperature, seed, top_k, top_p = tensors
        return sample(logits, temperature, seed, top_k=top_k, top_p=top_p)

    limits = [
        (torch.full((6,), k, dtype=torch.int32), torch.full((6,), p))
        for k, p in ((50, 0.9), (0, 0.5))
    ]
    inputs = [[*sample_inputs(dtype, seed), *limits[seed - 1]] for seed in (1, 2)]
    return call, inputs[0], inputs[1]


EACH_CASE = pytest.mark.parametrize("name", list(CASES))


@EACH_CASE
@EACH_DTYPE
def test_gpu_agrees_with_the_cpu_and_repeats_bitwise(name: str, dtype: torch.dtype) -> None:
    call, *both = CASES[name](dtype)
    for inputs in both:
        reference = [tensor.clone() for tensor in inputs]
        with use_provider("reference"):
            expected = outputs(call(*reference))
        first, second = on_gpu(*inputs), on_gpu(*inputs)
        got, again = outputs(call(*first)), outputs(call(*second))
        for one, other in zip((*got, *first), (*expected, *reference), strict=True):
            assert_near_cpu(one, other)
        for one, other in zip((*got, *first), (*again, *second), strict=True):
            assert same(one, other)


def captured(call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
    """A CUDA graph of one call on these very tensors, and the results that it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = outputs(call(*inputs))
    return graph, results


@EACH_CASE
@EACH_DTYPE
def test_b32_a_captured_call_replays_with_changed_inputs(name: str, dtype: torch.dtype) -> None:
    call, *both = CASES[name](dtype)
    static = on_gpu(*both[0])
    graph, results = captured(call, static)
    for inputs in (both[1], both[0], both[1]):
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        eager = on_gpu(*inputs)
        expected = outputs(call(*eager))
        for one, other in zip((*results, *static), (*expected, *eager), strict=True):
            assert same(one, other)


def assert_llama_order(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """RMSNorm in Llama's order, eps 1e-5: both roundings, but where the first falls on a tie."""
    exact = oracles.rms_norm(x, weight, 1e-5, round_before_weight=x.dtype != torch.float32)
    if x.dtype == torch.float32:
        assert oracles.ulps_off(y, exact) <= 16.0
    else:
        assert oracles.ulps_off(y, oracles.rounded(exact, x.dtype)) <= 2.0
        assert (oracles.floats(y) == oracles.rounded(exact, x.dtype)).mean() >= 0.998


@EACH_DTYPE
@pytest.mark.parametrize("size", [64, 576, 4096, 32768])
def test_norms_against_float64(dtype: torch.dtype, size: int) -> None:
    x, residual = normal(33, size, dtype=dtype), normal(33, size, dtype=dtype, seed=1)
    weight = (1 + 0.1 * normal(size, seed=9)).to(dtype)
    x_gpu, residual_gpu, weight_gpu = on_gpu(x, residual, weight)
    late = rms_norm(x_gpu, weight_gpu, 1e-5, weight_offset=1.0, round_before_weight=False)
    limit = 16.0 if dtype == torch.float32 else 0.52
    assert oracles.ulps_off(late, oracles.rms_norm(x, weight, 1e-5, 1.0)) <= limit
    assert_llama_order(rms_norm(x_gpu, weight_gpu, 1e-5), x, weight)
    y, total = fused_add_rms_norm(x_gpu, residual_gpu, weight_gpu, 1e-5)
    exact = oracles.floats(x) + oracles.floats(residual)
    assert oracles.ulps_off(total, oracles.rounded(exact, dtype)) == 0.0
    assert_llama_order(y, total, weight)
    layered = layer_norm(x_gpu, weight_gpu, None, 1e-5)
    floor = 1.0 if dtype == torch.float32 else 0.03
    expected = oracles.layer_norm(x, weight, None, 1e-5)
    assert oracles.ulps_off(layered, expected, floor=floor) <= (8.0 if floor == 1.0 else 0.53)


def test_b24_gemma_weight_plus_one_is_added_in_float32() -> None:
    x = torch.zeros(2, 4608, dtype=torch.bfloat16, device=DEVICE)
    x[:, ::9] = 1.0
    for value, peak in ((15.8125, 50.5), (0.00390625, 3.015625)):
        weight = torch.full((4608,), value, dtype=torch.bfloat16, device=DEVICE)
        y = rms_norm(x, weight, 1e-6, weight_offset=1.0, round_before_weight=False)
        assert (y[:, ::9] == peak).all()
        assert y.count_nonzero() == 2 * 512


@EACH_DTYPE
@pytest.mark.parametrize("act", list(ACTIVATIONS))
def test_activations_against_float64(dtype: torch.dtype, act: str) -> None:
    wide = normal(16, 6841, dtype=dtype)
    x = wide[:, 1:515]
    y = act_and_mul(wide.to(DEVICE)[:, 1:515], act)  # rows that start at any address
    expected = oracles.act_and_mul(x, act)
    gate, up = np.split(np.abs(oracles.floats(x)), 2, axis=-1)
    ulps = 4.0 if dtype == torch.float32 else 2.5
    limit = ulps * oracles.ulp(expected, dtype) + 4.0 * 2.0**-23 * gate * up
    assert np.all(np.abs(oracles.floats(y) - expected) <= limit)


@pytest.mark.parametrize("half", [3420, 4, 12, 1234, 1710, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_b06_any_half_width(half: int, dtype: torch.dtype) -> None:
    x = normal(4, 2 * half, dtype=dtype)
    with use_provider("reference"):
        expected = act_and_mul(x)
    assert_near_cpu(act_and_mul(x.to(DEVICE)), expected)


@EACH_DTYPE
@pytest.mark.parametrize("style", ROPE_STYLES)
def test_b63_b65_rope_against_float64(dtype: torch.dtype, style: str) -> None:
    positions = [0, 255, 257, 15962, 131071]
    q, k = normal(5, 9, 80, dtype=dtype), normal(5, 3, 80, dtype=dtype, seed=1)
    turned = rope(*on_gpu(q, k, torch.tensor(positions), rope_table(64, 131072)), style=style)
    frequencies = [10000.0 ** (-2 * i / 64) for i in range(32)]
    limit, floor = (4.0, 4.0) if dtype == torch.float32 else (0.51, 2e-3)
    for x, y in zip((q, k), turned, strict=True):
        expected = oracles.rope(x, positions, frequencies, style)
        assert oracles.ulps_off(y, expected, floor=floor) <= limit


@EACH_DTYPE
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attention_against_float64(dtype: torch.dtype, layout: str) -> None:
    for heads in ((40, 8), (24, 4), (28, 4), (9, 3), (8, 8)):
        batch = paged_batch(
            [17, 0, 5], [3, 1, 5], heads=heads, head_dim=32, dtype=dtype, layout=layout
        )
        out = paged_attention(
            *on_gpu(*attention_inputs(batch, True)), max_query_len=8, layout=layout
        )
        expected = oracles.paged_attention(batch)
        half_ulp = 0.0 if dtype == torch.float32 else 0.5 * oracles.ulp(expected, dtype)
        assert np.isfinite(oracles.floats(out)).all()
        assert np.all(np.abs(oracles.floats(out) - expected) <= half_ulp + 4e-6)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_b73_unused_slots_never_leak(garbage: float) -> None:
    batch = paged_batch([17], page_size=16, garbage=garbage, dtype=torch.bfloat16)
    out = paged_attention(*on_gpu(*attention_inputs(batch, False)))
    expected = oracles.paged_attention(batch)
    limit = 0.5 * oracles.ulp(expected, torch.bfloat16) + 4e-6
    assert np.all(np.abs(oracles.floats(out) - expected) <= limit)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_token_ids_outside_give_zeros(index: torch.dtype) -> None:
    weight = normal(11, 6, dtype=torch.bfloat16)
    ids = torch.tensor([10, -1, 11, 4, 2**31 - 1, -(2**31)], dtype=index)
    expected = torch.zeros(6, 6, dtype=torch.bfloat16)
    expected[0], expected[3] = weight[10], weight[4]
    assert same(embedding(*on_gpu(ids, weight)), expected)


@pytest.mark.parametrize("style", ROPE_STYLES)
def test_b67_positions_outside_give_zeros_or_leave_the_row(style: str) -> None:
    q, k, table = normal(4, 2, 8), normal(4, 1, 8, seed=1), rope_table(6, 16)
    positions = torch.tensor([15, -1, 16, 2**31])
    with use_provider("reference"):
        expected = rope(q[:1], k[:1], positions[:1], table, style=style)
    inputs = on_gpu(q, k, positions, table)
    for y, right in zip(rope(*inputs, style=style), expected, strict=True):
        assert_near_cpu(y[:1], right)
        assert (y[1:] == 0.0).all()
    rope_(*inputs, style=style)
    for x, before, right in zip(inputs, (q, k), expected, strict=False):
        assert_near_cpu(x[:1], right)
        assert same(x[1:], before[1:])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("nobody", [False, True])
def test_b75_tokens_without_a_place_write_nothing(layout: str, nobody: bool) -> None:
    shape = (6, 4, 2, 8) if layout == "NHD" else (6, 2, 4, 8)
    caches = [torch.full(shape, 1234.0) for _ in range(2)]
    caches[0][0] = math.nan
    k, v = normal(7, 2, 8), normal(7, 2, 8, seed=1)
    table = torch.tensor([[5, 2], [6, -1], [0, 3]], dtype=torch.int32)
    request_index = torch.tensor([3, 0, 1, 1, 2, -1, 2], dtype=torch.int32)
    positions = torch.tensor([0, 8, 0, 4, 5, 0, 2**33])
    if nobody:
        positions[4] = -1
    expected = [cache.clone() for cache in caches]
    if not nobody:
        for cache, new in zip(expected, (k, v), strict=True):
            (cache if layout == "NHD" else cache.transpose(1, 2))[3, 1] = new[4]
    inputs = on_gpu(k, v, *caches, table, request_index, positions)
    append_paged_kv(*inputs, layout=layout)
    assert same(inputs[2], expected[0])
    assert same(inputs[3], expected[1])


def test_attention_metadata_outside_is_not_read() -> None:
    batch = paged_batch([5, 6], [2, 3])
    q, k_cache, v_cache, table, lengths, starts = on_gpu(*attention_inputs(batch, True))
    good = paged_attention(q, k_cache, v_cache, table, lengths, starts, max_query_len=3)
    table[1, 1], lengths[1] = 2**31 - 1, 2**31 - 1
    out = paged_attention(q, k_cache, v_cache, table, lengths, starts, max_query_len=3)
    assert same(out[:2], good[:2])
    lengths[1] = 6
    few = paged_attention(q, k_cache, v_cache, table, lengths, starts, max_query_len=2)
    assert (few[4] == 0.0).all()


def test_sampling_values_outside_mean_what_the_documentation_says() -> None:
    logits = normal(6, 200)
    seeds = torch.arange(6)
    with use_provider("reference"):
        best = greedy(logits)
        free = sample(logits, torch.ones(6), seeds)
    temperature = torch.tensor([-1.0, math.nan, 1.0, 1.0, 1.0, 1.0])
    top_k = torch.tensor([0, 0, -5, 0, 0, 0], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.0, 7.0])
    gpu = on_gpu(logits, temperature, seeds, top_k, top_p)
    tokens = sample(*gpu[:3], top_k=gpu[3], top_p=gpu[4]).cpu()
    expected = torch.where(torch.tensor([1, 1, 0, 1, 1, 0]).bool(), best, free)
    assert torch.equal(tokens, expected)


def test_greedy_ties_and_nan_as_on_the_cpu() -> None:
    logits = torch.zeros(5, 70000)
    logits[1, 300:] = 5.0
    logits[2] = -math.inf
    logits[3, [40000, 60000]] = math.nan
    logits[4, [123, 69999]] = math.inf
    expected = [0, 300, 0, 40000, 123]
    for dtype in DTYPES:
        assert greedy(logits.to(DEVICE, dtype)).tolist() == expected
        tokens = sample(
            logits.to(DEVICE, dtype),
            torch.ones(5, device=DEVICE),
            torch.arange(5, device=DEVICE),
            top_k=torch.ones(5, dtype=torch.int32, device=DEVICE),
        )
        assert tokens.tolist() == expected


def test_sampled_tokens_follow_the_integer_noise() -> None:
    logits = normal(3, 400)
    seeds = [0, -1, 2**63 - 1]
    tokens = sample(*on_gpu(logits, torch.ones(3), torch.tensor(seeds))).tolist()
    for row, token in enumerate(tokens):
        scores = oracles.floats(logits[row]) + oracles.gumbel(seeds[row], 400)
        assert token == int(np.argmax(scores))


def test_b04_empty_inputs_leave_no_error_behind() -> None:
    bf16 = {"dtype": torch.bfloat16, "device": DEVICE}
    x, weight = torch.empty(0, 64, **bf16), torch.ones(64, **bf16)
    assert rms_norm(x, weight).shape == (0, 64)
    assert fused_add_rms_norm(x, x, weight)[1].shape == (0, 64)
    assert layer_norm(x, weight).shape == (0, 64)
    assert act_and_mul(x).shape == (0, 32)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert embedding(none, weight[None]).shape == (0, 64)
    tokens, cache = torch.empty(0, 2, 8, **bf16), torch.ones(3, 4, 2, 8, **bf16)
    table = rope_table(8, 4).to(DEVICE)
    assert rope(tokens, tokens, none, table)[0].shape == (0, 2, 8)
    rope_(tokens, tokens.clone(), none, table)
    pages = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    append_paged_kv(tokens, tokens, cache, cache.clone(), pages, none, none)
    assert paged_attention(tokens, cache, cache, pages[:0], none).shape == (0, 2, 8)
    seeds, ones = none.long(), torch.empty(0, device=DEVICE)
    assert greedy(x).shape == (0,)
    assert sample(x, ones, seeds, top_k=none, top_p=ones).shape == (0,)
    torch.cuda.synchronize()
    assert (torch.ones(3, device=DEVICE) + 1).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_b12_unaligned_and_strided_views(offset: int) -> None:
    flat = normal(8 * 8 * 64 + 8, dtype=torch.bfloat16).to(DEVICE)
    rows = flat[offset : offset + 8 * 8 * 64].view(8, 8 * 64)
    weight = flat[offset : offset + 64]
    heads = rows.split([256, 128, 128], dim=1)[0].view(8, 4, 64)
    positions, table = torch.arange(8, device=DEVICE), rope_table(64, 8).to(DEVICE)
    for view in (rows.view(-1, 64), heads):
        copy = view.contiguous().clone()
        assert same(rms_norm(view, weight), rms_norm(copy, weight.clone()))
        assert same(layer_norm(view, weight), layer_norm(copy, weight.clone()))
        assert same(act_and_mul(view), act_and_mul(copy))
        assert same(
            fused_add_rms_norm(view, copy, weight)[0], fused_add_rms_norm(copy, copy, weight)[0]
        )
    assert same(
        rope(heads, heads, positions, table)[0], rope(heads.clone(), heads, positions, table)[0]
    )
    assert same(greedy(rows[:, 1:]), greedy(rows[:, 1:].clone()))


def test_b35_tensors_of_two_devices_are_refused() -> None:
    x, weight = on_gpu(normal(2, 8), torch.ones(8))
    rms_norm(x, weight)
    with pytest.raises(DeviceError, match=r"x is on cuda:0 but weight is on cpu"):
        rms_norm(x, weight.cpu())
    with pytest.raises(DeviceError, match="token_ids is on cpu"):
        embedding(torch.tensor([0]), x)


@EACH_CASE
def test_b37_compiled_calls_agree_with_eager(name: str) -> None:
    call, inputs, _ = CASES[name](torch.bfloat16)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    ours, eager = on_gpu(*inputs), on_gpu(*inputs)
    got, expected = outputs(compiled(*ours)), outputs(call(*eager))
    for one, other in zip((*got, *ours), (*expected, *eager), strict=True):
        assert same(one, other)
