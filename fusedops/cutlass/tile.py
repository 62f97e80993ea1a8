"""A thread's part of an output tile, and the epilogue chain traced over it.

The values sit in Python dictionaries keyed by (m slot, n slot) while a kernel is traced, so every
index is a compile-time constant and every value stays in a register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Int32, Int64, cute, select_

from fusedops.cutlass.math import DslMath, round_to, storage_value, store_pair
from fusedops.epilogue.base import Node, Operand
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.emit import KernelMath

__all__ = [
    "ChainEmission",
    "Coordinates",
    "GroupMaximum",
    "RowReducer",
    "Slot",
    "ThreadTile",
    "halves_columns",
]

Slot = tuple[int, int]
LoadedOperands = dict[str, tuple[str, dict[Any, Any]]]
"""Operand name -> its axis and its values by m slot, n slot, both, or None for a scalar."""

_OPERAND_KEY: dict[str, Callable[[int, int], Any]] = {
    "scalar": lambda i, j: None,
    "m": lambda i, j: i,
    "n": lambda i, j: j,
    "mn": lambda i, j: (i, j),
}

RowReducer = Callable[[str, dict[int, Any], str], None]
"""``(output, value per m slot, "sum" or "max")``: finishes a row statistic across threads."""

GroupMaximum = Callable[[Any], Any]
"""The largest of a value over the threads that hold a row, NaN if one is."""

EVERY_AXIS = frozenset(_OPERAND_KEY)


def halves_columns(node: Node) -> bool:
    """Whether a node combines interleaved column pairs into one."""
    return node.width(32) == 16


@dataclass(frozen=True)
class Coordinates:
    """Where a thread's values lie in the (M, N) result.

    Attributes:
        m: row of each m slot, run-time Int32.
        n: column of each n slot, run-time Int32.
        pairs: (gate, up) n slots whose columns are 8 apart in a block of 16.
        m_limit, n_limit: sizes of the result; coordinates may lie beyond, values there are unused.
    """

    m: tuple[Any, ...]
    n: tuple[Any, ...]
    pairs: tuple[tuple[int, int], ...]
    m_limit: Any
    n_limit: Any

    def halved(self) -> Coordinates:
        """Coordinates after pairs of columns were combined: column 16 b + r moves to 8 b + r."""
        columns = tuple(((self.n[gate] >> 4) << 3) + (self.n[gate] & 7) for gate, _ in self.pairs)
        return Coordinates(self.m, columns, (), self.m_limit, self.n_limit // 2)

    def slots(self) -> tuple[Slot, ...]:
        """Every (m slot, n slot)."""
        return tuple((i, j) for i in range(len(self.m)) for j in range(len(self.n)))


def min_int(left: Any, right: Any) -> Any:
    """The smaller of two Int32."""
    return cute.arch.inline_ptx(
        "min.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[left, right]
    )


@dataclass(frozen=True)
class ChainEmission:
    """One epilogue chain on the tensors of one kernel.

    Attributes:
        epilogue: the chain.
        operands: cute tensors by operand name: scalar (1,), m (M,), n (N,), mn (M, N).
        outputs: cute tensors of the extra outputs by name.
        out_dtype: dtype of the main result.
        paired: n slots come in twos of neighbouring columns, the first even, and operands along n
            may be read two elements at a time: even widths, addresses and row pitches of whole
            pairs.
        elsewhere: an operand that the kernel brings by another way than ``load``.
    """

    epilogue: Epilogue
    operands: Mapping[str, Any]
    outputs: Mapping[str, Any]
    out_dtype: torch.dtype
    paired: bool = False
    elsewhere: str | None = None

    def moving_operands(self) -> list[Operand]:
        """Operands to ``load`` that change along a row."""
        operands = (o for o in self.epilogue.operands if o.name != self.elsewhere)
        return [o for o in operands if o.axis in ("n", "mn")]

    def load(self, coordinates: Coordinates, axes: frozenset[str] = EVERY_AXIS) -> LoadedOperands:
        """Read every operand value along ``axes`` that this thread will need, ahead of use."""
        loaded: LoadedOperands = {}
        for node in self.epilogue:
            for operand in node.operands():
                if operand.axis in axes and operand.name != self.elsewhere:
                    loaded[operand.name] = (operand.axis, self._load(operand, coordinates))
            if halves_columns(node):
                coordinates = coordinates.halved()
        return loaded

    def _load(self, operand: Operand, at: Coordinates) -> dict[Any, Any]:
        tensor = self.operands[operand.name]
        m = [min_int(c, at.m_limit - 1) for c in at.m] if operand.axis in ("m", "mn") else []
        if self.paired and operand.axis in ("n", "mn"):
            return self._load_pairs(tensor, operand.axis, m, at)
        n = [min_int(c, at.n_limit - 1) for c in at.n] if operand.axis in ("n", "mn") else []
        match operand.axis:
            case "scalar":
                return {None: tensor[0].to(Float32)}
            case "m":
                return {i: tensor[c].to(Float32) for i, c in enumerate(m)}
            case "n":
                return {j: tensor[c].to(Float32) for j, c in enumerate(n)}
            case _:
                return {
                    (i, j): tensor[a, b].to(Float32)
                    for i, a in enumerate(m)
                    for j, b in enumerate(n)
                }

    def _load_pairs(self, tensor: Any, axis: str, m: list[Any], at: Coordinates) -> dict[Any, Any]:
        loaded: dict[Any, Any] = {}
        columns = {j: min_int(at.n[j], at.n_limit - 2) for j in range(0, len(at.n), 2)}
        if axis == "n":
            for j, column in columns.items():
                loaded[j], loaded[j + 1] = _pair_at(tensor, 0, column)
            return loaded
        for i, row in enumerate(m):
            start = tensor.layout((row, 0))
            for j, column in columns.items():
                loaded[i, j], loaded[i, j + 1] = _pair_at(tensor, start, column)
        return loaded

    def run(
        self,
        values: dict[Slot, Any],
        coordinates: Coordinates,
        loaded: LoadedOperands,
        reducer: RowReducer,
        group_maximum: GroupMaximum | None = None,
    ) -> ThreadTile:
        """Trace the chain over a thread's accumulators.

        Args:
            values: the accumulators by slot.
            coordinates: where they lie.
            loaded: the operands' values, from ``load``.
            reducer: finishes row statistics.
            group_maximum: joins a row's threads; None where the tile holds no whole groups.
        """
        tile = ThreadTile(values, coordinates, self, loaded, reducer, group_maximum)
        for node in self.epilogue:
            tile = node.emit(tile)  # type: ignore[assignment]
        return tile


class ThreadTile:
    """``fusedops.epilogue.emit.KernelTile`` on the values of one thread."""

    math: KernelMath = DslMath()

    def __init__(
        self,
        values: dict[Slot, Any],
        coordinates: Coordinates,
        emission: ChainEmission,
        loaded: LoadedOperands,
        reducer: RowReducer,
        group_maximum: GroupMaximum | None = None,
    ) -> None:
        self.values = values
        self.coordinates = coordinates
        self._emission = emission
        self._loaded = loaded
        self._reducer = reducer
        self._group_maximum = group_maximum

    def _with(self, values: dict[Slot, Any], coordinates: Coordinates | None = None) -> ThreadTile:
        return ThreadTile(
            values,
            coordinates or self.coordinates,
            self._emission,
            self._loaded,
            self._reducer,
            self._group_maximum,
        )

    def map(self, function: Callable[[Any], Any]) -> ThreadTile:
        return self._with({slot: function(value) for slot, value in self.values.items()})

    def combine(
        self,
        operand: str,
        function: Callable[[Any, Any], Any],
        prepare: Callable[[Any], Any] | None = None,
    ) -> ThreadTile:
        axis, raw = self._loaded[operand]
        ready = {key: value.to(Float32) for key, value in raw.items()}
        if prepare is not None:
            ready = {key: prepare(value) for key, value in ready.items()}
        return self._with(
            {
                (i, j): function(value, ready[_OPERAND_KEY[axis](i, j)])
                for (i, j), value in self.values.items()
            }
        )

    def combine_pairs(self, function: Callable[[Any, Any], Any]) -> ThreadTile:
        at = self.coordinates
        values = {
            (i, j): function(self.values[i, gate], self.values[i, up])
            for i in range(len(at.m))
            for j, (gate, up) in enumerate(at.pairs)
        }
        return self._with(values, at.halved())

    def part(self, first: int, count: int) -> ThreadTile:
        """The tile of ``count`` n slots from ``first`` on."""
        at = self.coordinates
        if first == 0 and count == len(at.n):
            return self
        values = {
            (i, j - first): value
            for (i, j), value in self.values.items()
            if first <= j < first + count
        }
        n = at.n[first : first + count]
        return self._with(values, Coordinates(at.m, n, (), at.m_limit, at.n_limit))

    def write(self, output: str, dtype: torch.dtype | None) -> None:
        self.store(self._emission.outputs[output], dtype or self._emission.out_dtype)

    def store(self, tensor: Any, dtype: torch.dtype) -> None:
        """Round to ``dtype`` and store every value inside the result to an (M, N) tensor."""
        at = self.coordinates
        if self._emission.paired:
            for i, row in enumerate(at.m):
                start = tensor.layout((row, 0))
                for j in range(0, len(at.n), 2):
                    inside = (row < at.m_limit) & (at.n[j] < at.n_limit)
                    address = _address(tensor, start, at.n[j])
                    store_pair(address, self.values[i, j], self.values[i, j + 1], dtype, inside)
            return
        for (i, j), value in self.values.items():
            inside = (at.m[i] < at.m_limit) & (at.n[j] < at.n_limit)
            _store_if(inside, tensor, at.m[i], at.n[j], storage_value(value, dtype))

    def reduce_rows(self, output: str, function: Callable[[Any], Any], combine: str) -> None:
        at = self.coordinates
        dtype = self._emission.out_dtype
        rows: dict[int, Any] = {}
        for (i, j), value in self.values.items():
            term = function(round_to(value, dtype))
            inside = at.n[j] < at.n_limit
            term = select_(inside, term, Float32(0.0))
            if i not in rows:
                rows[i] = term
            elif combine == "sum":
                rows[i] = rows[i] + term
            else:
                rows[i] = self.math.maximum(rows[i], term)
        self._reducer(output, rows, combine)

    def scale_groups(self, output: str, columns: int, scale: Callable[[Any], Any]) -> ThreadTile:
        at = self.coordinates
        if self._group_maximum is None:
            raise NotImplementedError(f"this tile holds no whole groups of {columns} columns")
        largest: dict[int, Any] = {}
        for (i, j), value in self.values.items():
            # Columns beyond the result hold whatever the operands' last column made of zeros.
            magnitude = select_(at.n[j] < at.n_limit, self.math.absolute(value), Float32(0.0))
            largest[i] = self.math.maximum(largest[i], magnitude) if i in largest else magnitude
        scales = {i: scale(self._group_maximum(value)) for i, value in largest.items()}
        # The lane with a row's first column writes the scale.
        group, first = at.n[0] // columns, at.n[0] % columns
        for i, value in scales.items():
            inside = (first == 0) & (at.m[i] < at.m_limit) & (at.n[0] < at.n_limit)
            _store_if(inside, self._emission.outputs[output], group, at.m[i], value)
        inverse = {i: self.math.reciprocal(value) for i, value in scales.items()}
        return self._with({(i, j): value * inverse[i] for (i, j), value in self.values.items()})


def _pair_at(tensor: Any, start: Any, column: Any) -> tuple[Any, Any]:
    """Two neighbours of the row at element ``start``, by one load; as stored, in one register."""
    pointer = cute.make_ptr(
        tensor.element_type,
        _address(tensor, start, column),
        cute.AddressSpace.gmem,
        assumed_align=2 * tensor.element_type.width // 8,
    )
    pair = cute.make_tensor(pointer, cute.make_layout(2)).load()
    return pair[0], pair[1]


def _address(tensor: Any, start: Any, column: Any) -> Any:
    """Byte address of a column of the row at element ``start``: one multiply-add from the row's."""
    row = (tensor.iterator + start).toint()
    return row + Int64(column) * (tensor.element_type.width // 8)


@cute.jit
def _store_if(inside: Any, tensor: Any, m: Any, n: Any, value: Any) -> None:
    if inside:
        tensor[m, n] = value
