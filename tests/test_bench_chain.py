"""Dependent chains: which columns depend on what, how many weights and launches, what is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench import (
    ChainContender,
    ChainSpec,
    DependentChain,
    Failed,
    Measurement,
    Protocol,
    chain,
    gain_for,
    measure_chain,
)
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.products import ACTIVATIONS, Layer
from fusedops.errors import ConfigError

QUICK = Protocol(samples=3, min_samples=1, settle_min_s=0.0, settle_max_s=0.01)


@pytest.fixture(autouse=True)
def small_chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chains of a few hundred kilobytes, on one thread: such products gain nothing from two."""
    monkeypatch.setattr(chain, "MIN_WEIGHT_BYTES", 100_000)
    monkeypatch.setattr(chain, "STREAMED_BYTES", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def product(chained: DependentChain) -> Callable[[Tensor, int, Tensor], None]:
    def launch(x: Tensor, index: int, out: Tensor) -> None:
        torch.mm(x, chained.weights[index].T, out=out)

    return launch


def exact(chained: DependentChain) -> Callable[[Tensor, int, Tensor], str | None]:
    def check(x: Tensor, index: int, out: Tensor) -> str | None:
        right = torch.equal(out, x @ chained.weights[index].T)
        return None if right else "not the product"

    return check


def measured(
    chained: DependentChain, launch: Callable[[Tensor, int, Tensor], object], **options: bool
) -> Measurement | Failed:
    contender = ChainContender("ours", launch, exact(chained), **options)
    return measure_chain(chained, [contender], device="cpu", protocol=QUICK)["ours"]


@pytest.mark.parametrize(
    ("spec", "weights", "launches"),
    [
        # Llama-3-8B's products in bf16: o, qkv, gate_up, down, lm_head.
        (ChainSpec(16, 4096, 4096), 8, 144),
        (ChainSpec(16, 6144, 4096), 5, 95),
        (ChainSpec(16, 28672, 4096, columns_out=14336), 2, 32),
        (ChainSpec(16, 4096, 14336), 3, 42),
        (ChainSpec(16, 128256, 4096), 2, 32),
        # An int4 weight is a quarter as large, so four times as many are needed.
        (ChainSpec(16, 4096, 4096, weight_bytes=4096 * 4096 // 2), 29, 522),
    ],
)
def test_weights_exceed_the_cache_four_times_and_launches_are_whole_turns(
    spec: ChainSpec, weights: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert spec.weight_count() == weights
    assert spec.weight_count() * spec.stored_bytes >= 240_000_000
    assert spec.launch_count(weights) == launches
    assert launches >= 32
    assert launches % weights == 0
    larger_cache = spec.weight_count(cache_bytes=100_000_000)
    assert larger_cache * spec.stored_bytes >= 400_000_000


@pytest.mark.parametrize(
    ("N", "K", "columns_out", "dependent", "expected"),
    [
        (96, 64, None, None, 64),  # wide output: all of x comes from it
        (64, 96, None, None, 64),  # wide x: its tail is fixed
        (64, 64, None, None, 64),
        (128, 64, 64, 8, 8),  # behind a gate, an eighth
        (40, 200, None, 13, 13),  # odd split
    ],
)
def test_x_reads_the_previous_output_and_fixed_columns(
    N: int, K: int, columns_out: int | None, dependent: int | None, expected: int
) -> None:
    spec = ChainSpec(3, N, K, columns_out=columns_out, dependent_columns=dependent)
    chained = DependentChain(spec, "cpu")
    assert spec.dependent == expected
    for position in range(1, 5):
        _, _, before = chained.views(position - 1)
        x, index, out = chained.views(position)
        assert x.shape == (3, K)
        assert out.shape == (3, spec.out_columns)
        assert index == position % len(chained.weights)
        fixed = x.clone()
        before.fill_(7.0)
        assert bool((x[:, :expected] == 7).all())
        assert torch.equal(x[:, expected:], fixed[:, expected:])
        assert not bool((x[:, expected:] == 7).any())
        out.fill_(9.0)
        assert not bool((x == 9).any()), "a launch must not overwrite its own x"


def test_the_start_is_never_written_so_replays_repeat() -> None:
    chained = DependentChain(ChainSpec(2, 64, 64), "cpu")
    start = chained.views(0)[0].clone()
    outputs = []
    for _ in range(2):
        chained.enqueue(product(chained), chained.launches)
        outputs.append(chained.views(chained.launches - 1)[2].clone())
    assert torch.equal(chained.views(0)[0], start)
    assert torch.equal(*outputs)


def test_rows_of_the_activation_buffers_are_aligned() -> None:
    chained = DependentChain(ChainSpec(4, 100, 36), "cpu")
    for position in range(3):
        x, _, out = chained.views(position)
        assert x.stride(0) % 64 == 0
        assert out.stride(0) % 64 == 0


def test_a_right_contender_gets_the_graphs_time_over_its_launches() -> None:
    chained = DependentChain(ChainSpec(2, 64, 96), "cpu")
    row = measured(chained, product(chained))
    assert isinstance(row, Measurement)
    assert row.launches == chained.launches >= 32
    assert row.median_us > 0


def test_a_launch_that_reads_x_too_early_is_failed() -> None:
    """What programmatic dependent launch does when the wait is forgotten."""
    chained = DependentChain(ChainSpec(2, 64, 64), "cpu")
    earlier: list[Tensor] = []

    def racing(x: Tensor, index: int, out: Tensor) -> None:
        stale = earlier[-1] if earlier else x
        earlier.append(x.clone())
        torch.mm(stale, chained.weights[index].T, out=out)

    assert "launch" in measured(chained, racing).reason


def test_a_chain_that_does_not_repeat_its_bits_is_failed_unless_it_may() -> None:
    chained = DependentChain(ChainSpec(2, 64, 64), "cpu")
    replays: list[int] = []

    def jittery(x: Tensor, index: int, out: Tensor) -> None:
        replays.append(1)
        torch.mm(x, chained.weights[index].T, out=out)
        out[0, 0] += len(replays) * 2.0**-6

    contender = ChainContender("ours", jittery, lambda x, index, out: None)
    rows = measure_chain(chained, [contender], device="cpu", protocol=QUICK)
    assert rows["ours"] == Failed("after timing: two replays of the chain gave different bits")
    free = ChainContender("ours", jittery, lambda x, index, out: None, repeatable=False)
    rows = measure_chain(chained, [free], device="cpu", protocol=QUICK)
    assert isinstance(rows["ours"], Measurement)


def test_a_wrong_first_launch_is_failed_before_timing() -> None:
    chained = DependentChain(ChainSpec(2, 64, 64), "cpu")
    assert measured(chained, lambda x, index, out: out.zero_()) == Failed("not the product")


def test_an_output_that_is_left_unwritten_is_failed() -> None:
    chained = DependentChain(ChainSpec(2, 64, 64), "cpu")
    assert "not written" in measured(chained, lambda x, index, out: None).reason


def test_a_chain_that_fades_is_failed_with_advice() -> None:
    chained = DependentChain(ChainSpec(2, 64, 64, gain=0.5), "cpu")
    reason = measured(chained, product(chained)).reason
    assert "fade or grow" in reason
    assert "gain_for" in reason


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_chain_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="each is >= 1"):
        ChainSpec(*shape)


@pytest.mark.parametrize("dependent", [0, 65])
def test_dependent_columns_must_exist(dependent: int) -> None:
    with pytest.raises(ConfigError, match="accepted: 1 to 64"):
        ChainSpec(2, 64, 96, dependent_columns=dependent)


# Gains


def test_the_gain_of_a_plain_product_is_one() -> None:
    assert gain_for(lambda z: z[:, 0]) == pytest.approx(1.0, abs=0.01)


def test_the_gain_of_a_gate_keeps_unit_variance() -> None:
    gain = gain_for(lambda z: F.silu(z[:, 0]) * z[:, 1], columns=2)
    fresh = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(5)) * gain
    assert float((F.silu(fresh[:, 0]) * fresh[:, 1]).square().mean()) == pytest.approx(1, abs=0.1)


def test_an_epilogue_that_adds_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match="residual"):
        gain_for(lambda z: z[:, 0] + 2.0)


# Layers

EPILOGUES = [
    {},
    {"bias": True},
    {"residual": True},
    {"bias": True, "residual": True},
    {"activation": "silu"},
    {"activation": "relu", "bias": True},
    {"activation": "gelu_tanh", "bias": True, "residual": True},
    {"activation": "silu", "gated": True},
    {"activation": "gelu", "gated": True, "bias": True, "residual": True},
]


@pytest.mark.parametrize("options", EPILOGUES)
@pytest.mark.parametrize(("M", "N", "K"), [(4, 128, 256), (4, 512, 128)])
def test_a_layers_chain_stays_at_unit_variance_and_its_peers_are_right(
    M: int, N: int, K: int, options: dict[str, bool | str]
) -> None:
    layer = LayerChain(Layer(M, N, K, **options), "cpu")  # type: ignore[arg-type]
    rows = measure_chain(layer.chain, layer.peers(), device="cpu", protocol=QUICK)
    assert isinstance(rows["torch"], Measurement), rows
    last = layer.chain.views(layer.chain.launches - 1)[2]
    assert 0.3 < float(last.float().std()) < 3.0


@pytest.mark.parametrize("options", EPILOGUES)
def test_a_layers_reference_is_the_written_formula(options: dict[str, bool | str]) -> None:
    made = LayerChain(Layer(3, 8, 16, dtype=torch.float32, **options), "cpu")  # type: ignore[arg-type]
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
    rows = []
    for row in x.double():
        values = [float(row @ w.double()) for w in made.chain.weights[1]]
        if made.bias is not None:
            values = [v + float(b) for v, b in zip(values, made.bias, strict=True)]
        activation = ACTIVATIONS[made.layer.activation]
        active = [float(activation(torch.tensor(v, dtype=torch.float64))) for v in values]
        half = len(values) // 2
        rows.append(
            [active[i] * values[half + i] for i in range(half)] if made.layer.gated else active
        )
    expected = torch.tensor(rows, dtype=torch.float64)
    if made.residual is not None:
        expected += made.residual.double()
    torch.testing.assert_close(made.reference(x, 1), expected)


def test_a_layers_check_sees_a_missing_bias() -> None:
    made = LayerChain(Layer(4, 64, 64, bias=True), "cpu")
    x, index, out = made.chain.views(0)
    torch.mm(x, made.chain.weights[index].T, out=out)
    assert "relative error" in (made.check(x, index, out) or "")


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted are"):
        Layer(1, 1, 1, activation="swish")
