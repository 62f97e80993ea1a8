"""Tensors that share memory: told exactly, and refused where a result would be wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.errors import LayoutError
from fusedops.ops.overlap import overlap, overlaps_itself

BUFFER = torch.zeros(1000)
VIEWS = (BUFFER, BUFFER.view(torch.int16), BUFFER.view(torch.uint8))


def first_bytes(tensor: Tensor) -> list[int]:
    """The address of every element."""
    start = tensor.data_ptr()
    places = itertools.product(*map(range, tensor.shape))
    strides = tensor.stride()
    return [
        start + tensor.itemsize * sum(i * s for i, s in zip(place, strides, strict=True))
        for place in places
    ]


def drawn(rng: random.Random) -> Tensor:
    """A view of some of the buffer, of up to four dimensions."""
    base = rng.choice(VIEWS)
    dims = rng.randint(0, 4)
    shape = [rng.choice((0, 1, 2, 3, 4, 4, 4)) for _ in range(dims)]
    stride = [rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 37)) for _ in range(dims)]
    return base.as_strided(
        shape, stride, rng.randint(0, 20) * 4 // base.itemsize + rng.randint(0, 3)
    )


@pytest.mark.parametrize("seed", range(8))
def test_overlap_agrees_with_a_list_of_all_addresses(seed: int) -> None:
    rng = random.Random(seed)
    met = 0
    for _ in range(150):
        a, b = drawn(rng), drawn(rng)
        used = [{at + i for at in first_bytes(t) for i in range(t.itemsize)} for t in (a, b)]
        expected = bool(used[0] & used[1])
        met += expected
        assert overlap(a, b) == overlap(b, a) == expected
        places = first_bytes(a)
        assert overlaps_itself(a.shape, a.stride()) == (len(set(places)) < len(places))
    assert 15 < met < 135  # both answers are put to the test


def test_a_long_prompts_views_are_told_apart_at_once() -> None:
    joint = torch.empty(1 << 14, 6, 16, dtype=torch.bfloat16)
    assert not overlap(joint[:, :4], joint[:, 4:])
    assert overlap(joint[:, :5], joint[:, 4:])
    assert not overlaps_itself(joint[:, :4].shape, joint[:, :4].stride())


POSITIONS, TABLE = torch.arange(3), fusedops.rope_table(4, 8)


def heads(start: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda joint: joint[:, start:end]


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (heads(0, 4), heads(0, 4), "q and k are one tensor"),
        (heads(0, 3), heads(2, 4), "q and k overlap in memory"),
        (heads(1, 3), heads(0, 4), "q and k overlap in memory"),
    ],
)
def test_rope_in_place_refuses_q_and_k_that_overlap(q: Any, k: Any, message: str) -> None:
    joint = torch.randn(3, 4, 4)
    before = joint.clone()
    for _ in range(2):
        with pytest.raises(LayoutError, match=f"rope_: {message}"):
            fusedops.rope_(q(joint), k(joint), POSITIONS, TABLE)
    assert torch.equal(joint, before)


def test_rope_in_place_takes_views_that_lie_between_each_other() -> None:
    joint = torch.randn(3, 5, 4)
    q, k = joint[:, ::2], joint[:, 1::2]
    expected = fusedops.rope(q, k, POSITIONS, TABLE)
    fusedops.rope_(q, k, POSITIONS, TABLE)
    for got, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_in_place_arguments_that_repeat_a_cell_are_refused() -> None:
    windows = torch.randn(40).as_strided((3, 2, 4), (8, 3, 1))  # head 1 begins inside head 0
    with pytest.raises(LayoutError, match=r"q is .*may not share memory"):
        fusedops.rope_(windows, torch.randn(3, 1, 4), POSITIONS, TABLE)
    rows = torch.randn(40).as_strided((4, 8), (4, 1))
    with pytest.raises(LayoutError, match=r"x is .*may not share memory"):
        fusedops.fused_add_rms_norm_(rows, torch.randn(4, 8), torch.ones(8))


def test_the_in_place_norm_refuses_rows_that_overlap() -> None:
    rows = torch.randn(5, 8)
    before = rows.clone()
    with pytest.raises(LayoutError, match="x and residual overlap in memory"):
        fusedops.fused_add_rms_norm_(rows[:4], rows[1:], torch.ones(8))
    assert torch.equal(rows, before)


def layer(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    table, index = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cos_sin = fusedops.rope_table(4, 8)
    fusedops.rope_append_paged_kv_(q, k, v, index, cos_sin, k_cache, v_cache, table, index)


def test_a_layers_step_refuses_what_it_writes_and_still_reads() -> None:
    joint, pool = torch.randn(1, 6, 4), torch.zeros(2, 2, 4, 2, 4)
    q, k, v = joint.split((2, 2, 2), 1)
    k_cache, v_cache = pool.unbind(1)
    layer(q, k, v, k_cache, v_cache)  # views of one buffer each
    filled, before = pool.clone(), joint.clone()
    for bad, message in (
        ((k, k, v, k_cache, v_cache), "q and k are one"),
        ((q, pool[:1, 0, 0], v, k_cache, v_cache), "k_cache and k overlap"),
        ((q, pool[:1, 1, 0], v, k_cache, v_cache), "v_cache and k overlap"),
        ((pool[:1, 1, 0], k, v, k_cache, v_cache), "v_cache and q overlap"),
        ((q, k, pool[:1, 0, 0], k_cache, v_cache), "k_cache and v overlap"),
        ((q, k, pool[:1, 1, 0], k_cache, v_cache), "v_cache and v overlap"),
        ((q, k, v, k_cache, k_cache), "k_cache and v_cache are one"),
        ((q, k, v, pool[:, 0, :3], pool[:, 0, 1:]), "k_cache and v_cache overlap"),
    ):
        with pytest.raises(LayoutError, match=f"rope_append_paged_kv_: {message}"):
            layer(*bad)
    assert torch.equal(pool, filled)
    assert torch.equal(joint, before)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "cos_sin", "positions"])
@pytest.mark.parametrize("rotated", ["q", "k"])
def test_what_the_rotation_would_change_is_refused(
    rotated: str, name: str, cache_dtype: torch.dtype
) -> None:
    tensors = {"q": torch.ones(1, 2, 4), "k": torch.ones(1, 2, 4), "v": torch.ones(1, 2, 4)}
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 4).to(cache_dtype)
    table, index = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    flat = tensors[rotated].view(-1)
    views = {
        "k_scale": flat[3],
        "v_scale": flat[6:],
        "cos_sin": flat[4:].view(1, 4),
        "positions": flat[5:6].view(torch.int32),
    }
    rest = {"positions": index, "cos_sin": fusedops.rope_table(4, 8)}
    rest |= {"k_scale": torch.ones(2), "v_scale": torch.ones(())}
    rest[name] = views[name]
    message = f"rope_append_paged_kv_: {rotated} and {name} overlap in memory"
    with pytest.raises(LayoutError, match=message):
        fusedops.rope_append_paged_kv_(
            **tensors,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=table,
            request_index=index,
            **rest,
        )
    assert (flat == 1.0).all()
    assert not k_cache.view(torch.uint8).any()
    if name in ("cos_sin", "positions"):
        q, k = tensors["q"], tensors["k"]
        with pytest.raises(LayoutError, match=f"rope_: {rotated} and {name} overlap"):
            fusedops.rope_(q, k, rest["positions"], rest["cos_sin"])
        assert (flat == 1.0).all()


def test_a_norm_refuses_a_weight_that_it_writes() -> None:
    x, residual = torch.ones(2, 8), torch.ones(2, 8)
    for name, written in (("x", x), ("residual", residual)):
        with pytest.raises(LayoutError, match=f"{name} and weight overlap"):
            fusedops.fused_add_rms_norm_(x, residual, written[0])
        assert (written == 1.0).all()


@pytest.mark.parametrize("source", ["q", "k"])
def test_values_that_are_rotated_too_are_stored_as_they_were(source: str) -> None:
    def filled(copy: bool) -> list[Tensor]:
        q, k = torch.arange(8.0).view(1, 2, 4), torch.arange(8.0, 16.0).view(1, 2, 4)
        v = {"q": q, "k": k}[source]
        caches = torch.zeros(2, 1, 4, 2, 4).unbind()
        table, at = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        cos_sin = fusedops.rope_table(4, 8)
        v = v.clone() if copy else v
        fusedops.rope_append_paged_kv_(q, k, v, at, cos_sin, *caches, table, at - 1)
        return [q, k, *caches]

    for one, other in zip(filled(copy=False), filled(copy=True), strict=True):
        assert torch.equal(one, other)


def test_outputs_that_overlap_are_refused() -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    out = torch.full((3, 4), 7.0)
    for results in ([out[:2], out[:2]], [out[:2], out[1:]]):
        with pytest.raises(LayoutError, match="outputs 0 and 1 overlap in memory"):
            fusedops.gemm(x, w, "tap", out=results)
    assert (out == 7.0).all()
    halves = torch.empty(4, 4)
    fusedops.gemm(x, w, "tap", out=[halves[:2], halves[2:]])
    torch.testing.assert_close(halves[:2], halves[2:])


def test_an_output_over_an_input_is_refused() -> None:
    joint = torch.randn(6, 8)
    x, w = joint[:2], joint[2:]
    before = joint.clone()
    for out, name in ((x[:, :4], "x"), (w[1:3, 4:], "w"), (joint[1:3, :4], "x")):
        with pytest.raises(LayoutError, match=f"out shares memory with {name}"):
            fusedops.gemm(x, w, out=out)
    row = torch.randn(3, 4)
    for operand, out in ((row[0], row[:2]), (row[1], row[1:])):
        with pytest.raises(LayoutError, match="out shares memory with operand 0"):
            fusedops.gemm(x, w, "bias", [operand], out=out)
    with pytest.raises(LayoutError, match="out shares memory with operand 0"):
        fusedops.gemm(x, w, "residual", [row[1:]], out=row[:2])
    with pytest.raises(LayoutError, match="out shares memory with operand 0"):
        fusedops.gemm(x, w, "residual|tap", [row[1:]], out=[torch.empty(2, 4), row[1:]])
    assert torch.equal(joint, before)


def test_an_output_may_be_the_residual_or_lie_beside_the_input() -> None:
    joint, w, residual = torch.randn(2, 12), torch.randn(4, 8), torch.randn(2, 4)
    x = joint[:, :8]
    expected = fusedops.gemm(x, w, "residual", [residual])
    fusedops.gemm(x, w, "residual", [residual], out=residual)
    assert torch.equal(residual, expected)
    plain = fusedops.gemm(x, w)
    fusedops.gemm(x, w, out=joint[:, 8:])
    assert torch.equal(joint[:, 8:], plain)
