"""How narrow weights lie in memory for a kernel: whole wgmma fragments (``wgmma16``, ``wgmma8``).

A weight (N, K) of 4- or 8-bit codes is stored in strips of 16 rows, a strip in pieces of 512 bytes:
64 columns of 4-bit or 32 of 8-bit codes. So a tile may have any multiple of 16 rows. Lane l of the
warp that multiplies the strip reads its 16 bytes at 16 l of a piece and has whole A fragments of
four (4-bit) or two (8-bit) k16 steps, so one 16-byte load fills all their registers and consecutive
lanes read consecutive addresses. In a fragment (PTX ISA, "Register Fragments for wgmma.mma_async")
register r of lane l holds row ``l // 4 + 8 (r % 2)``, columns ``2 (l % 4) + {0, 1} + 8 (r // 2)``.

* 4-bit, ``wgmma16``: word i of the 16 bytes is k16 step i; register r has its even column in nibble
  r, its odd one in nibble r + 4, so ``(word >> 4 r) & 0x000f000f`` picks both.
* 8-bit, ``wgmma16``: words 2 i and 2 i + 1 are step i, the second its columns from 8 on; a word's
  bytes 0 and 2 are the rows of the first half, bytes 1 and 3 those eight further on.
* 4-bit, ``wgmma8``, beside 8-bit activations: an A fragment of 8-bit elements has columns ``4 (l %
  4) + {0, 1, 2, 3} + 16 (r // 2)`` of a k32 step. Words 2 i and 2 i + 1 are step i, the second its
  columns from 16 on; even nibbles are the rows of the first half, odd ones those eight further on,
  so ``word & 0x0f0f0f0f`` and ``(word >> 4) & 0x0f0f0f0f`` are registers.

Codes: int4 is stored as ``q + 8`` or, with zero points, as it is (0 to 15); int8 in two's
complement; e4m3 as its bits. N is padded to whole strips, K to whole pieces, by ``PADDING``. Rows
are packed (``fusedops.packing``: gate/up, rotation partners) before strips are made; partners lie 8
rows apart, so that one lane holds both in registers r and r + 1.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "PADDING",
    "PIECE_BYTES",
    "STRIP_ROWS",
    "ActivationBits",
    "CodeBits",
    "pack_codes",
    "packed_shape",
    "piece_columns",
    "unpack_codes",
    "words",
]

STRIP_ROWS = 16
"""Rows of a strip: those of one warp's part of wgmma's 64."""

PIECE_BYTES = 512
"""Bytes of a piece: 16 for each lane of a warp."""

CodeBits = Literal[4, 8]
ActivationBits = Literal[8, 16]

PADDING: dict[CodeBits, int] = {4: 8, 8: 0}
"""The code that fills up strips and pieces: zero, unless there are zero points."""


def piece_columns(bits: CodeBits) -> int:
    """Columns of K in a piece."""
    return PIECE_BYTES * 8 // (STRIP_ROWS * bits)


def packed_shape(n: int, k: int, bits: CodeBits) -> tuple[int, int, int]:
    """Shape of the packed uint8 weight: strips, pieces of a strip, bytes."""
    return -(-n // STRIP_ROWS), -(-k // piece_columns(bits)), PIECE_BYTES


def words(packed: Tensor) -> Tensor:
    """A packed weight as the kernel takes it: int64 (strips, words of a strip), the same memory."""
    return packed.view(torch.int64).flatten(1)


# Axes of a padded weight's parts in the order in which their codes are stored. Parts beside 16-bit
# activations: strip, half row, row, piece, k16 step, half of it, column pair, odd; beside e4m3
# ones: strip, half row, row, piece, k16, column four, byte.
_STORED: dict[tuple[CodeBits, ActivationBits], tuple[int, ...]] = {
    (4, 16): (0, 3, 2, 6, 4, 7, 5, 1),
    (8, 16): (0, 3, 2, 6, 4, 5, 7, 1),
    (4, 8): (0, 3, 2, 5, 4, 6, 1),
}


def _parts(strips: int, pieces: int, bits: CodeBits, x_bits: ActivationBits) -> tuple[int, ...]:
    steps = piece_columns(bits) // 16
    return (strips, 2, 8, pieces, steps, *((2, 4, 2) if x_bits == 16 else (4, 4)))


def pack_codes(codes: Tensor, bits: CodeBits, x_bits: ActivationBits = 16) -> Tensor:
    """Pack codes (N, K), uint8 (below 16 for 4 bits), into uint8 of ``packed_shape``."""
    n, k = codes.shape
    strips, pieces, _ = shape = packed_shape(n, k, bits)
    beyond = (0, pieces * piece_columns(bits) - k, 0, strips * STRIP_ROWS - n)
    parts = F.pad(codes, beyond, value=PADDING[bits]).view(_parts(strips, pieces, bits, x_bits))
    stored = parts.permute(_STORED[bits, x_bits]).reshape(-1, 2)
    data = stored[:, 0] | (stored[:, 1] << 4) if bits == 4 else stored
    return data.reshape(shape)


def unpack_codes(
    packed: Tensor, n: int, k: int, bits: CodeBits, x_bits: ActivationBits = 16
) -> Tensor:
    """The codes (N, K), uint8, of a packed weight."""
    strips, pieces, _ = packed.shape
    order = _STORED[bits, x_bits]
    shape = _parts(strips, pieces, bits, x_bits)
    data = torch.stack((packed & 15, packed >> 4), -1) if bits == 4 else packed
    stored = data.reshape([shape[axis] for axis in order])
    rows = stored.permute([order.index(axis) for axis in range(len(order))])
    return rows.reshape(strips * STRIP_ROWS, pieces * piece_columns(bits))[:n, :k].contiguous()
