"""Gated activation on the CPU."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedops.epilogue import activation_from_hf
from fusedops.epilogue.activations import ACTIVATIONS, activation
from fusedops.epilogue.nodes import activation_bound
from fusedops.errors import ConfigError, DTypeError, ShapeError, UnsupportedError
from fusedops.ops.activation import act_and_mul

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
ALL_ACTIVATIONS = pytest.mark.parametrize("act", list(ACTIVATIONS))
op = torch.ops.fusedops.act_and_mul.default


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values of deviation 2, the same for the same arguments."""
    return (2.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(y: Tensor, expected: np.ndarray, x: Tensor, ulps: float) -> None:
    """Within ``ulps`` of the result's dtype and the float32 error of a cancelling activation.

    gelu's 1 + erf(x) cancels for negative x, so that error stands against |gate * up|.
    """
    values = np.abs(oracles.floats(x))
    half = values.shape[-1] // 2
    cancelled = 4.0 * 2.0**-23 * values[..., :half] * values[..., half:]
    limit = ulps * oracles.ulp(expected, y.dtype) + cancelled
    assert np.all(np.abs(oracles.floats(y) - expected) <= limit)


def assert_close(y: Tensor, x: Tensor, act: str) -> None:
    """Two roundings away from float64; a first rounding on a tie may fall to the other side."""
    expected = oracles.act_and_mul(x, act)
    if x.dtype == torch.float32:
        assert_near(y, expected, x, ulps=4.0)
        return
    final = oracles.rounded(expected, x.dtype)
    assert_near(y, final, x, ulps=2.0)
    assert (oracles.floats(y) == final).mean() >= 0.95


def test_the_oracle_knows_every_activation() -> None:
    assert set(oracles.ACTIVATIONS) == set(ACTIVATIONS)


@ALL_ACTIVATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (5, 64), (2, 3, 14), (6,)])
def test_act_and_mul(act: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(*shape, dtype=dtype, seed=3)
    y = act_and_mul(x, act)
    assert y.dtype == dtype
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert y.is_contiguous()
    assert_close(y, x, act)


def test_silu_is_the_default() -> None:
    x = normal(3, 16)
    assert torch.equal(act_and_mul(x), act_and_mul(x, "silu"))
    assert not torch.equal(act_and_mul(x), act_and_mul(x, "gelu"))


def test_the_first_half_is_the_gate() -> None:
    x = torch.tensor([[-1.0, 2.0, 10.0, 100.0]])
    assert torch.equal(act_and_mul(x, "relu"), torch.tensor([[0.0, 200.0]]))


@pytest.mark.parametrize("half", [3420, 4, 12, 1234, 1710, 7, 1])
@pytest.mark.parametrize("dtype", HALVES)
def test_b06_any_half_width(half: int, dtype: torch.dtype) -> None:
    x = normal(4, 2 * half, dtype=dtype, seed=half)
    assert_close(act_and_mul(x, "silu"), x, "silu")


@pytest.mark.parametrize("width", [1, 7, 6841])
def test_b06_an_odd_last_dimension_is_refused(width: int) -> None:
    with pytest.raises(ShapeError, match="must be even"):
        act_and_mul(torch.empty(4, width, dtype=torch.bfloat16))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(0, 8192), (3, 0), (0, 2, 4), (0,)])
def test_b04_empty_inputs_give_empty_results(act: str, shape: tuple[int, ...]) -> None:
    y = act_and_mul(torch.empty(shape, dtype=torch.bfloat16), act)
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert y.dtype == torch.bfloat16
    assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_unaligned_views_equal_their_copies(offset: int) -> None:
    view = normal(4 * 66 + 8, dtype=torch.bfloat16)[offset : offset + 4 * 66].view(4, 66)
    assert torch.equal(act_and_mul(view), act_and_mul(view.clone()))


@pytest.mark.parametrize("kind", ["split", "transposed", "every second", "expanded"])
def test_b12_strided_views_equal_their_copies(kind: str) -> None:
    base = normal(8, 64, dtype=torch.bfloat16)
    x = {
        "split": base.split([48, 16], dim=1)[0].view(8, 4, 12),
        "transposed": base.t(),
        "every second": base[:, ::2],
        "expanded": base[:1].expand(5, 64),
    }[kind]
    y = act_and_mul(x)
    assert y.is_contiguous()
    assert torch.equal(y, act_and_mul(x.clone(memory_format=torch.contiguous_format)))


HF_FORMULAS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "quick_gelu": "quick_gelu",
}


@pytest.mark.parametrize("hf_name", list(HF_FORMULAS))
def test_b90_hf_names_mean_their_formula(hf_name: str) -> None:
    from transformers.activations import ACT2FN

    gate = 2.69894
    y = act_and_mul(torch.tensor([[gate, 1.0]]), activation_from_hf(hf_name)).item()
    gate = torch.tensor(gate).item()
    assert y == pytest.approx(oracles.ACTIVATIONS[HF_FORMULAS[hf_name]](gate), rel=3e-7)
    assert y == pytest.approx(ACT2FN[hf_name](torch.tensor(gate)).item(), rel=1e-6)


def test_b90_the_two_gelus_are_not_swapped() -> None:
    x = torch.tensor([[2.69894, 1.0]])
    difference = act_and_mul(x, "gelu") - act_and_mul(x, "gelu_tanh")
    assert math.isclose(abs(difference.item()), 4.73e-4, rel_tol=0.01)


