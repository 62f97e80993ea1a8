"""What operations that write their arguments refuse before they write anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.errors import UnsupportedError
from fusedops.ops.op import OPS

TABLE, INDEX = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
CACHE = (1, 4, 2, 4)
CALLS: dict[str, dict[str, tuple[int, ...]]] = {
    "rope_": {"q": (1, 2, 4), "k": (1, 2, 4)},
    "append_paged_kv": {"k_cache": CACHE, "v_cache": CACHE},
    "rope_append_paged_kv_": {
        "q": (1, 2, 4),
        "k": (1, 2, 4),
        "k_cache": CACHE,
        "v_cache": CACHE,
    },
    "fused_add_rms_norm_": {"x": (2, 8), "residual": (2, 8)},
    "gemm": {"out": (2, 4), "out[1]": (2, 4)},
}
"""The shapes of what each operation writes."""


def call(op: str, written: dict[str, Tensor]) -> None:
    if op == "gemm":
        fusedops.gemm(torch.ones(2, 8), torch.ones(4, 8), "tap", out=list(written.values()))
        return
    if op == "fused_add_rms_norm_":
        fusedops.fused_add_rms_norm_(**written, weight=torch.ones(8))
        return
    rest: dict[str, Any] = {"positions": INDEX + 1}  # position 0 is not turned
    if op != "append_paged_kv":
        rest["cos_sin"] = fusedops.rope_table(4, 8)
    if op != "rope_":
        rest |= {"block_table": TABLE, "request_index": INDEX, "v": torch.ones(1, 2, 4)}
    if op == "append_paged_kv":
        rest["k"] = torch.ones(1, 2, 4)
    getattr(fusedops, op)(**written, **rest)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in CALLS for name in CALLS[op]])
def test_a_tensor_made_in_inference_mode_is_refused_outside_of_it(op: str, name: str) -> None:
    written = {each: torch.full(shape, 3.0) for each, shape in CALLS[op].items()}
    with torch.inference_mode():
        written[name] = written[name].clone()
    with pytest.raises(UnsupportedError) as caught:
        call(op, written)
    assert f"{op}: {name} is float32" in str(caught.value)
    assert "torch.inference_mode()" in str(caught.value)
    assert all((tensor == 3.0).all() for tensor in written.values())
    with torch.inference_mode():
        call(op, written)
    assert not (written[name] == 3.0).all()


def test_every_operation_that_writes_is_asked() -> None:
    writing = {name for name, op in OPS.items() if op._written}
    assert {*writing, "gemm"} == {*CALLS}


@pytest.mark.parametrize("leaf", [True, False])
def test_an_output_that_requires_grad_is_refused(leaf: bool) -> None:
    out = torch.full((2, 4), 3.0, requires_grad=True)
    target = out if leaf else out * 1.0
    x, w = torch.ones(2, 8), torch.ones(4, 8)
    with pytest.raises(UnsupportedError, match="requires grad while grad mode is on"):
        fusedops.gemm(x, w, out=target)
    assert (target == 3.0).all()
    with torch.no_grad():
        fusedops.gemm(x, w, out=target)
    assert (target == 8.0).all()
