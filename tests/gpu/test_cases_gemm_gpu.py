"""GEMM on a GPU: inputs of public bug reports, for the Tensor Core kernels and for cuBLAS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gemm_cases import Case, make_case
from torch import Tensor

import fusedops
from fusedops.epilogue import Epilogue
from fusedops.errors import LayoutError, ShapeError
from fusedops.gemm import clear_plans
from fusedops.jit.store import default_store
from fusedops.problem import GemmSpec
from fusedops.providers.gemm import GEMM_PROVIDERS
from fusedops.weight import Dense

COVERS = (
    "fusedops/gemm.py",
    "fusedops/problem.py",
    "fusedops/cutlass/*.py",
    "fusedops/epilogue/*.py",
    "fusedops/jit/*.py",
    "fusedops/providers/*.py",
)
KERNELS = ("cutlass", "cutlass_sm80")
PROVIDERS = (*KERNELS, "cublas")
DTYPES = (torch.bfloat16, torch.float16)
MARK = 1234.0  # exact in float16; 1232 in bfloat16, so it is compared with itself

EACH_PROVIDER = pytest.mark.parametrize("provider", PROVIDERS)
EACH_KERNEL = pytest.mark.parametrize("provider", KERNELS)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Few rows take the decode kernel, many the prefill kernel.
EACH_M = pytest.mark.parametrize("m", [4, 200])

pytestmark = pytest.mark.gpu
op = torch.ops.fusedops.gemm.default
out_op = torch.ops.fusedops.gemm_out.default


def run(provider: str, case: Case, out: list[Tensor] | None = None) -> list[Tensor]:
    """Run on the pinned provider and assert that it, and no other, ran."""
    with fusedops.use_provider(provider) as usage:
        if out is None:
            results: list[Tensor] = op(case.x, case.w, case.operands, case.text)
        else:
            out_op(case.x, case.w, case.operands, case.text, out)
            results = out
    assert usage.count("gemm", provider) == 1
    return results


def whole(chain: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """A case of small whole numbers, whose result is exact in every order of summation."""
    return make_case(chain, m, n, k, dtype, seed=seed, integers=True, device="cuda")


def exact(case: Case) -> Tensor:
    """x w^T plus the operands in float64, rounded once: for chains of bias and residual."""
    total = case.x.double() @ case.w.double().t()
    for operand in case.operands:
        assert operand is not None
        total = total + operand.double()
    return total.to(case.spec.out_dtype)


def assert_gpu_still_works() -> None:
    torch.cuda.synchronize()
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0, 2.0, 2.0]


@EACH_PROVIDER
@pytest.mark.parametrize(("m", "n"), [(0, 64), (4, 0), (0, 0)])
def test_b04_empty_sizes_leave_no_error_behind(provider: str, m: int, n: int) -> None:
    case = make_case("bias|row_stat(absmax)", m, n, 64, torch.bfloat16, device="cuda")
    torch.full((1 << 20,), float("nan"), device="cuda")  # freed: dirty memory for the results
    result, absmax = run(provider, case)
    assert (result.shape, result.dtype, result.device) == ((m, n), torch.bfloat16, case.x.device)
    assert absmax.shape == (1, m)
    assert (absmax == 0).all()
    assert_gpu_still_works()


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 705, 705), (36, 36, 64), (1, 1, 1), (17, 33, 65)])
def test_b08_odd_sizes_on_the_kernel_for_any_alignment(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = whole("bias|residual", *shape, dtype)
    assert torch.equal(run("cutlass_sm80", case)[0], exact(case))
    assert_gpu_still_works()


@EACH_KERNEL
@EACH_M
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_b14_unaligned_operands_and_out(provider: str, m: int, offset: int) -> None:
    case = whole("bias|residual", m, 72, 64, torch.bfloat16)
    expected = exact(case)
    shifted: list[Tensor | None] = []
    for operand in case.operands:
        assert operand is not None
        flat = operand.new_empty(operand.numel() + 8)[offset : offset + operand.numel()]
        shifted.append(flat.view(operand.shape).copy_(operand))
    moved = Case(case.spec, case.x, case.w, shifted)
    assert torch.equal(run(provider, moved)[0], expected)
    big = torch.full((m + 2, 72 + 13), MARK, dtype=torch.bfloat16, device="cuda")
    before = big.clone()
    view = big[1:-1, offset : offset + 72]
    run(provider, moved, [view])
    assert torch.equal(view, expected)
    view.copy_(before[1:-1, offset : offset + 72])
    assert torch.equal(big, before)


@EACH_PROVIDER
@EACH_M
def test_b12_leading_dimensions_without_one_row_stride(provider: str, m: int) -> None:
    case = whole("bias|residual", m, 48, 64, torch.bfloat16)
    wide = case.x.new_zeros(m // 2, 3, 72)
    x = wide[:, :2, :64]
    x.copy_(case.x.view(m // 2, 2, 64))
    bias, residual = case.operands
    assert bias is not None
    assert residual is not None
    operands = [bias, residual.view(m // 2, 2, 48)]
    result = run(provider, Case(case.spec, x, case.w, operands))[0]
    assert torch.equal(result, exact(case).view(m // 2, 2, 48))


@EACH_PROVIDER
@EACH_M
@pytest.mark.parametrize("k", [64, 68])
def test_b12_rows_that_must_be_copied_may_be_less_aligned(provider: str, m: int, k: int) -> None:
    """Rows of a pitch of 16 bytes' multiple that the copy packs to one of 8 bytes' multiple."""
    case = whole("none", m, 48, k, torch.bfloat16)
    wide = case.x.new_zeros(m // 2, 3, 72)
    x = wide[:, :2, :k]
    x.copy_(case.x.view(m // 2, 2, k))
    w = case.w.new_zeros(48, 72)[:, :k].copy_(case.w)
    result = run(provider, Case(case.spec, x, w, []))[0]
    assert torch.equal(result, exact(case).view(m // 2, 2, 48))


@EACH_PROVIDER
@EACH_M
@pytest.mark.parametrize("kind", ["every second", "transposed", "expanded"])
def test_b12_strided_operands_equal_their_copies(provider: str, m: int, kind: str) -> None:
    case = whole("bias|residual", m, 48, 64, torch.bfloat16)
    bias, residual = case.operands
    assert bias is not None
    assert residual is not None
    if kind == "every second":
        operands = [torch.stack((bias, bias), 1)[:, 0], torch.stack((residual,) * 2, 2)[..., 0]]
    elif kind == "transposed":
        operands = [bias[None].t().contiguous().t(), residual.t().contiguous().t()]
    else:
        operands = [bias[:1].expand(48), residual[:1].expand(m, 48)]
    strided = Case(case.spec, case.x, case.w, list(operands))
    copies = Case(case.spec, case.x, case.w, [operand.contiguous() for operand in operands])
    assert torch.equal(run(provider, strided)[0], exact(copies))


@EACH_PROVIDER
def test_b14_out_of_another_layout_is_refused_and_untouched(provider: str) -> None:
    case = whole("none", 8, 48, 64, torch.bfloat16)
    out = torch.full((48, 8), MARK, dtype=torch.bfloat16, device="cuda").t()
    before = out.clone()
    with (
        fusedops.use_provider(provider),
        pytest.raises(LayoutError, match="Nothing was written"),
    ):
        out_op(case.x, case.w, [], case.text, [out])
    assert torch.equal(out, before)


@EACH_KERNEL
@EACH_M
def test_b16_a_row_of_zeros_is_quantized_to_zeros(provider: str, m: int) -> None:
    case = make_case("quantize(e4m3,group128)", m, 256, 64, torch.bfloat16, device="cuda")
    case.x[2] = 0
    problem = fusedops.explain(case.x, case.w, case.spec.epilogue, case.operands).problem
    answer = GEMM_PROVIDERS[provider].supports(problem)
    if not answer.ok:
        pytest.skip(f"{provider}: {answer.reason}")
    codes, scale = run(provider, case)
    assert not codes[2].float().any()
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert (scale[:, 2] == 1).all()


@EACH_PROVIDER
@EACH_M
def test_b20_the_accumulator_is_scaled_before_the_cast(provider: str, m: int) -> None:
    x = torch.full((m, 4096), 8.0, device="cuda", dtype=torch.float16)
    w = torch.full((32, 4096), 4.0, device="cuda", dtype=torch.float16)
    scale = torch.tensor(2.0**-10, device="cuda")
    with fusedops.use_provider(provider) as usage:
        result = fusedops.gemm(x, w, "scale", {"scale": scale})
    assert usage.count("gemm", provider) == 1
    assert torch.equal(result, torch.full_like(result, 128.0))


def captured(call: Callable[[], list[Tensor]], pool: object = None) -> tuple[object, list[Tensor]]:
    """A graph of one call, warmed up before, and the results that its replays write."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = call()
    return graph, results


