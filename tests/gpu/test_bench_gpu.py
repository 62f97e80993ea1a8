"""The measuring rig on a GPU: cold and hot windows, what is in them, cuBLASLt, peers, ceilings."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench import (
    Buffers,
    Contender,
    Failed,
    Measurement,
    Protocol,
    cublaslt_abi,
    measure,
    measure_chain,
    oracles,
    peers,
    speedup,
)
from fusedops.bench.cublaslt import LtMatmul
from fusedops.bench.data import l2_bytes
from fusedops.bench.environment import PEER_VARIABLES, collect_environment
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Outcome
from fusedops.bench.pages import Page, Row, markdown
from fusedops.bench.peers import Available, peer_status
from fusedops.bench.products import Layer, make_layer_buffers, product_peers
from fusedops.bench.ranking import best_algorithm
from fusedops.bench.roofline import Traffic, floor, measure_ceilings
from fusedops.bench.runner import GraphRunner

COVERS = ("fusedops/bench/*.py",)
pytestmark = [pytest.mark.gpu, pytest.mark.timing]

MEMORY_PEAK_BYTES_PER_S = {"NVIDIA H200": 4.8e12}
"""Data-sheet figures: no cold row may show more."""

EPS = 1e-5
BRIEF = Protocol(samples=15, cap_s=1.0)


@pytest.fixture(autouse=True)
def peers_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where goals are measured."""
    for name, value in PEER_VARIABLES.items():
        monkeypatch.setenv(name, value)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def timed(outcome: Outcome) -> Measurement:
    assert isinstance(outcome, Measurement), outcome
    return outcome


def memory_peak() -> float:
    name = torch.cuda.get_device_name()
    if name not in MEMORY_PEAK_BYTES_PER_S:
        pytest.skip(f"no data-sheet bandwidth is known here for {name}")
    return MEMORY_PEAK_BYTES_PER_S[name]


