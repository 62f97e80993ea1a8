"""``FusedStep``: a whole decode step on fusedops, every operation pinned to a provider.

It is the demo's model and its device-side state, arranged for a measurement:

* each operation is pinned in strict mode, so that nothing can serve it but what the row names;
* attention is FlashInfer's decode kernel where asked for, planned on the host between replays;
* a token's place in the cache is found once a step. ``append_paged_kv`` finds it in every call, and
  in torch, with its guards against padding rows and stray pages, that is about 35 kernels. Here no
  row is padding and none ends, so two kernels a layer are left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedops.ops.attention import paged_attention
from fusedops.ops.embedding import embedding
from fusedops.ops.rope_kv import rope
from fusedops.providers.base import use_provider
from serving_demo.cache import PagedKVCache
from serving_demo.model import DecoderModel
from serving_demo.state import DecodeState, RowValues

__all__ = [
    "ADVANCES",
    "Attention",
    "FlashInferAttention",
    "FusedStep",
    "OpAttention",
    "StepBatch",
    "StepProviders",
]

ADVANCES = 16
"""Steps until a measurement returns to its first position, so that its lengths stay in a page."""

_NEVER = 1 << 30
"""A last position that no row reaches."""


@dataclass(frozen=True)
class StepProviders:
    """Who runs which operation of a step.

    Attributes:
        gemm: the products with their epilogues.
        norm: ``rms_norm``.
        rope: ``rope``.
        other: ``embedding`` and ``greedy``, and ``paged_attention`` where attention is ``torch``.
        attention: ``flashinfer`` (``FlashInferDecode``) or ``torch`` (``paged_attention``).
    """

    gemm: str
    norm: str
    rope: str
    other: str
    attention: str


@dataclass(frozen=True)
class StepBatch:
    """What the contenders of one batch size share.

    Attributes:
        model: the model.
        cache: filled with random keys and values; contenders write the positions behind
            ``context - 2`` only.
        block_table: (batch, pages) int32 on the host, a random order of the cache's pages.
        tokens: (batch,) int64, the tokens of the first step.
        context: length of each request in the first step, that step's token included.
    """

    model: DecoderModel
    cache: PagedKVCache
    block_table: Tensor
    tokens: Tensor
    context: int

    @classmethod
    def make(
        cls, model: DecoderModel, cache: PagedKVCache, batch: int, context: int, seed: int = 0
    ) -> StepBatch:
        """A batch with random page tables and first tokens over a cache that is large enough."""
        generator = torch.Generator().manual_seed(seed)
        pages = cls.pages_each(context, cache.page_size)
        order = torch.randperm(cache.k[0].shape[0], generator=generator)[: batch * pages]
        tokens = torch.randint(model.config.vocab_size, (batch,), generator=generator)
        table = order.view(batch, pages).int()
        return cls(model, cache, table, tokens.to(model.device), context)

    @staticmethod
    def pages_each(context: int, page_size: int) -> int:
        """Pages that each request needs to advance ``ADVANCES`` times."""
        return -(-(context + ADVANCES - 1) // page_size)

    @property
    def size(self) -> int:
        """Requests."""
        return self.tokens.shape[0]


class Attention(Protocol):
    """A step's attention: host work before each step, then a call a layer."""

    plan_us: list[float]
    """Host time of each ``plan``, microseconds; empty where there is none."""

    def plan(self, length: int) -> None:
        """Prepare a step in which every request has this length."""
        ...

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """(batch, heads, head_dim) attention of one layer."""
        ...


class FlashInferAttention:
    """``FlashInferDecode`` for a fixed batch.

    Raises:
        UnsupportedError: FlashInfer is absent or has no kernel for the heads.
    """

    def __init__(
        self, batch: StepBatch, block_table: Tensor, window: int, tensor_cores: bool
    ) -> None:
        from fusedops.providers.flashinfer import FlashInferDecode

        config, keys = batch.model.config, batch.cache.k[0]
        self._lengths_of = batch.size
        self.plan_us: list[float] = []
        self._decode = FlashInferDecode(
            batch=batch.size,
            pages=keys.shape[0],
            page_size=batch.cache.page_size,
            query_heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            dtype=keys.dtype,
            device=keys.device,
            block_table=block_table,
            window=window,
            tensor_cores=tensor_cores,
        )

    def plan(self, length: int) -> None:
        """Schedule on the host; takes its time."""
        started = time.perf_counter()
        self._decode.plan([length] * self._lengths_of)
        self.plan_us.append((time.perf_counter() - started) * 1e6)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """One layer by the last plan."""
        return self._decode.run(q, k_cache, v_cache)