@EACH_KERNEL
@EACH_M
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "captured"])
def test_a_weight_made_by_the_call_before_is_read_when_it_stands(
    provider: str, m: int, graph: bool
) -> None:
    """A transposition allows the product to start at once, and to read its weight too early."""
    n, k = 8192, 4096
    x = torch.randint(-2, 3, (m, k), device="cuda").bfloat16()
    source = torch.randint(-2, 3, (k, n), device="cuda").bfloat16()
    spec = str(GemmSpec(Dense(n, k), Epilogue(()), torch.bfloat16))

    def product() -> list[Tensor]:
        with fusedops.use_provider("cuda"):
            w = fusedops.transpose(source)
        with fusedops.use_provider(provider):
            results: list[Tensor] = op(x, w, [], spec)
            return results

    product()
    replay, results = captured(product) if graph else (None, [])
    for _ in range(8):
        source.copy_(torch.randint(-2, 3, (k, n), device="cuda"))
        if replay is None:
            results = product()
        else:
            replay.replay()
        assert torch.equal(results[0], (x.double() @ source.double()).bfloat16())


@EACH_KERNEL
def test_a_weight_written_in_place_by_the_call_before_is_read_when_it_stands(provider: str) -> None:
    n, k = 8192, 4096
    x = torch.randint(-2, 3, (4, k), device="cuda").bfloat16()
    weight = torch.ones(k, device="cuda", dtype=torch.bfloat16)
    spec = str(GemmSpec(Dense(n, k), Epilogue(()), torch.bfloat16))
    for _ in range(8):
        added, w = (torch.randint(-2, 3, (n, k), device="cuda").bfloat16() for _ in range(2))
        total = added + w
        with fusedops.use_provider("cuda"):
            fusedops.fused_add_rms_norm_(added, w, weight)
        with fusedops.use_provider(provider):
            y = op(x, w, [], spec)[0]
        assert torch.equal(w, total)
        assert torch.equal(y, (x.double() @ total.double().t()).bfloat16())


