"""The quantization kernels: every bit is the reference's."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from cuda_cases import assert_same_bits, replayed
from cuda_row_cases import FLOATS, assert_all_same, drawn, only_our_kernels, row_views, run_twice
from torch import Tensor

from fusedops.errors import UnsupportedError
from fusedops.ops.quantize import FORMATS, GRANULARITIES, dequantize, quantize
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/quantize.cu",
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/ops/quantize.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_row_cases.py",
)

pytestmark = pytest.mark.gpu

EACH_STORAGE = pytest.mark.parametrize(
    ("fmt", "granularity"), list(itertools.product(FORMATS, GRANULARITIES))
)


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with only_our_kernels():
        yield


def reference(x: Tensor, fmt: str, granularity: str, scale: Tensor | None = None) -> list[Tensor]:
    """The operation's own definition, on the CPU; the values alone with a given scale."""
    with use_provider("reference"):
        given = None if scale is None else scale.cpu()
        q, found = quantize(x.cpu(), fmt, granularity=granularity, scale=given)
    if given is not None:
        return [q.cuda()]
    if granularity != "block128":
        return [q.cuda(), found.cuda()]
    groups, rows = found.shape
    padded = torch.empty((groups, -(-rows // 4) * 4), device="cuda")[:, :rows]
    return [q.cuda(), padded.copy_(found)]


def magnitudes(x: Tensor) -> Tensor:
    """The rows scaled by powers of ten, in place."""
    if x.dim() == 1:
        return x.mul_(100.0)
    generator = torch.Generator("cuda").manual_seed(5)
    shape = (*x.shape[:-1], 1)
    powers = torch.randint(-3, 3, shape, generator=generator, device="cuda")
    return x.mul_((10.0 ** powers.double()).to(x.dtype))


@EACH_STORAGE
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_is_the_references(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    for columns in (1, 7, 64, 100, 128, 300, 1000, 3421, 4096, 14336, 20000):
        for view in row_views(columns, dtype):
            x = magnitudes(view)
            got = run_twice("quantize", x, fmt, granularity)
            assert_all_same(got, reference(x, fmt, granularity))


@EACH_STORAGE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b16_b18_special_values(dtype: torch.dtype, fmt: str, granularity: str) -> None:
    x = drawn(9, 512, dtype=dtype)
    x[0] = 0
    x[1] = -0.0
    x[2, 3] = math.nan
    x[3, 200] = math.inf
    x[4, 300] = -math.inf
    x[5] = 1e-40
    x[6] = 1e38
    x[7, 130:] = 0
    assert_all_same(run_twice("quantize", x, fmt, granularity), reference(x, fmt, granularity))
    for row in x:
        got = run_twice("quantize", row, fmt, granularity)
        assert_all_same(got, reference(row, fmt, granularity))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_given_scales(dtype: torch.dtype, fmt: str) -> None:
    scales = drawn(64, dtype=torch.float32, seed=1).abs() + 0.01
    for columns in (7, 128, 3421, 4096):
        for x in row_views(columns, dtype):
            rows = x[..., 0].numel() if x.dim() > 1 else 1
            given = {"tensor": scales[0], "token": scales[:1].expand(rows)}
            if rows <= 32:
                given["token"] = scales[: 2 * rows : 2]
            for granularity, scale in given.items():
                got = run_twice("quantize_static", x, scale, fmt)
                assert_all_same(got, reference(x, fmt, granularity, scale))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_ties_to_even_and_saturates(fmt: str) -> None:
    if fmt == "e4m3":
        codes = torch.arange(127, dtype=torch.uint8, device="cuda")
        steps = codes.view(torch.float8_e4m3fn).float()
    else:
        steps = torch.arange(128, dtype=torch.float32, device="cuda")
    middles = (steps[1:] + steps[:-1]) / 2
    beyond = torch.tensor([127.4, 449.0, 463.9, 464.0, 465.0, 1e30, math.inf], device="cuda")
    x = torch.cat((steps, middles, middles * (1 - 2.0**-23), middles * (1 + 2.0**-23), beyond))
    x = torch.cat((x, -x, torch.tensor([math.nan, -math.nan], device="cuda")))
    one = torch.ones((), device="cuda")
    got = run_twice("quantize_static", x, one, fmt)
    assert_all_same(got, reference(x, fmt, "tensor", one))


def test_b04_empty_inputs_leave_no_error() -> None:
    for granularity in GRANULARITIES:
        for shape in ((0, 256), (3, 0), (0, 0), (2, 0, 64)):
            x = drawn(*shape)
            assert_all_same(
                list(quantize(x, granularity=granularity)), reference(x, "e4m3", granularity)
            )
    assert torch.ones(3, device="cuda").sum() == 3


def test_rows_that_are_too_long_for_one_scale_are_refused() -> None:
    x = drawn(2, 65537)
    quantize(x, granularity="block128")
    with pytest.raises(UnsupportedError, match="up to 65536 elements"):
        quantize(x, granularity="token")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_capture_replays_with_other_values(granularity: str) -> None:
    x = drawn(33, 4096)
    inputs = [drawn(33, 4096, seed=seed) * 10.0**seed for seed in (1, 2)]

    def call(part: int) -> Tensor:
        return quantize(x, granularity=granularity)[part]

    for part in (0, 1):
        results = replayed(functools.partial(call, part), x, inputs)
        for got, values in zip(results, inputs, strict=True):
            expected = reference(values, "e4m3", granularity)[part]
            assert torch.equal(got.float(), expected.float())


def test_a_given_scale_of_a_row_reverses_it() -> None:
    x = drawn(40, 1024)
    q, scale = quantize(x)
    with use_provider("torch"):
        back = dequantize(q, scale)
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + scale[:, None] / 1024).all()


@pytest.mark.gpu_large
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_b01_more_than_2_to_31_elements(granularity: str) -> None:
    rows, columns = 4194305, 512
    x = drawn(1, columns).expand(rows, columns).contiguous()
    x[-1] *= 2
    q, scale = quantize(x, granularity=granularity)
    for row in (0, rows // 2, rows - 1):
        if granularity == "tensor":
            expected = reference(x[row], "e4m3", "tensor", scale)[0]
        else:
            expected = reference(x[row], "e4m3", granularity)[0]
        assert_same_bits(q[row].view(torch.uint8), expected.view(torch.uint8))