class OpAttention:
    """``fusedops.paged_attention`` by whatever provider is pinned around it."""

    def __init__(self, state: DecodeState, window: int) -> None:
        self._state = state
        self._window = window
        self.plan_us: list[float] = []

    def plan(self, length: int) -> None:
        """Nothing: lengths are read on the device."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """One layer."""
        return paged_attention(
            q,
            k_cache,
            v_cache,
            self._state.block_table,
            self._state.seq_lens,
            window=self._window,
        )


class FusedStep:
    """A decode step on fusedops: embedding to greedy token, append included, positions advancing.

    Args:
        name: as the table shows it.
        batch: what it works on.
        providers: who runs what.
        tensor_cores: take FlashInfer's tensor-core kernel instead of its CUDA-core kernel.

    Attributes:
        served: (operation, provider) -> calls of the runs so far, attention and append aside.
        logits: of the last ``run``.
    """

    def __init__(
        self,
        name: str,
        batch: StepBatch,
        providers: StepProviders,
        tensor_cores: bool = False,
    ) -> None:
        self.name = name
        self.providers = providers
        self.served: Counter[tuple[str, str]] = Counter()
        self.logits: Tensor | None = None
        self._batch = batch
        self._replays = 0
        config = batch.model.config
        self._state = _state(batch)
        self.attention: Attention = OpAttention(self._state, config.sliding_window)
        if providers.attention == "flashinfer":
            table = self._state.block_table
            self.attention = FlashInferAttention(batch, table, config.sliding_window, tensor_cores)

    @property
    def tokens(self) -> Tensor:
        """(batch,) int64: what the last step chose, and what the next one reads."""
        return self._state.tokens

    @property
    def mean_length(self) -> float:
        """Mean length of a request over the steps of one cycle."""
        return self._batch.context + (ADVANCES - 1) / 2

    def reset(self) -> None:
        """Make the next ``prepare`` start over at the first position."""
        self._replays = 0

    def prepare(self) -> None:
        """What the host does before a step: return to the start of a cycle, plan attention."""
        advanced = self._replays % ADVANCES
        if advanced == 0:
            self._state.tokens.copy_(self._batch.tokens)
            self._state.positions.fill_(self._batch.context - 1)
            self._state.seq_lens.fill_(self._batch.context)
        self.attention.plan(self._batch.context + advanced)
        self._replays += 1

    def run(self) -> Tensor:
        """One step on the current stream; returns the logits and advances the state."""
        logits = self._decode()
        with self._by(self.providers.other):
            chosen = self._state.choose(logits, self._batch.size, sampled=False)
        self._state.advance(chosen)
        self.logits = logits
        return logits

    @property
    def context(self) -> int:
        """Length of each request in the first step."""
        return self._batch.context

    def positions(self) -> list[int]:
        """Each row's next position, read from the device."""
        found: list[int] = self._state.positions.tolist()
        return found

    def appended(self, layer: int) -> tuple[Tensor, Tensor]:
        """(batch, kv_heads, head_dim) keys and values of a layer at the first step's position."""
        cache, position = self._batch.cache, self._batch.context - 1
        pages = self._batch.block_table[:, position // cache.page_size].tolist()
        slot = position % cache.page_size
        return cache.k[layer][pages, slot], cache.v[layer][pages, slot]

    @contextmanager
    def _by(self, provider: str) -> Iterator[None]:
        with use_provider(provider) as usage:
            yield
        self.served.update(usage.calls)

    def _decode(self) -> Tensor:
        model, state, cache = self._batch.model, self._state, self._batch.cache
        providers = self.providers
        slots = _slots(state, cache.page_size)
        cos_sin = model.get_buffer("cos_sin")
        layers: Any = model.layers
        with self._by(providers.other):
            x = embedding(state.tokens, model.token_embedding)
        for layer, k_cache, v_cache in zip(layers, cache.k, cache.v, strict=True):
            with self._by(providers.norm):
                normed = layer.attention_norm(x)
            with self._by(providers.gemm):
                q, k, v = layer.qkv(normed)
            with self._by(providers.rope):
                q, k = rope(q, k, state.positions, cos_sin)
            k_cache.flatten(0, 1).index_copy_(0, slots, k)
            v_cache.flatten(0, 1).index_copy_(0, slots, v)
            with self._by(providers.other):
                attended = self.attention.attend(q, k_cache, v_cache)
            with self._by(providers.gemm):
                x = layer.output(attended.flatten(1), x)
            with self._by(providers.norm):
                normed = layer.mlp_norm(x)
            with self._by(providers.gemm):
                x = layer.mlp(normed, x)
        with self._by(providers.norm):
            normed = model.final_norm(x)
        with self._by(providers.gemm):
            logits: Tensor = model.head(normed)
        return logits


def _slots(state: DecodeState, page_size: int) -> Tensor:
    """(batch,) int64: each new token's place in a cache viewed as one row of slots."""
    block = state.positions.div(page_size, rounding_mode="floor").long()
    page = state.block_table.gather(1, block[:, None])[:, 0].long()
    return page * page_size + state.positions.remainder(page_size)


def _state(batch: StepBatch) -> DecodeState:
    """The state of a batch whose rows never end."""
    state = DecodeState(batch.size, batch.block_table.shape[1], (), batch.model.device)
    pages: Sequence[list[int]] = batch.block_table.tolist()
    state.place([RowValues(batch.context - 1, _NEVER, row, 0, 0.0) for row in pages])
    return state
