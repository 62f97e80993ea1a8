"""The sampling kernels: the tokens of the operation's own definition, and sorted top-k."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from cuda_call_cases import on_cpu, results_in_poisoned_memory
from cuda_cases import PROVIDER, captured
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES
from fusedops.jit.launch import cuda_module, device_arch
from fusedops.ladders.occupancy import clusters_at_once, registers
from fusedops.ops.sampling import greedy, sample
from fusedops.providers import cuda_sampling
from fusedops.providers.base import Usage, use_provider
from fusedops.providers.cuda_sampling import top_k

COVERS = (
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ladders/occupancy.py",
    "fusedops/ops/op.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_call_cases.py",
    "csrc/sampling.cu",
    "csrc/reduce.cu",
    "fusedops/ops/sampling.py",
)

pytestmark = pytest.mark.gpu

VOCABULARIES = (1, 5, 1000, 8191, 8192, 32_000, 128_256, 262_144)


@pytest.fixture(autouse=True)
def usage() -> Iterator[Usage]:
    with use_provider(PROVIDER) as found:
        yield found
    assert sum(found.calls.values()) > 0
    assert {provider for _, provider in found.calls} == {PROVIDER}


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator, device="cuda") * 2).to(dtype)


def repeated(values: list[float], rows: int, dtype: torch.dtype) -> Tensor:
    """The values again and again, one a row."""
    every = (values * rows)[:rows]
    return torch.tensor(every, dtype=dtype, device="cuda")


def assert_same_tokens(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    ks: Tensor | None = None,
    ps: Tensor | None = None,
) -> None:
    """Equal to the definition; where the weights meet p to 1e-5, to that of a p as much away."""
    got = sample(logits, temperature, seed, top_k=ks, top_p=ps)
    call = cuda_sampling.SAMPLE.call
    (again,) = results_in_poisoned_memory(call, (logits, temperature, seed, ks, ps))
    assert torch.equal(again, got)
    right = on_cpu(sample, logits, temperature, seed, top_k=ks, top_p=ps)
    differs = got.cpu() != right
    if ps is not None:
        for factor in (1 - 1e-5, 1 + 1e-5):
            near = on_cpu(
                sample, logits, temperature, seed, top_k=ks, top_p=(ps * factor).clamp(max=1.0)
            )
            differs &= got.cpu() != near
    assert not differs.any(), (tuple(logits.shape), differs.nonzero().flatten().tolist())


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_equal_the_definition(vocabulary: int, dtype: torch.dtype) -> None:
    rows = 6
    logits = drawn(rows, vocabulary + 3, dtype)[:, 1 : vocabulary + 1]
    temperature = repeated([1.0, 0.7, 0.0, 1.9], rows, torch.float32)
    seed = torch.arange(5, 5 + rows, device="cuda")
    few = repeated([50, 1, 3, 0, 700, 20], rows, torch.int32)
    many = repeated([3000, 9000, 0, vocabulary, 100, 2500], rows, torch.int32)
    ps = repeated([0.9, 0.5, 0.3, 0.99, 1e-6, 1.0], rows, torch.float32)
    for ks in (None, few, many):
        for cut in (None, ps):
            assert_same_tokens(logits, temperature, seed, ks, cut)
    assert_same_tokens(logits.contiguous(), temperature, seed[:1], few, ps)
    assert_same_tokens(logits.t().contiguous().t(), temperature, seed[:1].expand(rows), few, None)


@pytest.mark.parametrize("vocabulary", [1000, 20_011, 128_256])
def test_ties_go_to_the_lower_index(vocabulary: int) -> None:
    logits = torch.zeros(4, vocabulary, device="cuda")
    logits[1] = torch.arange(vocabulary, device="cuda") % 7
    logits[2, ::3] = 1.0
    temperature = torch.ones(4, device="cuda")
    ps = repeated([0.5, 0.6, 0.7, 0.9], 4, torch.float32)
    for ks in (None, repeated([5, 3000, 9000, 2100], 4, torch.int32)):
        for cut in (None, ps):
            for first in (0, 100):
                seed = torch.arange(first, first + 4, device="cuda")
                assert_same_tokens(logits, temperature, seed, ks, cut)


def test_rows_without_a_distribution_take_the_greedy_token() -> None:
    for vocabulary in (100, 128_256):
        logits = drawn(5, vocabulary)
        logits[0, 7], logits[1, 3], logits[1, 9] = math.nan, math.inf, math.inf
        logits[2] = -math.inf
        ones = torch.ones(5, device="cuda")
        heat = torch.tensor([1.0, 1.0, 1.0, -1.0, math.nan], device="cuda")
        seed = torch.arange(5, device="cuda")
        for ks in (None, repeated([5], 5, torch.int32)):
            got = sample(logits, heat, seed, top_k=ks)
            assert torch.equal(got.cpu(), on_cpu(greedy, logits))
        masked = logits.clone()
        masked[3:, ::2] = -math.inf
        assert_same_tokens(masked, ones, seed, repeated([0, 5, 9, 0, 99], 5, torch.int32), None)
        cold = torch.full((5,), 1e-30, device="cuda")
        assert_same_tokens(masked, cold, seed, None, repeated([0.9], 5, torch.float32))


def test_a_token_depends_on_its_own_row_only() -> None:
    logits = drawn(64, 128_256)
    ones, seed = torch.ones(64, device="cuda"), torch.arange(64, device="cuda")
    ks = repeated([50], 64, torch.int32)
    together = sample(logits, ones, seed, top_k=ks)
    for row in (0, 17, 63):
        one = slice(row, row + 1)
        alone = sample(logits[one], ones[one], seed[one], top_k=ks[one])
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_greedy_is_the_first_largest(dtype: torch.dtype) -> None:
    for vocabulary in VOCABULARIES:
        logits = drawn(7, vocabulary, dtype)
        logits[1] = 1.0
        assert torch.equal(greedy(logits).cpu(), on_cpu(greedy, logits))
        view = drawn(7, vocabulary + 5, dtype)[:, 3:-2]
        assert torch.equal(greedy(view).cpu(), on_cpu(greedy, view))
    assert greedy(drawn(0, 9, dtype)).shape == (0,)


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_k_largest_are_sorted_with_ties_by_index(vocabulary: int, dtype: torch.dtype) -> None:
    x = drawn(4, vocabulary + 1, dtype)[:, 1:]
    special = x.clone()
    special[0, vocabulary // 2], special[1, 0] = math.nan, math.inf
    special[2], special[3, : vocabulary // 2] = -math.inf, math.nan
    ties = (torch.arange(4 * vocabulary, device="cuda") % 5).view(4, vocabulary).to(dtype)
    for case in (x, x * 1e-6, x * 1e4, special, ties, torch.zeros_like(x), x.t().contiguous().t()):
        ranked = case.cpu().float().sort(dim=-1, descending=True, stable=True)
        for k in (1, 4, 50, 1000, 1024):
            if k > vocabulary:
                continue
            values, indices = top_k(case, k)
            assert torch.equal(indices.cpu(), ranked.indices[:, :k])
            picked = case.gather(1, indices)
            assert torch.equal(values.nan_to_num(3.0), picked.nan_to_num(3.0))
            again = results_in_poisoned_memory(cuda_sampling._TOP_K, (case,), k)
            assert torch.equal(again[1], indices)


def test_captured_calls_replay_with_other_seeds() -> None:
    logits = drawn(8, 128_256)
    ones, seed = torch.ones(8, device="cuda"), torch.arange(8, device="cuda")
    ks, ps = repeated([40, 0], 8, torch.int32), repeated([0.9], 8, torch.float32)
    graph, token = captured(lambda: sample(logits * 1.0, ones, seed, top_k=ks, top_p=ps))
    for step in range(4):
        seed.add_(1000)
        logits.copy_(drawn(8, 128_256, seed=step))
        graph.replay()
        assert torch.equal(token, sample(logits, ones, seed, top_k=ks, top_p=ps))


def test_tokens_are_the_same_in_every_run() -> None:
    logits = drawn(64, 128_256, torch.bfloat16)
    ones, seed = torch.ones(64, device="cuda"), torch.arange(64, device="cuda")
    ks, ps = repeated([0, 50, 5000], 64, torch.int32), repeated([0.9, 1.0], 64, torch.float32)
    first = sample(logits, ones, seed, top_k=ks, top_p=ps)
    for _ in range(20):
        assert torch.equal(sample(logits, ones, seed, top_k=ks, top_p=ps), first)


def test_it_works_under_torch_compile() -> None:
    logits = drawn(4, 1000)
    ones, seed = torch.ones(4, device="cuda"), torch.arange(4, device="cuda")
    compiled = torch.compile(lambda x: sample(x * 1.0, ones, seed) + 1, fullgraph=True)
    assert torch.equal(compiled(logits), sample(logits, ones, seed) + 1)


@pytest.mark.parametrize("rows", [15, 30, 66])
def test_all_clusters_run_at_once(rows: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    logits = drawn(rows, 8192, torch.bfloat16)
    arguments = (logits, torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda"))
    assert sample(*arguments).shape == (rows,)
    entry, _ = cuda_sampling.SAMPLE.call.prepared((*arguments, None, None), ())
    (launch,) = entry.plan.launches
    module = cuda_module(launch.program, device_arch(device.index))
    kernel = module.kernel(launch.kernel, launch.parameters)
    assert registers(kernel, device) * launch.threads * (1024 // launch.threads) <= 65536
    if launch.cluster > 1:
        found = clusters_at_once(
            kernel, device, launch.threads, launch.shared_bytes, launch.cluster
        )
        assert found * launch.cluster >= launch.blocks[0], (launch.kernel, found)


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    rows = 2**31 // 128_256 + 9
    logits = torch.zeros(rows, 128_256, dtype=torch.bfloat16, device="cuda")
    logits[-1, 77] = 5.0
    logits[-1, 128_255] = 4.0
    values, indices = top_k(logits, 3)
    assert indices[-1].tolist() == [77, 128_255, 0]
    assert indices[:-1].eq(torch.arange(3, device="cuda")).all()
    assert greedy(logits)[-1].item() == 77
    cold = torch.full((rows,), 0.01, device="cuda")
    token = sample(logits, cold, torch.zeros(1, dtype=torch.int64, device="cuda"))
    assert token[-1].item() == 77
    assert values[-1].tolist() == [5.0, 4.0, 0.0]
