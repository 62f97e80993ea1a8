"""The engine: batches, ends of texts, inert rows, seeds, the page pool and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_demo_models import random_checkpoint, tiny_config

from fusedops.errors import ConfigError, FusedOpsError, ShapeError
from serving_demo import engine as engine_module
from serving_demo.cache import BlockAllocator, PagedKVCache, require_fit
from serving_demo.engine import BATCH_BUCKETS, Engine, Request
from serving_demo.model import DecoderModel
from serving_demo.state import DecodeState, RowValues, decode_step

PROMPTS = ((5, 9, 20, 33, 41, 8, 77), (7,), (90, 3, 4), (11,) * 19)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.from_checkpoint(random_checkpoint(tiny_config()))


def greedy_tokens(model: DecoderModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The likeliest continuation, each token from a fresh run over the whole text so far."""
    text = list(prompt)
    for _ in range(count):
        engine = Engine(model, 1, len(text), eos_token_ids=())
        text += engine.generate([Request(tuple(text), 1)]).tokens[0]
    return tuple(text[len(prompt) :])


def test_a_ragged_batch_equals_its_requests_one_by_one(model: DecoderModel) -> None:
    engine = Engine(model, 4, 40, page_size=4, eos_token_ids=())
    together = engine.generate([Request(prompt, 12) for prompt in PROMPTS])
    for prompt, tokens in zip(PROMPTS, together.tokens, strict=True):
        assert tokens == engine.generate([Request(prompt, 12)]).tokens[0]
        assert tokens == greedy_tokens(model, prompt, 12)


