"""Operations against unusual callers: autocast, grad modes, threads, odd strides, stale caches."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import oracles
import pytest
import torch
from oracles import paged_batch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops.errors import DTypeError, LayoutError, PositionError, UnsupportedError
from fusedops.ops import op as op_module
from fusedops.ops.op import OPS
from fusedops.ops.paged import LAYOUTS

PAGE_SIZE, HKV, GROUP, D, WIDTH = 4, 2, 3, 8, 4
HQ = HKV * GROUP
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def strided(x: Tensor, kind: str) -> Tensor:
    """A copy of ``x`` whose memory is laid out in another way."""
    if kind == "reversed dimensions":
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if kind == "every second":
        return torch.stack((x, x), -1)[..., 0]
    wider = x.new_zeros([size + 1 for size in x.shape])
    return wider[tuple(slice(1, None) for _ in x.shape)].copy_(x)


class Model:
    """Random requests in a paged cache: what a decoder layer does, and the dense keys and values.

    The pages lie in reverse order in a pool full of NaN; nothing that is stored is ever NaN.
    """

    def __init__(self, requests: int, layout: str, dtype: torch.dtype, kind: str) -> None:
        self.generator = torch.Generator().manual_seed(requests)
        pages = requests * WIDTH + 1
        inner = (PAGE_SIZE, HKV) if layout == "NHD" else (HKV, PAGE_SIZE)
        pool = torch.full((pages, *inner, D), math.nan, dtype=dtype)
        self.k_cache, self.v_cache = strided(pool, kind), strided(pool, kind)
        order = torch.arange(pages, dtype=torch.int32).flip(0)[: requests * WIDTH]
        self.table = strided(order.view(requests, WIDTH), kind)
        self.layout, self.dtype, self.kind = layout, dtype, kind
        self.lengths = [0] * requests
        self.keys = [torch.zeros(WIDTH * PAGE_SIZE, HKV, D, dtype=dtype) for _ in self.lengths]
        self.values = [keys.clone() for keys in self.keys]
        self.cos_sin = strided(fusedops.rope_table(D, WIDTH * PAGE_SIZE), kind)

    def normal(self, tokens: int, heads: int) -> Tensor:
        values = torch.randn(tokens, heads, D, generator=self.generator).to(self.dtype)
        return strided(values, self.kind)

    def step(self, counts: list[int], padding: int, index: torch.dtype, **options: Any) -> None:
        """Append ``counts`` new tokens and compare the attention of all of them."""
        where = [
            (request, self.lengths[request] + number)
            for request, count in enumerate(counts)
            for number in range(count)
        ]
        padded = [*where, *[(0, -1)] * padding]
        positions = strided(torch.tensor([p for _, p in padded], dtype=index), self.kind)
        requests = strided(torch.tensor([r for r, _ in padded], dtype=torch.int32), self.kind)
        q, k, v = (self.normal(len(padded), heads) for heads in (HQ, HKV, HKV))
        q_out, k_out = fusedops.rope(q, k, positions.clamp(min=0), self.cos_sin)
        caches = self.k_cache, self.v_cache
        fusedops.rope_append_paged_kv_(
            q, k, v, positions, self.cos_sin, *caches, self.table, requests, layout=self.layout
        )
        assert torch.equal(q, q_out)
        assert torch.equal(k, k_out)
        for token, (request, position) in enumerate(where):
            self.keys[request][position] = k[token]
            self.values[request][position] = v[token]
        for request, count in enumerate(counts):
            self.lengths[request] += count
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        out = fusedops.paged_attention(
            q,
            *caches,
            self.table,
            strided(lengths, self.kind),
            strided(starts, self.kind),
            max_query_len=max(1, *counts),
            layout=self.layout,
            **options,
        )
        for request, count in enumerate(counts):
            rows = slice(int(starts[request]), int(starts[request]) + count)
            self.compare(out[rows], q[rows], request, options)
        assert (out[int(starts[-1]) :] == 0).all()
        single = self.normal(len(counts), HQ)
        out = fusedops.paged_attention(
            single, *caches, self.table, lengths, layout=self.layout, **options
        )
        for request in range(len(counts)):
            rows = slice(request, request + 1)
            self.compare(out[rows], single[rows], request, options)

    def compare(self, out: Tensor, q: Tensor, request: int, options: dict[str, Any]) -> None:
        length = self.lengths[request]
        if not length or not len(q):
            assert (out == 0).all()
            return
        keys, values = (oracles.floats(t[request][:length]) for t in (self.keys, self.values))
        options = {"scale": D**-0.5, **options}
        expected = oracles.attention(oracles.floats(q), keys, values, **options)
        half_ulp = 0.0 if self.dtype == torch.float32 else 0.5 * oracles.ulp(expected, self.dtype)
        assert (abs(oracles.floats(out) - expected) <= half_ulp + 6e-6).all()


@EACH_LAYOUT
@pytest.mark.parametrize("kind", ["reversed dimensions", "every second", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": 1}, {"window": 3, "causal": False}, {"softcap": 4.0}], ids=str
)
def test_b10_b12_b73_decoder_steps_with_every_tensor_strided(
    layout: str, kind: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = Model(3, layout, dtype, kind)
    model.step([5, 0, 9], 0, torch.int64, **options)
    model.step([1, 1, 0], 3, torch.int32, **options)
    model.step([4, 3, 1], 20, torch.int64, **options)
    alone = Model(1, layout, dtype, kind)
    alone.step([4], 0, torch.int32, **options)
    alone.step([0], 2, torch.int64, **options)


@pytest.mark.parametrize("length", [4, 5, 8])
@pytest.mark.parametrize("window", [0, 1, 2])
def test_b04_one_request_without_queries(length: int, window: int) -> None:
    batch = paged_batch([length], [0])
    out = fusedops.paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start,
        window=window,
    )
    assert out.shape == (0, 4, 8)


@EACH_LAYOUT
def test_one_tensor_as_both_caches_is_refused(layout: str) -> None:
    cache, index = torch.zeros(4, 2, 2, 8), torch.zeros(1, dtype=torch.int32)
    q, table = torch.randn(1, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    cos_sin = fusedops.rope_table(8, 4)
    for _ in range(2):  # also where the same arguments' shapes were accepted before
        fusedops.append_paged_kv(q, q, cache, cache.clone(), table, index, index, layout=layout)
        with pytest.raises(LayoutError, match="append_paged_kv: k_cache and v_cache are one"):
            fusedops.append_paged_kv(q, q, cache, cache, table, index, index, layout=layout)
    cache.zero_()
    with pytest.raises(LayoutError, match="rope_append_paged_kv_: k_cache and v_cache are one"):
        fusedops.rope_append_paged_kv_(
            q, q.clone(), q, index, cos_sin, cache, cache, table, index, layout=layout
        )
    assert not cache.any()


@pytest.mark.parametrize("position", [2**31 - 1, 2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("count", [3, 40])
def test_b67_b75_huge_positions_are_refused_with_nothing_written(position: int, count: int) -> None:
    model = Model(3, "NHD", torch.float32, "offset")
    q, k, v = (model.normal(count, heads) for heads in (HQ, HKV, HKV))
    before = q.clone(), k.clone()
    positions = torch.full((count,), -(2**63))
    positions[1] = position
    requests = torch.zeros(count, dtype=torch.int32)
    rest = model.k_cache, model.v_cache, model.table, requests
    with pytest.raises(PositionError, match=str(position)):
        fusedops.rope_append_paged_kv_(q, k, v, positions, model.cos_sin, *rest)
    with pytest.raises(PositionError, match="append_paged_kv"):
        fusedops.append_paged_kv(k, v, *rest, positions)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert model.k_cache.isnan().all()
    positions[1] = -1
    fusedops.rope_append_paged_kv_(q, k, v, positions, model.cos_sin, *rest)
    assert model.k_cache.isnan().all()


def test_requests_may_share_their_first_pages() -> None:
    batch = paged_batch([7, 6, 8], in_order=True)
    table = batch.block_table.clone()
    table[1:, 0] = table[0, 0]
    keys, values = ([*t] for t in (batch.keys, batch.values))
    for dense in (keys, values):
        for request in (1, 2):
            dense[request] = torch.cat((dense[0][:4], dense[request][4:]))
    out = fusedops.paged_attention(batch.q, batch.k_cache, batch.v_cache, table, batch.seq_lens)
    for request in range(3):
        q, k, v = (oracles.floats(t[request]) for t in (batch.q[:, None], keys, values))
        expected = oracles.attention(q, k, v, scale=8**-0.5)[0]
        assert abs(oracles.floats(out[request]) - expected).max() <= 4e-6


Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "normal": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def decode_inputs(rows: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "qkv": torch.randn(rows, 10, D, generator=generator),
        "k_cache": torch.zeros(8, PAGE_SIZE, HKV, D),
        "v_cache": torch.zeros(8, PAGE_SIZE, HKV, D),
        "table": torch.arange(7, -1, -1, dtype=torch.int32)[:rows, None].contiguous(),
        "positions": torch.arange(rows, dtype=torch.int32) % PAGE_SIZE,
        "requests": torch.arange(rows, dtype=torch.int32),
        "cos_sin": fusedops.rope_table(D, 8),
    }


def decode(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    positions: Tensor,
    requests: Tensor,
    cos_sin: Tensor,
) -> Tensor:
    q, k, v = qkv.split((HQ, HKV, HKV), 1)
    fusedops.rope_append_paged_kv_(q, k, v, positions, cos_sin, k_cache, v_cache, table, requests)
    return fusedops.paged_attention(q, k_cache, v_cache, table, positions + 1)


@pytest.mark.parametrize("called", list(MODES))
@pytest.mark.parametrize("made", list(MODES))
def test_tensors_of_one_grad_mode_serve_in_another(made: str, called: str) -> None:
    expected = decode(**decode_inputs())
    with MODES[made]():
        inputs = decode_inputs()
    if made == "inference" and called != "inference":
        before = inputs["qkv"].clone()
        refused = pytest.raises(UnsupportedError, match=r"made under torch\.inference_mode\(\)")
        with refused, MODES[called]():
            decode(**inputs)
        assert torch.equal(inputs["qkv"], before)
        assert not inputs["k_cache"].any()
        return
    with MODES[called]():
        assert torch.equal(decode(**inputs), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b39_rope_append_and_attention_compile_without_a_break_at_any_m(backend: str) -> None:
    compiled = torch.compile(decode, fullgraph=True, backend=backend, dynamic=True)
    for rows in (1, 2, 3, 5):
        ours, eager = decode_inputs(rows), decode_inputs(rows)
        assert torch.equal(compiled(**ours), decode(**eager))
        for name, tensor in ours.items():
            assert torch.equal(tensor, eager[name]), name
        assert ours["k_cache"].any()


def test_b37_fake_tensors_are_checked_and_compute_nothing() -> None:
    real = decode_inputs()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in real.items()}
        out = decode(**fake)
        assert (out.shape, out.dtype, out.device.type) == ((3, HQ, D), torch.float32, "cpu")
        with pytest.raises(DTypeError, match="k_cache is float64"):
            decode(**{**fake, "k_cache": fake["k_cache"].double()})
    assert not real["k_cache"].any()


def test_threads_in_inference_mode_decode_alike() -> None:
    expected = decode(**decode_inputs())
    failures: list[str] = []

    def work() -> None:
        with torch.inference_mode():
            for _ in range(30):
                if not torch.equal(decode(**decode_inputs()), expected):
                    failures.append("another result")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.fixture
def default_dtype() -> Iterator[None]:
    """float64 and the meta device as torch's defaults."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_torchs_default_dtype_and_device_change_nothing(request: pytest.FixtureRequest) -> None:
    inputs, expected = decode_inputs(), decode(**decode_inputs())
    many = {name: value.repeat(*[1] * value.dim()) for name, value in inputs.items()}
    request.getfixturevalue("default_dtype")
    got = decode(**many)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 7}], ids=str)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_autocast_changes_nothing(options: dict[str, Any], backend: str | None) -> None:
    batch = paged_batch([70, 33], [5, 33], heads=(8, 2), head_dim=64, page_size=16)
    decoding = paged_batch([70, 33], heads=(8, 2), head_dim=64, page_size=16)
    weight, table = torch.ones(64), fusedops.rope_table(64, 64)

    def call(q: Tensor, single: Tensor) -> Tensor:
        caches = batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens
        chunk = fusedops.paged_attention(q, *caches, batch.query_start, max_query_len=33, **options)
        caches = decoding.k_cache, decoding.v_cache, decoding.block_table, decoding.seq_lens
        step = fusedops.paged_attention(single, *caches, **options)
        turned, _ = fusedops.rope(chunk, chunk, torch.arange(38), table)
        return torch.cat((fusedops.rms_norm(turned, weight), step))

    expected = call(batch.q, decoding.q)
    compiled = torch.compile(call, fullgraph=True, backend=backend) if backend else call
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(weight[None], weight[:, None]).dtype == torch.bfloat16
        assert torch.equal(compiled(batch.q, decoding.q), expected)


