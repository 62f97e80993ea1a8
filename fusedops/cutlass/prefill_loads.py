"""The loading warp of the prefill kernel: the stages of every tile of its CTA, in order.

Sources: PTX ISA, "cp.async.bulk.tensor", "griddepcontrol".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from fusedops.config.prefill import PrefillConfig
from fusedops.cutlass.raster import Raster
from fusedops.cutlass.ring import Ring, load, partition

__all__ = ["PrefillLoads", "k_span"]


def k_span(config: PrefillConfig, k_tiles: Any, rank: Any) -> tuple[Any, Any]:
    """First k-tile and number of k-tiles of the CTA that is ``rank`` in its cluster."""
    if config.split == 1:
        return Int32(0), k_tiles
    first = k_tiles * rank // config.split
    return first, k_tiles * (rank + 1) // config.split - first


@dataclass(frozen=True)
class PrefillLoads:
    """The loads of a CTA.

    Attributes:
        config, ring, raster: the kernel's.
        pdl: whether x may still be written by the kernel before.
        stage_bytes: of a stage of all operands.
        scales: the ``ScaleStages`` of x, or None.
    """

    config: PrefillConfig
    ring: Ring
    raster: Raster
    pdl: bool
    stage_bytes: int
    scales: Any = None

    @cute.jit
    def run(self, x_side: Any, w_side: Any, scale_side: Any, barriers: Any, place: Any) -> None:
        """Load x and w through the ring, across tile boundaries; one warp calls this.

        Args:
            x_side, w_side: TMA atom, global and shared tensor.
            scale_side: the same of x's scales, empty without them.
            barriers: full and empty.
            place: (cluster, number of clusters, rank in the cluster).
        """
        cfg = self.config
        x_atom, x, s_x = x_side
        w_atom, w, s_w = w_side
        full, empty = barriers
        cluster, clusters, rank = place
        peer = rank if const_expr(cfg.split == 1) else Int32(0)
        x_from, x_to = partition(
            x_atom, x, s_x, (cfg.tile_m, cfg.k), peer // cfg.cluster_m, cfg.cluster_n
        )
        w_from, w_to = partition(
            w_atom, w, s_w, (cfg.tile_n, cfg.k), peer % cfg.cluster_m, cfg.cluster_m
        )
        if const_expr(self.scales is not None):
            scale_atom, scale_tma, s_scale = scale_side
            scale_from, scale_to = partition(scale_atom, scale_tma, s_scale, self.scales.tile, 0, 1)
        counts = self.raster.counts(cute.size(x, mode=[0]), cute.size(w, mode=[0]))
        tiles = counts[0] * counts[1]
        k_first, k_tiles = k_span(cfg, cute.ceil_div(cute.size(x, mode=[1]), cfg.k), rank)

        # Weights of the first tile do not depend on earlier kernels.
        tile_m, tile_n = self.raster.locate(cluster, counts, peer)
        ahead = cutlass.min(k_tiles, Int32(cfg.stages))
        for i in cutlass.range(ahead, unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + i, self.stage_bytes)
            at = (None, tile_n, k_first + i)
            load(w_atom, w_from[at], w_to[(None, i)], full + i, cfg.cluster_m)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        for i in cutlass.range(ahead, unroll=1):
            at = (None, tile_m, k_first + i)
            load(x_atom, x_from[at], x_to[(None, i)], full + i, cfg.cluster_n)
            if const_expr(self.scales is not None):
                at = (None, k_first + i, tile_m)
                load(scale_atom, scale_from[at], scale_to[(None, i)], full + i, 1)

        stage = ahead % cfg.stages
        parity = Int32(1) - ahead // cfg.stages
        first = ahead
        for tile in cutlass.range(cluster, tiles, clusters, unroll=1):
            tile_m, tile_n = self.raster.locate(tile, counts, peer)
            for kt in cutlass.range(first, k_tiles, unroll=1):
                barrier = full + stage
                cute.arch.mbarrier_wait(empty + stage, parity)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
                x_at, w_at = (None, tile_m, k_first + kt), (None, tile_n, k_first + kt)
                load(x_atom, x_from[x_at], x_to[(None, stage)], barrier, cfg.cluster_n)
                load(w_atom, w_from[w_at], w_to[(None, stage)], barrier, cfg.cluster_m)
                if const_expr(self.scales is not None):
                    at = (None, k_first + kt, tile_m)
                    load(scale_atom, scale_from[at], scale_to[(None, stage)], barrier, 1)
                stage, parity = self.ring.next(stage, parity)
            first = Int32(0)
