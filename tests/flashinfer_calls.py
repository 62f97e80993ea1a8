"""What the tests of the FlashInfer provider share: data, and calls by provider."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.ops.op import OPS
from fusedops.providers import flashinfer as provider
from fusedops.providers.base import Support, use_provider

LAYOUTS = ("NHD", "HND")
provider.register(OPS)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def answer(op: str, *args: Any, pinned: bool = True) -> Support:
    """The provider's answer to a call of ``op``."""
    if not pinned:
        return OPS[op].answers(*args)["flashinfer"]
    with use_provider("flashinfer"):
        return OPS[op].answers(*args)["flashinfer"]


def refused(reason: str, op: str, *args: Any, pinned: bool = True) -> None:
    """Assert that the call is refused for that reason, and as one that was meant for it."""
    support = answer(op, *args, pinned=pinned)
    assert not support.ok
    assert support.applicable
    assert reason in support.reason


def both(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(FlashInfer's result, the reference's), each on clones of the tensors, in strict mode."""
    results = []
    for name in ("flashinfer", "reference"):
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        with use_provider(name) as usage:
            result = function(*copies, **kwargs)
        assert usage.calls[function.__name__, name] == 1
        results.append(copies if result is None else result)
    return results[0], results[1]


def reference(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The reference's result."""
    with use_provider("reference"):
        return function(*args, **kwargs)


def close(got: Tensor, expected: Tensor, eps: float) -> None:
    """Assert equality within ``eps`` units of the dtype's machine epsilon, relative."""
    scale = torch.finfo(got.dtype).eps * eps
    torch.testing.assert_close(got, expected, rtol=scale, atol=scale * 1e-2, equal_nan=True)
