"""The order of a warpgroup's work on a tile, on a model of wgmma and of the ring, without a GPU.

The code that is traced into the kernel runs on whole numbers instead. The model fails where
registers or sums are touched while a product uses them, a stage is read before it was waited for or
after it was freed, a wait would never end, or codes, activations, scales and zero points of
different columns meet; the sums of several tiles in a row must be exact.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedops.config.mixed import NarrowWeight
from fusedops.config.mixed_prefill import MixedPrefillConfig, mixed_prefill_config
from fusedops.weight.fragments import PIECE_BYTES, piece_columns

TILES = 3
WHOLE_ZEROS = (7, 9)


class Registers(list[Any]):
    """Registers of a thread; ``in_use`` by products, whole or by fragments of four."""

    def __init__(self, count: int, fragments: bool = False) -> None:
        super().__init__([None] * count)
        self.in_use: Counter[int] = Counter()
        self.fragments = fragments

    def _check(self, index: int) -> None:
        assert not self.in_use[index // 4 if self.fragments else 0], "a product uses the register"

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, tuple):
            return self, at[-1]
        self._check(at)
        return super().__getitem__(at)

    def __setitem__(self, at: Any, value: Any) -> None:
        self._check(at)
        super().__setitem__(at, value)

    def fill(self, value: Any) -> None:
        for i in range(len(self)):
            self[i] = value


class Model:
    """The machine, as ``fusedops.cutlass.mixed_prefill_multiply`` sees it."""

    def __init__(self, config: MixedPrefillConfig, k: int) -> None:
        self.config = config
        self.tile_stages = config.k_stages(k)
        self.columns = self.tile_stages * config.k
        draw = random.Random(0)
        # Tiles follow each other in K, so that every one has other numbers.
        count = (TILES * self.tile_stages + 2 * config.stages) * config.k
        self.x = [draw.randint(-3, 3) if i % self.columns < k else 0 for i in range(count)]
        self.codes = [[draw.randint(0, 15) for _ in range(count)] for _ in range(2)]
        self.scales = [[draw.randint(1, 5) for _ in range(count // 32)] for _ in range(2)]
        self.zeros = [[draw.randint(0, 16) for _ in range(count // 32)] for _ in range(2)]
        self.filled = list(range(config.stages))
        self.loads = [1] * config.stages
        self.waited: set[tuple[int, int]] = set()
        self.released: list[int] = []
        self.groups: list[list[Any]] = []
        self.issued: list[Any] = []

    def first_column(self, stage: int) -> int:
        """Of what a stage holds."""
        assert (stage, self.loads[stage]) in self.waited, "the stage was not waited for"
        return self.filled[stage] * self.config.k

    def wait(self, stage: int, parity: int) -> None:
        assert (self.loads[stage] - 1) & 1 == parity, "the wait does not end"
        self.waited.add((stage, self.loads[stage]))

    def leave(self, ring: Any, stage: int, ahead: Any) -> None:
        """The loading warp fills a free stage at once."""
        self.released.append(stage)
        self.loads[stage] += 1
        self.filled[stage] = max(self.filled) + 1

    def gemm(self, starts: bool, target: Registers, a: Any, x: Any, _: Any) -> None:
        registers, step = a
        values = list(registers)[4 * step : 4 * step + 4]
        self.issued.append((starts, target, registers, step, values, x))
        registers.in_use[step] += 1
        target.in_use[0] += 1

    def commit_group(self) -> None:
        self.groups.append(self.issued)
        self.issued = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for product in self.groups.pop(0):
                self._complete(*product)

    def _complete(
        self, starts: bool, target: Registers, registers: Any, step: int, values: Any, x: Any
    ) -> None:
        registers.in_use[step] -= 1
        target.in_use[0] -= 1
        first = self.first_column(x[0]) + x[1]
        for half in range(2):
            column, numbers = values[half]
            assert column in (None, first), "codes and activations of different columns"
            total = sum(a * b for a, b in zip(numbers, self.x[first:], strict=False))
            for j in range(len(target)):
                if (j >> 1) & 1 == half:
                    before = 0 if starts else list.__getitem__(target, j)
                    list.__setitem__(target, j, before + total)

    def read_words(self, at: Any) -> list[tuple[int, int]]:
        """(first column, columns) of each of four words."""
        columns = piece_columns(self.config.weight.bits)
        stage, offset = at.place
        first = self.first_column(stage) + offset // PIECE_BYTES * columns
        return [(first + w * columns // 4, columns // 4) for w in range(4)]

    def fragment(self, words: Any, weight: NarrowWeight, dtype: Any, constants: Any) -> list[Any]:
        first = words[0][0]
        assert [w[0] for w in words] == [first + i * words[0][1] for i in range(len(words))]
        assert len(words) * words[0][1] == weight.step
        rows = []
        for half in range(2):
            zero = 0
            if constants is not None:
                group, zero = constants[half]
                assert group in (None, first // max(1, weight.group)), (
                    "zero points of another group"
                )
            rows.append((first, [c - zero for c in self.codes[half][first : first + weight.step]]))
        return rows * 2

    def _of_group(self, values: Any, at: Any, row_bytes: int) -> list[tuple[int, int]]:
        stage, offset = at.place
        group = self.first_column(stage) // self.config.weight.group + offset // row_bytes
        return [(group, values[half][group]) for half in range(2)]

    def scale_pair(self, at: Any, dtype: torch.dtype) -> list[int]:
        pairs = self._of_group(self.scales, at, self.config.rows * dtype.itemsize)
        return [scale for _, scale in pairs]

    def zero_pair(self, at: Any) -> list[tuple[int, int]]:
        return self._of_group(self.zeros, at, self.config.rows)

    def zero_constants(self, zeros: Any, dtype: Any, products: bool) -> Any:
        pairs = [(None, 8)] * 2 if zeros is None else zeros
        if not products:
            return tuple(pairs)
        return tuple((None, [-zero] * self.config.weight.step) for _, zero in pairs) * 2

    def wanted(self, tile: int, half: int) -> int:
        """The exact sum of a tile's row."""
        weight, total = self.config.weight, 0
        for column in range(tile * self.columns, (tile + 1) * self.columns):
            group = column // weight.group if weight.group else 0
            zero = 8
            if weight.zeros:
                zero = self.zeros[half][group] if weight.group else WHOLE_ZEROS[half]
            scale = self.scales[half][group] if weight.group else 1
            total += (self.codes[half][column] - zero) * scale * self.x[column]
        return total


