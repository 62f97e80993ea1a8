"""GEMM for few rows (M <= 64) on sm_90a: memory-bound, weights on wgmma's row side.

The product is computed as ``W x^T``: weight rows fill the 64-row side of wgmma and the padded M is
its N (8 to 64), so no tensor-core row is wasted on padding. One CTA an SM streams its share of the
weight through a ring of TMA stages of about 200 KB; a weight is read once, so its lines are marked
evict_first, while x is read by every CTA and marked evict_last. With programmatic dependent launch
the ring fills with weights before ``griddepcontrol.wait``; everything that an earlier kernel may
have written is read after it. K may be split over the two CTAs of a cluster: each sends half of its
partial sums to the other through distributed shared memory and adds the half it gets, in a fixed
order, so results are bitwise repeatable.

Sources: PTX ISA, "wgmma.mma_async", "griddepcontrol", "mapa", "Distributed shared memory".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.utils as utils
import torch
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fusedops.cutlass.math import CUTE_DTYPES
from fusedops.cutlass.tile import ChainEmission, Coordinates
from fusedops.epilogue.chain import Epilogue

__all__ = ["DecodeConfig", "DecodeGemm"]

# Cache policies of createpolicy.fractional (fraction 1.0), as CUTLASS's TMA::CacheHintSm90 has them.
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000

WARPGROUP = 128
WGMMA_ROWS = 64
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class DecodeConfig:
    """A tiling of the decode kernel.

    Attributes:
        rows: weight rows (output columns) of a tile, a multiple of 8 (16 under a gate).
        k: columns of K in a stage, a multiple of 64.
        stages: TMA stages of the ring.
        split: CTAs that share a tile's K, 1 or 2 (a cluster).
        m_pad: padded M, the wgmma N: 8, 16, 32 or 64.
        trigger: the producer allows the next kernel to start once it has at most this many k-tiles
            left to load; -1 does so at once.
    """

    rows: int
    k: int
    stages: int
    split: int
    m_pad: int
    trigger: int = -1

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups: each multiplies 64 weight rows."""
        return -(-self.rows // WGMMA_ROWS)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and one producer warp."""
        return self.warpgroups * WARPGROUP + 32

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of a CTA, about: ring, reduction buffer, barriers, alignment."""
        stage = (self.rows + self.m_pad) * self.k * element_bytes
        exchange = (self.split - 1) * self.warpgroups * WARPGROUP * self.m_pad // 4 * 4
        statistics = 2 * self.warpgroups * 4 * self.m_pad * 4
        return self.stages * stage + exchange + statistics + 3072


class DecodeGemm:
    """The kernel of one configuration, epilogue and dtype; M, N, K and strides are dynamic."""

    def __init__(
        self,
        config: DecodeConfig,
        epilogue: Epilogue,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        pdl: bool = True,
    ) -> None:
        self.config, self.epilogue, self.pdl = config, epilogue, pdl
        self.dtype, self.out_dtype = dtype, out_dtype
        self.element = CUTE_DTYPES[dtype]
        self.operand_names = [operand.name for operand in epilogue.operands]
        self.output_names = [output.name for output, _ in epilogue.extra_outputs(1 << 20)]
        self.has_row_statistic = any(node.spec_name == "row_stat" for node in epilogue)

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
            tensors: operands, then extra outputs, in the chain's order; ``(out,)`` if there are none.
        """
        cfg = self.config
        row_major = utils.LayoutEnum.ROW_MAJOR
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
            block=[cfg.threads, 1, 1],
            cluster=[cfg.split, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )

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
        stage_bytes = (rows + m_pad) * k_tile * element_bytes

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

        smem = utils.SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * stages + 2)
        full, empty = barriers, barriers + stages
        received, drained = barriers + 2 * stages, barriers + 2 * stages + 1
        accumulators = m_pad // 2
        owned = accumulators // split
        if const_expr(split > 1):
            exchange = smem.allocate_tensor(
                Float32, cute.make_layout((consumers, owned)), byte_alignment=128
            )
        if const_expr(self.has_row_statistic):
            row_parts = smem.allocate_tensor(
                Float32, cute.make_layout((m_pad, warps)), byte_alignment=128
            )
        s_w = smem.allocate_tensor(
            self.element, w_layout.outer, byte_alignment=1024, swizzle=w_layout.inner
        )
        # x stays behind the ring: for tiles of fewer than 64 rows wgmma reads on past a stage's end,
        # in the last stage into this buffer; what it reads there lands in rows nobody stores.
        s_x = smem.allocate_tensor(
            self.element, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner
        )
        if thread == 0:
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, warps)
            cute.arch.mbarrier_init(received, consumers)
            cute.arch.mbarrier_init(drained, consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(split > 1):
            cute.arch.cluster_arrive_relaxed()

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

        if warp == warps:
            ahead = cutlass.min(total, Int32(stages))
            for i in cutlass.range(ahead, unroll=1):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + i, stage_bytes)
                cute.copy(
                    w_atom,
                    t_wg[(None, tile_first + i // k_count, k_first + i % k_count)],
                    t_ws[(None, i)],
                    tma_bar_ptr=full + i,
                    cache_policy=Int64(EVICT_FIRST),
                )
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            if const_expr(split > 1):
                cute.arch.cluster_wait()
            for i in cutlass.range(ahead, unroll=1):
                cute.copy(
                    x_atom,
                    t_xg[(None, k_first + i % k_count)],
                    t_xs[(None, i)],
                    tma_bar_ptr=full + i,
                    cache_policy=Int64(EVICT_LAST),
                )
            if const_expr(self.pdl and cfg.trigger >= 0):
                if total - ahead <= cfg.trigger:
                    cute.arch.griddepcontrol_launch_dependents()
            for i in cutlass.range(ahead, total, unroll=1):
                stage = i % stages
                cute.arch.mbarrier_wait(empty + stage, (i // stages - 1) & 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
                cute.copy(
                    w_atom,
                    t_wg[(None, tile_first + i // k_count, k_first + i % k_count)],
                    t_ws[(None, stage)],
                    tma_bar_ptr=full + stage,
                    cache_policy=Int64(EVICT_FIRST),
                )
                cute.copy(
                    x_atom,
                    t_xg[(None, k_first + i % k_count)],
                    t_xs[(None, stage)],
                    tma_bar_ptr=full + stage,
                    cache_policy=Int64(EVICT_LAST),
                )
                if const_expr(self.pdl and cfg.trigger >= 0):
                    if total - i == cfg.trigger + 1:
                        cute.arch.griddepcontrol_launch_dependents()
        else:
            if const_expr(split > 1):
                cute.arch.cluster_wait()
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            s_a = s_w
            if const_expr(rows % WGMMA_ROWS != 0):
                # The stages as whole 64-row blocks laid over the ring's 128-byte-swizzled atoms of
                # (8 rows, 64 columns); a stage is still rows x k_tile apart.
                atom_columns = 128 // element_bytes
                s_a = cute.make_tensor(
                    s_w.iterator,
                    cute.make_layout(
                        ((8, cfg.warpgroups * 8), (atom_columns, k_tile // atom_columns), (1, stages)),
                        stride=(
                            (atom_columns, 8 * atom_columns),
                            (1, rows * atom_columns),
                            (0, rows * k_tile),
                        ),
                    ),
                )
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
                coordinates = self._coordinates(
                    row, column, tile_row, rank, m_size, n_size, rows
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

                if const_expr(split == 1):
                    for j in cutlass.range_constexpr(accumulators):
                        mine[j] = acc[j]
                else:
                    self._exchange(acc, mine, exchange, received, drained, rank, thread, step)
                    if tile + 1 < tile_last:
                        cute.arch.mbarrier_arrive(drained, 1 - rank, scope=MemScopeKind.CLUSTER)

                values = {}
                for slot, j in self._slots():
                    values[slot] = mine[j]
                finished = emission.run(values, coordinates, loaded, None)
                finished.store(out, self.out_dtype)
        if const_expr(split > 1):
            # A CTA's shared memory must outlive the other's last remote write to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _emission(self, tensors: Any) -> ChainEmission:
        count = len(self.operand_names)
        return ChainEmission(
            self.epilogue,
            dict(zip(self.operand_names, tensors[:count], strict=True)),
            dict(zip(self.output_names, tensors[count:], strict=False)),
            self.out_dtype,
        )

    def _slots(self) -> list[tuple[tuple[int, int], int]]:
        """((m slot, n slot), index among the owned accumulators) of a thread.

        wgmma's accumulator j of a thread lies at row + 8 * bit 1 of j, column + bit 0 of j + 8 *
        (j >> 2); rows are N here, columns M. With a split, a CTA owns the accumulators whose bit 0
        is its rank, which keeps row pairs (bit 1) together for the gate.
        """
        slots = []
        for j in range(self.config.m_pad // 2 // self.config.split):
            if self.config.split == 1:
                slots.append((((j >> 2) * 2 + (j & 1), (j >> 1) & 1), j))
            else:
                slots.append(((j >> 1, j & 1), j))
        return slots

    def _coordinates(
        self, row: Any, column: Any, tile_row: Any, rank: Any, m_size: Any, n_size: Any, rows: int
    ) -> Coordinates:
        """Where the owned accumulators lie; rows beyond the tile get a column beyond N."""
        groups = self.config.m_pad // 8
        if self.config.split == 1:
            m = tuple(column + 8 * g + p for g in range(groups) for p in range(2))
        else:
            m = tuple(column + 8 * g + rank for g in range(groups))
        n = tuple(_inside_tile(row + 8 * half, tile_row, rows, n_size) for half in range(2))
        return Coordinates(m, n, ((0, 1),), m_size, n_size)

    @cute.jit
    def _exchange(
        self,
        acc: cute.Tensor,
        mine: cute.Tensor,
        exchange: cute.Tensor,
        received: cute.Pointer,
        drained: cute.Pointer,
        rank: Int32,
        thread: Int32,
        step: Int32,
    ) -> None:
        """Send the peer its half of the partial sums and add the half it sends."""
        consumers = self.config.warpgroups * WARPGROUP
        owned = self.config.m_pad // 4
        if step > 0:
            cute.arch.mbarrier_wait(drained, (step - 1) & 1)
        for mine_rank in cutlass.range_constexpr(2):
            if rank == mine_rank:
                remote = cute.arch.inline_ptx(
                    "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
                    write_only_types=[Int32],
                    read_only_args=[
                        Int32((exchange.iterator + exchange.layout((thread, 0))).toint()),
                        Int32(1 - mine_rank),
                    ],
                )
                for j in cutlass.range_constexpr(owned):
                    source = (j >> 1) * 4 + (j & 1) * 2
                    mine[j] = acc[source + mine_rank]
                    cute.arch.inline_ptx(
                        "st.shared::cluster.f32 [{$r0}], {$r1};",
                        read_only_args=[
                            Int32(remote + j * consumers * 4),
                            acc[source + 1 - mine_rank],
                        ],
                    )
        cute.arch.mbarrier_arrive(received, 1 - rank, scope=MemScopeKind.CLUSTER)
        cute.arch.mbarrier_wait(received, step & 1)
        cute.arch.fence_acq_rel_cluster()
        # Rank 0's sum comes first on both sides, so the order of the addition is fixed.
        for j in cutlass.range_constexpr(owned):
            mine[j] = mine[j] + exchange[thread, j]


@cute.jit
def _inside_tile(row: Any, tile_row: Any, rows: cutlass.Constexpr, n_size: Any) -> Any:
    position = tile_row + row
    if const_expr(rows % WGMMA_ROWS != 0):
        position = cutlass.select_(row < rows, position, n_size)
    return position

