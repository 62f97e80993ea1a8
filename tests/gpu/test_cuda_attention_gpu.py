"""Decode attention by csrc on a GPU: against float64 and torch, what is not attended, replays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cuda_call_cases import results_in_poisoned_memory
from cuda_cases import PROVIDER, assert_same_bits, captured
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES
from fusedops.ops.attention import paged_attention
from fusedops.ops.kv_append import append_paged_kv
from fusedops.ops.kv_scale import CODE_DTYPES
from fusedops.ops.paged import LAYOUTS, slots_view
from fusedops.providers.base import Usage, use_provider
from fusedops.providers.cuda_attention import HEAD_DIMS, PAGED_ATTENTION

COVERS = (
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_call_cases.py",
    "csrc/attention_decode.cu",
    "fusedops/ops/attention.py",
    "fusedops/ops/attention_torch.py",
    "fusedops/ops/kv_scale.py",
    "fusedops/ops/paged.py",
)

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 333, 1024, 1025, 4097)

WEIGHT_ERROR = {BF16: 2.0**-14, F16: 2.0**-16, F32: 2.0**-17}
"""Bound of a weight's relative error: of its split, of scores summed in float32, of 2^x."""


@pytest.fixture(autouse=True)
def usage() -> Iterator[Usage]:
    with use_provider(PROVIDER) as found:
        yield found
    # Calls inside a ``use_provider`` of the test's own are counted there, not here.
    assert sum(found.calls.values()) > 0
    assert {provider for _, provider in found.calls} == {PROVIDER}


