"""What tests of kernels that keep rows in registers share: poisoned results, views, comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cuda_cases import GUARD_BYTES, POISON, PROVIDER, assert_same_bits, bits
from torch import Tensor

from fusedops.ops.op import OPS
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_sinks import Served

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def only_our_kernels() -> Iterator[None]:
    """Pin the provider in strict mode, and require that it ran and no other did."""
    with use_provider(PROVIDER) as usage:
        yield
    assert usage.calls
    assert {provider for _, provider in usage.calls} == {PROVIDER}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def signs(*shape: int, size: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Plus or minus ``size``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn_bits = torch.randint(0, 2, shape, generator=generator, device="cuda")
    return ((2 * drawn_bits - 1) * size).to(dtype)


def listed(result: Any) -> list[Tensor]:
    """An operation's results as a list."""
    return [result] if isinstance(result, Tensor) else list(result)


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Equal bits of each result; scales of groups may have padding between rows."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(as_codes(one), as_codes(other))


def as_codes(x: Tensor) -> Tensor:
    """The bits, each NaN as one."""
    return bits(x) if x.element_size() > 1 else x.contiguous().view(torch.uint8)


def run_twice(op: str, *args: Any) -> list[Tensor]:
    """A call's results; the second run writes into poisoned memory and must give the same bits."""
    got = listed(getattr(torch.ops.fusedops, op)(*args))
    run = OPS[op]._implementations[PROVIDER][1]
    served: Served = run.__self__  # type: ignore[attr-defined]
    tensors, options = served.split(*args)
    entry, addresses = served.call.prepared(tensors, options)
    device = got[0].device
    memory = []
    for shape, dtype in entry.plan.results:
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
        memory.append((whole, whole[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)))
    entry.launch([*addresses, *(inside.data_ptr() for _, inside in memory)])
    for whole, inside in memory:
        end = GUARD_BYTES + inside.numel() * inside.element_size()
        assert (whole[:GUARD_BYTES] == POISON).all()
        assert (whole[end:] == POISON).all()
    again = listed(served.wrap(tuple(inside for _, inside in memory), options))
    assert_all_same(again, got)
    return got


def row_views(columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows that reach each walk: contiguous, pitched, sliced, misaligned, transposed, batched."""
    wide = drawn(9, columns + 24, dtype=dtype)
    batched = drawn(3, 4, 2 * columns, dtype=dtype)
    return [
        drawn(5, columns, dtype=dtype),
        drawn(300, columns, dtype=dtype),
        wide[:, 8 : columns + 8],
        wide[:, 3 : columns + 3],
        wide[1:, 1 : columns + 1],
        drawn(columns, 6, dtype=dtype).t(),
        drawn(5, 2 * columns, dtype=dtype)[:, ::2],
        batched[:, :, :columns].transpose(0, 1),
        batched[:, 1:, columns:],
        drawn(columns + 1, dtype=dtype)[1:],
    ]


def assert_near(
    got: Tensor, exact: Tensor, bound: Tensor, peer: Tensor, what: object, floor: Tensor
) -> None:
    """Within the bound of the float64 value, and in norm at most twice as far off as the peer.

    ``floor`` is the error that a peer counts with at least, where it happens to be exact.
    """
    error = (got.double() - exact).abs()
    assert error.le(bound).all(), (what, (error / bound).max().item())
    assert error.norm() <= 2 * max((peer.double() - exact).norm(), floor.norm()), what


def assert_rounded_alike(got: Tensor, expected: Tensor) -> None:
    """The same but for a few values next to the middle of two others, one step of bfloat16 off."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert (got != expected).float().mean() <= 0.002
    distance = (got.double() - expected.double()).abs()
    assert (distance <= 2 * torch.finfo(got.dtype).eps * expected.double().abs()).all()


def assert_few_codes_differ(got: Tensor, expected: Tensor, share: float) -> None:
    """8-bit codes that differ by one step at most, and rarely."""
    steps = (got.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= share


__all__ = [
    "FLOATS",
    "HALVES",
    "as_codes",
    "assert_all_same",
    "assert_few_codes_differ",
    "assert_near",
    "assert_rounded_alike",
    "assert_same_bits",
    "drawn",
    "listed",
    "only_our_kernels",
    "row_views",
    "run_twice",
    "signs",
]
