"""Which layers each GEMM goal measures: plain data, so that their kernels can be compiled ahead.

The rows of a set come M by M over all models and products, the M that matter most first. A run that
is cut off then leaves whole columns over all shapes instead of one model's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fusedops.bench.products import MODELS, PRODUCTS, Layer
from fusedops.check import require_choice
from fusedops.config import DECODE_BUCKETS

__all__ = [
    "GOAL_ROWS",
    "LARGE_LAYERS",
    "LARGE_M",
    "MID_M",
    "SMALL_M",
    "Row",
    "model_layers",
    "set_rows",
]

SMALL_M = (16, 1, 64, 4, 32, 48)
"""M of the small set in the order of measuring; 48 fills no bucket of the decode kernels."""

MID_M = (128, 512, 96, 256)

LARGE_M = (4096, 1024, 8192, 2048)

QUACK_SMALL_M = (16, 64, 1, 32, 8)
QUACK_LARGE_M = (128, 4096, 512, 96, 1024, 256)
QUACK_MODEL = "llama3-8b"

LARGE_LAYERS: dict[str, Callable[[int], Layer]] = {
    "swiglu": lambda m: Layer(m, 28672, 4096, activation="silu", gated=True),
    "bias_gelu": lambda m: Layer(m, 14336, 4096, bias=True, activation="gelu"),
    "bias_silu_residual": lambda m: Layer(
        m, 4096, 14336, bias=True, activation="silu", residual=True
    ),
}
"""The fusions that large products must not pay for, by name, at M rows."""

_PREFILL_M = (192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


@dataclass(frozen=True)
class Row:
    """One row of a goal.

    Attributes:
        key: under which it is recorded; sizes are in it, so that changed sizes are a new row.
        layer: what is measured.
    """

    key: str
    layer: Layer


def set_rows(
    sizes_m: Iterable[int],
    models: Iterable[str] = tuple(MODELS),
    products: Iterable[str] = PRODUCTS,
) -> list[Row]:
    """Every product of every model at every M, M by M."""
    models, products = tuple(models), tuple(products)
    rows = []
    for m in sizes_m:
        for model in models:
            for product in products:
                layer = MODELS[model].layer(product, m)
                rows.append(Row(f"{model} {product} n{layer.N} k{layer.K} m{m}", layer))
    return rows


def model_layers(model: str) -> list[Layer]:
    """Layers that take every GEMM kernel of a model: decode up to M = 128, prefill up to 8192.

    The head multiplies the last position of each sequence only, so it appears in decode alone.

    Raises:
        ConfigError: an unknown model.
    """
    require_choice("model_layers", "model", model, tuple(MODELS))
    shape = MODELS[model]
    found = [shape.layer(product, m) for product in PRODUCTS for m in DECODE_BUCKETS]
    found += [shape.layer(product, m) for product in PRODUCTS[:-1] for m in _PREFILL_M]
    return found


def _large_rows() -> list[Row]:
    return [
        Row(f"{name} n{layer.N} k{layer.K} m{m}", layer)
        for m in LARGE_M
        for name, make in LARGE_LAYERS.items()
        for layer in [make(m)]
    ]


def _step_rows() -> list[Row]:
    return set_rows([1], [QUACK_MODEL])


def _small_rows() -> list[Row]:
    return set_rows(SMALL_M)


GOAL_ROWS: dict[str, Callable[[], list[Row]]] = {
    "gemm.chain129.m1": _step_rows,
    "gemm.small_m.geomean": _small_rows,
    "gemm.small_m.worst": _small_rows,
    "gemm.mid_m.geomean": lambda: set_rows(MID_M),
    "gemm.large_m.fused_over_bare": _large_rows,
    "gemm.8192_over_cublas": lambda: [Row("8192^3", Layer(8192, 8192, 8192))],
    "gemm.quack.small_m": lambda: set_rows(QUACK_SMALL_M, [QUACK_MODEL]),
    "gemm.quack.large_m": lambda: set_rows(QUACK_LARGE_M, [QUACK_MODEL], PRODUCTS[:-1]),
    "gemm.warm_first_call_s": lambda: set_rows([16], ["llama3-8b"], ["o_residual"]),
    "gemm.cold_model_compile_s": lambda: [
        Row(f"{layer.chain_text} n{layer.N} k{layer.K} m{layer.M}", layer)
        for layer in model_layers("llama3-8b")
    ],
}
"""Goal id -> its rows, in the order of measuring."""
