"""GEMM for many rows on sm_90a: persistent, warp-specialised, epilogue beside the main loop.

``out = epilogue(x w^T)``, rows of x on wgmma's row side. A CTA an SM walks its tiles in a fixed
order (``raster``). One warp loads x and w through a ring of TMA stages, across tile boundaries; two
warpgroups multiply, with most of the SM's registers moved to them. Cooperative: both share a tile,
64-row blocks in turn. Ping-pong: each has a tile of its own, and their main loops take turns, so
that one's epilogue runs beside the other's products. The CTAs of a cluster share the tile they have
in common: each loads half of it and the bulk copy writes it to both. Or they split its K: each
multiplies a part of K, and gets some columns of the sum (``reduce_scatter``); then a cluster has
one tile.

Order. ``ring`` has the protocol of the stages, ``staging`` that of the result's buffers, each of
which belongs to one warpgroup. In ping-pong mode the warpgroups take the CTA's tiles alternately,
so each skips the other's iterations of the ring. The named barrier ``ORDER + g`` lets warpgroup g
into its main loop: it takes 128 arrivals of the other, given when that one has issued its last
product (and once at the start, for warpgroup 0), and the 128 of g itself. A warpgroup gives one
arrival a tile and takes one a tile, and gives the next only after it has taken the other's, so no
barrier ever has two of them. One may be left over at the end, where nobody waits for it.

With programmatic dependent launch the ring fills with weights before ``griddepcontrol.wait``;
everything that an earlier kernel may have written is read, and anything written, after it.

Sources: PTX ISA, "wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "griddepcontrol".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from fusedops.config.prefill import (
    CONSUMERS,
    K_TILE,
    STORE_BUFFERS,
    PrefillConfig,
    store_columns,
)
from fusedops.cutlass.arguments import chain_tensors, fake_tensor
from fusedops.cutlass.bulk_operand import BulkLoads, bulk_operand
from fusedops.cutlass.mainloop import multiply
from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.cutlass.prefill_epilogue import PrefillEpilogue, TilePlace
from fusedops.cutlass.prefill_loads import PrefillLoads, k_span
from fusedops.cutlass.raster import Raster
from fusedops.cutlass.reduce_scatter import ReduceScatter
from fusedops.cutlass.ring import Ring, load_atom
from fusedops.cutlass.staging import ROWS, Staging
from fusedops.cutlass.tile import ChainEmission, halves_columns
from fusedops.epilogue.chain import Epilogue

__all__ = ["PrefillGemm", "prefill_arguments"]

WARPGROUP = 128
THREADS = (CONSUMERS + 1) * WARPGROUP
ORDER = 1 + CONSUMERS
"""First of the named barriers that order the main loops; 1 and 2 are the staging buffers'."""


