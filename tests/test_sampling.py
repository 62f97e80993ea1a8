"""Greedy choice and seeded sampling on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedops.errors import ConfigError, DeviceError, DTypeError, ShapeError, UnsupportedError
from fusedops.ops.sampling import _gumbel, _noise_bits, greedy, sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = (0, 1, 12345, -1, -(2**63), 2**63 - 1)
ops = torch.ops.fusedops


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ones(rows: int, value: float = 1.0) -> Tensor:
    """A temperature (or top_p) for each row."""
    return torch.full((rows,), value)


def ints(rows: int, value: int) -> Tensor:
    """A top_k for each row."""
    return torch.full((rows,), value, dtype=torch.int32)


def draws(logits: Tensor, count: int, **options: Any) -> Tensor:
    """Counts of each token over ``count`` seeds."""
    rows = logits.expand(count, -1)
    options = {name: t.expand(count) for name, t in options.items()}
    temperature = options.pop("temperature", ones(count))
    tokens = sample(rows, temperature, torch.arange(count), **options)
    return torch.bincount(tokens, minlength=logits.shape[-1])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic over the standard deviations it is away from its mean."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected).square() / expected).sum().item()
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5000), (0, 4)])
def test_greedy_takes_the_largest(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits = normal(*shape, dtype=dtype)
    token = greedy(logits)
    assert token.dtype == torch.int64
    assert token.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("width", [3, 40, 5000])
def test_greedy_takes_the_lowest_index_of_a_tie(width: int) -> None:
    logits = torch.zeros(3, width)
    logits[1, 1:] = 5.0
    logits[2] = -torch.inf
    assert greedy(logits).tolist() == [0, 1, 0]
    assert greedy(logits.bfloat16()).tolist() == [0, 1, 0]


def test_greedy_takes_the_first_nan() -> None:
    logits = torch.tensor([[1.0, math.nan, math.inf, math.nan], [1.0, math.inf, math.inf, 2.0]])
    assert greedy(logits).tolist() == [1, 1]
    assert greedy(logits.T.contiguous().T).tolist() == [1, 1]


def test_noise_is_the_documented_integer_hash() -> None:
    vocabulary = 50
    bits = _noise_bits(torch.tensor(SEEDS), len(SEEDS), torch.arange(vocabulary))
    expected = [[oracles.noise_bits(seed, i) for i in range(vocabulary)] for seed in SEEDS]
    assert bits.tolist() == expected
    shared = _noise_bits(torch.tensor([2**63 - 1]), 4, torch.arange(vocabulary))
    expected = [
        [oracles.noise_bits(oracles.row_seed(2**63 - 1, row), i) for i in range(vocabulary)]
        for row in range(4)
    ]
    assert shared.tolist() == expected
    some = torch.tensor([[5, 0, 49], [2, 2, 7]])
    chosen = _noise_bits(torch.tensor(SEEDS[:2]), 2, some)
    assert torch.equal(chosen, bits[:2].gather(1, some))


def test_noise_is_finite_at_both_ends() -> None:
    noise = _gumbel(torch.tensor([0, 1, 2**32 - 2, 2**32 - 1]))
    exact = [-math.log(-math.log((bits + 0.5) / 2**32)) for bits in (0, 1, 2**32 - 2, 2**32 - 1)]
    assert noise.tolist() == pytest.approx(exact, rel=1e-6)
    assert noise.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampling_is_gumbel_max_with_that_noise(dtype: torch.dtype) -> None:
    logits = (normal(len(SEEDS), 300) * 2).to(dtype)
    temperature = torch.tensor([0.5, 1.0, 1.5, 0.7, 2.0, 1.0])
    tokens = sample(logits, temperature, torch.tensor(SEEDS)).tolist()
    for row, token in enumerate(tokens):
        scores = oracles.floats(logits[row]) / temperature[row].item()
        assert token == int(np.argmax(scores + oracles.gumbel(SEEDS[row], 300)))


def test_sampling_repeats_for_a_seed_and_varies_with_it() -> None:
    logits, seeds = normal(1, 1000).expand(64, -1), torch.arange(64)
    tokens = sample(logits, ones(64), seeds)
    assert torch.equal(tokens, sample(logits, ones(64), seeds))
    assert len(set(tokens.tolist())) > 40


def test_a_row_depends_on_its_own_seed_only() -> None:
    logits, seeds = normal(6, 500), torch.arange(6) * 77
    options = {"top_k": ints(6, 20), "top_p": ones(6, 0.8)}
    for chosen in ({}, options):
        tokens = sample(logits, ones(6), seeds, **chosen)
        for row in range(6):
            one = slice(row, row + 1)
            cut = {name: t[one] for name, t in chosen.items()}
            assert sample(logits[one], ones(1), seeds[one], **cut)[0] == tokens[row]


def test_a_shared_seed_gives_each_row_its_own_noise() -> None:
    logits, seed = torch.zeros(1, 1000).expand(50, -1), torch.tensor([7])
    tokens = sample(logits, ones(50), seed)
    assert len(set(tokens.tolist())) > 40
    assert tokens[0] == sample(logits[:1], ones(1), seed)[0]
    per_row = torch.tensor([oracles.row_seed(7, row) for row in range(50)], dtype=torch.uint64)
    assert torch.equal(tokens, sample(logits, ones(50), per_row.view(torch.int64)))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5]])
    counts = draws(logits, 20000, temperature=ones(1, temperature))
    assert abs(chi_square(counts, (logits[0] / temperature).softmax(-1))) < 4.0


def test_frequencies_of_neighbouring_indices_and_seeds_are_even() -> None:
    counts = draws(torch.zeros(1, 64), 20000)
    assert abs(chi_square(counts, torch.full((64,), 1 / 64))) < 4.0
    pairs = sample(torch.zeros(1, 8).expand(20001, -1), ones(20001), torch.arange(20001))
    joint = torch.bincount(pairs[1:] * 8 + pairs[:-1], minlength=64)
    assert abs(chi_square(joint, torch.full((64,), 1 / 64))) < 4.0


def test_frequencies_under_top_k_and_top_p_follow_the_cut_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5]])
    counts = draws(logits, 20000, top_k=ints(1, 3))
    assert counts[[0, 3, 4]].sum() == 0
    kept = [1, 2, 5]
    assert abs(chi_square(counts[kept], logits[0, kept].softmax(-1))) < 4.0
    kept = oracles.nucleus(oracles.floats(logits[0]), 0, 0.75)
    assert len(kept) == 3
    counts = draws(logits, 20000, top_p=ones(1, 0.75))
    assert counts.sum() == counts[kept].sum()
    assert abs(chi_square(counts[kept], logits[0, kept].softmax(-1))) < 4.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 9, 3000])
def test_limits_that_leave_one_token_equal_greedy(dtype: torch.dtype, vocabulary: int) -> None:
    logits, seeds = (normal(8, vocabulary) * 3).to(dtype), torch.arange(8)
    best = greedy(logits)
    assert torch.equal(sample(logits, ones(8, 0.0), seeds), best)
    assert torch.equal(sample(logits, ones(8, 1e-30), seeds), best)
    assert torch.equal(sample(logits, ones(8), seeds, top_k=ints(8, 1)), best)
    assert torch.equal(sample(logits, ones(8), seeds, top_p=ones(8, 1e-20)), best)
    assert torch.equal(sample(logits, ones(8), seeds, top_k=ints(8, 1), top_p=ones(8)), best)


def test_ties_at_the_limit_keep_the_lower_index() -> None:
    logits = torch.zeros(4, 50)
    logits[:, 30] = 1.0
    seeds = torch.arange(4)
    assert sample(torch.zeros(4, 50), ones(4), seeds, top_k=ints(4, 1)).tolist() == [0] * 4
    counts = draws(logits[:1], 2000, top_k=ints(1, 4))
    assert counts.nonzero().flatten().tolist() == [0, 1, 2, 30]
    counts = draws(torch.zeros(1, 4), 2000, top_p=ones(1, 0.5))
    assert counts.nonzero().flatten().tolist() == [0, 1]
    counts = draws(torch.zeros(1, 10), 2000, top_p=ones(1, 0.35))
    assert counts.nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_limits_that_are_off_change_nothing() -> None:
    logits, seeds = normal(6, 200), torch.arange(6)
    free = sample(logits, ones(6), seeds)
    for options in (
        {"top_k": ints(6, 0)},
        {"top_k": ints(6, 200)},
        {"top_k": ints(6, 2**31 - 1)},
        {"top_p": ones(6)},
        {"top_k": ints(6, 0), "top_p": ones(6)},
    ):
        assert torch.equal(sample(logits, ones(6), seeds, **options), free)


def test_rows_may_have_other_limits() -> None:
    logits = normal(1, 100).expand(6, -1)
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    top_k = torch.tensor([0, 1, 0, 5, 0, 100], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 1e-9, 1.0, 0.9, 0.5])
    for seed in range(40):
        seeds = torch.full((6,), seed)
        tokens = sample(logits, temperature, seeds, top_k=top_k, top_p=top_p).tolist()
        assert tokens[:3] == [int(logits[0].argmax())] * 3
        for row in range(3, 6):
            scores = oracles.floats(logits[row]) / temperature[row].item()
            allowed = oracles.nucleus(scores, int(top_k[row]), top_p[row].item())
            assert tokens[row] in allowed


@given(
    vocabulary=st.integers(1, 60),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.1]),
    quantum=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_a_token_is_the_best_of_those_allowed(
    vocabulary: int, top_k: int, top_p: float, quantum: float, seed: int
) -> None:
    logits = normal(1, vocabulary, seed=seed) * 2
    if quantum:  # ties, which is where topk and a sort may differ
        logits = (logits / quantum).round() * quantum
    p = torch.tensor([top_p])
    token = sample(logits, ones(1), torch.tensor([seed]), top_k=ints(1, top_k), top_p=p).item()
    scores = oracles.floats(logits[0])
    allowed = oracles.nucleus(scores, top_k, p.item() if top_p < 1.0 else math.inf)
    noise = oracles.gumbel(seed, vocabulary)
    assert token == max(allowed, key=lambda index: scores[index] + noise[index])


def test_rows_without_a_distribution_get_the_greedy_token() -> None:
    logits = torch.zeros(5, 6)
    logits[0, 3] = math.nan
    logits[1, 2], logits[1, 4] = math.inf, math.inf
    logits[2] = -math.inf
    logits[3, 1:] = -math.inf
    seeds = torch.arange(5)
    for options in ({}, {"top_k": ints(5, 3)}, {"top_p": ones(5, 0.5)}):
        tokens = sample(logits, ones(5), seeds, **options)
        assert tokens[:4].tolist() == [3, 2, 0, 0]
        assert torch.equal(tokens[:4], greedy(logits)[:4])


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.zeros(1, 8)
    logits[0, ::2] = -math.inf
    for options in ({}, {"top_k": ints(1, 6)}, {"top_p": ones(1, 0.99)}):
        counts = draws(logits, 500, **options)
        assert counts[::2].sum() == 0
        assert (counts[1::2] > 0).all()


def test_b04_no_rows() -> None:
    logits, none = torch.empty(0, 9), torch.empty(0, dtype=torch.int64)
    for options in ({}, {"top_k": ints(0, 3)}, {"top_k": ints(0, 3), "top_p": ones(0)}):
        for seed in (none, torch.tensor([3])):
            token = sample(logits, ones(0), seed, **options)
            assert token.shape == (0,)
            assert token.dtype == torch.int64


def test_b10_b12_strided_logits_equal_their_copies() -> None:
    wide, seeds = normal(20, 41, dtype=torch.bfloat16), torch.arange(10)
    for logits in (wide[:10, 1:], wide[::2, :40], wide.T[:10]):
        copy = logits.contiguous()
        assert torch.equal(greedy(logits), greedy(copy))
        for options in ({}, {"top_k": ints(10, 7), "top_p": ones(10, 0.9)}):
            ours = sample(logits, ones(20)[::2], seeds, **options)
            assert torch.equal(ours, sample(copy, ones(10), seeds, **options))


def test_bad_arguments_are_refused() -> None:
    logits, seed = normal(2, 5), torch.tensor([1, 2])
    good = {"logits": logits, "temperature": ones(2), "seed": seed}
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DTypeError, "logits is float64", {"logits": logits.double()}),
        (DTypeError, "temperature is float64", {"temperature": ones(2).double()}),
        (DTypeError, "seed is int32", {"seed": seed.int()}),
        (DTypeError, "top_k is int64", {"top_k": seed}),
        (DTypeError, "top_p is float64", {"top_p": ones(2).double()}),
        (ShapeError, "logits is", {"logits": logits[0]}),
        (ShapeError, "at least one column", {"logits": logits[:, :0]}),
        (ShapeError, "temperature is", {"temperature": ones(1)}),
        (ShapeError, "one for all", {"seed": torch.arange(3)}),
        (ShapeError, "top_k is", {"top_k": ints(1, 1)}),
        (ShapeError, "top_p is", {"top_p": ones(3)}),
        (DeviceError, "seed is on meta", {"seed": seed.to("meta")}),
        (ConfigError, "temperature holds -1.0", {"temperature": ones(2, -1.0)}),
        (ConfigError, "temperature holds nan", {"temperature": ones(2, math.nan)}),
        (ConfigError, "temperature holds inf", {"temperature": ones(2, math.inf)}),
        (ConfigError, "top_k holds -3", {"top_k": ints(2, -3)}),
        (ConfigError, "top_p holds 0.0", {"top_p": ones(2, 0.0)}),
        (ConfigError, "top_p holds 1.5", {"top_p": ones(2, 1.5)}),
        (ConfigError, "top_p holds nan", {"top_p": ones(2, math.nan)}),
    ]
    for error, message, change in refused:
        with pytest.raises(error, match=message):
            sample(**{**good, **change})
    with pytest.raises(DTypeError, match="logits is int64"):
        greedy(seed[None])
    with pytest.raises(ShapeError, match="exactly 2"):
        greedy(logits[0])
    with pytest.raises(ShapeError, match="at least one column"):
        greedy(logits[:, :0])
    with pytest.raises(UnsupportedError, match="inference only"):
        sample(logits.requires_grad_(), ones(2), seed)


def test_b37_opcheck() -> None:
    logits, seeds = normal(3, 20, dtype=torch.bfloat16), torch.arange(3)
    torch.library.opcheck(ops.greedy.default, (logits,))
    torch.library.opcheck(ops.sample.default, (logits, ones(3), seeds, None, None))
    limits = ints(3, 5), ones(3, 0.5)
    torch.library.opcheck(ops.sample.default, (logits, ones(3), seeds[:1], *limits))


def test_b37_compiled_consumers_agree_with_eager_at_any_m() -> None:
    def consumer(logits: Tensor, temperature: Tensor, seed: Tensor, top_k: Tensor) -> Tensor:
        return sample(logits, temperature, seed, top_k=top_k) * 2 + greedy(logits)

    compiled = torch.compile(consumer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 8):
        inputs = normal(rows, 30, seed=rows), ones(rows), torch.arange(rows), ints(rows, 4)
        assert torch.equal(compiled(*inputs), consumer(*inputs))
