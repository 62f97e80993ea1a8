"""Every tiling with one epilogue, every epilogue with one tiling of each kernel, every small M.

The problems claim a GPU of a few multiprocessors, so that each CTA has several tiles and its ring
goes round more than once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, Case, make_case
from torch import Tensor

import fusedops
from fusedops.config import DECODE_BUCKETS, DecodeTile, PrefillTile, decode_tiles, prefill_tiles
from fusedops.epilogue import Epilogue
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass_decode import DecodeCandidate
from fusedops.providers.cutlass_prefill import PrefillCandidate
from fusedops.providers.kernel_tensors import operands_read, written
from fusedops.weight import Dense

COVERS = (
    "fusedops/cutlass/*.py",
    "fusedops/config/*.py",
    "fusedops/epilogue/*.py",
    "fusedops/providers/*.py",
)
N, K = 592, 1096
DTYPE = torch.bfloat16
Tile = DecodeTile | PrefillTile
SM_COUNT = 6
DECODE = {tile.name: tile for tile in decode_tiles()}
PREFILL = {tile.name: tile for tile in prefill_tiles()}
TILES = {**DECODE, **PREFILL}
EPILOGUE_SIZES = (70, 512, 264)
REPRESENTATIVES = ("r32k128", "r64k128s2", "r112k64", "c128x192m2", "p64x128m2", "c128x128k4")

pytestmark = pytest.mark.gpu


def problem_of(spec: GemmSpec, m: int, tile: Tile) -> GemmProblem:
    """The problem of bfloat16 tensors on a GPU that gives each CTA of the tiling several tiles."""
    operand_dtypes = tuple(
        DTYPE if DTYPE in operand.dtypes else operand.dtypes[0] for operand in spec.operands
    )
    # Clusters that split K have one tile, so these take as many as there are.
    split = isinstance(tile, PrefillTile) and tile.split > 1
    sm_count = 132 if split else SM_COUNT
    return GemmProblem(
        spec, m, DTYPE, operand_dtypes, "cuda", sm_count, arch="sm_90a", gpu="NVIDIA H200"
    )


def legal(tile: Tile, chain: str, m: int, n: int, k: int) -> bool:
    """Whether the tiling serves the chain; those that do not are not tests."""
    epilogue = Epilogue.parse(chain)
    spec = GemmSpec(Dense(n, k), epilogue, epilogue.result_dtype(DTYPE))
    return tile.legal(problem_of(spec, m, tile)) is None


def launch(case: Case, tile: Tile) -> list[Tensor]:
    """All results by one tiling, into poisoned memory, twice bitwise the same."""
    m = case.x.shape[0]
    kind: Any = DecodeCandidate if isinstance(tile, DecodeTile) else PrefillCandidate
    run = kind(problem_of(case.spec, m, tile), tile).launcher()
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


@pytest.mark.parametrize(
    ("name", "m"),
    [
        (name, bucket - 3)
        for name, tile in DECODE.items()
        for bucket in DECODE_BUCKETS
        if legal(tile, "bias|residual", bucket - 3, N, K)
    ],
)
def test_every_decode_tiling_is_exact(name: str, m: int) -> None:
    case = make_case("bias|residual", m, N, K, DTYPE, integers=True, device="cuda")
    assert torch.equal(launch(case, DECODE[name])[0], exact(case))


@pytest.mark.parametrize(
    ("name", "m"),
    [
        (name, m)
        for name, tile in PREFILL.items()
        for m in (3, 130, 517)
        if legal(tile, "bias|residual", m, N, K)
    ],
)
def test_every_prefill_tiling_is_exact(name: str, m: int) -> None:
    case = make_case("bias|residual", m, N, K, DTYPE, integers=True, device="cuda")
    assert torch.equal(launch(case, PREFILL[name])[0], exact(case))


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        (name, chain)
        for name in REPRESENTATIVES
        for chain in (*CHAINS, *QUANTIZING)
        if legal(TILES[name], chain, *EPILOGUE_SIZES)
    ],
)
def test_every_epilogue_equals_the_reference(name: str, chain: str) -> None:
    tile = TILES[name]
    case = make_case(chain, *EPILOGUE_SIZES, DTYPE, device="cuda")
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


@pytest.mark.parametrize("name", ["p128x128n2", "p64x128m2", "p128x176n2"])
@pytest.mark.parametrize("kind", ["repeated rows", "a part of wider rows", "an odd pitch", "out"])
def test_a_residual_may_lie_anyhow(name: str, kind: str) -> None:
    m, tile = 517, PREFILL[name]
    case = make_case("residual", m, N, K, DTYPE, integers=True, device="cuda")
    (residual,) = case.operands
    assert residual is not None
    if kind == "repeated rows":
        given = residual[:1].expand(m, N)
    else:
        pitch = N + (3 if kind == "an odd pitch" else 64)
        given = torch.zeros(m, pitch, dtype=DTYPE, device="cuda")[:, :N].copy_(residual)
    expected = (case.x.double() @ case.w.double().t() + given.double()).to(DTYPE)
    out = given if kind == "out" else torch.full_like(residual, float("nan"))
    launch_once = PrefillCandidate(problem_of(case.spec, m, tile), tile).launcher()
    launch_once(case.x, case.w, out, operands_read(case.spec, [given], m), [])
    assert torch.equal(out, expected)
