"""The reduction kernels by four oracles: exact integers, float64, torch, poisoned memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from cuda_cases import assert_same_bits, into_poisoned_memory, pinned, replayed
from torch import Tensor

from fusedops.ops.reduce import REDUCE_DTYPES, REDUCTIONS, reduce
from fusedops.providers import cuda
from fusedops.providers.base import use_provider

COVERS = (
    "csrc/reduce.cu",
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "fusedops/ops/op.py",
    "fusedops/ops/reduce.py",
    "fusedops/providers/cuda*.py",
    "tests/gpu/cuda_cases.py",
)

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SUMS = ("sum", "mean", "sumsq", "logsumexp")
COMPARISONS = tuple(op for op in REDUCTIONS if op not in SUMS)

# Each pair of operation and dtype is about eleven kernels; one operation of each kind takes all.
_ALL_DTYPES = ("sum", "max", "argmax")
_SOME_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64)

Case = tuple[Tensor, "list[int] | None"]


@pytest.fixture(autouse=True)
def pinned_provider() -> Iterator[None]:
    with pinned("reduce"):
        yield


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal floats, integers of up to three digits, coin flips."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (0 if dtype == torch.uint8 else -100, 100)
    return torch.randint(low, high, shape, generator=generator, device="cuda").to(dtype)


def small_integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values whose sums and sums of squares every accumulator holds exactly."""
    generator = torch.Generator("cuda").manual_seed(7)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    return torch.randint(low, 4, shape, generator=generator, device="cuda").to(dtype)


def reference(x: Tensor, op: str, dims: list[int] | None) -> Tensor:
    """The operation's own definition, on the CPU."""
    with use_provider("reference"):
        return reduce(x.cpu(), op, dims).to(x.device)


def kernel_result(x: Tensor, op: str, dims: list[int] | None) -> Tensor:
    """A call's result, also written into poisoned memory with guard bands, twice the same."""
    got = reduce(x, op, dims)
    again = into_poisoned_memory(cuda._REDUCE, x, op, None if dims is None else tuple(dims), False)
    assert_same_bits(again, got)
    return got


def allowed(op: str, dims: list[int] | None) -> bool:
    return not (REDUCTIONS[op].one_dim and dims is not None and len(dims) > 1)


def pairs(ops: Sequence[str]) -> list[tuple[str, torch.dtype]]:
    return [
        (op, dtype)
        for op in ops
        for dtype in (REDUCE_DTYPES if op in _ALL_DTYPES else _SOME_DTYPES)
    ]


def walks(dtype: torch.dtype, draw: Callable[..., Tensor] = drawn) -> list[Case]:
    """Cases that reach every kernel: rows long and short, columns, middles, splits, odd strides."""

    def new(*shape: int) -> Tensor:
        return draw(*shape, dtype=dtype)

    x = new(7, 513, 33)
    cases: list[Case] = [(x, [d]) for d in (0, 1, 2, -1)]
    cases += [(x, dims) for dims in (None, [0, 2], [0, 1], [1, 2], [0, 1, 2])]
    cases += [(x.permute(2, 0, 1)[1:, :, ::2], [1]), (x.permute(2, 0, 1), None)]
    wide = new(3, 70_003)
    cases += [(wide, [1]), (wide, None), (wide[:, 1:], [1]), (wide[:, 5:60_000], [1])]
    flat = new(3_000_001)
    cases += [(flat, None), (flat[3:], None), (flat[: 1 << 16], None), (flat[::3], None)]
    middle = new(5, 700, 64)
    cases += [(middle, [1]), (middle, [0]), (middle, [0, 1]), (middle[:, :, 1:], [1])]
    cases += [(new(400, 3, 640), [0, 2]), (new(5000, 640), [0]), (new(5000, 7), [0])]
    cases += [(new(6, 5, 30, 64), [0, 2]), (new(6, 5, 30, 7), [0, 2])]
    cases += [(new(20_000, 2), [0]), (new(2000, 16), [1]), (new(300, 1040), [1]), (new(4, 1), [1])]
    cases += [(new(3)[1], None), (new(1, 1), None), (new(1, 70_000).expand(3, 70_000), None)]
    return cases


