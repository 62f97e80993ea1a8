"""Embedding lookup on the CPU, with and without the rows' statistics, and the guarded form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.errors import DeviceError, DTypeError, PositionError, ShapeError, UnsupportedError
from fusedops.ops.embedding import _guarded, embedding, embedding_sumsq
from fusedops.prologue import RmsNormPrologue

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
op = torch.ops.fusedops.embedding.default


def table(rows: int = 11, width: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    """Row i holds i * width .. i * width + width - 1, so every element names itself."""
    return torch.arange(rows * width).view(rows, width).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (), (80,)])
def test_rows_by_id(dtype: torch.dtype, index: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    ids = (torch.arange(count) * 7 % 11).view(shape).to(index)
    weight = table(dtype=dtype)
    rows = embedding(ids, weight)
    assert rows.dtype == dtype
    assert rows.shape == (*shape, 6)
    assert rows.is_contiguous()
    for found, wanted in zip(rows.reshape(-1, 6), ids.flatten().tolist(), strict=True):
        assert found.tolist() == weight[wanted].tolist()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_b04_no_ids_give_an_empty_result(shape: tuple[int, ...]) -> None:
    rows = embedding(torch.empty(shape, dtype=torch.int64), table())
    assert rows.shape == (*shape, 6)


def test_b10_b12_strided_tables_and_ids() -> None:
    wide = table(11, 16)
    ids = torch.tensor([[3, 0], [10, 3]])
    for weight in (wide[:, 3:9], wide[:, ::2], table(6, 11).t()):
        rows = embedding(ids.t(), weight)
        assert rows.is_contiguous()
        assert torch.equal(rows, weight.contiguous()[ids.t()])


@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
@pytest.mark.parametrize("count", [1, 100])
def test_an_id_outside_the_table_is_refused(bad: int, count: int) -> None:
    ids = torch.zeros(count, dtype=torch.int32)
    ids[-1] = bad
    with pytest.raises(PositionError, match=rf"token_ids holds {bad}; accepted are 0 to 10"):
        embedding(ids, table())
    with pytest.raises(IndexError):
        embedding(ids.long(), table())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_guarded_form_gives_zeros_for_an_id_outside(index: torch.dtype) -> None:
    weight = table()
    weight[0] = torch.nan
    ids = torch.tensor([10, -1, 11, 4, 2**31 - 1, -(2**31)], dtype=index)
    expected = torch.zeros(6, 6)
    expected[0], expected[3] = weight[10], weight[4]
    assert torch.equal(_guarded(ids, weight), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (), (0,), (3, 0)])
def test_the_sums_of_squares_are_those_of_the_rows(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(11, 300, generator=generator).to(dtype)
    ids = torch.randint(0, 11, shape, generator=generator)
    rows, sumsq = embedding_sumsq(ids, weight)
    assert torch.equal(rows, embedding(ids, weight))
    assert rows.is_contiguous()
    assert sumsq.dtype == torch.float32
    assert sumsq.shape == (1, ids.numel())
    assert sumsq.is_contiguous()
    exact = torch.tensor(
        [sum(x * x for x in row) for row in rows.double().view(-1, 300).tolist()],
        dtype=torch.float64,
    )
    assert ((sumsq[0] - exact).abs() <= 1e-6 * exact).all()


def test_sums_of_squares_of_strided_tables_and_of_rows_of_no_or_odd_values() -> None:
    ids = torch.tensor([[3, 0], [10, 3]]).t()
    for weight in (table(11, 16)[:, 3:9], table(11, 16)[:, ::2], table(6, 11).t()):
        rows, sumsq = embedding_sumsq(ids, weight)
        assert torch.equal(sumsq[0], rows.square().sum(-1).flatten())
    assert torch.equal(embedding_sumsq(ids, table(11, 0))[1], torch.zeros(1, 4))
    odd = torch.tensor([[torch.nan, 1.0], [-torch.inf, 1.0], [3e38, 1.0]])
    sums = embedding_sumsq(torch.arange(3), odd)[1][0]
    assert sums.isnan().tolist() == [True, False, False]
    assert sums.isposinf().tolist() == [False, True, True]


@pytest.mark.parametrize("order", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
def test_the_first_layers_norm_takes_the_sums(
    order: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(2)
    table, w = (torch.randn(n, 64, generator=generator).to(dtype) for n in (11, 32))
    weight = (1 + 0.1 * torch.randn(64, generator=generator)).to(dtype)
    ids = torch.randint(0, 11, shape, generator=generator)
    x, sumsq = embedding_sumsq(ids, table)
    offset = 1.0 if order == "gemma" else 0.0
    prologue = RmsNormPrologue(0.0, order, offset)
    given = {"norm_weight": weight, "norm_sumsq": sumsq}
    normed = fusedops.rms_norm(
        x, weight, 0.0, weight_offset=offset, round_before_weight=order == "llama"
    )
    expected = fusedops.gemm(normed, w)
    # The sums' last bits may differ, and with them a few of the normalised values'.
    eps = torch.finfo(dtype).eps
    got = fusedops.gemm(x, w, operands=given, prologue=prologue)
    torch.testing.assert_close(got, expected, rtol=2 * eps, atol=16 * eps + 1e-5)
    # It is the sums that count: four times as large, they halve the rows.
    given["norm_sumsq"] = 4 * sumsq
    if order == "llama":
        halved = fusedops.gemm(x, w, operands=given, prologue=prologue)
        torch.testing.assert_close(halved, expected / 2, rtol=2 * eps, atol=16 * eps + 1e-5)


def test_bad_arguments_are_refused() -> None:
    ids = torch.tensor([1])
    with pytest.raises(DTypeError, match="token_ids"):
        embedding(ids.float(), table())
    with pytest.raises(DTypeError, match="token_ids"):
        embedding(ids.to(torch.int16), table())
    with pytest.raises(DTypeError, match="weight"):
        embedding(ids, table().double())
    with pytest.raises(ShapeError, match="exactly 2"):
        embedding(ids, table()[0])
    with pytest.raises(ShapeError, match="at least one row"):
        embedding(ids, torch.empty(0, 6))
    with pytest.raises(DeviceError, match="token_ids is on meta"):
        embedding(ids.to("meta"), table())
    with pytest.raises(UnsupportedError, match="inference only"):
        embedding(ids, table().requires_grad_())
    with pytest.raises(DTypeError, match="embedding_sumsq: token_ids"):
        embedding_sumsq(ids.float(), table())
    with pytest.raises(ShapeError, match=r"embedding_sumsq: weight .* at least one row"):
        embedding_sumsq(ids, torch.empty(0, 6))
    with pytest.raises(PositionError, match="embedding_sumsq: token_ids holds 11"):
        embedding_sumsq(ids + 10, table())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_b37_opcheck(index: torch.dtype) -> None:
    for each in (op, torch.ops.fusedops.embedding_sumsq.default):
        torch.library.opcheck(each, (torch.tensor([[1, 2, 10]], dtype=index), table()))


def test_b37_compiled_consumers_agree_with_eager_at_any_m() -> None:
    weight = table()

    def consumer(ids: Tensor) -> Tensor:
        return embedding(ids, weight) + ids[:, None]

    compiled = torch.compile(consumer, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (3, 5, 8):
        ids = torch.arange(count)
        assert torch.equal(compiled(ids), consumer(ids))
