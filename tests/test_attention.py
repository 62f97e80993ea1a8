"""Attention over a paged KV cache: the host form and the form for unread metadata, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import PagedBatch, paged_batch
from torch import Tensor

from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    PositionError,
    ShapeError,
    UnsupportedError,
)
from fusedops.ops.activation import act_and_mul
from fusedops.ops.attention import paged_attention
from fusedops.ops.attention_host import _even_runs
from fusedops.ops.attention_torch import Attention, attend_batched
from fusedops.ops.kv_append import append_paged_kv
from fusedops.ops.norm import fused_add_rms_norm_, rms_norm
from fusedops.ops.paged import LAYOUTS, slots_view
from fusedops.ops.rope_kv import rope
from fusedops.ops.rope_table import rope_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
op = torch.ops.fusedops.paged_attention.default


def by_op(batch: PagedBatch, mixed: bool, **options: Any) -> Tensor:
    """The operation on CPU tensors."""
    return paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start if mixed else None,
        max_query_len=max(batch.counts) if mixed else 1,
        layout=batch.layout,
        **options,
    )


def by_batched(batch: PagedBatch, mixed: bool, **options: Any) -> Tensor:
    """The form that reads no metadata, as it runs on a GPU."""
    scale = options.pop("scale", None)
    return attend_batched(
        batch.q,
        slots_view(batch.k_cache, batch.layout),
        slots_view(batch.v_cache, batch.layout),
        batch.block_table,
        batch.seq_lens,
        batch.query_start if mixed else None,
        max(batch.counts) + 1 if mixed else 1,
        Attention(
            batch.q.shape[-1] ** -0.5 if scale is None else scale,
            options.pop("causal", True),
            options.pop("window", 0),
            options.pop("softcap", 0.0),
        ),
    )


EACH_FORM = pytest.mark.parametrize("form", [by_op, by_batched])
Form = Callable[..., Tensor]


def assert_close(out: Tensor, expected: np.ndarray) -> None:
    """Float32 inside, one rounding at the end; the weighted sum cancels, so ulps have a floor."""
    assert out.is_contiguous()
    assert np.isfinite(oracles.floats(out)).all()
    error = np.abs(oracles.floats(out) - expected)
    half_ulp = 0.0 if out.dtype == torch.float32 else 0.5 * oracles.ulp(expected, out.dtype)
    assert np.all(error <= half_ulp + 4e-6)


@EACH_FORM
@EACH_LAYOUT
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_order", [True, False])
def test_decode(form: Form, layout: str, dtype: torch.dtype, in_order: bool) -> None:
    batch = paged_batch([5, 1, 16, 17], dtype=dtype, layout=layout, in_order=in_order)
    assert_close(form(batch, mixed=False), oracles.paged_attention(batch))


@EACH_FORM
@EACH_LAYOUT
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_and_decodes_in_one_batch(
    form: Form, layout: str, dtype: torch.dtype
) -> None:
    batch = paged_batch([7, 9, 12, 4, 1], [7, 1, 5, 0, 1], dtype=dtype, layout=layout)
    assert_close(form(batch, mixed=True), oracles.paged_attention(batch))


@EACH_FORM
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 1},
        {"window": 3},
        {"window": 5},
        {"window": 100},
        {"window": 3, "causal": False},
        {"softcap": 2.0},
        {"softcap": 30.0, "window": 5},
        {"softcap": 1.0, "causal": False},
        {"scale": 0.7},
        {"scale": 0.25, "softcap": 3.0, "window": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("mixed", [False, True])
def test_options(form: Form, options: dict[str, Any], mixed: bool) -> None:
    counts = [6, 1, 3, 2] if mixed else None
    for layout in LAYOUTS:
        batch = paged_batch([6, 9, 13, 20], counts, layout=layout, seed=7)
        assert_close(form(batch, mixed=mixed, **options), oracles.paged_attention(batch, **options))


@EACH_FORM
@pytest.mark.parametrize("heads", [(5, 1), (12, 2), (7, 1), (9, 3), (4, 4), (1, 1)])
def test_any_group_of_query_heads(form: Form, heads: tuple[int, int]) -> None:
    batch = paged_batch([6, 3], [2, 3], heads=heads, head_dim=6)
    assert_close(form(batch, mixed=True), oracles.paged_attention(batch))


@EACH_FORM
@pytest.mark.parametrize("heads", [(40, 8), (24, 4), (28, 4), (9, 3), (8, 8)])
def test_b71_head_counts_of_real_models(form: Form, heads: tuple[int, int]) -> None:
    batch = paged_batch([9], heads=heads, head_dim=128, dtype=torch.bfloat16)
    assert_close(form(batch, mixed=False), oracles.paged_attention(batch))


@EACH_FORM
@EACH_LAYOUT
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mixed", [False, True])
def test_b73_unused_slots_never_leak(form: Form, layout: str, garbage: float, mixed: bool) -> None:
    batch = paged_batch([17], [3] if mixed else None, page_size=16, layout=layout, garbage=garbage)
    assert_close(form(batch, mixed=mixed), oracles.paged_attention(batch))
    windowed = form(batch, mixed=mixed, window=2, softcap=5.0)
    assert_close(windowed, oracles.paged_attention(batch, window=2, softcap=5.0))


@EACH_FORM
@pytest.mark.parametrize("mixed", [False, True])
def test_an_empty_request_gives_zeros(form: Form, mixed: bool) -> None:
    batch = paged_batch([0, 5, 0], [2, 3, 1] if mixed else None)
    out = form(batch, mixed=mixed)
    assert_close(out, oracles.paged_attention(batch))
    assert (out[0] == 0.0).all()
    assert (out[-1] == 0.0).all()
    assert (out[2 if mixed else 1] != 0.0).any()
    alone = paged_batch([0], [2] if mixed else None)
    assert (form(alone, mixed=mixed) == 0.0).all()


@EACH_FORM
def test_rows_behind_the_last_query_give_zeros(form: Form) -> None:
    batch = paged_batch([5, 6], [2, 3])
    padded = PagedBatch(**{**batch.__dict__, "q": torch.cat((batch.q, batch.q[:2]))})
    out = form(padded, mixed=True)
    assert torch.equal(out[:5], form(batch, mixed=True))
    assert (out[5:] == 0.0).all()


@EACH_FORM
@pytest.mark.parametrize("mixed", [False, True])
def test_b04_no_tokens_and_no_requests(form: Form, mixed: bool) -> None:
    batch = paged_batch([4, 0])
    q = torch.empty(0, 4, 8, dtype=torch.bfloat16)
    nothing = {
        "q": q,
        "k_cache": batch.k_cache.bfloat16(),
        "v_cache": batch.v_cache.bfloat16(),
        "counts": [0, 0],
    }
    if mixed:
        empty = PagedBatch(**{**batch.__dict__, **nothing})
        out = paged_attention(
            q,
            empty.k_cache,
            empty.v_cache,
            empty.block_table,
            empty.seq_lens,
            empty.query_start,
        )
    else:
        none = {"block_table": batch.block_table[:0], "seq_lens": batch.seq_lens[:0]}
        out = form(PagedBatch(**{**batch.__dict__, **nothing, **none}), mixed=False)
    assert out.shape == (0, 4, 8)
    assert out.dtype == torch.bfloat16


@EACH_FORM
def test_b10_b12_strided_queries_equal_their_copies(form: Form) -> None:
    batch = paged_batch([7, 9], [3, 2])
    wide = torch.zeros(5, 4 * 8 + 11)
    view = wide[:, 3:35].view(5, 4, 8)
    view.copy_(batch.q)
    swapped = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    expected = form(batch, mixed=True)
    for q in (view, swapped):
        out = form(PagedBatch(**{**batch.__dict__, "q": q}), mixed=True)
        assert out.is_contiguous()
        assert torch.equal(out, expected)


@EACH_FORM
def test_the_caches_may_be_views_of_one_pool(form: Form) -> None:
    batch = paged_batch([7, 9], [3, 2])
    both = torch.stack((batch.k_cache, batch.v_cache), 1)
    views = PagedBatch(**{**batch.__dict__, "k_cache": both[:, 0], "v_cache": both[:, 1]})
    assert_close(form(views, mixed=True), oracles.paged_attention(batch))


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    batch = paged_batch([7, 9, 3])
    out = by_op(batch, mixed=False)
    for request in range(3):
        alone = paged_attention(
            batch.q[request : request + 1],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[request : request + 1],
            batch.seq_lens[request : request + 1],
        )
        assert torch.equal(alone[0], out[request])


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan, math.inf])
@pytest.mark.parametrize(
    "lengths", [[8, 8, 8], [8, 7, 5], [9, 3, 6], [6, 0, 5, 7], [40, 3], [3, 40], [1, 1, 2, 5, 3]]
)
def test_requests_that_lie_evenly_are_attended_together(lengths: list[int], garbage: float) -> None:
    batch = paged_batch(lengths, garbage=garbage, in_order=True)
    out = by_op(batch, mixed=False)
    assert out.is_contiguous()
    assert_close(out, oracles.paged_attention(batch))


def test_runs_are_of_requests_that_lie_evenly() -> None:
    pages = [[0, 1], [2, 3], [4], [8], [7], [], [9, 11], [12], [13, 14], [14], [15]]
    runs = [(0, 3, 2), (3, 4, 0), (4, 5, 0), (5, 6, 0), (6, 7, 0), (7, 11, 1)]
    assert list(_even_runs(pages)) == runs


def test_metadata_outside_is_refused() -> None:
    batch = paged_batch([5, 6], [2, 3])
    tensors = [batch.q, batch.k_cache, batch.v_cache, batch.block_table]

    def attend(lengths: list[int], starts: list[int], table: Tensor | None = None) -> Tensor:
        q, k_cache, v_cache, block_table = tensors
        return paged_attention(
            q,
            k_cache,
            v_cache,
            block_table if table is None else table,
            torch.tensor(lengths).int(),
            torch.tensor(starts).int(),
            max_query_len=3,
        )

    attend([5, 6], [0, 2, 5])
    with pytest.raises(PositionError, match="request 1 has length 17; accepted are 0 to 16"):
        attend([5, 17], [0, 2, 5])
    with pytest.raises(PositionError, match="request 0 has length -1"):
        attend([-1, 6], [0, 2, 5])
    with pytest.raises(PositionError, match="length 2 but 3 queries"):
        attend([5, 2], [0, 2, 5])
    for page in (-1, 7):
        table = batch.block_table.clone()
        table[1, 1] = page
        with pytest.raises(PositionError, match="request 1 uses pages"):
            attend([5, 6], [0, 2, 5], table)
    for starts in ([1, 2, 5], [0, 3, 2], [0, 2, 6]):
        with pytest.raises(ShapeError, match="query_start is"):
            attend([5, 6], starts)
    with pytest.raises(ShapeError, match="raise max_query_len"):
        attend([5, 6], [0, 1, 5])


def test_unread_metadata_outside_never_reads_out_of_bounds() -> None:
    batch = paged_batch([5, 6], [2, 3])
    good = by_batched(batch, mixed=True)
    table = batch.block_table.clone()
    table[1, 1] = 7  # no such page: its two keys are not attended
    beyond = PagedBatch(**{**batch.__dict__, "block_table": table})
    out = by_batched(beyond, mixed=True)
    assert torch.equal(out[:2], good[:2])
    shorter = [batch.keys[0], batch.keys[1][:4]], [batch.values[0], batch.values[1][:4]]
    q, k, v = (oracles.floats(t) for t in (batch.q[2:3], shorter[0][1], shorter[1][1]))
    assert_close(out[2:3], oracles.attention(q, k, v, scale=8**-0.5))
    long = PagedBatch(**{**batch.__dict__, "seq_lens": torch.tensor([5, 2**31 - 1]).int()})
    assert torch.equal(by_batched(long, mixed=True)[:2], good[:2])
    few = attend_batched(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start,
        2,
        Attention(8**-0.5, True, 0, 0.0),
    )
    assert torch.equal(few[:4], good[:4])
    assert (few[4] == 0.0).all()


def test_bad_arguments_are_refused() -> None:
    batch = paged_batch([5, 6])
    good: dict[str, Any] = {
        "q": batch.q,
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
    }
    start = torch.tensor([0, 1, 2]).int()
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DTypeError, "q is float64", {"q": batch.q.double()}),
        (DTypeError, "k_cache is bfloat16", {"k_cache": batch.k_cache.bfloat16()}),
        (DTypeError, "v_cache is bfloat16", {"v_cache": batch.v_cache.bfloat16()}),
        (DTypeError, "block_table is int64", {"block_table": batch.block_table.long()}),
        (DTypeError, "seq_lens is int64", {"seq_lens": batch.seq_lens.long()}),
        (DTypeError, "query_start is int64", {"query_start": start.long()}),
        (ShapeError, "q is", {"q": batch.q[0]}),
        (ShapeError, "multiple of the 2 KV heads", {"q": batch.q[:, :3]}),
        (ShapeError, "k_cache is", {"q": batch.q[..., :6]}),
        (ShapeError, "k_cache is", {"k_cache": batch.k_cache[0]}),
        (ShapeError, "the shape of k_cache", {"v_cache": batch.v_cache[1:]}),
        (ShapeError, "block_table is", {"block_table": batch.block_table[0]}),
        (ShapeError, "one length for each request", {"seq_lens": batch.seq_lens[:1]}),
        (ShapeError, "one query a request", {"q": batch.q[:1]}),
        (ShapeError, "query_start is", {"query_start": start[:2]}),
        (DeviceError, "v_cache is on meta", {"v_cache": batch.v_cache.to("meta")}),
        (DeviceError, "block_table is on meta", {"block_table": batch.block_table.to("meta")}),
        (DeviceError, "seq_lens is on meta", {"seq_lens": batch.seq_lens.to("meta")}),
        (DeviceError, "query_start is on meta", {"query_start": start.to("meta")}),
        (ConfigError, "NHD, HND", {"layout": "nhd"}),
        (ConfigError, "without query_start", {"max_query_len": 2}),
        (ConfigError, "max_query_len=0", {"max_query_len": 0, "query_start": start}),
        (ConfigError, "window=-1", {"window": -1}),
        (ConfigError, "softcap=-1.0", {"softcap": -1.0}),
        (ConfigError, "softcap=nan", {"softcap": math.nan}),
    ]
    for error, message, change in refused:
        with pytest.raises(error, match=message):
            paged_attention(**{**good, **change})
    with pytest.raises(UnsupportedError, match="inference only"):
        paged_attention(**{**good, "q": batch.q.clone().requires_grad_()})


@settings(max_examples=40)
@given(
    shape=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=3),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    page_size=st.sampled_from([1, 3, 8]),
    window=st.sampled_from([0, 1, 2, 5]),
    softcap=st.sampled_from([0.0, 3.0]),
    causal=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_any_small_batch(
    shape: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    page_size: int,
    window: int,
    softcap: float,
    causal: bool,
    layout: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    lengths = [length for length, _ in shape]
    counts = [min(count, length) if length else count for length, count in shape]
    if not max(counts):
        counts[0] = 1
    batch = paged_batch(
        lengths,
        counts,
        heads=(group * kv_heads, kv_heads),
        head_dim=4,
        page_size=page_size,
        layout=layout,
        dtype=dtype,
        seed=seed,
    )
    options = {"window": window, "softcap": softcap, "causal": causal}
    expected = oracles.paged_attention(batch, **options)
    assert_close(by_op(batch, mixed=True, **options), expected)
    assert_close(by_batched(batch, mixed=True, **options), expected)


def test_decode_follows_torch_on_a_long_context() -> None:
    batch = paged_batch([600], heads=(9, 3), head_dim=64, page_size=16)
    k, v = (t[0].transpose(0, 1).repeat_interleave(3, 0) for t in (batch.keys, batch.values))
    q = batch.q.transpose(0, 1)
    expected = ((q @ k.mT) * 0.125).double().softmax(-1) @ v.double()
    for form in (by_op, by_batched):
        assert_close(form(batch, mixed=False), expected.transpose(0, 1).numpy())


@EACH_LAYOUT
def test_b37_opcheck(layout: str) -> None:
    batch = paged_batch([5, 6], [2, 1], layout=layout)
    tensors = (batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens)
    options = (0.3, True, 0, 0.0, layout)
    torch.library.opcheck(op, (*tensors, batch.query_start, None, None, 2, *options))
    torch.library.opcheck(op, (batch.q[:2], *tensors[1:], None, None, None, 1, *options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b39_a_compiled_decoder_layer_keeps_its_effects_at_any_m(backend: str) -> None:
    heads, kv_heads, head_dim, hidden = 4, 2, 8, 32
    generator = torch.Generator().manual_seed(39)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    qkv_weight, gate_up = normal((heads + 2 * kv_heads) * head_dim, hidden), normal(64, hidden)
    norm_weight, cos_sin = torch.ones(hidden), rope_table(head_dim, 16)

    def layer(
        x: Tensor,
        residual: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        positions: Tensor,
    ) -> Tensor:
        requests = torch.arange(x.shape[0], dtype=torch.int32)
        fused_add_rms_norm_(x, residual, norm_weight)
        qkv = (x @ qkv_weight.T).view(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        q, k = rope(q, k, positions, cos_sin)
        append_paged_kv(k, v, k_cache, v_cache, table, requests, positions)
        lengths = (positions + 1).int()
        out = paged_attention(q, k_cache, v_cache, table, lengths).flatten(1)
        return act_and_mul(rms_norm(out + residual, norm_weight) @ gate_up.T)

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for rows in (2, 3, 5):
        inputs = [
            normal(rows, hidden),
            normal(rows, hidden),
            normal(8, 4, 2, 8),
            normal(8, 4, 2, 8),
        ]
        table = torch.arange(8, dtype=torch.int32)[:rows, None]
        positions = torch.arange(rows) % 4
        ours, eager = [t.clone() for t in inputs], [t.clone() for t in inputs]
        assert torch.equal(compiled(*ours, table, positions), layer(*eager, table, positions))
        for one, other, before in zip(ours, eager, inputs, strict=True):
            assert torch.equal(one, other)
            assert not torch.equal(one, before)


@EACH_FORM
@EACH_LAYOUT
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    ("options", "place", "unclean"),
    [
        ({}, 8, [1, 2]),  # the second last of the queries at 7, 8 and 9
        ({"window": 3}, 6, [0, 1]),
        ({"window": 3, "softcap": 5.0}, 0, []),
        ({"window": 2, "causal": False}, 6, [0]),
    ],
)
def test_a_masked_key_does_not_show(
    form: Form,
    layout: str,
    garbage: float,
    which: str,
    options: dict[str, Any],
    place: int,
    unclean: list[int],
) -> None:
    batch = paged_batch([10, 7], [3, 7], page_size=4, layout=layout)
    clean = form(batch, mixed=True, **options)
    cache = slots_view(getattr(batch, which), layout)
    cache[int(batch.block_table[0, place // 4]), place % 4, 0, 1] = garbage
    heads = batch.q.shape[1] // cache.shape[2]  # those that share the KV head
    got = form(batch, mixed=True, **options)
    attended = torch.zeros(got.shape, dtype=torch.bool)
    attended[unclean, :heads] = True
    if which == "v_cache":
        assert torch.equal(
            got[attended].isfinite().logical_not().any(), torch.tensor(bool(unclean))
        )
        attended[..., [0, *range(2, got.shape[2])]] = False
        bad = got[attended]
        assert bad.isnan().all() if math.isnan(garbage) else (bad == garbage).all()
    torch.testing.assert_close(got[~attended], clean[~attended], rtol=0, atol=2e-6)


def test_a_masked_value_does_not_show_in_a_whole_prompt() -> None:
    """Where torch's own attention is called, without a mask to look at."""
    batch = paged_batch([6], [6], page_size=4)
    clean = by_op(batch, mixed=True)
    slots_view(batch.v_cache, "NHD")[int(batch.block_table[0, 1]), 0] = math.nan
    got = by_op(batch, mixed=True)
    torch.testing.assert_close(got[:4], clean[:4], rtol=0, atol=2e-6)
    assert got[4:].isnan().all()
