"""Weights of 4 and 8 bits through ``fusedops.gemm`` and ``QuantLinear`` on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from differences import differences
from torch import Tensor

import fusedops
from fusedops.nn import QuantLinear, RMSNorm
from fusedops.quant import QuantizedWeight, quantize_weight, scheme
from fusedops.weight import GroupedFormat

COVERS = (
    "fusedops/gemm.py",
    "fusedops/weight/*.py",
    "fusedops/cutlass/*.py",
    "fusedops/config/*.py",
    "fusedops/providers/*.py",
    "fusedops/nn/quant_*.py",
)
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SCHEMES = [
    ("int4", {}),
    ("int4", {"group": 32, "zero_points": True}),
    ("int4", {"group": 0}),
    ("int8-wo", {}),
    ("int8-wo", {"group": 64}),
    ("fp8-wo", {}),
    ("fp8-wo", {"group": 128}),
]

pytestmark = pytest.mark.gpu


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def quantized(name: str, options: dict[str, Any], n: int, k: int) -> QuantizedWeight:
    return quantize_weight(normal(n, k, seed=1) / k**0.5, scheme(name, **options))


def product(x: Tensor, stored: QuantizedWeight, provider: str, **options: Any) -> Tensor:
    with fusedops.use_provider(provider) as usage:
        y = fusedops.gemm(x, stored.weight, None, stored.scales, weight=stored.format, **options)
    assert usage.count("gemm", provider) == 1
    return y


@pytest.mark.parametrize(("name", "options"), SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_equal_the_reference(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    rows = quantized(name, options, 584, 264)
    packed = rows.in_layout("wgmma16")
    for m in (1, 13, 128):
        x = normal(m, 264).to(dtype)
        got = product(x, packed, "cutlass").double()
        wanted = product(x, rows, "reference", out_dtype=torch.float32).double()
        bound = 2.0**-8 * wanted.abs() + 1e-4
        message = f"M={m}: {differences(got, wanted, bound)}"
        assert ((got - wanted).abs() <= bound).all(), message


@pytest.mark.parametrize("options", [{}, {"group": 64, "zero_points": True}], ids=str)
def test_products_beside_e4m3_activations_equal_the_reference(options: dict[str, Any]) -> None:
    rows = quantized("w4a8", options, 592, 528)
    x = normal(16, 528).to(E4M3)
    got = product(x, rows.in_layout("wgmma8"), "cutlass", out_dtype=torch.float32).double()
    weight = rows.dequantize().double()
    wanted = x.double() @ weight.t()
    # The tensor cores keep 14 bits of sums of e4m3 products.
    bound = 2.0**-11 * (x.double().abs() @ weight.abs().t())
    assert ((got - wanted).abs() <= bound).all(), differences(got, wanted, bound)


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    stored = quantized("int4", {}, 1280, 2048).in_layout("wgmma16")
    x = normal(128, 2048).to(BF16)
    whole = product(x, stored, "cutlass", batch_invariant=True)
    for m in (1, 8, 17, 33, 64, 100):
        assert torch.equal(product(x[:m], stored, "cutlass", batch_invariant=True), whole[:m])


def test_a_scale_that_the_kernel_before_wrote_is_read_whole() -> None:
    """Scales of groups are loaded ahead of the kernel before: it must have ended."""
    stored = quantized("int4", {}, 2048, 2048).in_layout("wgmma16")
    x = normal(16, 2048).to(BF16)
    wanted = product(x, stored, "cutlass")
    source = stored.scales["w_scale"].t().contiguous()
    for _ in range(20):
        scale = fusedops.transpose(source)
        own = replace(stored, scales={"w_scale": scale})
        assert torch.equal(product(x, own, "cutlass"), wanted)


@pytest.mark.parametrize("name", ["int4", "w4a8", "int8-wo", "fp8-wo"])
def test_a_layer_moved_to_the_gpu_is_laid_out_for_the_kernel(name: str) -> None:
    layer = QuantLinear.from_weights(normal(512, 512).cpu(), None, name)
    x = normal(5, 512).to(BF16)
    norm = RMSNorm(512).to(BF16)
    wanted = layer(x.cpu(), norm=norm).double()
    layer.cuda()
    assert isinstance(layer.format, GroupedFormat)
    assert layer.format.layout == ("wgmma8" if name == "w4a8" else "wgmma16")
    with fusedops.use_provider("cutlass", strict=False) as usage:
        got = layer(x, norm=norm.cuda()).double().cpu()
    assert usage.count("gemm", "cutlass") == 1
    bound = 2.0**-6 * (1 + wanted.abs())
    assert ((got - wanted).abs() <= bound).all(), differences(got, wanted, bound)
    layer.cpu()
    assert layer.format.layout == "rows"


def test_a_captured_layer_replays_on_new_inputs() -> None:
    layer = QuantLinear.from_weights(normal(512, 512), None, "int4")
    x = normal(4, 512).to(BF16)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for seed in range(1, 4):
        x.copy_(normal(4, 512, seed=seed))
        graph.replay()
        assert torch.equal(y, layer(x))
