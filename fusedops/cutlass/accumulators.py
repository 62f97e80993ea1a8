"""Where a thread's wgmma accumulators lie when the weight is on the row side.

Accumulator j of a thread lies at row + 8 * bit 1 of j, column + bit 0 of j + 8 * (j >> 2) (PTX ISA,
"Register Fragments for wgmma.mma_async"); rows are N here, columns M. With a split over a cluster a
CTA owns the accumulators whose bit 0 is its rank, which keeps row pairs (bit 1) together.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import const_expr, cute

from fusedops.cutlass.products import as_float
from fusedops.cutlass.tile import Coordinates, Slot

__all__ = ["accumulator_coordinates", "owned_values", "whole_blocks"]

WGMMA_ROWS = 64


def owned_values(acc: Any, mine: Any, m_pad: int, split: int) -> dict[Slot, Any]:
    """A thread's sums in float32 by (m slot, n slot): ``acc``, or with a split ``mine``."""
    if split == 1:
        slots = {((j >> 2) * 2 + (j & 1), (j >> 1) & 1): acc[j] for j in range(m_pad // 2)}
    else:
        slots = {(j >> 1, j & 1): mine[j] for j in range(m_pad // 4)}
    return {slot: as_float(value) for slot, value in slots.items()}


def accumulator_coordinates(
    row: Any,
    column: Any,
    tile_row: Any,
    rank: Any,
    sizes: tuple[Any, Any],
    rows: int,
    m_pad: int,
    split: int,
) -> Coordinates:
    """Coordinates of the owned accumulators; rows beyond the tile get a column beyond N.

    Args:
        row, column: of the thread's accumulator 0 in the tile.
        tile_row: first weight row of the tile.
        rank: of the CTA in its cluster.
        sizes: (M, N).
        rows, m_pad, split: the kernel's configuration.
    """
    groups = range(0, m_pad, 8)
    if split == 1:
        m = tuple(column + g + p for g in groups for p in range(2))
    else:
        m = tuple(column + g + rank for g in groups)
    n = tuple(_inside_tile(row + 8 * half, tile_row, rows, sizes[1]) for half in range(2))
    return Coordinates(m, n, ((0, 1),), *sizes)


@cute.jit
def _inside_tile(row: Any, tile_row: Any, rows: cutlass.Constexpr, n_size: Any) -> Any:
    position = tile_row + row
    if const_expr(rows % WGMMA_ROWS != 0):
        position = cutlass.select_(row < rows, position, n_size)
    return position


def whole_blocks(s_w: Any, config: Any, element_bytes: int) -> Any:
    """The weight's stages as wgmma reads them: whole blocks of 64 rows.

    For a tile of fewer rows they are laid over the ring's 128-byte-swizzled atoms of (8 rows, 64
    columns) and read on past the stage's end; a stage is still ``rows`` x ``k`` apart.
    """
    rows, k = config.rows, config.k
    if rows % WGMMA_ROWS == 0:
        return s_w
    columns = 128 // element_bytes
    return cute.make_tensor(
        s_w.iterator,
        cute.make_layout(
            ((8, config.warpgroups * 8), (columns, k // columns), (1, config.stages)),
            stride=((columns, 8 * columns), (1, rows * columns), (0, rows * k)),
        ),
    )
