"""Rotary position embedding and its table on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    PositionError,
    ShapeError,
    UnsupportedError,
)
from fusedops.ops.rope_kv import ROPE_STYLES, _rope_one, _rope_one_, _turn, rope, rope_
from fusedops.ops.rope_table import RopeScaling, rope_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH_STYLE = pytest.mark.parametrize("style", ROPE_STYLES)
ops = torch.ops.fusedops


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def frequencies(rotary_dim: int, theta: float = 10000.0) -> list[float]:
    """Angle a position of each pair."""
    return [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]


@EACH_STYLE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (4, 4), (2, 2), (7, 6)])
def test_rope_turns_pairs_as_complex_numbers(
    style: str, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    q, k = normal(5, 9, head_dim, dtype=dtype), normal(5, 3, head_dim, dtype=dtype, seed=1)
    positions = [0, 1, 7, 250, 1000]
    table = rope_table(rotary_dim, 1001)
    turned = rope(q, k, torch.tensor(positions), table, style=style)
    for x, y in zip((q, k), turned, strict=True):
        assert y.dtype == dtype
        assert y.shape == x.shape
        assert y.is_contiguous()
        expected = oracles.rope(x, positions, frequencies(rotary_dim), style)
        # Both products are rounded to float32, so the error stands against the pair's length.
        limit = 4.0 if dtype == torch.float32 else 0.51
        assert oracles.ulps_off(y, expected, floor=4.0 if dtype == torch.float32 else 2e-3) <= limit
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])
        assert torch.equal(y[0], x[0])


@EACH_STYLE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_in_place_rope_equals_the_functional_form(
    style: str, dtype: torch.dtype, rotary_dim: int
) -> None:
    q, k = normal(4, 6, 16, dtype=dtype), normal(4, 2, 16, dtype=dtype, seed=1)
    positions, table = torch.tensor([3, 1, 4, 1], dtype=torch.int32), rope_table(rotary_dim, 8)
    q_out, k_out = rope(q, k, positions, table, style=style)
    rope_(q, k, positions, table, style=style)
    assert torch.equal(q, q_out)
    assert torch.equal(k, k_out)


def test_b14_in_place_rope_writes_only_the_views_of_a_fused_qkv() -> None:
    qkv = normal(5, 10 * 16)
    before = qkv.clone()
    q, k, _ = qkv.split([6 * 16, 2 * 16, 2 * 16], dim=1)
    q, k = q.view(5, 6, 16), k.view(5, 2, 16)
    positions, table = torch.arange(5) + 1, rope_table(8, 8)
    q_out, k_out = rope(q, k, positions, table)
    rope_(q, k, positions, table)
    assert torch.equal(q, q_out)
    assert torch.equal(k, k_out)
    assert not torch.equal(q, before[:, : 6 * 16].view(5, 6, 16))
    assert torch.equal(qkv[:, 8 * 16 :], before[:, 8 * 16 :])
    heads, old_heads = qkv.view(5, 10, 16), before.view(5, 10, 16)
    assert torch.equal(heads[..., 8:], old_heads[..., 8:])


def test_b63_halves_and_interleaved_are_not_confused() -> None:
    x = torch.arange(8.0).view(1, 1, 8)
    table, position = rope_table(8, 4), torch.tensor([1])
    halves = [-3.3659, 0.4958, 1.9399, 2.993, 2.1612, 5.0749, 6.0197, 7.003]
    interleaved = [-0.8415, 0.5403, 1.6905, 3.1847, 3.9498, 5.0397, 5.993, 7.006]
    for style, expected in (("halves", halves), ("interleaved", interleaved)):
        for y in rope(x, x.clone(), position, table, style=style):
            assert torch.allclose(y.flatten(), torch.tensor(expected), atol=6e-5, rtol=0.0)
    assert torch.equal(
        rope(x, x, position, table)[0], rope(x, x, position, table, style="halves")[0]
    )


def test_b65_long_positions_do_not_drift() -> None:
    positions = [255, 257, 15962, 131071]
    table = rope_table(64, 131072)
    assert table[15962, 0].item() == pytest.approx(-0.90802, abs=5e-6)
    q = (torch.rand(4, 2, 64, generator=torch.Generator().manual_seed(65)) * 2 - 1).bfloat16()
    for style in ROPE_STYLES:
        y, _ = rope(q, q, torch.tensor(positions), table, style=style)
        expected = oracles.rope(q, positions, frequencies(64), style)
        assert oracles.ulps_off(y, expected, floor=2.0**-8) <= 2.0
        assert oracles.ulps_off(y, oracles.rounded(expected, torch.bfloat16), floor=2.0**-8) <= 1.0


@pytest.mark.parametrize("bad", [-1, 16, 2**31])
@pytest.mark.parametrize("count", [1, 100])
def test_b67_positions_outside_the_table_are_refused(bad: int, count: int) -> None:
    table = rope_table(8, 16)
    q, k = normal(count, 2, 8), normal(count, 1, 8)
    positions = torch.full((count,), 15)
    rope(q, k, positions, table)
    positions[-1] = bad
    before = q.clone()
    with pytest.raises(PositionError, match=rf"positions holds {bad}; accepted are 0 to 15"):
        rope(q, k, positions, table)
    with pytest.raises(IndexError):
        rope_(q, k, positions, table)
    assert torch.equal(q, before)


@EACH_STYLE
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_b67_unchecked_positions_outside_give_zeros_or_leave_the_row(
    style: str, rotary_dim: int
) -> None:
    table = rope_table(rotary_dim, 16)
    x = normal(5, 2, 8)
    x[1] = torch.nan
    positions = torch.tensor([15, -1, 16, 2**31, 3])
    expected, _ = rope(x[[0, 4]], x[[0, 4]], positions[[0, 4]], table, style=style)
    turn = _turn(positions, table, style, guarded=True)
    y = _rope_one(x, turn)
    torch.testing.assert_close(y[[0, 4]], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(y[1:4], torch.zeros(3, 2, 8))
    in_place = x.clone()
    _rope_one_(in_place, turn)
    assert torch.equal(in_place[[0, 4]], y[[0, 4]])
    assert torch.equal(in_place[2:4], x[2:4])
    assert in_place[1].isnan().all()


@EACH_STYLE
def test_b04_no_tokens_give_empty_results(style: str) -> None:
    q, k = torch.empty(0, 9, 64), torch.empty(0, 3, 64)
    positions, table = torch.empty(0, dtype=torch.int64), rope_table(64, 8)
    q_out, k_out = rope(q, k, positions, table, style=style)
    assert q_out.shape == (0, 9, 64)
    assert k_out.shape == (0, 3, 64)
    rope_(q, k, positions, table, style=style)
    q_out, k_out = rope(normal(2, 3, 64), torch.empty(2, 0, 64), torch.arange(2), table)
    assert k_out.shape == (2, 0, 64)


@EACH_STYLE
@pytest.mark.parametrize("kind", ["split", "offset", "transposed", "every second", "expanded"])
def test_b10_b12_strided_views_equal_their_copies(style: str, kind: str) -> None:
    base = normal(6 * 8 * 32 + 8, dtype=torch.bfloat16)
    q = {
        "split": base[: 6 * 256].view(6, 256).split([128, 128], dim=1)[1].view(6, 8, 16),
        "offset": base[3 : 3 + 6 * 8 * 16].view(6, 8, 16),
        "transposed": base[: 6 * 8 * 16].view(16, 8, 6).transpose(0, 2),
        "every second": base[: 6 * 8 * 32].view(6, 8, 32)[..., ::2],
        "expanded": base[:16].expand(6, 8, 16),
    }[kind]
    positions, table = torch.arange(12)[::2], rope_table(32, 12)[:, 8:24]
    y, _ = rope(q, q, positions, table, style=style)
    assert y.is_contiguous()
    copy = q.clone(memory_format=torch.contiguous_format)
    assert torch.equal(y, rope(copy, copy, positions.clone(), table.clone(), style=style)[0])
    if kind != "expanded":
        rope_(q, copy, positions, table, style=style)
        assert torch.equal(q, y)


@EACH_STYLE
def test_rope_follows_transformers(style: str) -> None:
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

    q, k, positions = normal(7, 9, 64), normal(7, 3, 64, seed=1), torch.arange(7) * 11
    table = rope_table(64, 100)
    cos, sin = table[positions].chunk(2, 1)
    if style == "halves":
        cos, sin, apply = cos.repeat(1, 2), sin.repeat(1, 2), halves
    else:
        cos, sin = cos.repeat_interleave(2, 1), sin.repeat_interleave(2, 1)
        apply = interleaved
    theirs = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    for ours, other in zip(rope(q, k, positions, table, style=style), theirs, strict=True):
        assert torch.allclose(ours, other[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


def hf_table(parameters: dict[str, Any], rotary_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """transformers' frequencies, and its cosines of the first positions, in float32."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * rotary_dim,
        num_attention_heads=4,
        head_dim=rotary_dim,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )
    module = LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), torch.arange(length)[None])
    half = rotary_dim // 2
    return module.inv_freq, torch.cat((cos[0, :, :half], sin[0, :, :half]), 1)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3 x32": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn whole": {**YARN, "truncate": False},
    "yarn factor": {**YARN, "attention_factor": 1.25},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn one mscale": {**YARN, "mscale": 0.7},
    "yarn short": {**YARN, "original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize(("rotary_dim", "theta"), [(64, 10000.0), (128, 500000.0)])
def test_table_matches_transformers(name: str, rotary_dim: int, theta: float) -> None:
    parameters = {**SCALINGS[name], "rope_theta": theta}
    scaling = RopeScaling.from_hf(parameters, 8192)
    assert (scaling is None) == (name == "default")
    ours = rope_table(rotary_dim, 64, theta, scaling)
    frequency, theirs = hf_table(dict(parameters), rotary_dim, 64)
    # Their angles carry the float32 error of the frequency, which grows with the position.
    assert torch.allclose(ours, theirs, atol=64 * 3e-7, rtol=0.0)
    turned = rope_table(rotary_dim, 2, theta, scaling)[1].double()
    factor = turned[rotary_dim // 2 - 1].hypot(turned[-1]).item()
    angle = torch.atan2(turned[rotary_dim // 2 :], turned[: rotary_dim // 2])
    assert torch.allclose(angle, frequency.double(), rtol=1e-6, atol=1e-9)
    amplitude = theirs[0, 0].item()
    assert factor == pytest.approx(amplitude, rel=1e-6)


def test_table_is_float64_rounded_once() -> None:
    table = rope_table(16, 3000, 10000.0)
    angle = np.arange(3000.0)[:, None] * np.array(frequencies(16))
    expected = np.concatenate((np.cos(angle), np.sin(angle)), 1)
    assert table.dtype == torch.float32
    assert table.shape == (3000, 16)
    assert oracles.ulps_off(table, expected, floor=1e-3) <= 0.51


def test_yarn_factor_may_follow_from_the_context_lengths() -> None:
    parameters = {"type": "yarn", "original_max_position_embeddings": 2048, "factor": None}
    scaling = RopeScaling.from_hf(parameters, 8192)
    assert scaling == RopeScaling("yarn", 4.0, 2048)


def test_scaling_of_no_or_the_default_type_is_none() -> None:
    assert RopeScaling.from_hf(None) is None
    assert RopeScaling.from_hf({}) is None
    assert RopeScaling.from_hf({"rope_type": "default", "rope_theta": 1e4}) is None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope' is not supported"),
        ({"rope_type": "mystery"}, "'mystery' is not supported"),
        ({"rope_type": "linear"}, "need factor"),
        ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
        ({"rope_type": "linear", "factor": math.inf}, "factor is inf .* finite numbers"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs original_max_position"),
        ({**LLAMA3, "low_freq_factor": None}, "needs low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "0 < low < high"),
        ({**YARN, "beta_fast": 0.5}, "beta_slow"),
        ({**YARN, "original_max_position_embeddings": 0}, "at least 1"),
        ({**YARN, "surprise": 1}, "hold surprise"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "hold mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "nested by layer type"),
    ],
)
def test_scalings_that_would_be_wrong_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeScaling.from_hf(parameters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "rotary_dim is 0"),
        ((7, 4), "rotary_dim is 7"),
        ((8, 0), "max_position is 0"),
        ((64, 10**12), "a table of 256,000,000,000,000 bytes, and making it takes 1,280,000"),
        ((8, 4, 1.0), "theta is 1.0"),
        ((8, 4, math.nan), "theta is nan"),
    ],
)
def test_tables_that_cannot_be_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_table(*arguments)


def test_bad_arguments_are_refused() -> None:
    q, k, positions, table = normal(3, 4, 8), normal(3, 2, 8), torch.arange(3), rope_table(8, 4)
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (DTypeError, "q is float64", (q.double(), k, positions, table)),
        (DTypeError, "k is bfloat16", (q, k.bfloat16(), positions, table)),
        (DTypeError, "positions is float32", (q, k, positions.float(), table)),
        (DTypeError, "cos_sin is bfloat16", (q, k, positions, table.bfloat16())),
        (ShapeError, "q is", (q[0], k, positions, table)),
        (ShapeError, "k is", (q, k[0], positions, table)),
        (ShapeError, r"accepted shape: \(3, 2, 8\)", (q, k[:2], positions, table)),
        (ShapeError, r"accepted shape: \(3, 2, 8\)", (q, k[..., :6], positions, table)),
        (ShapeError, "positions", (q, k, positions[:2], table)),
        (ShapeError, "positions", (q, k, positions[None], table)),
        (ShapeError, "cos_sin", (q, k, positions, table[0])),
        (ShapeError, "head dim 8", (q, k, positions, rope_table(10, 4))),
        (ShapeError, "even number", (q, k, positions, table[:, :7])),
        (ShapeError, "row for each", (q, k, positions, table[:0])),
        (DeviceError, "k is on meta", (q, k.to("meta"), positions, table)),
        (DeviceError, "positions is on meta", (q, k, positions.to("meta"), table)),
        (DeviceError, "cos_sin is on meta", (q, k, positions, table.to("meta"))),
    ]
    for error, message, arguments in refused:
        for call in (rope, rope_):
            with pytest.raises(error, match=message):
                call(*arguments)
    for call in (rope, rope_):
        with pytest.raises(ConfigError, match="halves, interleaved"):
            call(q, k, positions, table, style="neox")
    with pytest.raises(LayoutError, match="q is float32"):
        rope_(q[:1].expand(3, 4, 8), k, positions, table)
    with pytest.raises(LayoutError, match="k is float32"):
        rope_(q, k[:, :1].expand(3, 2, 8), positions, table)
    with pytest.raises(UnsupportedError, match="inference only"):
        rope(q.requires_grad_(), k, positions, table)


@given(
    tokens=st.integers(0, 4),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    half=st.integers(1, 9),
    rest=st.integers(0, 5),
    style=st.sampled_from(ROPE_STYLES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_rope_keeps_the_length_of_every_pair(
    tokens: int,
    heads: tuple[int, int],
    half: int,
    rest: int,
    style: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    q = normal(tokens, heads[0], 2 * half + rest, dtype=dtype, seed=seed)
    k = normal(tokens, heads[1], 2 * half + rest, dtype=dtype, seed=seed + 1)
    positions = torch.arange(tokens) * 3
    for x, y in zip(
        (q, k), rope(q, k, positions, rope_table(2 * half, 16), style=style), strict=True
    ):
        before, after = x.double()[..., : 2 * half], y.double()[..., : 2 * half]
        pairs = (2, half) if style == "halves" else (half, 2)
        dim = -2 if style == "halves" else -1
        lengths = [t.unflatten(-1, pairs).square().sum(dim) for t in (before, after)]
        rtol = 1e-5 if dtype == torch.float32 else 2.0**-5
        assert torch.allclose(*lengths, rtol=rtol, atol=1e-6)


@EACH_STYLE
def test_b37_opcheck(style: str) -> None:
    q, k = normal(3, 4, 10, dtype=torch.bfloat16), normal(3, 2, 10, dtype=torch.bfloat16)
    arguments = (q, k, torch.arange(3, dtype=torch.int32), rope_table(8, 4), style)
    torch.library.opcheck(ops.rope.default, arguments)
    torch.library.opcheck(ops.rope_.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b39_compiled_rope_keeps_its_effect_at_any_m(backend: str) -> None:
    table = rope_table(16, 32)

    def block(qkv: Tensor, positions: Tensor) -> Tensor:
        q, k, v = qkv.view(-1, 8, 16).split([4, 2, 2], dim=1)
        rope_(q, k, positions, table)
        q_again, k_again = rope(q, k, positions, table, style="interleaved")
        return q_again.sum(1) + k_again.sum(1) + v.sum(1) + q.sum(1)

    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (3, 5, 8):
        qkv, positions = normal(tokens, 128, seed=tokens), torch.arange(tokens)
        eager = qkv.clone()
        expected = block(eager, positions)
        assert torch.equal(compiled(qkv, positions), expected)
        assert torch.equal(qkv, eager)
