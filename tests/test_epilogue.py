"""Epilogue chains: text form, shape and dtype rules, reference against float64 formulas, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import gemm_oracle
import numpy as np
import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedops
from fusedops.epilogue import (
    Act,
    Bias,
    Context,
    Epilogue,
    ExtraOutput,
    Gate,
    Node,
    Operand,
    Quantize,
    Residual,
    RowStat,
    Scale,
    SoftCap,
    Tap,
)
from fusedops.epilogue.activations import ACTIVATIONS, activation, activation_from_hf
from fusedops.epilogue.base import FLOAT32_ROUNDOFF, to_dtype
from fusedops.epilogue.chain import forget_parsed
from fusedops.errors import ConfigError, ShapeError
from fusedops.problem import GemmSpec

FUNCTIONS = tuple(ACTIVATIONS)
floats = st.floats(min_value=0.01, max_value=1000, allow_nan=False)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
value_nodes = st.one_of(
    st.builds(Scale, names, st.sampled_from(["scalar", "m", "n"])),
    st.builds(Bias, names),
    st.builds(Act, st.sampled_from(FUNCTIONS)),
    st.builds(Gate, st.sampled_from(FUNCTIONS)),
    st.builds(Residual, floats, names),
    st.builds(SoftCap, floats),
    st.builds(Tap, names, st.sampled_from(["out", "f32", "bf16"])),
    st.builds(RowStat, st.sampled_from(["sumsq", "absmax"]), st.integers(1, 256)),
)
last_node = st.one_of(
    st.just(()),
    st.tuples(
        st.builds(
            Quantize, st.sampled_from(["e4m3", "int8"]), st.sampled_from(["scalar", "group128"])
        )
    ),
)


def _names_differ(nodes: tuple[Node, ...]) -> bool:
    used = [operand.name for node in nodes for operand in node.operands()]
    written = [output.name for node in nodes for output in node.extra_outputs()]
    return len(used) == len(set(used)) and len(written) == len(set(written))


chains = st.tuples(st.lists(value_nodes, max_size=5), last_node).map(lambda t: (*t[0], *t[1]))


@given(chains.filter(_names_differ))
@settings(max_examples=100, deadline=None)
def test_text_round_trip(nodes: tuple[Node, ...]) -> None:
    epilogue = Epilogue(nodes)
    assert Epilogue.parse(str(epilogue)) == epilogue
    assert str(Epilogue.parse(str(epilogue))) == str(epilogue)


@pytest.mark.parametrize("text", [*CHAINS, *QUANTIZING])
def test_canonical_text_is_a_fixed_point(text: str) -> None:
    canonical = str(Epilogue.parse(text))
    assert str(Epilogue.parse(canonical)) == canonical


def test_documented_example_is_canonical() -> None:
    text = "scale(x_scale,m)|scale(w_scale,n)|bias|act(silu)|residual"
    assert str(Epilogue.parse(text)) == text
    assert str(Epilogue.parse(f" {text.replace('|', ' | ')} ")) == text
    assert str(Epilogue()) == "none"
    assert Epilogue.parse("none") == Epilogue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swish", "unknown epilogue node 'swish'"),
        ("bias|", "empty part"),
        ("", "is blank; accepted: nodes joined"),
        (" ", "is blank"),
        ("bias(1)", "operand name '1'; accepted: an identifier"),
        ("tap(1)", "extra output name '1'"),
        ("tap(a)|act(relu)|tap(a)", "extra output(s) a written twice"),
        ("tap(a,int32)", "unknown dtype 'int32' in a spec; accepted: f32, bf16, f16, e4m3, int8."),
        ("bias((", "malformed"),
        ("scale(s,k)", "axis 'k'"),
        ("bias|bias", "used twice"),
        ("quantize|bias", "must come last"),
        ("act(swoosh)", "unknown activation 'swoosh'"),
        ("act(silu,relu)", "takes at most 1"),
        ("residual(x)", "not of type float; the arguments are, in this order, beta, operand"),
        ("scale(m)", "write scale(scale,m)"),
        ("bias,act(silu)", "nodes are joined by |"),
        ("softcap(-1.0)", "must be positive"),
        ("quantize(e5m2)", "dtype 'e5m2'"),
        ("quantize(e4m3,k)", "mode 'k'"),
        ("row_stat(mean)", "'mean'"),
        ("row_stat(sumsq,0)", "at least 1"),
        ("tap(t,f64)", "unknown dtype 'f64'"),
        ("bias(a-b)", "letters, digits"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        Epilogue.parse(text)
    assert message in str(caught.value)


def test_gate_halves_the_width_and_refuses_partial_blocks() -> None:
    assert Epilogue.parse("gate").widths(64) == (64, 32)
    with pytest.raises(ShapeError, match="multiple of 16"):
        Epilogue.parse("gate").widths(24)


def _exact(chain: str, dtype: torch.dtype, seed: int) -> tuple[Tensor, np.ndarray, Tensor]:
    """(result, exact result before the last rounding, bound) of the reference on random inputs."""
    case = make_case(chain, 7, 256, 96, dtype, seed=seed)
    accumulator = gemm_oracle.to_numpy(case.x) @ gemm_oracle.to_numpy(case.w).T
    named = {
        operand.name: gemm_oracle.to_numpy(tensor)
        for operand, tensor in zip(case.spec.operands, case.operands, strict=True)
        if tensor is not None
    }
    exact = gemm_oracle.apply_chain(chain, accumulator, named)
    result = torch.ops.fusedops.gemm(case.x, case.w, case.operands, case.text)[0]
    # The float32 accumulator's own error: 8 sqrt(K) units of the sum of magnitudes, the size that
    # rounding errors of random sign reach.
    magnitude = case.x.double().abs() @ case.w.double().abs().t()
    own = magnitude * 8 * case.spec.k**0.5 * FLOAT32_ROUNDOFF
    context = case.spec.context([None if t is None else t.double() for t in case.operands], 7)
    bound = case.spec.epilogue.error_bound(torch.from_numpy(accumulator), own, context)
    return result, exact, bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chain", CHAINS)
def test_reference_is_within_its_bound_of_float64(chain: str, dtype: torch.dtype) -> None:
    result, exact, bound = _exact(chain, dtype, seed=1)
    error = (result.double() - torch.from_numpy(exact)).abs()
    assert result.dtype == dtype
    assert torch.isfinite(result.double()).all()
    assert (error <= bound).all(), f"worst {(error / bound).max():.2f} of the bound"
    # A bound so wide that it would pass anything proves nothing.
    scale = torch.from_numpy(exact).abs().mean()
    loose = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.004}[dtype]
    assert bound.mean() <= loose * max(scale, 1.0)


@pytest.mark.parametrize("chain", [c for c in QUANTIZING if "group128" not in c])
def test_static_quantization_is_within_its_bound_of_float64(chain: str) -> None:
    result, exact, bound = _exact(chain, torch.float32, seed=2)
    largest = 448.0 if result.dtype == torch.float8_e4m3fn else 127.0
    clamped = torch.from_numpy(exact).clamp(-largest, largest)
    assert ((result.double() - clamped).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_group_quantization_dequantizes_to_the_value(kind: str) -> None:
    case = make_case(f"quantize({kind},group128)", 5, 200, 64, seed=3)
    quantized, scale = torch.ops.fusedops.gemm(case.x, case.w, case.operands, case.text)
    assert tuple(scale.shape) == (2, 5)
    assert scale.stride() == (8, 1)
    value = case.x.double() @ case.w.double().t()
    largest = 448.0 if kind == "e4m3" else 127.0
    for group, columns in enumerate((slice(0, 128), slice(128, 200))):
        absmax = value[:, columns].abs().amax(1)
        torch.testing.assert_close(scale[group].double(), absmax / largest, rtol=1e-5, atol=0)
        restored = quantized[:, columns].double() * scale[group].double().unsqueeze(1)
        step = 2.0**-4 * value[:, columns].abs() if kind == "e4m3" else 0.5 * scale[group, :, None]
        floor = scale[group].double().unsqueeze(1) * 2.0**-10
        assert ((restored - value[:, columns]).abs() <= 1.001 * step + floor).all()


def test_extra_outputs_come_in_chain_order() -> None:
    case = make_case("bias|tap(mid,f32)|act(silu)|row_stat(absmax,3)", 4, 16, 8, torch.bfloat16)
    result, mid, absmax = torch.ops.fusedops.gemm(case.x, case.w, case.operands, case.text)
    assert mid.dtype == torch.float32
    assert absmax.dtype == torch.float32
    assert tuple(absmax.shape) == (3, 4)
    torch.testing.assert_close(result, torch.nn.functional.silu(mid).bfloat16(), rtol=0, atol=0)
    assert torch.equal(absmax.amax(0), result.float().abs().amax(1))


def test_row_sum_of_squares_is_taken_over_the_rounded_result() -> None:
    case = make_case("residual|row_stat", 6, 64, 32, torch.bfloat16, seed=4)
    result, sumsq = torch.ops.fusedops.gemm(case.x, case.w, case.operands, case.text)
    torch.testing.assert_close(
        sumsq.sum(0), result.double().square().sum(1).float(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [(500.0, 448.0), (-1e9, -448.0), (float("inf"), 448.0), (464.0, 448.0), (0.3, 0.3125)],
)
def test_e4m3_saturates(value: float, expected: float) -> None:
    assert to_dtype(torch.tensor(value), torch.float8_e4m3fn).float().item() == expected


def test_e4m3_keeps_nan_and_int8_rounds_half_to_even() -> None:
    assert to_dtype(torch.tensor(float("nan")), torch.float8_e4m3fn).float().isnan()
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, 126.5, 127.5, -1000.0, float("inf")])
    expected = [0, 2, 2, 0, 126, 127, -127, 127]
    assert to_dtype(values, torch.int8).tolist() == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_matches_its_float64_formula(name: str) -> None:
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    expected = torch.from_numpy(gemm_oracle.ACTIVATION_FORMULAS[name](x.numpy()))
    torch.testing.assert_close(activation(name, x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_slope_bounds_every_secant(name: str) -> None:
    x = torch.linspace(-30, 30, 60001, dtype=torch.float64)
    y = activation(name, x)
    secant = (y[1:] - y[:-1]).abs() / (x[1] - x[0])
    reach = torch.maximum(x[1:].abs(), x[:-1].abs())
    assert (secant <= ACTIVATIONS[name].slope(reach) * (1 + 1e-9) + 1e-9).all()


def test_b90_every_hugging_face_name_has_the_right_formula() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    for ours in ACTIVATIONS.values():
        for hf_name in ours.hf_names:
            assert activation_from_hf(hf_name) == ours.name
            torch.testing.assert_close(
                activation(ours.name, x), ACT2FN[hf_name](x), rtol=1e-6, atol=1e-9
            )
    with pytest.raises(ConfigError, match="unknown Hugging Face activation 'xielu'"):
        activation_from_hf("xielu")


def test_b90_the_two_gelus_differ_where_they_should() -> None:
    x = torch.tensor(2.69894, dtype=torch.float64)
    difference = (activation("gelu", x) - activation("gelu_tanh", x)).abs()
    assert difference.item() == pytest.approx(4.73e-4, rel=0.01)


def test_a_node_defined_in_user_code_reaches_every_stage() -> None:
    @dataclass(frozen=True)
    class Clip(Node):
        """Clip to +-limit times a per-column factor, and report how many were clipped."""

        spec_name: ClassVar[str] = "clip_for_test"
        limit: float = 1.0

        def operands(self) -> tuple[Operand, ...]:
            return (Operand("factor", "n"),)

        def extra_outputs(self) -> tuple[ExtraOutput, ...]:
            def count(
                m_shape: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device
            ) -> Tensor:
                return torch.empty(m_shape, dtype=dtype, device=device)

            return (ExtraOutput("clipped", torch.int32, count),)

        def reference(self, value: Tensor, context: Context) -> Tensor:
            edge = self.limit * context.read("factor", value)
            context.outputs.append((value.abs() > edge).sum(1, dtype=torch.int32))
            return torch.minimum(torch.maximum(value, -edge), edge)

        def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
            context.outputs.append(error.new_zeros(error.shape[0]))
            return error

    try:
        x, w = torch.randn(3, 8), torch.randn(16, 8)
        factor = torch.full((16,), 0.5)
        text = "clip_for_test(2.0)|act(relu)"
        assert str(Epilogue.parse(text)) == text
        result, clipped = fusedops.gemm(x, w, text, {"factor": factor})
        product = x @ w.t()
        torch.testing.assert_close(result, product.clamp(-1, 1).relu())
        assert torch.equal(clipped, (product.abs() > 1).sum(1, dtype=torch.int32))
        # checks follow
        with pytest.raises(ShapeError, match="operand 'factor' has shape"):
            fusedops.gemm(x, w, text, {"factor": factor[:4]})
        # the fake and torch.compile follow
        compiled = torch.compile(
            lambda a: fusedops.gemm(a, w, text, {"factor": factor})[0] + 1,
            backend="aot_eager",
            fullgraph=True,
        )
        torch.testing.assert_close(compiled(x), result + 1)
        torch.library.opcheck(
            torch.ops.fusedops.gemm.default,
            (x, w, [factor], GemmSpec.parse(f"none > dense(16,8) > {text} > f32").text),
        )
        # the bound follows
        context = GemmSpec.parse(f"none > dense(16,8) > {text} > f32").context([factor.double()], 3)
        bound = Epilogue.parse(text).error_bound(
            product.double(), torch.full((3, 16), 1e-6, dtype=torch.float64), context
        )
        assert bound.shape == (3, 16)
        # explain follows
        assert text in str(fusedops.explain(x, w, text, {"factor": factor}))
    finally:
        del Node.registry["clip_for_test"]
        forget_parsed()
        GemmSpec.parse.cache_clear()


def test_one_name_cannot_stand_for_two_nodes() -> None:
    with pytest.raises(ConfigError, match="defined twice"):

        @dataclass(frozen=True)
        class AnotherBias(Node):
            spec_name: ClassVar[str] = "bias"
