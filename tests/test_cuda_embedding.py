"""Plans of the embedding kernel, and its SASS; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cuda_histogram import require_arguments_to_fit
from test_cuda_kernels import compiled, count
from test_cuda_plan import H200, view
from test_nvrtc import ARCHES, needs_wheels, nvdisasm

from fusedops.errors import UnsupportedError
from fusedops.ops.op import OPS
from fusedops.providers.cuda_embedding import plan_embedding, plan_embedding_sumsq
from fusedops.providers.cuda_plan import Launch, View


def launch_of(ids: View, weight: View) -> Launch:
    (launch,) = plan_embedding([ids, weight], H200).launches
    require_arguments_to_fit(launch)
    return launch


@pytest.mark.parametrize(
    ("weight", "word", "columns"),
    [
        (view(99, 4096, dtype=torch.bfloat16), "uint4", 512),
        (view(99, 4096), "uint4", 1024),
        (view(99, 100, dtype=torch.float16), "unsigned short", 100),
        (view(99, 4096, aligned_bytes=4), "unsigned", 4096),
        (View((99, 64), (66, 1), torch.float32), "unsigned", 64),
        (View((99, 64), (1, 99), torch.float32), "unsigned", 64),
        (view(99, 1, dtype=torch.bfloat16), "unsigned short", 1),
    ],
)
def test_rows_move_as_vectors_where_each_allows_it(weight: View, word: str, columns: int) -> None:
    launch = launch_of(view(7, dtype=torch.int32), weight)
    assert launch.kernel.startswith(f"fusedops::embedding<{word}, int, ")
    assert launch.constants[:2] == (99, columns)
    unroll = int(launch.kernel[-2])
    assert launch.blocks[1] * 256 * unroll >= columns > (launch.blocks[1] - 1) * 256 * unroll


def test_the_stride_of_rows_is_in_vectors_like_their_length() -> None:
    weight = View((9, 64), (128, 1), torch.bfloat16)
    assert launch_of(view(3, dtype=torch.int64), weight).constants[1:4] == (8, 16, 1)


def test_ids_of_any_layout_are_walked_in_their_order() -> None:
    ids = View((3, 5), (1, 3), torch.int64)
    launch = launch_of(ids, view(9, 8))
    assert launch.blocks == (15, 1)
    assert launch.constants[-7:] == (1, 3, 5, 0, 0, 1, 3)
    plan = plan_embedding([ids, view(9, 8)], H200)
    assert plan.results == (((3, 5, 8), torch.float32),)
    with pytest.raises(UnsupportedError, match="walks up to 4 dimensions"):
        plan_embedding([View((2,) * 5, (1, 3, 9, 27, 81), torch.int32), view(9, 8)], H200)
    with pytest.raises(UnsupportedError, match="up to 2147483647 ids"):
        plan_embedding([view(2**31, dtype=torch.int32), view(9, 8)], H200)


def test_b04_no_ids_or_columns_take_no_launch() -> None:
    for ids, weight in ((view(0, dtype=torch.int32), view(9, 8)), (view(4), view(9, 0))):
        plan = plan_embedding([View(ids.shape, ids.strides, torch.int64), weight], H200)
        assert plan.launches == ()
        assert plan.results == (((*ids.shape, weight.shape[1]), torch.float32),)


def sumsq_launch(ids: View, weight: View) -> Launch:
    (launch,) = plan_embedding_sumsq([ids, weight], H200).launches
    require_arguments_to_fit(launch)
    return launch


@pytest.mark.parametrize(
    ("weight", "width", "strides"),
    [
        (view(99, 4096, dtype=torch.bfloat16), 8, (4096, 1)),
        (view(99, 4096), 4, (4096, 1)),
        (view(99, 100, dtype=torch.float16), 4, (100, 1)),
        (view(99, 4096, aligned_bytes=4), 1, (4096, 1)),
        (View((99, 64), (66, 1), torch.float32), 2, (66, 1)),
        (View((99, 64), (1, 99), torch.float32), 1, (1, 99)),
        (view(99, 1, dtype=torch.bfloat16), 1, (1, 1)),
    ],
)
@pytest.mark.parametrize("tokens", [1, 64, 4000])
def test_rows_with_sums_are_laid_out_as_norms_are(
    weight: View, width: int, strides: tuple[int, int], tokens: int
) -> None:
    ids = view(tokens, dtype=torch.int32)
    launch = sumsq_launch(ids, weight)
    columns = weight.shape[1]
    assert launch.kernel.endswith(f", int, {width}>")
    assert launch.constants[:5] == (tokens, 99, columns // width, *strides)
    numbers = launch.kernel.split("RowLayout<")[1].split(">")[0].split(", ")
    threads, lanes, packs = map(int, numbers[:3])
    assert threads == launch.threads
    at_once = threads // lanes
    parts = launch.blocks[0] // -(-tokens // at_once)
    assert parts == launch.cluster
    assert lanes * packs * parts * width >= columns
    assert launch.blocks[0] * at_once // parts >= tokens
    plan = plan_embedding_sumsq([ids, weight], H200)
    assert plan.results == (((tokens, columns), weight.dtype), ((1, tokens), torch.float32))


def test_ids_and_rows_that_the_kernel_with_sums_cannot_take_are_refused() -> None:
    ids = View((3, 5), (1, 3), torch.int64)
    launch = sumsq_launch(ids, view(9, 8))
    assert launch.constants[0] == 15
    assert launch.constants[-7:] == (1, 3, 5, 0, 0, 1, 3)
    plan = plan_embedding_sumsq([ids, view(9, 8)], H200)
    assert plan.results == (((3, 5, 8), torch.float32), ((1, 15), torch.float32))
    with pytest.raises(UnsupportedError, match="walks up to 4 dimensions"):
        plan_embedding_sumsq([View((2,) * 5, (1, 3, 9, 27, 81), torch.int32), view(9, 8)], H200)
    with pytest.raises(UnsupportedError, match="rows of up to 65536 elements"):
        sumsq_launch(view(3, dtype=torch.int32), view(9, 65544))
    with pytest.raises(UnsupportedError, match="up to 2147483647 blocks"):
        sumsq_launch(view(2**31, dtype=torch.int32), view(9, 8192))


def test_b04_no_ids_take_no_launch_and_rows_without_elements_get_a_sum() -> None:
    assert plan_embedding_sumsq([view(0, dtype=torch.int32), view(9, 8)], H200).launches == ()
    launch = sumsq_launch(view(3, dtype=torch.int32), view(9, 0))
    assert launch.constants[2] == 0
    assert "RowLayout<128, 1, 1, 1, 1, false, " in launch.kernel


def test_the_operations_have_the_kernels() -> None:
    assert "cuda" in OPS["embedding"].providers
    assert "cuda" in OPS["embedding_sumsq"].providers


@needs_wheels
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("arch", ARCHES)
def test_loads_are_in_flight_before_the_first_store(arch: str, tmp_path: Path) -> None:
    kernel = launch_of(view(7, dtype=torch.int64), view(99, 16384)).kernel
    assert kernel == "fusedops::embedding<uint4, long long, 4>"
    (sass,) = compiled("embedding.cu", (kernel,), arch, tmp_path).values()
    assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") == 4
    assert count(sass, r"STG\.E[\w.]*\.128[\w.]*") == 4
    assert sass.rindex("LDG") < sass.index("STG")
    assert count(sass, r"(?:LDL|STL)[\w.]*") == 0
    assert ("ACQBULK" in sass) is (arch != "sm_80")


@needs_wheels
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("arch", ARCHES)
def test_rows_with_sums_stay_in_registers(arch: str, tmp_path: Path) -> None:
    ids, many = view(7, dtype=torch.int64), view(4000, dtype=torch.int64)
    packs = {
        sumsq_launch(ids, view(99, 4096, dtype=torch.bfloat16)).kernel: 1,
        sumsq_launch(many, view(99, 8192, dtype=torch.bfloat16)).kernel: 4,
        sumsq_launch(many, view(99, 576, dtype=torch.bfloat16)).kernel: 4,
    }
    if arch != "sm_80":
        packs[sumsq_launch(ids, view(99, 16384)).kernel] = 1
    for name, sass in compiled("embedding.cu", tuple(packs), arch, tmp_path).items():
        assert count(sass, r"(?:LDL|STL)[\w.]*") == 0, name
        assert count(sass, r"LDG\.E[\w.]*\.128[\w.]*") == packs[name], name
        assert count(sass, r"STG\.E[\w.]*\.128[\w.]*") == packs[name], name
        assert count(sass, r"(?:ATOM|ATOMG|ATOMS|RED)[\w.]*") == 0, name
        assert ("ACQBULK" in sass) is (arch != "sm_80"), name
        assert ("PREEXIT" in sass) is (arch != "sm_80"), name
