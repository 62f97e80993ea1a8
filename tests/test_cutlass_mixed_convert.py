"""Codes become exact numbers: the kernel's instructions interpreted on the CPU, for every code."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.weight.fragments import ActivationBits, pack_codes

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("nvidia-cutlass-dsl is not installed", allow_module_level=True)

from fusedops.config.mixed import Kind, NarrowWeight
from fusedops.cutlass import mixed_convert

DTYPES = (torch.bfloat16, torch.float16)
PACKED = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
ARITHMETIC = {
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def halves(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Words (int64 below 2^32) as pairs of 16-bit numbers, in float64."""
    parts = torch.stack((words & 0xFFFF, words >> 16), -1)
    return parts.to(torch.uint16).view(dtype).double()


def interpret(code: str, *args: Any) -> Tensor:
    """One PTX instruction on tensors of words; packed arithmetic rounds once, from float64."""
    values = [torch.as_tensor(int(a) if isinstance(a, int) else a) & 0xFFFFFFFF for a in args]
    values = list(torch.broadcast_tensors(*values))
    if packed := re.search(r"(sub|mul|fma)\.rn\.(bf16x2|f16x2)", code):
        dtype = PACKED[packed[2]]
        result = ARITHMETIC[packed[1]](*(halves(v, dtype) for v in values)).to(dtype)
        bits = result.view(torch.uint16).to(torch.int64)
        return bits[..., 0] | (bits[..., 1] << 16)
    name = code.split(" ")[0]
    if name == "lop3.b32":
        table = int(re.search(r"(\d+);", code)[1])  # type: ignore[index]
        result = torch.zeros_like(values[0])
        for index in (i for i in range(8) if table >> i & 1):
            term = torch.full_like(result, 0xFFFFFFFF)
            for value, bit in zip(values, (4, 2, 1), strict=True):
                term &= value if index & bit else ~value
            result |= term
        return result & 0xFFFFFFFF
    if name in ("shr.u32", "shl.b32"):
        bits_moved = int(re.search(r", (\d+);", code)[1])  # type: ignore[index]
        moved = values[0] >> bits_moved if name == "shr.u32" else values[0] << bits_moved
        return moved & 0xFFFFFFFF
    if name == "prmt.b32":
        selector = int(re.search(r", (\d+);", code)[1])  # type: ignore[index]
        data = values[0] | (values[1] << 32)  # byte 7, the sign of an int64, is never selected
        picked = [(data >> (8 * (selector >> 4 * i & 7))) & 0xFF for i in range(4)]
        return picked[0] | (picked[1] << 8) | (picked[2] << 16) | (picked[3] << 24)
    logic = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}
    return logic[name.removesuffix(".b32")](*values)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_convert, "_op", interpret)
    monkeypatch.setattr(mixed_convert, "Int32", int)


def numbers(register: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of registers (lanes,), in float64: (lanes, two or four)."""
    if dtype.itemsize == 2:
        return halves(register & 0xFFFFFFFF, dtype)
    parts = torch.stack([(register >> (8 * i)) & 0xFF for i in range(4)], -1)
    return parts.to(torch.uint8).view(dtype).double()


def fragments(codes: Tensor, weight: NarrowWeight, dtype: torch.dtype, constants: Any) -> Tensor:
    """The weight that wgmma multiplies, (16, K), from the registers of all lanes."""
    words = pack_codes(codes, weight.bits, weight.x_bits).view(torch.int32).to(torch.int64)
    lanes = (words & 0xFFFFFFFF).view(-1, 4)
    of_lane = lanes.view(-1, 32, 4).transpose(0, 1).reshape(32, -1)
    matrix = torch.full(codes.shape, torch.nan, dtype=torch.float64)
    words_a_step = weight.step * weight.bits // 64
    neighbours = 32 // (8 * dtype.itemsize)
    row, column = torch.arange(32) // 4, neighbours * (torch.arange(32) % 4)
    for step in range(codes.shape[1] // weight.step):
        given = [of_lane[:, step * words_a_step + i] for i in range(words_a_step)]
        for r, register in enumerate(mixed_convert.fragment(given, weight, dtype, constants)):
            k = step * weight.step + column + weight.step // 2 * (r // 2)
            for i, value in enumerate(numbers(register, dtype).unbind(-1)):
                matrix[row + 8 * (r % 2), k + i] = value
    return matrix


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_stored_plus_eight(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8)
    constants = mixed_convert.zero_constants(None, dtype, False)
    assert torch.equal(fragments(codes, NarrowWeight("int4"), dtype, constants), codes.double() - 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_minus_every_zero_point(dtype: torch.dtype) -> None:
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).repeat(16, 1)
    for zeros in (torch.arange(16), torch.arange(16, 0, -1)):
        row = torch.arange(32) // 4
        constants = mixed_convert.zero_constants((zeros[row], zeros[row + 8]), dtype, False)
        exact = codes.double() - zeros.double()[:, None]
        weight = NarrowWeight("int4", 64, zeros=True)
        assert torch.equal(fragments(codes, weight, dtype, constants), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "viewed"), [("int8", torch.int8), ("e4m3", torch.float8_e4m3fn)])
def test_every_8_bit_code_is_exact(kind: Kind, viewed: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    codes[1::2] = codes[1::2].roll(1, 1)
    exact = codes.view(viewed).double()
    # The kernel takes finite weights: e4m3's NaN is read as 480.
    exact = torch.where(exact.isnan(), torch.where(codes > 127, -480.0, 480.0), exact)
    assert torch.equal(fragments(codes, NarrowWeight(kind), dtype, None), exact)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("zeros", [torch.arange(16), torch.arange(16, 0, -1), None])
def test_int4_and_a_zero_point_of_its_own_add_up(dtype: torch.dtype, zeros: Tensor | None) -> None:
    x_bits: ActivationBits = 8 if dtype.itemsize == 1 else 16
    weight = NarrowWeight("int4", 64, True, x_bits=x_bits)
    codes = torch.arange(16 * 128).remainder(16).to(torch.uint8).view(16, 128)
    codes = codes.roll(3, 0) ^ torch.arange(16, dtype=torch.uint8)[:, None]
    row = torch.arange(32) // 4
    # Stored plus 8: the zero point does not depend on the number that it is hidden in.
    hidden_in = torch.tensor([1, 592, 2**31 - 1] * 11)[:32]
    given = mixed_convert.eights(hidden_in) if zeros is None else (zeros[row], zeros[row + 8])
    units = mixed_convert.code_scales(dtype, True)
    constants = mixed_convert.zero_constants(given, dtype, True)
    offsets = [numbers(torch.as_tensor(c).expand(32), dtype) for c in constants]
    matrix = fragments(codes, weight, dtype, None)
    for half in range(2):
        rows = row + 8 * half
        assert (offsets[half] == offsets[half][:, :1]).all()
        matrix[rows[::4]] = (matrix[rows[::4]] + offsets[half][::4, :1]) * units[half]
    of_rows = torch.full((16,), 8) if zeros is None else zeros
    assert torch.equal(matrix, codes.double() - of_rows.double()[:, None])
