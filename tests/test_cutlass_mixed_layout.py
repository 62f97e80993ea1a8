"""The packed layout of narrow weights: a bijection that gives each lane whole wgmma fragments."""

from __future__ import annotations

import pytest
import torch

from fusedops.cutlass.mixed_layout import (
    CodeBits,
    code_position,
    pack_codes,
    packed_shape,
    piece_columns,
    unpack_codes,
    words,
)


def codes(n: int, k: int, bits: CodeBits, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bits", [4, 8])
def test_positions_cover_every_bit_of_a_piece_once(bits: CodeBits) -> None:
    columns = piece_columns(bits)
    at = {code_position(n, k, bits) for n in range(16) for k in range(columns)}
    assert at == {(0, first) for first in range(0, 512 * 8, bits)}


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_follows_the_index_formula(bits: CodeBits) -> None:
    n, k = 35, 2 * piece_columns(bits) + 24
    given = codes(n, k, bits)
    packed = pack_codes(given, bits)
    assert packed.shape == packed_shape(n, k, bits) == (3, 3, 512)
    data = packed.flatten(1)
    for row in range(0, n, 3):
        for column in range(0, k, 5):
            strip, first = code_position(row, column, bits)
            value = (int(data[strip, first // 8]) >> (first % 8)) & ((1 << bits) - 1)
            assert value == int(given[row, column])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 64), (1, 1), (40, 200), (128, 256)])
def test_unpacking_gives_the_codes_back(bits: CodeBits, shape: tuple[int, int]) -> None:
    given = codes(*shape, bits)
    assert torch.equal(unpack_codes(pack_codes(given, bits), *shape, bits), given)


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


def test_kernel_takes_the_same_memory_as_words() -> None:
    packed = pack_codes(codes(40, 200, 4), 4)
    assert words(packed).shape == (3, 4 * 64)
    assert words(packed).data_ptr() == packed.data_ptr()