# Oracle 1: exact


@pytest.mark.parametrize(("op", "dtype"), pairs(("sum", "sumsq", *COMPARISONS)), ids=str)
def test_integers_are_exact_bit_for_bit(op: str, dtype: torch.dtype) -> None:
    for x, dims in walks(dtype, small_integers):
        if allowed(op, dims) and x.numel() < 1_000_000:
            assert_same_bits(kernel_result(x, op, dims), reference(x, op, dims))


@pytest.mark.parametrize(("op", "dtype"), pairs(COMPARISONS), ids=str)
def test_comparisons_of_any_values_are_exact(op: str, dtype: torch.dtype) -> None:
    for x, dims in walks(dtype):
        if allowed(op, dims):
            assert_same_bits(reduce(x, op, dims), reference(x, op, dims))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64], ids=str)
def test_integer_totals_wrap_and_their_mean_is_rounded_once(dtype: torch.dtype) -> None:
    for x, dims in walks(dtype):
        for op in ("sum", "sumsq", "mean"):
            assert_same_bits(reduce(x, op, dims), reference(x, op, dims))
    if dtype == torch.int64:
        x = torch.full((5000,), 2**62 + 12345, device="cuda")
        assert_same_bits(reduce(x, "sum"), reference(x, "sum", None))


# Oracle 2 and 3: float64 and torch


def walked(op: str, wide: Tensor, exact: Tensor, over: list[int]) -> Tensor:
    """The magnitude of partial results, to which roundings are proportional."""
    if op == "sumsq":
        return exact
    if op == "logsumexp":
        return torch.ones_like(exact)
    distance = wide.square().sum(over).sqrt()
    return distance if op == "sum" else distance * exact.numel() / wide.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", SUMS)
def test_sums_lie_within_their_bound_and_twice_torchs_error(op: str, dtype: torch.dtype) -> None:
    for x, dims in walks(dtype):
        got = kernel_result(x, op, dims)
        wide = x.double()
        with use_provider("torch"):
            exact = reduce(wide, op, dims)
            torchs = reduce(x, op, dims)
        terms = {"sumsq": wide.square(), "logsumexp": torch.ones_like(wide)}.get(op, wide.abs())
        over = dims if dims is not None else list(range(x.dim()))
        scale = terms.mean(over) if op in ("mean", "logsumexp") else terms.sum(over)
        accumulation = 2.0**-45 if dtype == torch.float64 else 2.0**-20
        rounding = torch.finfo(dtype).eps / 2
        fits = exact.to(dtype).isfinite()  # the squares of 3 million halves do not
        assert got[~fits].isinf().all()
        error = (got.double() - exact)[fits].abs()
        bound = (accumulation * scale + (rounding + accumulation) * exact.abs())[fits]
        assert error.le(bound).all(), (x.shape, x.stride(), dims)
        # A peer that happens to be exact counts with half a unit in the last place, and with what
        # rounding costs a sum whose terms cancel like a random walk.
        walk = walked(op, wide, exact, over)
        step = 2.0**-50 if dtype == torch.float64 else 2.0**-22
        peer = (torchs.double() - exact)[fits].norm()
        least = [(rounding * exact)[fits].norm(), (step * walk)[fits].norm()]
        assert error.norm() <= 2 * max(peer, *least), (x.shape, x.stride(), dims)


