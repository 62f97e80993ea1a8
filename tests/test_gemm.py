"""``fusedops::gemm``: registration, checks, providers, layouts, empty sizes, ``out=``, explain."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, make_case
from torch import Tensor

import fusedops
from fusedops.errors import (
    ConfigError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import RmsNormPrologue
from fusedops.providers.base import (
    SUPPORTED,
    Policy,
    choose,
    current_policy,
    not_applicable,
    unpinned,
    unsupported,
)
from fusedops.providers.front import with_prologue_ahead
from fusedops.weight import Dense, float_product, in_blocks

gemm_op = torch.ops.fusedops.gemm.default
gemm_out_op = torch.ops.fusedops.gemm_out.default


@pytest.mark.parametrize("chain", [*CHAINS, *QUANTIZING])
def test_opcheck(chain: str) -> None:
    case = make_case(chain, 3, 32, 16, torch.bfloat16)
    torch.library.opcheck(gemm_op, (case.x, case.w, case.operands, case.text))


@pytest.mark.parametrize("chain", ["bias|act(silu)", "gate|row_stat", "quantize(int8,group128)"])
def test_opcheck_of_the_out_variant(chain: str) -> None:
    case = make_case(chain, 3, 32, 16, torch.bfloat16)
    out = case.spec.allocate(case.x)
    torch.library.opcheck(gemm_out_op, (case.x, case.w, case.operands, case.text, out))


@pytest.mark.parametrize("chain", ["none", "bias|gate|residual", "tap|act(gelu)|row_stat"])
def test_compiled_equals_eager_with_a_dynamic_m(chain: str) -> None:
    case = make_case(chain, 4, 32, 16)
    w, text = case.w, case.text

    def block(x: Tensor, operands: list[Tensor | None]) -> Tensor:
        results = gemm_op(x, w, operands, text)
        return results[0] * 2

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (4, 1, 9):
        other = make_case(chain, m, 32, 16, seed=m)
        assert torch.equal(compiled(other.x, other.operands), block(other.x, other.operands))


def test_out_variant_keeps_its_effect_when_compiled() -> None:
    case = make_case("bias", 4, 32, 16)
    w, operands, text = case.w, case.operands, case.text

    def block(x: Tensor) -> Tensor:
        out = torch.zeros(4, 32)
        gemm_out_op(x, w, operands, text, [out])
        return out + 1

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    expected = gemm_op(case.x, case.w, case.operands, case.text)[0] + 1
    assert torch.equal(compiled(case.x), expected)


def test_epilogue_object_and_text_are_one_under_compile() -> None:
    x, w, b = torch.randn(2, 16), torch.randn(32, 16), torch.randn(32)
    compiled = torch.compile(
        lambda t: fusedops.gemm(t, w, "bias|act(silu)", {"bias": b}),
        backend="aot_eager",
        fullgraph=True,
    )
    epilogue = fusedops.Epilogue.parse("bias|act(silu)")
    assert torch.equal(compiled(x), fusedops.gemm(x, w, epilogue, [b]))


@pytest.mark.parametrize("integers_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integer_inputs_are_exact(integers_dtype: torch.dtype) -> None:
    case = make_case("bias|residual", 33, 48, 65, integers_dtype, integers=True)
    result = gemm_op(case.x, case.w, case.operands, case.text)[0]
    bias, residual = case.operands
    assert bias is not None
    assert residual is not None
    exact = case.x.double() @ case.w.double().t() + bias.double() + residual.double()
    assert torch.equal(result.double(), exact)


def test_int8_accumulates_exactly_past_float32() -> None:
    x = torch.full((2, 4096), 127, dtype=torch.int8)
    w = torch.full((3, 4096), 127, dtype=torch.int8)
    w[1, 0] = 126
    result = fusedops.gemm(x, w, out_dtype=torch.float32)
    exact = (x.double() @ w.double().t()).float()
    assert torch.equal(result, exact)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_b20_scale_comes_before_the_cast(kind: torch.dtype) -> None:
    x = torch.full((4, 4096), 8.0).to(kind)
    w = torch.full((16, 4096), 4.0).to(kind)
    scale = torch.tensor(2.0**-10)
    result = fusedops.gemm(x, w, "scale", {"scale": scale}, out_dtype=torch.float16)
    assert torch.equal(result, torch.full((4, 16), 128.0, dtype=torch.float16))


@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 705, 705), (36, 36, 64), (1, 1, 1), (17, 33, 65)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b08_odd_sizes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    case = make_case("none", m, n, k, dtype)
    result = gemm_op(case.x, case.w, [], case.text)[0]
    expected = (case.x.float() @ case.w.float().t()).to(dtype)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_unaligned_views_equal_their_clones(offset: int) -> None:
    def view(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.randn(count + 8, dtype=torch.bfloat16)[offset : offset + count].view(shape)

    x, w, bias, residual = view(5, 24), view(16, 24), view(16), view(5, 16)
    operands = {"bias": bias, "residual": residual}
    result = fusedops.gemm(x, w, "bias|residual", operands)
    clones = {name: tensor.clone() for name, tensor in operands.items()}
    assert torch.equal(result, fusedops.gemm(x.clone(), w.clone(), "bias|residual", clones))


def test_strided_rows_and_batches() -> None:
    wide = torch.randn(2, 3, 100)
    x = wide[..., 10:74]
    w = torch.randn(40, 128)[:, 64:]
    bias = torch.randn(40)
    result = fusedops.gemm(x, w, "bias|tap", {"bias": bias})
    expected = torch.nn.functional.linear(x, w, bias)
    assert result[0].shape == (2, 3, 40)
    assert result[1].shape == (2, 3, 40)
    torch.testing.assert_close(result[0], expected)
    vector = fusedops.gemm(x[0, 0], w)
    assert vector.shape == (40,)
    torch.testing.assert_close(vector, x[0, 0] @ w.t())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 8), (3, 0, 8), (3, 16, 0), (0, 0, 0)])
def test_b04_empty_sizes(m: int, n: int, k: int) -> None:
    case = make_case("bias|act(silu)|row_stat(absmax)", m, n, k)
    result, absmax = gemm_op(case.x, case.w, case.operands, case.text)
    assert result.shape == (m, n)
    assert absmax.shape == (1, m)
    if k == 0 and n:
        assert case.operands[0] is not None
        expected = torch.nn.functional.silu(case.operands[0]).expand(m, n)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("shape", [(8,), (1, 8)])
def test_b43_bias_shapes_that_are_accepted(shape: tuple[int, ...]) -> None:
    x, w, bias = torch.randn(5, 4), torch.randn(8, 4), torch.randn(8)
    result = fusedops.gemm(x, w, "bias", {"bias": bias.view(shape)})
    torch.testing.assert_close(result, torch.nn.functional.linear(x, w, bias))


@pytest.mark.parametrize("shape", [(5, 8), (5, 1), (1,), (), (9,), (8, 1)])
def test_b43_bias_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(5, 4), torch.randn(8, 4)
    with pytest.raises(ShapeError, match=r"operand 'bias' has .*accepted: \(8,\) or \(1, 8\)"):
        fusedops.gemm(x, w, "bias", {"bias": torch.randn(shape)})


def test_b14_out_with_a_row_pitch_leaves_its_neighbours_alone() -> None:
    case = make_case("bias|residual", 5, 16, 8, torch.bfloat16)
    big = torch.full((7, 24), 1234.0, dtype=torch.bfloat16)
    view = big[1:6, 4:20]
    expected = gemm_op(case.x, case.w, case.operands, case.text)[0]
    gemm_out_op(case.x, case.w, case.operands, case.text, [view])
    assert torch.equal(view, expected)
    view.fill_(1234.0)
    assert (big == 1234.0).all()


def test_b14_out_of_another_layout_is_refused_and_untouched() -> None:
    x, w = torch.randn(5, 8), torch.randn(16, 8)
    transposed = torch.full((16, 5), 1234.0).t()
    overlapping = torch.full((32,), 1234.0).as_strided((5, 16), (4, 1))
    for out in (transposed, overlapping):
        with pytest.raises(LayoutError, match="Nothing was written"):
            fusedops.gemm(x, w, out=out)
        assert (out == 1234.0).all()
    with pytest.raises(ShapeError, match=r"accepted: \(5, 16\)"):
        fusedops.gemm(x, w, out=torch.empty(4, 16))
    with pytest.raises(DTypeError, match="out has dtype"):
        fusedops.gemm(x, w, out=torch.empty(5, 16, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="got 2 output"):
        fusedops.gemm(x, w, out=[torch.empty(5, 16), torch.empty(5, 16)])


def test_out_takes_any_one_pitch_over_all_rows() -> None:
    x, w = torch.randn(4, 1, 8), torch.randn(8, 8)
    between = torch.zeros(4, 2, 8)
    fusedops.gemm(x, w, out=between[:, :1])
    torch.testing.assert_close(between[:, :1], x @ w.T)
    assert not between[:, 1:].any()
    overlapping = torch.zeros(11).as_strided((4, 1, 8), (1, 1, 1))
    with pytest.raises(LayoutError, match="one pitch of at least N"):
        fusedops.gemm(x, w, out=overlapping)
    with pytest.raises(LayoutError, match="one pitch"):
        fusedops.gemm(torch.randn(2, 3, 8), w, out=torch.zeros(2, 4, 8)[:, :3])
    fusedops.gemm(x, w)
    with pytest.raises(ShapeError, match=r"got 0 output\(s\)"):
        fusedops.gemm(x, w, out=[])


def test_only_a_residual_may_be_updated_in_place() -> None:
    x, w, bias, weight = (torch.randn(*shape) for shape in ((1, 8), (8, 8), (1, 8), (1, 8)))
    with pytest.raises(LayoutError, match="operand 0"):
        fusedops.gemm(x, w, "bias", [bias], out=bias)
    with pytest.raises(LayoutError, match="operand 0"):
        fusedops.gemm(x, w, None, [weight, None], prologue="rms_norm", out=weight)


@pytest.mark.parametrize("chain", ["tap", "tap|tap(again)", "tap|act(identity)", "residual|tap"])
def test_no_two_results_share_memory(chain: str) -> None:
    case = make_case(chain, 4, 16, 8)
    torch.library.opcheck(gemm_op, (case.x, case.w, case.operands, case.text))
    results = gemm_op(case.x, case.w, case.operands, case.text)
    kept = [result.clone() for result in results[1:]]
    results[0].zero_()
    for one, two in zip(results[1:], kept, strict=True):
        assert torch.equal(one, two)


def test_a_residual_of_no_columns() -> None:
    result = fusedops.gemm(torch.randn(4, 8), torch.randn(0, 8), "residual", [torch.randn(4, 0)])
    assert result.shape == (4, 0)


def test_group_scales_of_three_dimensions_have_the_strides_that_are_documented() -> None:
    x, w = torch.randn(3, 1, 16), torch.randn(16, 16)
    results = fusedops.gemm(x, w, "quantize(int8,group128)")
    assert results[1].stride() == (4, 1)
    again = fusedops.gemm(
        x, w, "quantize(int8,group128)", out=[t.clone() for t in results[:1]] + [results[1]]
    )
    assert torch.equal(again[0], results[0])


def test_out_may_be_the_residual_but_not_an_input() -> None:
    x, w, residual = torch.randn(4, 16), torch.randn(16, 16), torch.randn(4, 16)
    expected = fusedops.gemm(x, w, "residual", {"residual": residual})
    fusedops.gemm(x, w, "residual", {"residual": residual}, out=residual)
    assert torch.equal(residual, expected)
    with pytest.raises(LayoutError, match="shares memory with x"):
        fusedops.gemm(x, w, out=x)


def test_errors_name_what_was_got() -> None:
    x, w = torch.randn(5, 8), torch.randn(16, 8)
    with pytest.raises(ShapeError, match="last dimension must be K=8"):
        fusedops.gemm(torch.randn(5, 7), w)
    with pytest.raises(ShapeError, match=r"w has shape \(16,\)"):
        fusedops.gemm(x, w[:, 0])
    with pytest.raises(DTypeError, match="x is bfloat16 and w is float32"):
        fusedops.gemm(x.bfloat16(), w)
    with pytest.raises(DTypeError, match="float64"):
        fusedops.gemm(x.double(), w.double(), out_dtype=torch.float32)
    with pytest.raises(LayoutError, match="K must be contiguous"):
        fusedops.gemm(torch.randn(8, 5).t(), w)
    with pytest.raises(LayoutError, match="K must be contiguous"):
        fusedops.gemm(x, torch.randn(8, 16).t())
    with pytest.raises(ShapeError, match="operand 'bias' is missing"):
        fusedops.gemm(x, w, "bias")
    with pytest.raises(ConfigError, match="unknown operand"):
        fusedops.gemm(x, w, "bias", {"bias": w[:, 0], "biass": w[:, 0]})
    with pytest.raises(ShapeError, match="needs 1: bias; missing: bias"):
        fusedops.gemm(x, w, "bias", [])
    with pytest.raises(DTypeError, match="operand 'scale' has dtype bfloat16"):
        fusedops.gemm(x, w, "scale", {"scale": torch.tensor(1.0).bfloat16()})
    with pytest.raises(ShapeError, match="multiple of 16"):
        fusedops.gemm(x, torch.randn(24, 8), "gate")
    with pytest.raises(fusedops.DeviceError, match="move both to one device"):
        fusedops.gemm(x, w.to("meta"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none > dense(16,8) > none", "has 3 parts"),
        ("none > sparse(16,8) > none > f32", "unknown weight format 'sparse'"),
        ("norm > dense(16,8) > none > f32", "unknown prologue 'norm'"),
        ("none > dense(16,8) > none > f64", "unknown dtype 'f64'"),
        ("none > dense(16,8) > quantize > f32", "write e4m3"),
        ("none > dense(-1,8) > none > f32", "must not be negative"),
        ("rms_norm > dense(16,8) > bias(norm_weight) > f32", "norm_weight twice"),
    ],
)
def test_bad_specs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GemmSpec.parse(text)
    assert message in str(caught.value)


def test_gradients_are_refused() -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="inference only"):
        fusedops.gemm(x, w)
    with torch.no_grad():
        fusedops.gemm(x, w)
    with torch.inference_mode():
        fusedops.gemm(x, w)


@pytest.mark.parametrize("order", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_prologue(order: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 64).to(dtype), torch.randn(32, 64).to(dtype)
    weight = (1 + 0.1 * torch.randn(64)).to(dtype)
    prologue = RmsNormPrologue(1e-5, order, 1.0 if order == "gemma" else 0.0)
    operands = {"norm_weight": weight, "norm_sumsq": None}
    result = fusedops.gemm(x, w, operands=operands, prologue=prologue)
    apart = fusedops.rms_norm(
        x,
        weight,
        1e-5,
        weight_offset=prologue.weight_offset,
        round_before_weight=order == "llama",
    )
    torch.testing.assert_close(result, fusedops.gemm(apart, w), rtol=1e-5, atol=1e-5)
    partial = torch.zeros(3, 5)
    partial[0] = x[:, :40].float().square().sum(1)
    partial[2] = x[:, 40:].float().square().sum(1)
    given = fusedops.gemm(
        x, w, operands={"norm_weight": weight, "norm_sumsq": partial}, prologue=prologue
    )
    torch.testing.assert_close(given, result, rtol=1e-2, atol=1e-2)


def test_a_prologue_runs_ahead_of_a_kernel_without_it_and_explain_says_so() -> None:
    x, w, weight = torch.randn(2, 3, 16), torch.randn(8, 16), torch.rand(16)
    operands = {"norm_weight": weight}
    prologue = RmsNormPrologue(1e-5)
    with fusedops.use_provider("reference") as usage:
        result = fusedops.gemm(x, w, "act(silu)", operands, prologue=prologue)
    assert usage.count("gemm", "reference") == 1
    apart = fusedops.gemm(fusedops.rms_norm(x, weight, 1e-5), w, "act(silu)")
    assert torch.equal(result, apart)
    explanation = fusedops.explain(x, w, "act(silu)", operands, prologue=prologue)
    assert explanation.plan.startswith(f"{prologue} ahead, then ")


def test_a_pin_for_the_product_does_not_bind_the_norm_ahead_of_it() -> None:
    with fusedops.use_provider("cublas") as usage:
        with pytest.raises(UnsupportedError):
            fusedops.rms_norm(torch.ones(2, 4), torch.ones(4))
        with unpinned():
            fusedops.rms_norm(torch.ones(2, 4), torch.ones(4))
    assert usage.count("rms_norm", "reference") == 1


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_norm_ahead_on_a_gpu_takes_what_the_spec_accepts(
    weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of CUDA problems, whose norm is an operation of its own, on CPU tensors."""
    x, weight = torch.randn(3, 16).bfloat16(), torch.rand(1, 16).to(weight_dtype)
    spec = GemmSpec(Dense(8, 16), prologue=RmsNormPrologue(1e-5))
    problem = GemmProblem(spec, 3, x.dtype, (weight_dtype, None), device_type="cuda")
    seen: list[Tensor] = []

    def run(x: Tensor, w: Tensor, operands: Any, out: Any) -> list[Tensor]:
        seen.append(x)
        return [x]

    with_prologue_ahead(problem, run)(x, torch.empty(8, 16), [weight, None], None)
    context = spec.context([weight, None], 3)
    assert torch.equal(seen[0], spec.prologue.reference(x, context))


