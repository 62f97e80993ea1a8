"""e4m3 with scales a block of 128 on a GPU, against its float64 formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from differences import differences
from gemm_cases import Case, to_e4m3
from torch import Tensor

import fusedops
from fusedops.config import DECODE_BUCKETS, DecodeTile, PrefillTile, decode_tiles, prefill_tiles
from fusedops.epilogue import Epilogue
from fusedops.epilogue.outputs import GROUP as BLOCK
from fusedops.epilogue.outputs import group_scale_empty
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass_decode import DecodeCandidate
from fusedops.providers.cutlass_prefill import PrefillCandidate
from fusedops.providers.kernel_tensors import as_bytes, operands_read, written
from fusedops.weight import BlockFp8

COVERS = (
    "fusedops/gemm.py",
    "fusedops/problem.py",
    "fusedops/weight/*.py",
    "fusedops/cutlass/*.py",
    "fusedops/config/*.py",
    "fusedops/epilogue/*.py",
    "fusedops/providers/*.py",
)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Tile = DecodeTile | PrefillTile
TILES: dict[str, Tile] = {tile.name: tile for tile in (*decode_tiles(), *prefill_tiles())}
N, K = 592, 1168
CUT = 2.0**-12
"""What an instruction cuts off each of what it adds up, relative to the largest of it."""
INSTRUCTION_K = 32

pytestmark = pytest.mark.gpu
op = torch.ops.fusedops.gemm.default


def make(
    chain: str,
    m: int,
    n: int,
    k: int,
    *,
    integers: bool,
    seed: int = 0,
    out_dtype: torch.dtype = torch.float32,
    rows: str = "plain",
) -> Case:
    """x and a weight with their scales: whole numbers times powers of two, or random ones."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if integers:
            return torch.randint(-2, 3, shape, device="cuda", generator=generator).float()
        return torch.randn(shape, device="cuda", generator=generator)

    def scales(*shape: int) -> Tensor:
        if integers:
            return torch.randint(-1, 2, shape, device="cuda", generator=generator).float().exp2()
        return torch.rand(shape, device="cuda", generator=generator) + 0.01

    epilogue = Epilogue.parse(chain)
    form = BlockFp8(n, k, rows)
    spec = GemmSpec(form, epilogue, epilogue.result_dtype(out_dtype))
    factor = 1 if integers else 100
    x, w = (to_e4m3(draw(count, k) * factor) for count in (m, n))
    x_scale = group_scale_empty((m,), k, torch.float32, x.device)
    x_scale.copy_(scales(*x_scale.shape))
    operands: list[Tensor | None] = [x_scale, scales(form.row_blocks, form.k_blocks)]
    for operand, width in zip(spec.operands[2:], spec.operand_widths[2:], strict=True):
        shape = {"scalar": (), "m": (m,), "n": (width,), "mn": (m, width)}[operand.axis]
        given = draw(*shape)
        operands.append(given.abs() + 1 if "scale" in operand.name else given)
    return Case(spec, x, w, operands)


