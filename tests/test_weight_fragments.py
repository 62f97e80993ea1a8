"""The packed layout of narrow weights: a bijection that gives each lane whole wgmma fragments."""

from __future__ import annotations

import pytest
import torch

from fusedops.weight.fragments import (
    PIECE_BYTES,
    STRIP_ROWS,
    ActivationBits,
    CodeBits,
    pack_codes,
    packed_shape,
    piece_columns,
    unpack_codes,
    words,
)


def codes(n: int, k: int, bits: CodeBits, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)


def code_position(n: int, k: int, bits: CodeBits, x_bits: ActivationBits = 16) -> tuple[int, int]:
    """(strip, first bit in the strip's little-endian bytes) of the code of row n, column k."""
    columns = piece_columns(bits)
    half_row, row = divmod(n % STRIP_ROWS, 8)
    if x_bits == 8:
        word, column = divmod(k % columns, 16)
        member, byte = divmod(column, 4)
        unit = 8 * word + 2 * byte + half_row
    else:
        step, column = divmod(k % columns, 16)
        half_k, column = divmod(column, 8)
        member, odd = divmod(column, 2)
        if bits == 4:
            unit = 8 * step + half_row + 2 * half_k + 4 * odd
        else:
            unit = 8 * step + 4 * half_k + half_row + 2 * odd
    first = ((k // columns) * PIECE_BYTES + (row * 4 + member) * 16) * 8
    return n // STRIP_ROWS, first + unit * bits


LAYOUTS: list[tuple[CodeBits, ActivationBits]] = [(4, 16), (8, 16), (4, 8)]


@pytest.mark.parametrize(("bits", "x_bits"), LAYOUTS)
def test_positions_cover_every_bit_of_a_piece_once(bits: CodeBits, x_bits: ActivationBits) -> None:
    columns = piece_columns(bits)
    at = {code_position(n, k, bits, x_bits) for n in range(16) for k in range(columns)}
    assert at == {(0, first) for first in range(0, 512 * 8, bits)}


@pytest.mark.parametrize(("bits", "x_bits"), LAYOUTS)
def test_packing_follows_the_index_formula(bits: CodeBits, x_bits: ActivationBits) -> None:
    n, k = 35, 2 * piece_columns(bits) + 24
    given = codes(n, k, bits)
    packed = pack_codes(given, bits, x_bits)
    assert packed.shape == packed_shape(n, k, bits) == (3, 3, 512)
    data = packed.flatten(1)
    for row in range(0, n, 3):
        for column in range(0, k, 5):
            strip, first = code_position(row, column, bits, x_bits)
            value = (int(data[strip, first // 8]) >> (first % 8)) & ((1 << bits) - 1)
            assert value == int(given[row, column])


@pytest.mark.parametrize(("bits", "x_bits"), LAYOUTS)
@pytest.mark.parametrize("shape", [(16, 64), (1, 1), (40, 200), (128, 256)])
def test_unpacking_gives_the_codes_back(
    bits: CodeBits, x_bits: ActivationBits, shape: tuple[int, int]
) -> None:
    given = codes(*shape, bits)
    assert torch.equal(unpack_codes(pack_codes(given, bits, x_bits), *shape, bits, x_bits), given)


def test_register_of_a_lane_holds_its_two_columns_sixteen_bits_apart() -> None:
    """What the kernel extracts: ``(word >> 4 r) & 0x000f000f`` is register r of a k16 step."""
    given = codes(16, 64, 4, seed=1)
    lanes = pack_codes(given, 4).view(torch.int32).view(32, 4).to(torch.int64) & 0xFFFFFFFF
    for lane in (0, 5, 31):
        for step in range(4):
            for r in range(4):
                pair = (int(lanes[lane, step]) >> (4 * r)) & 0x000F000F
                row = lane // 4 + 8 * (r % 2)
                column = 16 * step + 2 * (lane % 4) + 8 * (r // 2)
                even, odd = given[row, column : column + 2].tolist()
                assert pair == even | (odd << 16)


def test_register_beside_e4m3_activations_holds_four_columns_in_its_bytes() -> None:
    """What the kernel extracts: even nibbles are the first row, odd ones the row 8 further on."""
    given = codes(16, 64, 4, seed=2)
    lanes = pack_codes(given, 4, 8).view(torch.int32).view(32, 4).to(torch.int64) & 0xFFFFFFFF
    for lane in (0, 6, 31):
        for word in range(4):
            for half in range(2):
                column = 16 * word + 4 * (lane % 4)
                row = given[lane // 4 + 8 * half, column : column + 4].tolist()
                register = (int(lanes[lane, word]) >> (4 * half)) & 0x0F0F0F0F
                assert list(register.to_bytes(4, "little")) == row


def test_kernel_takes_the_same_memory_as_words() -> None:
    packed = pack_codes(codes(40, 200, 4), 4)
    assert words(packed).shape == (3, 4 * 64)
    assert words(packed).data_ptr() == packed.data_ptr()