@EACH_PROVIDER
@pytest.mark.parametrize("n", [384, 1024])
def test_b28_replays_equal_eager_whatever_memory_held(provider: str, n: int) -> None:
    """K = 7168 splits over CTAs; memory is dirtied and another stream launches in between."""
    case = make_case("bias|residual", 4, n, 7168, torch.bfloat16, device="cuda")
    other = make_case("bias|residual", 4, n, 7168, torch.bfloat16, seed=1, device="cuda")
    with fusedops.use_provider(provider):
        eager = [run(provider, each)[0].clone() for each in (case, other)]
        first, one = captured(lambda: op(case.x, case.w, case.operands, case.text))
        pool = first.pool()
        second, two = captured(lambda: op(other.x, other.w, other.operands, other.text), pool)
        for replay in range(200):
            if replay % 20 == 0:
                dirt = torch.empty(32 << 20, dtype=torch.uint8, device="cuda").fill_(0xFF)
                del dirt
                for result in (*one, *two):
                    result.fill_(float("nan"))
            first.replay()
            got = one[0].clone()
            second.replay()
            assert torch.equal(got, eager[0])
            assert torch.equal(two[0], eager[1])


@EACH_PROVIDER
def test_b28_an_aborted_capture_leaves_the_kernel_usable(provider: str) -> None:
    case = make_case("bias", 4, 1024, 7168, torch.bfloat16, device="cuda")
    expected = run(provider, case)[0]

    def aborted() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            op(case.x, case.w, case.operands, case.text)
            raise RuntimeError("stop the capture")

    with fusedops.use_provider(provider):
        with pytest.raises(RuntimeError, match="stop the capture"):
            aborted()
        graph, results = captured(lambda: op(case.x, case.w, case.operands, case.text))
        for _ in range(3):
            results[0].fill_(float("nan"))
            graph.replay()
            assert torch.equal(results[0], expected)
    assert torch.equal(run(provider, case)[0], expected)


