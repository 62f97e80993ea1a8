"""Codes become exact numbers: the kernel's instructions interpreted on the CPU, for every code."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.cutlass.mixed_layout import pack_codes

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("nvidia-cutlass-dsl is not installed", allow_module_level=True)

from fusedops.cutlass import mixed_convert
from fusedops.cutlass.mixed_config import Kind, NarrowWeight

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


def fragments(codes: Tensor, weight: NarrowWeight, dtype: torch.dtype, constants: Any) -> Tensor:
    """The weight that wgmma multiplies, (16, K), from the registers of all lanes."""
    words = pack_codes(codes, weight.bits).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    lanes = words.view(-1, 32, 4)
    matrix = torch.full(codes.shape, torch.nan, dtype=torch.float64)
    words_a_step = weight.bits // 4
    row, column = torch.arange(32) // 4, 2 * (torch.arange(32) % 4)
    for piece in range(lanes.shape[0]):
        for step in range(4 // words_a_step):
            first = step * words_a_step
            given = [lanes[piece, :, first + i] for i in range(words_a_step)]
            registers = mixed_convert.fragment(given, weight, dtype, constants)
            for r, register in enumerate(registers):
                pairs = halves(register, dtype)
                k = (piece * (4 // words_a_step) + step) * 16 + column + 8 * (r // 2)
                matrix[row + 8 * (r % 2), k] = pairs[:, 0]
                matrix[row + 8 * (r % 2), k + 1] = pairs[:, 1]
    return matrix


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_stored_plus_eight(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8)
    constants = mixed_convert.zero_constants(None, dtype)
    assert torch.equal(fragments(codes, NarrowWeight("int4"), dtype, constants), codes.double() - 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_minus_every_zero_point(dtype: torch.dtype) -> None:
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).repeat(16, 1)
    for zeros in (torch.arange(16), torch.arange(16, 0, -1)):
        row = torch.arange(32) // 4
        constants = mixed_convert.zero_constants((zeros[row], zeros[row + 8]), dtype)
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


def test_int4_beside_e4m3_activations_minus_every_zero_point() -> None:
    """Registers hold q 2^-9 and, of products of their own, -z 2^-9."""
    e4m3 = torch.float8_e4m3fn
    weight = NarrowWeight("int4", 64, True, x_bits=8)
    codes = torch.arange(16 * 128).remainder(16).to(torch.uint8).view(16, 128)
    codes = codes.roll(3, 0) ^ torch.arange(16, dtype=torch.uint8)[:, None]
    words = pack_codes(codes, 4, 8).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    lanes = words.view(-1, 32, 4)
    row, column = torch.arange(32) // 4, 4 * (torch.arange(32) % 4)

    def numbers(register: Tensor) -> Tensor:
        parts = torch.stack([(register >> (8 * i)) & 0xFF for i in range(4)], -1)
        return parts.to(torch.uint8).view(e4m3).double() * mixed_convert.code_scale(e4m3)

    for zeros in (torch.arange(16), torch.arange(16, 0, -1), None):
        given = None if zeros is None else (zeros[row], zeros[row + 8])
        of_rows = torch.full((16,), 8) if zeros is None else zeros
        offsets = [
            numbers(c.expand(32))
            for c in map(torch.as_tensor, mixed_convert.zero_constants(given, e4m3))
        ]
        matrix = torch.full((16, 128), torch.nan, dtype=torch.float64)
        for piece in range(2):
            for step in range(2):
                two = [lanes[piece, :, 2 * step + i] for i in range(2)]
                for r, register in enumerate(mixed_convert.fragment(two, weight, e4m3, None)):
                    k = piece * 64 + step * 32 + column + 16 * (r // 2)
                    values = numbers(register) + offsets[r % 2]
                    for i in range(4):
                        matrix[row + 8 * (r % 2), k + i] = values[:, i]
        assert torch.equal(matrix, codes.double() - of_rows.double()[:, None])
