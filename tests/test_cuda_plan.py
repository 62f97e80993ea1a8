"""Plans of the CUDA kernels: geometry, alignment, splitting and refusals, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedops.errors import UnsupportedError
from fusedops.ops.op import OPS
from fusedops.ops.reduce import REDUCE_DTYPES, REDUCTIONS
from fusedops.providers.cuda_base import view_of
from fusedops.providers.cuda_plan import (
    OUT,
    WORK,
    Gpu,
    Launch,
    Plan,
    View,
    X,
    coalesce,
    dims_constants,
    power_of_two_from,
)
from fusedops.providers.cuda_reduce import plan_reduce
from fusedops.providers.cuda_reduce_ops import KERNEL_OPS
from fusedops.providers.cuda_transpose import plan_transpose, tile_side, unaligned_tile

H200 = Gpu("sm_90a", 132)
A100 = Gpu("sm_80", 108)


def view(*shape: int, dtype: torch.dtype = torch.float32, aligned_bytes: int = 16) -> View:
    """A contiguous tensor."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return View(shape, tuple(strides), dtype, aligned_bytes)


def name_of(launch: Launch) -> str:
    """``reduce_rows`` of ``fusedops::reduce_rows<...>``."""
    return launch.kernel.removeprefix("fusedops::").partition("<")[0]


def transposed(x: View) -> Launch:
    (launch,) = plan_transpose(x, H200).launches
    return launch


def reduced(x: View, op: str, *dims: int, gpu: Gpu = H200) -> Plan:
    return plan_reduce(x, gpu, op, dims or None, False)


# Dimensions


@pytest.mark.parametrize(
    ("axes", "joined"),
    [
        ([], []),
        ([(1, 7)], []),
        ([(3, 4), (4, 1)], [(12, 1)]),
        ([(2, 20), (1, 99), (5, 4), (4, 1)], [(40, 1)]),
        ([(2, 21), (5, 4), (4, 1)], [(2, 21), (20, 1)]),
        ([(4, 1), (3, 4)], [(4, 1), (3, 4)]),
        ([(3, 0), (4, 0)], [(12, 0)]),
        ([(5, 1), (1, 1), (6, 0)], [(5, 1), (6, 0)]),
    ],
)
def test_dimensions_that_lie_behind_one_another_are_joined(
    axes: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    assert coalesce(axes) == joined


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=5))
def test_joining_keeps_every_position_in_its_order(axes: list[tuple[int, int]]) -> None:
    def offsets(dims: list[tuple[int, int]]) -> list[int]:
        found = [0]
        for size, stride in dims:
            found = [base + i * stride for base in found for i in range(size)]
        return found

    assert offsets(coalesce(axes)) == offsets(axes)


def test_dims_are_padded_in_front_and_limited() -> None:
    assert dims_constants([(5, 2)], "dimensions") == (1, 1, 5, 0, 0, 0, 2)
    with pytest.raises(UnsupportedError, match="walks up to 4 batch dimensions"):
        dims_constants([(2, 3)] * 5, "batch dimensions")


def test_powers_of_two() -> None:
    assert [power_of_two_from(n) for n in (0, 1, 2, 3, 4, 5, 1025)] == [1, 1, 2, 4, 4, 8, 2048]


