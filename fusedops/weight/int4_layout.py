"""How int4 weights lie in memory: rows of nibbles, and tiles in the order of wgmma's registers.

``rows``: (N, ceil(K/2)) uint8; byte j of a row holds column 2j in its low nibble and 2j + 1 in its
high one. Where K is odd the last high nibble is ``PADDING``.

``wgmma16`` and ``wgmma8``: (ceil(N/64), ceil(K/64), 2048) uint8. Each tile of 64 rows and 64
columns is 16 consecutive bytes for each of the 128 threads of a warpgroup: the A fragments that the
thread needs for 64 columns of K, so that one 16-byte load from shared memory fills the registers of
four k16 steps (``wgmma16``, bf16 and fp16 activations) or two k32 steps (``wgmma8``, 8-bit ones),
and consecutive threads read consecutive addresses. Rows and columns beyond N and K are ``PADDING``,
whose value is zero without zero points.

The A fragment of wgmma in registers (PTX ISA, "Register Fragments for wgmma.mma_async.m64k16" and
"... m64k32"): thread t, of warp t // 32 and lane t % 32, holds in register r (0 to 3) of a step the
row 16 (t // 32) + (t % 32) // 4 + 8 (r % 2) and

* for 16-bit elements, the columns 2 (t % 4) + 8 (r // 2) + {0, 1} of 16;
* for 8-bit elements, the columns 4 (t % 4) + 16 (r // 2) + {0, 1, 2, 3} of 32.

The thread's nibble j (0 to 31, from the lowest bits of its four little-endian words up) is

* in ``wgmma16``: of step j // 8 the register j % 4, half (j % 8) // 4. One word is one step, and
  ``(word >> 4 r) & 0x000f000f | 0x43004300`` is register r as the bf16 pair 128 + q (ulp 1 there):
  a shift and one three-input logical operation; with 0x64006400 it is the fp16 pair 1024 + q;
* in ``wgmma8``: of step j // 16 the register (j % 16) // 4, byte j % 4. Half a word is one
  register, its four nibbles in the order of the register's bytes.

Rows are packed (``fusedops.packing``: gate/up, rotation partners) before tiles are made; partners
lie 8 rows apart, so that one thread holds both in registers r and r + 1.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fusedops.check import describe, require_choice, require_dim, require_dtype
from fusedops.errors import ConfigError, ShapeError

__all__ = [
    "INT4_LAYOUTS",
    "PADDING",
    "THREADS",
    "THREAD_BYTES",
    "TILE_BYTES",
    "TILE_K",
    "TILE_ROWS",
    "element_of_nibble",
    "int4_shape",
    "pack_nibbles",
    "to_rows",
    "to_tiles",
    "unpack_nibbles",
]

INT4_LAYOUTS = ("rows", "wgmma16", "wgmma8")
TILE_ROWS = 64
TILE_K = 64
THREADS = 128
THREAD_BYTES = 16
TILE_BYTES = THREADS * THREAD_BYTES
PADDING = 8
"""The nibble that fills up bytes and tiles."""

_NIBBLES = 2 * THREAD_BYTES


def element_of_nibble(layout: str, thread: int, nibble: int) -> tuple[int, int]:
    """(row, column) in its tile of a thread's nibble 0 to 31, see the module's text.

    Raises:
        ConfigError: ``layout`` is not ``wgmma16`` or ``wgmma8``.
    """
    require_choice("int4 layout", "layout", layout, INT4_LAYOUTS[1:])
    warp, lane = divmod(thread, 32)
    group, member = divmod(lane, 4)
    if layout == "wgmma16":
        step, rest = divmod(nibble, 8)
        half, register = divmod(rest, 4)
        column = 16 * step + 2 * member + 8 * (register // 2) + half
    else:
        step, rest = divmod(nibble, 16)
        register, byte = divmod(rest, 4)
        column = 32 * step + 4 * member + 16 * (register // 2) + byte
    return 16 * warp + group + 8 * (register % 2), column


@cache
def _sources(layout: str) -> Tensor:
    """For each nibble of a tile in stored order, its place in the tile's rows: (4096,) int64."""
    with torch.inference_mode(False):
        places = [
            row * TILE_K + column
            for thread in range(THREADS)
            for row, column in (element_of_nibble(layout, thread, j) for j in range(_NIBBLES))
        ]
        return torch.tensor(places, dtype=torch.int64, device="cpu")