# Special values


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["max", "min", "absmax", "argmax", "argmin"])
def test_b18_one_nan_anywhere_decides(op: str, dtype: torch.dtype) -> None:
    for length in (1, 31, 32, 33, 1024, 4097, 70_000):
        places = sorted({p for p in (0, 31, 32, 1023, length - 1) if p < length})
        x = drawn(len(places), length, dtype=dtype)
        x[torch.arange(len(places)), torch.tensor(places)] = math.nan
        for rows, dim in ((x, 1), (x.t().contiguous(), 0), (x.t(), 0)):
            got = reduce(rows, op, dim)
            if op.startswith("arg"):
                assert got.tolist() == places
            else:
                assert got.isnan().all()
        x[:, -1] = math.nan
        assert_same_bits(reduce(x, op, 1), reference(x, op, [1]))
    infinite = torch.full((2, 70_000), -math.inf, dtype=dtype, device="cuda")
    for dims in ([1], [0], None):
        assert_same_bits(reduce(infinite, op, dims), reference(infinite, op, dims))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_special_rows_reduce_like_on_the_cpu(op: str) -> None:
    values = (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -3.0)
    rows = torch.tensor(list(itertools.product(values[2:], repeat=4)))
    tall = torch.cat((rows, torch.zeros(1, 4)))
    for dtype in FLOATS:
        x = tall.to(dtype).to("cuda")
        for view, dims in ((x, [1]), (x.t().contiguous(), [0])):
            got, expected = reduce(view, op, dims), reference(view, op, dims)
            torch.testing.assert_close(got, expected, equal_nan=True)
    long = torch.full((4, 70_000), -1e30, device="cuda")
    long[0, 69_999] = 5.0
    long[1, 3] = math.inf
    long[2, 69_990] = math.nan
    got, expected = reduce(long, op, 1), reference(long, op, [1])
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_logsumexp_neither_overflows_nor_loses_small_terms() -> None:
    for shift in (-1e30, -1e4, 0.0, 1e4, 1e30):
        x = torch.full((3, 100_000), shift, device="cuda")
        expected = shift + math.log(100_000)
        assert reduce(x, "logsumexp", 1).tolist() == pytest.approx([expected] * 3, rel=1e-6)
    rising = torch.linspace(-200, 200, 100_000, device="cuda")
    for x in (rising, rising.flip(0)):
        exact = torch.logsumexp(x.double(), 0).item()
        assert reduce(x, "logsumexp").item() == pytest.approx(exact, rel=1e-6)


def test_positions_are_of_the_first_extremum() -> None:
    for dtype in (*FLOATS, torch.int8, torch.bool, torch.int64):
        for length in (5, 33, 1000, 70_000):
            x = torch.ones(3, length, dtype=dtype, device="cuda")
            x[1, 0] = 0
            assert reduce(x, "argmax", 1).tolist() == [0, 1, 0]
            assert reduce(x, "argmin", 1).tolist() == [0, 0, 0]
            assert reduce(x, "argmin").item() == length
            assert reduce(x.t(), "argmin").item() == 1
            assert reduce(x.t().contiguous(), "argmax", 0).tolist() == [0, 1, 0]


def test_b22_half_sums_neither_overflow_nor_stop() -> None:
    ones = torch.ones(70_000, dtype=torch.bfloat16, device="cuda")
    assert reduce(ones, "sum").item() == 70144
    assert reduce(ones, "mean").item() == 1.0
    half = torch.tensor([32000.0] * 4 + [-32000.0] * 4, dtype=torch.float16, device="cuda")
    assert reduce(half, "sum", 0).item() == 0
    large = torch.full((65536,), 60000.0, dtype=torch.float16, device="cuda")
    assert reduce(large, "mean").item() == 60000
    assert reduce(torch.ones(20_000, dtype=torch.float16, device="cuda"), "sum").item() == 20_000


def test_the_most_negative_integer_has_the_largest_magnitude() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        x = torch.tensor([[limits.min, 3], [-5, 4]], dtype=dtype, device="cuda")
        assert reduce(x, "absmax", 1).tolist() == [limits.max, 5]


