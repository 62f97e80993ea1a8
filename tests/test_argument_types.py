"""Arguments of the wrong type raise errors of fusedops that say what was got and is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusedops
from fusedops import nn as fused_nn
from fusedops.check import require_argument_types
from fusedops.epilogue import Act, Bias
from fusedops.errors import ConfigError, DeviceError, DTypeError, LayoutError, ShapeError
from fusedops.ops.op import OPS
from fusedops.ops.paged import check_paged_metadata
from fusedops.packing import pack_gate_up, pack_rope, unpack_gate_up, unpack_rope

X, W, B = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
IDS, ONES = torch.zeros(2, dtype=torch.int64), torch.ones(8)
HEADS, TABLE = torch.randn(2, 2, 4), fusedops.rope_table(4, 8)
SEED = torch.ones(2, dtype=torch.int64)
NO_TENSORS = ([1.0, 2.0], 2.0, "x", np.ones((2, 8), np.float32))
SLOTS, NO_PAGE = torch.zeros(1, 4, 2, 4), torch.zeros(2, 0, dtype=torch.int32)
OPTIONAL = {
    "gemm operand",  # a forgotten one has words of its own
    "gemm operand 0",
    "gemm out",
    "explain operand",
    "layer_norm weight",
    "quantize scale",
    "sample top_k",
    "sample top_p",
    "FusedLinear bias",
    "fused module residual",
}
"""Calls in which None stands for nothing."""

TENSOR_CALLS: dict[str, Callable[[Any], Any]] = {
    "gemm x": lambda v: fusedops.gemm(v, W),
    "gemm w": lambda v: fusedops.gemm(X, v),
    "gemm operand": lambda v: fusedops.gemm(X, W, "bias", {"bias": v}),
    "gemm operand 0": lambda v: fusedops.gemm(X, W, "bias", [v]),
    "gemm out": lambda v: fusedops.gemm(X, W, out=[v]),
    "explain x": lambda v: fusedops.explain(v, W),
    "explain w": lambda v: fusedops.explain(X, v),
    "explain operand": lambda v: fusedops.explain(X, W, "bias", {"bias": v}),
    "rms_norm x": lambda v: fusedops.rms_norm(v, ONES),
    "rms_norm weight": lambda v: fusedops.rms_norm(X, v),
    "layer_norm weight": lambda v: fusedops.layer_norm(X, v),
    "fused_add_rms_norm residual": lambda v: fusedops.fused_add_rms_norm(X, v, ONES),
    "fused_add_rms_norm_ x": lambda v: fusedops.fused_add_rms_norm_(v, X.clone(), ONES),
    "act_and_mul x": lambda v: fusedops.act_and_mul(v),
    "embedding token_ids": lambda v: fusedops.embedding(v, W),
    "embedding weight": lambda v: fusedops.embedding(IDS, v),
    "transpose x": lambda v: fusedops.transpose(v),
    "reduce x": lambda v: fusedops.reduce(v, "sum"),
    "histogram x": lambda v: fusedops.histogram(v, 3),
    "bincount x": lambda v: fusedops.bincount(v, 3),
    "expert_histogram expert_ids": lambda v: fusedops.expert_histogram(v, 3),
    "quantize x": lambda v: fusedops.quantize(v),
    "quantize scale": lambda v: fusedops.quantize(X, scale=v),
    "dequantize scale": lambda v: fusedops.dequantize(X.to(torch.int8), v),
    "greedy logits": lambda v: fusedops.greedy(v),
    "sample temperature": lambda v: fusedops.sample(X, v, SEED),
    "sample seed": lambda v: fusedops.sample(X, torch.ones(2), v),
    "sample top_k": lambda v: fusedops.sample(X, torch.ones(2), SEED, top_k=v),
    "sample top_p": lambda v: fusedops.sample(X, torch.ones(2), SEED, top_p=v),
    "rope q": lambda v: fusedops.rope(v, HEADS, IDS, TABLE),
    "rope positions": lambda v: fusedops.rope(HEADS, HEADS, v, TABLE),
    "rope_ k": lambda v: fusedops.rope_(HEADS.clone(), v, IDS, TABLE),
    "paged_attention q": lambda v: fusedops.paged_attention(v, HEADS, HEADS, IDS, IDS),
    "append_paged_kv k": lambda v: fusedops.append_paged_kv(v, v, HEADS, HEADS, IDS, IDS, IDS),
    "check_paged_metadata seq_lens": lambda v: check_paged_metadata(v, IDS, 4),
    "pack_gate_up gate": lambda v: pack_gate_up(v, W),
    "pack_gate_up up": lambda v: pack_gate_up(W, v),
    "unpack_gate_up packed": lambda v: unpack_gate_up(v, 8),
    "rope packing weight": lambda v: pack_rope(v, 64),
    "rope packing weight ": lambda v: unpack_rope(v, 64),
    "FusedLinear weight": lambda v: fused_nn.FusedLinear.from_weights(v),
    "FusedLinear bias": lambda v: fused_nn.FusedLinear.from_weights(W, v),
    "FusedGatedMLP up": lambda v: fused_nn.FusedGatedMLP.from_weights(W, v, W.T),
    "FusedMLP down": lambda v: fused_nn.FusedMLP.from_weights(W, v),
    "FusedQKV k": lambda v: fused_nn.FusedQKV.from_weights(W, v, W, 1, 1, 4),
    "fused module x": lambda v: fused_nn.FusedLinear(8, 4)(v),
    "fused module residual": lambda v: fused_nn.FusedLinear(8, 4)(X, v),
    "rms_norm x ": lambda v: fused_nn.RMSNorm(8)(v),
}


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_what_is_no_tensor_is_named_with_what_was_got(name: str, value: Any) -> None:
    with pytest.raises(DTypeError) as caught:
        TENSOR_CALLS[name](value)
    message = str(caught.value)
    assert name.split()[-1] in message
    assert f"({type(value).__name__})" in message
    assert "torch.Tensor" in message


@pytest.mark.parametrize("name", sorted(TENSOR_CALLS.keys() - OPTIONAL))
def test_none_in_the_place_of_a_tensor_is_named(name: str) -> None:
    accepted = rf"{name.split()[-1]} is None \(NoneType\); accepted: a torch\.Tensor\."
    with pytest.raises(DTypeError, match=accepted):
        TENSOR_CALLS[name](None)


@pytest.mark.parametrize("name", OPS)
def test_none_in_a_direct_call_of_an_operator_is_named(name: str) -> None:
    op = getattr(torch.ops.fusedops, name).default
    values = {"Tensor": None, "int": 1, "float": 1.0, "bool": False, "ScalarType": torch.float32}
    words = {"dtype": "e4m3", "granularity": "token"}
    args = [
        words.get(argument.name, "sum") if kind == "str" else values.get(kind)
        for argument in op._schema.arguments
        for kind in (str(argument.real_type),)
    ]
    with pytest.raises(DTypeError, match=rf"^{OPS[name].public}: \w+ is None \(NoneType\)"):
        op(*args)
    with pytest.raises(DTypeError, match=r"gemm: x is None \(NoneType\)"):
        torch.ops.fusedops.gemm(None, W, [], "none > dense(4,8) > none > f32")


def nested(layout: torch.layout) -> torch.Tensor:
    parts = [torch.ones(2, 8), torch.ones(3, 8)]
    return torch.nested.nested_tensor(parts, layout=layout)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: X.to_sparse(),
    "sparse_csr": lambda: X.to_sparse_csr(),
    "_mkldnn": lambda: X.to_mkldnn(),
    "strided, nested": lambda: nested(torch.strided),
    "jagged, nested": lambda: nested(torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*CSR.*:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_sparse_and_nested_tensors_are_refused(name: str, layout: str) -> None:
    value = LAYOUTS[layout]()
    if name == "gemm w" and layout.startswith("jagged"):
        with pytest.raises(ShapeError, match="w has shape"):
            TENSOR_CALLS[name](value)
        return
    of_a_list = {"operand": "operand", "0": "operand", "residual": r"(operands\[0\]|residual)"}
    argument = of_a_list.get(name.split()[-1], name.split()[-1])
    accepted = rf"{argument}\S* ?\S* is a tensor of layout {layout}; accepted: .*dense"
    with pytest.raises(LayoutError, match=accepted):
        TENSOR_CALLS[name](value)


def decode(**options: Any) -> torch.Tensor:
    return fusedops.paged_attention(HEADS, SLOTS, SLOTS, NO_PAGE, IDS.int(), **options)


OPTION_CALLS: dict[str, Callable[[], Any]] = {
    "epilogue": lambda: fusedops.gemm(X, W, [Bias()], [B]),
    "epilogue ": lambda: fusedops.gemm(X, W, Act("silu")),
    "epilogue  ": lambda: fusedops.explain(X, W, 5),
    "prologue": lambda: fusedops.gemm(X, W, prologue=5),
    "prologue ": lambda: fusedops.gemm(X, W, prologue=["rms_norm"]),
    "weight": lambda: fusedops.gemm(X, W, weight=4.8),
    "weight ": lambda: fusedops.gemm(X, W, weight=[4, 8]),
    "eps": lambda: fusedops.rms_norm(X, ONES, "a"),
    "round_before_weight": lambda: fusedops.rms_norm(X, ONES, round_before_weight="a"),
    "act": lambda: fusedops.act_and_mul(X, None),
    "eps ": lambda: fusedops.rms_norm(X, ONES, True),
    "round_before_weight ": lambda: fusedops.rms_norm(X, ONES, round_before_weight=1),
    "bins": lambda: fusedops.histogram(X, 3.5),
    "bins ": lambda: fusedops.histogram(X, True),
    "bins  ": lambda: fusedops.bincount(IDS, True),
    "range": lambda: fusedops.histogram(X, 3, range="ab"),
    "range ": lambda: fusedops.histogram(X, 3, range=5),
    "range  ": lambda: fusedops.histogram(X, 3, range=(False, True)),
    "n_experts ": lambda: fusedops.expert_histogram(IDS, True),
    "n_experts": lambda: fusedops.expert_histogram(IDS, "a"),
    "op": lambda: fusedops.reduce(X, None),
    "dim": lambda: fusedops.reduce(X, "sum", "a"),
    "dim ": lambda: fusedops.reduce(X, "sum", 1.5),
    "dim  ": lambda: fusedops.reduce(X, "sum", True),
    "dim   ": lambda: fusedops.reduce(X, "sum", [0, True]),
    "keepdim": lambda: fusedops.reduce(X, "sum", 1, keepdim="no"),
    "style": lambda: fusedops.rope(HEADS, HEADS, IDS, TABLE, style=3),
    "dtype": lambda: fusedops.dequantize(X.to(torch.int8), torch.ones(2), "float32"),
    "page_size": lambda: check_paged_metadata(IDS, IDS[None], 1.5),
    "in_features": lambda: fused_nn.FusedLinear(4.5, 4),
    "out_features": lambda: fused_nn.FusedLinear(4, -4),
    "hidden": lambda: fused_nn.RMSNorm("8"),
    "hidden ": lambda: fused_nn.LayerNorm(-1),
    "intermediate": lambda: fused_nn.FusedGatedMLP(8, 2.0),
    "intermediate ": lambda: fused_nn.FusedMLP(8, None),
    "head_dim": lambda: fused_nn.FusedQKV(8, 1, 1, -4),
    "dtype ": lambda: fused_nn.FusedLinear(4, 4, dtype="bf16"),
    "dtype  ": lambda: fused_nn.FusedGatedMLP(8, 8, dtype=torch.int8),
    "dtype   ": lambda: fused_nn.FusedLinear(4, 4, dtype=torch.float64),
    "bias": lambda: fused_nn.FusedLinear(4, 4, "no"),
    "bias ": lambda: fused_nn.FusedGatedMLP(8, 8, bias=1),
    "bias  ": lambda: fused_nn.FusedMLP(8, 8, bias="no"),
    "bias   ": lambda: fused_nn.FusedQKV(8, 1, 1, 4, bias=None),
    "bias    ": lambda: fused_nn.LayerNorm(8, bias="no"),
    "elementwise_affine": lambda: fused_nn.LayerNorm(8, elementwise_affine=1),
    "round_before_weight  ": lambda: fused_nn.RMSNorm(8, round_before_weight="no"),
    "lm_head": lambda: fusedops.convert(torch.nn.Linear(2, 2).eval(), lm_head="no"),
    "strict": lambda: fusedops.convert(torch.nn.Linear(2, 2).eval(), strict="no"),
    "strict ": lambda: fusedops.use_provider("reference", strict="no").__enter__(),
    "dtype    ": lambda: fusedops.transpose(X, 5),
    "dtype     ": lambda: fusedops.transpose(X, True),
    "dtype      ": lambda: fusedops.transpose(X, -1),
    "dtype       ": lambda: fusedops.dequantize(X.to(torch.int8), B, 5),
    "window": lambda: decode(window=torch.int8),
    "window ": lambda: decode(window=2**63),
    "window  ": lambda: decode(window=torch.tensor(1)),
    "max_query_len": lambda: decode(max_query_len=torch.int8),
    "bins   ": lambda: fusedops.histogram(X, torch.int8),
    "bins    ": lambda: fusedops.bincount(IDS, -(2**63) - 1),
    "dim          ": lambda: fusedops.reduce(X, "sum", dim=2**70),
    "eps  ": lambda: fusedops.rms_norm(X, ONES, 10**400),
    "weight  ": lambda: fusedops.gemm(X, W, weight=torch.randn(3)),
    "weight   ": lambda: fusedops.gemm(X, W, weight=False),
    "weight    ": lambda: fusedops.gemm(X, W, weight=0),
    "weight     ": lambda: fusedops.gemm(X, W, weight=b"dense(4,8)"),
    "weight      ": lambda: fusedops.gemm(X, W, weight=[]),
    "weight       ": lambda: fusedops.gemm(X, W, weight=(4, 8)),
    "weight        ": lambda: fusedops.explain(X, W, weight=torch.randn(3)),
    "weight         ": lambda: fusedops.explain(X, W, weight=()),
    "truncate": lambda: fusedops.RopeScaling("linear", 2.0, truncate="no"),
}


@pytest.mark.parametrize("name", OPTION_CALLS)
def test_an_option_of_the_wrong_type_is_named_with_what_is_accepted(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OPTION_CALLS[name]()
    assert name.strip() in str(caught.value)
    assert "accepted" in str(caught.value)


@pytest.mark.parametrize("operands", [3, B, "bias", iter([B])], ids=lambda v: type(v).__name__)
def test_operands_must_be_named_or_listed(operands: Any) -> None:
    with pytest.raises(DTypeError, match=r"operands is .*accepted: tensors by name"):
        fusedops.gemm(X, W, "bias", operands)


def test_every_operators_types_are_known() -> None:
    for name in (*OPS, "gemm", "gemm_out"):
        schema = getattr(torch.ops.fusedops, name).default._schema
        for argument in schema.arguments:
            with pytest.raises((DTypeError, ConfigError), match=f"{name}: "):
                require_argument_types(name, schema, [object()] * len(schema.arguments))
            assert argument.name


def test_an_error_that_has_another_cause_stays_as_it_is() -> None:
    with pytest.raises(ShapeError, match="accepted shape"):
        fusedops.rms_norm(X, ONES[:3])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="out of memory on purpose"):
        fusedops.gemm(Failing(X), W)


class Failing(torch.Tensor):
    """A tensor on which everything fails."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Failing:
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "gemm" in str(function):
            raise RuntimeError("out of memory on purpose")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str
)
def test_activations_of_another_dtype_are_a_dtype_error(dtype: torch.dtype) -> None:
    accepted = "float32, bfloat16, float16, float8_e4m3fn, int8"
    for call in (fusedops.gemm, fusedops.explain):
        with pytest.raises(DTypeError, match=f"x is {str(dtype)[6:]}; .*{accepted}"):
            call(X.to(dtype), W.to(dtype))
    with pytest.raises(DTypeError, match=accepted):
        fusedops.explain_problem(2, 4, 8, dtype=dtype)
    with pytest.raises(DTypeError, match=accepted):
        fused_nn.FusedLinear.from_weights(W)(X.to(dtype))
    with pytest.raises(DTypeError, match=accepted):
        fused_nn.FusedLinear.from_weights(W.to(dtype))
    spec = "rms_norm(1e-06) > dense(4,8) > none > f32"
    with pytest.raises(DTypeError, match=r"the prologue .* takes float32, bfloat16 and float16"):
        torch.ops.fusedops.gemm(X.to(dtype), W.to(dtype), [ONES, None], spec)
    with pytest.raises(DTypeError, match="one dtype of"):
        torch.ops.fusedops.gemm(X.to(dtype), W.to(dtype), [], "none > dense(4,8) > none > f32")