COLD_CAPTURE = """
import sys
import torch
import fusedops
from fusedops.errors import KernelMissingError

provider = sys.argv[1]
x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
w = torch.ones(48, 64, device="cuda", dtype=torch.bfloat16)
with fusedops.use_provider(provider) as usage:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.mul_(1)
            fusedops.gemm(x, w, "softcap(100.0)")
    except KernelMissingError as error:
        assert "warm-up call" in str(error), error
        print("refused")
    eager = fusedops.gemm(x, w, "softcap(100.0)")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fusedops.gemm(x, w, "softcap(100.0)")
    result.zero_()
    graph.replay()
    assert torch.equal(result, eager)
    assert usage.count("gemm", provider) >= 2
print("captured")
"""


@EACH_KERNEL
def test_b30_the_first_call_of_a_process_in_a_capture_is_refused(
    provider: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "FUSEDOPS_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COLD_CAPTURE, provider]
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert answer.stdout.split() == ["refused", "captured"], answer.stderr


@EACH_KERNEL
def test_b33_threads_with_streams_of_their_own_share_a_cold_kernel(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 0 compiles, once for all threads; each round has a new shape and plan."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    clear_plans()
    errors: list[BaseException] = []
    for round_number in range(20):
        case = whole("bias|residual", 1 + round_number % 7, 64 + 16 * round_number, 128, DTYPES[0])
        expected = exact(case)
        torch.cuda.synchronize()
        barrier = threading.Barrier(8)

        def work(
            case: Case = case, expected: Tensor = expected, barrier: threading.Barrier = barrier
        ) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    barrier.wait(timeout=60)
                    result = run(provider, case)[0]
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(result, expected)
            except BaseException as error:  # noqa: BLE001 - asserted on below
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
    kernels = len(default_store()._memory)
    assert default_store().counts["compiled"] == kernels >= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EACH_PROVIDER
@EACH_M
def test_b35_tensors_on_the_second_gpu_run_there(provider: str, m: int) -> None:
    case = make_case("bias|residual", m, 64, 128, DTYPES[0], integers=True, device="cuda:1")
    with torch.cuda.device(0):
        result = run(provider, case)[0]
        assert torch.cuda.current_device() == 0
    assert result.device == torch.device("cuda:1")
    assert torch.equal(result, exact(case))


@EACH_PROVIDER
def test_b39_a_compiled_block_has_no_graph_break_and_keeps_its_effects(provider: str) -> None:
    hidden, inner = 64, 128
    generator = torch.Generator().manual_seed(39)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).to("cuda", torch.bfloat16)

    # Parameters keep static shapes under dynamic=True, as those of a module do.
    weight, up, down = (
        torch.nn.Parameter(normal(*shape), requires_grad=False)
        for shape in ((hidden,), (2 * inner, hidden), (hidden, inner))
    )

    def block(x: Tensor, residual: Tensor) -> Tensor:
        fusedops.fused_add_rms_norm_(x, residual, weight)
        middle = fusedops.gemm(x, up, "gate")
        out = fusedops.gemm(middle, down, "residual", [residual])
        assert isinstance(out, Tensor)
        return out * 2

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 100):
        x, residual = normal(rows, hidden), normal(rows, hidden)
        ours, eager = [x.clone(), residual.clone()], [x.clone(), residual.clone()]
        with fusedops.use_provider(provider, strict=False) as usage:
            got, expected = compiled(*ours), block(*eager)
        assert usage.count("gemm", provider) == 4
        for one, other in zip((got, *ours), (expected, *eager), strict=True):
            assert torch.equal(one, other)