def test_pinned_provider_runs_and_is_counted() -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    with fusedops.use_provider("reference") as usage:
        fusedops.gemm(x, w)
    assert usage.count("gemm", "reference") == 1
    with (
        fusedops.use_provider("cublas"),
        pytest.raises(UnsupportedError, match="runs on CUDA tensors") as caught,
    ):
        fusedops.gemm(x, w)
    assert set(caught.value.reasons) == {"cublas", "cutlass", "cutlass_sm80"}
    with fusedops.use_provider("cublas", strict=False) as usage:
        fusedops.gemm(x, w)
    assert usage.count("gemm", "reference") == 1
    with (
        pytest.raises(ConfigError, match="unknown provider 'cublast'"),
        fusedops.use_provider("cublast"),
    ):
        pass


def test_selection_order_reasons_and_strict_mode() -> None:
    answers = {"cutlass": unsupported("K too odd"), "reference": SUPPORTED}
    assert choose("gemm", answers.get, Policy()) == "reference"
    with pytest.raises(UnsupportedError, match="strict mode") as caught:
        choose("gemm", answers.get, Policy(strict=True))
    assert caught.value.reasons == {"cutlass": "K too odd"}
    elsewhere = {"cutlass": not_applicable("runs on CUDA tensors"), "reference": SUPPORTED}
    assert choose("gemm", elsewhere.get, Policy(strict=True)) == "reference"
    with pytest.raises(UnsupportedError, match="no provider serves"):
        choose("gemm", {"cutlass": unsupported("K too odd")}.get, Policy())


