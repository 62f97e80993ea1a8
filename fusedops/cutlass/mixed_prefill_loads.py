"""The loading warp of the kernel for many rows with narrow weights: every stage of its CTA's tiles.

Sources: PTX ISA, "cp.async.bulk.tensor", "griddepcontrol".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from fusedops.config.mixed_prefill import MixedPrefillConfig
from fusedops.cutlass.raster import Raster
from fusedops.cutlass.ring import Ring, load, partition

__all__ = ["MixedPrefillLoads"]


@dataclass(frozen=True)
class MixedPrefillLoads:
    """The loads of a CTA.

    Attributes:
        config, ring, raster: the kernel's.
        pdl: whether x may still be written by the kernel before.
    """

    config: MixedPrefillConfig
    ring: Ring
    raster: Raster
    pdl: bool

    @cute.jit
    def run(
        self, x_side: Any, weights: Any, barriers: Any, place: Any, counts: Any, stages: Int32
    ) -> None:
        """Load through the ring, across tile boundaries; one warp calls this.

        Args:
            x_side: TMA atom, global and shared tensor.
            weights: (atom, global side, shared side) of codes, scales and zero points.
            barriers: full and empty.
            place: (cluster, number of clusters, rank in the cluster).
            counts: cluster tiles along M and N.
            stages: of a tile.
        """
        cfg = self.config
        x_atom, x, s_x = x_side
        full, empty = barriers
        cluster, clusters, rank = place
        x_from, x_to = partition(x_atom, x, s_x, (cfg.tile_m, cfg.x_columns), rank, cfg.cluster)
        x_pair = (x_atom, x_from, x_to)
        tiles = counts[0] * counts[1]

        # Weights of the first tile do not depend on earlier kernels.
        tile_m, tile_n = self.raster.locate(cluster, counts, rank)
        ahead = cutlass.min(stages, Int32(cfg.stages))
        for i in cutlass.range(ahead, unroll=1):
            self._weights(weights, full + i, tile_n, i, i)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        for i in cutlass.range(ahead, unroll=1):
            self._activations(x_pair, full + i, tile_m, i, i)

        stage = ahead % cfg.stages
        parity = Int32(1) - ahead // cfg.stages
        first = ahead
        for tile in cutlass.range(cluster, tiles, clusters, unroll=1):
            tile_m, tile_n = self.raster.locate(tile, counts, rank)
            for kt in cutlass.range(first, stages, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, parity)
                self._weights(weights, full + stage, tile_n, kt, stage)
                self._activations(x_pair, full + stage, tile_m, kt, stage)
                stage, parity = self.ring.next(stage, parity)
            first = Int32(0)

    def _weights(self, weights: Any, barrier: Any, tile_n: Any, kt: Any, stage: Any) -> None:
        """Announce a stage's bytes of all operands and load its weights."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.stage_bytes)
        for atom, source, to in weights:
            load(atom, source[(None, tile_n, kt)], to[(None, stage)], barrier, 1)

    def _activations(self, x_pair: Any, barrier: Any, tile_m: Any, kt: Any, stage: Any) -> None:
        """Load a stage of x, each CTA of the cluster a part for all."""
        atom, source, to = x_pair
        loads = self.config.x_loads
        for i in range(loads):
            at = (None, tile_m, kt * loads + i)
            load(atom, source[at], to[(None, stage * loads + i)], barrier, self.config.cluster)
