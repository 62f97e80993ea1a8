"""RMSNorm inside the decode kernel: the model's rounding points, exact, bounded, repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.epilogue import Epilogue
from fusedops.epilogue.base import FLOAT32_ROUNDOFF
from fusedops.problem import GemmSpec
from fusedops.prologue import RmsNormPrologue, rms_normalize
from fusedops.weight import Dense

COVERS = (
    "fusedops/cutlass/*.py",
    "fusedops/config/*.py",
    "fusedops/prologue.py",
    "fusedops/providers/*.py",
)
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 25, 31, 32)
EPS = 1e-5

pytestmark = pytest.mark.gpu


class NormedGemm:
    """A product behind a norm whose statistics come in parts."""

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        prologue: RmsNormPrologue,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype | None = None,
        parts: int = 132,
        chain: str = "none",
    ) -> None:
        self.x = torch.randn(m, k, device="cuda", dtype=dtype)
        self.w = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
        self.norm_weight = torch.randn(k, device="cuda", dtype=weight_dtype or dtype)
        # Squares go to random parts: the sum does not depend on who added them up.
        owner = torch.randint(0, parts, (k,), device="cuda")
        self.sumsq = torch.zeros(parts, m, device="cuda")
        self.sumsq.index_add_(0, owner, self.x.float().square().T.contiguous())
        self.prologue = prologue
        self.spec = GemmSpec(Dense(n, k), Epilogue.parse(chain), dtype, prologue)
        self.chain_operands: list[Tensor | None] = [
            torch.randn(m if o.axis == "mn" else width, *([width] if o.axis == "mn" else []))
            .to("cuda")
            .to(dtype)
            for o, width in zip(
                self.spec.epilogue.operands, self.spec.epilogue.operand_widths(n), strict=True
            )
        ]

    def run(self, out: Tensor | None = None) -> Tensor:
        """The kernel's result; it, with the prologue inside, must be what runs."""
        operands = [self.norm_weight, self.sumsq, *self.chain_operands]
        with fusedops.use_provider("cutlass") as usage:
            if out is None:
                result = torch.ops.fusedops.gemm.default(self.x, self.w, operands, str(self.spec))
                out = result[0]
            else:
                torch.ops.fusedops.gemm_out.default(self.x, self.w, operands, str(self.spec), [out])
        assert usage.count("gemm", "cutlass") == 1
        return out

    def plan(self) -> str:
        """What the pinned provider would run."""
        given = [self.norm_weight, self.sumsq, *self.chain_operands]
        operands = dict(zip(self.spec.operand_names, given, strict=True))
        with fusedops.use_provider("cutlass"):
            return fusedops.explain(
                self.x,
                self.w,
                self.spec.epilogue,
                operands,
                out_dtype=self.spec.out_dtype,
                prologue=self.prologue,
            ).plan

    def normalized(self) -> Tensor:
        """x behind the norm, by torch on the GPU, at the same rounding points."""
        return rms_normalize(
            self.x,
            self.norm_weight,
            EPS,
            self.prologue.weight_offset,
            self.prologue.order == "llama",
            self.sumsq.double().sum(0).float().unsqueeze(1),
        )


LLAMA, GEMMA = RmsNormPrologue(EPS), RmsNormPrologue(EPS, "gemma", 1.0)


@pytest.mark.parametrize("prologue", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", ROWS)
def test_result_is_the_product_of_normalised_rows(
    m: int, dtype: torch.dtype, prologue: RmsNormPrologue
) -> None:
    n, k = 272, 520
    case = NormedGemm(m, n, k, prologue, dtype)
    assert "ahead" not in case.plan()
    y = case.normalized().double()
    exact = y @ case.w.double().T
    magnitude = y.abs() @ case.w.double().abs().T
    # Where a value sits on a rounding boundary, one unit in the last place of one factor.
    unit = torch.finfo(dtype).eps
    worst = (y.abs() * case.w.double().abs().amax()).amax(1, keepdim=True) * unit
    bound = exact.abs() * unit / 2 + magnitude * 8 * k**0.5 * FLOAT32_ROUNDOFF + 4 * worst
    error = (case.run().double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max().item():.2f} of the bound"


@pytest.mark.parametrize("tokens", [1, 16, 30])
@pytest.mark.parametrize(
    ("n", "k", "chain"),
    [
        (6144, 4096, "bias"),
        (4096, 4096, "residual|row_stat(sumsq,132)"),
        (28672, 4096, "gate"),
        (4096, 14336, "residual"),
        (512, 2048, "softcap(5.0)"),
    ],
)
def test_fused_is_as_exact_as_a_norm_ahead(n: int, k: int, chain: str, tokens: int) -> None:
    case = NormedGemm(tokens, n, k, LLAMA, chain=chain)
    fused = case.run()
    bare = GemmSpec(Dense(n, k), case.spec.epilogue, torch.bfloat16)
    with fusedops.use_provider("cutlass"):
        ahead = torch.ops.fusedops.gemm.default(
            case.normalized(), case.w, case.chain_operands, str(bare)
        )[0]
    # Equal but for values of x that lie within float32 rounding of a bf16 boundary.
    scale = ahead.double().abs().mean()
    assert (fused.double() - ahead.double()).abs().mean() <= 1e-3 * scale
    assert (fused != ahead).float().mean() < 0.2


@pytest.mark.parametrize("m", [3, 16, 32])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_poisoned_output_is_written_twice_the_same(m: int, weight_dtype: torch.dtype) -> None:
    case = NormedGemm(m, 256, 1024, GEMMA, weight_dtype=weight_dtype)
    out = torch.full((m + 2, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
    first = case.run(out[1:-1]).clone()
    assert not first.isnan().any()
    assert out[[0, -1]].isnan().all()
    out.fill_(float("nan"))
    assert torch.equal(case.run(out[1:-1]), first)


def test_rows_with_nan_show_it_and_others_do_not() -> None:
    case = NormedGemm(16, 256, 512, LLAMA)
    case.x[3, 100] = float("nan")
    case.sumsq[5, 3] = float("nan")
    result = case.run()
    assert result[3].isnan().all()
    assert not torch.cat([result[:3], result[4:]]).isnan().any()


def test_one_part_and_a_misaligned_weight() -> None:
    case = NormedGemm(8, 256, 512, LLAMA, parts=1)
    expected = case.run()
    padded = torch.empty(513, device="cuda", dtype=torch.bfloat16)
    padded[1:].copy_(case.norm_weight)
    case.norm_weight = padded[1:]
    assert torch.equal(case.run(), expected)


def test_replays_follow_changed_statistics() -> None:
    case = NormedGemm(16, 512, 1024, LLAMA)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    for _ in range(3):
        case.x.normal_()
        case.sumsq.zero_()
        case.sumsq[7] = case.x.float().square().sum(1)
        graph.replay()
        assert torch.equal(captured, case.run())


@pytest.mark.parametrize("m", [33, 64, 200])
def test_larger_m_has_the_norm_ahead(m: int) -> None:
    case = NormedGemm(m, 256, 512, LLAMA)
    assert "ahead" in case.plan()
    expected = case.normalized().double() @ case.w.double().T
    assert (case.run().double() - expected).abs().max() <= 0.05
