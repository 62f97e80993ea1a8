"""Products with quantized weights for ``sanitize.py``: every scheme, with few and many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from sanitize_cuda import Case

from fusedops.nn import QuantLinear
from fusedops.providers.base import use_provider
from fusedops.quant import SCHEMES

__all__ = ["FAMILIES"]

DEVICE, PROVIDER = "cuda", "cutlass"
N, K = 592, 528
ROWS = (1, 13, 100, 130, 300)
"""The last ones for the kernels of many rows."""

BOUND = 2.0**-6
"""Of the result and of one beside it: sums of e4m3 products keep 14 bits."""


def _product(layer: QuantLinear, on_cpu: QuantLinear, m: int) -> bool:
    """Whether the layer gives what the reference path gives."""
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()
    wanted = on_cpu(x).double()
    with use_provider(PROVIDER, strict=False) as usage:
        got = layer(x.to(DEVICE)).double().cpu()
    is_ours = usage.count("gemm", PROVIDER) == 1
    return is_ours and bool(((got - wanted).abs() <= BOUND * (1 + wanted.abs())).all())


def _layers(scheme: str) -> Iterator[Case]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    layer, on_cpu = (QuantLinear.from_weights(weight, None, scheme) for _ in range(2))
    layer.to(DEVICE)
    for m in ROWS:
        yield f"M={m}", partial(_product, layer, on_cpu, m)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    name: partial(_layers, name) for name in SCHEMES
}
