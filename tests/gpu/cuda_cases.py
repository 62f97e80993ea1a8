"""What tests of the hand-written kernels share: pinning, poisoned outputs, captures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedops.providers.base import use_provider
from fusedops.providers.cuda_base import CudaOp

PROVIDER = "cuda"
POISON = 0x7F
GUARD_BYTES = 4096

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def pinned(op: str) -> Iterator[None]:
    """Pin the provider in strict mode, and require that it ran and no other did."""
    with use_provider(PROVIDER) as usage:
        yield
    assert usage.count(op, PROVIDER) > 0
    assert {provider for _, provider in usage.calls} == {PROVIDER}


def bits(x: Tensor) -> Tensor:
    """The elements as integers, each NaN of a float as one NaN; contiguous."""
    x = x.contiguous()
    if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return x.view(_INTEGER[x.element_size()])


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bits, the result contiguous."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.is_contiguous()
    assert torch.equal(bits(got), bits(expected))


def into_poisoned_memory(op: CudaOp, x: Tensor, *options: object) -> Tensor:
    """What a call's plan writes into poisoned memory, whose guard bands it must leave alone."""
    options_key = tuple(options)
    op.run(x, *options)  # compiles, loads and plans
    (entry,) = (
        entry
        for key, entry in op._entries.of.items()
        if key == (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, options_key)
    )
    shaped = entry.empty()
    size = shaped.numel() * shaped.element_size()
    whole = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=x.device)
    inside = whole[GUARD_BYTES : GUARD_BYTES + size]
    if entry.launches:
        entry.launch(x.data_ptr(), inside.data_ptr())
    assert (whole[:GUARD_BYTES] == POISON).all()
    assert (whole[GUARD_BYTES + size :] == POISON).all()
    return inside.clone().view(shaped.dtype).view(shaped.shape)


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call that has run before, and the result that its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replayed(call: Callable[[], Tensor], x: Tensor, inputs: list[Tensor]) -> Iterator[Tensor]:
    """Capture a call on ``x`` once; its result after each replay with other contents of ``x``."""
    graph, result = captured(call)
    for values in inputs:
        x.copy_(values)
        graph.replay()
        yield result.clone()
