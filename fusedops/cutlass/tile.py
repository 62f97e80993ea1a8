"""A thread's part of an output tile, and the epilogue chain traced over it.

The values sit in Python dictionaries keyed by (m slot, n slot) while a kernel is traced, so every
index is a compile-time constant and every value stays in a register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Int32, cute, select_

from fusedops.cutlass.math import DslMath, round_to, storage_value
from fusedops.epilogue.base import Node, Operand
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.emit import KernelMath

__all__ = ["ChainEmission", "Coordinates", "RowReducer", "ThreadTile", "halves_columns"]

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
    """

    epilogue: Epilogue
    operands: Mapping[str, Any]
    outputs: Mapping[str, Any]
    out_dtype: torch.dtype

    def load(self, coordinates: Coordinates) -> LoadedOperands:
        """Read every operand value that this thread will need, ahead of their use."""
        loaded: LoadedOperands = {}
        for node in self.epilogue:
            for operand in node.operands():
                loaded[operand.name] = (operand.axis, self._load(operand, coordinates))
            if halves_columns(node):
                coordinates = coordinates.halved()
        return loaded

    def _load(self, operand: Operand, at: Coordinates) -> dict[Any, Any]:
        tensor = self.operands[operand.name]
        m = [min_int(c, at.m_limit - 1) for c in at.m] if operand.axis in ("m", "mn") else []
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

    def run(
        self,
        values: dict[Slot, Any],
        coordinates: Coordinates,
        loaded: LoadedOperands,
        reducer: RowReducer,
    ) -> ThreadTile:
        """Trace the chain over a thread's accumulators."""
        tile = ThreadTile(values, coordinates, self, loaded, reducer)
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
    ) -> None:
        self.values = values
        self.coordinates = coordinates
        self._emission = emission
        self._loaded = loaded
        self._reducer = reducer

    def _with(self, values: dict[Slot, Any]) -> ThreadTile:
        return ThreadTile(values, self.coordinates, self._emission, self._loaded, self._reducer)

    def map(self, function: Callable[[Any], Any]) -> ThreadTile:
        return self._with({slot: function(value) for slot, value in self.values.items()})

    def combine(
        self,
        operand: str,
        function: Callable[[Any, Any], Any],
        prepare: Callable[[Any], Any] | None = None,
    ) -> ThreadTile:
        axis, raw = self._loaded[operand]
        ready = raw if prepare is None else {key: prepare(value) for key, value in raw.items()}
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
        return ThreadTile(values, at.halved(), self._emission, self._loaded, self._reducer)

    def write(self, output: str, dtype: torch.dtype | None) -> None:
        self.store(self._emission.outputs[output], dtype or self._emission.out_dtype)

    def store(self, tensor: Any, dtype: torch.dtype) -> None:
        """Round to ``dtype`` and store every value inside the result to an (M, N) tensor."""
        at = self.coordinates
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


@cute.jit
def _store_if(inside: Any, tensor: Any, m: Any, n: Any, value: Any) -> None:
    if inside:
        tensor[m, n] = value
