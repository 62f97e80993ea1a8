"""The goals of quantized products: rows small and on the CPU, and readings of injected times."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.bench import chain, quant_peers, quant_rows
from fusedops.bench.data import Buffers
from fusedops.bench.environment import Environment
from fusedops.bench.goal_harness import Harness
from fusedops.bench.goal_spec import load_goals
from fusedops.bench.goals import load_all, quant_decode, quant_large, quant_notes
from fusedops.bench.goals.quant_layers import QUANT_ROWS, TABLE, product_layer
from fusedops.bench.measurement import Absent, Failed, Measurement, Outcome, summarize
from fusedops.bench.peers import Available
from fusedops.bench.precompile import H200, Precompiled, main
from fusedops.bench.products import CUBLASLT, Layer
from fusedops.bench.quant_products import QuantLayer
from fusedops.bench.quant_rows import BF16, MINE, QuantChain, Rotation, chain_outcomes
from fusedops.bench.roofline import PUBLISHED_CEILINGS
from fusedops.bench.timer import Protocol
from fusedops.errors import UnsupportedError
from fusedops.providers.base import current_policy, use_provider
from fusedops.quant import SCHEMES

QUICK = Protocol(samples=3, min_samples=1, min_window_us=1, settle_min_s=0, settle_max_s=0.01)
ENVIRONMENT = Environment("NVIDIA H200", "580.1", "cpu", "3.12", {"torch": "2.11"}, "abc", "g", "d")
GOALS = {name: goal for name, goal in load_goals().items() if name.startswith("quant.")}
LAYERS = {
    "plain": Layer(3, 256, 256),
    "residual": Layer(3, 256, 256, residual=True),
    "gated": Layer(3, 512, 256, activation="silu", gated=True),
}
H200_LIMITS = PUBLISHED_CEILINGS["NVIDIA H200"]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts as a new process would, with one thread and small chains."""
    quant_decode.forget_rows()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(chain, "MIN_WEIGHT_BYTES", 100_000)
    monkeypatch.setattr(chain, "STREAMED_BYTES", 1)
    monkeypatch.setattr(chain, "MIN_LAUNCHES", 4)
    limits = PUBLISHED_CEILINGS["NVIDIA H200"]
    monkeypatch.setattr(quant_notes, "row_ceilings", lambda device: limits)
    yield
    torch.set_num_threads(threads)
    quant_decode.forget_rows()


def us(*samples: float) -> Measurement:
    return summarize(samples, mode="cuda graph", launches=1, hot=False)


def harness(tmp_path: Path) -> Harness:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return Harness(tmp_path, ENVIRONMENT, load_all(), device="cpu", protocol=QUICK, now=lambda: now)


def ran() -> None:
    """What a served call leaves in the usage of the pinned provider."""
    policy = current_policy()
    assert policy.usage is not None
    policy.usage.calls["gemm", policy.pinned or ""] += 1


def named(name: str, scheme: str = "fp8", **options: Any) -> QuantLayer:
    return QuantLayer(LAYERS[name], SCHEMES[scheme], **options)


# What is measured


def test_every_goal_is_measured_and_its_layers_are_known() -> None:
    assert len(GOALS) == 18
    assert set(GOALS) <= set(load_all())
    assert set(QUANT_ROWS) == {*GOALS, TABLE}
    for name in GOALS:
        assert load_all()[name].provider == "cutlass"
        found = set(load_all()[name].files())
        assert {"fusedops/cutlass/sm90_mixed.py", "fusedops/bench/quant_rows.py"} <= found


