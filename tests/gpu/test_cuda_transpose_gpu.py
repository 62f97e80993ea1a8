"""The transpose kernels: every element in its place, none beside it, for any shape and strides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_cases import assert_same_bits, into_poisoned_memory, pinned, replayed
from torch import Tensor

from fusedops.errors import KernelMissingError
from fusedops.ops.transpose import TRANSPOSE_DTYPES, transpose
from fusedops.providers import cuda
from fusedops.providers.cuda_base import CudaOp
from fusedops.providers.cuda_transpose import plan_transpose, tile_side, unaligned_tile

COVERS = (
    "csrc/transpose.cu",
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/ops/transpose.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

CARRIERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
"""One dtype of each size."""


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with pinned("transpose"):
        yield


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    *leading, last = shape
    size = (*leading, last * dtype.itemsize)
    raw = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device="cuda")
    return raw > 127 if dtype == torch.bool else raw.view(dtype)


def assert_transposed(x: Tensor) -> None:
    """Right, into poisoned memory too, and twice the same."""
    expected = x.transpose(-1, -2)
    got = transpose(x)
    assert_same_bits(got, expected)
    assert_same_bits(into_poisoned_memory(cuda._TRANSPOSE, x), expected)


@pytest.mark.parametrize("dtype", TRANSPOSE_DTYPES, ids=str)
def test_every_dtype_moves_bit_for_bit(dtype: torch.dtype) -> None:
    x = random(3, 40, 72, dtype=dtype)
    got = transpose(x)
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert got.dtype == dtype
    assert_same_bits(got.view(carrier), x.view(carrier).transpose(-1, -2))


@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
def test_sizes_around_a_tile(dtype: torch.dtype) -> None:
    side, width = tile_side(dtype.itemsize), 16 // dtype.itemsize
    for rows in (1, 7, 8, width, side - 1, side, side + 1, side + width, 3 * side + 5):
        for columns in (1, 9, side - width, side, side + 3, 2 * side + width):
            assert_transposed(random(rows, columns, dtype=dtype))


@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
def test_rows_that_start_anywhere(dtype: torch.dtype) -> None:
    tile = unaligned_tile(dtype.itemsize)
    side = tile.columns
    for rows in (tile.rows, tile.rows + 1, 3 * tile.rows + 7, 5 * tile.rows):
        for columns in (side, side + 1, 3 * side - 5, 4 * side + 17):
            assert_transposed(random(rows, columns, dtype=dtype))
    flat = random(2 * 400 * (4 * side + 3) + 8, dtype=dtype)
    for offset in (1, 2, 3, 5):
        view = flat[offset : offset + 2 * 400 * (4 * side + 3)].view(2, 400, 4 * side + 3)
        assert_transposed(view)
        assert_transposed(view[:, 3:391, 1:])
        assert_transposed(view[0, :1].expand(300, 4 * side + 3))
    # More rows of tiles than neighbouring blocks take below one another.
    tall = 2**17 // dtype.itemsize + 1
    assert_transposed(random(tall, side + 1, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [(462, 1024), (33, 65), (1, 77), (77, 1), (0, 5), (5, 0), (1, 462, 16, 64)], ids=str
)
def test_b54_shapes_that_fill_no_tile(shape: tuple[int, ...]) -> None:
    for dtype in CARRIERS:
        x = random(*shape, dtype=dtype) if 0 not in shape else torch.empty(shape, device="cuda")
        assert_transposed(x)
        assert_transposed(x.transpose(-1, -2))
        if x.dim() == 4:
            assert_transposed(x.permute(0, 2, 1, 3))


@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
def test_b10_views_at_any_offset_and_with_any_strides(dtype: torch.dtype) -> None:
    flat = random(70_000, dtype=dtype)
    for offset in (1, 2, 3, 4, 7):
        assert_transposed(flat[offset : offset + 128 * 256].view(128, 256))
        assert_transposed(flat[offset : offset + 127 * 255].view(127, 255))
    big = random(600, 700, dtype=dtype)
    views = [big[5:400, 3:301], big[::2, ::3], big.t()[3:300, 1:90], big[:, :640], big[1:, 16:656]]
    batch = random(4, 6, 5, 48, 96, dtype=dtype)
    views += [batch, batch[::2, ::3, ::2], batch.permute(1, 0, 2, 3, 4), batch[:, :, 0]]
    views += [batch[0, 0, :1].expand(7, 48, 96), batch[0, 0, 0, :, None].expand(48, 5, 96)]
    for x in views:
        assert_transposed(x)


def test_b12_heads_cut_from_a_wider_tensor() -> None:
    qkv = random(1024, 4096, dtype=torch.bfloat16)
    q = qkv.split([2048, 1024, 1024], dim=1)[0].view(1024, 16, 128)
    assert_transposed(q)
    assert_transposed(q.permute(1, 0, 2))


def test_long_and_narrow_matrices() -> None:
    for rows, columns in ((1_000_003, 3), (3, 1_000_003), (100_000, 7), (2, 1 << 20)):
        assert_transposed(random(rows, columns, dtype=torch.float32))
    assert_transposed(random(100_000, 2, 3, dtype=torch.int16))


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (8192, 8192, torch.float32),
        (8191, 8193, torch.float32),
        (16384, 16384, torch.bfloat16),
        (16384, 16384, torch.int8),
        (8193, 16381, torch.int8),
    ],
    ids=str,
)
def test_the_sizes_that_are_measured(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = random(rows, columns, dtype=dtype)
    assert_same_bits(transpose(x), x.t())


def test_a_capture_replays_with_changed_inputs() -> None:
    x = random(300, 520, dtype=torch.float32)
    inputs = [random(300, 520, dtype=torch.float32, seed=seed) for seed in (1, 2, 3)]
    for result, values in zip(replayed(lambda: transpose(x), x, inputs), inputs, strict=True):
        assert_same_bits(result, values.t())


def test_dependent_launches_see_what_the_kernel_ahead_wrote() -> None:
    x = random(2048, 1024, dtype=torch.float32)
    y = x
    for _ in range(64):
        y = transpose(y)
    assert_same_bits(y, x)


def test_a_new_shape_is_captured_where_its_kernel_is_compiled() -> None:
    assert_transposed(random(65, 130, 8, 24, dtype=torch.int16))
    x = random(66, 130, 8, 24, dtype=torch.int16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = transpose(x)
    graph.replay()
    assert_same_bits(captured, x.transpose(-1, -2))


def test_b30_a_kernel_that_is_not_compiled_is_refused_in_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    x = random(64, 128, dtype=torch.int16)
    cold = CudaOp(plan_transpose)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(0)
            cold.run(x)

    with pytest.raises(KernelMissingError, match="warm-up"):
        capture()
    assert_same_bits(cold.run(x), x.t())
    assert_same_bits(transpose(x), x.t())


def test_it_works_under_torch_compile() -> None:
    x = random(100, 60, dtype=torch.float32).nan_to_num_()
    compiled = torch.compile(lambda t: transpose(t + 1.0), fullgraph=True)
    assert_same_bits(compiled(x), (x + 1.0).t())


def test_other_threads_and_streams_have_launches_of_their_own() -> None:
    import threading

    inputs = [random(512, 512 + 8 * i, dtype=torch.float32, seed=i) for i in range(4)]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        x, stream = inputs[index], torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                result = cuda._TRANSPOSE.run(x)
            stream.synchronize()
        if not torch.equal(result.view(torch.int32), x.view(torch.int32).t()):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transpose(inputs[0])
    assert not wrong


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    rows, columns = 46_352, 46_368
    assert rows * columns > 2**31
    for x in (
        random(rows, columns, dtype=torch.int8),
        random(rows + 1, columns + 1, dtype=torch.int8)[1:, 1:],
    ):
        got = transpose(x)
        for start in range(0, columns, 8192):
            assert torch.equal(got[start : start + 8192], x[:, start : start + 8192].t())
