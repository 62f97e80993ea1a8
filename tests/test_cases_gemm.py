"""GEMM on the CPU: inputs of public bug reports that the other files leave open."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import Case, make_case
from torch import Tensor

import fusedops
from fusedops.errors import DTypeError

op = torch.ops.fusedops.gemm.default
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def given(case: Case) -> tuple[Tensor, Tensor]:
    """The case's bias and residual."""
    bias, residual = case.operands
    assert bias is not None
    assert residual is not None
    return bias, residual


@EACH_DTYPE
@pytest.mark.parametrize("rows", [2, 8, 100])
def test_b12_leading_dimensions_without_one_row_stride(rows: int, dtype: torch.dtype) -> None:
    case = make_case("bias|residual", 2 * rows, 128, 24, dtype)
    bias, residual = given(case)
    wide = torch.zeros(rows, 3, 30, dtype=dtype)
    x = wide[:, :2, 3:27]
    x.copy_(case.x.view(rows, 2, 24))
    result = op(x, case.w, [bias, residual.view(rows, 2, 128)], case.text)[0]
    expected = op(case.x, case.w, case.operands, case.text)[0]
    assert torch.equal(result, expected.view(rows, 2, 128))


@EACH_DTYPE
@pytest.mark.parametrize("kind", ["every second", "transposed", "expanded"])
def test_b12_strided_operands_equal_their_copies(kind: str, dtype: torch.dtype) -> None:
    case = make_case("bias|residual", 8, 48, 64, dtype)
    bias, residual = given(case)
    strided = {
        "every second": [
            torch.stack((bias,) * 2, 1)[:, 0],
            torch.stack((residual,) * 2, 2)[..., 0],
        ],
        "transposed": [bias[None].t().clone().t(), residual.t().contiguous().t()],
        "expanded": [bias[:1].expand(48), residual[:1].expand(8, 48)],
    }[kind]
    copies = [operand.contiguous() for operand in strided]
    result = op(case.x, case.w, strided, case.text)[0]
    assert torch.equal(result, op(case.x, case.w, copies, case.text)[0])


def test_b14_a_row_pitch_of_an_odd_number_of_elements() -> None:
    case = make_case("bias|residual", 5, 16, 8, torch.bfloat16)
    expected = op(case.x, case.w, case.operands, case.text)[0]
    big = torch.full((7, 29), 96.0, dtype=torch.bfloat16)
    view = big[1:6, 5:21]
    torch.ops.fusedops.gemm_out.default(case.x, case.w, case.operands, case.text, [view])
    assert torch.equal(view, expected)
    view.fill_(96.0)
    assert (big == 96.0).all()


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_b16_a_row_of_zeros_is_quantized_to_zeros(rows: int, fmt: str) -> None:
    case = make_case(f"quantize({fmt},group128)", rows, 300, 16, torch.bfloat16)
    case.x[rows // 2] = 0
    codes, scale = op(case.x, case.w, [], case.text)
    assert not codes[rows // 2].float().any()
    assert (scale[:, rows // 2] == 1).all()
    assert scale.isfinite().all()
    assert (scale > 0).all()


def test_b35_operands_of_two_devices_are_refused() -> None:
    case = make_case("bias", 4, 16, 8)
    bias = case.operands[0]
    assert bias is not None
    for x, w, operand in (
        (case.x.to("meta"), case.w, bias),
        (case.x, case.w.to("meta"), bias),
        (case.x, case.w, bias.to("meta")),
    ):
        with pytest.raises(fusedops.DeviceError, match="move both to one device"):
            op(x, w, [operand], case.text)


@pytest.mark.parametrize("m", [1, 4, 12, 13])
@pytest.mark.parametrize(("n", "k"), [(0, 64), (0, 0), (128, 0), (192, 0)])
def test_b04_no_columns_or_nothing_to_sum_at_any_m(m: int, n: int, k: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case("bias|row_stat(absmax)", m, n, k, dtype)
        result, absmax = op(case.x, case.w, case.operands, case.text)
        assert case.operands[0] is not None
        assert torch.equal(result, case.operands[0].expand(m, n))
        assert absmax.shape == (1, m)


@EACH_DTYPE
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    case = make_case("bias|act(silu)", 8, 64, 256, dtype)
    expected = op(case.x, case.w, case.operands, case.text)[0]
    out = torch.empty_like(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = op(case.x, case.w, case.operands, case.text)[0]
        torch.ops.fusedops.gemm_out.default(case.x, case.w, case.operands, case.text, [out])
    assert torch.equal(got, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "chain"),
    [((2, 2, 16), "row_stat(sumsq,4)"), ((2, 3, 0), "tap(t,bf16)|act(silu)")],
)
def test_extra_outputs_of_batched_activations_have_the_shapes_of_the_fake(
    shape: tuple[int, ...], chain: str
) -> None:
    x, w = torch.randn(shape), torch.randn(4, shape[-1])
    spec = f"none > dense(4,{shape[-1]}) > {chain} > f32"
    torch.library.opcheck(op, (x, w, [], spec))


def test_a_prologue_refuses_8_bit_activations() -> None:
    x = torch.ones(2, 16, dtype=torch.int8)
    with pytest.raises(DTypeError, match=r"prologue .* takes float32, bfloat16"):
        fusedops.gemm(x, x, None, {"norm_weight": torch.ones(16)}, prologue="rms_norm(1e-05)")
