"""The epilogue of the prefill kernel: a warpgroup's accumulators through the chain to memory.

A thread holds too many accumulators to treat them at once, so the chain runs over steps of a few
columns: operands of the next step are read while one is computed, and its results go to the
staging buffer at once. Operands along N come by direct loads of neighbouring pairs, and so does a
residual where it does not come by bulk loads (``bulk_operand``); a row's lanes are neighbours, so a
pair of loads uses whole sectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fusedops.config.prefill import MIN_STEP_COLUMNS, PrefillConfig
from fusedops.cutlass.bulk_operand import BulkLoads, free_buffers
from fusedops.cutlass.math import DslMath
from fusedops.cutlass.staging import ROWS, Staging
from fusedops.cutlass.tile import ChainEmission, Coordinates, Slot, ThreadTile, halves_columns

__all__ = ["PrefillEpilogue", "TilePlace"]

_JOIN = {"sum": lambda left, right: left + right, "max": DslMath().maximum}
_STEP_COLUMNS = 32
_WORK_REGISTERS = 76
"""Registers of a consumer thread beside accumulators and operands under way."""
_OPERAND_REGISTERS = 40
"""Registers that operands under way may take."""
_MOST_STEPS_AHEAD = 3
"""Chosen by registers: one more set spills in tiles of 160 columns; not measured against 2."""
_FIXED_AXES = frozenset({"scalar", "m"})
_MOVING_AXES = frozenset({"n", "mn"})


@dataclass(frozen=True)
class TilePlace:
    """Where a warpgroup's tile lies, all run-time Int32.

    Attributes:
        tile_m, tile_n: index of the tile along M and N.
        block: index of the warpgroup's first 64-row block in the tile.
        m, n: sizes of the accumulator.
        thread: index in the warpgroup.
        warpgroup: index of the consumer warpgroup.
    """

    tile_m: Any
    tile_n: Any
    block: Any
    m: Any
    n: Any
    thread: Any
    warpgroup: Any


@dataclass(frozen=True)
class PrefillEpilogue:
    """The chain of one kernel on the fragments of its tiles.

    Attributes:
        config: the tiling.
        emission: the chain on the kernel's tensors.
        staging: the way of the main result to memory.
        bulk: whether it leaves by bulk tensor stores.
        s_out: the staging buffers; ``out``: the result; ``atom``: the store's copy atom if bulk.
        arriving: the loads of ``emission.elsewhere``, None without it.
    """

    config: PrefillConfig
    emission: ChainEmission
    staging: Staging
    bulk: bool
    s_out: Any
    out: Any
    atom: Any
    arriving: BulkLoads | None = None

    @property
    def halving(self) -> int:
        """Accumulator columns for one column of the result."""
        return 2 if any(halves_columns(node) for node in self.emission.epilogue) else 1

    @property
    def step_columns(self) -> int:
        """Accumulator columns that go through the chain at a time."""
        groups = max([node.group_columns() for node in self.emission.epilogue], default=1)
        step = _STEP_COLUMNS if self.config.tile_n % _STEP_COLUMNS == 0 else MIN_STEP_COLUMNS
        return max(step, groups * self.halving)

    @property
    def chunks(self) -> int:
        """Staging buffers that a tile's row fills."""
        return self.config.tile_n // self.halving // self.staging.columns

    @property
    def stores(self) -> int:
        """Staging buffers that a tile fills."""
        return self.config.blocks * self.chunks

    def coordinates(self, place: TilePlace, block: int, step: int) -> Coordinates:
        """Of a thread's accumulators in one step of a 64-row block."""
        config, thread = self.config, place.thread
        row = place.tile_m * config.tile_m + (place.block + block * config.sharing) * ROWS
        row += (thread // 32) * 16 + (thread % 32) // 4
        column = place.tile_n * config.tile_n + step * self.step_columns + 2 * (thread % 4)
        groups = self.step_columns // 8
        pairs = tuple(
            (4 * b + parity, 4 * b + 2 + parity) for b in range(groups // 2) for parity in range(2)
        )
        n = tuple(column + 8 * group + parity for group in range(groups) for parity in range(2))
        return Coordinates((row, row + 8), n, pairs, place.m, place.n)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(64-row block, step of it) in the order in which they are computed."""
        columns = range(self.config.tile_n // self.step_columns)
        return [(block, step) for block in range(self.config.blocks) for step in columns]

    @property
    def ahead(self) -> int:
        """Steps whose operands are under way: what the registers beside the accumulators hold.

        An operand of the result's shape takes a register for a pair of 16-bit values.
        """
        pairs = 0
        for operand in self.emission.moving_operands():
            columns = self.step_columns // 8
            rows = 2 if operand.axis == "mn" else 1
            width_bytes = self.emission.operands[operand.name].element_type.width // 8
            pairs += rows * columns * max(1, width_bytes // 2)
        free = self.config.consumer_registers - self.config.accumulators - _WORK_REGISTERS
        steps = min(free, _OPERAND_REGISTERS) // max(1, pairs)
        return max(1, min(_MOST_STEPS_AHEAD, steps))

    def first_operands(self, place: TilePlace) -> list[dict[str, Any]]:
        """What the first steps read, to be loaded while the last products are still running."""
        count = self.ahead if self.emission.paired else 1
        return [self._load(place, *at) for at in self.steps[:count]]

    def _load(self, place: TilePlace, block: int, step: int) -> dict[str, Any]:
        at = self.coordinates(place, block, step)
        # What does not change along a block's columns is read with its first step.
        return self.emission.load(at) if step == 0 else self.emission.load(at, _MOVING_AXES)

    def first_chunks(self, place: TilePlace, filled_before: Any) -> None:
        """Start the bulk loads that a tile begins with; its products may follow."""
        if self.arriving is not None:
            free_buffers(place.thread)
            for chunk in range(min(self.stores, self.staging.buffers)):
                self._start_load(place, filled_before, chunk)

    def _start_load(self, place: TilePlace, filled_before: Any, chunk: int) -> None:
        if self.arriving is not None and chunk < self.stores:
            box = self._box(place, *divmod(chunk, self.chunks))
            self.arriving.start(box, self._buffer(place, filled_before, chunk), place.thread)

    def _buffer(self, place: TilePlace, filled_before: Any, chunk: int) -> Any:
        buffers = self.staging.buffers
        if self.stores % buffers == 0:
            return place.warpgroup * buffers + chunk % buffers
        return place.warpgroup * buffers + (filled_before + chunk) % buffers

    def run(
        self, acc: Any, place: TilePlace, loaded: list[dict[str, Any]], filled_before: Any
    ) -> None:
        """Trace the epilogue of a tile.

        Args:
            acc: the accumulators.
            place: the tile.
            loaded: from ``first_operands``.
            filled_before: staging buffers that the warpgroup's earlier tiles have filled.
        """
        steps = self.steps
        pending = list(loaded)
        ahead = len(pending)
        fixed: dict[str, Any] = {}
        statistics: dict[str, tuple[str, dict[int, Any]]] = {}
        filled = 0

        def add(output: str, by_slot: dict[int, Any], combine: str) -> None:
            if output in statistics:
                before = statistics[output][1]
                by_slot = {i: _JOIN[combine](before[i], v) for i, v in by_slot.items()}
            statistics[output] = (combine, by_slot)

        for i, (block, step) in enumerate(steps):
            if not pending:
                # Element by element they would fill too many registers ahead of use.
                pending.append(self._load(place, block, step))
            operands = pending.pop(0)
            following = steps[i + ahead] if i + ahead < len(steps) else None
            # Where registers are short, the next block's first operands would be one set too many.
            if self.emission.paired and following and (ahead > 1 or following[0] == block):
                pending.append(self._load(place, *following))
            if step == 0:
                fixed = {name: v for name, v in operands.items() if v[0] in _FIXED_AXES}
                statistics.clear()
            at = self.coordinates(place, block, step)
            values = self._values(acc, block, step)
            arrived = self._arrived(place, filled_before, filled, step)
            tile = self.emission.run(
                values, at, {**fixed, **operands, **arrived}, add, _row_maximum
            )
            filled = self._stage(tile, place, filled_before, filled, step)
            # Keeps later steps' loads behind this step: the compiler would hoist them all.
            cute.arch.sync_warp()
            if i + 1 == len(steps) or steps[i + 1][0] != block:
                for output, (combine, totals) in statistics.items():
                    self._write_statistic(output, combine, totals, place, block)

    def _values(self, acc: Any, block: int, step: int) -> dict[Slot, Any]:
        groups = self.step_columns // 8
        base = block * (self.config.tile_n // 2) + 4 * groups * step
        return {
            (half, 2 * group + parity): acc[base + 4 * group + 2 * half + parity]
            for group in range(groups)
            for half in range(2)
            for parity in range(2)
        }

    def _arrived(
        self, place: TilePlace, filled_before: Any, chunk: int, step: int
    ) -> dict[str, tuple[str, dict[Slot, Any]]]:
        """A step's part of the operand that came by bulk loads, from the buffer of its results."""
        if self.arriving is None:
            return {}
        staging = self.staging
        columns = self.step_columns // self.halving
        within = step * columns % staging.columns
        buffer = self._buffer(place, filled_before, chunk)
        if within == 0:
            self.arriving.wait(buffer, (filled_before + chunk) // staging.buffers)
        address = staging.buffer_address(Int32(self.s_out.iterator.toint()), buffer)
        values = staging.read(address, place.thread, within, columns // 8)
        return {self.emission.elsewhere or "": ("mn", values)}

    def _stage(
        self, tile: ThreadTile, place: TilePlace, filled_before: Any, filled: int, step: int
    ) -> int:
        """Write a step's results; store every buffer that they fill."""
        staging = self.staging
        columns = self.step_columns // self.halving
        base = Int32(self.s_out.iterator.toint())
        for start in range(0, columns, staging.columns):
            width = min(columns - start, staging.columns)
            within = (step * columns + start) % staging.columns
            buffer = self._buffer(place, filled_before, filled)
            staging.write(
                tile.part(start // 4, width // 4),
                staging.buffer_address(base, buffer),
                place.thread,
                within,
            )
            if within + width == staging.columns:
                staging.publish(place.thread, place.warpgroup, self.bulk)
                if filled > 0:
                    self._start_load(place, filled_before, filled + 1)
                self._store(place, buffer, filled)
                filled += 1
        return filled

    def _box(self, place: TilePlace, block: int, chunk: int) -> tuple[Any, Any]:
        """Index along M and N of a chunk of a 64-row block, in the result cut into buffers."""
        row_blocks = self.config.tile_m // ROWS
        row = place.tile_m * row_blocks + place.block + block * self.config.sharing
        return row, place.tile_n * self.chunks + chunk

    def _store(self, place: TilePlace, buffer: Any, filled: int) -> None:
        staging = self.staging
        row_block, column_chunk = self._box(place, *divmod(filled, self.chunks))
        if self.bulk:
            g_out = cute.local_tile(self.out, (ROWS, staging.columns), (None, None))
            source, target = cpasync.tma_partition(
                self.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.s_out, 0, 2),
                cute.group_modes(g_out, 0, 2),
            )
            _bulk_store(
                self.atom,
                source[(None, buffer)],
                target[(None, row_block, column_chunk)],
                place.thread,
            )
        else:
            staging.copy(
                self.s_out[(None, None, buffer)],
                self.out,
                place.thread,
                row_block * ROWS,
                column_chunk * staging.columns,
                place.n // self.halving,
            )

    def _write_statistic(
        self, output: str, combine: str, totals: dict[int, Any], place: TilePlace, block: int
    ) -> None:
        at = self.coordinates(place, block, 0)
        parts = self.emission.outputs[output]
        tiles = cute.ceil_div(place.n, self.config.tile_n)
        for slot, value in totals.items():
            for offset in (1, 2):
                value = _JOIN[combine](value, cute.arch.shuffle_sync_bfly(value, offset))
            mine = (place.thread % 4 == 0) & (at.m[slot] < place.m) & (place.tile_n < tiles)
            _write_part(parts, place.tile_n, at.m[slot], value, tiles, mine)


def _row_maximum(value: Any) -> Any:
    """Over the four lanes of a row."""
    for offset in (1, 2):
        value = DslMath().maximum(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


@cute.jit
def _bulk_store(atom: cute.CopyAtom, source: Any, target: Any, thread: Int32) -> None:
    if thread < 32:
        cute.copy(atom, source, target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _write_part(
    parts: cute.Tensor, part: Int32, row: Int32, value: Float32, tiles: Int32, mine: Any
) -> None:
    """Write a row's partial statistic; the first tile's owner zeroes the parts without a tile."""
    if mine:
        parts[part, row] = value
        if part == 0:
            for unused in cutlass.range(tiles, cute.size(parts, mode=[0]), unroll=1):
                parts[unused, row] = Float32(0.0)
