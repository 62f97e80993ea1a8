"""Chains on torch kernels: the same bits as the node-by-node definition."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, make_case

from fusedops.epilogue.chain import Epilogue
from fusedops.providers import epilogue_torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAN = ("residual", "bias|residual", "gate", "bias|gate(gelu)", "tap|residual", "gate|residual")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", sorted({*CHAINS, *QUANTIZING, *LEAN}))
def test_equals_the_definition(chain: str, dtype: torch.dtype) -> None:
    case = make_case(chain, 5, 32, 16, dtype)
    spec = case.spec
    contexts = [spec.context(case.operands, 5) for _ in range(2)]
    accumulator = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)) * 4
    got = epilogue_torch.finish(spec.epilogue, accumulator.clone(), contexts[0])
    expected = spec.epilogue.reference(accumulator.clone(), contexts[1])
    assert got.dtype is expected.dtype
    assert got.is_contiguous()
    assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))
    for mine, theirs in zip(contexts[0].outputs, contexts[1].outputs, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chain", LEAN)
def test_the_last_node_rounds_itself(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object) -> None:
        raise AssertionError("the chain was run node by node")

    monkeypatch.setattr(Epilogue, "reference", refused)
    case = make_case(chain, 3, 32, 16, torch.bfloat16)
    context = case.spec.context(case.operands, 3)
    assert epilogue_torch.finish(case.spec.epilogue, torch.ones(3, 32), context).dtype is (
        torch.bfloat16
    )


@pytest.mark.parametrize("chain", LEAN)
def test_no_rows(chain: str) -> None:
    case = make_case(chain, 0, 32, 16, torch.bfloat16)
    context = case.spec.context(case.operands, 0)
    width = 16 if "gate" in chain else 32
    assert epilogue_torch.finish(case.spec.epilogue, torch.ones(0, 32), context).shape == (0, width)
