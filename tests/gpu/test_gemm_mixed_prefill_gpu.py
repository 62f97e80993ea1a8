"""The kernel for many rows with narrow weights: exact integers, formats, tilings, epilogues.

Grids are those of a GPU of a few multiprocessors, so that each CTA has several tiles and its ring
goes round more than once; a test of real shapes takes all of them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gemm_cases import CHAINS, QUANTIZING, Case
from test_gemm_mixed_gpu import BESIDE_E4M3, FORMATS, Narrow, case_of, exact, narrow, values_of
from test_gemm_mixed_gpu import launch as launch_few_rows
from torch import Tensor

import fusedops
from fusedops.config.mixed import NarrowWeight
from fusedops.config.mixed_prefill import MixedPrefillConfig, mixed_prefill_config
from fusedops.config.mixed_tiles import mixed_config
from fusedops.cutlass.mixed_program import mixed_prefill_program
from fusedops.epilogue.outputs import RowStat
from fusedops.jit.dsl import LoadedKernel, dsl_kernel
from fusedops.providers.cutlass_mixed_prefill import takes_bulk_stores
from fusedops.providers.kernel_tensors import loaded, operands_read, written
from fusedops.weight import Int4
from fusedops.weight.fragments import pack_codes, words

COVERS = ("fusedops/cutlass/*.py", "fusedops/epilogue/*.py")
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
CTAS = 6
N, K = 592, 1096
INT4 = NarrowWeight("int4", 128)
TILINGS = [
    (tile_m, k, cluster)
    for tile_m, k in ((64, 128), (128, 128), (192, 128), (256, 64))
    for cluster in (1, 2)
]

pytestmark = pytest.mark.gpu


def config_of(
    weight: NarrowWeight, tile_m: int = 128, k: int = 128, cluster: int = 2, statistics: int = 0
) -> MixedPrefillConfig:
    """A legal tiling whose bands along M are two tiles high."""
    config = mixed_prefill_config(weight, tile_m, k, cluster, 2, statistics)
    assert config.illegal() is None
    return config


def kernel_of(config: MixedPrefillConfig, case: Case, aligned: bool) -> LoadedKernel:
    operand_dtypes = tuple(None if t is None else t.dtype for t in case.operands)
    spec = case.spec
    program = mixed_prefill_program(
        config, spec.epilogue, case.x.dtype, spec.out_dtype, operand_dtypes, aligned
    )
    return dsl_kernel(program, "sm_90a")


def launch(
    config: MixedPrefillConfig,
    given: Narrow,
    case: Case,
    ctas: int = CTAS,
    results: list[Tensor] | None = None,
) -> list[Tensor]:
    """All results, into poisoned memory, twice bitwise the same."""
    spec, m = case.spec, case.x.shape[0]
    operands = operands_read(spec, case.operands, m)
    x = loaded(case.x.view(torch.uint8) if case.x.dtype == E4M3 else case.x, 16)
    attempts = []
    for _ in range(2):
        out = spec.allocate(case.x) if results is None else results
        for result in out:
            result.view(torch.uint8).fill_(0xFF)
        main, *extra = (written(result, m) for result in out)
        kernel = kernel_of(config, case, takes_bulk_stores(main, operands))
        tensors = (*operands, *extra) or (main,)
        clusters = max(1, ctas // config.cluster)
        kernel(given.packed, given.quantization, x, main, tensors, spec.n, clusters)
        attempts.append([result.clone() for result in out])
    for first, second in zip(*attempts, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    return attempts[0]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("weight", FORMATS, ids=str)
def test_every_format_is_exact(weight: NarrowWeight, dtype: torch.dtype) -> None:
    """K is no multiple of a stage, nor of a group."""
    given = narrow(weight, N, K)
    case = case_of("bias|residual", 300, given, dtype)
    assert torch.equal(launch(config_of(weight), given, case)[0], exact(case, given))


@pytest.mark.parametrize("weight", BESIDE_E4M3, ids=str)
def test_int4_beside_e4m3_activations_is_exact(weight: NarrowWeight) -> None:
    """Sums of 128 products below 2^12 are exact in what the tensor cores keep of them."""
    given = narrow(weight, N, 1104)
    case = case_of("bias|residual", 300, given, E4M3)
    assert torch.equal(launch(config_of(weight), given, case)[0], exact(case, given))


@pytest.mark.parametrize(("tile_m", "k", "cluster"), TILINGS)
@pytest.mark.parametrize("m", [129, 256, 1000])
def test_every_tiling_is_exact(tile_m: int, k: int, cluster: int, m: int) -> None:
    weight = INT4 if tile_m < 256 else NarrowWeight("int4", 0, True)
    given = narrow(weight, N, K)
    case = case_of("bias|residual", m, given, BF16)
    result = launch(config_of(weight, tile_m, k, cluster), given, case)[0]
    assert torch.equal(result, exact(case, given))


@pytest.mark.parametrize("m", [1, 63, 64, 127, 128, 129, 130, 200, 256, 257, 512])
def test_every_m_is_exact(m: int) -> None:
    given = narrow(INT4, 272, 328)
    case = case_of("bias|residual", m, given, BF16)
    assert torch.equal(launch(config_of(INT4), given, case)[0], exact(case, given))


@pytest.mark.parametrize("k", [8, 64, 120, 128, 136, 256, 264, 384, 648])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_every_end_of_k_is_exact(k: int, group: int) -> None:
    """Fewer stages than the ring has, than the first warpgroup is ahead, odd and even numbers."""
    weight = NarrowWeight("int4", group)
    given = narrow(weight, 208, k)
    case = case_of("residual", 200, given, BF16)
    for ctas in (2, 12):
        result = launch(config_of(weight), given, case, ctas)[0]
        assert torch.equal(result, exact(case, given)), f"{ctas} CTAs"


@pytest.mark.parametrize("n", [8, 16, 70, 128, 136, 264])
def test_every_n_is_exact(n: int) -> None:
    """70 columns are stored without bulk stores; scales of whole rows have no aligned pitch."""
    weight = NarrowWeight("int4", 0, True)
    given = narrow(weight, n, 264)
    case = case_of("bias|residual", 150, given, BF16)
    for tile_m in (64, 128):
        result = launch(config_of(weight, tile_m), given, case)[0]
        assert torch.equal(result, exact(case, given)), f"tile_m={tile_m}"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3"])
def test_every_code_comes_out_as_it_is(kind: str, dtype: torch.dtype) -> None:
    """Activations of a single one pick a column of the weight; 8-bit codes fit both dtypes."""
    weight = NarrowWeight(kind)  # type: ignore[arg-type]
    codes = torch.arange(128 * 128).remainder(1 << weight.bits).to(torch.uint8).view(128, 128)
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 0  # NaN is no weight
    packed = words(pack_codes(codes, weight.bits, weight.x_bits)).cuda()
    scales = torch.ones(1, 128, dtype=BF16, device="cuda")
    given = Narrow(packed, (scales,), values_of(codes, weight, None).cuda())
    case = case_of("none", 128, given, dtype)
    case.x.copy_(torch.eye(128))
    result = launch(config_of(weight), given, case)[0]
    assert torch.equal(result.double(), given.values.t())


def test_strided_rows_and_results_are_exact() -> None:
    """Rows of x and of the result with a pitch; a result that is not aligned for bulk stores."""
    given = narrow(INT4, 256, 384)
    case = case_of("bias|residual", 200, given, BF16)
    wide = torch.full((200, 512), float("nan"), dtype=BF16, device="cuda")
    wide[:, :384] = case.x
    wanted = exact(case, given)
    case.x = wide[:, :384]
    for first, pitch in ((0, 320), (8, 320), (4, 320), (0, 257)):
        buffer = torch.full((200, pitch), -1.0, dtype=BF16, device="cuda")
        out = buffer[:, first : first + 256]
        guard = buffer.clone()
        launch(config_of(INT4), given, case, results=[out])
        assert torch.equal(out, wanted), f"from column {first} of {pitch}"
        untouched = torch.ones_like(buffer, dtype=torch.bool)
        untouched.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
        assert torch.equal(buffer[untouched], guard[untouched])


@pytest.mark.parametrize(
    ("weight", "tile_m", "k"),
    [(INT4, 128, 128), (INT4, 64, 128), (NarrowWeight("int4"), 256, 64)],
    ids=str,
)
@pytest.mark.parametrize("chain", [*CHAINS, *(c for c in QUANTIZING if "group128" not in c)])
def test_every_epilogue_equals_the_reference(
    weight: NarrowWeight, tile_m: int, k: int, chain: str
) -> None:
    """Of those that need no whole groups of columns in a tile."""
    m, n = 270, 256
    given = narrow(weight, n, 264)
    case = case_of(chain, m, given, BF16, integers=False)
    statistics = sum(isinstance(node, RowStat) for node in case.spec.epilogue)
    case.w = (given.values / 64).to(BF16)  # exact: whole numbers below 64
    given.quantization = (given.quantization[0] / 64,)
    results = launch(config_of(weight, tile_m, k, statistics=statistics), given, case)
    with fusedops.use_provider("reference"):
        expected = torch.ops.fusedops.gemm.default(case.x, case.w, case.operands, case.text)
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        if index and got.dim() == 2 and got.shape[0] != m and got.shape[-1] == m:
            # Parts of a row statistic are the kernel's own; what they add up to is not.
            got, wanted = (t.amax(0) if "absmax" in chain else t.sum(0) for t in (got, wanted))
        got, wanted = got.double(), wanted.double()
        allowed = 0.01 * wanted.abs() + 0.02
        if results[index].dtype == E4M3:
            allowed = 0.13 * wanted.abs().clamp(min=1.0)
        elif results[index].dtype == torch.int8:
            allowed = torch.full_like(got, 1.01)
        assert ((got - wanted).abs() <= allowed).all(), f"output {index} of {chain}"


@pytest.mark.parametrize("group", [0, 32, 128])
def test_results_are_bitwise_those_of_the_kernel_for_few_rows(group: int) -> None:
    """Sums of groups and their scales are added in one order, whatever the number of rows."""
    weight = NarrowWeight("int4", group, True)
    given = narrow(weight, 512, 1096, integers=False)
    many = case_of("bias|residual", 300, given, BF16, integers=False)
    wanted = launch(config_of(weight), given, many)[0]
    few = case_of("bias|residual", 32, given, BF16, integers=False)
    few.x = many.x[100:132].contiguous()
    few.operands = [t[100:132] if t is not None and t.dim() == 2 else t for t in many.operands]
    result = launch_few_rows(mixed_config(weight, 32, 64, 128, 1), given, few)[0]
    assert torch.equal(result, wanted[100:132])


@pytest.mark.parametrize(
    ("n", "k", "m"), [(4096, 4096, 512), (4096, 4096, 4096), (1024, 14336, 129)], ids=str
)
def test_real_shapes_are_exact(m: int, n: int, k: int) -> None:
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    given = narrow(INT4, n, k)
    case = case_of("residual", m, given, BF16)
    for tile_m in (64, 128, 192):
        result = launch(config_of(INT4, tile_m), given, case, sm_count)[0]
        assert torch.equal(result, exact(case, given)), f"tile_m={tile_m}"


def test_chain_of_dependent_launches_is_repeatable() -> None:
    """Each launch reads what the one before it wrote; as a graph too, replayed on new inputs."""
    given = narrow(INT4, 512, 512, integers=False)
    case = case_of("none", 256, given, BF16, integers=False)
    kernel = kernel_of(config_of(INT4), case, True)
    buffers = [torch.empty_like(case.x) for _ in range(9)]

    def chain(synchronized: bool) -> None:
        for source, target in pairwise(buffers):
            kernel(given.packed, given.quantization, source, target, (target,), 512, 4)
            if synchronized:
                torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(False)
    for seed in range(3):
        torch.manual_seed(seed)
        buffers[0].copy_(torch.randn_like(case.x))
        chain(True)
        wanted = [buffer.clone() for buffer in buffers]
        for again in (lambda: chain(False), graph.replay):
            for buffer in buffers[1:]:
                buffer.fill_(float("nan"))
            again()
            assert all(map(torch.equal, buffers, wanted))


@pytest.mark.parametrize("m", [129, 700])
def test_the_provider_serves_many_rows(m: int) -> None:
    """Through the operator, from the weight that serves few rows too."""
    n, k = 512, 512
    form = Int4(n, k, 128, "none", "wgmma16")
    given = narrow(INT4, n, k)
    case = case_of("none", m, given, BF16)
    packed = given.packed.view(torch.uint8).view(form.weight_shape())
    spec = case.text.replace(f"dense({n},{k})", str(form))
    operands = [given.quantization[0]]
    with fusedops.use_provider("cutlass"):
        [result] = torch.ops.fusedops.gemm.default(case.x, packed, operands, spec)
    assert torch.equal(result, exact(case, given))
