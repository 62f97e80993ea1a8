"""GEMM for few rows (M <= 128) on sm_90a: memory-bound, weights on wgmma's row side.

The product is computed as ``W x^T``: weight rows fill the 64-row side of wgmma and the padded M is
its N (8 to 128), so no tensor-core row is wasted on padding. One CTA an SM streams its share of the
weight through a ring of TMA stages of about 200 KB; a weight is read once, so its lines are marked
evict_first, while x is read by every CTA and marked evict_last. With programmatic dependent launch
the ring fills with weights before ``griddepcontrol.wait``; everything that an earlier kernel may
have written is read after it. K may be split over the two CTAs of a cluster: each sends half of its
partial sums to the other through distributed shared memory and adds the half it gets, in a fixed
order, so results are bitwise repeatable. An RMSNorm in front of the product runs on the stages of x
in warps of its own (``fusedops.cutlass.normalize``).

Sources: PTX ISA, "wgmma.mma_async", "griddepcontrol", "mapa", "Distributed shared memory".
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
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
from fusedops.cutlass.decode_loads import DecodeLoads
from fusedops.cutlass.exchange import exchange_halves
from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.cutlass.normalize import NormalizeStages, prologue_tensors
from fusedops.cutlass.row_statistics import RowStatistics
from fusedops.cutlass.tile import ChainEmission
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.outputs import RowStat
from fusedops.prologue import NO_PROLOGUE, Prologue, RmsNormPrologue

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
        self.element = CUTE_DTYPES[dtype]
        self.operand_names = [operand.name for operand in epilogue.operands]
        self.output_names = [output.name for output, _ in epilogue.extra_outputs(1 << 20)]
        self.statistics = RowStatistics(
            tuple(node.statistic for node in epilogue if isinstance(node, RowStat)),
            config.warpgroups * 4,
            config.m_pad,
            config.split,
        )
        self.normalize: Any = (
            NormalizeStages(
                prologue,
                dtype,
                norm_dtype or dtype,
                config.m_pad,
                config.k,
                config.stages,
                config.norm_bytes,
            )
            if isinstance(prologue, RmsNormPrologue)
            else None
        )
        self.prologue_count = 0 if self.normalize is None else len(prologue.operands())

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
            tensors: the prologue's operands, the chain's, its extra outputs; ``(out,)`` for none.
        """
        cfg = self.config
        row_major = LayoutEnum.ROW_MAJOR
        major = OperandMajorMode.K
        tiled_mma = sm90.make_trivial_tiled_mma(
            self.element,
            self.element,
            major,
            major,
            Float32,
            (cfg.warpgroups, 1, 1),
            tiler_mn=(WGMMA_ROWS, cfg.m_pad),
        )
        padded_rows = cfg.warpgroups * WGMMA_ROWS
        w_layout = sm90.make_smem_layout_a(
            row_major, (cfg.rows, cfg.m_pad, cfg.k), self.element, cfg.stages
        )
        x_layout = sm90.make_smem_layout_b(
            row_major, (padded_rows, cfg.m_pad, cfg.k), self.element, cfg.stages
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        w_atom, w_tma = cpasync.make_tiled_tma_atom(
            load, w, cute.slice_(w_layout, (None, None, 0)), (cfg.rows, cfg.k)
        )
        x_atom, x_tma = cpasync.make_tiled_tma_atom(
            load, x, cute.slice_(x_layout, (None, None, 0)), (cfg.m_pad, cfg.k)
        )
        self.kernel(
            w_atom, w_tma, x_atom, x_tma, out, tensors, tiled_mma, w_layout, x_layout
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
        g_w = cute.local_tile(w, (rows, k_tile), (None, None))
        g_x = cute.local_tile(x, (m_pad, k_tile), (0, None))
        one = cute.make_layout(1)
        t_ws, t_wg = cpasync.tma_partition(
            w_atom, 0, one, cute.group_modes(s_w, 0, 2), cute.group_modes(g_w, 0, 2)
        )
        t_xs, t_xg = cpasync.tma_partition(
            x_atom, 0, one, cute.group_modes(s_x, 0, 2), cute.group_modes(g_x, 0, 2)
        )
        total = (tile_last - tile_first) * k_count
        span = (tile_first, k_first, k_count, total)
        weights = ((w_atom, t_wg, t_ws),)
        loads = DecodeLoads(cfg, self.pdl, (rows + m_pad) * k_tile * element_bytes)

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
            loads.stream(weights, (x_atom, t_xg, t_xs), (full, empty), span)
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
            acc = cute.make_rmem_tensor(shape, Float32)
            mine = cute.make_rmem_tensor(cute.make_layout(owned), Float32)
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
                loaded = emission.load(coordinates)
                acc.fill(0.0)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                base = step * k_count
                for kt in cutlass.range(k_count, unroll=1):
                    i = base + kt
                    stage = i % stages
                    cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                    if const_expr(self.normalize is not None):
                        cute.arch.mbarrier_wait(ready + stage, (i // stages) & 1)
                    warpgroup.fence()
                    for block_k in cutlass.range_constexpr(k_tile * element_bytes // 32):
                        cute.gemm(
                            tiled_mma,
                            acc,
                            frag_a[(None, None, block_k, stage)],
                            frag_b[(None, None, block_k, stage)],
                            acc,
                        )
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if kt > 0:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(empty + (i - 1) % stages)
                warpgroup.wait_group(0)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + (base + k_count - 1) % stages)

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
        first = self.prologue_count
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
    before = len(prologue.operands())
    tensors = [
        *(prologue_tensors(operand_dtypes[:before]) if before else ()),
        *chain_tensors(epilogue, operand_dtypes[before:], out_dtype),
    ]
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2)
    element = CUTE_DTYPES[dtype]
    return (
        DecodeGemm(
            config,
            epilogue,
            dtype,
            out_dtype,
            prologue=prologue,
            norm_dtype=operand_dtypes[0] if before else None,
        ),
        fake_tensor(element, 2, aligned=True),
        fake_tensor(element, 2, aligned=True),
        out,
        tuple(tensors) or (out,),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
