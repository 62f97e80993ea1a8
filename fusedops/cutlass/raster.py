"""The order in which a persistent grid walks the tiles of a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

__all__ = ["Raster"]


@dataclass(frozen=True)
class Raster:
    """Tiles in bands of ``group`` along M, each band walked along N with M running fastest.

    At any time the grid works on a patch of about ``group`` rows of tiles, so the x and weight
    tiles that neighbours share are read from L2. Cluster c of C takes the tiles c, c + C, ...; a
    cluster's CTAs have neighbouring tiles, along M or N. The order is fixed: no atomic counter.

    Attributes:
        tile_m, tile_n: rows and columns of a CTA's tile.
        cluster_m, cluster_n: CTAs of a cluster along each.
        group: cluster tiles of a band along M.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    group: int

    def counts(self, m: Any, n: Any) -> tuple[Any, Any]:
        """Cluster tiles along M and N that cover (m, n)."""
        return (
            cute.ceil_div(m, self.tile_m * self.cluster_m),
            cute.ceil_div(n, self.tile_n * self.cluster_n),
        )

    def locate(self, index: Any, counts: tuple[Any, Any], rank: Any) -> tuple[Any, Any]:
        """(M, N) index of the tile that CTA ``rank`` of a cluster has of cluster tile ``index``.

        It may lie beyond the result where a cluster reaches over its edge.
        """
        tiles_m, tiles_n = counts
        band_tiles = self.group * tiles_n
        band = index // band_tiles
        within = index - band * band_tiles
        first = band * self.group
        rows = cutlass.min(Int32(self.group), tiles_m - first)
        column = within // rows
        row = first + within - column * rows
        return row * self.cluster_m + rank % self.cluster_m, (
            column * self.cluster_n + rank // self.cluster_m
        )
