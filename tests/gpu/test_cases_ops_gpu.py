"""Operations in torch on a GPU: inputs of public bug reports that the other files leave open.

Each call pins the provider ``torch``, as in the tests of these operations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import oracles
import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.errors import DTypeError, LayoutError, ShapeError
from fusedops.ops.histogram import histogram
from fusedops.ops.reduce import reduce
from fusedops.providers.base import use_provider

COVERS = (
    "fusedops/check.py",
    "fusedops/epilogue/activations.py",
    "fusedops/ops/*.py",
    "fusedops/providers/base.py",
)
PROVIDER = "torch"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    """Pin the provider in strict mode and require that no other ran."""
    with use_provider(PROVIDER) as usage:
        yield
    assert {provider for _, provider in usage.calls} <= {PROVIDER}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values on the GPU, the same for the same arguments."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to("cuda")


def layer_inputs(rows: int, device: str = "cuda") -> dict[str, Tensor]:
    """q, k, v as views of one tensor, caches, table, positions and lengths of a decode step."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, 8, 16, generator=generator).to(device)
    table = torch.arange(8, dtype=torch.int32).flip(0)[:rows, None]
    return {
        "qkv": qkv,
        "k_cache": torch.zeros(8, 4, 2, 16, device=device),
        "v_cache": torch.zeros(8, 4, 2, 16, device=device),
        "table": table.to(device),
        "positions": (torch.arange(rows, dtype=torch.int32) % 4).to(device),
        "requests": torch.arange(rows, dtype=torch.int32).to(device),
        "cos_sin": fusedops.rope_table(16, 8).to(device),
    }


def layer(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    positions: Tensor,
    requests: Tensor,
    cos_sin: Tensor,
) -> Tensor:
    """RoPE, append, attention and a gated activation of one decode step."""
    q, k, v = qkv.split((4, 2, 2), 1)
    fusedops.rope_append_paged_kv_(q, k, v, positions, cos_sin, k_cache, v_cache, table, requests)
    out = fusedops.paged_attention(q, k_cache, v_cache, table, positions + 1)
    return fusedops.act_and_mul(out.flatten(1))


def test_b22_sums_and_means_of_float16() -> None:
    assert reduce(torch.ones(20000, dtype=torch.float16, device="cuda"), "sum").item() == 20000
    x = torch.randint(-3, 9, (65536,), generator=torch.Generator().manual_seed(22)).half()
    assert reduce(x.cuda(), "mean").item() == x.double().mean().half().item()


def test_b26_both_rounding_orders_agree_with_the_cpu() -> None:
    x = normal(4, 4096, dtype=torch.bfloat16)
    weight = (1 + 0.1 * normal(4096, seed=1)).bfloat16()
    results = []
    for first in (True, False):
        y = fusedops.rms_norm(x, weight, round_before_weight=first)
        with use_provider("reference"):
            expected = fusedops.rms_norm(x.cpu(), weight.cpu(), round_before_weight=first)
        assert oracles.ulps_off(y.cpu(), oracles.floats(expected)) <= 1.0
        results.append(y)
    assert 0.1 < (results[0] != results[1]).float().mean() < 0.4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_b35_tensors_on_the_second_gpu_run_there() -> None:
    here, there = layer_inputs(4), layer_inputs(4, "cuda:1")
    expected = layer(**here)
    with torch.cuda.device(0):
        got = layer(**there)
        normed = fusedops.rms_norm(got, torch.ones(32, device="cuda:1"))
        assert torch.cuda.current_device() == 0
    assert got.device == normed.device == torch.device("cuda:1")
    assert torch.equal(got.cpu(), expected.cpu())
    assert torch.equal(there["k_cache"].cpu(), here["k_cache"].cpu())


COLD_CAPTURE = """
import sys
import torch
import fusedops

x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
call = {
    "rms_norm": lambda: (fusedops.rms_norm(x, weight),),
    "fused_add_rms_norm": lambda: fusedops.fused_add_rms_norm(x, x, weight),
    "layer_norm": lambda: (fusedops.layer_norm(x, weight),),
    "act_and_mul": lambda: (fusedops.act_and_mul(x),),
    "quantize": lambda: fusedops.quantize(x),
    "transpose": lambda: (fusedops.transpose(x),),
    "reduce": lambda: (fusedops.reduce(x, "max", 1),),
    "greedy": lambda: (fusedops.greedy(x),),
}[sys.argv[1]]
with fusedops.use_provider("torch"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for result in results:
        result.view(torch.uint8).fill_(0x7F)
    graph.replay()
    for result, eager in zip(results, call(), strict=True):
        assert torch.equal(result.view(torch.uint8), eager.view(torch.uint8))
print("equal")
"""
COLD_OPERATIONS = (
    "rms_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "act_and_mul",
    "quantize",
    "transpose",
    "reduce",
    "greedy",
)