class Address(SimpleNamespace):
    """Of a stage: (stage, bytes from its beginning)."""

    def __add__(self, size: int) -> Address:
        return Address(place=(self.place[0], self.place[1] + size))


def install(model: Model, module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the model in place of the DSL; returns the products of a tile."""
    arch = SimpleNamespace(
        mbarrier_wait=model.wait, sync_warp=lambda: None, elect_one=lambda: nullcontext()
    )
    cute = SimpleNamespace(arch=arch, gemm=model.gemm, recast_tensor=lambda a, element: a)
    cutlass = SimpleNamespace(
        range=lambda first, last, step, unroll: range(first, last, step),
        range_constexpr=range,
        select_=lambda condition, yes, no: yes if condition else no,
    )
    warpgroup = SimpleNamespace(
        fence=lambda: None, commit_group=model.commit_group, wait_group=model.wait_group
    )
    replacements = {"cute": cute, "cutlass": cutlass, "warpgroup": warpgroup, "_leave": model.leave}
    replacements |= {"const_expr": bool, "code_scales": lambda dtype, products: (1, 1)}
    for name in ("read_words", "fragment", "scale_pair", "zero_pair", "zero_constants"):
        replacements[name] = getattr(model, name)
    for name, value in replacements.items():
        monkeypatch.setattr(module, name, value)

    def stage(first: Any, index: int) -> Any:
        return SimpleNamespace(
            **{n: Address(place=(index, 0)) for n in ("codes", "scales", "zeros")}
        )

    dtype = torch.float8_e4m3fn if model.config.weight.x_bits == 8 else torch.bfloat16
    return module.TileProducts(model.config, dtype, SimpleNamespace(stage=stage))


def untraced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, executed anew: tracing replaces the code of the functions that it has traced."""
    name = "fusedops.cutlass.mixed_prefill_multiply"
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, name, module)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("k", [8, 300, 1096])
@pytest.mark.parametrize(
    ("weight", "tile_m", "stage_k"),
    [
        *((NarrowWeight("int4", g, z), 128, 128) for g in (0, 32, 64, 128) for z in (False, True)),
        *((NarrowWeight("int4", g, True, x_bits=8), 64, 128) for g in (0, 32, 128)),
        (NarrowWeight("int4", 128), 192, 128),
        (NarrowWeight("int4"), 256, 64),
        (NarrowWeight("int8", 128), 128, 128),
    ],
    ids=str,
)
def test_every_unit_is_multiplied_in_time(
    weight: NarrowWeight, tile_m: int, stage_k: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    from fusedops.cutlass.ring import Ring

    module = untraced(monkeypatch)

    config = mixed_prefill_config(weight, tile_m, stage_k, 1, 8)
    model = Model(config, k)
    products = install(model, module, monkeypatch)
    ring = Ring(config.stages, 8, 1)
    monkeypatch.setattr("fusedops.cutlass.ring.Int32", int)
    monkeypatch.setattr("fusedops.cutlass.ring.cutlass", module.cutlass)

    class FragX:
        def __getitem__(self, at: Any) -> tuple[int, int]:
            stage, load = divmod(at[3], config.x_loads)
            return stage, load * config.x_columns + at[2] * weight.step

    acc = Registers(config.accumulators)
    sums = [Registers(config.accumulators) for _ in range(config.group_sums)]
    steps = products.steps + config.multiplies_zeros
    fragments = [Registers(4 * steps, fragments=True) for _ in range(2)]
    state = Registers(products.carried), Registers(2)
    whole = [(None, zero) for zero in WHOLE_ZEROS] if weight.zeros else None
    constants = model.zero_constants(whole, None, config.multiplies_zeros)
    for tile in range(TILES):
        iteration = tile * model.tile_stages
        module.TileProducts.run.__wrapped__(
            products,
            ring,
            (False, True),
            acc,
            sums,
            fragments,
            state,
            FragX(),
            (0,),
            (0, 0, 0),
            iteration,
            model.tile_stages,
            constants,
        )
        products.finish(acc, sums, state[1])
        assert list(acc) == [model.wanted(tile, (j >> 1) & 1) for j in range(len(acc))]
    iterations = range(TILES * model.tile_stages)
    assert model.released == [i % config.stages for i in iterations]
