"""e4m3 and int8 products on a GPU: whole numbers bitwise, others within bounds against float64."""

from __future__ import annotations

from typing import Any

import gemm_oracle
import pytest
import torch
from differences import differences
from gemm_cases import CHAINS, QUANTIZING, Case, make_case, to_e4m3
from torch import Tensor

import fusedops
from fusedops.config import DECODE_BUCKETS, DecodeTile, PrefillTile, decode_tiles, prefill_tiles
from fusedops.epilogue import Epilogue
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass_decode import DecodeCandidate
from fusedops.providers.cutlass_prefill import PrefillCandidate
from fusedops.providers.kernel_tensors import as_bytes, operands_read, written
from fusedops.weight import Dense

COVERS = (
    "fusedops/gemm.py",
    "fusedops/problem.py",
    "fusedops/weight/*.py",
    "fusedops/cutlass/*.py",
    "fusedops/config/*.py",
    "fusedops/epilogue/*.py",
    "fusedops/providers/*.py",
)
E4M3, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
Tile = DecodeTile | PrefillTile
TILES: dict[str, Tile] = {tile.name: tile for tile in (*decode_tiles(), *prefill_tiles())}
N, K = 592, 1168
EPILOGUE_SIZES = (70, 512, 272)
REPRESENTATIVES = ("r32k128", "r64k128s2", "r112k64", "c128x192m2", "p64x128m2", "c128x128k4")
ROW_BY_CHANNEL = "scale(x_scale,m)|scale(w_scale,n)"
CUT = 2.0**-12
"""What an instruction cuts off each of what it adds up, relative to the largest of it. 14 bits are
2^-13; a product's mantissa, which lies between 1 and 4, may take one of them."""
INSTRUCTION_K = 32

pytestmark = pytest.mark.gpu
op = torch.ops.fusedops.gemm.default
both = pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])


def run(case: Case) -> list[Tensor]:
    """The results of ``cutlass``; no other provider may have served it."""
    with fusedops.use_provider("cutlass") as usage:
        results: list[Tensor] = op(case.x, case.w, case.operands, case.text)
    assert usage.count("gemm", "cutlass") == 1
    return results


