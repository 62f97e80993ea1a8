"""The demo's decode step in CUDA graphs: equal to eager, inert padding, nothing allocated."""

from __future__ import annotations

import pytest
import torch
from test_demo_models import random_checkpoint, tiny_config

from serving_demo.engine import BATCH_BUCKETS, Engine, Request
from serving_demo.model import DecoderModel
from serving_demo.options import DemoOptions, resolve_device, resolve_dtype

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPTS = (
    (5, 9, 20, 33, 41, 8, 77),
    (7,),
    (90, 3, 4),
    (11,) * 19,
    (64, 65, 66, 67),
)
N_TOKENS = 51
CAPACITY = 80


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def model(request: pytest.FixtureRequest) -> DecoderModel:
    return DecoderModel.from_checkpoint(random_checkpoint(tiny_config(), request.param), "cuda")


def requests(count: int, n_tokens: int = N_TOKENS, temperature: float = 0.0) -> list[Request]:
    """``count`` requests, prompts of different lengths in turn."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return [Request(p, n_tokens, temperature, seed=i) for i, p in enumerate(prompts)]


def engines(model: DecoderModel, count: int) -> tuple[Engine, Engine]:
    """(captured, eager) engines that decode without an end-of-text token."""
    return (
        Engine(model, count, CAPACITY, eos_token_ids=(), use_graphs=True),
        Engine(model, count, CAPACITY, eos_token_ids=(), use_graphs=False),
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_captured_step_equals_eager_bitwise(
    model: DecoderModel, count: int, temperature: float
) -> None:
    """50 steps; 3 and 5 requests run padded to 4 and 8 rows."""
    captured, eager = engines(model, count)
    batch = requests(count, temperature=temperature)
    expected = eager.generate(batch)
    got = captured.generate(batch)
    assert got.tokens == expected.tokens
    assert all(len(tokens) == N_TOKENS for tokens in got.tokens)
    assert len(got.steps) == N_TOKENS - 1


@pytest.mark.parametrize("count", [3, 5])
def test_keys_and_values_of_captured_steps_equal_eager_bitwise(
    model: DecoderModel, count: int
) -> None:
    captured, eager = engines(model, count)
    for engine in (captured, eager):
        for pool in (*engine.cache.k, *engine.cache.v):
            pool.fill_(7.0)  # slots that nobody wrote stay comparable
        engine.generate(requests(count))
    torch.cuda.synchronize()
    pools = zip(
        (*captured.cache.k, *captured.cache.v), (*eager.cache.k, *eager.cache.v), strict=True
    )
    for ours, theirs in pools:
        assert torch.equal(ours, theirs)
        assert bool((ours != 7.0).any())


def test_requests_that_end_early_move_to_smaller_buckets(model: DecoderModel) -> None:
    captured, eager = engines(model, 5)
    batch = [Request(p, n) for p, n in zip(PROMPTS, (4, 30, 1, 12, 21), strict=True)]
    expected = eager.generate(batch)
    got = captured.generate(batch)
    assert got.tokens == expected.tokens
    assert [len(tokens) for tokens in got.tokens] == [4, 30, 1, 12, 21]


def test_an_end_of_text_token_ends_its_request_on_the_device(model: DecoderModel) -> None:
    free = Engine(model, 4, CAPACITY, eos_token_ids=()).generate(requests(4))
    eos = free.tokens[0][6]
    stopped = Engine(model, 4, CAPACITY, eos_token_ids=(eos,)).generate(requests(4))
    for tokens, whole in zip(stopped.tokens, free.tokens, strict=True):
        end = whole.index(eos) + 1 if eos in whole else len(whole)
        assert tokens == whole[:end]


def test_a_second_batch_of_other_lengths_replays_the_same_graphs(model: DecoderModel) -> None:
    """B32: positions, lengths and tables are read from device memory, not baked in."""
    captured, eager = engines(model, 4)
    captured.generate(requests(4, n_tokens=5))
    graphs = dict(captured._graphs)
    later = [Request(tuple(range(3, 3 + n)), 40) for n in (6, 17, 1, 30)]
    assert captured.generate(later).tokens == eager.generate(later).tokens
    assert captured._graphs == graphs


def test_buckets_up_to_the_largest_batch_are_captured(model: DecoderModel) -> None:
    engine = Engine(model, 5, CAPACITY)
    engine.capture()
    assert sorted(n_rows for n_rows, _ in engine._graphs) == [1, 2, 4, 8]
    assert engine.capture_seconds > 0
    assert BATCH_BUCKETS[-1] == 64


def test_capturing_touches_no_key_or_value(model: DecoderModel) -> None:
    engine = Engine(model, 4, CAPACITY)
    for pool in (*engine.cache.k, *engine.cache.v):
        pool.fill_(7.0)
    engine.capture()
    engine.capture(sampled=True)
    torch.cuda.synchronize()
    for pool in (*engine.cache.k, *engine.cache.v):
        assert bool((pool == 7.0).all())


def test_padding_rows_stay_inert(model: DecoderModel) -> None:
    engine = Engine(model, 3, CAPACITY, eos_token_ids=())
    seen: list[list[int]] = []

    def look(request: int, token: int) -> None:
        if request == 0:
            state = engine.state
            seen.append([int(state.positions[3]), int(state.seq_lens[3]), int(state.emitted[3])])

    engine.generate(requests(3), look)
    assert len(seen) == N_TOKENS
    # The first token comes from the prefill, before any step has run on the padding row.
    assert all(values[:2] == [-1, 0] for values in seen)
    assert all(values[2] == -1 for values in seen[2:])


@pytest.mark.parametrize("sampled", [False, True])
def test_a_step_allocates_nothing(model: DecoderModel, sampled: bool) -> None:
    engine = Engine(model, 4, CAPACITY, eos_token_ids=())
    engine.generate(requests(4, n_tokens=4, temperature=float(sampled)))
    engine.state.clear()
    rows = list(range(4))
    engine._read_back(0, rows)
    torch.cuda.synchronize()

    def counters() -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        names = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")
        return {name: stats[name] for name in names} | {
            "allocated_bytes": stats["allocated_bytes.all.allocated"]
        }

    before = counters()
    for slot in range(50):
        engine.step(4, sampled)
        engine._read_back(slot, rows)
    torch.cuda.synchronize()
    assert counters() == before


def test_a_step_does_not_synchronise(model: DecoderModel) -> None:
    engine = Engine(model, 4, CAPACITY, eos_token_ids=())
    engine.capture()
    engine.step(4, False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot in range(4):
            engine.step(4, False)
            engine._read_back(slot, [0, 1, 2, 3])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_eager_step_does_not_synchronise_either(model: DecoderModel) -> None:
    """What is captured must not hide a synchronisation that a capture would refuse."""
    engine = Engine(model, 4, CAPACITY, eos_token_ids=(), use_graphs=False)
    engine.step(4, False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(4, False)
        engine.step(4, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_float32_tokens_equal_those_of_the_cpu() -> None:
    checkpoint = random_checkpoint(tiny_config())
    batch = requests(5, n_tokens=24)
    on_cpu = Engine(DecoderModel.from_checkpoint(checkpoint), 5, CAPACITY, eos_token_ids=())
    on_gpu = Engine(DecoderModel.from_checkpoint(checkpoint, "cuda"), 5, CAPACITY, eos_token_ids=())
    assert on_gpu.generate(batch).tokens == on_cpu.generate(batch).tokens


def test_auto_takes_the_gpu_in_bfloat16() -> None:
    device = resolve_device(DemoOptions())
    assert device.type == "cuda"
    assert resolve_dtype(DemoOptions(), device) is torch.bfloat16