def test_requests_of_different_lengths_shrink_the_batch(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    monkeypatch.setattr(
        engine_module,
        "decode_step",
        lambda model, cache, state, n_rows, sampled: (
            widths.append(n_rows),
            decode_step(model, cache, state, n_rows, sampled),
        ),
    )
    engine = Engine(model, 4, 40, eos_token_ids=())
    counts = (3, 7, 1, 5)
    generation = engine.generate(
        [Request(prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    )
    assert widths == [3, 3, 2, 2, 1, 1]
    assert [step.n_tokens for step in generation.steps] == widths
    for prompt, count, tokens in zip(PROMPTS, counts, generation.tokens, strict=True):
        assert tokens == greedy_tokens(model, prompt, count)


def test_a_step_counts_the_positions_that_attention_reads(model: DecoderModel) -> None:
    generation = Engine(model, 2, 40, eos_token_ids=()).generate(
        [Request((4, 5, 6), 3), Request((7,), 2)]
    )
    # The first step feeds each first new token: 3 + 1 and 1 + 1 positions.
    assert [step.n_positions for step in generation.steps] == [4 + 2, 5]
    assert generation.prefill_tokens == 4


def test_an_end_of_text_token_ends_its_request_only(model: DecoderModel) -> None:
    free = Engine(model, 4, 60, eos_token_ids=()).generate([Request(p, 24) for p in PROMPTS])
    eos = free.tokens[0][5]
    stopped = Engine(model, 4, 60, eos_token_ids=(eos,)).generate([Request(p, 24) for p in PROMPTS])
    for tokens, whole in zip(stopped.tokens, free.tokens, strict=True):
        end = whole.index(eos) + 1 if eos in whole else len(whole)
        assert tokens == whole[:end]
    assert len({len(tokens) for tokens in stopped.tokens}) > 1


def test_a_first_token_that_ends_the_text_needs_no_step(model: DecoderModel) -> None:
    first = Engine(model, 1, 40, eos_token_ids=()).generate([Request((5, 6), 1)]).tokens[0][0]
    generation = Engine(model, 1, 40, eos_token_ids=(first,)).generate([Request((5, 6), 9)])
    assert generation.tokens == ((first,),)
    assert generation.steps == ()


def test_the_models_own_end_of_text_tokens_are_the_default() -> None:
    checkpoint = random_checkpoint(tiny_config(eos_token_ids=(3, 64)))
    engine = Engine(DecoderModel.from_checkpoint(checkpoint), 1, 8)
    assert engine.state.eos.tolist() == [3, 64]


def test_tokens_are_streamed_in_order(model: DecoderModel) -> None:
    seen: list[tuple[int, int]] = []
    generation = Engine(model, 3, 40).generate(
        [Request(prompt, 6) for prompt in PROMPTS[:3]], lambda *item: seen.append(item)
    )
    for index, tokens in enumerate(generation.tokens):
        assert tuple(token for request, token in seen if request == index) == tokens
    assert [request for request, _ in seen[:3]] == [0, 1, 2]


def test_prompts_longer_than_a_prefill_chunk(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, 4, 40, page_size=3, eos_token_ids=())
    requests = [Request(prompt, 5) for prompt in PROMPTS]
    whole = engine.generate(requests)
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 4)
    assert engine.generate(requests).tokens == whole.tokens


def test_sampling_depends_on_the_seed_only_and_not_on_the_batch(model: DecoderModel) -> None:
    engine = Engine(model, 4, 60, eos_token_ids=())
    requests = [Request(p, 16, temperature=1.5, seed=i) for i, p in enumerate(PROMPTS)]
    first = engine.generate(requests).tokens
    assert engine.generate(requests).tokens == first
    assert engine.generate(requests[2:3]).tokens[0] == first[2]
    other = [Request(p, 16, temperature=1.5, seed=i + 100) for i, p in enumerate(PROMPTS)]
    assert engine.generate(other).tokens != first
    greedy = engine.generate([Request(PROMPTS[0], 16), *requests[1:]]).tokens
    assert greedy[0] == greedy_tokens(model, PROMPTS[0], 16)
    assert greedy[1:] == first[1:]


def test_padding_rows_write_nothing_and_change_nothing(model: DecoderModel) -> None:
    def run(n_rows: int) -> tuple[list[int], PagedKVCache, DecodeState]:
        cache = PagedKVCache(model.config, 8, page_size=4)
        for pool in (*cache.k, *cache.v):
            pool.fill_(7.0)
        state = DecodeState(n_rows, 4, (), "cpu")
        # A request whose "prompt" is one token that the first step feeds at position 0.
        state.place([RowValues(0, 9, (5, 2, 6), seed=1, temperature=0.0)])
        state.tokens[0] = 40
        emitted = []
        with torch.inference_mode():
            for _ in range(10):
                decode_step(model, cache, state, n_rows, False)
                emitted.append(int(state.emitted[0]))
                assert state.emitted[1:].tolist() == [-1] * (n_rows - 1)
                assert state.positions[1:].tolist() == [-1] * (n_rows - 1)
                assert state.seq_lens[1:].tolist() == [0] * (n_rows - 1)
        return emitted, cache, state

    alone, cache, state = run(1)
    padded, padded_cache, _ = run(4)
    assert alone == padded
    assert state.positions.tolist() == [-1]
    assert state.seq_lens.tolist() == [0]
    for pool, padded_pool in zip(cache.k, padded_cache.k, strict=True):
        torch.testing.assert_close(padded_pool, pool, rtol=1e-5, atol=1e-5)
        written = (padded_pool != 7.0).any(-1).any(-1)
        expected = torch.zeros(8, 4, dtype=torch.bool)
        expected[5], expected[2], expected[6, :2] = True, True, True
        assert torch.equal(written, expected)


def test_an_inert_state_touches_no_cache(model: DecoderModel) -> None:
    cache = PagedKVCache(model.config, 4)
    for pool in (*cache.k, *cache.v):
        pool.fill_(7.0)
    state = DecodeState(4, 2, (2,), "cpu")
    with torch.inference_mode():
        decode_step(model, cache, state, 4, True)
    assert state.emitted.tolist() == [-1] * 4
    assert all(bool((pool == 7.0).all()) for pool in (*cache.k, *cache.v))


def test_a_state_keeps_its_addresses(model: DecoderModel) -> None:
    engine = Engine(model, 4, 40)
    tensors = {n: t for n, t in vars(engine.state).items() if isinstance(t, torch.Tensor)}
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    engine.generate([Request(p, n) for p, n in zip(PROMPTS, (2, 9, 4, 6), strict=True)])
    assert {n: getattr(engine.state, n).data_ptr() for n in tensors} == before
    assert len(tensors) == 10


# The page pool


def test_pages_come_back_when_a_batch_ends_or_fails(model: DecoderModel) -> None:
    engine = Engine(model, 2, 40)
    n_pages = engine.cache.allocator.n_free
    engine.generate([Request((5,), 4)])
    assert engine.cache.allocator.n_free == n_pages

    def fail(request: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request((5,), 4)], fail)
    assert engine.cache.allocator.n_free == n_pages
    assert engine.generate([Request((5,), 4)]).tokens[0]


@given(st.lists(st.integers(0, 5), max_size=20), st.randoms(use_true_random=False))
def test_no_page_has_two_owners(counts: list[int], random: Callable[[], float]) -> None:
    allocator = BlockAllocator(12)
    owned: list[list[int]] = []
    for count in counts:
        if count > allocator.n_free:
            with pytest.raises(ShapeError, match=rf"{count} cache pages .* {allocator.n_free} of"):
                allocator.allocate(count)
            allocator.free(owned.pop(0))
            continue
        owned.append(allocator.allocate(count))
        if random.random() < 0.3:  # type: ignore[attr-defined]
            allocator.free(owned.pop())
        pages = [page for taken in owned for page in taken]
        assert len(set(pages)) == len(pages) == 12 - allocator.n_free
        assert set(pages) <= set(range(12))


def test_a_page_is_freed_once() -> None:
    allocator = BlockAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(ConfigError, match="freed twice"):
        allocator.free(pages)
    with pytest.raises(ConfigError, match="freed twice"):
        allocator.free([allocator.allocate(1)[0]] * 2)


def test_the_pool_has_a_size() -> None:
    cache = PagedKVCache(tiny_config(), 5, page_size=4)
    assert cache.n_bytes == 2 * 2 * 5 * 4 * 2 * 8 * 4
    assert [cache.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


# What is refused


@pytest.mark.parametrize(
    ("requests", "error", "words"),
    [
        ([Request((), 4)], ShapeError, "prompt 1 is empty"),
        ([Request((5,), 0)], ConfigError, "max_new_tokens is 0"),
        ([Request((5,), 4, temperature=-1.0)], ConfigError, "temperature is -1.0"),
        ([Request((5,), 4, temperature=float("nan"))], ConfigError, "temperature is nan"),
        ([Request((5, 96), 4)], ConfigError, "outside the vocabulary of 96"),
        ([Request((-1,), 4)], ConfigError, "outside the vocabulary of 96"),
        (
            [Request((5,), 4), Request((5,) * 39, 4)],
            ShapeError,
            r"prompt 2 has 39 tokens.* holds 40",
        ),
        ([Request([5], 4), Request((5, True), 4)], ConfigError, "prompt 2 holds the token True"),
        (
            [Request("ab", 4)],
            ConfigError,
            r"prompt 1 is 'ab' \(str\); accepted is a tuple of token",
        ),
        ([Request((5, 1.0), 4)], ConfigError, "prompt 1: a token is 1.0; accepted are ints"),
        ([Request((5,), True)], ConfigError, r"max_new_tokens is True.*integers from 1"),
        ([Request((5,), 4.0)], ConfigError, "max_new_tokens is 4.0; accepted are integers from 1"),
        ([Request((5,), -3)], ConfigError, "max_new_tokens is -3; accepted are integers from 1"),
        ([Request((5,), "4")], ConfigError, r"max_new_tokens is '4' \(str\)"),
        ([Request((5,), 1 << 200)], ConfigError, "max_new_tokens is an int of 201 bits"),
        ([Request((5,), 4, temperature="hot")], ConfigError, r"temperature is 'hot' \(str\)"),
        ([Request((5,), 4, temperature=float("inf"))], ConfigError, "temperature is inf"),
        ([Request((5,), 4, seed=None)], ConfigError, r"seed is None \(NoneType\)"),
        ([(5, 6)], ConfigError, r"request 1 is \(5, 6\) \(tuple\); accepted is a Request"),
        (Request((5,), 4), ConfigError, "accepted is a list of Requests"),
        ([], ConfigError, "0 prompts"),
        ([Request((5,), 4)] * 4, ConfigError, "accepted are 1 to 3"),
    ],
)
def test_requests_that_cannot_run(
    model: DecoderModel, requests: Any, error: type[FusedOpsError], words: str
) -> None:
    engine = Engine(model, 3, 40)
    with pytest.raises(error, match=words) as caught:
        engine.generate(requests)
    assert "\n" not in str(caught.value)
    assert engine.cache.allocator.n_free == engine.cache.allocator.n_pages


def test_a_prompt_may_fill_the_cache_to_its_last_position(model: DecoderModel) -> None:
    engine = Engine(model, 1, 40, page_size=16, eos_token_ids=())
    assert len(engine.generate([Request((5,) * 37, 4)]).tokens[0]) == 4
    with pytest.raises(ShapeError, match="takes 41 positions, but the cache holds 40"):
        require_fit(0, 38, 4, 40)


@pytest.mark.parametrize(
    ("max_requests", "max_positions", "words"),
    [
        (0, 8, "1 to 64"),
        (65, 8, "1 to 64"),
        (1, 0, "1 to 128"),
        (1, 129, "1 to 128"),
        (1.0, 8, "max_requests is 1.0; accepted are integers"),
        (True, 8, "max_requests is True; accepted are integers"),
        (1, "8", r"max_positions is '8' \(str\); accepted are integers"),
        (1, False, "max_positions is False; accepted are integers"),
    ],
)
def test_engines_that_cannot_be_made(
    model: DecoderModel, max_requests: Any, max_positions: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(model, max_requests, max_positions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 2.5}, "page_size is 2.5; accepted are integers from 1 to 128"),
        ({"page_size": True}, "page_size is True; accepted are integers"),
        ({"page_size": 0}, "page_size is 0; accepted are integers from 1"),
        ({"page_size": 10**9}, "page_size is 1000000000; accepted are integers from 1 to 128"),
        ({"use_graphs": "no"}, r"use_graphs is 'no' \(str\); accepted are True, False and None"),
        ({"eos_token_ids": (96,)}, "eos_token_ids holds the token 96, outside the vocabulary"),
        ({"eos_token_ids": 2}, "eos_token_ids is 2; accepted is a tuple"),
    ],
)
def test_an_engines_other_arguments(
    model: DecoderModel, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(model, 1, 8, **changes)


def test_what_takes_the_tokens_must_be_callable(model: DecoderModel) -> None:
    receiver: Any = []
    with pytest.raises(ConfigError, match="on_token is a list; accepted is a function"):
        Engine(model, 1, 8).generate([Request((5,), 1)], receiver)


def test_graphs_need_a_gpu(model: DecoderModel) -> None:
    with pytest.raises(ConfigError, match="on a GPU; this one is on cpu"):
        Engine(model, 1, 8, use_graphs=True)


def test_a_pool_or_a_page_of_nothing_is_refused() -> None:
    for count in (0, True, 2**31):
        with pytest.raises(ConfigError, match=r"n_pages is .* from 1 to 2,147,483,647"):
            BlockAllocator(count)
    with pytest.raises(ConfigError, match="page_size is 0; accepted are integers from 1"):
        PagedKVCache(tiny_config(), 1, page_size=0)


def test_buckets_are_powers_of_two() -> None:
    assert BATCH_BUCKETS == (1, 2, 4, 8, 16, 32, 64)


def test_an_engine_that_is_generating_refuses_another_batch(model: DecoderModel) -> None:
    engine = Engine(model, 2, 40, eos_token_ids=())
    request = Request(PROMPTS[0], 3)

    def again(_index: int, _token: int) -> None:
        engine.generate([request])

    with pytest.raises(ConfigError, match="this engine is generating"):
        engine.generate([request], again)
    assert len(engine.generate([request]).tokens[0]) == 3


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is 3; accepted is a DecoderModel"):
        Engine(3, 2, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_pages", [2**31 - 1, 10**6])
def test_a_cache_that_does_not_fit_into_memory_is_refused(
    n_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving_demo.cache.BlockAllocator", lambda n_pages: None)
    with pytest.raises(ConfigError, match="GiB, which cpu does not give; accepted is what fits"):
        PagedKVCache(tiny_config(), n_pages, page_size=10**9)


@pytest.mark.parametrize("seed", [2**64, 2**63, -(2**63) - 1])
def test_a_seed_beyond_int64_is_told_the_bound(model: DecoderModel, seed: int) -> None:
    with pytest.raises(ConfigError, match=r"seed is .*from -2\^63 to 2\^63 - 1 \(int64\)"):
        Engine(model, 1, 8).generate([Request((5,), 1, seed=seed)])
    for edge in (2**63 - 1, -(2**63)):
        assert Engine(model, 1, 8).generate([Request((5,), 1, seed=edge)]).tokens
