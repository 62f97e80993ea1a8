"""GEMM on a GPU by four oracles: exact integers, float64 bounds, torch's error, guard bands."""

from __future__ import annotations

import gemm_oracle
import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, Case, make_case
from torch import Tensor

import fusedops
from fusedops.epilogue.base import FLOAT32_ROUNDOFF
from fusedops.problem import GemmSpec
from fusedops.providers.gemm import GEMM_PROVIDERS

COVERS = (
    "fusedops/gemm.py",
    "fusedops/problem.py",
    "fusedops/prologue.py",
    "fusedops/weight/*.py",
    "fusedops/epilogue/*.py",
    "fusedops/providers/*.py",
)
PROVIDERS = ("cutlass", "cublas", "reference")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SERVED = [(p, d) for p in PROVIDERS for d in DTYPES if (p, d) != ("cutlass", torch.float32)]
"""Every provider with the dtypes that it multiplies."""
SHAPES = ((1, 64, 64), (16, 256, 512), (5, 48, 70), (64, 128, 96), (130, 272, 200))
GUARD = 96.0  # exact in every output dtype

pytestmark = pytest.mark.gpu
op = torch.ops.fusedops.gemm.default


def serves(provider: str, case: Case) -> bool:
    """Whether the provider takes the case; what it refuses is covered by the others."""
    explanation = fusedops.explain(
        case.x,
        case.w,
        case.spec.epilogue,
        case.operands,
        out_dtype=case.spec.out_dtype,
    )
    support = GEMM_PROVIDERS[provider].supports(explanation.problem)
    return support.ok


def run(provider: str, case: Case, out: list[Tensor] | None = None) -> list[Tensor]:
    """Run on the pinned provider and assert that it, and no other, ran."""
    with fusedops.use_provider(provider) as usage:
        if out is None:
            results: list[Tensor] = op(case.x, case.w, case.operands, case.text)
        else:
            torch.ops.fusedops.gemm_out.default(case.x, case.w, case.operands, case.text, out)
            results = out
    assert usage.count("gemm", provider) == 1
    return results


def test_cutlass_refuses_float32() -> None:
    case = make_case("none", 16, 272, 320, torch.float32, device="cuda")
    with pytest.raises(
        fusedops.UnsupportedError, match="multiplies bfloat16, float16, float8_e4m3fn and int8"
    ):
        run("cutlass", case)