def test_environment_pins_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.providers import base

    monkeypatch.setattr(base, "_environment_policy", None)
    monkeypatch.setenv("FUSEDOPS_PROVIDER", "reference")
    monkeypatch.setenv("FUSEDOPS_STRICT", "1")
    assert current_policy() == Policy("reference", strict=True)
    monkeypatch.setattr(base, "_environment_policy", None)
    monkeypatch.setenv("FUSEDOPS_PROVIDER", "fastest")
    with pytest.raises(ConfigError, match="FUSEDOPS_PROVIDER"):
        current_policy()


def test_explain_says_who_runs_and_why_not_the_others() -> None:
    x, w, b = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16)
    explanation = fusedops.explain(x, w, "bias|act(silu)", {"bias": b})
    assert explanation.provider == "reference"
    assert explanation.passed_over == {
        "cutlass": "runs on CUDA tensors, got cpu",
        "cublas": "runs on CUDA tensors, got cpu",
        "cutlass_sm80": "runs on CUDA tensors, got cpu",
    }
    text = str(explanation)
    assert "none > dense(16,8) > bias|act(silu) > f32" in text
    assert "M=5 N=16 K=8 on cpu" in text
    with pytest.raises(ShapeError):
        fusedops.explain(x, w, "bias", {"bias": b[:3]})
    by_shape = fusedops.explain_problem(5, 16, 8, epilogue="bias|act(silu)", dtype=torch.float32)
    assert by_shape.spec == explanation.spec
    with pytest.raises(ConfigError, match="accepted are integers >= 0"):
        fusedops.explain_problem(-1, 2, 3)


def test_problem_counts_bytes_and_flops() -> None:
    spec = GemmSpec.parse("none > dense(4096,14336) > residual > bf16")
    problem = GemmProblem(spec, 16, torch.bfloat16, (torch.bfloat16,), "cuda", 132)
    assert problem.flops == 2 * 16 * 4096 * 14336
    assert problem.minimum_bytes == 2 * (4096 * 14336 + 16 * 14336 + 16 * 4096)


def test_threads_share_plans() -> None:
    x, w = torch.randn(4, 32), torch.randn(48, 32)
    expected = fusedops.gemm(x, w, "act(silu)")
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(fusedops.gemm(x, w, "act(silu)"), expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("rows", [3, 4, 12, 13])
@pytest.mark.parametrize(("n", "k"), [(512, 512), (4096, 64), (32, 8192), (500, 600)])
def test_products_in_blocks_are_products(rows: int, n: int, k: int) -> None:
    x, w = torch.randn(rows, k), torch.randn(n, k)
    assert in_blocks(rows, n, k) == (4 <= rows <= 12 and n in (512, 4096))
    exact = x.double() @ w.double().T
    torch.testing.assert_close(float_product(x, w).double(), exact, rtol=0, atol=2e-4)
