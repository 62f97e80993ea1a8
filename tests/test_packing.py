"""Row packing: exact inverses, and pairs where a wgmma accumulator's thread finds them."""

from __future__ import annotations

import pytest
import torch

from fusedops.errors import ShapeError
from fusedops.packing import (
    ROPE_HEAD_DIMS,
    pack_gate_up,
    pack_rope,
    rope_permutation,
    unpack_gate_up,
    unpack_rope,
)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 40, 1536])
@pytest.mark.parametrize("columns", [None, 3])
def test_gate_up_round_trip(rows: int, columns: int | None) -> None:
    shape = (rows,) if columns is None else (rows, columns)
    gate, up = torch.randn(shape), torch.randn(shape)
    packed = pack_gate_up(gate, up)
    assert packed.shape[0] == 2 * (-(-rows // 8) * 8)
    again = unpack_gate_up(packed, rows)
    assert torch.equal(again[0], gate)
    assert torch.equal(again[1], up)


def test_gate_and_up_sit_eight_rows_apart() -> None:
    gate, up = torch.arange(32.0), torch.arange(32.0) + 100
    packed = pack_gate_up(gate, up)
    for row in range(64):
        if packed[row] < 100:
            assert packed[row + 8] == packed[row] + 100


def test_padding_rows_are_zero() -> None:
    packed = pack_gate_up(torch.ones(3, 2), torch.ones(3, 2))
    assert packed.sum() == 12
    assert torch.equal(packed[3:8], torch.zeros(5, 2))


@pytest.mark.parametrize("head_dim", ROPE_HEAD_DIMS)
def test_rope_round_trip_and_partners(head_dim: int) -> None:
    weight = torch.randn(3 * head_dim, 5)
    packed = pack_rope(weight, head_dim)
    assert torch.equal(unpack_rope(packed, head_dim), weight)
    order = rope_permutation(head_dim).tolist()
    assert sorted(order) == list(range(head_dim))
    for position, row in enumerate(order):
        if row < head_dim // 2:
            assert order[position + 8] == row + head_dim // 2
    bias = torch.randn(3 * head_dim)
    assert torch.equal(pack_rope(bias, head_dim), pack_rope(bias[:, None], head_dim)[:, 0])


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="must have one shape"):
        pack_gate_up(torch.ones(3), torch.ones(4))
    with pytest.raises(ShapeError, match="expected 16"):
        unpack_gate_up(torch.ones(20), 8)
    with pytest.raises(ShapeError, match=r"accepted are \(64, 96, 128, 256\)"):
        pack_rope(torch.ones(80, 2), 80)
    with pytest.raises(ShapeError, match="no multiple"):
        unpack_rope(torch.ones(100, 2), 64)
