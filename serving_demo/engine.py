"""``Engine``: reads a batch of prompts, then decodes them together; streams tokens as they come.

On a GPU each batch bucket's decode step is one CUDA graph, captured before any prompt is read; the
host replays it, starts an asynchronous copy of the emitted tokens and looks at the copy of the step
before. On the CPU the same step runs eagerly, at the exact batch size.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType

import torch
from torch import Tensor

from fusedops.errors import ConfigError
from serving_demo.cache import DEFAULT_PAGE_SIZE, PagedKVCache
from serving_demo.check import require_int, require_type
from serving_demo.model import DecoderModel
from serving_demo.request import Request, check_requests, require_tokens
from serving_demo.state import DecodeState, RowValues, decode_step

__all__ = ["BATCH_BUCKETS", "DecodeStep", "Engine", "Generation", "Request"]

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that a GPU's decode step is captured for; a batch in between is padded."""

PREFILL_CHUNK = 512
"""Prompt tokens of one request that a prefill pass takes: bounds the size of attention's scores."""

OnToken = Callable[[int, int], None]
"""Called with (number of the request, token id) for each token as it reaches the host."""


@dataclass(frozen=True)
class DecodeStep:
    """One decode step as the host saw it.

    Attributes:
        seconds: CPU: the step alone; GPU: from the arrival of the step before to its own.
        n_tokens: tokens that live rows emitted.
        n_positions: cached positions that attention read, over all live rows.
    """

    seconds: float
    n_tokens: int
    n_positions: int


@dataclass(frozen=True)
class Generation:
    """What came of a batch.

    Attributes:
        tokens: the new tokens of each request, an end-of-text token included.
        prefill_seconds: from the start until every request's first token was on the host.
        prefill_tokens: prompt tokens read in that time.
        steps: the decode steps that emitted anything.
    """

    tokens: tuple[tuple[int, ...], ...]
    prefill_seconds: float
    prefill_tokens: int
    steps: tuple[DecodeStep, ...]


@dataclass
class _Pending:
    """A step whose emitted tokens are on their way to the host."""

    host: Tensor
    arrived: torch.cuda.Event | None
    requests: list[int]