def is_rms_norm(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
    x, weight = (tensor.double() for tensor in buffers.inputs)
    reference = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    error = oracles.relative_error(results[0], reference)
    return None if error < 8e-3 else f"relative error {error:.3g}"


def norm_buffers(rows: int, columns: int) -> Callable[[torch.Generator], Buffers]:
    def make(generator: torch.Generator) -> Buffers:
        x = normal(generator, rows, columns, dtype=torch.bfloat16)
        return Buffers((x, normal(generator, columns, dtype=torch.bfloat16)))

    return make


def torch_norm() -> Contender:
    def run(buffers: Buffers) -> Tensor:
        x, weight = buffers.inputs
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    return Contender("torch", run, is_rms_norm)


# Windows


@pytest.mark.parametrize("columns", [1024, 16384])
def test_b92_cold_rows_stay_under_the_memorys_peak_and_rows_say_which_they_are(
    columns: int,
) -> None:
    """RMSNorm of 4096 x 1024 (16 MB moved, fits the L2) and 4096 x 16384 (256 MB)."""
    moved = 2 * 4096 * columns * 2
    rows = {}
    for mode in ("rotated", "flushed", "hot"):
        options = {"hot": mode == "hot", "flush": mode == "flushed"}
        rows[mode] = timed(
            measure(
                [torch_norm()],
                norm_buffers(4096, columns),
                device="cuda",
                protocol=BRIEF,
                **options,
            )["torch"]
        )
    for mode in ("rotated", "flushed"):
        assert moved / rows[mode].median_us * 1e6 <= memory_peak(), mode
        assert not rows[mode].hot
    assert rows["hot"].hot
    assert rows["hot"].median_us <= 1.05 * rows["rotated"].median_us
    # Two ways to be cold agree.
    assert abs(rows["rotated"].median_us - rows["flushed"].median_us) < 3.0 + 0.1 * (
        rows["rotated"].median_us
    )
    lines = [Row("rms_norm", mode, row, bytes_moved=moved) for mode, row in rows.items()]
    text = markdown(Page("B92", collect_environment("pytest"), tuple(lines)))
    assert re.search(r"\| rotated .*\| cold \|", text)
    assert re.search(r"\| hot .*\| hot \|", text)


def test_b92_a_working_set_that_fits_the_cache_is_slower_cold_than_hot() -> None:
    """A read of 16 MB: were inputs created after the flush, both would be equally fast."""

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((normal(generator, 4096, 1024, dtype=torch.float32),))

    def run(buffers: Buffers) -> Tensor:
        return torch.sum(buffers.inputs[0], dim=1)

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return oracles.within(results[0], buffers.inputs[0].double().sum(1), 1e-2)

    contenders = [Contender("sum", run, check)]
    cold, flushed, hot = (
        timed(measure(contenders, make, device="cuda", protocol=BRIEF, **options)["sum"])
        for options in ({}, {"flush": True}, {"hot": True})
    )
    assert cold.median_us > 1.05 * hot.median_us
    assert flushed.median_us > 1.05 * hot.median_us


def test_b94_flush_and_compilation_are_outside_the_window() -> None:
    """A kernel of about 4 us: hot, and flushed with a kernel compiled in this very call."""
    first_call_s: list[float] = []

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((normal(generator, 1 << 20, dtype=torch.float32),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return oracles.within(results[0], buffers.inputs[0].double() * 3 + 1, 1e-5)

    def fresh() -> Contender:
        # A new name every time: neither torch's memory nor its disk cache has the kernel.
        name = f"affine_{uuid.uuid4().hex}"
        code = f"template <typename T> T {name}(T x) {{ return x * T(3) + T(1); }}"
        kernel = torch.cuda.jiterator._create_jit_fn(code)

        def run(buffers: Buffers) -> Tensor:
            start = time.perf_counter()
            result = kernel(buffers.inputs[0])
            first_call_s.append(time.perf_counter() - start)
            return result

        return Contender("affine", run, check)

    hot = timed(measure([fresh()], make, device="cuda", protocol=BRIEF, hot=True)["affine"])
    first_call_s.clear()
    cold = timed(measure([fresh()], make, device="cuda", protocol=BRIEF, flush=True)["affine"])
    assert first_call_s[0] > 1e-3, "the kernel was to be compiled here"
    assert max(cold.samples) < 1e6 * first_call_s[0] / 10
    assert 0.5 < hot.median_us < 8.0
    assert cold.launches == 1
    assert cold.median_us - hot.median_us < 3.0


def test_a_window_is_linear_in_its_launches() -> None:
    runner = GraphRunner()
    x = torch.randn(1 << 22, device="cuda")
    out = torch.empty_like(x)

    def enqueue(count: int) -> Callable[[], None]:
        def launches() -> None:
            for _ in range(count):
                torch.neg(x, out=out)

        return launches

    enqueue(1)()
    few, many = runner.capture(enqueue(100)), runner.capture(enqueue(300))
    runner.time_round([few, many] * 5, hot=True)
    windows = runner.time_round([few, many] * 15, hot=True)
    ratio = sorted(windows[1::2])[7] / sorted(windows[::2])[7]
    assert ratio == pytest.approx(3.0, rel=0.05)
    assert 0.0 < runner.empty_window_us() < 30.0


def test_two_identical_contenders_tie() -> None:
    first, second = torch_norm(), torch_norm()
    pair = [first, Contender("again", second.run, is_rms_norm)]
    rows = measure(pair, norm_buffers(4096, 4096), device="cuda")
    assert speedup(timed(rows["torch"]), timed(rows["again"])).median == pytest.approx(1, abs=0.03)


def test_a_contender_that_cannot_be_captured_leaves_the_others_alone() -> None:
    def synchronises(buffers: Buffers) -> Tensor:
        x, weight = buffers.inputs
        factor = float(x[0, 0].abs() > 1e9) + 1.0
        return F.rms_norm(x * factor, (x.shape[-1],), weight, EPS)

    contenders = [Contender("synchronises", synchronises, is_rms_norm), torch_norm()]
    rows = measure(contenders, norm_buffers(512, 4096), device="cuda", protocol=BRIEF)
    assert isinstance(rows["synchronises"], Failed)
    assert "captured" in rows["synchronises"].reason
    assert bool(torch.randn(64, device="cuda").isfinite().all())
    assert timed(rows["torch"]).median_us > 0


# cuBLASLt

SHAPES = [
    (1, 4096, 4096),
    (16, 6144, 4096),
    (64, 4096, 14336),
    (1, 1, 1),
    (5, 24, 40),
    (7, 33, 65),
    (17, 705, 705),
    (130, 257, 511),
    (36, 36, 64),
]


def lt_problem(
    M: int, N: int, K: int, dtype: torch.dtype, out_dtype: torch.dtype, pad: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(M * N + K)
    made = {
        "x": normal(generator, M, K + pad, dtype=dtype)[:, :K],
        "w": normal(generator, N, K + pad, dtype=dtype)[:, :K],
        "out": torch.empty(M, N + pad, dtype=out_dtype, device="cuda")[:, :N],
        "bias": normal(generator, N, dtype=out_dtype),
        "addend": normal(generator, M, N + pad, dtype=out_dtype)[:, :N],
    }
    made["w"].mul_(K**-0.5)
    return made


def lt_error(made: dict[str, Tensor], epilogue: str, with_addend: bool, result: Tensor) -> float:
    exact = made["x"].double() @ made["w"].double().T
    if with_addend:
        exact += made["addend"].double()
    if "bias" in epilogue:
        exact += made["bias"].double()
    if "relu" in epilogue:
        exact = exact.relu()
    if "gelu_tanh" in epilogue:
        exact = F.gelu(exact, approximate="tanh")
    return oracles.relative_error(result, exact)


def run_all(made: dict[str, Tensor], epilogue: str, with_addend: bool) -> int:
    """Run every algorithm of the list and check each; returns how many there are."""
    addend = made["addend"] if with_addend else None
    bias = made["bias"] if "bias" in epilogue else None
    plan = LtMatmul(made["x"], made["w"], made["out"], epilogue, addend)
    found = plan.algorithms(8, bias=bias)
    for algorithm in found:
        made["out"].fill_(float("nan"))
        plan.run(algorithm, made["x"], made["w"], made["out"], bias, addend)
        error = lt_error(made, epilogue, with_addend, made["out"])
        allowed = max(torch.finfo(made["out"].dtype).eps, 1e-4)
        assert error <= allowed, (algorithm.rank, error)
    return len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_every_algorithm_of_cublaslt_equals_torch_within_bound(
    M: int, N: int, K: int, dtype: torch.dtype
) -> None:
    for out_dtype in (dtype, torch.float32):
        made = lt_problem(M, N, K, dtype, out_dtype)
        assert run_all(made, "", with_addend=False) >= 1
    made = lt_problem(M, N, K, dtype, dtype)
    plan = LtMatmul(made["x"], made["w"], made["out"])
    plan.run(plan.algorithms(1)[0], made["x"], made["w"], made["out"])
    theirs = F.linear(made["x"], made["w"])
    exact = made["x"].double() @ made["w"].double().T
    assert oracles.no_worse_than(made["out"], theirs, exact) is None


@pytest.mark.parametrize("with_addend", [False, True])
@pytest.mark.parametrize("epilogue", list(cublaslt_abi.EPILOGUES))
def test_cublaslts_epilogues_do_what_their_names_say(epilogue: str, with_addend: bool) -> None:
    made = lt_problem(16, 768, 512, torch.bfloat16, torch.bfloat16)
    assert run_all(made, epilogue, with_addend) >= 1


@pytest.mark.parametrize("pad", [8, 64])
def test_cublaslt_takes_rows_with_a_pitch_and_leaves_the_gaps_alone(pad: int) -> None:
    made = lt_problem(16, 512, 256, torch.bfloat16, torch.bfloat16, pad)
    whole = made["out"].as_strided((16, 512 + pad), made["out"].stride())
    whole.fill_(1234.0)
    run_all(made, "", with_addend=True)
    assert bool((whole[:, 512:] == 1234).all())


def test_the_bindings_numbers_are_those_of_the_installed_header() -> None:
    packages = Path(torch.__file__).resolve().parents[1] / "nvidia"
    headers = [*packages.glob("*/include/cublasLt.h")]
    if not headers:
        pytest.skip("the cuBLAS wheel brought no cublasLt.h")
    text = headers[0].read_text(errors="replace")
    expected = {
        "CUBLASLT_MATMUL_DESC_TRANSA": cublaslt_abi.DESC_TRANSA,
        "CUBLASLT_MATMUL_DESC_EPILOGUE": cublaslt_abi.DESC_EPILOGUE,
        "CUBLASLT_MATMUL_DESC_BIAS_POINTER": cublaslt_abi.DESC_BIAS_POINTER,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cublaslt_abi.PREF_MAX_WORKSPACE_BYTES,
        "CUBLASLT_EPILOGUE_DEFAULT": cublaslt_abi.EPILOGUES[""],
        "CUBLASLT_EPILOGUE_RELU": cublaslt_abi.EPILOGUES["relu"],
        "CUBLASLT_EPILOGUE_BIAS": cublaslt_abi.EPILOGUES["bias"],
        "CUBLASLT_EPILOGUE_GELU": cublaslt_abi.EPILOGUES["gelu_tanh"],
    }
    for letter, value in zip("ABCD", cublaslt_abi.PREF_MIN_ALIGNMENT, strict=True):
        expected[f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{letter}_BYTES"] = value
    for name, value in expected.items():
        assert re.search(rf"\b{name} = {value}\b", text), name


@pytest.mark.parametrize(("M", "N", "K"), [(1, 6144, 4096), (16, 4096, 4096), (64, 4096, 14336)])
def test_the_ranked_best_is_not_slower_than_torch(M: int, N: int, K: int) -> None:
    layer = Layer(M, N, K)

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        error = oracles.relative_error(results[0], layer.reference(buffers))
        return None if error < 8e-3 else f"relative error {error:.3g}"

    contenders = [
        contender
        for contender in product_peers(layer, check, quack_configs=0)
        if contender.name in ("torch", "cublaslt best of 8")
    ]
    rows = measure(contenders, lambda g: make_layer_buffers(layer, g), device="cuda")
    best, theirs = timed(rows["cublaslt best of 8"]), timed(rows["torch"])
    assert speedup(best, theirs).median >= 1 / 1.05


def test_a_ranking_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEDOPS_BENCH_CACHE", str(tmp_path))
    made = lt_problem(16, 1024, 512, torch.bfloat16, torch.bfloat16)
    plan = LtMatmul(made["x"], made["w"], made["out"])
    first = best_algorithm(plan, torch.device("cuda", 0))
    assert (tmp_path / "cublaslt.json").exists()
    monkeypatch.setattr("fusedops.bench.ranking._known", {})
    monkeypatch.setattr("fusedops.bench.ranking._rank", None)
    assert best_algorithm(plan, torch.device("cuda", 0)) == first
    assert first.median_us <= first.first_us


# Peers


def assert_present_peers_ran(names: list[str], rows: dict[str, Outcome]) -> None:
    for name, state in peer_status(names).items():
        if isinstance(state, Available):
            assert any(
                isinstance(outcome, Measurement) and row.startswith(name)
                for row, outcome in rows.items()
            ), (name, rows)


def test_peers_of_rms_norm_are_right_and_timed() -> None:
    contenders = peers.rms_norm_peers(is_rms_norm, EPS)
    rows = measure(contenders, norm_buffers(512, 4096), device="cuda", protocol=BRIEF)
    assert_present_peers_ran(["torch", "torch.compile", "flashinfer", "quack", "triton"], rows)


def test_peers_of_add_rms_norm_are_right_and_timed() -> None:
    def make(generator: torch.Generator) -> Buffers:
        x, residual = (normal(generator, 512, 4096, dtype=torch.bfloat16) for _ in range(2))
        return Buffers((x, residual, normal(generator, 4096, dtype=torch.bfloat16)))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x, residual, weight = buffers.inputs
        added = (x + residual).double()
        reference = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + EPS) * weight
        errors = [
            oracles.relative_error(result, expected)
            for result, expected in zip(results, (reference, added), strict=True)
        ]
        return None if max(errors) < 8e-3 else f"relative errors {errors}"

    contenders = peers.add_rms_norm_peers(check, EPS)
    rows = measure(contenders, make, device="cuda", protocol=BRIEF)
    assert_present_peers_ran(["torch", "torch.compile", "flashinfer", "quack"], rows)


def test_peers_of_act_and_mul_are_right_and_timed() -> None:
    def make(generator: torch.Generator) -> Buffers:
        return Buffers((normal(generator, 256, 8192, dtype=torch.bfloat16),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        gate, up = buffers.inputs[0].double().chunk(2, dim=-1)
        error = oracles.relative_error(results[0], F.silu(gate) * up)
        return None if error < 8e-3 else f"relative error {error:.3g}"

    rows = measure(peers.act_and_mul_peers(check), make, device="cuda", protocol=BRIEF)
    assert_present_peers_ran(["torch", "torch.compile", "flashinfer"], rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_peers_of_sum_are_right_and_timed(dtype: torch.dtype) -> None:
    def make(generator: torch.Generator) -> Buffers:
        drawn = torch.randint(-100, 100, (1 << 24,), generator=generator, device="cuda")
        return Buffers((drawn.to(dtype),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        # The sum of integers below 2^24 in magnitude is exact in float32 too, in any order here.
        expected = buffers.inputs[0].double().sum().view(1)
        return oracles.within(results[0], expected, 1e-6 * 100 * (1 << 24))

    rows = measure(peers.sum_peers(check), make, device="cuda", protocol=BRIEF)
    assert_present_peers_ran(["torch", "cub"], rows)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(16, 4096, 4096, bias=True),
        Layer(16, 4096, 4096, residual=True),
        Layer(64, 2048, 2048, bias=True, activation="gelu_tanh"),
        Layer(64, 4096, 2048, activation="silu", gated=True),
    ],
    ids=["bias", "residual", "bias-gelu", "swiglu"],
)
def test_peers_of_a_layer_are_right_and_timed(layer: Layer) -> None:
    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        error = oracles.relative_error(results[0], layer.reference(buffers))
        return None if error < 8e-3 else f"relative error {error:.3g}"

    rows = measure(
        product_peers(layer, check, quack_configs=2),
        lambda generator: make_layer_buffers(layer, generator),
        device="cuda",
        protocol=BRIEF,
    )
    assert_present_peers_ran(["torch", "torch.compile", "cublaslt", "quack"], rows)


# Chains and ceilings


@pytest.mark.parametrize(
    ("layer", "low_us", "high_us"),
    [
        (Layer(16, 4096, 4096, residual=True), 7.2, 30.0),
        (Layer(16, 6144, 4096, bias=True), 10.8, 35.0),
        (Layer(16, 28672, 4096, activation="silu", gated=True), 50.3, 120.0),
    ],
    ids=["o", "qkv", "gate_up"],
)
def test_peers_run_in_a_dependent_chain_over_weights_past_the_l2(
    layer: Layer, low_us: float, high_us: float
) -> None:
    if torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("the figures of this test are an H200's")
    made = LayerChain(layer, "cuda")
    assert len(made.chain.weights) * made.chain.spec.stored_bytes >= 4 * l2_bytes(
        torch.device("cuda")
    )
    rows = measure_chain(made.chain, made.peers(), device="cuda", protocol=BRIEF)
    assert len(rows) == 2
    for outcome in rows.values():
        assert low_us < timed(outcome).median_us < high_us


def test_ceilings_are_plausible() -> None:
    found = measure_ceilings()
    if found.gpu != "NVIDIA H200":
        pytest.skip("the figures of this test are an H200's")
    assert 3e12 < found.read_bytes_per_s < 5e12
    assert 3e12 < found.read_write_bytes_per_s < 5e12
    assert 500e12 < found.bf16_flops_per_s < 1000e12
    assert 0.5 < found.launch_us < 3.0
    assert floor(Traffic(found.read_bytes_per_s), found).us == pytest.approx(1e6)
