"""int4 storage: nibbles in rows, and tiles in the order of wgmma's A fragments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedops.errors import ConfigError, DTypeError, ShapeError
from fusedops.packing import pack_gate_up
from fusedops.weight import pack_nibbles, to_rows, to_tiles, unpack_nibbles
from fusedops.weight.int4_layout import int4_shape

TILED = ("wgmma16", "wgmma8")


def nibbles(n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)


def places() -> Tensor:
    """The place of every element of a tile, row * 64 + column."""
    return torch.arange(64 * 64).reshape(64, 64)


def tiled_words(values: Tensor, layout: str) -> Tensor:
    """(128 threads, 4 words) int64 of 64 x 64 nibbles: a warpgroup's four strips."""
    tile = to_tiles(pack_nibbles(values), 64, layout)
    assert tile.shape == (4, 1, 512)
    loaded = tile.reshape(128, 4, 4).to(torch.int64)  # 16 bytes a thread, little-endian words
    return (loaded << torch.tensor([0, 8, 16, 24])).sum(-1)


def fragments_16(words: Tensor) -> Tensor:
    """Elements a0 to a7 of each of four k16 steps by the documented bit operations: (128, 4, 8)."""
    pairs = []
    for register in range(4):
        bits = ((words >> (4 * register)) & 0x000F000F) | 0x43004300
        halves = torch.stack((bits & 0xFFFF, bits >> 16), -1).to(torch.int32).to(torch.int16)
        pairs.append(halves.view(torch.bfloat16).float() - 128)
    return torch.stack(pairs, 2).flatten(2).long()


def fragments_8(words: Tensor) -> Tensor:
    """Elements a0 to a15 of each of two k32 steps: (128, 2, 16)."""
    low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    registers = torch.stack((low, high), -1).reshape(128, 2, 4, 1)
    return ((registers >> torch.arange(0, 32, 8)) & 15).reshape(128, 2, 16)


def ptx_16(thread: int, step: int, i: int) -> tuple[int, int]:
    """Row and column of element a_i of m64k16, as the PTX ISA writes it."""
    group, in_group = (thread % 32) >> 2, thread % 4
    row = group if i < 2 or 4 <= i < 6 else group + 8
    column = in_group * 2 + (i & 1) + (0 if i < 4 else 8)
    return 16 * (thread // 32) + row, 16 * step + column


def ptx_8(thread: int, step: int, i: int) -> tuple[int, int]:
    """Row and column of element a_i of m64k32 (8-bit types), as the PTX ISA writes it."""
    group, in_group = (thread % 32) >> 2, thread % 4
    row = group if i < 4 or 8 <= i < 12 else group + 8
    column = in_group * 4 + (i & 3) + (0 if i < 8 else 16)
    return 16 * (thread // 32) + row, 32 * step + column


@pytest.mark.parametrize("layout", TILED)
def test_each_thread_gets_its_wgmma_fragments(layout: str) -> None:
    # An element's place has 12 bits: three weights of nibbles tell all of it.
    read = fragments_16 if layout == "wgmma16" else fragments_8
    found = sum(read(tiled_words((places() >> s) & 15, layout)) << s for s in (0, 4, 8))
    assert isinstance(found, Tensor)
    formula = ptx_16 if layout == "wgmma16" else ptx_8
    _, steps, elements = found.shape
    for thread in range(128):
        for step in range(steps):
            expected = [formula(thread, step, i) for i in range(elements)]
            assert found[thread, step].tolist() == [64 * row + column for row, column in expected]


def test_the_fp16_bit_trick_reads_the_same_values() -> None:
    word = int(tiled_words(nibbles(64, 64), "wgmma16")[77, 2])
    for register in range(4):
        bits = ((word >> (4 * register)) & 0x000F000F) | 0x64006400
        pair = torch.tensor([bits & 0xFFFF, bits >> 16]).to(torch.int16).view(torch.float16)
        expected = [(word >> (4 * register)) & 15, (word >> (4 * register + 16)) & 15]
        assert (pair.float() - 1024).tolist() == expected


@pytest.mark.parametrize("layout", TILED)
@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 140), k=st.integers(0, 140), seed=st.integers(0, 9))
def test_tiles_and_rows_are_inverse(layout: str, n: int, k: int, seed: int) -> None:
    values = nibbles(n, k, seed)
    packed = pack_nibbles(values)
    assert packed.shape == int4_shape("rows", n, k)
    assert torch.equal(unpack_nibbles(packed, k), values)
    tiles = to_tiles(packed, k, layout)
    assert tiles.shape == int4_shape(layout, n, k)
    assert torch.equal(to_rows(tiles, n, k, layout), packed)


def test_the_first_column_of_a_byte_is_its_low_nibble() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert pack_nibbles(values).tolist() == [[0x21, 0x83]]


@pytest.mark.parametrize("layout", TILED)
def test_what_lies_outside_of_the_weight_is_eight(layout: str) -> None:
    tiles = to_tiles(pack_nibbles(torch.zeros(3, 5, dtype=torch.uint8)), 5, layout)
    counted = torch.bincount(unpack_nibbles(tiles.reshape(1, -1), 1024).flatten().long())
    assert counted.tolist() == [15, 0, 0, 0, 0, 0, 0, 0, 16 * 64 - 15]


def test_gate_and_up_rows_meet_in_neighbouring_registers() -> None:
    gate, up = nibbles(32, 64, 1), nibbles(32, 64, 2)
    elements = fragments_16(tiled_words(pack_gate_up(gate, up), "wgmma16"))
    pairs = elements.reshape(128, 4, 4, 2)  # thread, step, register, half
    for thread in (0, 5, 37, 127):
        row = 8 * (thread // 32) + (thread % 32) // 4
        for step in range(4):
            for register in (0, 2):
                columns = [16 * step + 2 * (thread % 4) + 4 * register + half for half in (0, 1)]
                assert pairs[thread, step, register].tolist() == gate[row, columns].tolist()
                assert pairs[thread, step, register + 1].tolist() == up[row, columns].tolist()


def test_errors_name_what_was_got() -> None:
    with pytest.raises(ConfigError, match=r"holds -1 to 16; accepted are 0 to 15"):
        pack_nibbles(torch.tensor([[-1, 16]]))
    with pytest.raises(DTypeError, match=r"values is float32 \(1, 2\)"):
        pack_nibbles(torch.zeros(1, 2))
    with pytest.raises(ShapeError, match=r"packed is uint8 \(2, 3\).*accepted: \(N, 4\) for K=8"):
        unpack_nibbles(torch.zeros(2, 3, dtype=torch.uint8), 8)
    with pytest.raises(ConfigError, match=r"layout='rows'; accepted are wgmma16, wgmma8"):
        to_tiles(torch.zeros(2, 3, dtype=torch.uint8), 6, "rows")
    with pytest.raises(ShapeError, match=r"accepted: \(4, 2, 512\) for \(N, K\) = \(64, 128\)"):
        to_rows(torch.zeros(1, 1, 2048, dtype=torch.uint8), 64, 128, "wgmma8")
