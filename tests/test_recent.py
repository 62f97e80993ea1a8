"""A weight that one of our kernels has just written is read behind it."""

from __future__ import annotations

import pytest
import torch

from fusedops.providers import recent


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices on which an ordinary kernel was put in between."""
    devices: list[torch.device] = []
    monkeypatch.setattr(recent, "_written", {})
    monkeypatch.setattr(recent, "_ordinary_kernel", devices.append)
    return devices


def test_what_was_written_lately_is_waited_for(settled: list[torch.device]) -> None:
    weight, other = torch.empty(8, 8), torch.empty(8, 8)
    recent.note_written([weight])
    recent.settle(other)
    assert not settled
    recent.settle(weight[3:, 2:])
    assert settled == [weight.device]


def test_parts_of_a_callers_tensor_count_as_all_of_it(settled: list[torch.device]) -> None:
    buffer = torch.empty(16, 8)
    recent.note_written(recent.storages([buffer[8:]]))
    recent.settle(buffer[8:12])
    assert settled


def test_old_results_are_weights_like_others(settled: list[torch.device]) -> None:
    weight = torch.empty(8)
    recent.note_written([weight])
    for _ in range(recent._WINDOW):
        recent.note_written([])
    recent.settle(weight)
    assert not settled


def test_memory_of_the_record_is_bounded_and_what_is_recent_stays(
    settled: list[torch.device],
) -> None:
    weight = torch.empty(8)
    recent.note_written([weight])
    old = recent._launches - 2 * recent._WINDOW
    recent._written.update({-1 - n: old for n in range(recent._ENTRY_LIMIT)})
    recent.note_written([torch.empty(1)])
    assert len(recent._written) == 2
    recent.settle(weight)
    assert settled