class Engine:
    """Runs batches of requests on one model, one batch at a time.

    Args:
        model: the model.
        max_requests: most requests a batch, 1 to 64.
        max_positions: positions the cache holds for a request, at most the model's.
        page_size: positions a cache page, at most the model's.
        eos_token_ids: tokens that end a text; default: the model's.
        use_graphs: capture the decode step in CUDA graphs; default: on a GPU, yes.

    Raises:
        ConfigError: an argument is of another type, a size is out of range or more than the device
            has memory for, or graphs are asked for on the CPU.
    """

    def __init__(
        self,
        model: DecoderModel,
        max_requests: int,
        max_positions: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        eos_token_ids: Sequence[int] | None = None,
        use_graphs: bool | None = None,
    ) -> None:
        require_type("model", model, DecoderModel, "is a DecoderModel")
        for name, value in (("max_requests", max_requests), ("max_positions", max_positions)):
            require_int(name, value)
        if not 1 <= max_requests <= BATCH_BUCKETS[-1]:
            raise ConfigError(
                f"a batch of {max_requests} requests is asked for; accepted are 1 to "
                f"{BATCH_BUCKETS[-1]}. Run the prompts in several batches."
            )
        if not 1 <= max_positions <= model.max_positions:
            raise ConfigError(
                f"a cache of {max_positions:,} positions a request is asked for; accepted are 1 to "
                f"{model.max_positions:,}, the model's."
            )
        require_int(
            "page_size",
            page_size,
            1,
            max(model.max_positions, DEFAULT_PAGE_SIZE),
            "It is the positions that a cache page holds; a request has at most the model's.",
        )
        require_type("use_graphs", use_graphs, (bool, NoneType), "are True, False and None")
        if eos_token_ids is not None:
            require_tokens("eos_token_ids", eos_token_ids, model.config.vocab_size)
        on_gpu = model.device.type == "cuda"
        if use_graphs and not on_gpu:
            raise ConfigError(f"CUDA graphs need a model on a GPU; this one is on {model.device}.")
        self.model = model
        self.max_requests = max_requests
        self.max_positions = max_positions
        self.use_graphs = on_gpu if use_graphs is None else use_graphs
        self.capture_seconds = 0.0
        self._busy = False
        pages_each = -(-max_positions // page_size)
        self.cache = PagedKVCache(
            model.config, max_requests * pages_each, page_size, model.dtype, model.device
        )
        eos = model.config.eos_token_ids if eos_token_ids is None else tuple(eos_token_ids)
        self.n_rows = self._bucket(max_requests)
        self.state = DecodeState(self.n_rows, pages_each, eos, model.device)
        self._eos = frozenset(eos)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._graph_pool = torch.cuda.graph_pool_handle() if self.use_graphs else None
        # Two buffers: one in flight while the host reads the other.
        self._host_buffers = [
            torch.empty(self.n_rows, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)
        ]
        self._events = [torch.cuda.Event() for _ in range(2)] if on_gpu else []

    def _bucket(self, n_requests: int) -> int:
        """Rows that a batch of so many requests runs with."""
        if self.model.device.type != "cuda":
            return n_requests
        return next(size for size in BATCH_BUCKETS if size >= n_requests)

    @torch.inference_mode()
    def capture(self, sampled: bool = False) -> None:
        """Capture the decode step of every bucket up to the largest batch; does nothing on the CPU.

        ``generate`` calls it; call it beforehand to keep its time out of the first batch. Every row
        is made inert first, so that the runs before a capture touch no key or value.
        """
        if not self.use_graphs:
            return
        started = time.perf_counter()
        self.state.clear()
        for n_rows in reversed([size for size in BATCH_BUCKETS if size <= self.n_rows]):
            if (n_rows, sampled) not in self._graphs:
                self._graphs[n_rows, sampled] = self._captured(n_rows, sampled)
        self.capture_seconds += time.perf_counter() - started

    def _captured(self, n_rows: int, sampled: bool) -> torch.cuda.CUDAGraph:
        # The first runs load modules and choose algorithms, which a capture must not contain.
        warm_up = torch.cuda.Stream(self.model.device)
        warm_up.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(warm_up):
            for _ in range(2):
                decode_step(self.model, self.cache, self.state, n_rows, sampled)
        torch.cuda.current_stream(self.model.device).wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            decode_step(self.model, self.cache, self.state, n_rows, sampled)
        return graph

    @torch.inference_mode()
    def step(self, n_rows: int, sampled: bool) -> None:
        """One decode step of the first ``n_rows`` rows (a bucket, on a GPU with graphs)."""
        if self.use_graphs:
            self._graphs[n_rows, sampled].replay()
        else:
            decode_step(self.model, self.cache, self.state, n_rows, sampled)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], on_token: OnToken | None = None) -> Generation:
        """Continue every prompt until it ends or has its tokens.

        Args:
            requests: at most ``max_requests``.
            on_token: called with each new token as it reaches the host.

        Raises:
            ShapeError: a prompt is empty, or does not fit into the cache with what may follow.
            ConfigError: too many requests or none, a value of another type or out of range, a
                token outside the vocabulary, or a batch is under way already.
        """
        if self._busy:
            raise ConfigError(
                "this engine is generating; it runs one batch at a time. Ask again when generate() "
                "has returned, or make another engine."
            )
        check_requests(
            requests, self.max_requests, self.max_positions, self.model.config.vocab_size
        )
        if on_token is not None and not callable(on_token):
            raise ConfigError(
                f"on_token is a {type(on_token).__name__}; accepted is a function of (number of "
                "the request, token id)."
            )
        sampled = any(request.temperature > 0 for request in requests)
        self.capture(sampled)
        batch = _Batch(requests, self._eos, on_token)
        pages: list[list[int]] = []
        self._busy = True
        try:
            # All get what the longest needs (there is room for that): requests that lie evenly in
            # the pool are attended in one call on the CPU.
            longest = max(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
            pages_each = self.cache.pages_for(longest)
            for _ in requests:
                pages.append(self.cache.allocator.allocate(pages_each))
            started = time.perf_counter()
            self._prefill(requests, pages, sampled)
            batch.take(self._read_back(0, list(range(len(requests)))))
            prefill_seconds = time.perf_counter() - started
            self._decode(batch, sampled)
        finally:
            for taken in pages:
                self.cache.allocator.free(taken)
            self.state.clear()
            self._busy = False
        return Generation(
            tokens=tuple(tuple(tokens) for tokens in batch.tokens),
            prefill_seconds=prefill_seconds,
            prefill_tokens=sum(len(request.prompt) for request in requests),
            steps=tuple(batch.steps),
        )

    def _prefill(self, requests: Sequence[Request], pages: list[list[int]], sampled: bool) -> None:
        """Read all prompts, chunk by chunk, and take each request's first token."""
        state, n = self.state, len(requests)
        state.place([_row(*pair) for pair in zip(requests, pages, strict=True)])
        logits = torch.empty(
            (n, self.model.config.vocab_size), dtype=self.model.dtype, device=self.model.device
        )
        longest = max(len(request.prompt) for request in requests)
        for start in range(0, longest, PREFILL_CHUNK):
            rows = [i for i, request in enumerate(requests) if len(request.prompt) > start]
            chunks = [requests[i].prompt[start : start + PREFILL_CHUNK] for i in rows]
            where = self._to_device(rows, torch.int64)
            # A request's last chunk overwrites what its earlier ones left.
            logits.index_copy_(0, where, self._prefill_chunk(rows, chunks, start))
        state.advance(state.choose(logits, n, sampled))

    def _prefill_chunk(self, rows: list[int], chunks: list[tuple[int, ...]], start: int) -> Tensor:
        counts = [len(chunk) for chunk in chunks]
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        to_device = self._to_device
        logits: Tensor = self.model(
            to_device([token for chunk in chunks for token in chunk], torch.int64),
            to_device([start + i for count in counts for i in range(count)], torch.int32),
            to_device([i for i, count in enumerate(counts) for _ in range(count)], torch.int32),
            self.cache,
            self.state.block_table.index_select(0, to_device(rows, torch.int64)),
            to_device([start + count for count in counts], torch.int32),
            to_device(offsets, torch.int32),
            max(counts),
        )
        return logits

    def _to_device(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.model.device)

    def _read_back(self, slot: int, requests: list[int]) -> _Pending:
        """Start copying the emitted tokens to the host; row i belongs to ``requests[i]``."""
        host = self._host_buffers[slot % 2]
        host.copy_(self.state.emitted, non_blocking=True)
        event = self._events[slot % 2] if self._events else None
        if event is not None:
            event.record()
        return _Pending(host, event, requests)

    def _decode(self, batch: _Batch, sampled: bool) -> None:
        """Steps until every request has ended; on a GPU the host stays one step behind."""
        lag = 1 if self._events else 0
        waiting: deque[_Pending] = deque()
        rows = list(range(len(batch.tokens)))
        n_rows = self._bucket(len(rows))
        slot = 0
        batch.mark()
        while batch.live:
            alive = [i for i, request in enumerate(rows) if request in batch.live]
            if self._bucket(len(alive)) < n_rows:
                self.state.compact(alive)
                rows = [rows[i] for i in alive]
                n_rows = self._bucket(len(alive))
            self.step(n_rows, sampled)
            waiting.append(self._read_back(slot, rows))
            slot += 1
            if len(waiting) > lag:
                batch.take(waiting.popleft())
        while waiting:
            batch.take(waiting.popleft())


class _Batch:
    """The host's view of a batch: the tokens that arrived, and when."""

    def __init__(
        self, requests: Sequence[Request], eos: frozenset[int], on_token: OnToken | None
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.live = set(range(len(requests)))
        self.steps: list[DecodeStep] = []
        self._requests = requests
        self._eos = eos
        self._on_token = on_token
        self._last_arrival: float | None = None

    def mark(self) -> None:
        """Start the clock of the decode steps."""
        self._last_arrival = time.perf_counter()

    def take(self, pending: _Pending) -> None:
        """Wait for a step's tokens and hand them out; a row that emitted nothing holds -1."""
        if pending.arrived is not None:
            pending.arrived.synchronize()
        arrival = time.perf_counter()
        emitted = pending.host.tolist()
        n_tokens = n_positions = 0
        arrived: list[tuple[int, int]] = []
        for request, token in zip(pending.requests, emitted, strict=False):
            if token < 0:
                continue
            tokens = self.tokens[request]
            n_positions += len(self._requests[request].prompt) + len(tokens)
            tokens.append(token)
            n_tokens += 1
            arrived.append((request, token))
            if token in self._eos or len(tokens) >= self._requests[request].max_new_tokens:
                self.live.discard(request)
        if self._last_arrival is not None and n_tokens:
            self.steps.append(DecodeStep(arrival - self._last_arrival, n_tokens, n_positions))
        if self._on_token is not None:
            for request, token in arrived:
                self._on_token(request, token)
        if self._last_arrival is not None:
            # On the CPU nothing runs while the tokens are shown, so that time is no step's.
            self._last_arrival = arrival if pending.arrived is not None else time.perf_counter()


def _row(request: Request, pages: list[int]) -> RowValues:
    n = len(request.prompt)
    # A row's seed counts up step by step; hashing keeps neighbouring seeds from meeting on the way.
    digest = hashlib.blake2b(str(request.seed).encode(), digest_size=8).digest()
    return RowValues(
        position=n - 1,
        last_position=n + request.max_new_tokens - 2,
        pages=pages,
        seed=int.from_bytes(digest, "little", signed=True),
        temperature=request.temperature,
    )