@pytest.mark.parametrize(("offset", "aligned"), [(0, 16), (1, 2), (2, 4), (3, 2), (4, 8), (8, 16)])
def test_a_view_knows_the_alignment_of_its_address(offset: int, aligned: int) -> None:
    base = torch.empty(64, dtype=torch.bfloat16)
    base = base[(-base.data_ptr() // 2) % 8 :]
    found = view_of(base[offset : offset + 12].view(3, 4))
    assert (found.shape, found.strides, found.aligned_bytes) == ((3, 4), (4, 1), aligned)


def test_clusters_exist_from_hopper_on() -> None:
    known = {"sm_80": False, "sm_89": False, "sm_90a": True, "sm_100a": True, "sm_120a": True}
    assert {arch: Gpu(arch, 1).has_clusters for arch in known} == known


# Transpose


@pytest.mark.parametrize(
    ("x", "loads", "stores"),
    [
        (view(8192, 8192), True, True),
        (view(127, 8193), False, False),
        (view(8191, 60), True, False),
        (view(8192, 63), False, True),
        (view(100, 100, dtype=torch.bfloat16), False, False),
        (view(104, 104, dtype=torch.bfloat16), True, True),
        (view(104, 104, dtype=torch.int8), False, False),
        (view(6, 90, 112, dtype=torch.int8), True, False),
        (view(64, 64, aligned_bytes=4), False, True),
        (View((64, 64), (66, 1), torch.float32), False, True),
        (View((64, 64), (68, 1), torch.float32), True, True),
        (View((3, 64, 64), (4098, 64, 1), torch.float32), False, True),
        (View((64, 64), (200, 3), torch.float32), False, True),
        (View((256, 256), (800, 3), torch.float32), False, True),
    ],
)
def test_vectors_are_used_where_every_row_allows_them(x: View, loads: bool, stores: bool) -> None:
    launch = transposed(x)
    assert name_of(launch) == "transpose_tiles"
    assert launch.kernel.endswith(f"{str(loads).lower()}, {str(stores).lower()}>")


@pytest.mark.parametrize(
    "x",
    [
        view(8191, 8193),
        view(8191, 8192),
        view(8192, 8191),
        view(128, 64, aligned_bytes=4),
        view(5, 129, 131, dtype=torch.float64),
        View((256, 256), (257, 1), torch.int8),
        view(16383, 16385, dtype=torch.int8),
        View((2, 256, 256), (65537, 256, 1), torch.bfloat16),
        View((256, 256), (0, 1), torch.int16, aligned_bytes=2),
    ],
)
def test_rows_that_start_anywhere_take_shifted_or_realigned_tiles(x: View) -> None:
    launch = transposed(x)
    size = x.dtype.itemsize
    tile = unaligned_tile(size)
    assert name_of(launch) == tile.name
    assert tile.name == ("transpose_shifted" if size >= 4 else "transpose_realigned")
    rows, columns, row_stride, row_tiles, column_tiles, group = launch.constants[:6]
    assert (rows, columns, row_stride) == (*x.shape[-2:], x.strides[-2])
    assert (row_tiles, column_tiles) == (-(-rows // tile.rows), -(-columns // tile.columns))
    assert group == min(row_tiles, (128 << 10) // (tile.rows * size))
    assert launch.blocks == (math.prod(x.shape[:-2]) * row_tiles * column_tiles, 1)
    # Every row of the result with a sector that a neighbour writes, and its skew.
    assert launch.shared_bytes >= (tile.rows * size + 31) * tile.columns
    assert (launch.threads, launch.shared_bytes) == (tile.threads, tile.shared_bytes)
    # Three blocks an SM: 227 KB, of which each takes one more.
    assert launch.shared_bytes <= 74 << 10
    assert len(launch.tensors) + len(launch.constants) == len(launch.parameters)


def test_neighbouring_blocks_write_whole_rows_of_up_to_128_kb() -> None:
    for rows, dtype, group in (
        (8192, torch.float32, 128),
        (32768, torch.float32, 512),
        (16384, torch.bfloat16, 128),
        (2**18, torch.float32, 512),
        (2**18, torch.int8, 512),
        (8191, torch.float32, 64),
        (32767, torch.float32, 256),
    ):
        launch = transposed(view(rows, 1024, dtype=dtype))
        place = 6 if name_of(launch) == "transpose_tiles" else 5
        assert launch.constants[place] == group


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.int64])
def test_tiles_cover_the_matrix_once(dtype: torch.dtype) -> None:
    side, width = tile_side(dtype.itemsize), 16 // dtype.itemsize
    assert side * dtype.itemsize == 256
    for rows, columns in ((side, side), (side + width, side), (300 * side, 2 * side + width)):
        launch = transposed(view(3, rows, columns, dtype=dtype))
        row_tiles, column_tiles, group = launch.constants[4:7]
        assert group == min(row_tiles, 512)
        assert (row_tiles - 1) * side < rows <= row_tiles * side
        assert (column_tiles - 1) * side < columns <= column_tiles * side
        assert launch.blocks == (3 * row_tiles * column_tiles, 1)
        assert launch.shared_bytes == side * 256 <= 64 << 10
        assert len(launch.tensors) + len(launch.constants) == len(launch.parameters)


@pytest.mark.parametrize(
    "x",
    [
        View((64, 48), (1, 64), torch.float32),
        View((7, 64, 48), (64 * 48, 1, 64), torch.float32),
        view(1, 64),
        view(64, 1),
        view(5, 1, 64),
        View((1, 16, 464, 64), (464 * 64 * 16, 64, 1, 464 * 16), torch.float32),
    ],
)
def test_what_lies_in_order_already_is_copied_as_vectors(x: View) -> None:
    launch = transposed(x)
    assert launch.kernel == "fusedops::transpose_gather<uint4>"
    matrices, row, short = launch.constants[:3]
    assert (short, matrices * row * 4) == (1, math.prod(x.shape))


def test_copies_of_views_between_vectors_move_elements() -> None:
    for x in (View((64, 48), (1, 66), torch.bfloat16), View((60, 48), (1, 64), torch.bfloat16)):
        assert transposed(x).kernel == "fusedops::transpose_gather<unsigned short>"
    launch = transposed(View((64, 48), (1, 64), torch.float32, aligned_bytes=4))
    assert launch.kernel == "fusedops::transpose_gather<unsigned>"


def test_threads_lie_along_the_long_side_of_a_narrow_matrix() -> None:
    tall = transposed(view(100_000, 3))
    assert tall.constants[:7] == (1, 100_000, 3, 3, 1, 1, 100_000)
    wide = transposed(view(3, 100_000))
    assert wide.constants[:7] == (1, 100_000, 3, 1, 100_000, 3, 1)
    assert tall.blocks == wide.blocks == (-(-100_000 // 256), 1)
    assert transposed(view(1 << 24, 3)).blocks == (16 * H200.sms, 1)


def test_a_transpose_of_more_than_2_to_31_elements_has_64_bit_places() -> None:
    launch = transposed(view(70_000, 70_000, dtype=torch.int8))
    assert launch.parameters.count("int64") == len(launch.parameters) - 5
    assert launch.constants[:3] == (70_000, 70_000, 70_000)


def test_b54_empty_matrices_launch_nothing() -> None:
    for shape in ((0, 5), (5, 0), (0, 3, 4)):
        plan = plan_transpose(view(*shape), H200)
        assert plan.launches == ()
        assert plan.shape == (*shape[:-2], shape[-1], shape[-2])


def test_batch_dimensions_are_joined_or_refused() -> None:
    assert transposed(view(2, 3, 2, 3, 2, 3, 16, 16)).constants[7:] == (1, 1, 216, 0, 0, 0, 256)
    x = View((2,) * 5 + (16, 16), (9000, 4000, 1900, 900, 400, 16, 1), torch.float32)
    with pytest.raises(UnsupportedError, match="up to 4 batch dimensions"):
        plan_transpose(x, H200)


def test_too_many_tiles_are_refused() -> None:
    x = View((2**31, 8, 8), (0, 8, 1), torch.float32)
    with pytest.raises(UnsupportedError, match="2147483647 tiles, got 2147483648"):
        plan_transpose(x, H200)


# Reduce


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_results_have_the_shape_and_dtype_of_the_operation(op: str, keepdim: bool) -> None:
    assert set(KERNEL_OPS) == set(REDUCTIONS)
    for dtype in REDUCTIONS[op].dtypes:
        for shape, dim in (((3, 4, 5), [1]), ((3, 4, 5), None), ((), None), ((7,), [-1])):
            x = torch.empty(shape, dtype=dtype, device="meta")
            expected = OPS["reduce"]._run_fake(x, op, dim, keepdim)
            plan = plan_reduce(view(*shape, dtype=dtype), H200, op, dim, keepdim)
            assert (plan.shape, plan.dtype) == (tuple(expected.shape), expected.dtype)


@pytest.mark.parametrize(
    ("x", "dims", "kernel"),
    [
        (view(16384, 16384), (1,), "reduce_rows"),
        (view(16384, 16384), (0,), "reduce_columns"),
        (view(2**28), (), "reduce_rows"),
        (view(2**16), (), "reduce_cluster"),
        (view(64, 128256), (1,), "reduce_cluster"),
        (view(8, 1000, 64), (1,), "reduce_columns"),
        (view(8, 1000, 64), (0, 2), "reduce_gather"),
        (view(8, 1000, 128), (0, 2), "reduce_rows"),
        (View((512, 4096), (1, 512), torch.float32), (0,), "reduce_rows"),
        (View((512, 4096), (1, 512), torch.float32), (1,), "reduce_columns"),
        (View((64, 64, 64), (8192, 64, 2), torch.float32), (1,), "reduce_gather"),
        (view(5, 0), (1,), "reduce_rows"),
        (view(0), (), "reduce_rows"),
        (view(4, 1), (1,), "reduce_rows"),
    ],
)
def test_the_kernel_follows_where_elements_lie(x: View, dims: tuple[int, ...], kernel: str) -> None:
    assert name_of(reduced(x, "sum", *dims).launches[0]) == kernel


def test_without_clusters_few_rows_are_split_over_blocks() -> None:
    plan = reduced(view(2**16), "sum", gpu=A100)
    assert [name_of(launch) for launch in plan.launches] == ["reduce_rows", "reduce_finish"]


@pytest.mark.parametrize("gpu", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize(
    ("x", "dims"),
    [
        (view(2**28), ()),
        (view(2**28 + 12345), ()),
        (view(3, 10_000_001, dtype=torch.bfloat16), (1,)),
        (view(16384, 16384), (0,)),
        (view(100_003, 24), (0,)),
        (view(500, 3, 4000), (0, 2)),
        (View((10**6, 3), (5, 2), torch.float32), (0,)),
    ],
)
def test_parts_cover_a_row_once_and_fit_the_memory_between(
    x: View, dims: tuple[int, ...], gpu: Gpu
) -> None:
    plan = reduced(x, "argmax" if len(dims) == 1 else "logsumexp", *dims, gpu=gpu)
    first, finish = plan.launches
    assert (first.tensors, finish.tensors) == ((X, WORK), (WORK, OUT))
    kernel, splits = name_of(first), first.blocks[1]
    chunk = first.constants[2 if kernel != "reduce_rows" else 3]
    segments = first.constants[1] if kernel == "reduce_rows" else 1
    units = segments if segments > 1 else first.constants[1 + (kernel == "reduce_rows")]
    assert (splits - 1) * chunk < units <= splits * chunk
    assert 2 <= splits <= 65535
    results = math.prod(plan.shape)
    count, parts, result_stride, part_stride, length, lanes = finish.constants
    assert (count, parts) == (results, splits)
    assert length == math.prod(x.shape) // results
    last = (count - 1) * result_stride + (parts - 1) * part_stride
    accumulator_bytes = plan.work_bytes // (splits * results)
    assert last + 1 == splits * results
    assert accumulator_bytes == (16 if len(dims) == 1 else 8)
    assert finish.blocks[0] * (256 // lanes) >= count


def test_long_rows_are_split_into_more_pieces_than_run_at_once() -> None:
    for shape, pieces in (
        ((2**28,), 4096),
        ((2, 2**27), 2048),
        ((2**21,), 256),
        ((1000, 2**18), 1),
    ):
        first = reduced(view(*shape), "sum", len(shape) - 1).launches[0]
        assert (name_of(first), first.blocks[1]) == ("reduce_rows", pieces)


def test_every_launch_has_a_value_for_every_parameter() -> None:
    shapes = (view(2**20), view(64, 200_000), view(300, 40, 50), view(10, 10, 10, 10))
    for x in shapes:
        for gpu in (H200, A100):
            for dims in ((), (0,), (len(x.shape) - 1,)):
                for launch in reduced(x, "max", *dims, gpu=gpu).launches:
                    given = len(launch.tensors) + len(launch.constants)
                    assert given == len(launch.parameters)
                    assert launch.kernel in launch.program.kernels
                    assert min(launch.blocks) >= 1


@pytest.mark.parametrize(
    ("rows", "cluster", "threads"),
    [
        (1, 8, 512),
        (16, 8, 512),
        (17, 4, 512),
        (33, 4, 512),
        (34, 2, 1024),
        (64, 2, 1024),
        (66, 2, 1024),
        (67, 2, 512),
        (132, 2, 512),
        (133, 8, 512),
    ],
)
def test_the_blocks_of_few_rows_run_at_once(rows: int, cluster: int, threads: int) -> None:
    (launch,) = reduced(view(rows, 128256), "argmax", 1).launches
    assert (launch.cluster, launch.threads) == (cluster, threads)
    assert launch.blocks == (rows * cluster, 1)
    assert f", {cluster}, {threads}>" in launch.kernel
    assert rows > 132 or launch.blocks[0] * threads <= 132 * 1024
    # Blocks of 1024 threads leave too few registers for other elements.
    (other,) = reduced(view(rows, 128256, dtype=torch.bfloat16), "argmax", 1).launches
    assert (other.cluster, other.threads) == (cluster, 512)


def test_columns_are_split_into_few_rounds_of_which_the_last_is_full() -> None:
    for columns, splits in ((16384, 8), (16384 // 8, 64), (75 * 1024, 3), (2**18, 1)):
        first = reduced(view(2**14, columns), "sum", 0).launches[0]
        assert (name_of(first), first.blocks[1]) == ("reduce_columns", splits)


def test_a_cluster_of_blocks_takes_all_of_a_row() -> None:
    (launch,) = reduced(view(3, 99_999, dtype=torch.bfloat16), "max", 1).launches
    length, chunk = launch.constants[:2]
    assert (launch.blocks, launch.cluster, launch.threads) == ((24, 1), 8, 512)
    assert 8 * chunk >= length == 99_999
    assert chunk * 2 % 16 == 0


@pytest.mark.parametrize(
    ("x", "width"),
    [
        (view(4096, 4096), 4),
        (view(4096, 4096, dtype=torch.bfloat16), 8),
        (view(4096, 4096, dtype=torch.int8), 8),
        (view(4096, 4096, dtype=torch.float64), 2),
        (view(4096, 4097), 1),
        (view(4096, 4096, aligned_bytes=4), 1),
        (View((4096, 64), (66, 1), torch.float32), 1),
        (View((4096, 64), (68, 1), torch.float32), 4),
    ],
)
def test_columns_are_read_as_vectors_where_every_row_allows_it(x: View, width: int) -> None:
    launch = reduced(x, "sum", 0).launches[0]
    assert f", {width}, " in launch.kernel


def test_sums_walk_memory_in_its_order_and_positions_in_the_tensors() -> None:
    x = View((512, 4096), (1, 512), torch.float32)
    assert name_of(reduced(x, "sum").launches[0]) == "reduce_rows"
    assert name_of(reduced(x, "argmax").launches[0]) == "reduce_gather"


def test_b51_empty_dimensions_reduce_to_the_neutral_element_and_empty_results_to_nothing() -> None:
    (launch,) = reduced(view(3, 0), "mean", 1).launches
    assert launch.constants[:3] == (3, 1, 0)
    assert reduced(view(3, 0), "mean", 0).launches == ()


def test_short_rows_share_a_block() -> None:
    for columns, lanes in ((1, 1), (4, 1), (16, 4), (64, 8), (1024, 32), (4096, 128), (16384, 256)):
        launch = reduced(view(100_000, columns), "sum", 1).launches[0]
        assert launch.constants[4] == lanes
        assert launch.blocks[0] == -(-100_000 // (256 // lanes))


def test_more_dimensions_than_the_kernels_walk_are_refused() -> None:
    shape = (2,) * 10
    strides = tuple(3 * 4**d for d in reversed(range(10)))
    x = View(shape, strides, torch.float32)
    with pytest.raises(UnsupportedError, match="walks up to 4 dimensions"):
        plan_reduce(x, H200, "sum", (0, 2, 4, 6, 8), False)


def test_accepted_dtypes_are_those_of_the_operation() -> None:
    for dtype in REDUCE_DTYPES:
        assert reduced(view(8, 8, dtype=dtype), "max", 1).launches