def test_b90_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="gelu_tanh"):
        act_and_mul(torch.ones(2, 4), "gelu_new")
    with pytest.raises(ConfigError, match="unknown activation 'SiLU'"):
        act_and_mul(torch.ones(2, 4), "SiLU")
    with pytest.raises(ConfigError, match="no_such_name"):
        activation_from_hf("no_such_name")


@pytest.mark.parametrize("hf_name", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_b90_bfloat16_glu_follows_transformers(hf_name: str) -> None:
    from transformers.activations import ACT2FN

    x = normal(64, 512, dtype=torch.bfloat16, seed=90)
    gate, up = (half.contiguous() for half in x.chunk(2, 1))
    theirs = ACT2FN[hf_name](gate) * up
    ours = act_and_mul(x, activation_from_hf(hf_name))
    assert oracles.ulps_off(ours, oracles.floats(theirs)) <= 1.0


def test_b90_the_gate_is_rounded_before_the_product() -> None:
    x = normal(64, 512, dtype=torch.bfloat16, seed=91)
    gate, up = x[:, :256].float(), x[:, 256:].float()
    unrounded = (F.silu(gate) * up).bfloat16()
    assert (act_and_mul(x) != unrounded).float().mean().item() > 0.05


def test_not_finite_gates_show_in_the_result() -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, 2.0, 3.0]])
    y = act_and_mul(x, "silu")[0]
    assert y[0].isnan()
    assert y[1] == math.inf
    assert y[2].isnan() or y[2] == 0.0


def test_other_dtypes_and_shapes_are_refused() -> None:
    for bad in (torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.int32)):
        with pytest.raises(DTypeError, match="accepted dtypes: float32, bfloat16, float16"):
            act_and_mul(bad)
    with pytest.raises(ShapeError, match="at least 1 dimension"):
        act_and_mul(torch.tensor(1.0))


def test_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="inference only"):
        act_and_mul(torch.ones(2, 4, requires_grad=True))


@given(
    rows=st.integers(0, 4),
    half=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    act=st.sampled_from(list(ACTIVATIONS)),
    seed=st.integers(0, 1000),
)
def test_act_and_mul_of_any_small_shape(
    rows: int, half: int, dtype: torch.dtype, act: str, seed: int
) -> None:
    x = normal(rows, 2 * half, dtype=dtype, seed=seed)
    y = act_and_mul(x, act)
    assert y.shape == (rows, half)
    expected = oracles.act_and_mul(x, act)
    assert np.allclose(oracles.floats(y), expected, rtol=2.0**-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b37_opcheck(dtype: torch.dtype) -> None:
    torch.library.opcheck(op, (normal(3, 32, dtype=dtype), "silu"))
    torch.library.opcheck(op, (normal(32, 3, dtype=dtype).t(), "gelu"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b37_compiled_consumers_agree_with_eager_at_any_m(backend: str) -> None:
    def consumer(x: Tensor) -> Tensor:
        return act_and_mul(x, "gelu") + x[:, :16]

    compiled = torch.compile(consumer, fullgraph=True, backend=backend, dynamic=True)
    for rows in (3, 5, 8):
        x = normal(rows, 32, dtype=torch.bfloat16, seed=rows)
        assert torch.equal(compiled(x), consumer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_of_large_values_is_the_value_in_any_layout(dtype: torch.dtype) -> None:
    large = torch.tensor([float("inf"), 3e38, 1e30] * 8, dtype=dtype)
    assert torch.equal(activation("gelu", large), large)
    assert torch.equal(activation("gelu", large[::2]), large[::2])


class Float32Math:
    """``KernelMath`` in numpy: what kernels compute, but for the last bits of their fast forms."""

    def exp(self, value: np.ndarray) -> np.ndarray:
        return np.exp(value)

    def exp2(self, value: np.ndarray) -> np.ndarray:
        power = np.exp2(value)
        return np.where(power < np.float32(2.0**-126), np.float32(0.0), power)

    def erf(self, value: np.ndarray) -> np.ndarray:
        return torch.erf(torch.from_numpy(value)).numpy()

    def tanh(self, value: np.ndarray) -> np.ndarray:
        return np.tanh(value)

    def reciprocal(self, value: np.ndarray) -> np.ndarray:
        return np.float32(1.0) / value

    fast_reciprocal = reciprocal

    def maximum(self, left: np.ndarray, right: float) -> np.ndarray:
        return np.maximum(left, np.float32(right))

    def absolute(self, value: np.ndarray) -> np.ndarray:
        return np.abs(value)

    def where(self, condition: np.ndarray, value: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(condition, value, other)


@ALL_ACTIVATIONS
def test_what_kernels_compute_is_within_the_bound(act: str) -> None:
    small = np.geomspace(1e-30, 1.0, 3_000, dtype=np.float32)
    values = np.concatenate([np.linspace(-12, 12, 60_001, dtype=np.float32), small, -small])
    with np.errstate(over="ignore"):
        found = ACTIVATIONS[act].emit(Float32Math(), values)
    assert found.dtype == np.float32
    exact = oracles.activation(act, values.astype(np.float64))
    bound = activation_bound(act, torch.from_numpy(values), torch.zeros(values.shape)).numpy()
    assert np.all(np.abs(found - exact) <= 0.8 * bound), "too near to the bound, or beyond"


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu", "quick_gelu"])
def test_kernels_keep_nan_and_infinity(act: str) -> None:
    values = np.array([np.inf, np.nan, 0.0, 3e38, -3e38], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        found = ACTIVATIONS[act].emit(Float32Math(), values)
    assert found[0] == np.inf
    assert np.isnan(found[1])
    assert found[2] == 0.0
    assert found[3] == np.float32(3e38)
    assert found[4] == 0.0