@EACH_PROVIDER
@EACH_M
def test_b43_bias_shapes(provider: str, m: int) -> None:
    case = whole("bias", m, 48, 64, torch.bfloat16)
    bias = case.operands[0]
    assert bias is not None
    for shape in ((48,), (1, 48)):
        viewed = Case(case.spec, case.x, case.w, [bias.view(shape)])
        assert torch.equal(run(provider, viewed)[0], exact(case))
    for refused in ((m, 48), (m, 1), (1,), (), (49,), (48, 1)):
        wrong = Case(case.spec, case.x, case.w, [torch.zeros(refused, device="cuda")])
        with pytest.raises(ShapeError, match="operand 'bias' has shape"):
            run(provider, wrong)


@EACH_KERNEL
def test_b56_b62_processes_share_one_compilation(provider: str, tmp_path: Path) -> None:
    """Four processes with hash seeds of their own start cold on one folder; a fifth starts warm."""
    code = """
import sys
import torch
import fusedops
from fusedops.jit.store import default_store

x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
with fusedops.use_provider(sys.argv[1]):
    result = fusedops.gemm(x, x[:1].expand(48, 64).contiguous(), "softcap(128.0)")
assert result.isfinite().all()
print(default_store().counts["compiled"])
"""

    def start(seed: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "FUSEDOPS_CACHE_DIR": str(tmp_path)}
        environment["PYTHONHASHSEED"] = str(seed)
        return subprocess.Popen(
            [sys.executable, "-c", code, provider],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )

    processes = [start(seed) for seed in range(4)]
    cold = [process.communicate(timeout=400) for process in processes]
    assert sorted(out.strip() for out, _ in cold) == ["0", "0", "0", "1"], cold
    out, log = start(99).communicate(timeout=400)
    assert out.strip() == "0", log


def test_mixed_devices_are_refused_before_any_launch() -> None:
    case = whole("bias", 4, 48, 64, torch.bfloat16)
    bias = case.operands[0]
    assert bias is not None
    for wrong in (
        Case(case.spec, case.x.cpu(), case.w, [bias]),
        Case(case.spec, case.x, case.w.cpu(), [bias]),
        Case(case.spec, case.x, case.w, [bias.cpu()]),
    ):
        with pytest.raises(fusedops.DeviceError, match="move both to one device"):
            op(wrong.x, wrong.w, wrong.operands, wrong.text)
    assert_gpu_still_works()


@pytest.mark.gpu_large
@EACH_KERNEL
def test_more_than_2_to_the_31_results(provider: str) -> None:
    """(65552, 32832): the result's last element lies behind 2^31 elements."""
    m, n, k = 65552, 32832, 64
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(rows: int) -> Tensor:
        whole = torch.randint(-2, 3, (rows, k), generator=generator, device="cuda")
        return whole.to(torch.bfloat16)

    spec = GemmSpec.parse(f"none > dense({n},{k}) > none > bf16")
    case = Case(spec, draw(m), draw(n), [])
    result = run(provider, case)[0]
    assert result.numel() > 2**31
    for rows in (slice(0, 3), slice(m // 2, m // 2 + 3), slice(m - 16, m)):
        expected = (case.x[rows].float() @ case.w.float().t()).to(torch.bfloat16)
        assert torch.equal(result[rows], expected)
