"""batch_invariant: a row's result does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.config import decode_tiles, prefill_tiles
from fusedops.errors import ConfigError, UnsupportedError
from fusedops.gemm import explain_problem
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.cutlass import choose_candidate

CHAIN = "bias|act(gelu)|residual"


def inputs(m: int, dtype: torch.dtype, n: int = 96, k: int = 520) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(m)
    shapes = ((m, k), (n, k), (n,), (m, n))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def product(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    y = fusedops.gemm(x, w, CHAIN, [bias, residual], batch_invariant=True)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_the_rows_beside_them(dtype: torch.dtype) -> None:
    x, w, bias, residual = inputs(67, dtype)
    whole = product(x, w, bias, residual)
    for first, last in ((0, 1), (3, 5), (8, 24), (60, 67)):
        part = product(x[first:last], w, bias, residual[first:last])
        assert torch.equal(part, whole[first:last])
    plain = fusedops.gemm(x, w, CHAIN, [bias, residual])
    assert isinstance(plain, Tensor)
    torch.testing.assert_close(whole, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("n", [1, 7, 15, 17, 31, 100, 513])
@pytest.mark.parametrize(
    "chain",
    [
        *(f"act({f})" for f in ("silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid")),
        "bias|tap(mid,f32)|act(silu)|quantize(e4m3,group128)",
        "softcap(30.0)|residual",
    ],
)
def test_functions_do_not_depend_on_the_place_in_the_tensor(chain: str, n: int) -> None:
    x, w, bias, residual = inputs(9, torch.bfloat16, n, 40)
    operands = {"bias": bias, "residual": residual}

    def results(first: int, last: int) -> list[Tensor]:
        given = {
            name: tensor if name == "bias" else tensor[first:last]
            for name, tensor in operands.items()
            if name in chain
        }
        rows = x[first:last].view(1, last - first, -1)
        y = fusedops.gemm(rows, w, chain, _shaped(given, last - first), batch_invariant=True)
        return [y] if isinstance(y, Tensor) else list(y)

    whole = results(0, 9)
    for first, last in ((0, 1), (2, 4), (3, 9)):
        for of_all, of_part in zip(whole, results(first, last), strict=True):
            # Scales of groups have their rows last.
            is_scale = of_all.dim() == 2
            rows = of_all[:, first:last] if is_scale else of_all[:, first:last, :]
            assert torch.equal(rows.float(), of_part.float())


def _shaped(operands: dict[str, Tensor], m: int) -> dict[str, Tensor]:
    """A residual as the result's leading dimensions are."""
    return {k: v.view(1, m, -1) if v.dim() == 2 else v for k, v in operands.items()}


def test_one_is_not_true_whatever_was_called_before() -> None:
    x, w, _, _ = inputs(2, torch.float32)
    fusedops.gemm(x, w, batch_invariant=True)
    for value in (1, [], 2, "yes"):
        with pytest.raises(ConfigError, match="batch_invariant is"):
            fusedops.gemm(x, w, batch_invariant=value)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="batch_invariant is"):
            explain_problem(3, 6, 8, batch_invariant=value)  # type: ignore[arg-type]


def test_no_rows() -> None:
    assert product(*inputs(0, torch.float32)).shape == (0, 96)


def test_the_text_says_it() -> None:
    spec = GemmSpec.parse("none > dense(64,32) > bias > bf16 > batch_invariant")
    assert spec.batch_invariant
    assert str(spec) == "none > dense(64,32) > bias > bf16 > batch_invariant"
    assert GemmSpec.parse("none > dense(64,32) > bias > bf16") != spec
    with pytest.raises(ConfigError, match="has 5 parts"):
        GemmSpec.parse("none > dense(64,32) > bias > bf16 > fast")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none > dense(64,32) > residual|row_stat > bf16", "partial results"),
        ("rms_norm(1e-05) > dense(64,32) > bias > bf16", "depend on M"),
    ],
)
def test_what_depends_on_m_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        GemmSpec.parse(f"{text} > batch_invariant")


@pytest.mark.parametrize("value", [1, "yes", None, [True]])
def test_other_values_are_refused(value: object) -> None:
    x, w, _, _ = inputs(3, torch.float32)
    with pytest.raises(ConfigError, match="batch_invariant is"):
        fusedops.gemm(x, w, batch_invariant=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [1, 16, 64, 128, 256, 4096])
def test_kernels_never_split_k(m: int) -> None:
    split = {tile.name for tile in (*decode_tiles(), *prefill_tiles()) if tile.split > 1}
    for n, k in ((4096, 4096), (2048, 8192), (1280, 8192), (28672, 4096)):
        spec = GemmSpec.parse(f"none > dense({n},{k}) > none > bf16 > batch_invariant")
        bf16 = torch.bfloat16
        problem = GemmProblem(spec, m, bf16, (), "cuda", 132, 16, "sm_90a", "NVIDIA H200")
        assert choose_candidate(problem).name not in split


def test_a_provider_that_cannot_says_so() -> None:
    x, w, bias, residual = inputs(4, torch.float32)
    with fusedops.use_provider("cublas"), pytest.raises(UnsupportedError):
        product(x, w, bias, residual)


def test_explain_and_compile_take_it() -> None:
    x, w, bias, residual = inputs(5, torch.float32)
    explanation = fusedops.explain(x, w, CHAIN, [bias, residual], batch_invariant=True)
    assert explanation.spec.batch_invariant
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w, bias, residual), product(x, w, bias, residual))