@pytest.mark.parametrize(
    "out_dtype",
    ["bf16", "torch.bfloat16", float, 16, torch.float64, torch.int64, torch.int32, np.float32],
)
def test_an_output_dtype_that_is_none_lists_what_is_accepted(out_dtype: Any) -> None:
    for call in (
        lambda: fusedops.gemm(X, W, out_dtype=out_dtype),
        lambda: fusedops.explain(X, W, out_dtype=out_dtype),
        lambda: fusedops.explain_problem(2, 4, 8, out_dtype=out_dtype),
    ):
        with pytest.raises(ConfigError, match=r"out_dtype=.*accepted are torch\.float32.*None"):
            call()


@pytest.mark.parametrize(
    ("sizes", "options", "error"),
    [
        ((1.5, 2, 3), {}, ConfigError),
        ((1, -2, 3), {}, ConfigError),
        ((1, 2, "3"), {}, ConfigError),
        ((1, 2, 3), {"dtype": "bf16"}, DTypeError),
        ((1, 2, 3), {"epilogue": ["bias"]}, ConfigError),
        ((1, 2, 3), {"device": "banana"}, DeviceError),
        ((1, 2, 3), {"device": "meta"}, DeviceError),
        ((1, 2, 3), {"device": 1.5}, DeviceError),
    ],
)
def test_explain_problem_refuses_what_is_no_problem(
    sizes: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="accepted"):
        fusedops.explain_problem(*sizes, **options)


