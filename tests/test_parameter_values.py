"""Values of nodes, prologues and options that are of the wrong type or not finite: ConfigError."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import fusedops
from fusedops.epilogue import Act, Bias, Epilogue, Node, Residual, RowStat, Scale, SoftCap, Tap
from fusedops.errors import ConfigError
from fusedops.prologue import Prologue, RmsNormPrologue
from fusedops.weight import Dense

NOT_FINITE = (math.nan, math.inf, -math.inf, 1e39)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_every_float_field_refuses_what_is_not_finite(value: float) -> None:
    found = 0
    for registry in (Node.registry, Prologue.registry):
        for cls in registry.values():
            for name, field in cls.__dataclass_fields__.items():
                if field.type == "float":
                    found += 1
                    with pytest.raises(ConfigError, match=f"{name} is .*finite in float32"):
                        cls(**{name: value})
    assert found >= 4


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39"])
@pytest.mark.parametrize("text", ["residual({})", "softcap({})"])
def test_texts_refuse_what_is_not_finite(text: str, value: str) -> None:
    with pytest.raises(ConfigError, match="finite in float32"):
        Epilogue.parse(text.format(value))
    with pytest.raises(ConfigError, match="finite in float32"):
        fusedops.gemm(torch.ones(1, 2), torch.ones(2, 2), text.format(value))
    with pytest.raises(ConfigError, match="finite in float32"):
        torch.ops.fusedops.gemm(
            torch.ones(1, 2),
            torch.ones(2, 2),
            [],
            f"none > dense(2,2) > {text.format(value)} > f32",
        )


@pytest.mark.parametrize("cap", [0.0, -0.0, -1.0, 1e-39, 2.0**127])
def test_a_soft_cap_must_be_positive_with_a_normal_inverse(cap: float) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        SoftCap(cap)
    with pytest.raises(ConfigError, match="must be positive"):
        Epilogue.parse(f"softcap({cap})")


@pytest.mark.parametrize("cap", [2.0**-126, 2.0**126])
def test_the_ends_of_the_soft_caps_range_compute(cap: float) -> None:
    x, w = torch.ones(1, 2), torch.ones(2, 2)
    result = fusedops.gemm(x, w, f"softcap({cap})")
    expected = cap * math.tanh(2.0 / cap)
    torch.testing.assert_close(result, torch.full((1, 2), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Residual("1"),
        lambda: Residual(True),
        lambda: Residual(None),
        lambda: Residual(torch.ones(())),
        lambda: SoftCap([1.0]),
        lambda: Bias(3),
        lambda: Bias(None),
        lambda: Bias("a|b"),
        lambda: Bias("a b"),
        lambda: Bias(""),
        lambda: Scale("s", []),
        lambda: Act(None),
        lambda: Act(["silu"]),
        lambda: Tap("t", torch.float32),
        lambda: RowStat("sumsq", 1.5),
        lambda: RowStat("sumsq", "1"),
        lambda: RmsNormPrologue("x"),
        lambda: RmsNormPrologue(1e-6, 3),
        lambda: RmsNormPrologue(1e-6, "llama", math.nan),
        lambda: Dense(2.0, 2),
        lambda: Dense("2", 2),
    ],
)
def test_values_of_the_wrong_type_are_refused_at_construction(make: Any) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        make()


def test_numbers_of_other_types_become_plain_ones() -> None:
    for two in (2, np.float32(2), np.int64(2)):
        assert str(Residual(two)) == "residual(2.0)"
        assert type(Residual(two).beta) is float
    assert str(RowStat("sumsq", np.int64(3))) == "row_stat(sumsq,3)"
    assert pickle.loads(pickle.dumps(Residual(2.5))) == Residual(2.5)


@pytest.mark.parametrize(
    "nodes", [("bias",), Bias(), "bias", 3, None, (Bias,), (Bias(), None), {Bias(): 1}]
)
def test_a_chain_of_what_is_no_node_is_refused(nodes: Any) -> None:
    with pytest.raises(ConfigError, match=r"Epilogue: .*accepted"):
        Epilogue(nodes)


def test_a_chain_may_be_given_as_a_list() -> None:
    assert Epilogue([Bias(), Act("silu")]) == Epilogue.parse("bias|act(silu)")
    assert hash(Epilogue([Bias()])) == hash(Epilogue((Bias(),)))


@pytest.mark.parametrize("text", [None, 3, b"bias", ["bias"]])
def test_what_is_no_text_is_not_parsed(text: Any) -> None:
    for parse in (Node.parse, Prologue.parse, Epilogue.parse):
        with pytest.raises(ConfigError, match="accepted: a str"):
            parse(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, "a", None])
def test_rope_and_norm_and_attention_constants_are_finite_numbers(value: Any) -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ConfigError, match="weight_offset"):
        fusedops.rms_norm(x, weight, weight_offset=value)
    with pytest.raises(ConfigError, match="weight_offset"):
        fusedops.fused_add_rms_norm(x, x, weight, weight_offset=value)
    with pytest.raises(ConfigError, match="theta"):
        fusedops.rope_table(4, 8, value)
    if value is not None:
        with pytest.raises(ConfigError, match="attention_factor"):
            fusedops.RopeScaling("yarn", 2.0, 64, attention_factor=value)
        cache, table = torch.zeros(1, 4, 1, 4), torch.zeros(1, 1, dtype=torch.int32)
        lengths = torch.ones(1, dtype=torch.int32)
        with pytest.raises(ConfigError, match="scale"):
            fusedops.paged_attention(
                torch.ones(1, 1, 4), cache, cache.clone(), table, lengths, scale=value
            )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fusedops.rope_table(4.0, 8), "rotary_dim is 4.0"),
        (lambda: fusedops.rope_table(4, "8"), "max_position is '8'"),
        (lambda: fusedops.rope_table(4, 8, scaling={"factor": 2.0}), "from_hf"),
        (lambda: fusedops.RopeScaling([], 2.0), "kind"),
        (lambda: fusedops.RopeScaling("linear", "2"), "factor is '2'"),
    ],
)
def test_rope_tables_refuse_values_of_the_wrong_type(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
