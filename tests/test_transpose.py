"""transpose: every dtype, any strides, odd shapes, never a view."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops.errors import DTypeError, ShapeError, UnsupportedError
from fusedops.ops.transpose import TRANSPOSE_DTYPES, transpose

# torch says so whenever it creates a complex32 tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

B54_DTYPES = (torch.int8, torch.bfloat16, torch.float32, torch.float64)


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Elements of random bytes: every bit pattern, NaN payloads too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    *leading, last = shape
    size = (*leading, last * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def elements(x: Tensor) -> list[bytes]:
    """The bytes of each element in row-major order, read without any torch operation on them."""
    flat = b"".join(_bytes_at(x, index) for index in _positions(tuple(x.shape)))
    size = x.element_size()
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _positions(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    positions: list[tuple[int, ...]] = [()]
    for size in shape:
        positions = [(*head, i) for head in positions for i in range(size)]
    return positions


def _bytes_at(x: Tensor, index: tuple[int, ...]) -> bytes:
    offset = x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=True))
    start = offset * x.element_size()
    return bytes(x.untyped_storage()[start : start + x.element_size()])


def assert_bits_equal(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    flat_got, flat_expected = (
        t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (got, expected)
    )
    assert torch.equal(flat_got, flat_expected)


@pytest.mark.parametrize("dtype", TRANSPOSE_DTYPES, ids=str)
def test_every_dtype_moves_bit_for_bit(dtype: torch.dtype) -> None:
    x = random_bits(2, 5, 3, dtype=dtype)
    y = transpose(x)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 5)
    assert y.is_contiguous()
    by_position = dict(zip(_positions((2, 5, 3)), elements(x), strict=True))
    assert elements(y) == [by_position[b, r, c] for b, c, r in _positions((2, 3, 5))]


def test_the_list_of_dtypes_is_complete() -> None:
    named = [getattr(torch, name) for name in dir(torch)]
    sizes = {d for d in named if isinstance(d, torch.dtype) and d.itemsize in (1, 2, 4, 8)}
    # float4_e2m1fn_x2 packs two elements a byte; the others have no elements of their own, or fill
    # no byte.
    packed = {torch.float4_e2m1fn_x2}
    no_elements = {d for d in sizes if str(d).startswith(("torch.bits", "torch.q"))}
    sub_byte = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}
    assert set(TRANSPOSE_DTYPES) == sizes - packed - no_elements - sub_byte


@pytest.mark.parametrize(
    "shape",
    [(462, 1024), (33, 65), (1, 77), (77, 1), (1, 1), (0, 5), (5, 0), (3, 0, 4), (0, 2, 3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", B54_DTYPES, ids=str)
def test_b54_shapes_that_fill_no_tile(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random_bits(*shape, dtype=dtype)
    y = transpose(x)
    assert y.is_contiguous()
    assert_bits_equal(y, x.transpose(-1, -2))


@pytest.mark.parametrize("dtype", B54_DTYPES, ids=str)
def test_b54_permuted_attention_heads(dtype: torch.dtype) -> None:
    x = random_bits(1, 462, 16, 64, dtype=dtype)
    assert_bits_equal(transpose(x.permute(0, 2, 1, 3)), x.permute(0, 2, 3, 1))


def test_b54_guards_around_the_input_stay_out() -> None:
    big = torch.full((40, 70), float("nan"))
    x = big[3:36, 2:67]
    x.copy_(random_bits(33, 65, dtype=torch.int8).float())
    y = transpose(x)
    assert y.isfinite().all()
    assert torch.equal(y, x.t())
    assert big.isnan().sum() == big.numel() - x.numel()


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_b10_unaligned_view_equals_its_clone(offset: int) -> None:
    for dtype in B54_DTYPES:
        view = random_bits(1, 1025 + offset, dtype=dtype).view(-1)[offset:].view(25, 41)
        assert view.storage_offset() == offset
        assert_bits_equal(transpose(view), view.clone().t())


def test_b12_strided_and_expanded_inputs() -> None:
    qkv = torch.randn(16, 96)
    heads = qkv.split([64, 16, 16], dim=1)[0].view(16, 4, 16)
    for x in (heads, heads.permute(2, 0, 1), qkv[::3, ::5], qkv[:, :1].expand(16, 9)):
        y = transpose(x)
        assert y.is_contiguous()
        assert torch.equal(y, x.transpose(-1, -2))


def test_result_is_never_a_view_of_the_input() -> None:
    for x in (torch.randn(4, 6).t(), torch.randn(1, 6), torch.randn(6, 1), torch.randn(1, 1)):
        before = x.clone()
        transpose(x).fill_(1234.0)
        assert torch.equal(x, before)


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    x = torch.randn(3, 5, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        assert torch.equal(transpose(lazy), lazy.t().clone())


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.ones(4), ShapeError, "at least 2 dimension"),
        (torch.tensor(1), ShapeError, "at least 2 dimension"),
        (torch.ones(2, 2, dtype=torch.complex128), DTypeError, "complex128"),
        (
            torch.ones(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            DTypeError,
            "float4_e2m1fn_x2",
        ),
        (torch.ones(2, 2, requires_grad=True), UnsupportedError, "inference only"),
    ],
    ids=["1-d", "0-d", "complex128", "float4", "grad"],
)
def test_transpose_refuses(x: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        transpose(x)


@pytest.mark.parametrize(
    "x",
    [torch.randn(3, 5), torch.randn(4, 3, 5).permute(2, 0, 1).bfloat16(), torch.randn(0, 5)],
    ids=["dense", "permuted", "empty"],
)
def test_b37_transpose_passes_opcheck(x: Tensor) -> None:
    torch.library.opcheck(torch.ops.fusedops.transpose.default, (x,))


def test_b39_compiles_without_a_graph_break() -> None:
    def gram(x: Tensor) -> Tensor:
        return transpose(x + 1) @ x

    compiled = torch.compile(gram, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 6, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), gram(x))