def test_products_are_llamas_without_a_bias() -> None:
    found = {name: product_layer(name, 16) for name in ("qkv", "o", "gate_up_swiglu", "down")}
    assert [(layer.N, layer.K, layer.chain_text) for layer in found.values()] == [
        (6144, 4096, "none"),
        (4096, 4096, "residual"),
        (28672, 4096, "gate(silu)"),
        (4096, 14336, "residual"),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_floor_is_that_of_the_stored_bytes(scheme: str) -> None:
    for name, goal in GOALS.items():
        if name.endswith(".m16"):
            (made,) = [
                row.made for row in QUANT_ROWS[name]() if row.made.scheme.name == _scheme(name)
            ]
            # The goals' floors are rounded to a tenth.
            assert made.floor(H200_LIMITS).us == pytest.approx(goal.floor, rel=0.05)
    layer = QuantLayer(Layer(4096, 4096, 4096), SCHEMES[scheme])
    twice = scheme in ("fp8", "fp8-tensor", "fp8-block", "int8", "w4a8")
    assert layer.floor(H200_LIMITS).compute_us == pytest.approx(196.3 / (2 if twice else 1), 1e-3)


def _scheme(name: str) -> str:
    return {"fp8_row": "fp8", "fp8_block": "fp8-block", "int4_g128": "int4"}[name.split(".")[1]]


def test_a_pattern_compiles_the_kernels_of_its_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(problems: Any, *_: Any) -> Any:
        asked.extend(problems)
        return Precompiled(0, 0)

    monkeypatch.setattr("fusedops.bench.precompile.precompile", noted)
    assert main(["quant.fp8_block.m4096_tflops"]) == 0
    assert {(p.spec.n, p.spec.k, p.m) for p in asked} == {
        (7168, 4096, 4096),
        (4096, 7168, 4096),
        (24576, 1536, 4096),
    }
    assert main(["quant.none"]) == 2


# Products


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_chain_computes_the_layer(scheme: str, name: str) -> None:
    made = named(name, scheme)
    found = QuantChain(made, "cpu")
    assert len(found.weights) == len(found.chain.weights) > 1
    contender = found.contender("ours")
    x, index, out = found.chain.views(1)
    with use_provider("reference"):
        contender.launch(x, index, out)
    assert contender.check(x, index, out) is None
    wrong = out.clone()
    wrong[1, 7] += 1.0
    assert "element (1, 7)" in (contender.check(x, index, wrong) or "")
    assert contender.check(x, index, out * 1.5) is not None


def test_the_problem_is_that_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAYERS:
        for scheme in SCHEMES:
            made = named(name, scheme)
            x = made.activations(torch.randn(3, 256).bfloat16())
            weight = made.stored(torch.randn(LAYERS[name].N, 256).bfloat16())
            problem = made.problem(H200)
            assert problem.spec.weight == weight.format
            assert problem.x_dtype == x.values.dtype
            others = {"residual": torch.zeros(3, 256, dtype=torch.bfloat16)}
            given = made.operands(problem.spec.operand_names, x, weight, others)
            assert problem.operand_dtypes == tuple(operand.dtype for operand in given)


def test_a_row_times_every_scheme_beside_bf16_and_names_absent_peers() -> None:
    layers = [named("residual", scheme) for scheme in ("fp8", "fp8-block", "int4", "int8")]
    with use_provider("reference") as usage:
        rows = chain_outcomes(layers, "cpu", QUICK)
    ours = {f"{MINE} {made.scheme.name}" for made in layers}
    assert {name for name, row in rows.items() if isinstance(row, Measurement)} == {*ours, BF16}, (
        rows
    )
    assert set(rows) - ours - {BF16} == {
        "cuBLAS fp8 row-wise",
        "flashinfer fp8 blocks",
        "quack W4A16",
    }
    assert usage.count("gemm", "reference") > 0


@pytest.mark.parametrize(
    ("scheme", "name", "options"),
    [
        ("int4", "plain", {}),
        ("fp8", "gated", {"quantizes": True}),
        ("fp8-block", "plain", {}),
        ("int8", "residual", {}),
    ],
)
def test_a_rotation_computes_the_layer(scheme: str, name: str, options: dict[str, Any]) -> None:
    made = named(name, scheme, **options)
    rotation = Rotation(made)
    with use_provider("reference"):
        assert rotation.refusal("cpu") is None
        buffers = rotation.buffers(torch.Generator().manual_seed(0))
        contender = rotation.contender()
        assert contender.prepare is not None
        contender.run(contender.prepare(buffers))
        assert contender.check(buffers.outputs, buffers) is None
        wrong = (buffers.outputs[0].float() * 1.5).to(made.spec.out_dtype)
        assert contender.check((wrong,), buffers) is not None


def test_bf16_peers_multiply_the_values_that_are_stored() -> None:
    rotation = Rotation(named("plain", "int4"))
    buffers = rotation.buffers(torch.Generator().manual_seed(0))
    (torchs,) = rotation.bf16_peers()
    assert torchs.prepare is not None
    result = torchs.run(torchs.prepare(buffers))
    assert isinstance(result, Tensor)
    assert torchs.check((result,), buffers) is None
    assert torchs.check((result.flip(0),), buffers) is not None


def _stand_in(scheme: str, made: QuantLayer) -> Callable[..., Any]:
    """A peer by torch on the operands that a library would get, in the library's order."""

    def multiply(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x.double() @ w.double().T)

    def scaled_mm(x: Tensor, columns: Tensor, **given: Any) -> Tensor:
        assert given["scale_a"].shape == (3, 1)
        wide = columns.t().double() * given["scale_b"].double().t()
        return multiply(x.double() * given["scale_a"].double(), wide, given["out"])

    def blocks(x: Tensor, rows: Tensor, x_scale: Tensor, w_scale: Tensor, out: Tensor) -> Tensor:
        assert x_scale.shape == (3, 2)
        wide = rows.double() * w_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return multiply(x.double() * x_scale.double().repeat_interleave(128, 1), wide, out)

    def int4(x: Tensor, blob: Tensor, strip: Tensor, **given: Any) -> Tensor:
        low, high = (blob & 15).double(), (blob >> 4).double()
        codes = torch.stack((low, high), -1).flatten(1)
        if given["wformat"] == "int4":
            values = codes - 8
        else:
            values = torch.where(codes > 7, 8 - codes, codes)
        wide = values * strip.double().repeat_interleave(128, 1)
        scale = given.get("act_scale")
        wide_x = x.double() if scale is None else x.double() * scale.double()[:, None]
        assert x.is_contiguous()
        return multiply(wide_x, wide, given["out"])

    return {"fp8": scaled_mm, "fp8-block": blocks}.get(scheme, int4)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "int4", "w4a8"])
