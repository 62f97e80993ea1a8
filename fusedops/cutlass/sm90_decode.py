"""GEMM for few rows (M <= 128) on sm_90a: memory-bound, weights on wgmma's row side.

The product is computed as ``W x^T``: weight rows fill the 64-row side of wgmma and the padded M is
its N (8 to 128), so no tensor-core row is wasted on padding. One CTA an SM streams its share of the
weight through a ring of TMA stages of about 200 KB; a weight is read once, so its lines are marked
evict_first, while x is read by every CTA and marked evict_last. With programmatic dependent launch
the ring fills with weights before ``griddepcontrol.wait``; everything that an earlier kernel may
have written is read after it. K may be split over the two CTAs of a cluster: each sends half of its
partial sums to the other through distributed shared memory and adds the half it gets, in a fixed
order, so results are bitwise repeatable. An RMSNorm in front of the product runs on the stages of x
in warps of its own (``fusedops.cutlass.normalize``). With scales a block of K the main loop is that
of ``fusedops.cutlass.promotion``.

Sources: PTX ISA, "wgmma.mma_async", "griddepcontrol", "mapa", "Distributed shared memory".
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from fusedops.config import DecodeConfig
from fusedops.cutlass.accumulators import (
    WGMMA_ROWS,
    accumulator_coordinates,
    owned_values,
    whole_blocks,
)
from fusedops.cutlass.arguments import chain_tensors, fake_tensor
from fusedops.cutlass.block_scales import ScaleStages, WeightRows, fake_scales
from fusedops.cutlass.decode_loads import DecodeLoads
from fusedops.cutlass.exchange import exchange_halves
from fusedops.cutlass.mainloop import accumulate
from fusedops.cutlass.math import STORAGE_DTYPES
from fusedops.cutlass.normalize import prologue_tensors, stages_of
from fusedops.cutlass.products import Products
from fusedops.cutlass.promotion import multiply_promoted
from fusedops.cutlass.ring import Ring, load_atom, partition
from fusedops.cutlass.row_statistics import RowStatistics
from fusedops.cutlass.tile import ChainEmission
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.outputs import RowStat
from fusedops.prologue import NO_PROLOGUE, Prologue

__all__ = ["DecodeGemm", "decode_arguments"]

WARPGROUP = 128


class DecodeGemm:
    """The kernel of one configuration, epilogue and dtype; M, N, K and strides are dynamic."""

    def __init__(
        self,
        config: DecodeConfig,
        epilogue: Epilogue,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        pdl: bool = True,
        prologue: Prologue = NO_PROLOGUE,
        norm_dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.epilogue, self.pdl = config, epilogue, pdl
        self.dtype, self.out_dtype = dtype, out_dtype
        self.products = Products(dtype)
        self.element = self.products.element
        self.operand_names = [operand.name for operand in epilogue.operands]
        self.output_names = [output.name for output, _ in epilogue.extra_outputs(1 << 20)]
        self.statistics = RowStatistics(
            tuple(node.statistic for node in epilogue if isinstance(node, RowStat)),
            config.warpgroups * 4,
            config.m_pad,
            config.split,
        )
        self.normalize: Any = stages_of(prologue, config, dtype, norm_dtype or dtype)
        self.scales: Any = None
        if config.block_scaled:
            self.scales = ScaleStages(config.m_pad, config.k, config.stages)
        # Operands ahead of the chain's: the prologue's, or x's scales and the weight's.
        self.before = len(prologue.operands()) + 2 * config.block_scaled

    @cute.jit
    def __call__(
        self,
        w: cute.Tensor,
        x: cute.Tensor,
        out: cute.Tensor,
        tensors: Any,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch on ``clusters`` clusters of ``split`` CTAs.

        Args:
            w: (N, K), x: (M, K), out: (M, N'), rows of stride 1, pitch a multiple of 16 bytes.
            tensors: the prologue's operands, x's and the weight's scales a block, the chain's
                operands, its extra outputs; ``(out,)`` for none.
        """
        cfg = self.config
        row_major = LayoutEnum.ROW_MAJOR
        w, x = self.products.typed(w), self.products.typed(x)
        tiled_mma = self.instructions()
        padded_rows = cfg.warpgroups * WGMMA_ROWS
        w_layout = sm90.make_smem_layout_a(
            row_major, (cfg.rows, cfg.m_pad, cfg.k), self.element, cfg.stages
        )
        x_layout = sm90.make_smem_layout_b(
            row_major, (padded_rows, cfg.m_pad, cfg.k), self.element, cfg.stages
        )
        w_atom, w_tma = load_atom(w, w_layout, (cfg.rows, cfg.k), 1)
        x_atom, x_tma = load_atom(x, x_layout, (cfg.m_pad, cfg.k), 1)
        scale_side = self.scales.atom(tensors[0]) if const_expr(cfg.block_scaled) else ()
        self.kernel(
            w_atom, w_tma, x_atom, x_tma, scale_side, out, tensors, tiled_mma, w_layout, x_layout
        ).launch(
            grid=[clusters * cfg.split, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[cfg.split, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=cfg.resident,
            # Several CTAs fit only with all shared memory; left open, the DSL asks a GPU how much
            # that is, and compiling needs none.
            preferred_smem_carveout=100 if cfg.resident > 1 else None,
        )

    def instructions(self) -> cute.TiledMma:
        """The instructions of all warpgroups."""
        return self.products.tiled_mma(self.config.warpgroups, WGMMA_ROWS, self.config.m_pad)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the configuration's and those that normalise."""
        return self.config.threads + (0 if self.normalize is None else self.normalize.threads)

    @cute.kernel
    def kernel(
        self,
        w_atom: cute.CopyAtom,
        w: cute.Tensor,
        x_atom: cute.CopyAtom,
        x: cute.Tensor,
        scale_side: Any,
        out: cute.Tensor,
        tensors: Any,
        tiled_mma: cute.TiledMma,
        w_layout: cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
    ) -> None:
        cfg = self.config
        rows, k_tile, stages, split, m_pad = cfg.rows, cfg.k, cfg.stages, cfg.split, cfg.m_pad
        consumers = cfg.warpgroups * WARPGROUP
        warps = cfg.warpgroups * 4
        element_bytes = self.dtype.itemsize

        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = block % split
        cluster = block // split
        clusters = grid // split
        m_size = cute.size(x, mode=[0])
        n_size = cute.size(w, mode=[0])
        tiles = cute.ceil_div(n_size, rows)
        k_tiles = cute.ceil_div(cute.size(w, mode=[1]), k_tile)
        tile_first = tiles * cluster // clusters
        tile_last = tiles * (cluster + 1) // clusters
        k_first = k_tiles * rank // split
        k_count = k_tiles * (rank + 1) // split - k_first

        if const_expr(self.pdl and cfg.trigger < 0):
            cute.arch.griddepcontrol_launch_dependents()

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 3 * stages + 2)
        full, empty = barriers, barriers + stages
        received, drained = barriers + 2 * stages, barriers + 2 * stages + 1
        ready = barriers + 2 * stages + 2
        owned = m_pad // (2 * split)
        if const_expr(split > 1):
            exchange = smem.allocate_tensor(
                Float32, cute.make_layout((consumers, owned)), byte_alignment=128
            )
        row_parts = self.statistics.buffer(smem)
        if const_expr(self.normalize is not None):
            norm_buffers = self.normalize.buffers(smem)
        s_w = smem.allocate_tensor(
            self.element, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner
        )
        # x stays behind the ring: for tiles of fewer than 64 rows wgmma reads on past a stage's
        # end, in the last stage into this buffer; what it reads lands in rows nobody stores.
        s_x = smem.allocate_tensor(
            self.element, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner
        )
        w_from, w_to = partition(w_atom, w, s_w, (rows, k_tile), 0, 1)
        x_from, x_to = partition(x_atom, x, s_x, (m_pad, k_tile), 0, 1)
        activations: tuple[Any, ...] = ((x_atom, x_from[(None, 0, None)], x_to),)
        stage_bytes = (rows + m_pad) * k_tile * element_bytes
        if const_expr(cfg.block_scaled):
            s_scale = self.scales.buffer(smem)
            scale_atom, scale_tma = scale_side
            s_from, s_to = partition(scale_atom, scale_tma, s_scale, self.scales.tile, 0, 1)
            activations = (*activations, (scale_atom, s_from[(None, None, 0)], s_to))
            stage_bytes += self.scales.loaded_bytes
        total = (tile_last - tile_first) * k_count
        span = (tile_first, k_first, k_count, total)
        weights = ((w_atom, w_from, w_to),)
        loads = DecodeLoads(cfg, self.pdl, stage_bytes)

        if warp == warps:
            # Weights are asked for before the other warps have started. x's descriptor is fetched
            # meanwhile: its first load stands between the kernel before and all that needs x.
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, warps)
                    if const_expr(self.normalize is not None):
                        cute.arch.mbarrier_init(ready + i, self.normalize.group_warps)
                cute.arch.mbarrier_init(received, 1)
                cute.arch.mbarrier_init(drained, consumers)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            loads.start(weights, x_atom, full, span)
        cute.arch.sync_threads()
        if const_expr(split > 1):
            cute.arch.cluster_arrive_relaxed()

        if warp == warps:
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            if const_expr(split > 1):
                cute.arch.cluster_wait()
            loads.stream(weights, activations, (full, empty), span)
        elif warp > warps:
            # Only there with a prologue.
            if const_expr(split > 1):
                cute.arch.cluster_wait()
            if const_expr(self.normalize is not None):
                self.normalize.run(
                    s_x,
                    tensors[0],
                    tensors[1],
                    norm_buffers,
                    full,
                    ready,
                    thread - (consumers + 32),
                    (m_size, cute.size(x, mode=[1])),
                    (k_first, k_count, total),
                    self.pdl,
                )
        else:
            if const_expr(split > 1):
                cute.arch.cluster_wait()
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            s_a = whole_blocks(s_w, cfg, element_bytes)
            mma = tiled_mma.get_slice(thread)
            frag_a = tiled_mma.make_fragment_A(mma.partition_A(s_a))
            frag_b = tiled_mma.make_fragment_B(mma.partition_B(s_x))
            shape = mma.partition_C(
                cute.make_identity_tensor((cfg.warpgroups * WGMMA_ROWS, m_pad))
            ).shape
            acc = cute.make_rmem_tensor(shape, self.products.accumulator)
            mine = cute.make_rmem_tensor(cute.make_layout(owned), self.products.accumulator)
            lane = thread % 32
            row = (thread // 32) * 16 + lane // 4
            column = 2 * (lane % 4)

            for tile in cutlass.range(tile_first, tile_last, unroll=1):
                tile_row = tile * rows
                step = tile - tile_first
                coordinates = accumulator_coordinates(
                    row, column, tile_row, rank, (m_size, n_size), rows, m_pad, split
                )
                emission = self._emission(tensors)
                if const_expr(not cfg.operands_late):
                    loaded = emission.load(coordinates)
                if const_expr(cfg.block_scaled):
                    multiply_promoted(
                        Ring(stages, warps, 1),
                        WeightRows(m_pad, cfg.interleaved),
                        self.instructions,
                        acc,
                        frag_a,
                        frag_b,
                        (s_scale, tensors[1]),
                        (tile_row + row, column),
                        (full, empty),
                        step * k_count,
                        (k_first, k_count),
                    )
                else:
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                    accumulate(
                        cfg,
                        tiled_mma,
                        acc,
                        frag_a,
                        frag_b,
                        (full, empty, ready),
                        step * k_count,
                        k_count,
                        self.normalize is not None,
                    )

                if const_expr(cfg.operands_late):
                    loaded = emission.load(coordinates)
                if const_expr(split > 1):
                    exchange_halves(acc, mine, exchange, received, drained, rank, thread, step)
                    if tile + 1 < tile_last:
                        cute.arch.mbarrier_arrive(drained, 1 - rank, scope=MemScopeKind.CLUSTER)

                values = owned_values(acc, mine, m_pad, split)

                def reduce_rows(
                    output: str,
                    by_slot: dict[int, Any],
                    combine: str,
                    at: Any = coordinates,
                    step: Any = step,
                ) -> None:
                    self.statistics.add(output, by_slot, combine, at, row_parts, thread, step)

                finished = emission.run(values, coordinates, loaded, reduce_rows)
                finished.store(out, self.out_dtype)
            if const_expr(len(self.statistics.names) > 0):
                self.statistics.write(
                    self._emission(tensors).outputs,
                    row_parts,
                    thread,
                    rank,
                    cluster,
                    clusters,
                    m_size,
                )

    def _emission(self, tensors: Any) -> ChainEmission:
        first = self.before
        count = first + len(self.operand_names)
        return ChainEmission(
            self.epilogue,
            dict(zip(self.operand_names, tensors[first:count], strict=True)),
            dict(zip(self.output_names, tensors[count:], strict=False)),
            self.out_dtype,
        )


def decode_arguments(
    config: DecodeConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
    prologue: Prologue = NO_PROLOGUE,
) -> tuple[Any, ...]:
    """The kernel of a configuration and chain, with the fake tensors to trace it on."""
    normed = len(prologue.operands())
    before = normed + 2 * config.block_scaled
    tensors = [
        *(prologue_tensors(operand_dtypes[:normed]) if normed else ()),
        *(fake_scales() if config.block_scaled else ()),
        *chain_tensors(epilogue, operand_dtypes[before:], out_dtype),
    ]
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2)
    kernel = DecodeGemm(
        config,
        epilogue,
        dtype,
        out_dtype,
        prologue=prologue,
        norm_dtype=operand_dtypes[0] if normed else None,
    )
    return (
        kernel,
        kernel.products.fake(),
        kernel.products.fake(),
        out,
        tuple(tensors) or (out,),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
