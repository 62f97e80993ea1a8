"""Norms and gated activations that quantize their result, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.errors import ConfigError, DTypeError, ShapeError, UnsupportedError
from fusedops.ops.activation import act_and_mul
from fusedops.ops.fused_quantize import (
    act_and_mul_quantize,
    fused_add_rms_norm_quantize,
    layer_norm_quantize,
    rms_norm_quantize,
)
from fusedops.ops.norm import fused_add_rms_norm, layer_norm, rms_norm
from fusedops.ops.quantize import quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
ops = torch.ops.fusedops

Fused = Callable[..., tuple[Tensor, ...]]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


def pairs(dtype: torch.dtype) -> list[tuple[Fused, Callable[..., Any]]]:
    """Each fused operation with its tensors bound, and the plain operation it stands for."""
    x, residual = (normal(2, 3, 300, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = normal(300, dtype=dtype, seed=3)
    gates = normal(2, 3, 600, dtype=dtype, seed=4)
    return [
        (
            lambda **k: rms_norm_quantize(x, weight, 1e-5, weight_offset=0.5, **k),
            lambda: rms_norm(x, weight, 1e-5, weight_offset=0.5),
        ),
        (
            lambda **k: rms_norm_quantize(x, weight, round_before_weight=False, **k),
            lambda: rms_norm(x, weight, round_before_weight=False),
        ),
        (
            lambda **k: fused_add_rms_norm_quantize(x, residual, weight, **k),
            lambda: fused_add_rms_norm(x, residual, weight),
        ),
        (
            lambda **k: layer_norm_quantize(x, weight, None, 1e-4, **k),
            lambda: layer_norm(x, weight, None, 1e-4),
        ),
        (lambda **k: act_and_mul_quantize(gates, "gelu", **k), lambda: act_and_mul(gates, "gelu")),
    ]


@pytest.mark.parametrize("storage", ["e4m3", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_is_the_composition_bit_for_bit(dtype: torch.dtype, storage: str) -> None:
    given = {"tensor": torch.tensor(0.02), "token": normal(6, seed=5).abs() + 0.01}
    for fused, plain in pairs(dtype):
        first, *others = plain() if isinstance(plain(), tuple) else (plain(),)
        for granularity, scale in [("token", None), ("block128", None), *given.items()]:
            got = fused(dtype=storage, granularity=granularity, scale=scale)
            q, expected_scale = quantize(first, storage, granularity=granularity, scale=scale)
            assert got[0].dtype == q.dtype
            assert torch.equal(codes(got[0]), codes(q))
            assert torch.equal(got[-1], expected_scale)
            assert got[-1].stride() == expected_scale.stride()
            assert all(map(torch.equal, got[1:-1], others))
            assert len(got) == 2 + len(others)


def test_a_given_scale_comes_back_as_it_is() -> None:
    scale = torch.tensor(0.5)
    _, got = act_and_mul_quantize(normal(2, 8), granularity="tensor", scale=scale)
    assert got is scale


def test_b16_all_zero_rows_have_scale_one() -> None:
    x = normal(4, 256, dtype=torch.bfloat16)
    x[2] = 0
    for granularity in ("token", "block128"):
        q, scale = act_and_mul_quantize(x, granularity=granularity)
        assert not codes(q)[2].any()
        assert (scale.t()[2] == 1).all()
        assert scale.isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
def test_scales_of_groups_are_padded_to_four_rows(rows: int) -> None:
    x, weight = normal(rows, 300), torch.ones(300)
    _, scale = rms_norm_quantize(x, weight, granularity="block128")
    assert scale.shape == (3, rows)
    assert rows == 0 or scale.stride(0) == -(-rows // 4) * 4


def test_a_storage_that_cannot_be_is_refused() -> None:
    x, weight = normal(4, 8), torch.ones(8)
    one = torch.tensor(1.0)
    with pytest.raises(ConfigError, match="granularity='tensor' needs a given scale"):
        rms_norm_quantize(x, weight, granularity="tensor")
    for wrong in ({"granularity": "row"}, {"dtype": "int4"}):
        with pytest.raises(ConfigError, match="accepted"):
            rms_norm_quantize(x, weight, **wrong)
    with pytest.raises(ConfigError, match="granularity of a given scale"):
        layer_norm_quantize(x, granularity="block128", scale=one)
    with pytest.raises(ShapeError, match="one scale for each row"):
        act_and_mul_quantize(x, granularity="token", scale=torch.ones(3))
    with pytest.raises(ShapeError, match="one scale for granularity='tensor'"):
        act_and_mul_quantize(x, granularity="tensor", scale=torch.ones(4))
    with pytest.raises(DTypeError, match="scale is float64"):
        fused_add_rms_norm_quantize(x, x, weight, granularity="tensor", scale=one.double())
    with pytest.raises(ConfigError, match="above zero"):
        rms_norm_quantize(x, weight, granularity="tensor", scale=torch.tensor(0.0))


def test_the_plain_operations_checks_hold() -> None:
    x, weight = normal(4, 8), torch.ones(8)
    with pytest.raises(ShapeError, match="weight"):
        rms_norm_quantize(x, torch.ones(7))
    with pytest.raises(ShapeError, match="residual"):
        fused_add_rms_norm_quantize(x, x[:2], weight)
    with pytest.raises(ShapeError, match="even"):
        act_and_mul_quantize(x[:, :7])
    with pytest.raises(ConfigError, match="unknown activation"):
        act_and_mul_quantize(x, "swoosh")
    with pytest.raises(UnsupportedError, match="requires grad"):
        rms_norm_quantize(x.clone().requires_grad_(), weight)


@pytest.mark.parametrize("granularity", ["token", "block128"])
def test_opcheck(granularity: str) -> None:
    x, weight = normal(3, 130, dtype=torch.bfloat16), normal(130, dtype=torch.bfloat16)
    rms = (1e-6, 0.0, True, "e4m3", granularity)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.rms_norm_quantize, (x, weight, None, *rms)),
        (ops.fused_add_rms_norm_quantize, (x, x.clone(), weight, None, *rms)),
        (ops.layer_norm_quantize, (x, weight, None, None, 1e-5, "int8", granularity)),
        (ops.act_and_mul_quantize, (x, None, "silu", "int8", granularity)),
    ]
    for op, args in calls:
        torch.library.opcheck(op.default, args, test_utils=OPCHECK_TESTS)


def test_opcheck_with_a_given_scale() -> None:
    x, weight = normal(3, 130), normal(130)
    args = (x, weight, torch.tensor(0.1), 1e-6, 0.0, True, "e4m3", "tensor")
    torch.library.opcheck(ops.rms_norm_quantize.default, args, test_utils=OPCHECK_TESTS)


def test_b39_a_block_that_quantizes_compiles_without_a_break() -> None:
    x, weight = normal(3, 256, dtype=torch.bfloat16), normal(128, dtype=torch.bfloat16)

    def block(x: Tensor) -> tuple[Tensor, ...]:
        h = act_and_mul(x)
        return fused_add_rms_norm_quantize(h, h * 2, weight, granularity="block128")

    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for got, expected in zip(compiled(x), block(x), strict=True):
        assert torch.equal(got.float(), expected.float())
        assert got.stride() == expected.stride()