@pytest.mark.parametrize(("provider", "dtype"), SERVED)
@pytest.mark.parametrize("chain", ["none", "bias", "residual", "bias|residual"])
@pytest.mark.parametrize("m", [0, 1, 2, 7, 16, 33, 64, 65, 130])
def test_integers_are_exact(provider: str, dtype: torch.dtype, chain: str, m: int) -> None:
    case = make_case(chain, m, 272, 320, dtype, integers=True, device="cuda")
    exact = case.x.double() @ case.w.double().t()
    for operand in case.operands:
        assert operand is not None
        exact = exact + operand.double()
    assert torch.equal(run(provider, case)[0], exact.to(dtype))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_random_inputs_are_within_the_bound(provider: str, dtype: torch.dtype, chain: str) -> None:
    for m, n, k in SHAPES:
        if "gate" in chain and n % 16:
            continue
        case = make_case(chain, m, n, k, dtype, seed=m, device="cuda")
        if not serves(provider, case):
            continue
        results = run(provider, case)
        host = [None if t is None else t.cpu() for t in case.operands]
        named = {
            operand.name: gemm_oracle.to_numpy(tensor)
            for operand, tensor in zip(case.spec.operands, host, strict=True)
            if tensor is not None
        }
        x, w = case.x.cpu().double(), case.w.cpu().double()
        accumulator = x @ w.t()
        exact = gemm_oracle.apply_chain(chain, accumulator.numpy(), named)
        own = (x.abs() @ w.abs().t()) * 8 * k**0.5 * FLOAT32_ROUNDOFF
        context = case.spec.context([None if t is None else t.double() for t in host], m)
        bound = case.spec.epilogue.error_bound(accumulator, own, context)
        error = (results[0].cpu().double() - torch.from_numpy(exact)).abs()
        assert (error <= bound).all(), f"{(m, n, k)}: {(error / bound).max():.2f} of the bound"


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 6144, 4096), (1, 4096, 14336), (512, 4096, 4096)])
def test_error_is_at_most_twice_torchs(
    provider: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    case = make_case("bias|act(silu)", *shape, dtype, device="cuda")
    if not serves(provider, case):
        pytest.skip(f"{provider} does not serve {shape}")
    bias = case.operands[0]
    assert bias is not None
    exact = torch.nn.functional.silu(case.x.double() @ case.w.double().t() + bias.double())
    torch_error = (
        (torch.nn.functional.silu(torch.nn.functional.linear(case.x, case.w, bias)) - exact)
        .abs()
        .max()
    )
    error = (run(provider, case)[0] - exact).abs().max()
    assert error <= 2 * torch_error


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("chain", [*CHAINS, *QUANTIZING])
def test_poisoned_output_is_fully_written_twice_the_same(provider: str, chain: str) -> None:
    case = make_case(chain, 19, 256, 136, torch.bfloat16, device="cuda")
    if not serves(provider, case):
        pytest.skip(f"{provider} does not serve {chain}")
    main, *extra = case.spec.allocate(case.x)
    poison = 127 if main.dtype == torch.int8 else float("nan")
    guarded = torch.full(
        (main.shape[0] + 2, main.shape[1] + 32), GUARD, device="cuda", dtype=torch.float32
    ).to(main.dtype)
    before = guarded.clone()
    inner = guarded[1:-1, 16:-16]
    first: list[Tensor] = []
    for attempt in range(2):
        inner.copy_(torch.full_like(main, 1, dtype=torch.float32).mul(poison).to(main.dtype))
        results = run(provider, case, [inner, *extra])
        if attempt == 0:
            first = [r.clone() for r in results]
    for one, two in zip(first, results, strict=True):
        assert torch.equal(one.view(torch.uint8), two.contiguous().view(torch.uint8))
    assert not main.dtype.is_floating_point or not inner.float().isnan().any()
    outside = torch.ones_like(guarded, dtype=torch.bool)
    outside[1:-1, 16:-16] = False
    assert torch.equal(guarded.float()[outside], before.float()[outside])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("chain", ["none", "bias|act(silu)", "gate|residual", "tap|row_stat"])
def test_captured_replays_equal_eager_with_changed_inputs(provider: str, chain: str) -> None:
    case = make_case(chain, 8, 256, 192, torch.bfloat16, device="cuda")
    if not serves(provider, case):
        pytest.skip(f"{provider} does not serve {chain}")
    with fusedops.use_provider(provider):
        op(case.x, case.w, case.operands, case.text)  # warm up: libraries load lazily
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(case.x, case.w, case.operands, case.text)
        for seed in range(1, 4):
            other = make_case(chain, 8, 256, 192, torch.bfloat16, seed=seed, device="cuda")
            case.x.copy_(other.x)
            case.w.copy_(other.w)
            graph.replay()
            eager = op(case.x, case.w, case.operands, case.text)
            for one, two in zip(captured, eager, strict=True):
                assert torch.equal(one, two)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_b10_unaligned_views_equal_their_clones(provider: str, offset: int) -> None:
    def view(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        flat = torch.randn(count + 8, dtype=torch.bfloat16, device="cuda")
        return flat[offset : offset + count].view(shape)

    x, w, bias = view(5, 72), view(48, 72), view(48)
    spec = "none > dense(48,72) > bias > bf16"
    case = Case(GemmSpec.parse(spec), x, w, [bias])
    if not serves(provider, case):
        with pytest.raises(fusedops.UnsupportedError, match="multiples of 16 bytes"):
            run(provider, case)
        return
    views = run(provider, case)[0]
    clones = Case(GemmSpec.parse(spec), x.clone(), w.clone(), [bias.clone()])
    torch.testing.assert_close(views, run(provider, clones)[0])
    torch.cuda.synchronize()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 705, 705), (36, 36, 64), (1, 1, 1), (17, 33, 65)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b08_odd_sizes(provider: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = make_case("none", *shape, dtype, device="cuda")
    if not serves(provider, case):
        with pytest.raises(fusedops.UnsupportedError, match="multiples of 16 bytes"):
            run(provider, case)
        return
    expected = (case.x.float() @ case.w.float().t()).to(dtype)
    torch.testing.assert_close(run(provider, case)[0], expected)


@pytest.mark.parametrize("provider", ["cutlass", "cutlass_sm80"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1280, 2048), (520, 1000)], ids=str)
def test_batch_invariant_rows_do_not_depend_on_the_rows_beside_them(
    provider: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Over the decode and the prefill kernel and their tilings, whatever M takes which."""
    n, k = shape
    case = make_case("bias|residual", 700, n, k, dtype, device="cuda")
    bias, residual = case.operands
    assert bias is not None
    assert residual is not None
    results = {}
    for m in (1, 2, 8, 16, 33, 64, 96, 128, 200, 512, 700):
        with fusedops.use_provider(provider):
            results[m] = fusedops.gemm(
                case.x[:m],
                case.w,
                "bias|residual",
                [bias, residual[:m]],
                out_dtype=dtype,
                batch_invariant=True,
            )
    for m, y in results.items():
        assert torch.equal(y, results[700][:m]), f"M={m}"


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(fusedops.DeviceError, match="move both to one device"):
        fusedops.gemm(torch.randn(2, 8), torch.randn(4, 8, device="cuda"))


def test_b20_accumulator_is_scaled_before_the_cast() -> None:
    x = torch.full((4, 4096), 8.0, device="cuda", dtype=torch.float16)
    w = torch.full((16, 4096), 4.0, device="cuda", dtype=torch.float16)
    scale = torch.tensor(2.0**-10, device="cuda")
    with fusedops.use_provider("cublas"):
        result = fusedops.gemm(x, w, "scale", {"scale": scale})
    assert torch.equal(result, torch.full_like(result, 128.0))


def test_compiled_with_inductor_equals_eager() -> None:
    case = make_case("bias|gate|residual", 8, 64, 64, torch.bfloat16, device="cuda")
    w, operands, text = case.w, case.operands, case.text
    compiled = torch.compile(lambda x: op(x, w, operands, text)[0] + x[:, :32], fullgraph=True)
    assert torch.equal(compiled(case.x), op(case.x, w, operands, text)[0] + case.x[:, :32])