@pytest.mark.parametrize("op", [op for op in REDUCTIONS if not REDUCTIONS[op].needs_elements])
def test_b51_b04_empty_dimensions_reduce_like_on_the_cpu(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(3, 0, dtype=dtype, device="cuda")
        for dims in ([0], [1], None):
            assert_same_bits(reduce(x, op, dims), reference(x, op, dims))
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_kept_dimensions_have_size_one() -> None:
    x = drawn(6, 70, 40, dtype=torch.float32)
    for dims in ([0], [1], [2], [0, 2], None):
        assert_same_bits(reduce(x, "max", dims, keepdim=True), x.amax(dims or (), keepdim=True))


# Repeatability, graphs, torch.compile


@pytest.mark.parametrize("op", REDUCTIONS)
def test_captured_calls_replay_like_eager_ones(op: str) -> None:
    for shape, dim in (((6, 70_000), 1), ((3000, 520), 0), ((1 << 21,), 0)):
        x = drawn(*shape, dtype=torch.float32)
        inputs = [drawn(*shape, dtype=torch.float32, seed=seed) for seed in (1, 2, 3)]
        results = replayed(lambda x=x, dim=dim: reduce(x, op, dim), x, inputs)
        for result, values in zip(results, inputs, strict=True):
            assert_same_bits(result, reduce(values, op, dim))


def test_sums_are_the_same_in_every_run() -> None:
    for x, dim in (
        (drawn(1 << 24, dtype=torch.float32), 0),
        (drawn(9000, 3000, dtype=torch.float32), 0),
    ):
        first = reduce(x, "sum", dim)
        for _ in range(20):
            assert torch.equal(reduce(x, "sum", dim), first)


def test_dependent_launches_see_what_the_kernel_ahead_wrote() -> None:
    x = small_integers(64, 65_536, dtype=torch.float32)
    expected = x.sum(1)
    for _ in range(30):
        y = x * 1.0
        assert torch.equal(reduce(y, "sum", 1), expected)
        totals = reduce(reduce(y, "max", 1, keepdim=True).expand(64, 4096), "sum", 1)
        assert torch.equal(totals, x.amax(1) * 4096)


def test_it_works_under_torch_compile() -> None:
    x = drawn(100, 600, dtype=torch.float32)
    compiled = torch.compile(lambda t: reduce(t * 2.0, "max", 1) + 1.0, fullgraph=True)
    assert_same_bits(compiled(x), x.amax(1) * 2.0 + 1.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_b35_the_tensors_device_runs_it_whatever_device_is_current() -> None:
    for shape, dim in (((6, 70_000), 1), ((3000, 520), 0), ((1 << 21,), 0)):
        x = drawn(*shape, dtype=torch.float32)
        got = reduce(x.to("cuda:1"), "sum", dim)
        assert got.device.index == 1
        assert torch.cuda.current_device() == 0
        assert torch.equal(got.cpu(), reduce(x, "sum", dim).cpu())


# Sizes


@pytest.mark.parametrize("op", ["sum", "max", "argmax", "logsumexp"])
def test_the_sizes_that_are_measured(op: str) -> None:
    x = drawn(16_384, 16_384, dtype=torch.float32)
    for view, dim in ((x, 1), (x, 0), (x.view(-1), 0), (x.view(-1)[: 1 << 16], 0)):
        got = reduce(view, op, dim)
        with use_provider("torch"):
            expected = reduce(view, op, dim)
        if op in SUMS:
            scale = view.abs().sum(dim) if op == "sum" else torch.ones_like(got)
            assert (got - expected).abs().le(2.0**-18 * scale + 1e-5).all()
        elif op == "max":
            assert_same_bits(got, expected)
        else:
            best = view.amax(dim)
            found = view.gather(dim, got.unsqueeze(dim)).squeeze(dim)
            assert torch.equal(found, best)


@pytest.mark.gpu_large
def test_b01_more_than_2_to_31_elements() -> None:
    size = 2**31 + 4096
    x = torch.zeros(size, dtype=torch.int8, device="cuda")
    x[-1], x[2**31 - 1], x[3] = 5, 2, -7
    assert reduce(x, "sum").item() == 0
    assert reduce(x, "sumsq").item() == 78
    assert reduce(x, "argmax").item() == size - 1
    assert reduce(x, "argmin").item() == 3
    tall = x.view(-1, 4096)
    assert reduce(tall, "argmax", 1)[-1].item() == 4095
    columns = reduce(tall, "argmax", 0)
    assert (columns[4095].item(), columns[0].item()) == (tall.shape[0] - 1, 0)
    assert reduce(x[1:], "argmax").item() == size - 2
    assert reduce(x[::2], "absmax").item() == 0