def test_peers_get_the_same_numbers_in_their_own_order(
    scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = named(name, scheme)
    multiply = _stand_in(scheme, made)
    library = SimpleNamespace(
        fp8_blockscale_gemm_sm90=multiply,
        prepare_w4_weight=lambda nibbles, scales, form: (nibbles, scales),
        gemm_w4a16=multiply,
        gemm_w4a8=multiply,
    )
    monkeypatch.setattr(quant_peers, "peer_status", lambda names: {names[0]: Available("1")})
    monkeypatch.setattr(quant_peers.importlib, "import_module", lambda _: library)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    found = QuantChain(made, "cpu")
    ((_, peer),) = found.peers().items()
    assert not isinstance(peer, Absent)
    for position in range(3):
        x, index, out = found.chain.views(position)
        peer.launch(x, index, out)
        assert peer.check(x, index, out) is None
        assert peer.check(x, index, out.flip(0)) is not None
    rotation = Rotation(made)
    ((_, timed),) = rotation.peers(product_only=True).items()
    assert not isinstance(timed, Absent)
    assert timed.prepare is not None
    buffers = rotation.buffers(torch.Generator().manual_seed(0))
    result = timed.run(timed.prepare(buffers))
    assert isinstance(result, Tensor)
    assert result.shape == (3, LAYERS[name].N)
    assert timed.check((result,), buffers) is None
    assert timed.check((result * 2,), Buffers(buffers.inputs)) is not None


def test_a_library_without_the_product_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_peers, "peer_status", lambda names: {names[0]: Available("9")})
    monkeypatch.setattr(quant_peers.importlib, "import_module", lambda _: SimpleNamespace())
    found = quant_peers.quant_peers(named("plain", "fp8-block"))["flashinfer fp8 blocks"]
    assert isinstance(found, Absent)
    assert found.reason.startswith("flashinfer 9: ")