def int4_shape(layout: str, n: int, k: int) -> tuple[int, ...]:
    """The shape in which an (N, K) weight is stored; ConfigError for an unknown layout."""
    require_choice("int4 layout", "layout", layout, INT4_LAYOUTS)
    if layout == "rows":
        return n, -(-k // 2)
    return -(-n // TILE_ROWS), -(-k // TILE_K), TILE_BYTES


def _joined(nibbles: Tensor) -> Tensor:
    """Pairs of nibbles (..., 2 B) as bytes (..., B)."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _split(packed: Tensor) -> Tensor:
    """Bytes (..., B) as nibbles (..., 2 B)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(values: Tensor) -> Tensor:
    """Integers 0 to 15 of shape (N, K), any integer dtype, in the layout ``rows``.

    Raises:
        DTypeError: ``values`` holds no integers.
        ShapeError: it is no matrix.
        ConfigError: an integer is outside of 0 to 15.
    """
    accepted = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    require_dtype("pack_nibbles", "values", values, accepted)
    require_dim("pack_nibbles", "values", values, 2, exactly=True)
    if values.numel():
        low, high = (int(bound) for bound in torch.aminmax(values))
        if low < 0 or high > 15:
            raise ConfigError(
                f"pack_nibbles: values is {describe(values)} and holds {low} to {high}; accepted "
                "are 0 to 15. Add 8 to signed ones."
            )
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, values.shape[1] % 2), value=8)
    return _joined(padded).contiguous()


def unpack_nibbles(packed: Tensor, k: int) -> Tensor:
    """The inverse of ``pack_nibbles``: uint8 (N, K).

    Raises:
        DTypeError: ``packed`` is not uint8.
        ShapeError: its shape is not (N, ceil(K/2)).
    """
    require_dtype("unpack_nibbles", "packed", packed, (torch.uint8,))
    if packed.dim() != 2 or packed.shape[1] != -(-k // 2):
        raise ShapeError(
            f"unpack_nibbles: packed is {describe(packed)}; accepted: (N, {-(-k // 2)}) for K={k}."
        )
    return _split(packed)[:, :k]


def to_tiles(packed: Tensor, k: int, layout: str) -> Tensor:
    """A weight in the layout ``rows`` as tiles of ``wgmma16`` or ``wgmma8``.

    Args:
        packed: (N, ceil(K/2)) uint8.
        k: K.
        layout: ``wgmma16`` or ``wgmma8``.

    Returns:
        (ceil(N/64), ceil(K/64), 2048) uint8.
    """
    require_choice("to_tiles", "layout", layout, INT4_LAYOUTS[1:])
    values = unpack_nibbles(packed, k)
    n = values.shape[0]
    tiles_n, tiles_k, _ = int4_shape(layout, n, k)
    padding = (0, tiles_k * TILE_K - k, 0, tiles_n * TILE_ROWS - n)
    whole = torch.nn.functional.pad(values, padding, value=PADDING)
    tiles = whole.reshape(tiles_n, TILE_ROWS, tiles_k, TILE_K).transpose(1, 2).flatten(2)
    return _joined(tiles[..., _sources(layout).to(packed.device)]).contiguous()


def to_rows(tiles: Tensor, n: int, k: int, layout: str) -> Tensor:
    """The inverse of ``to_tiles``: (N, ceil(K/2)) uint8, exact.

    Raises:
        DTypeError, ShapeError: ``tiles`` is not such tiles of an (N, K) weight.
    """
    require_choice("to_rows", "layout", layout, INT4_LAYOUTS[1:])
    require_dtype("to_rows", "tiles", tiles, (torch.uint8,))
    shape = int4_shape(layout, n, k)
    if tuple(tiles.shape) != shape:
        raise ShapeError(
            f"to_rows: tiles is {describe(tiles)}; accepted: {shape} for (N, K) = ({n}, {k})."
        )
    order = _sources(layout).to(tiles.device).argsort()
    in_order = _split(tiles)[..., order].unflatten(-1, (TILE_ROWS, TILE_K))
    rows = in_order.transpose(1, 2).reshape(shape[0] * TILE_ROWS, shape[1] * TILE_K)
    return pack_nibbles(rows[:n, :k])