@pytest.mark.parametrize("name", COLD_OPERATIONS)
def test_b30_the_first_call_of_a_process_is_captured(name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", COLD_CAPTURE, name],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert answer.stdout.split() == ["equal"], answer.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b39_rope_append_and_attention_compile_without_a_break(backend: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for rows in (2, 3, 5):
        ours, eager = layer_inputs(rows), layer_inputs(rows)
        assert torch.equal(compiled(**ours), layer(**eager))
        for name, tensor in ours.items():
            assert torch.equal(tensor, eager[name]), name
        assert ours["k_cache"].any()


def test_b32_rope_append_replays_at_every_position() -> None:
    static, eager = layer_inputs(2), layer_inputs(2)
    layer(**layer_inputs(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(**static)
    for position in range(4):
        fresh = normal(2, 8, 16, seed=position)
        for inputs in (static, eager):
            inputs["qkv"].copy_(fresh)
            inputs["positions"].fill_(position)
        graph.replay()
        assert torch.equal(result, layer(**eager))
        for name in ("k_cache", "v_cache", "qkv"):
            assert torch.equal(static[name], eager[name]), name


def test_b41_weights_and_residuals_of_other_dtypes() -> None:
    for shape in ((4, 256), (2, 3, 256)):
        x, weight = normal(*shape, dtype=torch.bfloat16), 1 + 0.1 * normal(256, seed=1)
        y = fusedops.rms_norm(x, weight, round_before_weight=False)
        assert y.dtype == torch.bfloat16
        exact = oracles.rms_norm(x.cpu(), weight.cpu(), 1e-6)
        assert oracles.ulps_off(y.cpu(), exact) <= 0.51
    half = x.half()
    with pytest.raises(DTypeError, match="weight is bfloat16"):
        fusedops.rms_norm(half, weight.bfloat16())
    with pytest.raises(DTypeError, match="residual is bfloat16"):
        fusedops.fused_add_rms_norm(half, x, weight.half())


def test_b49_more_samples_in_one_bin_than_float32_counts() -> None:
    x = torch.zeros(2**28, dtype=torch.bfloat16, device="cuda")
    x[::100] = 0.6
    few = -(-(2**28) // 100)
    assert histogram(x, 4, range=(0, 1)).tolist() == [2**28 - few, 0, few, 0]


def test_b51_an_extremum_of_nothing_is_refused() -> None:
    for shape, dim in (((3, 0), 1), ((0, 4), 0)):
        with pytest.raises(ShapeError, match=f"over dim {dim} of size 0"):
            reduce(torch.ones(shape, device="cuda"), "max", dim)
    assert reduce(torch.ones(0, 4, device="cuda"), "max", 1).shape == (0,)


def test_b90_the_two_gelus_are_not_swapped() -> None:
    x = torch.tensor([[2.69894, 1.0]], device="cuda")
    results = {act: fusedops.act_and_mul(x, act).item() for act in ACTIVATIONS}
    assert abs(results["gelu"] - results["gelu_tanh"]) == pytest.approx(4.73e-4, abs=2e-6)
    for act, result in results.items():
        assert result == pytest.approx(oracles.act_and_mul(x.cpu(), act).item(), abs=1e-6)


def test_one_tensor_as_both_caches_is_refused() -> None:
    inputs = layer_inputs(2)
    inputs["v_cache"] = inputs["k_cache"]
    with pytest.raises(LayoutError, match="are one tensor"):
        layer(**inputs)
    assert not inputs["k_cache"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    expected = layer(**layer_inputs(4))
    x, weight = normal(4, 64), torch.ones(64, device="cuda")
    normed = fusedops.rms_norm(x, weight)
    with torch.autocast("cuda", dtype=dtype):
        assert torch.equal(layer(**layer_inputs(4)), expected)
        assert torch.equal(fusedops.rms_norm(x, weight), normed)
