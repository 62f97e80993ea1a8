"""The epilogue of the kernel for many rows with narrow weights: a warpgroup's sums to memory.

A thread has two columns of the result, 8 apart, and pairs of its rows; the chain runs over steps of
32 rows. Results of 8 and 16 bits go through ``transposed_staging`` and leave by bulk tensor stores,
64 rows at a time; an operand of the result's shape and dtype comes by bulk loads into the same
buffers (``bulk_operand``), the first two chunks of a tile while its products run. Other operands
are read directly; results in float32, and those that are not aligned, are stored directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fusedops.config.mixed_prefill import CHUNK, STATISTIC_ROWS, MixedPrefillConfig
from fusedops.cutlass.bulk_operand import BulkLoads, free_buffers
from fusedops.cutlass.math import DslMath
from fusedops.cutlass.staging import Staging
from fusedops.cutlass.tile import ChainEmission, Coordinates, halves_columns
from fusedops.cutlass.transposed_staging import read_transposed, write_transposed

__all__ = ["MixedPrefillEpilogue", "WarpgroupPlace"]

_JOIN = {"sum": lambda left, right: left + right, "max": DslMath().maximum}
_STEP = 32
"""Rows of x that go through the chain at a time."""
_FIXED_AXES = frozenset({"scalar", "n"})
_MOVING_AXES = frozenset({"m", "mn"})


@dataclass(frozen=True)
class WarpgroupPlace:
    """Where a warpgroup's tile lies, all run-time Int32.

    Attributes:
        tile_m: index of the tile along M.
        block: index of the warpgroup's 64 weight rows along N.
        m, n: sizes of the accumulator.
        thread: index in the warpgroup.
        first_thread: index of the warp's first thread, which the compiler knows to be uniform: a
            branch on ``thread`` would cost the main loop its uniform registers.
        warpgroup: index of the consumer warpgroup.
    """

    tile_m: Any
    block: Any
    m: Any
    n: Any
    thread: Any
    first_thread: Any
    warpgroup: Any


@dataclass(frozen=True)
class MixedPrefillEpilogue:
    """The chain of one kernel on the sums of its tiles.

    Attributes:
        config: the tiling.
        emission: the chain on the kernel's tensors.
        staging: the way of the main result to memory.
        atom: copy atom of its bulk stores; None where it is stored directly.
        out: the result; s_out: the staging buffers.
        arriving: the loads of ``emission.elsewhere``, None without it.
        parts: shared memory for row statistics, (rows of x, (output, warpgroup, warp)), or None.
        names: outputs of the row statistics.
    """

    config: MixedPrefillConfig
    emission: ChainEmission
    staging: Staging
    atom: Any
    out: Any
    s_out: Any
    arriving: BulkLoads | None
    parts: Any
    names: tuple[str, ...]

    @property
    def chunks(self) -> int:
        """Chunks of a tile's rows."""
        return self.config.tile_m // CHUNK

    @property
    def columns(self) -> int:
        """Columns of the result that a thread has."""
        return 1 if any(halves_columns(node) for node in self.emission.epilogue) else 2

    def coordinates(self, place: WarpgroupPlace, step: int) -> Coordinates:
        """Of a thread's accumulators in one step."""
        lane = place.thread % 32
        token = place.tile_m * self.config.tile_m + step * _STEP + 2 * (lane % 4)
        column = place.block * STATISTIC_ROWS + (place.thread // 32) * 16 + lane // 4
        m = tuple(token + 8 * b + parity for b in range(_STEP // 8) for parity in range(2))
        return Coordinates(m, (column, column + 8), ((0, 1),), place.m, place.n)

    def fixed_operands(self, place: WarpgroupPlace) -> dict[str, Any]:
        """What does not change along the rows of a tile."""
        return self.emission.load(self.coordinates(place, 0), _FIXED_AXES)

    def first_chunks(self, place: WarpgroupPlace, filled_before: Any) -> None:
        """Start the bulk loads that a tile begins with; its products may follow."""
        if self.arriving is not None:
            free_buffers(place.first_thread)
            for chunk in range(min(self.chunks, self.staging.buffers)):
                self._start_load(place, filled_before, chunk)

    def _start_load(self, place: WarpgroupPlace, filled_before: Any, chunk: int) -> None:
        if self.arriving is not None and chunk < self.chunks:
            buffer = self._buffer(place, filled_before, chunk)
            self.arriving.start(self._box(place, chunk), buffer, place.first_thread)

    def _buffer(self, place: WarpgroupPlace, filled_before: Any, chunk: int) -> Any:
        buffers = self.staging.buffers
        if self.chunks % buffers == 0:
            return place.warpgroup * buffers + chunk % buffers
        return place.warpgroup * buffers + (filled_before + chunk) % buffers

    def _box(self, place: WarpgroupPlace, chunk: int) -> tuple[Any, Any]:
        """Index along M and N of a chunk, in the result cut into buffers."""
        return place.tile_m * self.chunks + chunk, place.block

    def run(
        self,
        acc: Any,
        place: WarpgroupPlace,
        fixed: dict[str, Any],
        filled_before: Any,
        scales: Any,
    ) -> None:
        """Trace the epilogue of a tile.

        Args:
            acc: its sums.
            place: where it lies.
            fixed: from ``fixed_operands``.
            filled_before: staging buffers that the warpgroup's earlier tiles have filled.
            scales: that the sums of the thread's two columns are to be multiplied by, or None.
        """
        steps = self.config.tile_m // _STEP
        combines: dict[str, str] = {}
        moving = self.emission.load(self.coordinates(place, 0), _MOVING_AXES)
        for step in range(steps):
            at = self.coordinates(place, step)
            operands = moving
            if step + 1 < steps:
                moving = self.emission.load(self.coordinates(place, step + 1), _MOVING_AXES)
            values = {}
            for i in range(_STEP // 4):
                for j in range(2):
                    value = acc[(step * _STEP // 8 + (i >> 1)) * 4 + 2 * j + (i & 1)]
                    values[i, j] = value if scales is None else value * scales[j]
            chunk, within = divmod(step * _STEP, CHUNK)
            arrived = self._arrived(place, filled_before, chunk, within)

            def add(output: str, by_slot: dict[int, Any], combine: str, step: int = step) -> None:
                combines[output] = combine
                self._join_lanes(output, by_slot, combine, place, step)

            tile = self.emission.run(values, at, {**fixed, **operands, **arrived}, add)
            if self.atom is None:
                tile.store(self.out, self.staging.dtype)
            else:
                base = Int32(self.s_out.iterator.toint())
                buffer = self._buffer(place, filled_before, chunk)
                address = self.staging.buffer_address(base, buffer)
                write_transposed(self.staging, tile, address, place.thread, within)
            if within + _STEP == CHUNK:
                self._publish(place, filled_before, chunk, combines)
            # Keeps later steps' loads behind this step: the compiler would hoist them all.
            cute.arch.sync_warp()

    def _arrived(
        self, place: WarpgroupPlace, filled_before: Any, chunk: int, within: int
    ) -> dict[str, Any]:
        """A step's part of the operand that came by bulk loads, from the buffer of its results."""
        if self.arriving is None:
            return {}
        staging = self.staging
        buffer = self._buffer(place, filled_before, chunk)
        if within == 0:
            self.arriving.wait(buffer, (filled_before + chunk) // staging.buffers)
        address = staging.buffer_address(Int32(self.s_out.iterator.toint()), buffer)
        values = read_transposed(staging, address, place.thread, within, _STEP // 8, self.columns)
        return {self.emission.elsewhere or "": ("mn", values)}

    def _publish(
        self, place: WarpgroupPlace, filled_before: Any, chunk: int, combines: dict[str, str]
    ) -> None:
        """Store a chunk that all warps have written, and finish its statistics."""
        if self.atom is not None or self.names:
            self.staging.publish(place.first_thread, place.warpgroup, self.atom is not None)
        if self.atom is not None:
            if chunk > 0:
                self._start_load(place, filled_before, chunk + 1)
            g_out = cute.local_tile(self.out, (CHUNK, self.staging.columns), (None, None))
            source, target = cpasync.tma_partition(
                self.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.s_out, 0, 2),
                cute.group_modes(g_out, 0, 2),
            )
            _bulk_store(
                self.atom,
                source[(None, self._buffer(place, filled_before, chunk))],
                target[(None, *self._box(place, chunk))],
                place.first_thread,
            )
        for index, name in enumerate(self.names):
            row = place.tile_m * self.config.tile_m + chunk * CHUNK + place.thread
            first = (index * 2 + place.warpgroup) * 4
            blocks = cute.ceil_div(place.n, STATISTIC_ROWS)
            mine = (place.thread < CHUNK) & (row < place.m) & (place.block < blocks)
            _write_part(
                self.parts,
                self.emission.outputs[name],
                (chunk * CHUNK + place.thread, first),
                (place.block, row, blocks),
                combines[name],
                mine,
            )
        if self.names:
            # The next tile's statistics take the same place.
            self.staging.synchronize(place.warpgroup)

    def _join_lanes(
        self,
        output: str,
        by_slot: dict[int, Any],
        combine: str,
        place: WarpgroupPlace,
        step: int,
    ) -> None:
        """Join a warp's columns, and keep the result of each row for ``_publish``."""
        lane = place.thread % 32
        first = (self.names.index(output) * 2 + place.warpgroup) * 4 + place.thread // 32
        for slot, value in by_slot.items():
            for offset in (4, 8, 16):
                value = _JOIN[combine](value, cute.arch.shuffle_sync_bfly(value, offset))
            row = step * _STEP + 8 * (slot >> 1) + 2 * (lane % 4) + (slot & 1)
            _keep(self.parts, row, first, value, lane < 4)


@cute.jit
def _bulk_store(atom: cute.CopyAtom, source: Any, target: Any, thread: Int32) -> None:
    if thread < 32:
        cute.copy(atom, source, target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _keep(parts: Any, row: Any, column: Any, value: Any, mine: Any) -> None:
    if mine:
        parts[row, column] = value


@cute.jit
def _write_part(
    parts: Any, to: Any, source: Any, place: Any, combine: cutlass.Constexpr, mine: Any
) -> None:
    """Join the warps' statistics of a row; the first block's owner zeroes parts without a block."""
    block, row, blocks = place
    token, first = source
    if mine:
        total = parts[token, first]
        for warp in cutlass.range_constexpr(1, 4):
            total = _JOIN[combine](total, parts[token, first + warp])
        to[block, row] = total
        if block == 0:
            for unused in cutlass.range(blocks, cute.size(to, mode=[0]), unroll=1):
                to[unused, row] = Float32(0.0)