@dataclass
class Step:
    """A decode step over a pool whose unused slots hold garbage.

    ``options`` are the operation's; ``window``, ``softcap`` and ``scale`` count in ``exact``.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lengths: Tensor
    options: dict[str, Any]

    def run(self) -> Tensor:
        return paged_attention(
            self.q, self.k_cache, self.v_cache, self.table, self.lengths, **self.options
        )

    def by_torch(self) -> Tensor:
        with use_provider("torch"):
            return self.run()

    def exact(self, request: int) -> tuple[Tensor, Tensor]:
        """float64 result of a request (Hq, D), and the weighted sum of magnitudes."""
        options, layout = self.options, self.options["layout"]
        length, pages = int(self.lengths[request]), self.k_cache.shape[0]
        page_size = slots_view(self.k_cache, layout).shape[1]
        window = options.get("window", 0)
        low = max(0, length - window) if window else 0
        end = max(low, min(length, self.table.shape[1] * page_size))
        positions = torch.arange(low, end, device="cuda")
        page = self.table[request].long()[positions // page_size]
        is_there = (page >= 0) & (page < pages)
        page, slot = page[is_there], (positions % page_size)[is_there]
        query_heads, head_dim = self.q.shape[1:]
        if not len(page):
            return self.q[request].double() * 0, self.q[request].double() * 0
        wide = []
        for cache, scale in ((self.k_cache, "k_scale"), (self.v_cache, "v_scale")):
            rows = slots_view(cache, layout).view(
                torch.int8 if cache.dtype in CODE_DTYPES else cache.dtype
            )[page, slot]
            rows = rows.view(cache.dtype).double()
            given = options.get(scale)
            wide.append(rows if given is None else rows * given.double().reshape(-1, 1))
        k, v = (x.repeat_interleave(query_heads // x.shape[1], 1) for x in wide)
        scores = torch.einsum("hd,thd->ht", self.q[request].double(), k)
        scores = scores * options.get("scale", head_dim**-0.5)
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        weights = scores.softmax(1)
        return torch.einsum("ht,thd->hd", weights, v), torch.einsum("ht,thd->hd", weights, v.abs())

    def require_right(self, got: Tensor | None = None) -> None:
        out = self.run() if got is None else got
        peer = self.by_torch().double()
        errors, peers, least = [], [], []
        for request in range(len(self.lengths)):
            exact, magnitude = self.exact(request)
            error = (out[request].double() - exact).abs()
            half_ulp = torch.finfo(self.q.dtype).eps / 2
            bound = half_ulp * exact.abs() + WEIGHT_ERROR[self.q.dtype] * magnitude + 1e-7
            assert error.le(bound).all(), (request, int(self.lengths[request]))
            errors.append(error)
            peers.append(peer[request] - exact)
            least.append(half_ulp * exact / 4 + WEIGHT_ERROR[self.q.dtype] * magnitude / 8)
        norm = torch.stack(errors).norm()
        assert norm <= 2 * max(torch.stack(peers).norm(), torch.stack(least).norm())


def garbage(dtype: torch.dtype) -> float:
    return math.nan if dtype is not torch.int8 else 127.0


def step(
    lengths: tuple[int, ...] = LENGTHS,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    *,
    page_size: int = 16,
    layout: str = "NHD",
    cached: torch.dtype | None = None,
    filler: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Step:
    """Random tokens at random pages of a pool full of garbage, entries behind them too."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    cached = cached or dtype
    query_heads, kv_heads = heads
    needed = [-(-n // page_size) for n in lengths]
    width, pages = max(needed) + 2, sum(needed) + 3
    order = torch.randperm(pages, generator=generator, device="cuda").int()
    table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32, device="cuda")
    stored = torch.zeros(pages, page_size, dtype=torch.bool, device="cuda")
    taken = 0
    for request, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        own = order[taken : taken + count]
        table[request, :count] = own
        taken += count
        position = torch.arange(length, device="cuda")
        stored[own.long()[position // page_size], position % page_size] = True
    given: dict[str, Any] = {"layout": layout, **options}
    if cached in CODE_DTYPES:
        given["k_scale"] = torch.linspace(0.01, 0.02, kv_heads, device="cuda")
        given["v_scale"] = torch.tensor(0.03, device="cuda")
    pools = []
    for _ in range(2):
        values = normal(pages, page_size, kv_heads, head_dim)
        if cached in CODE_DTYPES:
            values = (values * 40).clamp(-127, 127)
        values = values.round() if cached is torch.int8 else values
        unused = garbage(cached) if filler is None else filler
        values = torch.where(stored[:, :, None, None], values, unused).to(cached)
        pools.append(values.transpose(1, 2).contiguous() if layout == "HND" else values)
    q = (1.5 * normal(len(lengths), query_heads, head_dim)).to(dtype)
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Step(q, *pools, table, lens, given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_every_head_dim_layout_and_dtype(dtype: torch.dtype, head_dim: int, layout: str) -> None:
    step(head_dim=head_dim, dtype=dtype, layout=layout).require_right()


@pytest.mark.parametrize("cached", CODE_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_8_bit_caches(dtype: torch.dtype, head_dim: int, cached: torch.dtype) -> None:
    step(head_dim=head_dim, dtype=dtype, cached=cached).require_right()
    step((700, 5), head_dim=head_dim, dtype=dtype, cached=cached, layout="HND").require_right()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9, 16, 32])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_every_group_of_query_heads(dtype: torch.dtype, group: int) -> None:
    step((0, 1, 100, 999), (3 * group, 3), dtype=dtype, page_size=32).require_right()


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
def test_every_page_size(page_size: int) -> None:
    for layout in LAYOUTS:
        step(page_size=page_size, layout=layout).require_right()


@pytest.mark.parametrize("window", [1, 16, 17, 100, 1024, 2**40])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_windows(dtype: torch.dtype, window: int) -> None:
    step(dtype=dtype, window=window).require_right()
    step((1024, 7), dtype=dtype, window=window, causal=False).require_right()


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_soft_caps_and_scales(dtype: torch.dtype) -> None:
    for head_dim in HEAD_DIMS:
        step(head_dim=head_dim, dtype=dtype, softcap=5.0, window=90).require_right()
    step(dtype=dtype, scale=0.5).require_right()
    step(dtype=dtype, scale=-0.1).require_right()
    step(dtype=dtype, scale=0.0).require_right()


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64, 256])
def test_batches_from_one_cluster_of_sixteen_to_many_blocks(batch: int) -> None:
    lengths = tuple((1024 - 37 * i) % 1025 for i in range(batch))
    step(lengths, (32, 8)).require_right()
    step(lengths, (16, 8), 64, F16, page_size=32, layout="HND").require_right()


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_every_length_from_0_to_4097(dtype: torch.dtype, batch: int) -> None:
    """One sequence, of which each request attends another length; all lengths in few calls."""
    full = step((4112,), (4, 1), 64, dtype)
    q = full.q.double()[0]
    k, v = (
        cache[full.table[0, :257].long()].flatten(0, 1)[:, 0].double()
        for cache in (full.k_cache, full.v_cache)
    )
    scores = q @ k.T / 8
    lengths = list(range(4098)) if batch > 1 else [*range(130), *range(1000, 1050), 4095, 4097]
    for first in range(0, len(lengths), batch):
        some = torch.tensor(lengths[first : first + batch], device="cuda")
        count = len(some)
        full.lengths = some.int()
        full.q = q.to(dtype).expand(count, -1, -1).contiguous()
        table, full.table = full.table, full.table[:1].expand(count, -1)
        hidden = torch.arange(len(k), device="cuda") >= some[:, None]
        weights = scores.expand(count, -1, -1).masked_fill(hidden[:, None], -math.inf).softmax(2)
        exact = weights.nan_to_num(0.0) @ v
        magnitude = weights.nan_to_num(0.0) @ v.abs()
        error = (full.run().double() - exact).abs()
        half_ulp = torch.finfo(dtype).eps / 2
        assert error.le(half_ulp * exact.abs() + WEIGHT_ERROR[dtype] * magnitude + 1e-7).all()
        full.table = table


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_b73_what_unused_slots_hold_does_not_show(dtype: torch.dtype, filler: float) -> None:
    for layout in LAYOUTS:
        clean = step((17, 1, 0, 40), dtype=dtype, layout=layout, filler=0.0)
        dirty = step((17, 1, 0, 40), dtype=dtype, layout=layout, filler=filler)
        out = dirty.run()
        assert out.isfinite().all()
        assert_same_bits(out, clean.run())
        dirty.require_right(out)


def test_keys_before_the_window_do_not_show() -> None:
    dirty = step((1000,), window=100)
    clean = dirty.run()
    old = dirty.table[0, : 900 // 16].long()
    for cache in (dirty.k_cache, dirty.v_cache):
        cache[old] = math.nan
        cache[dirty.table[0, 900 // 16].long(), : 900 % 16] = math.inf
    assert_same_bits(dirty.run(), clean)


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_infinite_and_nan_values_show_where_they_are_attended(dtype: torch.dtype) -> None:
    odd = step((1000, 1000), (4, 1), 64, dtype)
    page, slot = odd.table[0].long()[500 // 16], 500 % 16
    odd.v_cache[page, slot, 0, 3] = math.inf
    odd.v_cache[page, slot, 0, 4] = -math.inf
    odd.v_cache[page, slot, 0, 5] = math.nan
    out, right = odd.run(), odd.by_torch()
    assert out[0, :, 3].eq(math.inf).all()
    assert out[0, :, 4].eq(-math.inf).all()
    assert torch.equal(out.isnan(), right.isnan())
    odd.k_cache[page, slot, 0, 0] = math.nan
    out = odd.run()
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    odd.k_cache[odd.table[0, :63].long(), :, 0, 0] = -math.inf
    odd.q[0] = odd.q[0].abs()
    assert odd.run()[0].isnan().all()
    assert odd.by_torch()[0].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_pages_and_lengths_outside_are_not_attended(dtype: torch.dtype) -> None:
    odd = step((608, 608, 608, 608, 5), dtype=dtype)  # whole pages
    odd.table[0, 3], odd.table[0, 20], odd.table[1, 0] = -1, 2**31 - 1, odd.k_cache.shape[0]
    odd.table[2] = -7
    odd.lengths[3] = 10**6  # its row's last entries are outside, too
    odd.lengths[4] = -3
    out = odd.run()
    odd.require_right(out)
    assert out[2].eq(0).all()
    assert out[4].eq(0).all()


def test_views_of_any_stride_and_address() -> None:
    for dtype, offset, pitch in ((BF16, 1, 131), (F16, 8, 136), (BF16, 2, 130), (F32, 1, 129)):
        given = step((77, 300), dtype=dtype)
        for name in ("k_cache", "v_cache"):
            cache = getattr(given, name)
            shape = (*cache.shape[:3], pitch)
            wide = torch.full(
                (torch.Size(shape).numel() + offset,), math.nan, dtype=dtype, device="cuda"
            )
            view = wide[offset:].view(shape)[..., :128]
            setattr(given, name, view.copy_(cache))
        wide = torch.zeros(2, 8 * pitch + offset, dtype=dtype, device="cuda")
        q = wide[:, offset:].unflatten(1, (8, pitch))[..., :128]
        given.q = q.copy_(given.q)
        given.table = given.table.repeat_interleave(2, 1)[:, ::2]
        given.lengths = given.lengths.repeat_interleave(3)[::3]
        given.require_right()


def test_results_are_the_only_memory_written_and_repeat_bitwise() -> None:
    for batch, cached in ((1, BF16), (5, BF16), (64, torch.int8)):
        given = step((1000,) * batch, (32, 8), cached=cached)
        options = given.options
        tensors = (
            given.q,
            given.k_cache,
            given.v_cache,
            given.table,
            given.lengths,
            None,
            options.get("k_scale"),
            options.get("v_scale"),
        )
        out = given.run()
        plain = (1, 128**-0.5, True, 0, 0.0, "NHD")
        for _ in range(3):
            (again,) = results_in_poisoned_memory(PAGED_ATTENTION.call, tensors, *plain)
            assert_same_bits(again, out)


def test_a_captured_call_follows_lengths_tables_and_values() -> None:
    for batch in (1, 9, 64):
        given = step((1008,) * batch, (32, 8))  # whole pages, so that any order of them is clean
        graph, out = captured(given.run)
        generator = torch.Generator("cuda").manual_seed(1)
        for _ in range(4):
            given.lengths.random_(0, 1009, generator=generator)
            given.table[:, :63] = given.table[:, torch.randperm(63, device="cuda")]
            given.q.normal_(generator=generator)
            graph.replay()
            given.require_right(out.clone())
            assert_same_bits(out, given.run())


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_what_the_kernels_ahead_write_is_read_behind_them(batch: int) -> None:
    """Lengths, the table and the newest token change inside the graph, right before the call."""
    given = step((200,) * batch, (32, 8))
    width = 20
    pages = torch.randperm(batch * width, device="cuda").int().view(batch, width)
    shape = (batch * width, *given.k_cache.shape[1:])
    given.k_cache = torch.randn(shape, device="cuda").to(BF16)
    given.v_cache = torch.randn(shape, device="cuda").to(BF16)
    given.table = torch.full_like(pages, -1)
    requests = torch.arange(batch, device="cuda").int()
    new = torch.randn(2, batch, 8, 128, device="cuda").to(BF16)

    def advance() -> Tensor:
        given.table.copy_(pages)
        new.add_(0.125)
        given.lengths.add_(1)
        append_paged_kv(
            new[0], new[1], given.k_cache, given.v_cache, given.table, requests, given.lengths - 1
        )
        return given.run()

    graph, out = captured(advance)
    for _ in range(20):
        given.table.fill_(-1)
        graph.replay()
        got = out.clone()
        assert (given.table == pages).all()
        given.require_right(got)


def test_calls_on_other_streams_do_not_disturb_each_other() -> None:
    both = [step((900,) * 4, (32, 8), seed=seed) for seed in (1, 2)]
    expected = [given.run() for given in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for given, stream, found in zip(both, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(given.run())
    torch.cuda.synchronize()
    for found, right in zip(results, expected, strict=True):
        for out in found:
            assert_same_bits(out, right)


def test_no_request_gives_no_result_and_no_page_zeros() -> None:
    given = step((5, 9))
    given.table = given.table[:, :0]
    assert given.run().eq(0).all()
    given.q, given.table, given.lengths = given.q[:0], given.table[:0], given.lengths[:0]
    assert given.run().shape == (0, 8, 128)


@pytest.mark.gpu_large
def test_caches_of_more_than_2_31_elements() -> None:
    pages = 2**31 // (16 * 8 * 128) + 5
    k_cache = torch.zeros(pages, 16, 8, 128, dtype=BF16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    small = step((40,), (32, 8))
    last = torch.arange(pages - 3, pages, device="cuda")
    used = small.table[0, :3].long()
    k_cache[last], v_cache[last] = small.k_cache[used], small.v_cache[used]
    expected = small.run()
    small.k_cache, small.v_cache = k_cache, v_cache
    small.table[0, :3] = last.int()
    assert_same_bits(small.run(), expected)
