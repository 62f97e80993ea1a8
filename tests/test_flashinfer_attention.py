"""FlashInfer's paged attention and FlashInferDecode without FlashInfer: plans, checks, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flashinfer_calls import LAYOUTS, both, close, reference, refused, values
from flashinfer_fake import Fake, forget, install
from torch import Tensor

import fusedops
from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    KernelMissingError,
    LayoutError,
    PositionError,
    ShapeError,
    UnsupportedError,
)
from fusedops.providers import flashinfer_attention, flashinfer_base
from fusedops.providers.base import use_provider
from fusedops.providers.flashinfer import FlashInferDecode


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    yield install(monkeypatch)
    forget()


# Paged attention


def cache_of(layout: str, heads: int, head_dim: int = 64) -> tuple[Tensor, Tensor]:
    inner = (4, heads) if layout == "NHD" else (heads, 4)
    return values(12, *inner, head_dim, seed=5), values(12, *inner, head_dim, seed=6)


TABLE = torch.tensor([[3, 7, 1], [4, 99, -5], [0, 2, 11], [99, 99, 99]], dtype=torch.int32)
LENGTHS = torch.tensor([9, 4, 11, 0], dtype=torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((4, 2), {}),
        ((6, 2), {"window": 3}),
        ((4, 4), {"softcap": 5.0, "scale": 0.3, "causal": False}),
        ((10, 2), {}),
    ],
)
def test_eager_decode(
    fake: Fake, heads: tuple[int, int], options: dict[str, Any], layout: str
) -> None:
    q = values(4, heads[0], 64)
    call = (q, *cache_of(layout, heads[1]), TABLE, LENGTHS)
    got, expected = both(fusedops.paged_attention, *call, layout=layout, **options)
    close(got, expected, 1.0)
    assert not got[3].any()
    (wrapper,) = fake.wrappers
    assert wrapper.made_with == {"use_tensor_cores": heads[0] // heads[1] == 5}
    assert wrapper.workspace.numel() == flashinfer_attention.WORKSPACE_BYTES
    assert not wrapper.workspace.any()
    assert wrapper.planned["window_left"] == options.get("window", 0) - 1
    both(fusedops.paged_attention, *call, layout=layout, **options)
    assert len(fake.wrappers) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}, {"softcap": 5.0}])
def test_eager_prefill(fake: Fake, options: dict[str, Any], layout: str) -> None:
    q = values(12, 4, 64)
    start = torch.tensor([0, 3, 3, 9, 10], dtype=torch.int32)
    call = (q, *cache_of(layout, 2), TABLE, LENGTHS, start)
    got, expected = both(fusedops.paged_attention, *call, max_query_len=6, layout=layout, **options)
    close(got, expected, 1.0)
    assert not got[9:].any()
    (wrapper,) = fake.wrappers
    assert wrapper.made_with == {"backend": "fa2"}


def test_eager_attention_with_nothing_to_do_plans_nothing(fake: Fake) -> None:
    caches = cache_of("NHD", 2)
    none = torch.zeros(4, dtype=torch.int32)
    with use_provider("flashinfer"):
        assert not fusedops.paged_attention(values(4, 4, 64), *caches, TABLE, none).any()
        start = torch.zeros(5, dtype=torch.int32)
        out = fusedops.paged_attention(values(2, 4, 64), *caches, TABLE, LENGTHS, start)
        empty = fusedops.paged_attention(values(0, 4, 64), *caches, TABLE[:0], LENGTHS[:0])
    assert not out.any()
    assert empty.shape == (0, 4, 64)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("error", "lengths", "start", "match"),
    [
        (PositionError, [13, 4, 1, 1], None, "request 0 has length 13; accepted are 0 to 12"),
        (PositionError, [-1, 4, 1, 1], None, "length -1"),
        (PositionError, [1, 5, 1, 0], None, "accepted are 0 to 11"),
        (PositionError, [1, 1, 1, 1], None, "accepted are 0 to 11"),
        (PositionError, [1, 1, 1, 0], [0, 2, 3, 4, 4], "length 1 but 2 queries"),
        (ShapeError, [4, 4, 4, 0], [0, 2, 1, 4, 4], "never decrease"),
        (ShapeError, [4, 4, 4, 0], [1, 2, 3, 4, 4], "must start at 0"),
        (ShapeError, [4, 4, 4, 0], [0, 2, 3, 4, 5], "rows of q"),
        (ShapeError, [4, 4, 4, 0], [0, 3, 3, 4, 4], "raise max_query_len"),
    ],
)
def test_eager_attention_checks_what_the_host_reads(
    fake: Fake, error: type[Exception], lengths: list[int], start: list[int] | None, match: str
) -> None:
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    offsets = None if start is None else torch.tensor(start, dtype=torch.int32)
    options = {} if start is None else {"max_query_len": 2}
    with use_provider("flashinfer"), pytest.raises(error, match=match):
        fusedops.paged_attention(
            values(4, 4, 64), *cache_of("NHD", 2), TABLE, seq_lens, offsets, **options
        )
    assert fake.calls == []


def test_attention_refusals(fake: Fake) -> None:
    q, (k_cache, v_cache) = values(4, 4, 64), cache_of("NHD", 2)
    options = (1, 0.125, True, 0, 0.0, "NHD")
    rest = (TABLE, LENGTHS, None, None, None, *options)
    op = "paged_attention"
    refused("plans each call on the host", op, q, k_cache, v_cache, *rest, pinned=False)
    refused("takes bfloat16", op, q.float(), k_cache.float(), v_cache.float(), *rest)
    small = cache_of("NHD", 2, 32)
    refused("(64, 128, 256), got 32", op, values(4, 4, 32), *small, *rest)
    codes, scale = torch.zeros_like(k_cache, dtype=torch.int8), torch.ones(())
    coded = (codes, codes.clone(), TABLE, LENGTHS, None, scale, scale, *options)
    refused("reads caches of the queries' torch.bfloat16, got torch.int8", op, q, *coded)
    other = v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    refused("equal strides", op, q, k_cache, other, *rest)
    refused("but q has strides", op, values(4, 4, 68)[..., :64], k_cache, v_cache, *rest)
    fake.capturing = True
    refused("FlashInferDecode", op, q, k_cache, v_cache, *rest)


# FlashInferDecode


def decode_of(**changed: Any) -> FlashInferDecode:
    arguments: dict[str, Any] = {
        "batch": 4,
        "pages": 12,
        "page_size": 4,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "block_table": TABLE.clone(),
    }
    return FlashInferDecode(**{**arguments, **changed})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", [True, False])
def test_decode_follows_each_plan_and_the_table(fake: Fake, graph: bool, layout: str) -> None:
    table = TABLE.clone()
    decode = decode_of(
        block_table=table, layout=layout, use_cuda_graph=graph, window=6, softcap=9.0, scale=0.2
    )
    caches = cache_of(layout, 2)
    options = {"window": 6, "softcap": 9.0, "scale": 0.2, "layout": layout}
    buffers = [b.data_ptr() for b in fake.wrappers[0].buffers.values() if b is not None]
    for step, lengths in enumerate(([9, 4, 11, 1], [1, 1, 12, 4], [10, 3, 2, 12])):
        table[3] = torch.tensor([5, 6, 8]).roll(step)
        decode.plan(lengths if step else torch.tensor(lengths))
        q = values(4, 4, 64, seed=step)
        lens = torch.tensor(lengths, dtype=torch.int32)
        expected = reference(fusedops.paged_attention, q, *caches, table, lens, **options)
        close(decode.run(q, *caches), expected, 1.0)
        out = torch.empty_like(q)
        assert decode.run(q, *caches, out=out) is out
        close(out, expected, 1.0)
    if graph:
        assert [b.data_ptr() for b in fake.wrappers[0].buffers.values()] == buffers
    made_with = fake.wrappers[0].made_with
    assert made_with["use_cuda_graph"] is graph
    assert ("paged_kv_indices_buffer" in made_with) is graph


def test_decode_waits_for_the_last_copy_out_of_the_pinned_buffer(fake: Fake) -> None:
    decode = decode_of()
    decode.plan([1, 1, 1, 0])
    decode.plan([2, 2, 2, 0])
    assert fake.events == ["synchronize", "plan", "record"] * 2


def test_decode_picks_the_kernel_it_is_told(fake: Fake) -> None:
    decode_of(tensor_cores=True, query_heads=10)
    assert fake.wrappers[0].made_with["use_tensor_cores"] is True
    with pytest.raises(UnsupportedError, match="tensor_cores=True"):
        decode_of(query_heads=10)


@pytest.mark.parametrize(
    ("error", "changed", "match"),
    [
        (ShapeError, {"kv_heads": 3}, "a multiple of kv_heads"),
        (ShapeError, {"batch": 0}, "at least 1"),
        (ShapeError, {"block_table": TABLE[:3]}, "needs 4 rows"),
        (ShapeError, {"block_table": TABLE[:, :0]}, "at least one page"),
        (ShapeError, {"block_table": TABLE[0]}, "exactly 2"),
        (DTypeError, {"block_table": TABLE.long()}, "accepted dtypes: int32"),
        (DTypeError, {"dtype": torch.float32}, "bfloat16 and float16"),
        (ConfigError, {"layout": "HDN"}, "NHD, HND"),
        (ConfigError, {"window": -1}, "window=-1"),
        (ConfigError, {"softcap": float("inf")}, "softcap=inf"),
        (UnsupportedError, {"head_dim": 80}, "got 80"),
        (DeviceError, {"device": "cuda:1"}, "not on cuda:1"),
    ],
)
def test_decode_checks_its_arguments(
    fake: Fake, error: type[Exception], changed: dict[str, Any], match: str
) -> None:
    with pytest.raises(error, match=match):
        decode_of(**changed)


def test_decode_needs_cuda_and_flashinfer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(flashinfer_base, "absent", lambda: None)
        patch.setattr("fusedops.providers.flashinfer_decode.absent", lambda: "not installed")
        with pytest.raises(UnsupportedError, match="not installed"):
            decode_of()
    monkeypatch.setattr(flashinfer_base, "is_cuda", lambda tensor: tensor.is_cuda)
    with pytest.raises(DeviceError, match="got one on cpu"):
        decode_of()


def test_decode_refuses_bad_lengths(fake: Fake) -> None:
    decode = decode_of()
    with pytest.raises(PositionError, match="request 1 has length 13"):
        decode.plan([1, 13, 1, 1])
    with pytest.raises(ShapeError, match="3 lengths"):
        decode.plan([1, 1, 1])
    with pytest.raises(DeviceError, match="keep the lengths on the host"):
        decode.plan(torch.empty(4, dtype=torch.int32, device="meta"))
    fake.capturing = True
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        decode.plan([1, 1, 1, 1])


def test_decode_refuses_tensors_that_do_not_fit_the_plan(fake: Fake) -> None:
    decode = decode_of()
    q, (k_cache, v_cache) = values(4, 4, 64), cache_of("NHD", 2)
    with pytest.raises(ConfigError, match="call plan"):
        decode.run(q, k_cache, v_cache)
    decode.plan([1, 1, 1, 0])
    with pytest.raises(ShapeError, match="q is bfloat16"):
        decode.run(q[:3], k_cache, v_cache)
    with pytest.raises(ShapeError, match="k_cache is"):
        decode.run(q, k_cache[:5], v_cache)
    with pytest.raises(DTypeError, match="v_cache is float16"):
        decode.run(q, k_cache, v_cache.half())
    with pytest.raises(LayoutError, match="q has strides"):
        decode.run(values(4, 4, 68)[..., :64], k_cache, v_cache)
    other = v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(LayoutError, match="must be equal"):
        decode.run(q, k_cache, other)
    out = torch.empty(4, 8, 64, dtype=q.dtype)[:, ::2]
    with pytest.raises(LayoutError, match="out contiguous"):
        decode.run(q, k_cache, v_cache, out=out)


def test_the_first_run_of_a_decode_step_is_not_captured(fake: Fake) -> None:
    decode = decode_of()
    decode.plan([1, 1, 1, 0])
    q, caches = values(4, 4, 64), cache_of("NHD", 2)
    fake.capturing = True
    with pytest.raises(KernelMissingError, match="once before the capture"):
        decode.run(q, *caches)
    fake.capturing = False
    decode.run(q, *caches)
    fake.capturing = True
    decode.run(q, *caches)
