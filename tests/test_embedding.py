"""Embedding lookup on the CPU, and the form that guards itself where ids cannot be looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops.errors import DeviceError, DTypeError, PositionError, ShapeError, UnsupportedError
from fusedops.ops.embedding import _guarded, embedding

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


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_b37_opcheck(index: torch.dtype) -> None:
    torch.library.opcheck(op, (torch.tensor([[1, 2, 10]], dtype=index), table()))


def test_b37_compiled_consumers_agree_with_eager_at_any_m() -> None:
    weight = table()

    def consumer(ids: Tensor) -> Tensor:
        return embedding(ids, weight) + ids[:, None]

    compiled = torch.compile(consumer, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (3, 5, 8):
        ids = torch.arange(count)
        assert torch.equal(compiled(ids), consumer(ids))
