"""Which quantized layers each goal measures: plain data, so that kernels can be compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fusedops.bench.products import MODELS, Layer
from fusedops.bench.quant_products import QuantLayer
from fusedops.quant import SCHEMES

__all__ = [
    "BLOCK_SHAPES",
    "LARGE_M",
    "M16_SCHEMES",
    "M64_SCHEMES",
    "PRODUCTS",
    "QUANT_ROWS",
    "SCHEME_OF",
    "TABLE",
    "TABLE_CHAIN_M",
    "TABLE_LARGE",
    "TABLE_M",
    "QuantRow",
    "chain_layers",
    "product_layer",
]

PRODUCTS = {
    "o": "o_residual",
    "qkv": "qkv_bias",
    "gate_up_swiglu": "gate_up_swiglu",
    "down": "down_residual",
}
"""The four products of a layer, by the names that goals have for them."""

SCHEME_OF = {"fp8_row": "fp8", "fp8_block": "fp8-block", "int4_g128": "int4"}
"""Schemes of ``quant.<scheme>.<product>.m16``."""

LARGE_M = (512, 1024, 2048, 4096)
"""M at which int4 is held against bf16."""

BLOCK_SHAPES = ((7168, 4096), (4096, 7168), (24576, 1536))
"""(N, K) of products with scales a block."""

_LARGEST_M = 4096
_MODEL = "llama3-8b"


@dataclass(frozen=True)
class QuantRow:
    """One layer of a goal.

    Attributes:
        key: what it is; in sets of rows on rotated buffers also what it is recorded under.
        made: what is measured.
    """

    key: str
    made: QuantLayer


def product_layer(product: str, m: int) -> Layer:
    """One of ``PRODUCTS`` of Llama-3-8B at M rows; it has no bias."""
    return replace(MODELS[_MODEL].layer(PRODUCTS[product], m), bias=False)


def chain_layers(product: str, m: int, schemes: Iterable[str]) -> list[QuantLayer]:
    """A product under several schemes."""
    return [QuantLayer(product_layer(product, m), SCHEMES[name]) for name in schemes]


M16_SCHEMES = (*SCHEME_OF.values(), "int8")
M64_SCHEMES = ("fp8", "int4")
"""Schemes of the rows at M = 16 and 64, which all goals of decode products share."""


def _chain_rows(wanted: Iterable[tuple[str, int, Iterable[str]]]) -> list[QuantRow]:
    return [
        QuantRow(f"{product} m{m} {made.scheme.name}", made)
        for product, m, schemes in wanted
        for made in chain_layers(product, m, schemes)
    ]


def _int4_rows() -> list[QuantRow]:
    rows = []
    for m in LARGE_M:
        for product in PRODUCTS:
            layer = product_layer(product, m)
            plain = Layer(m, layer.N, layer.K)
            made = QuantLayer(plain, SCHEMES["int4"])
            rows.append(QuantRow(f"{product} n{layer.N} k{layer.K} m{m}", made))
    return rows


def _fused_rows() -> list[QuantRow]:
    layer = product_layer("gate_up_swiglu", _LARGEST_M)
    made = QuantLayer(layer, SCHEMES["fp8"], quantizes=True)
    return [QuantRow(f"gate_up_swiglu n{layer.N} k{layer.K} m{layer.M} to e4m3", made)]


def _block_rows() -> list[QuantRow]:
    return [
        QuantRow(
            f"n{n} k{k} m{_LARGEST_M}", QuantLayer(Layer(_LARGEST_M, n, k), SCHEMES["fp8-block"])
        )
        for n, k in BLOCK_SHAPES
    ]


TABLE = "quant.table"
"""Not a goal: the rows of ``fusedops.bench.quant_table``, so that they can be compiled ahead."""

TABLE_M = (1, 8, 32, 64, 128, 512, 1024, 4096)
TABLE_CHAIN_M = 128
"""Up to this M a row of the table is a chain of all schemes, beyond a row a scheme."""
TABLE_LARGE = ("gate_up_swiglu", "down")
"""Products of the table's rows beyond that."""


def _table_rows() -> list[QuantRow]:
    return _chain_rows(
        (product, m, SCHEMES)
        for m in TABLE_M
        for product in (PRODUCTS if m <= TABLE_CHAIN_M else TABLE_LARGE)
    )


def _m16_rows(product: str) -> Callable[[], list[QuantRow]]:
    return lambda: _chain_rows([(product, 16, M16_SCHEMES)])


def _growth_rows() -> list[QuantRow]:
    wide = [(product, 64, M64_SCHEMES) for product in PRODUCTS]
    return _chain_rows([*((product, 16, M16_SCHEMES) for product in PRODUCTS), *wide])


QUANT_ROWS: dict[str, Callable[[], list[QuantRow]]] = {
    **{
        f"quant.{name}.{product}.m16": _m16_rows(product)
        for name in SCHEME_OF
        for product in PRODUCTS
    },
    "quant.int8_over_fp8": lambda: _chain_rows((p, 16, M16_SCHEMES) for p in PRODUCTS),
    "quant.fp8_row.m64_over_m16": _growth_rows,
    "quant.int4.m64_over_m16": _growth_rows,
    "quant.int4.large_m": _int4_rows,
    "quant.fp8_row.m4096_over_cublas": _fused_rows,
    "quant.fp8_block.m4096_tflops": _block_rows,
    TABLE: _table_rows,
}
"""Goal id -> every layer that its rows launch, in the order of measuring."""