class PrefillGemm:
    """The kernel of one configuration, epilogue and dtype; M, N, K and strides are dynamic.

    Args:
        aligned: the result, and what the chain reads along N, have addresses and row pitches that
            are multiples of 16 bytes, and widths that are multiples of 8: results leave by bulk
            tensor stores and operands are read in pairs.
    """

    def __init__(
        self,
        config: PrefillConfig,
        epilogue: Epilogue,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        aligned: bool,
        pdl: bool = True,
        operand_dtypes: tuple[torch.dtype | None, ...] = (),
    ) -> None:
        self.config, self.epilogue, self.aligned, self.pdl = config, epilogue, aligned, pdl
        self.dtype, self.out_dtype = dtype, out_dtype
        self.element = CUTE_DTYPES[dtype]
        self.operand_names = [operand.name for operand in epilogue.operands]
        self.output_names = [output.name for output, _ in epilogue.extra_outputs(1 << 20)]
        halving = 2 if any(halves_columns(node) for node in epilogue) else 1
        # Behind a split the epilogue has a narrower tile.
        self.finished = replace(config, tile_n=config.tile_n // config.split)
        columns = store_columns(self.finished.tile_n // halving, out_dtype.itemsize)
        self.staging = Staging(out_dtype, columns, STORE_BUFFERS, CONSUMERS)
        self.arriving = bulk_operand(config, epilogue, operand_dtypes, self.staging, aligned)
        self.arriving_at = -1
        if self.arriving is not None:
            self.arriving_at = self.operand_names.index(self.arriving)
        self.ring = Ring(config.stages, 4 * config.sharing, config.cluster)
        self.raster = Raster(
            config.tile_m, config.tile_n, config.cluster_m, config.cluster_n, config.group
        )
        self.sums = ReduceScatter(config.split, CONSUMERS * WARPGROUP, config.accumulators)
        stage_bytes = (config.tile_m + config.tile_n) * K_TILE * dtype.itemsize
        self.loads = PrefillLoads(config, self.ring, self.raster, pdl, stage_bytes)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        out: cute.Tensor,
        tensors: Any,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch on ``clusters`` clusters, or on as many as there are tiles if those are fewer.

        Args:
            x: (M, K), w: (N, K), rows of stride 1, pitch a multiple of 16 bytes; out: (M, N').
            tensors: operands, then extra outputs, in the chain's order; ``(out,)`` for none.
        """
        cfg = self.config
        row_major = LayoutEnum.ROW_MAJOR
        tiled_mma = sm90.make_trivial_tiled_mma(
            self.element,
            self.element,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (cfg.sharing, 1, 1),
            tiler_mn=(ROWS, cfg.tile_n),
        )
        shape = (cfg.tile_m, cfg.tile_n, K_TILE)
        x_layout = sm90.make_smem_layout_a(row_major, shape, self.element, cfg.stages)
        w_layout = sm90.make_smem_layout_b(row_major, shape, self.element, cfg.stages)
        x_atom, x_tma = load_atom(x, x_layout, (cfg.tile_m, K_TILE), cfg.cluster_n)
        w_atom, w_tma = load_atom(w, w_layout, (cfg.tile_n, K_TILE), cfg.cluster_m)
        s_layout = self.staging.layout()
        counts = self.raster.counts(cute.size(x, mode=[0]), cute.size(w, mode=[0]))
        clusters = cutlass.min(clusters, counts[0] * counts[1])
        result = self.staging.store_side(out, self.aligned)
        operand: tuple[Any, ...] = ()
        if const_expr(self.arriving is not None):
            operand = BulkLoads.side(self.staging, tensors[self.arriving_at])
        self.kernel(
            (x_atom, x_tma, w_atom, w_tma, *operand),
            result,
            tensors,
            tiled_mma,
            x_layout,
            w_layout,
            s_layout,
        ).launch(
            grid=[clusters * cfg.ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[cfg.ctas, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        loaded: Any,
        result: Any,
        tensors: Any,
        tiled_mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        s_layout: cute.ComposedLayout,
    ) -> None:
        cfg = self.config
        x_atom, x, w_atom, w = loaded[:4]
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = block % cfg.ctas
        cluster = block // cfg.ctas
        clusters = grid // cfg.ctas

        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if warp == CONSUMERS * 4:
            cpasync.prefetch_descriptor(x_atom)
            cpasync.prefetch_descriptor(w_atom)

        smem = SmemAllocator()
        buffers = STORE_BUFFERS * CONSUMERS
        barriers = smem.allocate_array(Int64, 2 * cfg.stages + 2 + buffers)
        full, empty = barriers, barriers + cfg.stages
        drained, received = barriers + 2 * cfg.stages, barriers + 2 * cfg.stages + 1
        landed = barriers + 2 * cfg.stages + 2
        s_x = smem.allocate_tensor(
            self.element, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner
        )
        s_w = smem.allocate_tensor(
            self.element, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner
        )
        s_out = smem.allocate_tensor(
            STORAGE_DTYPES[self.out_dtype],
            s_layout.outer,
            byte_alignment=1024,
            swizzle=s_layout.inner,
        )
        if thread == 0:
            if const_expr(cfg.split > 1):
                self.sums.initialize(drained, received)
            if const_expr(self.arriving is not None):
                BulkLoads.initialize(self.staging, landed)
        self.ring.initialize(full, empty, thread)
        if const_expr(cfg.split > 1):
            cute.arch.cluster_arrive_relaxed()

        if warp >= CONSUMERS * 4:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == CONSUMERS * 4:
                self.loads.run(
                    (x_atom, x, s_x), (w_atom, w, s_w), (full, empty), (cluster, clusters, rank)
                )
            elif const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            if const_expr(cfg.split > 1):
                cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            self._consume(
                tiled_mma,
                (x, s_x),
                (w, s_w),
                s_out,
                result,
                tensors,
                (full, empty, drained, received, landed),
                (cluster, clusters, rank),
                loaded[4:],
            )
        if const_expr(cfg.cluster > 1):
            # A CTA's barriers must outlive the other's last arrival there.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _consume(
        self,
        tiled_mma: cute.TiledMma,
        x_pair: Any,
        w_pair: Any,
        s_out: cute.Tensor,
        result: Any,
        tensors: Any,
        barriers: Any,
        place: Any,
        operand: Any,
    ) -> None:
        """Two warpgroups: products and epilogue of the cluster's tiles."""
        cfg = self.config
        full, empty, drained, received, landed = barriers
        cluster, clusters, rank = place
        peer = rank if const_expr(cfg.split == 1) else Int32(0)
        x, s_x = x_pair
        w, s_w = w_pair
        cta_thread, _, _ = cute.arch.thread_idx()
        thread = cta_thread % WARPGROUP
        group = cute.arch.make_warp_uniform(cta_thread // WARPGROUP)
        m_size, n_size = cute.size(x, mode=[0]), cute.size(w, mode=[0])
        counts = self.raster.counts(m_size, n_size)
        tiles = counts[0] * counts[1]
        _, k_tiles = k_span(cfg, cute.ceil_div(cute.size(x, mode=[1]), K_TILE), rank)

        mma = tiled_mma.get_slice(group % cfg.sharing * WARPGROUP)
        frag_x = tiled_mma.make_fragment_A(mma.partition_A(s_x))
        frag_w = tiled_mma.make_fragment_B(mma.partition_B(s_w))
        shape = mma.partition_C(cute.make_identity_tensor((cfg.tile_m, cfg.tile_n))).shape
        acc = cute.make_rmem_tensor(shape, Float32)
        finished = acc
        if const_expr(cfg.split > 1):
            finished = cute.make_rmem_tensor(cute.make_layout(self.sums.owned), Float32)
        epilogue = PrefillEpilogue(
            self.finished,
            self._emission(tensors),
            self.staging,
            self.aligned,
            s_out,
            result[-1],
            result[0],
            self._loads_of(operand, s_out, landed),
        )

        # Ping-pong: warpgroup g has every other tile of the CTA, from its g-th on.
        turns = CONSUMERS // cfg.sharing
        turn = group % turns
        iteration = turn * k_tiles
        filled = Int32(0)
        if const_expr(turns > 1):
            if turn == 1:
                cute.arch.barrier_arrive(barrier_id=ORDER, number_of_threads=THREADS - WARPGROUP)
        for tile in cutlass.range(cluster + turn * clusters, tiles, turns * clusters, unroll=1):
            tile_m, tile_n = self.raster.locate(tile, counts, peer)
            if const_expr(cfg.split > 1):
                tile_n = tile_n * cfg.split + rank
            # Pinned, or the compiler would divide only when the products are done.
            at = TilePlace(
                _pinned(tile_m),
                _pinned(tile_n),
                group % cfg.sharing,
                m_size,
                n_size,
                thread,
                group,
            )
            epilogue.first_chunks(at, filled)
            if const_expr(turns > 1):
                cute.arch.barrier(barrier_id=ORDER + turn, number_of_threads=THREADS - WARPGROUP)
            last = multiply(
                self.ring, tiled_mma, acc, frag_x, frag_w, full, empty, iteration, k_tiles
            )
            if const_expr(turns > 1):
                cute.arch.barrier_arrive(
                    barrier_id=ORDER + 1 - turn, number_of_threads=THREADS - WARPGROUP
                )
            loaded = epilogue.first_operands(at)
            warpgroup.wait_group(0)
            if const_expr(cfg.split == 1):
                self.ring.release(empty + last)
            else:
                cute.arch.cluster_wait()
                ring = Int32(s_x.iterator.toint())
                self.sums.run(acc, finished, ring, drained, received, rank, cta_thread)
            epilogue.run(finished, at, loaded, filled)
            iteration += turns * k_tiles
            filled += epilogue.stores
        if const_expr(self.aligned):
            if thread < 32:
                # The staging buffers must outlive the reads from them; that the result is written
                # is for the end of the grid.
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _loads_of(self, operand: Any, s_out: Any, landed: Any) -> BulkLoads | None:
        if self.arriving is None:
            return None
        atom, tensor = operand
        return BulkLoads(self.staging, atom, tensor, s_out, landed)

    def _emission(self, tensors: Any) -> ChainEmission:
        count = len(self.operand_names)
        return ChainEmission(
            self.epilogue,
            dict(zip(self.operand_names, tensors[:count], strict=True)),
            dict(zip(self.output_names, tensors[count:], strict=False)),
            self.out_dtype,
            self.aligned,
            self.arriving,
        )


def _pinned(value: Any) -> Any:
    """``value``, computed here and not where it is first used."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def prefill_arguments(
    config: PrefillConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
    aligned: bool,
) -> tuple[Any, ...]:
    """The kernel of a configuration and chain, with the fake tensors to trace it on."""
    gemm = PrefillGemm(config, epilogue, dtype, out_dtype, aligned, operand_dtypes=operand_dtypes)
    tensors = chain_tensors(epilogue, operand_dtypes, out_dtype, gemm.arriving)
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2, aligned=aligned)
    element = CUTE_DTYPES[dtype]
    return (
        gemm,
        fake_tensor(element, 2, aligned=True),
        fake_tensor(element, 2, aligned=True),
        out,
        tuple(tensors) or (out,),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
