"""Every tiling with one epilogue, every epilogue with one tiling of each kernel, every small M.

The problems claim a GPU of a few multiprocessors, so that each CTA has several tiles and its ring
goes round more than once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, Case, make_case
from torch import Tensor

import fusedops
from fusedops.config import DECODE_BUCKETS, DecodeTile, PrefillTile, decode_tiles, prefill_tiles
from fusedops.problem import GemmProblem
from fusedops.providers.cutlass_decode import DecodeCandidate
from fusedops.providers.cutlass_kernel import Candidate
from fusedops.providers.cutlass_prefill import PrefillCandidate
from fusedops.providers.kernel_tensors import operands_read, written

COVERS = (
    "fusedops/cutlass/*.py",
    "fusedops/config/*.py",
    "fusedops/epilogue/*.py",
    "fusedops/providers/*.py",
)
N, K = 592, 1096
SM_COUNT = 6
DECODE = {tile.name: tile for tile in decode_tiles()}
PREFILL = {tile.name: tile for tile in prefill_tiles()}
REPRESENTATIVES = ("r32k128", "r64k128s2", "r112k64", "c128x192m2", "p64x128m2", "c128x128k4")

pytestmark = pytest.mark.gpu


def problem_of(case: Case, sm_count: int) -> GemmProblem:
    """The case's problem on a GPU of ``sm_count`` multiprocessors."""
    explanation = fusedops.explain(
        case.x, case.w, case.spec.epilogue, case.operands, out_dtype=case.spec.out_dtype
    )
    return replace(explanation.problem, sm_count=sm_count)


def candidate(case: Case, tile: DecodeTile | PrefillTile) -> Candidate:
    """The tiling for the case; skips where it is not legal."""
    # Clusters that split K have one tile, so these take as many as there are.
    split = isinstance(tile, PrefillTile) and tile.split > 1
    problem = problem_of(case, 132 if split else SM_COUNT)
    if refusal := tile.legal(problem):
        pytest.skip(refusal)
    kind = DecodeCandidate if isinstance(tile, DecodeTile) else PrefillCandidate
    return kind(problem, tile)  # type: ignore[arg-type]


def launch(case: Case, tile: DecodeTile | PrefillTile) -> list[Tensor]:
    """All results by one tiling, into poisoned memory, twice bitwise the same."""
    run = candidate(case, tile).launcher()
    m = case.x.shape[0]
    attempts = []
    for _ in range(2):
        results = case.spec.allocate(case.x)
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        main, *extra = (written(result, m) for result in results)
        run(case.x, case.w, main, operands_read(case.spec, case.operands, m), extra)
        attempts.append(results)
    for first, second in zip(*attempts, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    return attempts[0]


def exact(case: Case) -> Tensor:
    """``bias|residual`` on whole numbers, which no rounding touches before the last one."""
    product = case.x.double() @ case.w.double().t()
    bias, residual = (operand.double() for operand in case.operands if operand is not None)
    return (product + bias + residual).to(case.spec.out_dtype)


@pytest.mark.parametrize("m", [bucket - 3 for bucket in DECODE_BUCKETS])
@pytest.mark.parametrize("name", DECODE)
def test_every_decode_tiling_is_exact(name: str, m: int) -> None:
    case = make_case("bias|residual", m, N, K, torch.bfloat16, integers=True, device="cuda")
    assert torch.equal(launch(case, DECODE[name])[0], exact(case))


@pytest.mark.parametrize("m", [3, 130, 517])
@pytest.mark.parametrize("name", PREFILL)
def test_every_prefill_tiling_is_exact(name: str, m: int) -> None:
    case = make_case("bias|residual", m, N, K, torch.bfloat16, integers=True, device="cuda")
    assert torch.equal(launch(case, PREFILL[name])[0], exact(case))


@pytest.mark.parametrize("chain", [*CHAINS, *QUANTIZING])
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_epilogue_equals_the_reference(name: str, chain: str) -> None:
    tile = {**DECODE, **PREFILL}[name]
    case = make_case(chain, 70, 512, 264, torch.bfloat16, device="cuda")
    results = launch(case, tile)
    with fusedops.use_provider("reference"):
        expected = torch.ops.fusedops.gemm.default(case.x, case.w, case.operands, case.text)
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        if got.dim() == 2 and got.shape[1] == 70 and got.shape[0] != 70:
            # Parts of a row statistic are the kernel's own; what they add up to is not.
            absmax = "absmax" in chain
            got, wanted = (t.amax(0) if absmax else t.sum(0) for t in (got, wanted))
        got, wanted = got.double(), wanted.double()
        # A unit of a 16-bit output, of an 8-bit one a step of its grid.
        unit = {torch.float8_e4m3fn: 0.13, torch.int8: 1.01}.get(results[index].dtype, 0.0)
        allowed = 0.01 * wanted.abs() + 0.02
        if unit:
            allowed = unit * wanted.abs().clamp(min=1.0) if unit < 1 else torch.full_like(got, unit)
        assert ((got - wanted).abs() <= allowed).all(), f"output {index} of {chain}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", range(0, 131, 10))
def test_every_m_is_exact(first: int, dtype: torch.dtype) -> None:
    for m in range(first, min(first + 10, 131)):
        case = make_case("bias|residual", m, 272, 328, dtype, integers=True, device="cuda")
        with fusedops.use_provider("cutlass") as usage:
            result = torch.ops.fusedops.gemm.default(case.x, case.w, case.operands, case.text)
        assert usage.count("gemm", "cutlass") == 1
        assert torch.equal(result[0], exact(case)), f"M={m}"
