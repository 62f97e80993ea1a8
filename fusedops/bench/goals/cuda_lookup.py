"""Kernels that place or look up: embedding, RoPE with the paged append, experts' bookkeeping.

No goal counts them; they stand beside those of the same files, against what is written in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun
from fusedops.bench.goals.cuda_rows import MINE, measured
from fusedops.bench.measurement import Outcome
from fusedops.bench.oracles import bitwise
from fusedops.bench.peers import compiled_peers
from fusedops.ops.embedding import embedding
from fusedops.ops.histogram import expert_histogram
from fusedops.ops.rope_append import rope_append_paged_kv_
from fusedops.ops.rope_table import rope_table

__all__ = ["embedding_outcomes", "expert_outcomes", "rope_append_outcomes"]

_HEAD_DIM = 128
_QUERY_GROUP = 4
_PAGE_SIZE = 16
_POSITIONS = 1 << 12
_VOCABULARY = 1 << 15
_ROUNDING = 2.0**-8
"""Half a unit in the last place of a bfloat16, and as much again for float32 products."""


def embedding_outcomes(run: GoalRun, tokens: int, columns: int) -> dict[str, Outcome]:
    """Rows of a bfloat16 table of 32,768 rows by int64 token ids."""

    def make(generator: torch.Generator) -> Buffers:
        options = {"generator": generator, "device": generator.device}
        table = torch.empty(_VOCABULARY, columns, dtype=torch.bfloat16, device=generator.device)
        ids = torch.randint(0, _VOCABULARY, (tokens,), **options)  # type: ignore[call-overload]
        return Buffers((table.normal_(generator=generator),), indices=(ids,))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        return bitwise(results[0], buffers.inputs[0][buffers.indices[0]])

    def contender(name: str, look_up: Callable[[Tensor, Tensor], Tensor]) -> Contender:
        return Contender(name, lambda found: look_up(found.indices[0], found.inputs[0]), check)

    found = [contender(MINE, embedding), contender("torch", F.embedding)]
    return measured(run, f"embedding {tokens}x{columns}", found, make)


def _experts_by_torch(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    # torch.bincount would wait for the GPU to learn the length of its result.
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    return counts, F.pad(counts.cumsum(0), (1, 0)), ids.argsort(stable=True)


def expert_outcomes(run: GoalRun, ids: int, experts: int) -> dict[str, Outcome]:
    """Counts, offsets and the stable permutation of uniform int64 ids; the data lies in the L2."""

    def make(generator: torch.Generator) -> Buffers:
        options = {"generator": generator, "device": generator.device}
        return Buffers((torch.randint(0, experts, (ids,), **options),))  # type: ignore[call-overload]

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        for got, expected in zip(
            results, _experts_by_torch(buffers.inputs[0], experts), strict=True
        ):
            wrong = bitwise(got, expected)
            if wrong is not None:
                return wrong
        return None

    def by_torch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _experts_by_torch(x, experts)

    found = [
        Contender(MINE, lambda buffers: expert_histogram(buffers.inputs[0], experts), check),
        Contender("torch", lambda buffers: by_torch(buffers.inputs[0]), check),
        *compiled_peers(by_torch, check),
    ]
    return measured(run, f"expert_histogram {ids} into {experts}", found, make, hot=True)


def _turned(heads: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    cosine, sine = cos_sin[positions].to(heads.dtype)[:, None].chunk(2, -1)
    low, high = heads.chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


def _rope_append_by_torch(buffers: Buffers) -> None:
    q, k, v, k_cache, v_cache = buffers.inputs
    positions, cos_sin, pages, request = buffers.indices
    for heads in (q, k):
        heads.copy_(_turned(heads.float(), cos_sin, positions))
    place = (pages[request, positions // _PAGE_SIZE], positions % _PAGE_SIZE)
    k_cache[place] = k
    v_cache[place] = v


def _rope_append(buffers: Buffers) -> None:
    q, k, v, k_cache, v_cache = buffers.inputs
    positions, cos_sin, pages, request = buffers.indices
    rope_append_paged_kv_(q, k, v, positions, cos_sin, k_cache, v_cache, pages, request)


def _check_rope_append(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
    q, k, v, k_cache, v_cache = buffers.inputs
    positions, cos_sin, pages, request = buffers.indices
    for name, got, heads in (("q", results[0], q), ("k", results[1], k)):
        exact = _turned(heads.double(), cos_sin, positions)
        size = heads.double().abs()
        bound = _ROUNDING * (size + size.roll(_HEAD_DIM // 2, -1))
        if bool(((got.double() - exact).abs() > bound).any()):
            return f"{name} is not turned as it should be"
    place = (pages[request, positions // _PAGE_SIZE], positions % _PAGE_SIZE)
    for cache, original, values in ((results[3], k_cache, results[1]), (results[4], v_cache, v)):
        wrong = bitwise(cache, original.index_put(place, values))
        if wrong is not None:
            return f"a cache: {wrong}"
    return None


def rope_append_outcomes(run: GoalRun, tokens: int, columns: int) -> dict[str, Outcome]:
    """q and k turned in place, k and v put into paged caches; each token is one request's next.

    Args:
        run: pins the provider.
        tokens: requests, one token each.
        columns: of q, a multiple of 512: heads of 128, four to a key.
    """

    def make(generator: torch.Generator) -> Buffers:
        device = generator.device

        def normal(*shape: int) -> Tensor:
            drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return drawn.normal_(generator=generator)

        heads = columns // _HEAD_DIM
        kv_heads = heads // _QUERY_GROUP
        q, k, v = (normal(tokens, n, _HEAD_DIM) for n in (heads, kv_heads, kv_heads))
        k_cache, v_cache = (normal(tokens, _PAGE_SIZE, kv_heads, _HEAD_DIM) for _ in range(2))
        request = torch.arange(tokens, device=device, dtype=torch.int32)
        positions = request % _PAGE_SIZE
        table = rope_table(_HEAD_DIM, _POSITIONS).to(device)
        indices = (positions, table, request[:, None], request)
        return Buffers((q, k, v, k_cache, v_cache), indices=indices)

    found = [
        Contender(MINE, _rope_append, _check_rope_append, in_place=True),
        Contender("torch", _rope_append_by_torch, _check_rope_append, in_place=True),
    ]
    reasons = {"torch.compile": "it works in place, on tensors that the other contenders share"}
    return measured(
        run,
        f"rope_append {tokens}x{columns}",
        found,
        make,
        reasons=reasons,
        hot=tokens < _PAGE_SIZE * 64,
    )
