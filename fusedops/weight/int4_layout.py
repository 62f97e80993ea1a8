"""How int4 weights lie in memory: rows of nibbles, and tiles in the order of wgmma's registers.

``rows``: (N, ceil(K/2)) uint8; byte j of a row holds column 2j in its low nibble and 2j + 1 in its
high one. Where K is odd the last high nibble is ``PADDING[4]``, whose value is zero without zero
points.

``wgmma16`` (beside bf16 and fp16 activations) and ``wgmma8`` (beside 8-bit ones): the pieces of
``fusedops.weight.fragments``, (ceil(N/16), ceil(K/64), 512) uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.check import describe, require_choice, require_dim, require_dtype
from fusedops.errors import ConfigError, ShapeError
from fusedops.weight.fragments import (
    PADDING,
    ActivationBits,
    pack_codes,
    packed_shape,
    unpack_codes,
)

__all__ = [
    "INT4_LAYOUTS",
    "int4_shape",
    "pack_nibbles",
    "to_rows",
    "to_tiles",
    "unpack_nibbles",
]

_X_BITS: dict[str, ActivationBits] = {"wgmma16": 16, "wgmma8": 8}

INT4_LAYOUTS = ("rows", *_X_BITS)


def int4_shape(layout: str, n: int, k: int) -> tuple[int, ...]:
    """The shape in which an (N, K) weight is stored; ConfigError for an unknown layout."""
    require_choice("int4 layout", "layout", layout, INT4_LAYOUTS)
    if layout == "rows":
        return n, -(-k // 2)
    return packed_shape(n, k, 4)


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
    beyond = (0, values.shape[1] % 2)
    padded = torch.nn.functional.pad(values.to(torch.uint8), beyond, value=PADDING[4])
    return (padded[:, 0::2] | (padded[:, 1::2] << 4)).contiguous()


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
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[:, :k]


def to_tiles(packed: Tensor, k: int, layout: str) -> Tensor:
    """A weight in the layout ``rows`` as tiles of ``wgmma16`` or ``wgmma8``.

    Args:
        packed: (N, ceil(K/2)) uint8.
        k: K.
        layout: ``wgmma16`` or ``wgmma8``.

    Returns:
        (ceil(N/16), ceil(K/64), 512) uint8.
    """
    require_choice("to_tiles", "layout", layout, INT4_LAYOUTS[1:])
    return pack_codes(unpack_nibbles(packed, k), 4, _X_BITS[layout])


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
    return pack_nibbles(unpack_codes(tiles, n, k, 4, _X_BITS[layout]))