# Readings


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chain rows with injected times: fp8 10 us at M = 16, others more; a list of what was run."""
    asked: list[str] = []

    def outcomes(layers: list[QuantLayer], *_: Any) -> dict[str, Outcome]:
        ran()
        m = layers[0].layer.M
        asked.append(f"n{layers[0].layer.N} k{layers[0].layer.K} m{m}")
        base = {"fp8": 10.0, "fp8-block": 11.0, "int4": 5.0, "int8": 10.2}
        rows: dict[str, Outcome] = {
            f"{MINE} {made.scheme.name}": us(base[made.scheme.name] * (1.1 if m == 64 else 1.0))
            for made in layers
        }
        return {**rows, "cuBLAS fp8 row-wise": us(17.0), "quack W4A16": Absent("no"), BF16: us(30)}

    monkeypatch.setattr(quant_decode, "chain_outcomes", outcomes)
    return asked


def test_goals_of_decode_products_share_their_rows(tmp_path: Path, chains: list[str]) -> None:
    run = harness(tmp_path)
    wanted = [name for name in GOALS if not name.endswith(("large_m", "tflops", "cublas"))]
    entries = {name: run.run(GOALS[name]) for name in wanted}
    assert len(chains) == len(set(chains)) == 8
    o = entries["quant.fp8_row.o.m16"]
    assert (o["value"], o["peer"]) == (10.0, "cuBLAS fp8 row-wise 17.0 us")
    assert entries["quant.int4_g128.down.m16"]["peer"] == "cuBLAS bf16 30.0 us"
    assert entries["quant.int8_over_fp8"]["value"] == pytest.approx(1.02)
    assert entries["quant.fp8_row.m64_over_m16"]["value"] == pytest.approx(1.1)
    assert entries["quant.int4.m64_over_m16"]["status"] == "ok"


def test_a_scheme_that_fails_leaves_the_others_their_figures(
    tmp_path: Path, chains: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = quant_decode.chain_outcomes

    def outcomes(*given: Any) -> dict[str, Outcome]:
        return {**plain(*given), f"{MINE} int4": Failed("relative error 1")}

    monkeypatch.setattr(quant_decode, "chain_outcomes", outcomes)
    run = harness(tmp_path)
    assert run.run(GOALS["quant.fp8_row.o.m16"])["status"] == "missed"
    entry = run.run(GOALS["quant.int4_g128.o.m16"])
    assert (entry["status"], entry["note"]) == ("failed", "fusedops int4: relative error 1")


def test_large_int4_without_a_kernel_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Rotation, _: Any) -> str:
        return "UnsupportedError: M <= 128 only"

    monkeypatch.setattr(Rotation, "refusal", refused)
    entry = harness(tmp_path).run(GOALS["quant.int4.large_m"])
    assert entry["status"] == "failed"
    assert entry["note"].startswith("16 of 16 rows have no ratio: o n4096 k4096 m512: ")
    assert "fusedops: UnsupportedError: M <= 128 only" in entry["note"]


def test_what_kernels_raise_is_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedError("M <= 128 only")

    rotation = Rotation(named("plain", "int4"))
    monkeypatch.setattr(QuantLayer, "call", lambda self: refuse)
    assert rotation.refusal("cpu") == "UnsupportedError: M <= 128 only"
    rows = quant_rows.rotated_outcomes(rotation, {}, "cpu", QUICK)
    assert rows == {MINE: Failed("UnsupportedError: M <= 128 only")}


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Outcome]], None]:
    """Rows on rotated buffers with injected times."""

    def inject(rows: dict[str, Outcome]) -> None:
        def outcomes(*_: Any) -> dict[str, Outcome]:
            ran()
            return rows

        monkeypatch.setattr(quant_large, "rotated_outcomes", outcomes)

    return inject


def test_large_goals_read_their_least_favourable_row(
    tmp_path: Path, rotated: Callable[[dict[str, Outcome]], None]
) -> None:
    run = harness(tmp_path)
    rotated({MINE: us(10.0), "torch": us(12.0), CUBLASLT: us(11.0), "quack W4A16": us(9.0)})
    int4 = run.run(GOALS["quant.int4.large_m"])
    assert (int4["value"], int4["peer"]) == (1.1, CUBLASLT)
    rotated({MINE: us(800.0), "cuBLAS fp8 row-wise": us(784.0)})
    fused = run.run(GOALS["quant.fp8_row.m4096_over_cublas"])
    assert (fused["value"], fused["status"]) == (0.98, "missed")
    assert fused["note"].startswith("1203 TFLOP/s")
    rotated({MINE: us(250.0)})
    blocks = run.run(GOALS["quant.fp8_block.m4096_tflops"])
    assert blocks["value"] == pytest.approx(2 * 4096 * 7168 * 4096 / 250e6, rel=1e-5)
    assert "n24576 k1536" in blocks["note"]
