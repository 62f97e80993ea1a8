"""GEMM of few rows (M <= 128) with 4- or 8-bit weights on sm_90a: memory-bound, weight-only.

As in ``fusedops.cutlass.sm90_decode`` the product is ``W x^T`` with the weight on wgmma's 64-row
side, streamed through a ring of TMA stages that fills before ``griddepcontrol.wait``; K may be
split over a cluster of 2 or 4 CTAs. Codes lie in memory as the threads need them
(``fusedops.weight.fragments``): a thread reads 16 bytes of a stage, has whole A fragments, and
converts them in registers (``fusedops.cutlass.mixed_convert``) for wgmma with A from registers; x
is read from shared memory. Scales of groups of K are multiplied into the groups' float32 sums,
scales of whole rows into the result, so products are exact before they are summed.

The budget is the issue of instructions. At 4.7 TB/s an SM of 132 gets 71 thousand int4 codes a
microsecond: in a scheduler of 1.755 GHz 25 issue slots for 8 codes of 32 threads. Converting them
to bfloat16 takes 11 (of these 7 of 2 cycles in the pipe of integers and logic), the loop over
stages with groups of 128 and 16 rows of x 18, with ``zero_products`` 15, beside e4m3 9. Tensor
cores take 8 cycles for 1024 codes at 16 rows, 32 at 64; the codes come every 25 cycles.

Sources: PTX ISA, "wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol".
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from fusedops.config.mixed import MixedConfig
from fusedops.cutlass.accumulators import WGMMA_ROWS
from fusedops.cutlass.arguments import chain_tensors, fake_tensor
from fusedops.cutlass.decode_loads import DecodeLoads
from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.cutlass.mixed_convert import code_scales, eights, zero_constants
from fusedops.cutlass.mixed_exchange import Exchange
from fusedops.cutlass.mixed_multiply import StageProducts, a_registers
from fusedops.cutlass.mixed_operands import WeightOperands
from fusedops.cutlass.row_statistics import RowStatistics
from fusedops.cutlass.tile import ChainEmission
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.outputs import RowStat
from fusedops.errors import ConfigError

__all__ = ["MixedGemm", "mixed_arguments"]

WARPGROUP = 128


class MixedGemm:
    """The kernel of one configuration, epilogue and dtype; M, N, K and strides are dynamic."""

    def __init__(
        self,
        config: MixedConfig,
        epilogue: Epilogue,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        pdl: bool = True,
    ) -> None:
        reason = config.illegal()
        if dtype.itemsize * 8 != config.weight.x_bits:
            reason = f"activations are {dtype}"
        if reason is not None:
            raise ConfigError(f"{config}: {reason}.")
        self.config, self.epilogue, self.pdl = config, epilogue, pdl
        self.dtype, self.out_dtype = dtype, out_dtype
        self.element = Float8E4M3FN if dtype == torch.float8_e4m3fn else CUTE_DTYPES[dtype]
        self.operand_names = [operand.name for operand in epilogue.operands]
        self.output_names = [output.name for output, _ in epilogue.extra_outputs(1 << 20)]
        self.statistics = RowStatistics(
            tuple(node.statistic for node in epilogue if isinstance(node, RowStat)),
            config.warpgroups * 4,
            config.m_pad,
            config.split,
        )
        self.exchange = Exchange(
            config.split, config.m_pad, config.warpgroups * WARPGROUP, config.rows
        )
        self.products = StageProducts(config, dtype)
        self.operands = WeightOperands(config)

    @cute.jit
    def __call__(
        self,
        w: cute.Tensor,
        quantization: Any,
        x: cute.Tensor,
        out: cute.Tensor,
        tensors: Any,
        n_size: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch on ``clusters`` clusters of ``split`` CTAs.

        Args:
            w: the ``fragments.words`` of packed codes, int64 (strips, words).
            quantization: (scales,) or (scales, zero points), each (groups, N), one group where all
                of K is one; in more of them the pitch is a multiple of 16 bytes.
            x: (M, K), rows of stride 1, address and pitch multiples of 16 bytes; e4m3 as uint8.
            out: (M, N'), rows of stride 1.
            tensors: the chain's operands and extra outputs; ``(out,)`` for none.
            n_size: rows of the weight.
        """
        cfg = self.config
        major = OperandMajorMode.K
        # One that adds to the accumulators and one that starts them anew.
        adding, starting = (
            sm90.make_trivial_tiled_mma(
                self.element,
                self.element,
                major,
                major,
                Float32,
                (cfg.warpgroups, 1, 1),
                (WGMMA_ROWS, cfg.m_pad),
                warpgroup.OperandSource.RMEM,
            )
            for _ in range(2)
        )
        x_layout = sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR,
            (cfg.warpgroups * WGMMA_ROWS, cfg.m_pad, cfg.k),
            self.element,
            cfg.stages,
        )
        if const_expr(cfg.weight.x_bits == 8):
            x = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=self.element), x.layout)
        load = cpasync.CopyBulkTensorTileG2SOp()
        x_atom, x_tma = cpasync.make_tiled_tma_atom(
            load, x, cute.slice_(x_layout, (None, None, 0)), (cfg.m_pad, cfg.k)
        )
        layouts = self.operands.layouts()
        weights = self.operands.load_atoms(w, quantization, layouts)
        self.kernel(
            [atom for atom, _ in weights],
            [tensor for _, tensor in weights],
            x_atom,
            x_tma,
            out,
            quantization,
            tensors,
            n_size,
            adding,
            starting,
            layouts,
            x_layout,
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
        w_atoms: Any,
        w_tensors: Any,
        x_atom: cute.CopyAtom,
        x: cute.Tensor,
        out: cute.Tensor,
        quantization: Any,
        tensors: Any,
        n_size: Int32,
        adding: cute.TiledMma,
        starting: cute.TiledMma,
        layouts: Any,
        x_layout: cute.ComposedLayout,
    ) -> None:
        cfg = self.config
        exchange = self.exchange
        rows, k_tile, stages, split = cfg.rows, cfg.k, cfg.stages, cfg.split
        m_pad = cfg.m_pad
        consumers = cfg.warpgroups * WARPGROUP
        warps = cfg.warpgroups * 4

        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = block % split
        cluster = block // split
        clusters = grid // split
        m_size = cute.size(x, mode=[0])
        tiles = cute.ceil_div(n_size, rows)
        k_tiles = cute.ceil_div(cute.size(x, mode=[1]), k_tile)
        tile_first = tiles * cluster // clusters
        tile_last = tiles * (cluster + 1) // clusters
        k_first = k_tiles * rank // split
        k_count = k_tiles * (rank + 1) // split - k_first

        if const_expr(self.pdl and cfg.trigger < 0):
            cute.arch.griddepcontrol_launch_dependents()

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * stages + 2)
        full, empty = barriers, barriers + stages
        received, drained = barriers + 2 * stages, barriers + 2 * stages + 1
        if const_expr(split > 1):
            buffer = exchange.buffer(smem)
        row_parts = self.statistics.buffer(smem)
        s_x = smem.allocate_tensor(
            self.element, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner
        )
        s_w = self.operands.allocate(smem, layouts)
        weights = self.operands.partition(w_atoms, w_tensors, s_w)
        g_x = cute.local_tile(x, (m_pad, k_tile), (0, None))
        t_xs, t_xg = cpasync.tma_partition(
            x_atom, 0, cute.make_layout(1), cute.group_modes(s_x, 0, 2), cute.group_modes(g_x, 0, 2)
        )
        total = (tile_last - tile_first) * k_count
        span = (tile_first, k_first, k_count, total)
        stage_bytes = cfg.weight_bytes + cfg.scale_bytes + cfg.zero_bytes + cfg.x_bytes
        loads = DecodeLoads(cfg, self.pdl, stage_bytes)

        if warp == warps:
            # Weights are asked for before the other warps have started.
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, warps)
                cute.arch.mbarrier_init(received, 1)
                cute.arch.mbarrier_init(drained, max(1, consumers * (split - 1)))
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
            loads.stream(weights, ((x_atom, t_xg, t_xs),), (full, empty), span)
        else:
            if const_expr(split > 1):
                cute.arch.cluster_wait()
            lane = thread % 32
            row = (thread // 32) * 16 + lane // 4
            column = 2 * (lane % 4)
            # Warps beyond the tile's strips take the last one's; their results are not stored.
            strip = thread // 32
            if const_expr(rows % WGMMA_ROWS != 0):
                strip = cutlass.min(strip, Int32(cfg.strips - 1))
            first = self.operands.first_stage(s_w, strip, lane)
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            adding.set(warpgroup.Field.ACCUMULATE, True)
            starting.set(warpgroup.Field.ACCUMULATE, False)
            mma = adding.get_slice(thread)
            frag_x = adding.make_fragment_B(mma.partition_B(s_x))
            shape = mma.partition_C(
                cute.make_identity_tensor((cfg.warpgroups * WGMMA_ROWS, m_pad))
            ).shape
            acc = cute.make_rmem_tensor(shape, Float32)
            sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(cfg.group_sums)]
            steps = cfg.weight.unit // cfg.weight.step + cfg.multiplies_zeros
            registers = [a_registers(steps, self.element) for _ in range(2)]
            mine = cute.make_rmem_tensor(cute.make_layout(exchange.owned), Float32)

            for tile in cutlass.range(tile_first, tile_last, unroll=1):
                tile_row = tile * rows
                step = tile - tile_first
                coordinates = exchange.coordinates(row, column, tile_row, rank, (m_size, n_size))
                emission = self._emission(tensors)
                loaded = emission.load(coordinates)
                scales, zeros = self.operands.whole_rows(quantization, tile_row + row, n_size)
                if const_expr(zeros is None and cfg.multiplies_zeros):
                    zeros = eights(n_size)
                constants = zero_constants(zeros, self.dtype, cfg.multiplies_zeros)
                acc.fill(0.0)
                base = step * k_count
                for kt in cutlass.range(k_count, unroll=1):
                    i = base + kt
                    stage = i % stages
                    cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                    self.products.run(
                        (adding, starting),
                        acc,
                        sums,
                        registers,
                        frag_x,
                        self.operands.stage(first, stage),
                        stage,
                        constants,
                    )
                    # Every lane has read its part.
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + stage)

                if const_expr(split > 1):
                    exchange.run(acc, mine, buffer, received, drained, rank, thread, step)
                    if tile + 1 < tile_last:
                        exchange.release(drained, rank)
                values = exchange.values(acc, mine)
                if const_expr(cfg.groups == 0):
                    units = code_scales(self.dtype, cfg.multiplies_zeros)
                    values = {(i, j): v * (scales[j] * units[j]) for (i, j), v in values.items()}

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
        count = len(self.operand_names)
        return ChainEmission(
            self.epilogue,
            dict(zip(self.operand_names, tensors[:count], strict=True)),
            dict(zip(self.output_names, tensors[count:], strict=False)),
            self.out_dtype,
        )


def mixed_arguments(
    config: MixedConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    operand_dtypes: tuple[torch.dtype | None, ...],
) -> tuple[Any, ...]:
    """The kernel of a configuration and chain, with the fake tensors to trace it on."""
    kernel = MixedGemm(config, epilogue, dtype, out_dtype)
    tensors = chain_tensors(epilogue, operand_dtypes, out_dtype)
    out = fake_tensor(STORAGE_DTYPES[out_dtype], 2)
    grouped = config.groups > 0
    quantization = [fake_tensor(CUTE_DTYPES[config.weight.scale_dtype], 2, aligned=grouped)]
    if config.weight.zeros:
        quantization.append(fake_tensor(Uint8, 2, aligned=grouped))
    return (
        kernel,
        fake_tensor(Int64, 2, aligned=True),
        tuple(quantization),
        fake_tensor(STORAGE_DTYPES[dtype], 2, aligned=True),
        out,
        tuple(tensors) or (out,),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
