"""The measuring protocol on a scripted clock: order of steps, refusals, settling, caps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fusedops.bench import Buffers, Contender, Failed, Measurement, Protocol, measure, speedup
from fusedops.bench.data import poison, refuse_constant, rotation_sets, total_bytes
from fusedops.bench.measurement import Absent, outcome_from_json, outcome_to_json, summarize
from fusedops.bench.runner import CpuRunner, Replay
from fusedops.bench.timer import Program, settle, time_programs
from fusedops.errors import ConfigError, DeviceError

QUICK = Protocol(samples=6, min_samples=2, min_window_us=1.0, settle_min_s=0.0)


class ScriptedRunner:
    """A device whose time passes only when work says so; it logs what happens in which order."""

    mode = "scripted"

    def __init__(self, cache_bytes: int = 0, empty_us: float = 0.0) -> None:
        self.cache_bytes = cache_bytes
        self.now_us = 0.0
        self.log: list[str] = []
        self._empty_us = empty_us

    def clock(self) -> float:
        return self.now_us / 1e6

    def spend(self, us: float) -> None:
        self.now_us += us

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        self.log.append("capture")
        enqueue()
        return enqueue

    def time_round(self, replays: Sequence[Replay], *, hot: bool) -> list[float]:
        windows = []
        for replay in replays:
            self.log.append("warm replay" if hot else "flush")
            start = self.now_us
            replay()
            windows.append(self.now_us - start + self._empty_us)
        return windows

    def empty_window_us(self) -> float:
        return self._empty_us

    def synchronize(self) -> None:
        self.log.append("synchronize")


def pair(generator: torch.Generator) -> Buffers:
    return Buffers((torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)))


def is_sum(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
    return None if torch.equal(results[0], buffers.inputs[0] + buffers.inputs[1]) else "not the sum"


def adder(runner: ScriptedRunner, us: float, name: str = "add") -> Contender:
    def run(buffers: Buffers) -> Tensor:
        runner.spend(us)
        return buffers.inputs[0] + buffers.inputs[1]

    return Contender(name, run, is_sum)


def scripted(runner: ScriptedRunner, *contenders: Contender, **options: object) -> dict:
    options.setdefault("protocol", QUICK)
    return measure(
        contenders,
        options.pop("make_buffers", pair),
        device="cpu",
        runner=runner,
        clock=runner.clock,
        **options,
    )


# Statistics


def test_a_summary_holds_median_percentiles_and_spread() -> None:
    row = summarize([10.0, 11.0, 12.0, 13.0, 14.0], mode="cpu", launches=3, hot=True, notes=["n"])
    assert (row.median_us, row.low_us, row.high_us) == (12.0, 10.4, 13.6)
    assert row.spread == pytest.approx(3.2 / 12)
    assert (row.mode, row.launches, row.hot, row.notes) == ("cpu", 3, True, ("n",))


def test_a_summary_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one sample"):
        summarize([], mode="cpu", launches=1, hot=True)


def test_a_speedup_pairs_rounds_so_that_a_drift_of_both_cancels() -> None:
    drift = [1.0, 1.5, 3.0, 0.7]
    ours = summarize([10 * d for d in drift], mode="cpu", launches=1, hot=True)
    peer = summarize([20 * d for d in drift], mode="cpu", launches=1, hot=True)
    ratio = speedup(ours, peer)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ConfigError, match="one call"):
        speedup(ours, summarize([1.0], mode="cpu", launches=1, hot=True))


@pytest.mark.parametrize(
    "outcome",
    [
        summarize([1.0, 2.0], mode="cuda graph", launches=7, hot=False, notes=["x"]),
        Failed("wrong"),
        Absent("not installed"),
    ],
)
def test_an_outcome_survives_json(outcome: Measurement | Failed | Absent) -> None:
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


def test_an_object_that_is_no_outcome_is_refused() -> None:
    with pytest.raises(ConfigError, match="no measurement"):
        outcome_from_json({"median_us": 1.0})


# Data


@pytest.mark.parametrize(
    "constant",
    [
        torch.zeros(64),
        torch.zeros(64, dtype=torch.bfloat16),
        torch.ones(4, 4, dtype=torch.int32),
        torch.full((3, 5), 2.5).t(),
        torch.zeros(16).to(torch.float8_e4m3fn),
    ],
)
def test_constant_data_is_refused(constant: Tensor) -> None:
    with pytest.raises(ConfigError, match="constant data runs faster"):
        refuse_constant([torch.randn(4), constant])


def test_real_data_and_single_elements_are_accepted() -> None:
    refuse_constant([torch.tensor([0.0, 1.0]), torch.zeros(1), torch.randn(4, 4)[:, ::2]])


def test_measure_refuses_zeros_but_not_indices() -> None:
    runner = ScriptedRunner()
    zeros = Buffers((torch.zeros(8, 8), torch.randn(8, 8)))
    with pytest.raises(ConfigError, match="constant data"):
        scripted(runner, adder(runner, 1.0), make_buffers=lambda generator: zeros)

    def with_indices(generator: torch.Generator) -> Buffers:
        made = pair(generator)
        return Buffers(made.inputs, indices=(torch.zeros(4, dtype=torch.int32),))

    assert isinstance(
        scripted(runner, adder(runner, 1.0), make_buffers=with_indices)["add"], Measurement
    )


@pytest.mark.parametrize(
    ("set_bytes", "cache_bytes", "sets"),
    [
        (16_000_000, 60_000_000, 15),
        (240_000_000, 60_000_000, 2),
        (4 << 30, 60_000_000, 2),
        (239_999_999, 60_000_000, 2),
        (1, 10, 40),
    ],
)
def test_enough_sets_rotate_to_exceed_the_cache_four_times(
    set_bytes: int, cache_bytes: int, sets: int
) -> None:
    assert rotation_sets(set_bytes, cache_bytes) == sets
    assert sets * set_bytes >= 4 * cache_bytes


def test_rotating_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one element"):
        rotation_sets(0, 1)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool]
)
def test_poison_leaves_no_element_as_it_was(dtype: torch.dtype) -> None:
    ones = torch.ones(4, 6)
    for tensor in (ones.to(dtype), ones.to(dtype).t(), ones.sum().sign().to(dtype)):
        poison(tensor)
        spoiled = tensor.float()
        assert bool((spoiled.isnan() | (spoiled != 1)).all())


# Protocol


def test_contenders_are_timed_and_kept_in_order() -> None:
    runner = ScriptedRunner()
    rows = scripted(runner, adder(runner, 5.0, "slow"), adder(runner, 2.0, "fast"))
    assert list(rows) == ["slow", "fast"]
    assert (rows["slow"].median_us, rows["fast"].median_us) == (5.0, 2.0)
    assert len(rows["slow"].samples) == QUICK.samples


def test_b94_the_first_call_and_its_compilation_are_not_timed() -> None:
    runner = ScriptedRunner()
    compiled: list[bool] = []

    def run(buffers: Buffers) -> Tensor:
        runner.spend(2.0 if compiled else 3e6)
        compiled.append(True)
        return buffers.inputs[0] + buffers.inputs[1]

    row = scripted(runner, Contender("jit", run, is_sum))["jit"]
    assert max(row.samples) == 2.0


def test_b92_every_input_is_made_before_the_first_flush() -> None:
    runner = ScriptedRunner(cache_bytes=1024)
    set_bytes = total_bytes(pair(torch.Generator()).tensors)

    def logged(generator: torch.Generator) -> Buffers:
        runner.log.append("inputs")
        return pair(generator)

    row = scripted(runner, adder(runner, 1.0), make_buffers=logged)["add"]
    last_input = max(i for i, what in enumerate(runner.log) if what == "inputs")
    assert last_input < runner.log.index("flush")
    assert runner.log.count("inputs") == rotation_sets(set_bytes, 1024) == 8
    assert not row.hot
    assert row.launches % 8 == 0


def test_rotation_uses_the_sets_in_turn() -> None:
    runner = ScriptedRunner(cache_bytes=512)
    seen: list[int] = []

    def run(buffers: Buffers) -> Tensor:
        seen.append(buffers.inputs[0].data_ptr())
        runner.spend(1.0)
        return buffers.inputs[0] + buffers.inputs[1]

    scripted(runner, Contender("add", run, is_sum))
    sets = seen[1:5]
    assert len(set(sets)) == 4
    # The first launch is the check; programs follow, each from the start of the rotation.
    assert all(seen[1 + i] == sets[i % 4] for i in range(len(seen) - 1))


def test_hot_rows_use_one_set_and_say_so() -> None:
    runner = ScriptedRunner(cache_bytes=1024)
    made: list[int] = []

    def counted(generator: torch.Generator) -> Buffers:
        made.append(1)
        return pair(generator)

    row = scripted(runner, adder(runner, 1.0), make_buffers=counted, hot=True)["add"]
    assert row.hot
    assert len(made) == 1
    assert "flush" not in runner.log


def test_b94_the_flush_stands_outside_the_window_and_its_cost_is_not_in_the_time() -> None:
    cold, hot = ScriptedRunner(1 << 40, empty_us=1.5), ScriptedRunner(1 << 40, empty_us=1.5)
    # A flush that costs 58 us passes before the window is opened.
    real_round = cold.time_round

    def round_with_slow_flush(replays: Sequence[Replay], *, hot: bool) -> list[float]:
        cold.spend(58.0)
        return real_round(replays, hot=hot)

    cold.time_round = round_with_slow_flush  # type: ignore[method-assign]
    flushed = scripted(cold, adder(cold, 4.0), flush=True)["add"]
    warm = scripted(hot, adder(hot, 4.0), hot=True)["add"]
    assert flushed.launches == 1
    assert flushed.median_us == pytest.approx(4.0)
    assert any("taken off" in note for note in flushed.notes)
    assert warm.median_us == pytest.approx(4.0, rel=0.4)
    assert not flushed.hot


def test_hot_and_flush_exclude_each_other() -> None:
    runner = ScriptedRunner()
    with pytest.raises(ConfigError, match="pick one"):
        scripted(runner, adder(runner, 1.0), hot=True, flush=True)


def test_buffers_too_small_to_rotate_are_refused_with_the_way_out() -> None:
    runner = ScriptedRunner(cache_bytes=1 << 30)
    with pytest.raises(ConfigError, match="flush=True or hot=True"):
        scripted(runner, adder(runner, 1.0))


def test_a_short_window_gets_more_launches_in_whole_rotations() -> None:
    runner = ScriptedRunner(cache_bytes=512)
    long = Protocol(samples=2, min_samples=1, min_window_us=1000.0, settle_min_s=0.0)
    row = scripted(runner, adder(runner, 4.0), protocol=long)["add"]
    assert row.launches * 4.0 >= 1000.0
    assert row.launches % 4 == 0
    capped = Protocol(
        samples=2, min_samples=1, max_launches=10, min_window_us=1000.0, settle_min_s=0.0
    )
    assert scripted(runner, adder(runner, 4.0), protocol=capped)["add"].launches == 8


def test_contenders_alternate_and_the_order_shifts() -> None:
    runner = ScriptedRunner()
    order: list[str] = []

    def program(name: str) -> Program:
        def enqueue(count: int) -> None:
            order.append(name)
            runner.spend(10.0 * count)

        return Program(name, enqueue, lambda: None, launches=1)

    time_programs(
        [program(name) for name in "abc"], runner, protocol=QUICK, clock=runner.clock, hot=False
    )
    sampled = order[-3 * QUICK.samples :]
    rounds = ["".join(sampled[i : i + 3]) for i in range(0, len(sampled), 3)]
    assert rounds == ["abc", "bca", "cab", "abc", "bca", "cab"]


def test_sampling_waits_until_times_have_settled() -> None:
    runner = ScriptedRunner()
    calls: list[int] = []

    def enqueue(count: int) -> None:
        calls.append(1)
        # Clocks ramp up over 40 launches.
        runner.spend(max(10.0, 50.0 - len(calls)) * count)

    program = Program("ramp", enqueue, lambda: None, launches=1)
    row = time_programs([program], runner, protocol=QUICK, clock=runner.clock)["ramp"]
    assert isinstance(row, Measurement)
    assert row.low_us == row.high_us == 10.0
    assert not any("settled" in note for note in row.notes)


def test_times_that_never_settle_are_noted() -> None:
    runner = ScriptedRunner()
    calls: list[int] = []

    def enqueue(count: int) -> None:
        calls.append(1)
        runner.spend(1000.0 * 1.2 ** (len(calls) % 50))

    protocol = Protocol(samples=3, min_samples=2, settle_max_s=0.2, settle_min_s=0.0)
    program = Program("drift", enqueue, lambda: None, launches=1)
    row = time_programs([program], runner, protocol=protocol, clock=runner.clock)["drift"]
    assert any("had not settled after 0.2 s" in note for note in row.notes)


def test_settle_waits_its_least_time() -> None:
    runner = ScriptedRunner()

    def round_us() -> float:
        runner.spend(1000.0)
        return 1000.0

    assert settle(round_us, Protocol(settle_min_s=0.1), runner.clock)
    assert runner.clock() >= 0.1


def test_a_row_is_cut_at_its_cap_but_keeps_its_least_samples() -> None:
    runner = ScriptedRunner()
    protocol = Protocol(samples=50, min_samples=4, cap_s=2.0)
    program = Program("long", lambda count: runner.spend(0.3e6), lambda: None, launches=1)
    row = time_programs([program], runner, protocol=protocol, clock=runner.clock)["long"]
    assert 4 <= len(row.samples) < 10
    assert any("cap of 2 s" in note for note in row.notes)


@pytest.mark.parametrize("bad", [{"samples": 2, "min_samples": 3}, {"min_launches": 0}])
def test_a_protocol_that_cannot_be_followed_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        Protocol(**bad)


# Failures are rows, never times


def test_a_wrong_result_is_failed_and_never_timed() -> None:
    runner = ScriptedRunner()
    timed: list[int] = []

    def wrong(buffers: Buffers) -> Tensor:
        timed.append(1)
        return buffers.inputs[0] - buffers.inputs[1]

    rows = scripted(runner, Contender("wrong", wrong, is_sum), adder(runner, 3.0))
    assert rows["wrong"] == Failed("not the sum")
    assert len(timed) == 1
    assert rows["add"].median_us == 3.0


def test_a_nan_is_failed_even_if_the_check_overlooks_it() -> None:
    runner = ScriptedRunner()
    nan = Contender("nan", lambda b: b.inputs[0] * float("nan"), lambda results, buffers: None)
    assert "NaN" in scripted(runner, nan)["nan"].reason


def test_an_output_that_is_not_written_is_failed() -> None:
    runner = ScriptedRunner()

    def with_output(generator: torch.Generator) -> Buffers:
        made = pair(generator)
        return Buffers(made.inputs, (made.inputs[0] + made.inputs[1],))

    lazy = Contender("lazy", lambda buffers: None, is_sum)
    found = scripted(runner, lazy, make_buffers=with_output)["lazy"]
    assert found == Failed("the result holds NaN (or was not written)")
    assert "capture" not in runner.log


def test_a_contender_that_raises_is_failed_with_its_words() -> None:
    runner = ScriptedRunner()

    def broken(buffers: Buffers) -> Tensor:
        raise RuntimeError("no kernel image")

    rows = scripted(runner, Contender("broken", broken, is_sum), adder(runner, 1.0))
    assert rows["broken"] == Failed("RuntimeError: no kernel image")
    assert isinstance(rows["add"], Measurement)


def test_launches_that_disturb_each_other_are_found_after_timing() -> None:
    runner = ScriptedRunner()
    counter: list[int] = []

    def split_k_without_reset(buffers: Buffers) -> Tensor:
        counter.append(1)
        runner.spend(1.0)
        late = 0.0 if len(counter) < 5 else 1.0
        return buffers.inputs[0] + buffers.inputs[1] + late

    rows = scripted(runner, Contender("counter", split_k_without_reset, is_sum))
    assert rows["counter"] == Failed("after timing: not the sum")


def test_an_in_place_contender_does_not_spoil_the_inputs_of_the_others() -> None:
    runner = ScriptedRunner()

    def in_place(buffers: Buffers) -> None:
        runner.spend(1.0)
        buffers.inputs[0].add_(buffers.inputs[1])

    rows = scripted(
        runner, Contender("in place", in_place, is_sum, in_place=True), adder(runner, 2.0)
    )
    assert all(isinstance(row, Measurement) for row in rows.values())


def test_state_is_prepared_once_a_set_outside_the_programs() -> None:
    runner = ScriptedRunner(cache_bytes=512)
    prepared: list[Buffers] = []

    def prepare(buffers: Buffers) -> tuple[Tensor, Tensor]:
        prepared.append(buffers)
        return buffers.inputs[0], buffers.inputs[1]

    def run(state: tuple[Tensor, Tensor]) -> Tensor:
        runner.spend(1.0)
        return state[0] + state[1]

    rows = scripted(runner, Contender("packed", run, is_sum, prepare=prepare))
    assert isinstance(rows["packed"], Measurement)
    assert len(prepared) == 4


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_names_must_be_unique(names: list[str]) -> None:
    runner = ScriptedRunner()
    with pytest.raises(ConfigError, match="name of its own"):
        scripted(runner, *(adder(runner, 1.0, name) for name in names))


# The CPU


def test_the_cpu_runner_times_calls_with_its_clock() -> None:
    ticks = iter([0.0, 0.002, 0.010, 0.015])
    runner = CpuRunner(clock=lambda: next(ticks))
    assert runner.time_round([lambda: None, lambda: None], hot=True) == pytest.approx([2000, 5000])


def test_on_the_cpu_more_work_takes_longer_and_rows_are_hot() -> None:
    def operands(generator: torch.Generator) -> Buffers:
        return Buffers((torch.randn(192, 192, generator=generator),))

    def once(buffers: Buffers) -> Tensor:
        return buffers.inputs[0] @ buffers.inputs[0]

    def five_times(buffers: Buffers) -> Tensor:
        for _ in range(4):
            once(buffers)
        return once(buffers)

    def is_square(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return None if torch.allclose(results[0], once(buffers)) else "not the square"

    protocol = Protocol(samples=9, min_samples=3, min_window_us=200, settle_min_s=0, cap_s=0.5)
    rows = measure(
        [Contender("once", once, is_square), Contender("five", five_times, is_square)],
        operands,
        device="cpu",
        protocol=protocol,
    )
    assert rows["once"].hot
    assert rows["once"].mode == "cpu"
    assert speedup(rows["once"], rows["five"]).median > 2


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="accepted are cuda and cpu"):
        measure([Contender("x", lambda b: None, is_sum)], pair, device="meta")