def whole(chain: str, m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Case:
    """A case of whole numbers, whose sums e4m3's accumulators hold exactly too."""
    options = {"out_dtype": BF16, **options}
    return make_case(chain, m, n, k, dtype, integers=True, device="cuda", **options)


def product(case: Case) -> Tensor:
    return case.x.double() @ case.w.double().t()


def with_operands(case: Case) -> Tensor:
    """``bias|residual`` of whole numbers, rounded once."""
    bias, residual = (operand.double() for operand in case.operands if operand is not None)
    return (product(case) + bias + residual).to(case.spec.out_dtype)


def tile_problem(spec: GemmSpec, m: int, dtype: torch.dtype, tile: Tile) -> GemmProblem:
    """The problem on a GPU so small that each CTA of the tiling has several tiles."""
    dtypes = tuple(operand.dtypes[0] for operand in spec.operands)
    # Clusters that split K have one tile, so these take as many as there are.
    sm_count = 132 if isinstance(tile, PrefillTile) and tile.split > 1 else 6
    return GemmProblem(spec, m, dtype, dtypes, "cuda", sm_count, arch="sm_90a", gpu="NVIDIA H200")


def legal(tile: Tile, chain: str, m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    epilogue = Epilogue.parse(chain)
    spec = GemmSpec(Dense(n, k), epilogue, epilogue.result_dtype(BF16))
    return tile.legal(tile_problem(spec, m, dtype, tile)) is None


def launch(case: Case, tile: Tile) -> list[Tensor]:
    """All results by one tiling, into poisoned memory, twice bitwise the same."""
    m = case.x.shape[0]
    kind: Any = DecodeCandidate if isinstance(tile, DecodeTile) else PrefillCandidate
    kernel = kind(tile_problem(case.spec, m, case.x.dtype, tile), tile).launcher()
    attempts = []
    for _ in range(2):
        results = case.spec.allocate(case.x)
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        main, *extra = (written(result, m) for result in results)
        read = operands_read(case.spec, case.operands, m)
        kernel(as_bytes(case.x), as_bytes(case.w), main, read, extra)
        attempts.append(results)
    for first, second in zip(*attempts, strict=True):
        same = torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        assert same, f"two launches: {differences(first, second)}"
    return attempts[0]


@both
@pytest.mark.parametrize("first", range(0, 131, 10))
def test_every_m_is_exact(first: int, dtype: torch.dtype) -> None:
    for m in range(first, min(first + 10, 131)):
        case = whole("bias|residual", m, 277, 336, dtype)
        assert torch.equal(run(case)[0], with_operands(case)), f"M={m}"


@both
@pytest.mark.parametrize("n", [1, 7, 130, 1001])
@pytest.mark.parametrize("k", [16, 48, 144, 1040, 1936])
def test_odd_sizes_are_exact(n: int, k: int, dtype: torch.dtype) -> None:
    for m in (1, 3, 65, 200, 530):
        case = whole("none", m, n, k, dtype)
        assert torch.equal(run(case)[0], product(case).to(BF16)), f"M={m}"


@both
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_results_of_every_dtype_are_exact(out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for m in (17, 300):
        case = whole("bias|residual", m, 264, 528, dtype, out_dtype=out_dtype)
        assert torch.equal(run(case)[0], with_operands(case))


@both
@pytest.mark.parametrize(
    ("name", "m"),
    [
        (name, m)
        for name, tile in TILES.items()
        for m in ([b - 3 for b in DECODE_BUCKETS] if name.startswith("r") else (3, 130, 517))
        if legal(tile, "bias|residual", m, N, K, E4M3)
    ],
)
def test_every_tiling_is_exact(name: str, m: int, dtype: torch.dtype) -> None:
    case = whole("bias|residual", m, N, K, dtype)
    assert torch.equal(launch(case, TILES[name])[0], with_operands(case))


@both
@pytest.mark.parametrize(
    ("name", "chain"),
    [
        (name, chain)
        for name in REPRESENTATIVES
        for chain in (*CHAINS, *QUANTIZING)
        if legal(TILES[name], chain, *EPILOGUE_SIZES, E4M3)
    ],
)
def test_every_epilogue_equals_the_reference(name: str, chain: str, dtype: torch.dtype) -> None:
    """The sums are exact, so only float32 math and the last rounding may differ."""
    case = whole(chain, *EPILOGUE_SIZES, dtype)
    results = launch(case, TILES[name])
    with fusedops.use_provider("reference"):
        expected = op(case.x, case.w, case.operands, case.text)
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        unit = {E4M3: 0.13, INT8: 1.01}.get(got.dtype, 0.0)
        if got.dim() == 2 and got.shape[1] == 70 and got.shape[0] != 70:
            # Parts of a row statistic are the kernel's own; what they add up to is not.
            absmax = "absmax" in chain
            got, wanted = (t.amax(0) if absmax else t.sum(0) for t in (got, wanted))
        got, wanted = got.double(), wanted.double()
        allowed = 0.01 * wanted.abs() + 0.02
        if unit:
            allowed = unit * wanted.abs().clamp(min=1.0) if unit < 1 else torch.full_like(got, unit)
        assert ((got - wanted).abs() <= allowed).all(), f"output {index} of {chain}"


def random_case(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    """Row by channel scales on numbers over all of the dtype's range."""
    case = make_case(ROW_BY_CHANNEL, m, n, k, dtype, out_dtype=torch.float32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(k)

    def draw(like: Tensor) -> Tensor:
        shape = like.shape
        if dtype == INT8:
            return torch.randint(-127, 128, shape, device="cuda", generator=generator).to(INT8)
        return to_e4m3(torch.randn(shape, device="cuda", generator=generator) * 100)

    case.x, case.w = draw(case.x), draw(case.w)
    return case


def cut_off(case: Case) -> Tensor:
    """What e4m3 sums can lose: each instruction cuts its 32 products and the sum before."""
    total, lost = 0.0, 0.0
    pairs = zip(case.x.split(INSTRUCTION_K, 1), case.w.split(INSTRUCTION_K, 1), strict=True)
    for x, w in pairs:
        products = x.double()[:, None] * w.double()
        largest = products.abs().amax(-1).maximum(torch.as_tensor(total).abs())
        lost = lost + (INSTRUCTION_K + 1) * CUT * largest
        total = total + products.sum(-1)
    return torch.as_tensor(lost)


@both
@pytest.mark.parametrize("m", [1, 16, 100, 600])
@pytest.mark.parametrize("k", [32, 512, 4096])
def test_random_inputs_are_within_the_bound(m: int, k: int, dtype: torch.dtype) -> None:
    case = random_case(m, 320, k, dtype)
    result = run(case)[0].cpu().double()
    accumulator = product(case).cpu()
    # int8: exact, rounded once to float32.
    own = accumulator.abs() * 2.0**-24 if dtype == INT8 else cut_off(case).cpu()
    host = [operand.cpu() for operand in case.operands if operand is not None]
    named = {
        operand.name: gemm_oracle.to_numpy(tensor)
        for operand, tensor in zip(case.spec.operands, host, strict=True)
    }
    exact = torch.from_numpy(gemm_oracle.apply_chain(ROW_BY_CHANNEL, accumulator.numpy(), named))
    context = case.spec.context([tensor.double() for tensor in host], m)
    bound = case.spec.epilogue.error_bound(accumulator, own, context)
    error = (result - exact).abs()
    assert (error <= bound).all(), differences(result, exact, bound)
    if dtype == E4M3:
        # What the bound leaves open for random signs: a part of K gone astray.
        share = error.square().mean().sqrt() / exact.square().mean().sqrt()
        assert share <= 2.0**-6, f"{share:g} of the results"


@pytest.mark.parametrize("name", ["r64k128", "r64k128s2", "c128x128m2", "c128x128k4"])
def test_sums_of_int8_beyond_float32_are_rounded_once(name: str) -> None:
    """127 * 127 * 4095 needs 26 bits; the parts of a split are added as integers."""
    m, n, k = 100, 256, 4096
    case = whole("none", m, n, k, INT8, out_dtype=torch.float32)
    generator = torch.Generator("cuda").manual_seed(1)
    case.x = torch.randint(100, 128, (m, k), device="cuda", generator=generator).to(INT8)
    case.w = torch.randint(100, 128, (n, k), device="cuda", generator=generator).to(INT8)
    exact = product(case)
    assert exact.min() > 2**25
    assert torch.equal(launch(case, TILES[name])[0], exact.float())


@pytest.mark.parametrize("m", [4, 200])
def test_longest_sums_of_int8_do_not_overflow(m: int) -> None:
    case = whole("none", m, 64, 131056, INT8, out_dtype=torch.float32)
    case.x.fill_(-128)
    case.w.fill_(-128)
    result = run(case)[0]
    assert torch.equal(result, torch.full_like(result, 131056.0 * 2**14))


@pytest.mark.parametrize("m", [5, 300])
def test_nan_of_e4m3_stays_in_its_row_and_column(m: int) -> None:
    case = whole("none", m, 96, 256, E4M3)
    case.x[3, 77] = float("nan")
    case.w[41, 200] = float("nan")
    found = run(case)[0].isnan()
    assert found[3].all()
    assert found[:, 41].all()
    found[3], found[:, 41] = False, False
    assert not found.any()


@both
@pytest.mark.parametrize("m", [9, 140])
def test_strided_rows_and_results_with_a_pitch(m: int, dtype: torch.dtype) -> None:
    """K and the widths around it are multiples of nothing; rows start at multiples of 16 bytes."""
    n, k = 200, 84
    dense = whole("bias", m, n, k, dtype)
    case = Case(dense.spec, *(torch.zeros(r, 128, device="cuda").to(dtype) for r in (m, n)), [])
    case.x.copy_(torch.full((m, 128), 7.0))
    case.x, case.w = case.x[:, :k].copy_(dense.x), case.w[:, :k].copy_(dense.w)
    case.operands = dense.operands
    exact = (product(dense) + dense.operands[0].double()).to(BF16)  # type: ignore[union-attr]
    assert torch.equal(run(case)[0], exact)
    out = torch.full((m, n + 24), 5.0, dtype=BF16, device="cuda")
    with fusedops.use_provider("cutlass"):
        torch.ops.fusedops.gemm_out.default(
            case.x, case.w, case.operands, case.text, [out[:, 8 : n + 8]]
        )
    assert torch.equal(out[:, 8 : n + 8], exact)
    assert (out[:, :8] == 5).all()
    assert (out[:, n + 8 :] == 5).all()


@both
def test_rows_that_start_elsewhere_are_refused(dtype: torch.dtype) -> None:
    case = whole("none", 8, 64, 84, dtype)
    with pytest.raises(fusedops.UnsupportedError, match="multiples of 16 bytes"):
        run(case)


@both
@pytest.mark.parametrize("shape", [(2, 3), (4, 1, 70)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.Size(shape).numel()
    case = whole("bias", rows, 128, 256, dtype)
    flat = run(case)[0]
    case.x = case.x.view(*shape, 256)
    assert torch.equal(run(case)[0], flat.view(*shape, 128))


@both
@pytest.mark.parametrize("m", [8, 160])
@pytest.mark.parametrize("chain", [f"{ROW_BY_CHANNEL}|bias|act(silu)", "scale|quantize(e4m3,m)"])
def test_captured_replays_equal_eager_with_changed_inputs(
    chain: str, m: int, dtype: torch.dtype
) -> None:
    case = whole(chain, m, 256, 192, dtype)
    with fusedops.use_provider("cutlass"):
        op(case.x, case.w, case.operands, case.text)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(case.x, case.w, case.operands, case.text)
        for seed in range(1, 4):
            other = whole(chain, m, 256, 192, dtype, seed=seed)
            case.x.copy_(other.x)
            case.w.copy_(other.w)
            graph.replay()
            eager = op(case.x, case.w, case.operands, case.text)
            for one, two in zip(captured, eager, strict=True):
                assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@both
@pytest.mark.parametrize("shape", [(4096, 4096), (520, 1008)], ids=str)
def test_batch_invariant_rows_do_not_depend_on_the_rows_beside_them(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    case = random_case(700, *shape, dtype)
    x_scale, w_scale = case.operands
    assert x_scale is not None
    results = {}
    for m in (1, 2, 8, 33, 64, 96, 128, 200, 512, 700):
        with fusedops.use_provider("cutlass"):
            results[m] = fusedops.gemm(
                case.x[:m],
                case.w,
                ROW_BY_CHANNEL,
                [x_scale[:m], w_scale],
                batch_invariant=True,
            )
    for m, y in results.items():
        assert torch.equal(y, results[700][:m]), f"M={m}: {differences(y, results[700][:m])}"
