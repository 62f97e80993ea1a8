"""Paged KV caches of 8 bits with scales: append, RoPE + append and attention on the CPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles import PagedBatch, paged_batch
from torch import Tensor

import fusedops
from fusedops.errors import ConfigError, DeviceError, DTypeError, ShapeError
from fusedops.ops.attention_torch import Attention, attend_batched
from fusedops.ops.kv_append import _append_guarded
from fusedops.ops.kv_scale import CODE_DTYPES, as_stored
from fusedops.ops.paged import LAYOUTS, slots_view
from fusedops.ops.quantize import SMALLEST_SCALE
from fusedops.ops.rope_kv import ROPE_STYLES

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
WORDS = {E4M3: "e4m3", INT8: "int8"}
EACH_DTYPE = pytest.mark.parametrize("dtype", CODE_DTYPES, ids=str)
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
PAGE_SIZE, HEADS, HEAD_DIM, PAGES = 4, 3, 8, 12
UNTOUCHED = 0x2A
TABLE = torch.tensor([[7, 2, 9, 0], [11, 4, 1, 10], [5, 3, 8, 6]], dtype=torch.int32)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded_caches(dtype: torch.dtype, layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """Two caches full of a code that marks what nothing has written."""
    inner = (PAGE_SIZE, HEADS) if layout == "NHD" else (HEADS, PAGE_SIZE)
    shape = (PAGES, *inner, HEAD_DIM)
    k_cache, v_cache = (torch.full(shape, UNTOUCHED, dtype=torch.int8) for _ in range(2))
    return k_cache.view(dtype), v_cache.view(dtype)


def places(count: int) -> tuple[Tensor, Tensor]:
    """Request and position of ``count`` tokens, no two alike."""
    order = torch.randperm(48, generator=torch.Generator().manual_seed(count))[:count]
    return (order // 16).int(), order % 16


def e4m3_values() -> list[float]:
    """What the codes 0x00 to 0x7e stand for: S.1111.111 alone is a NaN, and nothing is infinite."""
    found = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        if exponent:
            found.append((8 + mantissa) * 2.0 ** (exponent - 10))
        else:
            found.append(mantissa * 2.0**-9)
    return found


E4M3_VALUES = np.array(e4m3_values())


def nearest_code(value: float, dtype: torch.dtype) -> int:
    """The byte that stores a value: the nearest one, the even one of two, saturated."""
    if math.isnan(value):
        return 0x7F if dtype is E4M3 else 0
    if dtype is INT8:
        return round(min(max(value, -127.0), 127.0)) & 0xFF
    distance = np.abs(E4M3_VALUES - min(abs(value), 448.0))
    code = min(range(0x7F), key=lambda c: (distance[c], c % 2))
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def as_bytes(x: Tensor) -> list[int]:
    return [int(b) for b in x.contiguous().view(torch.uint8).flatten().tolist()]


@EACH_DTYPE
@EACH_LAYOUT
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("of_head", [False, True])
def test_tokens_are_stored_as_the_nearest_codes(
    dtype: torch.dtype, layout: str, count: int, of_head: bool
) -> None:
    k, v = normal(count, HEADS, HEAD_DIM) * 40, normal(count, HEADS, HEAD_DIM, seed=1) * 300
    # Powers of two, by which every quotient is exact.
    k_scale = torch.tensor([0.25, 2.0, 1.0]) if of_head else torch.tensor(0.5)
    v_scale = torch.tensor(4.0)
    caches, (requests, positions) = coded_caches(dtype, layout), places(count)
    fusedops.append_paged_kv(
        *(k, v, *caches, TABLE, requests, positions),
        k_scale=k_scale,
        v_scale=v_scale,
        layout=layout,
    )
    for cache, new, scale in zip(caches, (k, v), (k_scale, v_scale), strict=True):
        expected = torch.full((PAGES, PAGE_SIZE, HEADS, HEAD_DIM), UNTOUCHED, dtype=torch.uint8)
        for token in range(count):
            page = TABLE[requests[token], positions[token] // PAGE_SIZE]
            for head in range(HEADS):
                divisor = float(scale[head] if scale.dim() else scale)
                codes = [nearest_code(x / divisor, dtype) for x in new[token, head].tolist()]
                expected[page, positions[token] % PAGE_SIZE, head] = torch.tensor(codes)
        assert torch.equal(slots_view(cache, layout).view(torch.uint8), expected)


SPECIAL = [448.0, 464.0, 1e30, math.inf, -449.0, -math.inf, math.nan, -math.nan]
SPECIAL += [0.5, 1.5, 2.5, -0.5, -2.5, 126.5, 127.5, -127.5, -128.0, -0.0, 2.0**-10, 3 * 2.0**-10]


@EACH_DTYPE
def test_values_saturate_and_ties_go_to_even(dtype: torch.dtype) -> None:
    values = torch.tensor([*SPECIAL, *[0.0] * 4]).view(1, HEADS, HEAD_DIM)
    caches, one = coded_caches(dtype), torch.ones(())
    first = torch.zeros(1, dtype=torch.int32)
    fusedops.append_paged_kv(values, values, *caches, TABLE, first, first, k_scale=one, v_scale=one)
    stored = as_bytes(caches[0][7, 0])
    assert stored == [nearest_code(x, dtype) for x in values.flatten().tolist()]
    read = caches[0][7, 0].float().flatten().tolist()
    if dtype is E4M3:
        assert read[:6] == [448.0] * 4 + [-448.0] * 2
        assert stored[6:8] == [0x7F, 0x7F]
        assert read[18:20] == [0.0, 2.0**-8]
    else:
        assert read[:8] == [127.0] * 4 + [-127.0] * 2 + [0.0] * 2
        assert read[8:17] == [0.0, 2.0, 2.0, 0.0, -2.0, 126.0, 127.0, -127.0, -127.0]


@EACH_DTYPE
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_read_is_within_half_a_step_of_the_value(
    dtype: torch.dtype, source: torch.dtype
) -> None:
    k = normal(48, HEADS, HEAD_DIM, dtype=source)
    scale = torch.tensor([0.013, 0.04, 0.0371])
    caches, (requests, positions) = coded_caches(dtype), places(48)
    fusedops.append_paged_kv(
        k, k, *caches, TABLE, requests, positions, k_scale=scale, v_scale=scale[1]
    )
    where = TABLE[requests, positions // PAGE_SIZE].long(), positions % PAGE_SIZE
    largest = 448.0 if dtype is E4M3 else 127.0
    for cache, scales in ((caches[0], scale), (caches[1], scale[1].expand(3))):
        steps = scales.double()[:, None]
        exact = k.double().clamp(-largest * steps, largest * steps)
        read = cache[where].double() * steps
        step = steps.expand_as(exact)
        if dtype is E4M3:
            step = 2.0 ** (exact / steps).abs().log2().floor().clamp(min=-6) / 8 * steps
        assert ((read - exact).abs() <= 0.5 * step * (1 + 1e-4)).all()
    # The same bits as tokens that were quantised before.
    q, _ = fusedops.quantize(k, WORDS[dtype], granularity="tensor", scale=scale[1])
    assert as_bytes(caches[1][where]) == as_bytes(q)


@EACH_DTYPE
@EACH_LAYOUT
def test_the_form_that_reads_no_metadata_stores_the_same(dtype: torch.dtype, layout: str) -> None:
    k, v = normal(20, HEADS, HEAD_DIM), normal(20, HEADS, HEAD_DIM, seed=1)
    scales = torch.tensor([0.1, 0.02, 0.3]), torch.tensor(0.07)
    ours, others = coded_caches(dtype, layout), coded_caches(dtype, layout)
    requests, positions = places(20)
    positions[3] = -1
    options = {"k_scale": scales[0], "v_scale": scales[1], "layout": layout}
    fusedops.append_paged_kv(k, v, *ours, TABLE, requests, positions, **options)
    k_codes, v_codes, k_bytes, v_bytes = as_stored(k, v, *others, *scales)
    slots = slots_view(k_bytes, layout), slots_view(v_bytes, layout)
    _append_guarded(k_codes, v_codes, *slots, TABLE, requests, positions)
    for one, other in zip(ours, others, strict=True):
        assert as_bytes(one) == as_bytes(other)
        assert (one.view(torch.int8) != UNTOUCHED).any()


@EACH_DTYPE
@pytest.mark.parametrize("style", ROPE_STYLES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_rope_and_append_equal_the_two_apart(
    dtype: torch.dtype, style: str, source: torch.dtype
) -> None:
    q, k, v = normal(20, 4 + 2 * HEADS, HEAD_DIM, dtype=source).split((4, HEADS, HEADS), 1)
    requests, positions = places(20)
    positions[7] = -1
    cos_sin = fusedops.rope_table(6, 16)
    scales: dict[str, Any] = {"k_scale": torch.tensor([0.1, 0.02, 0.3]), "v_scale": torch.ones(())}
    apart, joint = coded_caches(dtype), coded_caches(dtype)
    expected = fusedops.rope(q, k, positions.clamp(min=0), cos_sin, style=style)
    fusedops.append_paged_kv(expected[1], v, *apart, TABLE, requests, positions, **scales)
    fusedops.rope_append_paged_kv_(
        q, k, v, positions, cos_sin, *joint, TABLE, requests, style=style, **scales
    )
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    for one, other in zip(joint, apart, strict=True):
        assert as_bytes(one) == as_bytes(other)


def coded_batch(
    dtype: torch.dtype, scales: tuple[Tensor, Tensor], mixed: bool, layout: str
) -> PagedBatch:
    """A batch whose caches hold codes, and whose dense keys and values are what these stand for."""
    counts = [3, 1, 2] if mixed else [1, 1, 1]
    batch = paged_batch([5, 1, 18], counts, layout=layout)
    generator = torch.Generator().manual_seed(1)
    pools: list[Tensor] = []
    dense: list[list[Tensor]] = []
    for pool, scale in zip((batch.k_cache, batch.v_cache), scales, strict=True):
        # Any code may lie anywhere, a NaN's too where no request has a token.
        codes = torch.randint(-100, 101, pool.shape, generator=generator).to(torch.int8)
        coded = codes if dtype is INT8 else (codes.float() / 64).to(E4M3)
        slots = slots_view(coded, layout)
        kept = []
        used = torch.zeros(slots.shape[:2], dtype=torch.bool)
        for request, length in enumerate(batch.seq_lens.tolist()):
            at = torch.arange(length)
            page = batch.block_table[request, at // slots.shape[1]].long()
            used[page, at % slots.shape[1]] = True
            wide = slots.float().double()[page, at % slots.shape[1]]
            kept.append(wide * (scale[:, None] if scale.dim() else scale).double())
        if dtype is E4M3:
            slots.view(torch.int8)[~used] = 0x7F
        pools.append(coded)
        dense.append(kept)
    return dataclasses.replace(
        batch, k_cache=pools[0], v_cache=pools[1], keys=dense[0], values=dense[1]
    )


@EACH_DTYPE
@EACH_LAYOUT
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("of_head", [False, True])
def test_attention_reads_what_the_codes_stand_for(
    dtype: torch.dtype, layout: str, mixed: bool, of_head: bool
) -> None:
    size = 1.0 if dtype is E4M3 else 1 / 64
    k_scale, v_scale = torch.tensor(0.7 * size), torch.tensor(1.3 * size)
    heads = paged_batch([1], [1]).k_cache.shape[2]
    if of_head:
        k_scale, v_scale = (s * torch.linspace(0.5, 2.0, heads) for s in (k_scale, v_scale))
    batch = coded_batch(dtype, (k_scale, v_scale), mixed, layout)
    expected = oracles.paged_attention(batch)
    starts = batch.query_start if mixed else None
    longest = max(batch.counts)
    out = fusedops.paged_attention(
        *(batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, starts),
        k_scale=k_scale,
        v_scale=v_scale,
        max_query_len=longest,
        layout=layout,
    )
    slots = slots_view(batch.k_cache, layout), slots_view(batch.v_cache, layout)
    options = Attention(batch.q.shape[-1] ** -0.5, True, 0, 0.0, k_scale, v_scale)
    batched = attend_batched(
        batch.q, *slots, batch.block_table, batch.seq_lens, starts, longest, options
    )
    for got in (out, batched):
        assert np.abs(oracles.floats(got) - expected).max() <= 1e-5


CALLS = ("append_paged_kv", "rope_append_paged_kv_", "paged_attention")


def call(name: str, **changed: Any) -> Any:
    """A good call of an operation with an e4m3 cache, but for what is changed."""
    token, caches = normal(1, HEADS, HEAD_DIM), coded_caches(E4M3)
    first = torch.zeros(1, dtype=torch.int32)
    arguments = {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": TABLE[:1],
        "k_scale": torch.ones(()),
        "v_scale": torch.ones(HEADS),
        **changed,
    }
    if name == "paged_attention":
        return fusedops.paged_attention(q=token, seq_lens=first, **arguments)
    arguments |= {"k": token, "v": token.clone(), "request_index": first, "positions": first}
    if name == "append_paged_kv":
        return fusedops.append_paged_kv(**arguments)
    rope = {"q": token.clone(), "cos_sin": fusedops.rope_table(HEAD_DIM, 4)}
    return fusedops.rope_append_paged_kv_(**arguments, **rope)


PLAIN = torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ConfigError, "k_cache is float8_e4m3fn .* but k_scale is None", {"k_scale": None}),
    (ConfigError, r"v_scale is None; .* shape \(\) or \(3,\)", {"v_scale": None}),
    (
        ConfigError,
        r"k_scale is float32 \(\) on cpu but k_cache is float32",
        {"k_cache": PLAIN, "v_cache": PLAIN.clone()},
    ),
    (
        ConfigError,
        "v_scale is float32 .* belong to caches of dtype float8_e4m3fn, int8",
        {"k_cache": PLAIN, "v_cache": PLAIN.clone(), "k_scale": None},
    ),
    (DTypeError, "k_scale is float64", {"k_scale": torch.ones((), dtype=torch.float64)}),
    (DTypeError, r"k_scale is 0.5 \(float\); accepted: a torch.Tensor or None", {"k_scale": 0.5}),
    (ShapeError, r"v_scale is .*accepted shape: \(\) or \(3,\)", {"v_scale": torch.ones(1)}),
    (ShapeError, r"k_scale is .*one for each KV head", {"k_scale": torch.ones(3, 1)}),
    (
        DeviceError,
        "k_cache is on cpu but v_scale is on meta",
        {"v_scale": torch.ones(3).to("meta")},
    ),
    (ConfigError, "k_scale .* holds 0.0; .* finite and above zero", {"k_scale": torch.zeros(())}),
    (ConfigError, "k_scale .* holds -2.0", {"k_scale": torch.tensor([1.0, -2.0, 1.0])}),
    (
        ConfigError,
        r"k_scale .* holds 1\.0+\d*e-39; .* at least 1\.1754944e-38 \(2\^-126",
        {"k_scale": torch.tensor(1e-39)},
    ),
    (ConfigError, "v_scale .* at least", {"v_scale": torch.tensor([1.0, 2.0**-127, 1.0])}),
    (ConfigError, "v_scale .* holds inf", {"v_scale": torch.tensor(math.inf)}),
    (ConfigError, "v_scale .* holds nan", {"v_scale": torch.tensor([1.0, 1.0, math.nan])}),
    (DTypeError, r"v_cache is int8 .*that of k_cache", {"v_cache": coded_caches(INT8)[0]}),
    (
        DTypeError,
        "k_cache is float8_e5m2 .*float32, float8_e4m3fn, int8 .*8 bits with k_scale and v_scale",
        {"k_cache": PLAIN.to(torch.float8_e5m2)},
    ),
]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("error", "message", "changed"), BAD, ids=[m for _, m, _ in BAD])
def test_bad_scales_and_caches_are_refused(
    name: str, error: type[Exception], message: str, changed: dict[str, Any]
) -> None:
    call(name)
    with pytest.raises(error, match=f"{name}: .*{message}"):
        call(name, **changed)


@EACH_DTYPE
def test_the_smallest_scale_stores_zeros_as_zeros(dtype: torch.dtype) -> None:
    """A quarter of it has an infinite reciprocal, which would make a NaN of each zero."""
    scale = torch.tensor(SMALLEST_SCALE)
    assert (scale / 4).reciprocal().isinf()
    values = torch.zeros(1, HEADS, HEAD_DIM)
    values[..., 1] = 3 * SMALLEST_SCALE
    caches, first = coded_caches(dtype), torch.zeros(1, dtype=torch.int32)
    scales = {"k_scale": scale, "v_scale": scale}
    fusedops.append_paged_kv(values, values, *caches, TABLE, first, first, **scales)
    assert caches[0][7, 0].float().flatten().tolist() == [0.0, 3.0, *[0.0] * 6] * HEADS
    one = torch.ones(1, dtype=torch.int32)
    out = fusedops.paged_attention(values, *caches, TABLE[:1], one, **scales)
    assert out.isfinite().all()


@EACH_DTYPE
@pytest.mark.parametrize("name", CALLS)
def test_b37_opcheck(dtype: torch.dtype, name: str) -> None:
    k, v = normal(3, HEADS, HEAD_DIM), normal(3, HEADS, HEAD_DIM, seed=1)
    index, positions = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 5, 2])
    caches, scales = coded_caches(dtype), (torch.tensor([0.1, 0.2, 0.3]), torch.tensor(0.1))
    arguments: dict[str, tuple[Any, ...]] = {
        "append_paged_kv": (k, v, *caches, TABLE, index, positions, *scales, "NHD"),
        "rope_append_paged_kv_": (
            *(k.clone(), k, v, positions, fusedops.rope_table(HEAD_DIM, 8), *caches),
            *(TABLE, index, *scales, "halves", "NHD"),
        ),
        "paged_attention": (
            *(k, *caches, TABLE, index, None, *scales),
            *(1, 0.3, True, 0, 0.0, "NHD"),
        ),
    }
    # Torch cannot compare e4m3 tensors in its test of the schema, which is the same for int8.
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype is INT8:
        tests.append("test_schema")
    op = getattr(torch.ops.fusedops, name).default
    torch.library.opcheck(op, arguments[name], test_utils=tests)


def test_a_compiled_step_keeps_its_effect_on_the_cache() -> None:
    k_scale, v_scale = torch.tensor(0.05), torch.tensor([0.1, 0.2, 0.3])

    def step(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
        requests = torch.arange(k.shape[0], dtype=torch.int32)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        fusedops.append_paged_kv(k * 2, v, k_cache, v_cache, TABLE, requests, at, **scales)
        lengths = (at + 1).int()
        return fusedops.paged_attention(k, k_cache, v_cache, TABLE, lengths, **scales)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    k, v = normal(3, HEADS, HEAD_DIM), normal(3, HEADS, HEAD_DIM, seed=1)
    ours, eager = coded_caches(INT8), coded_caches(INT8)
    at = torch.tensor([0, 0, 0])
    assert torch.equal(compiled(k, v, *ours, at), step(k, v, *eager, at))
    assert torch.equal(ours[0], eager[0])
    assert (ours[0] != UNTOUCHED).any()
