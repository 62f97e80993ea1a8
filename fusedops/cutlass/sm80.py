"""GEMM in the manner of Ampere: cp.async ring, ldmatrix, mma.sync; sm_80 and every later one.

A CTA computes one tile of ``x w^T`` and runs the epilogue on it. Its threads fill a ring of stages
with cp.async; one barrier a k-tile says both that the next stage has arrived and that the last one
may be filled again. K is summed in steps of 16 in ascending order whatever the tiling, so a row's
result does not depend on M, on the other rows or on the chosen tiling.

x and w may have any alignment down to a single element (``MmaConfig.align_bytes``, fixed when
compiled) and any row pitch; M, N and K are arbitrary, also K = 0. On sm_90 and later the kernel
takes part in programmatic dependent launch: weights are fetched before ``griddepcontrol.wait``,
everything that an earlier kernel may have written after it.

Sources: PTX ISA, "mma.sync", "ldmatrix", "cp.async", "griddepcontrol".
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import const_expr, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from fusedops.config.sm80 import MmaConfig
from fusedops.cutlass.arguments import chain_tensors, fake_tensor
from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.cutlass.raster import Raster
from fusedops.cutlass.sm80_copy import TileCopy
from fusedops.cutlass.sm80_fragments import MMA_K, WarpTile
from fusedops.cutlass.sm80_output import OutputTile, TileStatistics, join_slots, quad_maximum
from fusedops.cutlass.tile import ChainEmission
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.outputs import RowStat

__all__ = ["MmaGemm", "mma_arguments"]

_GROUP = 8
"""Tiles along M that are walked before the next column of tiles: they share the weight in L2."""


class MmaGemm:
    """The kernel of one configuration, epilogue and dtype; M, N, K and strides are dynamic."""

    def __init__(
        self,
        config: MmaConfig,
        epilogue: Epilogue,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        paired: bool,
        pdl: bool,
    ) -> None:
        self.config, self.epilogue = config, epilogue
        self.paired, self.pdl = paired, pdl
        self.out_dtype = out_dtype
        self.element_bytes = dtype.itemsize
        self.operand_names = [operand.name for operand in epilogue.operands]
        self.output_names = [output.name for output, _ in epilogue.extra_outputs(1 << 20)]
        self.warp_tile = WarpTile(config, CUTE_DTYPES[dtype])
        self.raster = Raster(config.tile_m, config.tile_n, 1, 1, _GROUP)
        copies = (config.tile_k, config.threads, config.align_bytes)
        self.copy_x = TileCopy(config.tile_m, *copies)
        self.copy_w = TileCopy(config.tile_n, *copies)
        # Parts of the epilogue whose operands are on their way while one is computed. With many
        # accumulators only operands read in pairs leave registers for it.
        self.parts_ahead = 2 if paired or config.accumulators <= 32 else 0
        # Loads do not rise above a barrier. Without one ptxas begins all of them at once, for which
        # it spills accumulators to local memory.
        self.fenced = any(operand.axis in ("n", "mn") for operand in epilogue.operands)
        columns = epilogue.widths(config.tile_n)[-1]
        pitch_bytes = config.output_pitch_bytes(columns, out_dtype.itemsize)
        self.output = OutputTile(out_dtype, config.tile_m, columns, pitch_bytes, config.threads)
        self.group_columns = max((node.group_columns() for node in epilogue), default=1)
        self.shrink = config.tile_n // columns
        statistics = tuple(node.statistic for node in epilogue if isinstance(node, RowStat))
        self.statistics = TileStatistics(statistics, config.warps_n, config.tile_m)

    @cute.jit
    def __call__(
        self, w: cute.Tensor, x: cute.Tensor, out: cute.Tensor, tensors: Any, stream: Any
    ) -> None:
        """Launch one CTA a tile.

        Args:
            w: (N, K), x: (M, K), rows of stride 1, addresses and pitches multiples of align_bytes.
            out: (M, N'), rows of stride 1.
            tensors: operands, then extra outputs, in the chain's order; ``(out,)`` for none.
        """
        tiles_m, tiles_n = self.raster.counts(cute.size(x, mode=[0]), cute.size(w, mode=[0]))
        self.kernel(w, x, out, tensors).launch(
            grid=[tiles_m * tiles_n, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, out: cute.Tensor, tensors: Any) -> None:
        cfg = self.config
        stages, tile_k = cfg.stages, cfg.tile_k
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        m_size, k_size = x.shape
        n_size = cute.size(w, mode=[0])
        counts = self.raster.counts(m_size, n_size)
        tile_m, tile_n = self.raster.locate(block, counts, 0)
        first_m, first_n = tile_m * cfg.tile_m, tile_n * cfg.tile_n
        k_tiles = cute.ceil_div(k_size, tile_k)

        smem = SmemAllocator()
        ring_bytes = cfg.ring_bytes(self.element_bytes)
        output_bytes = self.output.rows * self.output.pitch_bytes
        ring = smem.allocate(max(ring_bytes, output_bytes), 128)
        row_parts = None
        if const_expr(len(self.statistics.names) > 0):
            row_parts = smem.allocate_tensor(
                cutlass.Float32, self.statistics.layout(), byte_alignment=16
            )
        x_base = ring.toint()
        w_base = x_base + stages * self.copy_x.tile_bytes

        x_share = self.copy_x.share(x, first_m, thread)
        w_share = self.copy_w.share(w, first_n, thread)
        for stage in cutlass.range_constexpr(stages - 1):
            if stage < k_tiles:
                at = w_base + stage * self.copy_w.tile_bytes
                self.copy_w.copy(w_share, stage * tile_k, at)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        # The first group also holds the weights of all these stages, which came before.
        for stage in cutlass.range_constexpr(stages - 1):
            if stage < k_tiles:
                at = x_base + stage * self.copy_x.tile_bytes
                self.copy_x.copy(x_share, stage * tile_k, at)
            cute.arch.cp_async_commit_group()

        warp_row, warp_column = self.warp_tile.origin(thread)
        acc = self.warp_tile.accumulators()
        for k_tile in cutlass.range(k_tiles, unroll=1):
            # All but the newest stages - 2 groups have arrived, this stage's among them; behind
            # the barrier everyone's have, and nobody reads the stage of the last k-tile any more.
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            ahead = k_tile + (stages - 1)
            if ahead < k_tiles:
                free = ahead % stages
                x_at = x_base + free * self.copy_x.tile_bytes
                w_at = w_base + free * self.copy_w.tile_bytes
                if (ahead + 1) * tile_k <= k_size:
                    self.copy_x.copy(x_share, ahead * tile_k, x_at, whole=True)
                    self.copy_w.copy(w_share, ahead * tile_k, w_at, whole=True)
                else:
                    self.copy_x.copy(x_share, ahead * tile_k, x_at)
                    self.copy_w.copy(w_share, ahead * tile_k, w_at)
            cute.arch.cp_async_commit_group()
            stage = k_tile % stages
            x_now = x_base + stage * self.copy_x.tile_bytes
            w_now = w_base + stage * self.copy_w.tile_bytes
            for step in cutlass.range_constexpr(tile_k // MMA_K):
                self.warp_tile.multiply(
                    acc,
                    self.warp_tile.load_x(x_now, warp_row, thread, step),
                    self.warp_tile.load_w(w_now, warp_column, thread, step),
                )
        # The result takes the ring's place.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        emission = self._emission(tensors)
        combines: dict[str, str] = {}
        rows: dict[tuple[str, int], dict[int, Any]] = {}
        parts = self.warp_tile.parts(self.group_columns)
        begun: list[tuple[Any, Any]] = []
        for index in cutlass.range_constexpr(len(parts) + self.parts_ahead):
            if const_expr(index < len(parts)):
                if const_expr(self.fenced and index > 0):
                    cute.arch.sync_threads()
                at = self.warp_tile.coordinates(
                    first_m + warp_row,
                    first_n + warp_column,
                    parts[index],
                    thread,
                    (m_size, n_size),
                )
                begun.append((at, emission.load(at)))
            if const_expr(index >= self.parts_ahead):
                part = parts[index - self.parts_ahead]
                at, loaded = begun[index - self.parts_ahead]

                def reduce_rows(
                    output: str, by_slot: dict[int, Any], combine: str, row_block: int = part[0]
                ) -> None:
                    combines[output] = combine
                    before = rows.get((output, row_block))
                    rows[output, row_block] = join_slots(before, by_slot, combine)

                values = self.warp_tile.values(acc, part)
                finished = emission.run(values, at, loaded, reduce_rows, quad_maximum)
                self.output.write(finished, x_base, first_m, first_n // self.shrink)
        for (name, row_block), by_slot in rows.items():
            self.statistics.add(
                name,
                by_slot,
                combines[name],
                row_parts,
                warp_row + row_block * 16,
                warp_column // cfg.warp_n,
                thread,
            )
        cute.arch.sync_threads()
        self.output.store(ring, out, first_m, first_n // self.shrink, n_size // self.shrink, thread)
        if const_expr(len(self.statistics.names) > 0):
            self.statistics.write(
                emission.outputs,
                combines,
                row_parts,
                first_m,
                tile_n,
                counts[1],
                m_size,
                thread,
                cfg.threads,
            )

    def _emission(self, tensors: Any) -> ChainEmission:
        count = len(self.operand_names)
        return ChainEmission(
            self.epilogue,
            dict(zip(self.operand_names, tensors[:count], strict=True)),
            dict(zip(self.output_names, tensors[count:], strict=False)),
            self.out_dtype,
            self.paired,
        )


def mma_arguments(
    config: MmaConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
    paired: bool,
    pdl: bool,
) -> tuple[Any, ...]:
    """The kernel of a configuration and chain, with the fake tensors to trace it on.

    Args:
        config: the tiling.
        epilogue: the chain.
        dtype: of x and w.
        out_dtype: of the result.
        operand_dtypes: of the chain's operands, None where one is left out.
        paired: what the chain reads and writes along N beside the result may be accessed two
            elements at a time, see ``ChainEmission.paired``.
        pdl: use programmatic dependent launch; only sm_90 and later have it.
    """
    tensors = chain_tensors(epilogue, operand_dtypes, out_dtype)
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2)
    return (
        MmaGemm(config, epilogue, dtype, out_dtype, paired, pdl),
        _aligned_rows(CUTE_DTYPES[dtype], config.align_bytes),
        _aligned_rows(CUTE_DTYPES[dtype], config.align_bytes),
        out,
        tuple(tensors) or (out,),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _aligned_rows(element: Any, align_bytes: int) -> Any:
    """A matrix with rows of stride 1, whose address and row pitch are so aligned."""
    pitch = cute.sym_int64(divisibility=align_bytes * 8 // element.width)
    shape = (cute.sym_int32(), cute.sym_int32())
    return make_fake_tensor(element, shape, (pitch, 1), assumed_align=align_bytes)
