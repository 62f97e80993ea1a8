"""The embedding kernels: the rows of the table, bit for bit, and the sums of their squares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_call_cases import results_in_poisoned_memory
from cuda_cases import assert_same_bits, captured
from cuda_row_cases import assert_near, only_our_kernels, run_twice
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES
from fusedops.ops.embedding import embedding, embedding_sumsq
from fusedops.providers import cuda_embedding
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
    "tests/gpu/cuda_call_cases.py",
    "tests/gpu/cuda_row_cases.py",
    "csrc/embedding.cu",
    "fusedops/ops/embedding.py",
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with only_our_kernels():
        yield


def table(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_rows_are_those_of_the_table(dtype: torch.dtype, index: torch.dtype) -> None:
    for columns in (1, 3, 8, 100, 1024, 4096, 5000, 16_384):
        wide = table(50, columns + 1, dtype)
        ids = torch.randint(0, 50, (6, 8, 3), device="cuda").to(index)
        weights = [wide[:, :columns], wide[:, 1:], wide[:, :columns].contiguous()]
        weights.append(wide.t().contiguous().t()[:, :columns])
        weights.append(wide[::3, :columns])
        for weight in weights:
            for some in (ids, ids[:, ::2], ids.permute(2, 0, 1), ids[0, 0, 0], ids[:0]):
                some = some % weight.shape[0]
                got = embedding(some, weight)
                assert_same_bits(got, weight[some.long()].contiguous())
                if some.numel():
                    call = cuda_embedding.EMBEDDING.call
                    (again,) = results_in_poisoned_memory(call, (some, weight))
                    assert_same_bits(again, got)


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_sums_of_squares_of_integers_are_exact(dtype: torch.dtype) -> None:
    for columns in (1, 3, 100, 576, 4096, 5000, 16_384, 65_536):
        wide = torch.randint(-8, 9, (50, columns + 1), device="cuda").to(dtype)
        weights = [
            (wide[:, :columns].contiguous(), torch.int64),
            (wide[:, 1:], torch.int32),
            (wide.t().contiguous().t()[:, :columns], torch.int64),
            (wide[::3, :columns], torch.int32),
        ]
        ids = torch.randint(0, 50, (6, 8, 3), device="cuda")
        for weight, index in weights:
            for some in (ids, ids.permute(2, 0, 1)[:, ::2], ids[0, 0, 0], ids[0, 0], ids[:0]):
                chosen = (some % weight.shape[0]).to(index)
                rows, sumsq = run_twice("embedding_sumsq", chosen, weight)
                expected = weight[chosen.long()].contiguous()
                assert_same_bits(rows, expected)
                squares = expected.double().square().sum(-1).view(1, -1)
                assert_same_bits(sumsq, squares.float())


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
def test_sums_of_squares_are_within_their_bound_and_torchs_error(dtype: torch.dtype) -> None:
    for columns, tokens in ((576, 7), (4096, 1), (4096, 500), (8192, 64), (16_384, 3)):
        weight = table(100, columns, dtype)
        ids = torch.randint(0, 100, (tokens,), device="cuda")
        rows, sumsq = run_twice("embedding_sumsq", ids, weight)
        assert_same_bits(rows, weight[ids])
        exact = weight[ids].double().square().sum(1)[None]
        with use_provider("torch"):
            peer = embedding_sumsq(ids, weight)[1]
        # Chains of additions: a pack, the packs of a thread, a warp, the warps, a cluster.
        bound = (8 + 8 + 5 + 5 + 8) * 2.0**-24 * exact
        assert_near(sumsq, exact, bound, peer, (columns, tokens), 2.0**-23 * exact)


def test_an_id_outside_gives_zeros_and_reads_nothing() -> None:
    for columns in (7, 4096):
        weight = table(9, columns, torch.bfloat16)
        ids = torch.tensor([-1, 9, 4, 2**40, -(2**62)], device="cuda")
        got = embedding(ids, weight)
        assert got[[0, 1, 3, 4]].eq(0).all()
        assert torch.equal(got[2], weight[4])
        rows, sumsq = embedding_sumsq(ids, weight)
        assert torch.equal(rows, got)
        assert sumsq[0].ne(0).tolist() == [False, False, True, False, False]


def test_a_table_without_columns_gives_sums_of_zero() -> None:
    rows, sumsq = embedding_sumsq(torch.arange(5, device="cuda"), table(9, 0, torch.bfloat16))
    assert rows.shape == (5, 0)
    assert_same_bits(sumsq, torch.zeros(1, 5, device="cuda"))


def test_captured_calls_replay_and_dependent_ones_wait() -> None:
    weight = table(1000, 4096, torch.bfloat16)
    ids = torch.randint(0, 1000, (64,), device="cuda")
    graph, result = captured(lambda: embedding(ids * 1, weight))
    for _ in range(3):
        ids.random_(0, 1000)
        graph.replay()
        assert torch.equal(result, weight[ids])
    graph, (rows, sumsq) = captured(lambda: embedding_sumsq(ids * 1, weight))
    of_row = embedding_sumsq(torch.arange(1000, device="cuda"), weight)[1][0]
    for _ in range(3):
        ids.random_(0, 1000)
        graph.replay()
        assert torch.equal(rows, weight[ids])
        torch.testing.assert_close(sumsq[0], of_row[ids], rtol=1e-6, atol=0.0)


def test_it_works_under_torch_compile() -> None:
    weight = table(100, 256, torch.bfloat16)
    ids = torch.randint(0, 100, (7,), device="cuda")
    compiled = torch.compile(lambda i: embedding(i, weight) * 2, fullgraph=True)
    assert torch.equal(compiled(ids), weight[ids] * 2)
    compiled = torch.compile(lambda i: embedding_sumsq(i, weight)[1] * 2, fullgraph=True)
    assert torch.equal(compiled(ids), embedding_sumsq(ids, weight)[1] * 2)


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    weight = torch.zeros(2**19 + 8, 4096, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 3.0
    ids = torch.full((2**19 + 5,), weight.shape[0] - 1, device="cuda")
    ids[7] = 0
    got = embedding(ids, weight)
    assert got.numel() > 2**31
    assert got[-1].eq(3).all()
    assert got[7].eq(0).all()
    assert got.amin(1).eq(0).sum() == 1
    del got
    rows, sumsq = embedding_sumsq(ids, weight)
    assert rows[-1].eq(3).all()
    assert rows[7].eq(0).all()
    assert sumsq.shape == (1, ids.numel())
    assert sumsq.eq(9 * 4096).sum() == ids.numel() - 1
    assert sumsq[0, 7] == 0
