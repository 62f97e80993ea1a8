"""The gated activation kernels by four oracles: exact values, float64, torch, poisoned memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from cuda_cases import assert_same_bits, replayed
from cuda_row_cases import (
    FLOATS,
    assert_all_same,
    assert_near,
    drawn,
    only_our_kernels,
    row_views,
    run_twice,
)
from torch import Tensor

import fusedops
from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.ops.activation import act_and_mul
from fusedops.ops.quantize import FORMATS, quantize
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/activation.cu",
    "csrc/include",
    "fusedops/epilogue/activations.py",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/activation.py",
    "fusedops/ops/fused_quantize.py",
    "fusedops/ops/op.py",
    "fusedops/ops/quantize.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_row_cases.py",
)

pytestmark = pytest.mark.gpu

HALF_WIDTHS = (1, 4, 7, 12, 64, 1234, 1710, 3420, 4096, 14336)
STORAGES = list(itertools.product(FORMATS, ("token", "block128")))


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with only_our_kernels():
        yield


def gates(half: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows of two halves at any places."""
    return row_views(2 * half, dtype)


@pytest.mark.parametrize("act", ["identity", "relu", "relu2"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_integers_are_exact_bit_for_bit(dtype: torch.dtype, act: str) -> None:
    formula = {"identity": lambda x: x, "relu": lambda x: x.clamp(min=0)}
    formula["relu2"] = lambda x: x.clamp(min=0) ** 2
    for half in HALF_WIDTHS:
        for view in gates(half, dtype):
            x = view.mul_(2).round_().clamp_(-4, 4)
            (got,) = run_twice("act_and_mul", x, act)
            gate, up = x.chunk(2, -1)
            assert torch.equal(got, formula[act](gate) * up)
            assert got.is_contiguous()


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b06_any_half_width_within_the_bound_and_twice_torchs_error(
    dtype: torch.dtype, act: str
) -> None:
    unit = torch.finfo(dtype).eps / 2
    for half in HALF_WIDTHS:
        for view in gates(half, dtype):
            x = view.mul_(3).clamp_(-12, 12)
            (got,) = run_twice("act_and_mul", x, act)
            with use_provider("torch"):
                peer = act_and_mul(x, act)
            gate, up = x.double().chunk(2, -1)
            activated = ACTIVATIONS[act].formula(gate)
            exact = activated * up
            # Roundings of both factors' product; float32 errors of the activation, whose terms
            # cancel for negative gates; the smallest steps of the dtype.
            tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
            lost = (2.0**-20 * gate.abs() * up.abs()) + tiny * (1 + up.abs())
            bound = exact.abs() * (2.05 * unit + 2.0**-19) + lost
            floor = exact.abs() * unit + lost / 8
            assert_near(got, exact, bound, peer, (x.shape, x.stride()), floor)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_special_gates_follow_torch(dtype: torch.dtype, act: str) -> None:
    special = [0.0, -0.0, math.nan, math.inf, -math.inf, 88.0, -88.0, 1e30, -1e30, 1e-40, 30.0]
    x = torch.tensor([[*special, *([1.0] * len(special))]], dtype=dtype, device="cuda")
    got = act_and_mul(x, act)
    with use_provider("torch"):
        expected = act_and_mul(x, act)
    assert torch.equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got, expected, rtol=0.02, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize(("storage", "granularity"), STORAGES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_quantized_form_is_the_composition_bit_for_bit(
    dtype: torch.dtype, storage: str, granularity: str
) -> None:
    for half in (7, 64, 130, 1024, 3420, 14336):
        for x in gates(half, dtype):
            got = run_twice("act_and_mul_quantize", x, None, "silu", storage, granularity)
            y = act_and_mul(x)
            assert_all_same(got, list(quantize(y, storage, granularity=granularity)))


@pytest.mark.parametrize("storage", FORMATS)
def test_a_given_scale_is_used(storage: str) -> None:
    x = drawn(6, 2000)
    rows = drawn(12, dtype=torch.float32, seed=2).abs()[::2] + 0.01
    for granularity, scale in (("tensor", torch.full((), 0.02, device="cuda")), ("token", rows)):
        got = run_twice("act_and_mul_quantize", x, scale, "gelu_tanh", storage, granularity)
        y = act_and_mul(x, "gelu_tanh")
        expected, _ = quantize(y, storage, granularity=granularity, scale=scale)
        assert_all_same(got, [expected])


def test_b04_no_rows_leave_no_error() -> None:
    for act in ("silu", "gelu", "gelu_tanh"):
        assert act_and_mul(drawn(0, 8192), act).shape == (0, 4096)
        q, scale = fusedops.act_and_mul_quantize(drawn(0, 8192), act, granularity="block128")
        assert (q.shape, scale.shape) == ((0, 4096), (32, 0))
    assert act_and_mul(drawn(3, 0)).shape == (3, 0)
    assert torch.ones(3, device="cuda").sum() == 3


def test_b90_the_two_gelus_are_two() -> None:
    x = torch.tensor([[2.69894, 1.0]], device="cuda")
    exact, approximate = (act_and_mul(x, act) for act in ("gelu", "gelu_tanh"))
    assert (exact - approximate).abs().item() == pytest.approx(4.73e-4, rel=0.01)


@pytest.mark.parametrize("rows", [1, 16, 700])
def test_a_capture_replays_with_other_values(rows: int) -> None:
    x = drawn(rows, 4096)
    inputs = [drawn(rows, 4096, seed=seed) for seed in (1, 2)]
    for got, values in zip(replayed(lambda: act_and_mul(x), x, inputs), inputs, strict=True):
        assert_same_bits(got, act_and_mul(values))


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    rows, half = 4194305, 256
    x = drawn(1, 2 * half).expand(rows, 2 * half).contiguous()
    x[-1] *= 2
    got = act_and_mul(x)
    for row in (0, rows // 2, rows - 1):
        assert_same_bits(got[row], act_and_mul(x[row]))
    q, scale = fusedops.act_and_mul_quantize(x, granularity="block128")
    for row in (0, rows // 2, rows - 1):
        expected, wanted = fusedops.act_and_mul_quantize(x[row], granularity="block128")
        assert torch.equal(q[row].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale[:, row], wanted[:, 0])
