"""The kernel with narrow weights: exact integers, every code, every tiling, every epilogue.

Grids are those of a GPU of a few multiprocessors, so that each CTA has several tiles and its ring
goes round more than once; a test of real shapes takes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import gemm_oracle
import pytest
import torch
from differences import differences
from gemm_cases import CHAINS, QUANTIZING, Case, make_case
from narrow_weights import fastest_config, mixed_configs
from torch import Tensor

import fusedops
from fusedops.config.mixed import MixedConfig, NarrowWeight
from fusedops.config.mixed_tiles import mixed_clusters, mixed_config
from fusedops.cutlass.mixed_program import mixed_program
from fusedops.epilogue.base import FLOAT32_ROUNDOFF
from fusedops.epilogue.outputs import RowStat
from fusedops.jit.dsl import dsl_kernel
from fusedops.providers.kernel_tensors import loaded, operands_read, written
from fusedops.weight.fragments import pack_codes, words

COVERS = ("fusedops/cutlass/*.py", "fusedops/epilogue/*.py")
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
SM_COUNT = 6
N, K = 592, 1096
INT4 = NarrowWeight("int4", 128)
FORMATS = (
    *(NarrowWeight("int4", group, zeros) for group in (0, 32, 64, 128) for zeros in (False, True)),
    NarrowWeight("int4", 128, True, F32),
    NarrowWeight("int4", 0, True, F32),
    NarrowWeight("int4", 64, False, FP16),
    *(NarrowWeight(kind, group) for kind in ("int8", "e4m3") for group in (0, 32, 128)),
    NarrowWeight("int8", 0, False, F32),
)
BESIDE_E4M3 = tuple(
    NarrowWeight("int4", group, zeros, x_bits=8)
    for group in (0, 32, 64, 128)
    for zeros in (False, True)
)
CONFIGS = [
    config
    for config in (*mixed_configs(INT4, 16), *mixed_configs(INT4, 8), *mixed_configs(INT4, 64))
    if config.rows in (16, 48, 64, 112, 128, 192, 224, 256)
]
EPILOGUE_CONFIGS = (
    mixed_config(INT4, 70, 64, 128, 2),
    mixed_config(INT4, 16, 128, 256, 4),
    mixed_config(INT4, 16, 224, 128, 1),
)

pytestmark = pytest.mark.gpu


@dataclass
class Narrow:
    """A weight: what the kernel takes and the (N, K) values that it stands for, float64."""

    packed: Tensor
    quantization: tuple[Tensor, ...]
    values: Tensor


def values_of(codes: Tensor, weight: NarrowWeight, zeros: Tensor | None) -> Tensor:
    """What codes (N, K) are before their scale, float64; zeros: of each column, (N, K)."""
    if weight.kind == "int4":
        return codes.double() - (8 if zeros is None else zeros.double())
    return codes.view(torch.int8 if weight.kind == "int8" else E4M3).double()


def narrow(weight: NarrowWeight, n: int, k: int, integers: bool = True, seed: int = 1) -> Narrow:
    """A random weight; ``integers``: its values are whole numbers, exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    group = weight.group or k
    groups = -(-k // group)
    if weight.kind == "e4m3":
        whole = torch.randint(-8, 9, (n, k), generator=generator).float()
        drawn = whole if integers else torch.randn(n, k, generator=generator)
        codes = drawn.to(E4M3).view(torch.uint8)
    else:
        codes = torch.randint(0, 1 << weight.bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 4, (groups, n), generator=generator).float()
    if weight.kind == "int8" and integers:
        scales.fill_(1)
    if not integers:
        scales = torch.rand(groups, n, generator=generator) / 50
    scales = scales.to(weight.scale_dtype)
    zeros = torch.randint(0, 17, (groups, n), generator=generator, dtype=torch.uint8)
    columns = torch.arange(k) // group
    exact = values_of(codes, weight, zeros[columns].t() if weight.zeros else None)
    exact = exact * scales.double()[columns].t()
    quantization = (scales, zeros) if weight.zeros else (scales,)
    return Narrow(
        words(pack_codes(codes, weight.bits, weight.x_bits)).cuda(),
        tuple(tensor.cuda() for tensor in quantization),
        exact.cuda(),
    )


def case_of(chain: str, m: int, given: Narrow, dtype: torch.dtype, integers: bool = True) -> Case:
    """Activations and operands of a chain beside a weight; of the case's own weight the shape."""
    n, k = given.values.shape
    out_dtype = BF16 if dtype == E4M3 else dtype
    return make_case(chain, m, n, k, dtype, out_dtype=out_dtype, integers=integers, device="cuda")


def launch(
    config: MixedConfig, given: Narrow, case: Case, sm_count: int = SM_COUNT
) -> list[Tensor]:
    """All results, into poisoned memory, twice bitwise the same."""
    spec, m = case.spec, case.x.shape[0]
    operands = operands_read(spec, case.operands, m)
    operand_dtypes = tuple(operand.dtype for operand in operands)
    program = mixed_program(config, spec.epilogue, case.x.dtype, spec.out_dtype, operand_dtypes)
    kernel = dsl_kernel(program, "sm_90a")
    x = loaded(case.x.view(torch.uint8) if case.x.dtype == E4M3 else case.x, 16)
    attempts = []
    for _ in range(2):
        results = spec.allocate(case.x)
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        main, *extra = (written(result, m) for result in results)
        tensors = (*operands, *extra) or (main,)
        clusters = mixed_clusters(config, spec.n, sm_count)
        kernel(given.packed, given.quantization, x, main, tensors, spec.n, clusters)
        attempts.append(results)
    for first, second in zip(*attempts, strict=True):
        same = torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        assert same, f"two launches of {config}: {differences(first, second)}"
    return attempts[0]


def exact(case: Case, given: Narrow) -> Tensor:
    """A chain of sums on whole numbers, which no rounding touches before the last one."""
    result = case.x.double() @ given.values.t()
    for operand in case.operands:
        assert operand is not None
        result = result + operand.double()
    return result.to(case.spec.out_dtype)


def require_exact(config: MixedConfig, given: Narrow, case: Case, sm_count: int = SM_COUNT) -> None:
    """The result of a chain of sums on whole numbers has the right bits."""
    result, wanted = launch(config, given, case, sm_count)[0], exact(case, given)
    assert torch.equal(result, wanted), f"{config}: {differences(result, wanted)}"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("weight", FORMATS, ids=str)
def test_every_format_is_exact(weight: NarrowWeight, dtype: torch.dtype) -> None:
    given = narrow(weight, N, K)
    for m in (1, 16, 33):
        config = fastest_config(weight, m, N, K, SM_COUNT)
        case = case_of("bias|residual", m, given, dtype)
        require_exact(config, given, case)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("weight", [weight for weight in FORMATS if weight.kind == "int4"], ids=str)
def test_products_of_zero_points_are_exact(weight: NarrowWeight, dtype: torch.dtype) -> None:
    given = narrow(weight, N, K)
    case = case_of("bias|residual", 16, given, dtype)
    for split in (1, 4):
        config = mixed_config(weight, 16, 112, 128, split, zero_products=True)
        require_exact(config, given, case)


@pytest.mark.parametrize("weight", BESIDE_E4M3, ids=str)
def test_int4_beside_e4m3_activations_is_exact(weight: NarrowWeight) -> None:
    """Sums of 128 products below 2^12 are exact in what the tensor cores keep of them."""
    given = narrow(weight, N, 1104)
    for m in (1, 16, 33, 128):
        config = fastest_config(weight, m, N, 1104, SM_COUNT)
        case = case_of("bias|residual", m, given, E4M3)
        require_exact(config, given, case)


@pytest.mark.parametrize("group", [0, 128])
def test_int4_beside_e4m3_activations_keeps_its_accuracy(group: int) -> None:
    """Also where activations have a mean, so that the zero points' part is a large one."""
    weight = NarrowWeight("int4", group, True, x_bits=8)
    given = narrow(weight, 512, 4096, integers=False)
    case = case_of("none", 16, given, E4M3, integers=False)
    case.x = (torch.randn_like(case.x, dtype=F32) + 1).to(E4M3)
    result = launch(fastest_config(weight, 16, 512, 4096, SM_COUNT), given, case)[0].double()
    wanted = case.x.double() @ given.values.t()
    scale = (case.x.double().abs() @ given.values.abs().t()).clamp(min=1e-6)
    bound = 2.0**-8 * wanted.abs() + 2.0**-11 * scale
    assert ((result - wanted).abs() <= bound).all(), differences(result, wanted, bound)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tiling_is_exact(config: MixedConfig) -> None:
    given = narrow(config.weight, N, K)
    case = case_of("bias|residual", config.m_pad - 3, given, BF16)
    require_exact(config, given, case)


@pytest.mark.parametrize("first", range(1, 129, 16))
def test_every_m_is_exact(first: int) -> None:
    given = narrow(INT4, 272, 328)
    for m in range(first, first + 16):
        config = fastest_config(INT4, m, 272, 328, SM_COUNT)
        case = case_of("bias|residual", m, given, BF16)
        require_exact(config, given, case)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3"])
def test_every_code_comes_out_as_it_is(kind: str, dtype: torch.dtype) -> None:
    """Activations of a single one pick a column of the weight; 8-bit codes fit both dtypes."""
    weight = NarrowWeight(kind)  # type: ignore[arg-type]
    codes = torch.arange(64 * 64).remainder(1 << weight.bits).to(torch.uint8).view(64, 64)
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 0  # NaN is no weight
    scales = torch.ones(1, 64, dtype=BF16)
    given = Narrow(
        words(pack_codes(codes, weight.bits, weight.x_bits)).cuda(),
        (scales.cuda(),),
        values_of(codes, weight, None).cuda(),
    )
    case = case_of("none", 64, given, dtype)
    case.x.copy_(torch.eye(64))
    result = launch(mixed_config(weight, 64, 64, 64, 1), given, case)[0]
    assert torch.equal(result.double(), given.values.t())


@pytest.mark.parametrize(
    ("n", "k", "weight"),
    [
        (584, 264, NarrowWeight("int4", 64)),
        (70, 72, NarrowWeight("int4", 0, True)),
        (8, 8, NarrowWeight("int8")),
        (24, 40, NarrowWeight("e4m3", 32)),
        (1000, 2056, NarrowWeight("int4", 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_odd_sizes_are_exact(n: int, k: int, weight: NarrowWeight, split: int) -> None:
    """Also where CTAs of a cluster have no part of K at all."""
    given = narrow(weight, n, k)
    case = case_of("bias|residual", 13, given, BF16)
    config = mixed_config(weight, 13, 48, 128, split)
    require_exact(config, given, case)


@pytest.mark.parametrize("config", EPILOGUE_CONFIGS, ids=str)
@pytest.mark.parametrize("chain", [*CHAINS, *(c for c in QUANTIZING if "group128" not in c)])
def test_every_epilogue_equals_the_reference(config: MixedConfig, chain: str) -> None:
    """Of those that need no whole groups of columns in a tile."""
    m, n, k = config.m_pad - 2, 512, 264
    given = narrow(config.weight, n, k)
    case = case_of(chain, m, given, BF16, integers=False)
    case.w = (given.values / 64).to(BF16)  # exact: whole numbers below 64
    given.quantization = (given.quantization[0] / 64,)
    parts = [node.parts for node in case.spec.epilogue if isinstance(node, RowStat)]
    # A row statistic has a part for each cluster.
    results = launch(config, given, case, min([SM_COUNT, *(p * config.split for p in parts)]))
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


@pytest.mark.parametrize("weight", FORMATS, ids=str)
def test_random_weights_are_within_the_bound(weight: NarrowWeight) -> None:
    chain = "bias|gate(silu)"
    given = narrow(weight, 512, 1024, integers=False)
    for m in (3, 16, 64):
        case = case_of(chain, m, given, BF16, integers=False)
        config = fastest_config(weight, m, 512, 1024, SM_COUNT)
        if weight.kind == "int4" and m == 16:
            config = mixed_config(weight, m, 64, 128, 2, zero_products=True)
        result = launch(config, given, case)[0]
        named = {
            operand.name: gemm_oracle.to_numpy(tensor.cpu())
            for operand, tensor in zip(case.spec.operands, case.operands, strict=True)
            if tensor is not None
        }
        x, w = case.x.cpu().double(), given.values.cpu()
        accumulator = x @ w.t()
        wanted = gemm_oracle.apply_chain(chain, accumulator.numpy(), named)
        own = (x.abs() @ w.abs().t()) * 8 * 1024**0.5 * FLOAT32_ROUNDOFF
        context = case.spec.context([t.cpu().double() for t in case.operands if t is not None], m)
        bound = case.spec.epilogue.error_bound(accumulator, own, context)
        expected = torch.from_numpy(wanted)
        error = (result.cpu().double() - expected).abs()
        assert (error <= bound).all(), f"{config}: {differences(result, expected, bound)}"


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)], ids=str
)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_real_shapes_are_exact(m: int, n: int, k: int) -> None:
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    given = narrow(INT4, n, k)
    case = case_of("residual", m, given, BF16)
    config = fastest_config(INT4, m, n, k, sm_count)
    require_exact(config, given, case, sm_count)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_chain_of_dependent_launches_is_repeatable(split: int) -> None:
    """Each launch reads what the one before it wrote; as a graph too, replayed on new inputs."""
    given = narrow(INT4, 512, 512, integers=False)
    case = case_of("none", 16, given, BF16, integers=False)
    config = mixed_config(INT4, 16, 64, 128, split)
    program = mixed_program(config, case.spec.epilogue, BF16, BF16, ())
    kernel = dsl_kernel(program, "sm_90a")
    clusters = mixed_clusters(config, 512, 132)
    buffers = [torch.empty_like(case.x) for _ in range(9)]

    def chain(synchronized: bool) -> None:
        for source, target in pairwise(buffers):
            kernel(given.packed, given.quantization, source, target, (target,), 512, clusters)
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