def test_autocast_keeps_in_place_effects_and_checks() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.ones(8)
    total = x + residual
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fusedops.fused_add_rms_norm_(x, residual, weight)
        with pytest.raises(DTypeError, match="weight is float64"):
            fusedops.rms_norm(x, weight.double())
        with pytest.raises(UnsupportedError, match="inference only"):
            fusedops.rms_norm(x.clone().requires_grad_(), weight)
    assert torch.equal(residual, total)
    assert torch.equal(x, fusedops.rms_norm(total, weight))


def test_an_accepted_signature_lets_nothing_else_pass() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    for _ in range(2):
        fusedops.rms_norm(x, weight)
        with pytest.raises(DTypeError):
            fusedops.rms_norm(x, weight.double())
        with pytest.raises(fusedops.ShapeError):
            fusedops.rms_norm(x, weight[:7])
        with pytest.raises(fusedops.DeviceError):
            fusedops.rms_norm(x, weight.to("meta"))
        with pytest.raises(UnsupportedError):
            fusedops.rms_norm(x.clone().requires_grad_(), weight)
    table = fusedops.rope_table(8, 4)
    for bad in (4, -1):  # values are looked at whether or not the signature is known
        fusedops.rope(x[:, None], x[:, None], torch.arange(4), table)
        with pytest.raises(PositionError):
            fusedops.rope(x[:, None], x[:, None], torch.tensor([0, 1, 2, bad]), table)
    half = x.half().expand(4, 8)
    fusedops.rope_(half[:1, None].clone(), half[:1, None].clone(), torch.arange(1), table)
    overlapping = x[:1, None].expand(4, 1, 8)
    for _ in range(2):
        fusedops.rope_(x[:, None].clone(), x[:, None].clone(), torch.arange(4), table)
        with pytest.raises(LayoutError):
            fusedops.rope_(overlapping, x[:, None].clone(), torch.arange(4), table)


def test_accepted_signatures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_module, "_SIGNATURE_LIMIT", 8)
    rms_norm, weight = OPS["rms_norm"], torch.ones(8)
    rms_norm._accepted.clear()
    for rows in range(30):
        fusedops.rms_norm(torch.ones(rows, 8), weight)
        assert 1 <= len(rms_norm._accepted) <= 8
