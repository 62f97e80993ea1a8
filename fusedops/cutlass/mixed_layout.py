"""How narrow weights lie in memory for ``fusedops.cutlass.sm90_mixed``: whole wgmma fragments.

A weight (N, K) of 4- or 8-bit codes is stored in strips of 16 rows, a strip in pieces of 512 bytes:
64 columns of 4-bit or 32 of 8-bit codes. So a tile may have any multiple of 16 rows. Lane l of the
warp that multiplies the strip reads its 16 bytes at 16 l of a piece and has whole A fragments of
four (4-bit) or two (8-bit) k16 steps. In a fragment (PTX ISA, "Register Fragments for
wgmma.mma_async") register r of lane l holds row ``l // 4 + 8 (r % 2)``, columns
``2 (l % 4) + {0, 1} + 8 (r // 2)``.

* 4-bit: word i of the 16 bytes is k16 step i; register r has its even column in nibble r, its odd
  one in nibble r + 4, so ``(word >> 4 r) & 0x000f000f`` picks both.
* 8-bit: words 2 i and 2 i + 1 are step i, the second its columns from 8 on; a word's bytes 0 and 2
  are the rows of the first half, bytes 1 and 3 those eight further on.

Codes: int4 is stored as ``q + 8`` or, with zero points, as it is (0 to 15); int8 in two's
complement; e4m3 as its bits. N is padded to whole strips, K to whole pieces, by ``PADDING``.
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
    "CodeBits",
    "code_position",
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


def code_position(n: int, k: int, bits: CodeBits) -> tuple[int, int]:
    """(strip, first bit in the strip's little-endian bytes) of the code of row n, column k."""
    columns = piece_columns(bits)
    half_row, row = divmod(n % STRIP_ROWS, 8)
    step, column = divmod(k % columns, 16)
    half_k, column = divmod(column, 8)
    lane = row * 4 + column // 2
    odd = column % 2
    if bits == 4:
        unit = 8 * step + half_row + 2 * half_k + 4 * odd
    else:
        unit = 8 * step + 4 * half_k + half_row + 2 * odd
    return n // STRIP_ROWS, ((k // columns) * PIECE_BYTES + lane * 16) * 8 + unit * bits


def pack_codes(codes: Tensor, bits: CodeBits) -> Tensor:
    """Pack codes (N, K), uint8 (below 16 for 4 bits), into uint8 of ``packed_shape``."""
    n, k = codes.shape
    strips, pieces, _ = shape = packed_shape(n, k, bits)
    columns = piece_columns(bits)
    beyond = (0, pieces * columns - k, 0, strips * STRIP_ROWS - n)
    padded = F.pad(codes, beyond, value=PADDING[bits])
    # strip, half row, row, piece, step, half of k16, column pair, odd
    parts = padded.view(strips, 2, 8, pieces, columns // 16, 2, 4, 2)
    if bits == 4:
        nibbles = parts.permute(0, 3, 2, 6, 4, 7, 5, 1).reshape(strips, -1, 2)
        data = nibbles[..., 0] | (nibbles[..., 1] << 4)
    else:
        data = parts.permute(0, 3, 2, 6, 4, 5, 7, 1).reshape(strips, -1)
    return data.reshape(shape).contiguous()


def unpack_codes(packed: Tensor, n: int, k: int, bits: CodeBits) -> Tensor:
    """The codes (N, K), uint8, of a packed weight."""
    strips = packed.shape[0]
    steps = piece_columns(bits) // 16
    data = packed.contiguous()
    if bits == 4:
        nibbles = torch.stack((data & 15, data >> 4), -1)
        parts = nibbles.view(strips, -1, 8, 4, steps, 2, 2, 2).permute(0, 7, 2, 1, 4, 6, 3, 5)
    else:
        parts = data.view(strips, -1, 8, 4, steps, 2, 2, 2).permute(0, 7, 2, 1, 4, 5, 3, 6)
    return parts.reshape(strips * STRIP_ROWS, -1)[:n, :k].contiguous()