def dequantized(case: Case) -> tuple[Tensor, Tensor]:
    """x and the weight in float64, every element times the scale of its block."""
    x_scale, w_scale = (operand.double() for operand in case.operands[:2] if operand is not None)
    m, k = case.x.shape
    x = torch.stack([case.x[:, j].double() * x_scale[j // BLOCK, :m] for j in range(k)], 1)
    assert isinstance(case.spec.weight, BlockFp8)
    rows = case.spec.weight.block_of_rows(x.device)
    columns = torch.arange(k, device="cuda") // BLOCK
    return x, case.w.double() * w_scale[rows][:, columns]


def exact(case: Case) -> Tensor:
    x, w = dequantized(case)
    return x @ w.t()


def run(case: Case) -> list[Tensor]:
    with fusedops.use_provider("cutlass") as usage:
        results: list[Tensor] = op(case.x, case.w, case.operands, case.text)
    assert usage.count("gemm", "cutlass") == 1
    return results


def tile_problem(spec: GemmSpec, m: int, tile: Tile) -> GemmProblem:
    """The problem on a GPU so small that each CTA of the tiling has several tiles."""
    dtypes = tuple(operand.dtypes[0] for operand in spec.operands)
    sm_count = 132 if isinstance(tile, PrefillTile) and tile.split > 1 else 6
    return GemmProblem(spec, m, E4M3, dtypes, "cuda", sm_count, arch="sm_90a", gpu="NVIDIA H200")


def launch(case: Case, tile: Tile) -> Tensor:
    """The result by one tiling, into poisoned memory, twice bitwise the same."""
    m = case.x.shape[0]
    kind: Any = DecodeCandidate if isinstance(tile, DecodeTile) else PrefillCandidate
    kernel = kind(tile_problem(case.spec, m, tile), tile).launcher()
    attempts = []
    for _ in range(2):
        result = case.spec.allocate(case.x)[0]
        result.view(torch.uint8).fill_(0xFF)
        read = operands_read(case.spec, case.operands, m)
        kernel(as_bytes(case.x), as_bytes(case.w), written(result, m), read, ())
        attempts.append(result)
    same = torch.equal(*(attempt.view(torch.uint8) for attempt in attempts))
    assert same, f"two launches: {differences(*attempts)}"
    return attempts[0]


def serves(tile: Tile, m: int, n: int, k: int) -> bool:
    spec = GemmSpec(BlockFp8(n, k), Epilogue(), torch.float32)
    return tile.legal(tile_problem(spec, m, tile)) is None


@pytest.mark.parametrize("first", range(0, 131, 10))
def test_every_m_is_exact(first: int) -> None:
    for m in range(first, min(first + 10, 131)):
        case = make("none", m, 277, 336, integers=True)
        assert torch.equal(run(case)[0], exact(case).float()), f"M={m}"


@pytest.mark.parametrize("n", [1, 130, 1001])
@pytest.mark.parametrize("k", [16, 128, 144, 1040])
def test_odd_sizes_are_exact(n: int, k: int) -> None:
    for m in (1, 3, 65, 200, 530):
        case = make("none", m, n, k, integers=True)
        assert torch.equal(run(case)[0], exact(case).float()), f"M={m}"


@pytest.mark.parametrize(
    ("name", "m"),
    [
        (name, m)
        for name, tile in TILES.items()
        for m in ([b - 3 for b in DECODE_BUCKETS] if name.startswith("r") else (3, 130, 517))
        if serves(tile, m, N, K)
    ],
)
def test_every_tiling_is_exact(name: str, m: int) -> None:
    case = make("none", m, N, K, integers=True)
    assert torch.equal(launch(case, TILES[name]), exact(case).float())


@pytest.mark.parametrize("m", [1, 16, 100, 600])
@pytest.mark.parametrize("k", [128, 512, 4096])
def test_random_inputs_are_within_the_bound(m: int, k: int) -> None:
    """A block is cut by four instructions, however long K is; its sum is rounded once a block."""
    case = make("none", m, 320, k, integers=False)
    x, w = dequantized(case)
    magnitude = x.abs() @ w.abs().t()
    bound = magnitude * (k // BLOCK + 4) * 2.0**-24 + cut_off(x, w)
    result, wanted = run(case)[0].double(), x @ w.t()
    error = (result - wanted).abs()
    assert (error <= bound).all(), differences(result, wanted, bound)
    share = error.square().mean().sqrt() / wanted.square().mean().sqrt()
    assert share <= 2.0**-8, f"{share:g} of the results"


def cut_off(x: Tensor, w: Tensor) -> Tensor:
    """What the instructions lose, each of its 32 products and of the block's sum before."""
    lost = torch.zeros(len(x), len(w), dtype=torch.float64, device=x.device)
    for x_block, w_block in zip(x.split(BLOCK, 1), w.split(BLOCK, 1), strict=True):
        total = torch.zeros_like(lost)
        for one, two in zip(
            x_block.split(INSTRUCTION_K, 1), w_block.split(INSTRUCTION_K, 1), strict=True
        ):
            products = one[:, None] * two
            lost += (INSTRUCTION_K + 1) * CUT * products.abs().amax(-1).maximum(total.abs())
            total += products.sum(-1)
    return lost


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: tile.name)
def test_interleaved_blocks_are_exact_in_every_tiling(tile: Tile) -> None:
    for m in (13, 100) if isinstance(tile, DecodeTile) else (130, 300):
        case = make("none", m, N, K, integers=True, rows="gate_up")
        if tile.legal(tile_problem(case.spec, m, tile)) is None:
            assert torch.equal(launch(case, tile), exact(case).float()), f"M={m}"


@pytest.mark.parametrize("m", [7, 64, 300])
def test_gated_pairs_of_interleaved_blocks_equal_the_reference(m: int) -> None:
    case = make("gate(silu)", m, 1024, 640, integers=True, out_dtype=BF16, rows="gate_up")
    with fusedops.use_provider("reference"):
        wanted = op(case.x, case.w, case.operands, case.text)[0].double()
    assert ((run(case)[0].double() - wanted).abs() <= 0.01 * wanted.abs() + 0.02).all()


@pytest.mark.parametrize("m", [7, 64, 128, 300])
@pytest.mark.parametrize(
    "chain", ["bias|act(silu)|residual", "gate", "bias|quantize(e4m3,m)", "scale(extra,m)|bias"]
)
def test_epilogues_equal_the_reference(chain: str, m: int) -> None:
    """The sums are exact, so only float32 math and the last rounding may differ."""
    case = make(chain, m, 512, 640, integers=True, out_dtype=BF16)
    with fusedops.use_provider("reference"):
        wanted = op(case.x, case.w, case.operands, case.text)[0].double()
    got = run(case)[0].double()
    allowed = (0.13 if "quantize" in chain else 0.01) * wanted.abs() + 0.02
    assert ((got - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("m", [5, 200])
def test_a_scale_of_nan_stays_in_its_rows_and_columns(m: int) -> None:
    case = make("none", m, 300, 384, integers=True)
    x_scale, w_scale = case.operands[:2]
    assert x_scale is not None
    assert w_scale is not None
    x_scale[1, 2] = float("nan")
    w_scale[1, 2] = float("nan")
    found = run(case)[0].isnan()
    assert found[2].all()
    assert found[:, 128:256].all()
    found[2], found[:, 128:256] = False, False
    assert not found.any()


@pytest.mark.parametrize("m", [1, 6, 200])
def test_scales_of_any_layout(m: int) -> None:
    case = make("none", m, 256, 384, integers=True)
    x_scale, w_scale = case.operands[:2]
    assert x_scale is not None
    assert w_scale is not None
    wanted = run(case)[0]
    case.operands[0] = x_scale.contiguous()
    assert torch.equal(run(case)[0], wanted)
    case.operands[:2] = [x_scale.t().contiguous().t(), w_scale.t().contiguous().t()]
    assert torch.equal(run(case)[0], wanted)
    room = torch.zeros(3, m + 5, device="cuda")
    case.operands[0] = room[:, 1 : m + 1].copy_(x_scale)
    assert torch.equal(run(case)[0], wanted)


@pytest.mark.parametrize("m", [8, 160])
def test_captured_replays_equal_eager_with_changed_inputs(m: int) -> None:
    case = make("bias", m, 256, 384, integers=False)
    with fusedops.use_provider("cutlass"):
        op(case.x, case.w, case.operands, case.text)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(case.x, case.w, case.operands, case.text)[0]
        for seed in range(1, 4):
            other = make("bias", m, 256, 384, integers=False, seed=seed)
            for mine, theirs in zip((case.x, case.w), (other.x, other.w), strict=True):
                mine.copy_(theirs)
            for operand, given in zip(case.operands, other.operands, strict=True):
                operand.copy_(given)  # type: ignore[union-attr, arg-type]
            graph.replay()
            eager = op(case.x, case.w, case.operands, case.text)[0]
            assert torch.equal(captured, eager), differences(captured, eager)


def test_batch_invariant_rows_do_not_depend_on_the_rows_beside_them() -> None:
    """Every tiling adds the blocks of K up one after the other."""
    case = make("none", 700, 1280, 2048, integers=False)
    x_scale, w_scale = case.operands[:2]
    assert x_scale is not None
    results = {}
    for m in (1, 8, 33, 64, 128, 200, 512, 700):
        with fusedops.use_provider("cutlass"):
            results[m] = fusedops.gemm(
                case.x[:m],
                case.w,
                None,
                [x_scale[:, :m], w_scale],
                weight=BlockFp8(1280, 2048),
                batch_invariant=True,
            )
    for m, y in results.items():
        assert torch.equal(y, results[700][:m]), f"M={m}: {differences(y, results[700][:m])}"
