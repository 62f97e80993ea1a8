"""GEMM of many rows with 4- or 8-bit weights on sm_90a: persistent, weight-only.

The product is ``W x^T`` with the weight on wgmma's 64-row side, from the same packed codes as in
``fusedops.cutlass.sm90_mixed``: a thread converts whole A fragments in registers, x is read from
shared memory. A CTA an SM walks tiles of 128 weight rows and ``tile_m`` rows of x in a fixed order
(``raster``). One warp loads through a ring of TMA stages across tile boundaries; two warpgroups
multiply 64 weight rows each, on their own: the first starts ``skew`` stages ahead of the second, so
that one's epilogue runs beside the other's products, which then have the tensor cores to
themselves. CTAs of a cluster have neighbouring weight rows, and each loads a part of x for both.

Where the scales go. Products of 64 x 128 x 128 (a group) take the tensor cores 512 cycles, both
warpgroups' 1024, in which each scheduler has 2 x 229 instructions of its two warps to issue (int4
beside bfloat16), of them 2 x 64 multiply-adds of group sums: they fit, products stay exact, and a
row's result is the one that it has among few rows. Multiplying the scale into the weights would
take 2 x 32 and leave registers for 64 x 256 sums (of 240, sums of groups take 192 with 128 rows of
x), but round every weight once more, and saves little: an SM takes in 40 bytes a cycle for tiles of
128 x 128, 36 for 128 x 256, 48 with bfloat16 weights. Groups of 32 take 2 x 481: issue binds them.

Sources: PTX ISA, "wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "griddepcontrol".
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from fusedops.config.mixed_prefill import (
    BUFFERS,
    ROWS,
    STATISTIC_ROWS,
    WARPGROUPS,
    MixedPrefillConfig,
)
from fusedops.cutlass.bulk_operand import BulkLoads, result_operand
from fusedops.cutlass.math import CUTE_DTYPES, STORAGE_DTYPES
from fusedops.cutlass.mixed_convert import code_scales, eights, zero_constants
from fusedops.cutlass.mixed_multiply import a_registers
from fusedops.cutlass.mixed_operands import WeightOperands
from fusedops.cutlass.mixed_prefill_epilogue import MixedPrefillEpilogue, WarpgroupPlace
from fusedops.cutlass.mixed_prefill_loads import MixedPrefillLoads
from fusedops.cutlass.mixed_prefill_multiply import TileProducts
from fusedops.cutlass.raster import Raster
from fusedops.cutlass.ring import Ring, load_atom
from fusedops.cutlass.staging import Staging
from fusedops.cutlass.tile import ChainEmission, halves_columns
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.outputs import RowStat
from fusedops.errors import ConfigError

__all__ = ["MixedPrefillGemm"]

WARPGROUP = 128
THREADS = (WARPGROUPS + 1) * WARPGROUP


class MixedPrefillGemm:
    """The kernel of one configuration, epilogue and dtype; M, N, K and strides are dynamic.

    Args:
        aligned: the result, and the operand that ``arriving`` names, have addresses and row pitches
            that are multiples of 16 bytes.
    """

    def __init__(
        self,
        config: MixedPrefillConfig,
        epilogue: Epilogue,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        operand_dtypes: tuple[torch.dtype | None, ...],
        aligned: bool,
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
        self.statistics = tuple(node.statistic for node in epilogue if isinstance(node, RowStat))
        halving = 2 if any(halves_columns(node) for node in epilogue) else 1
        # Four-byte results fill whole sectors without staging.
        self.staged = aligned and out_dtype.itemsize <= 2
        self.staging = Staging(out_dtype, STATISTIC_ROWS // halving, BUFFERS, WARPGROUPS)
        self.arriving: str | None = None
        if self.staged and out_dtype.itemsize == 2:
            self.arriving = result_operand(epilogue, operand_dtypes, out_dtype)
        self.arriving_at = [name == self.arriving for name in self.operand_names]
        self.ring = Ring(config.stages, 4 * WARPGROUPS, config.cluster)
        self.raster = Raster(config.tile_m, ROWS, 1, config.cluster, config.group)
        self.operands = WeightOperands(config)
        self.products = TileProducts(config, dtype, self.operands)
        self.loads = MixedPrefillLoads(config, self.ring, self.raster, pdl)

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
        """Launch on ``clusters`` clusters, or on as many as there are tiles if those are fewer.

        Args:
            w, quantization, x, out, tensors, n_size: as of ``sm90_mixed.MixedGemm``.
        """
        cfg = self.config
        adding, starting = self._instruction(), self._instruction()
        x_layout = sm90.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR,
            (64, cfg.tile_m, cfg.x_columns),
            self.element,
            cfg.stages * cfg.x_loads,
        )
        if const_expr(cfg.weight.x_bits == 8):
            x = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=self.element), x.layout)
        x_side = load_atom(x, x_layout, (cfg.tile_m, cfg.x_columns), cfg.cluster)
        layouts = self.operands.layouts()
        weights = self.operands.load_atoms(w, quantization, layouts)
        counts = self.raster.counts(cute.size(x, mode=[0]), n_size)
        clusters = cutlass.min(clusters, counts[0] * counts[1])
        result = self.staging.store_side(out, self.staged)
        operand: tuple[Any, ...] = ()
        if const_expr(self.arriving is not None):
            operand = BulkLoads.side(self.staging, tensors[self.arriving_at.index(True)])
        self.kernel(
            x_side,
            [atom for atom, _ in weights],
            [tensor for _, tensor in weights],
            quantization,
            operand,
            result,
            tensors,
            n_size,
            adding,
            starting,
            layouts,
            x_layout,
            self.staging.layout(),
        ).launch(
            grid=[clusters * cfg.cluster, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[cfg.cluster, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )

    def _instruction(self) -> cute.TiledMma:
        major = OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            self.element,
            self.element,
            major,
            major,
            Float32,
            (1, 1, 1),
            (64, self.config.tile_m),
            warpgroup.OperandSource.RMEM,
        )

    @cute.kernel
    def kernel(
        self,
        x_side: Any,
        w_atoms: Any,
        w_tensors: Any,
        quantization: Any,
        operand: Any,
        result: Any,
        tensors: Any,
        n_size: Int32,
        adding: cute.TiledMma,
        starting: cute.TiledMma,
        layouts: Any,
        x_layout: cute.ComposedLayout,
        s_layout: cute.ComposedLayout,
    ) -> None:
        cfg = self.config
        x_atom, x = x_side
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = (block // cfg.cluster, grid // cfg.cluster, block % cfg.cluster)

        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if warp == WARPGROUPS * 4:
            cpasync.prefetch_descriptor(x_atom)

        smem = SmemAllocator()
        buffers = BUFFERS * WARPGROUPS
        barriers = smem.allocate_array(Int64, 2 * cfg.stages + 1 + buffers)
        full, empty = barriers, barriers + cfg.stages
        ahead, landed = barriers + 2 * cfg.stages, barriers + 2 * cfg.stages + 1
        s_x = smem.allocate_tensor(
            self.element, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner
        )
        s_w = self.operands.allocate(smem, layouts)
        s_out, parts = None, None
        if const_expr(self.staged):
            s_out = smem.allocate_tensor(
                STORAGE_DTYPES[self.out_dtype],
                s_layout.outer,
                byte_alignment=1024,
                swizzle=s_layout.inner,
            )
        if const_expr(len(self.statistics) > 0):
            layout = cute.make_layout((cfg.tile_m, len(self.statistics) * WARPGROUPS * 4))
            parts = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        if thread == 0:
            cute.arch.mbarrier_init(ahead, 4 * cfg.skew)
            if const_expr(self.arriving is not None):
                BulkLoads.initialize(self.staging, landed)
        self.ring.initialize(full, empty, thread)
        counts = self.raster.counts(cute.size(x, mode=[0]), n_size)
        span = cfg.k * cfg.span
        stages = cute.ceil_div(cute.size(x, mode=[1]), span) * cfg.span

        if warp >= WARPGROUPS * 4:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == WARPGROUPS * 4:
                self.loads.run(
                    (x_atom, x, s_x),
                    self.operands.partition(w_atoms, w_tensors, s_w),
                    (full, empty),
                    place,
                    counts,
                    stages,
                )
            elif const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            if const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            self._consume(
                (adding, starting),
                s_x,
                s_w,
                (s_out, parts),
                quantization,
                operand,
                result,
                tensors,
                (full, empty, ahead, landed),
                place,
                (cute.size(x, mode=[0]), n_size),
                counts,
                stages,
            )
        if const_expr(cfg.cluster > 1):
            # A CTA's barriers must outlive the other's last arrival there.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _consume(
        self,
        instructions: Any,
        s_x: cute.Tensor,
        s_w: Any,
        shared: Any,
        quantization: Any,
        operand: Any,
        result: Any,
        tensors: Any,
        barriers: Any,
        place: Any,
        sizes: Any,
        counts: Any,
        stages: Int32,
    ) -> None:
        """Two warpgroups: products and epilogue of the cluster's tiles."""
        cfg = self.config
        adding, starting = instructions
        full, empty, ahead, landed = barriers
        cluster, clusters, rank = place
        s_out, parts = shared
        cta_thread, _, _ = cute.arch.thread_idx()
        thread = cta_thread % WARPGROUP
        group = cute.arch.make_warp_uniform(cta_thread // WARPGROUP)
        strip, lane = cta_thread // 32, cta_thread % 32
        tiles = counts[0] * counts[1]

        adding.set(warpgroup.Field.ACCUMULATE, True)
        starting.set(warpgroup.Field.ACCUMULATE, False)
        mma = adding.get_slice(thread)
        frag_x = adding.make_fragment_B(mma.partition_B(s_x))
        shape = mma.partition_C(cute.make_identity_tensor((64, cfg.tile_m))).shape
        acc = cute.make_rmem_tensor(shape, Float32)
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(cfg.group_sums)]
        steps = self.products.steps + cfg.multiplies_zeros
        registers = [a_registers(steps, self.element) for _ in range(2)]
        carried = cute.make_rmem_tensor(cute.make_layout(self.products.carried), Int32)
        held = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        first = self.operands.first_stage(s_w, strip, lane)
        addresses = tuple(a for a in (first.codes, first.scales, first.zeros) if a is not None)
        epilogue = MixedPrefillEpilogue(
            cfg,
            self._emission(tensors),
            self.staging,
            result[0] if const_expr(self.staged) else None,
            result[-1],
            s_out,
            self._arriving_loads(operand, s_out, landed),
            parts,
            self.statistics,
        )

        mine = (tiles - cluster + clusters - 1) // clusters * stages
        if group == 1:
            if mine >= cfg.skew:
                cute.arch.mbarrier_wait(ahead, 0)
        iteration = Int32(0)
        filled = Int32(0)
        for tile in cutlass.range(cluster, tiles, clusters, unroll=1):
            tile_m, tile_n = self.raster.locate(tile, counts, rank)
            # Pinned, or the compiler would divide only when the products are done.
            at = WarpgroupPlace(
                _pinned(tile_m),
                _pinned(tile_n * WARPGROUPS + group),
                sizes[0],
                sizes[1],
                thread,
                cute.arch.make_warp_uniform(thread),
                group,
            )
            epilogue.first_chunks(at, filled)
            row = tile_n * ROWS + strip * 16 + lane // 4
            scales, zeros = self.operands.whole_rows(quantization, row, sizes[1])
            if const_expr(not cfg.groups):
                units = code_scales(self.dtype, cfg.multiplies_zeros)
                scales = [scale * unit for scale, unit in zip(scales, units, strict=True)]
            if const_expr(zeros is None and cfg.multiplies_zeros):
                zeros = eights(sizes[1])
            constants = zero_constants(zeros, self.dtype, cfg.multiplies_zeros)
            self.products.run(
                self.ring,
                instructions,
                acc,
                sums,
                registers,
                (carried, held),
                frag_x,
                addresses,
                (full, empty, ahead),
                iteration,
                stages,
                constants,
            )
            fixed = epilogue.fixed_operands(at)
            self.products.finish(acc, sums, held)
            epilogue.run(acc, at, fixed, filled, scales)
            iteration += stages
            filled += epilogue.chunks
        if const_expr(self.staged):
            if thread < 32:
                # The staging buffers must outlive the reads from them.
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _arriving_loads(self, operand: Any, s_out: Any, landed: Any) -> BulkLoads | None:
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
            elsewhere=self.arriving,
        )


def _pinned(value: Any) -> Any:
    """``value``, computed here and not where it is first used."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
