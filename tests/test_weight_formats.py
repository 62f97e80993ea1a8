"""Quantized weight formats in ``fusedops.gemm``: spec text, checks, exact references, providers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant_oracle import block_values, floats, group_values_of_x, grouped_values, int4_values
from torch import Tensor

import fusedops
from fusedops.epilogue.base import FLOAT32_ROUNDOFF
from fusedops.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.providers.base import SUPPORTED, Support, choose, current_policy, use_provider
from fusedops.providers.front import answer
from fusedops.providers.gemm import product_8_bit
from fusedops.providers.kernel_tensors import operands_read
from fusedops.weight import BlockFp8, Dense, Fp8Weight, Int4, Int8Weight, WeightFormat, to_tiles

E4M3 = torch.float8_e4m3fn
gemm_op = torch.ops.fusedops.gemm.default
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def scales(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=generator(seed)) + 0.1).to(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator(seed))


def int4_case(n: int, k: int, group: int = 128, zero: bool = False, seed: int = 0) -> Any:
    """(format, weight, operands) of an int4 weight in rows."""
    form = Int4(n, k, group, "uint8" if zero else "none")
    weight = integers(0, 255, n, -(-k // 2), seed=seed).to(torch.uint8)
    operands = {"w_scale": scales(form.groups, n, dtype=torch.bfloat16)}
    if zero:
        operands["w_zero"] = integers(0, 16, form.groups, n, seed=seed + 1).to(torch.uint8)
    return form, weight, operands


# Spec text

sizes = st.integers(0, 5000)
groups = st.sampled_from((0, 32, 64, 128))
formats = st.one_of(
    st.builds(Dense, sizes, sizes),
    st.builds(Int8Weight, sizes, sizes, groups),
    st.builds(Fp8Weight, sizes, sizes, groups),
    st.builds(BlockFp8, sizes, sizes),
    st.builds(BlockFp8, sizes.map(lambda n: 16 * n), sizes, st.just("gate_up")),
    st.builds(
        Int4,
        sizes,
        sizes,
        groups,
        st.sampled_from(("none", "uint8")),
        st.sampled_from(("rows", "wgmma16", "wgmma8")),
    ),
)


@given(formats)
def test_text_round_trip(form: WeightFormat) -> None:
    assert WeightFormat.parse(str(form)) == form
    spec = GemmSpec(form)
    assert GemmSpec.parse(str(spec)) == spec


@given(k=st.integers(1, 5000), make=st.sampled_from((Int4, Int8Weight, Fp8Weight)))
def test_a_group_of_k_columns_is_the_whole_row(k: int, make: Callable[..., Any]) -> None:
    assert make(8, k, k).groups == make(8, k, 0).groups == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4(64,256,48)", "group=48 with K=256; accepted are 32, 64, 128, and 0 or K"),
        ("int8_wo(64,256,-1)", "group=-1 with K=256"),
        ("int4(64,256,128,int4)", "zero='int4'; accepted are none, uint8"),
        ("int4(64,256,128,none,tiles)", "layout='tiles'; accepted are rows, wgmma16, wgmma8"),
        ("block_fp8(64,256,packed)", "rows='packed'; accepted are plain, gate_up"),
        ("block_fp8(24,256,gate_up)", "N=24 with rows=gate_up; accepted are multiples of 16"),
        ("int4(-1,256)", "N and K must not be negative"),
        ("int4(64,256,128,none,rows,1)", "6 arguments; int4 takes at most 5"),
    ],
)
def test_bad_texts_say_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightFormat.parse(text)


# Exact oracles


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize(("n", "k"), [(24, 256), (9, 77)])
def test_int4_is_exact_on_integers(n: int, k: int, group: int, zero: bool) -> None:
    form, weight, operands = int4_case(n, k, group, zero)
    # Powers of two keep every product and sum exact in float32.
    operands["w_scale"] = (2.0 ** integers(-3, 3, form.groups, n)).to(torch.bfloat16)
    x = integers(-8, 8, 5, k).to(torch.bfloat16)
    result = fusedops.gemm(x, weight, None, operands, weight=form, out_dtype=torch.float32)
    values = int4_values(weight, k, group, operands["w_scale"], operands.get("w_zero"))
    assert (floats(result) == floats(x) @ values.T).all()


@pytest.mark.parametrize("k", [1, 127, 128, 300])
def test_w4a8_is_exact_on_integers(k: int) -> None:
    form, weight, operands = int4_case(16, k, 64, zero=True)
    operands["w_scale"] = (2.0 ** integers(-2, 2, form.groups, 16)).to(torch.float16)
    operands["x_scale"] = 2.0 ** integers(-2, 2, 4).float()
    x = integers(-8, 8, 4, k).to(E4M3)
    chain = "scale(x_scale,m)"
    result = fusedops.gemm(x, weight, chain, operands, weight=form, out_dtype=torch.float32)
    values = int4_values(weight, k, 64, operands["w_scale"], operands["w_zero"])
    exact = floats(x) @ values.T * floats(operands["x_scale"])[:, None]
    assert (floats(result) == exact).all()


@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("make", [Int8Weight, Fp8Weight])
def test_8_bit_weights_are_exact_on_integers(make: Callable[..., Any], group: int) -> None:
    form = make(10, 100, group)
    weight = integers(-16, 16, 10, 100).to(form.w_dtype)
    operands = {"w_scale": 2.0 ** integers(-3, 3, form.groups, 10).float()}
    x = integers(-8, 8, 3, 100).to(torch.float16)
    result = fusedops.gemm(x, weight, None, operands, weight=form, out_dtype=torch.float32)
    exact = floats(x) @ grouped_values(weight, group, operands["w_scale"]).T
    assert (floats(result) == exact).all()


def test_int8_by_int8_is_exact_to_the_last_integer() -> None:
    x = integers(-127, 127, 6, 5001).to(torch.int8)
    w = integers(-127, 127, 8, 5001, seed=1).to(torch.int8)
    operands = {"x_scale": scales(6), "w_scale": scales(8)}
    chain = "scale(x_scale,m)|scale(w_scale,n)"
    result = fusedops.gemm(x, w, chain, operands, out_dtype=torch.float32)
    exact = (x.long() @ w.long().t()).float()  # rounded once, as an int32 accumulator is
    assert torch.equal(result, exact * operands["x_scale"][:, None] * operands["w_scale"])


@pytest.mark.parametrize("rows", ["plain", "gate_up"])
@pytest.mark.parametrize(("n", "k"), [(272, 256), (144, 300), (16, 5)])
def test_fp8_blocks_are_exact_on_integers(n: int, k: int, rows: str) -> None:
    form = BlockFp8(n, k, rows)
    x, weight = integers(-8, 8, 3, k).to(E4M3), integers(-8, 8, n, k).to(E4M3)
    operands = {
        "x_scale": 2.0 ** integers(-3, 3, form.k_blocks, 3).float(),
        "w_scale": 2.0 ** integers(-3, 3, form.row_blocks, form.k_blocks).float(),
    }
    result = fusedops.gemm(x, weight, None, operands, weight=form, out_dtype=torch.float32)
    values = block_values(weight, operands["w_scale"], rows == "gate_up")
    exact = group_values_of_x(x, operands["x_scale"]) @ values.T
    assert (floats(result) == exact).all()
    assert (floats(form.dequantize(weight, operands)) == values).all()


def block_case(m: int, n: int, k: int) -> Any:
    x, x_scale = fusedops.quantize(normal(m, k), granularity="block128")
    form = BlockFp8(n, k)
    weight = (normal(n, k, seed=1) * 50).to(E4M3)
    w_scale = scales(form.row_blocks, form.k_blocks)
    return form, x, weight, {"x_scale": x_scale, "w_scale": w_scale}


@pytest.mark.parametrize("k", [130, 4096, 65_536])
def test_fp8_blocks_are_within_float32_of_float64(k: int) -> None:
    form, x, weight, operands = block_case(2, 3, k)
    result = fusedops.gemm(x, weight, None, operands, weight=form, out_dtype=torch.float32)
    x_values = torch.from_numpy(group_values_of_x(x, operands["x_scale"]))
    w_values = torch.from_numpy(block_values(weight, operands["w_scale"]))
    error = (result.double() - x_values @ w_values.t()).abs()
    # Sums of 128 on their own: their error does not grow with K, that of adding them up does.
    magnitude = x_values.abs() @ w_values.abs().t()
    assert (error <= magnitude * 8 * (128**0.5 + form.k_blocks**0.5) * FLOAT32_ROUNDOFF).all()


@pytest.mark.parametrize("k", [32, 4096, 16_384])
def test_int4_is_within_float32_of_float64(k: int) -> None:
    form, weight, operands = int4_case(3, k, 128, zero=True)
    x = normal(2, k).to(torch.bfloat16)
    result = fusedops.gemm(x, weight, None, operands, weight=form, out_dtype=torch.float32)
    values = torch.from_numpy(int4_values(weight, k, 128, operands["w_scale"], operands["w_zero"]))
    error = (result.double() - x.double() @ values.t()).abs()
    assert (error <= (x.double().abs() @ values.abs().t()) * 8 * k**0.5 * FLOAT32_ROUNDOFF).all()


# One operator for all of them


def cases() -> list[Any]:
    """(id, x, weight, chain, operands, format) of each format."""
    int4, w4, w4_operands = int4_case(32, 70, 32, zero=True)
    block, q, w8, block_operands = block_case(4, 32, 200)
    x = normal(4, 70).to(torch.bfloat16)
    wide = {"w_scale": scales(1, 32), "bias": normal(32)}
    int8 = integers(-127, 127, 32, 70).to(torch.int8)
    tiled = replace(int4, layout="wgmma16")
    return [
        ("int4", x, w4, "gate", w4_operands, int4),
        ("int4 tiles", x, to_tiles(w4, 70, "wgmma16"), "none", w4_operands, tiled),
        ("int8_wo", x, int8, "bias|act(silu)", wide, Int8Weight(32, 70)),
        ("fp8_wo", x, int8.to(E4M3), "bias", wide, Fp8Weight(32, 70)),
        ("block_fp8", q, w8, "none", block_operands, block),
        ("w4a8", x.to(E4M3), w4, "scale(x_scale,m)", {**w4_operands, "x_scale": scales(4)}, int4),
    ]


every_format = pytest.mark.parametrize("case", cases(), ids=lambda case: case[0])


def spec_and_operands(case: Any) -> tuple[GemmSpec, list[Tensor]]:
    _, _, _, chain, operands, form = case
    spec = GemmSpec.parse(f"none > {form} > {chain} > bf16")
    return spec, [operands[name] for name in spec.operand_names]


@every_format
def test_opcheck(case: Any) -> None:
    spec, operands = spec_and_operands(case)
    tensors = (case[1], case[2])
    # torch's test of a schema multiplies its inputs, which nothing does with e4m3 ones.
    is_schema_tested = all(tensor.dtype != E4M3 for tensor in tensors)
    tests = [name for name in OPCHECKS if is_schema_tested or name != "test_schema"]
    torch.library.opcheck(gemm_op, (*tensors, operands, spec.text), test_utils=tests)


@every_format
def test_compiled_equals_eager(case: Any) -> None:
    torch.compiler.reset()
    _, x, w, chain, operands, form = case
    text = str(form)

    def call(x: Tensor, w: Tensor, operands: dict[str, Tensor]) -> Any:
        return fusedops.gemm(x, w, chain, operands, weight=text, out_dtype=torch.bfloat16)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w, operands), call(x, w, operands))


@every_format
def test_batch_invariant_rows_are_those_of_one_row(case: Any) -> None:
    name, x, w, chain, operands, form = case
    options = {"weight": form, "out_dtype": torch.float32, "batch_invariant": True}
    whole = fusedops.gemm(x, w, chain, operands, **options)
    for i in range(len(x)):
        own = dict(operands)
        if name == "block_fp8":
            own["x_scale"] = own["x_scale"][:, i : i + 1]
        elif "x_scale" in own:
            own["x_scale"] = own["x_scale"][i : i + 1]
        assert torch.equal(fusedops.gemm(x[i : i + 1], w, chain, own, **options), whole[i : i + 1])


@every_format
def test_batched_rows_and_a_given_result(case: Any) -> None:
    _, x, w, chain, operands, form = case
    dtype = torch.bfloat16
    flat = fusedops.gemm(x, w, chain, operands, weight=form, out_dtype=dtype)
    batched = fusedops.gemm(x.view(2, 2, -1), w, chain, operands, weight=form, out_dtype=dtype)
    assert torch.equal(batched.flatten(0, 1), flat)
    big = torch.full((4, flat.shape[1] + 3), 96.0, dtype=dtype)
    out = big[:, : flat.shape[1]]
    fusedops.gemm(x, w, chain, operands, weight=form, out_dtype=dtype, out=out)
    assert torch.equal(out, flat)
    assert (big[:, flat.shape[1] :] == 96.0).all()


@every_format
def test_no_rows(case: Any) -> None:
    name, x, w, chain, operands, form = case
    own = dict(operands)
    if "x_scale" in own:
        own["x_scale"] = own["x_scale"][:, :0] if name == "block_fp8" else own["x_scale"][:0]
    result = fusedops.gemm(x[:0], w, chain, own, weight=form, out_dtype=torch.bfloat16)
    assert result.shape[0] == 0


def test_layouts_give_the_same_bits() -> None:
    form, weight, operands = int4_case(70, 130, 64)
    for layout, dtype in (("wgmma16", torch.float16), ("wgmma8", E4M3)):
        x = normal(3, 130).to(dtype)
        tiled = to_tiles(weight, 130, layout)
        options = {"out_dtype": torch.float32}
        rows = fusedops.gemm(x, weight, None, operands, weight=form, **options)
        other = replace(form, layout=layout)
        assert torch.equal(fusedops.gemm(x, tiled, None, operands, weight=other, **options), rows)


# Errors


def call(form: WeightFormat, x: Tensor, weight: Tensor, **operands: Tensor) -> Any:
    return fusedops.gemm(x, weight, None, operands, weight=form)


def test_errors_name_the_tensor_and_what_is_accepted() -> None:
    form, weight, operands = int4_case(32, 256, 64)
    x = normal(2, 256).to(torch.bfloat16)
    good = operands["w_scale"]
    with pytest.raises(ShapeError, match=r"'w_scale' has shape \(2, 32\); accepted: \(4, 32\)"):
        call(form, x, weight, w_scale=good[:2])
    with pytest.raises(ShapeError, match=r"change the weight's format"):
        call(form, x, weight, w_scale=good.t())
    with pytest.raises(DTypeError, match=r"'w_scale' has dtype float64; accepted: float32, bf"):
        call(form, x, weight, w_scale=good.double())
    with pytest.raises(ShapeError, match=r"operand 'w_scale' is missing"):
        call(form, x, weight)
    with pytest.raises(ShapeError, match=r"w has shape \(32, 64\); int4\(32,256,64\) is stored"):
        call(form, x, weight[:, :64], w_scale=good)
    with pytest.raises(DTypeError, match=r"w is int8 \(32, 128\).*int4\(32,256,64\) stores uint8"):
        call(form, x, weight.to(torch.int8), w_scale=good)
    with pytest.raises(DTypeError, match=r"x is int8; beside a weight int4\(32,256,64\) it may be"):
        call(form, x.to(torch.int8), weight, w_scale=good)
    with pytest.raises(LayoutError, match=r"w has strides .*last dimension must have stride 1"):
        call(form, x, weight.t().contiguous().t(), w_scale=good)
    with pytest.raises(ConfigError, match=r"unknown operand\(s\) w_zero"):
        call(form, x, weight, w_scale=good, w_zero=good)
    with pytest.raises(DeviceError, match=r"x is on cpu, operand 'w_scale' on meta"):
        call(form, x, weight, w_scale=good.to("meta"))


def test_tiles_are_for_one_kind_of_activations() -> None:
    form, weight, operands = int4_case(32, 128)
    tiled = to_tiles(weight, 128, "wgmma8")
    x = normal(2, 128).to(torch.bfloat16)
    with pytest.raises(LayoutError, match=r"x is bfloat16 and w is laid out as wgmma8; accepted.*"):
        call(replace(form, layout="wgmma8"), x, tiled, **operands)
    other = torch.empty(2, 4, 512, dtype=torch.uint8)[:, ::2]
    with pytest.raises(LayoutError, match="tiles must be contiguous"):
        call(replace(form, layout="wgmma16"), x, other, **operands)


def test_block_scales_are_checked() -> None:
    form, x, weight, operands = block_case(3, 200, 300)
    dtypes = {"out_dtype": torch.float32}
    with pytest.raises(ShapeError, match=r"'x_scale' has shape \(3, 3\)|'w_scale'"):
        call(form, x, weight, x_scale=operands["x_scale"], w_scale=operands["w_scale"].t())
    with pytest.raises(ShapeError, match=r"'x_scale' has shape \(3, 2\); accepted: \(3, 3\)"):
        call(form, x, weight, x_scale=operands["x_scale"][:, :2], w_scale=operands["w_scale"])
    bf16 = operands["x_scale"].bfloat16()
    with pytest.raises(DTypeError, match=r"'x_scale' has dtype bfloat16; accepted: float32"):
        call(form, x, weight, x_scale=bf16, w_scale=operands["w_scale"])
    with pytest.raises(DTypeError, match=r"x is float32; beside a weight block_fp8\(200,300\)"):
        call(form, x.float(), weight, **operands)
    with pytest.raises(ConfigError, match=r"operand name\(s\) x_scale twice"):
        fusedops.gemm(x, weight, "scale(x_scale,m)", operands, weight=form, **dtypes)


# Providers


def on_gpu(form: WeightFormat, x_dtype: torch.dtype) -> GemmProblem:
    spec = GemmSpec(form, out_dtype=torch.bfloat16)
    dtypes = tuple(operand.dtypes[0] for operand in spec.operands)
    return GemmProblem(spec, 16, x_dtype, dtypes, "cuda", 132, 16, "sm_90a", "NVIDIA H200")


@pytest.mark.parametrize("form", [Int8Weight(64, 128), Fp8Weight(64, 128)], ids=str)
def test_no_gpu_call_dequantizes_unless_it_is_asked_to(form: WeightFormat) -> None:
    problem = on_gpu(form, torch.bfloat16)

    def select() -> str:
        return choose("gemm", lambda name: answer(name, problem), current_policy())

    with pytest.raises(
        UnsupportedError, match=r"float32 values of all of the bf16 x and"
    ) as caught:
        select()
    assert caught.value.reasons.keys() >= {"cublas", "reference"}
    with use_provider("reference"):
        assert select() == "reference"


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
@pytest.mark.parametrize("m", [1, 16, 17, 40])
def test_cublas_products_of_8_bits(dtype: torch.dtype, m: int) -> None:
    x = integers(-8, 8, m, 96, seed=m).to(dtype)
    w = integers(-8, 8, 32, 96).to(dtype)
    product = product_8_bit(x, w)
    assert product.dtype == torch.float32
    assert (floats(product) == floats(x) @ floats(w).T).all()


@pytest.mark.parametrize(
    ("n", "k", "aligned", "reason"),
    [
        (64, 128, 16, None),
        (64, 120, 16, "N and K multiples of 16, got M=16, N=64, K=120"),
        (40, 128, 16, "N and K multiples of 16"),
        (64, 128, 8, "row pitches are multiples of 16 bytes, got multiples of 8"),
    ],
)
def test_cublas_serves_8_bits_where_it_can_and_nothing_else_does(
    n: int, k: int, aligned: int, reason: str | None
) -> None:
    problem = replace(on_gpu(Dense(n, k), E4M3), aligned_bytes=aligned)
    ours = {"cublas", "reference"}

    def ask(name: str) -> Support | None:
        return answer(name, problem) if name in ours else None

    if reason is None:
        assert choose("gemm", ask, current_policy()) == "cublas"
        return
    with pytest.raises(UnsupportedError) as caught:
        choose("gemm", ask, current_policy())
    assert reason in caught.value.reasons["cublas"]
    assert "float32 values of all of the e4m3 x" in caught.value.reasons["reference"]
    empty = replace(problem, m=0)
    assert answer("reference", empty) == SUPPORTED


def test_bytes_of_a_quantized_problem() -> None:
    problem = on_gpu(Int4(64, 256, 128, "uint8"), torch.bfloat16)
    weight = 64 * 128 + 64 * 2 * (2 + 1)
    assert problem.minimum_bytes == weight + 16 * 256 * 2 + 16 * 64 * 2
    block = on_gpu(BlockFp8(256, 256), E4M3)
    assert block.minimum_bytes == 256 * 256 + 4 * 4 + 16 * 256 + 16 * 256 * 2


def test_kernels_get_scales_of_groups_in_padded_rows() -> None:
    form, _, _, operands = block_case(6, 256, 300)
    spec = GemmSpec(form)
    read = operands_read(spec, [operands[name] for name in spec.operand_names], 6)
    assert [tuple(t.shape) for t in read] == [(3, 6), (2, 3)]
    assert read[0].stride() == (8, 1)
    assert read[0].data_ptr() == operands["x_scale"].data_ptr()


def test_explain_takes_a_format() -> None:
    text = str(fusedops.explain_problem(16, 64, 128, weight="int4(64,128,32)"))
    assert "int4(64,128,32)" in text
    assert "reference" in text
    form, weight, operands = int4_case(64, 128, 32)
    x = normal(16, 128).to(torch.bfloat16)
    assert str(fusedops.explain(x, weight, None, operands, weight=form)) == text
    with pytest.raises(ConfigError, match=r"int4\(64,128,32\); accepted: one of \(64,1\)"):
        fusedops.explain_problem(16, 64, 1, weight="int4(64,128,32)")


def test_an_operand_of_a_node_has_no_axis_of_weights() -> None:
    from fusedops.epilogue import Operand

    with pytest.raises(ConfigError, match=r"axis is 'weight'; accepted are scalar, m, n"):
        Operand("w_scale", "weight")