@pytest.mark.parametrize("shape", [(0, 2), (2,), (0,), (1, 3), (2, 1), (1, 1, 2)])
def test_row_statistics_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    operands = {"norm_weight": ONES, "norm_sumsq": torch.ones(shape)}
    with pytest.raises(ShapeError, match=r"norm_sumsq.*accepted: \(parts >= 1, 2\)"):
        fusedops.gemm(X, W, None, operands, prologue="rms_norm(1e-06)")


def test_row_statistics_in_parts_are_added() -> None:
    sumsq = X.square().sum(1)
    parts = torch.stack((sumsq * 0.25, sumsq * 0.75))
    operands = {"norm_weight": ONES, "norm_sumsq": parts}
    result = fusedops.gemm(X, W, None, operands, prologue="rms_norm(1e-06)")
    expected = X.double() / (sumsq.double() / 8 + 1e-6).sqrt()[:, None] @ W.double().T
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [torch.nn.RMSNorm(8), torch.nn.LayerNorm(8), 3, "rms_norm"])
def test_a_norm_that_is_not_ours_is_refused(norm: Any) -> None:
    mlp = fused_nn.FusedGatedMLP.from_weights(W, W, W.T.contiguous())
    qkv = fused_nn.FusedQKV.from_weights(W, W, W, 1, 1, 4)
    for module in (mlp, qkv):
        with pytest.raises(ConfigError, match=r"norm is a .*accepted: a fusedops\.nn\.RMSNorm"):
            module(X, norm=norm)


def test_a_compiled_function_may_take_the_weight_as_an_argument() -> None:
    def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Any:
        return fusedops.gemm(x, w, "bias|act(silu)", {"bias": bias})

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, columns in ((3, 4), (5, 4), (5, 6)):
        x, w, bias = torch.randn(rows, 8), torch.randn(columns, 8), torch.randn(columns)
        assert torch.equal(compiled(x, w, bias), run(x, w, bias))


def test_a_compiled_call_with_a_wrong_type_says_so() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fusedops.gemm(x, W, 5), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="epilogue is 5"):
        compiled(X)
