"""``DecodeState``: all that a decode step reads and writes, in device memory at fixed addresses.

A row is one request of the batch. Row states, all decided on the device:

* live: ``position >= 0`` is where the row's ``token`` goes, ``seq_len == position + 1``;
* inert (padding, or finished): ``position == -1`` and ``seq_len == 0``; it writes no key, reads
  none, emits -1 and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedops.ops.sampling import greedy, sample
from serving_demo.cache import PagedKVCache
from serving_demo.model import DecoderModel

__all__ = ["DecodeState", "RowValues", "decode_step"]


@dataclass(frozen=True)
class RowValues:
    """What a request puts into its row when its prompt has been read.

    Attributes:
        position: of its prompt's last token.
        last_position: the last one that may be fed back; behind it the row becomes inert.
        pages: its cache pages in order.
        seed: of its next token's noise.
        temperature: 0 for greedy.
    """

    position: int
    last_position: int
    pages: Sequence[int]
    seed: int
    temperature: float


class DecodeState:
    """Device tensors of ``n_rows`` rows; every method keeps their addresses.

    Args:
        n_rows: rows.
        n_pages: width of the block table.
        eos_token_ids: tokens that end a row.
        device: where the model runs.
    """

    def __init__(
        self,
        n_rows: int,
        n_pages: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(n_rows, dtype=torch.int64)
        self.emitted = zeros(n_rows, dtype=torch.int64)
        self.positions = zeros(n_rows)
        self.last_positions = zeros(n_rows)
        self.seq_lens = zeros(n_rows)
        self.block_table = zeros(n_rows, n_pages)
        self.request_index = torch.arange(n_rows, dtype=torch.int32, device=device)
        self.seeds = zeros(n_rows, dtype=torch.int64)
        self.temperature = zeros(n_rows, dtype=torch.float32)
        self.eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
        self.clear()

    @property
    def _per_row(self) -> tuple[Tensor, ...]:
        return (
            self.tokens,
            self.positions,
            self.last_positions,
            self.seq_lens,
            self.block_table,
            self.seeds,
            self.temperature,
        )

    def clear(self) -> None:
        """Make every row inert."""
        self.tokens.zero_()
        self.positions.fill_(-1)
        self.seq_lens.zero_()

    def place(self, rows: Sequence[RowValues]) -> None:
        """Put requests into the first rows and make the others inert."""
        self.clear()
        n, device = len(rows), self.tokens.device
        table = torch.zeros((n, self.block_table.shape[1]), dtype=torch.int32)
        for row, values in zip(table, rows, strict=True):
            row[: len(values.pages)] = torch.tensor(list(values.pages), dtype=torch.int32)
        self.block_table[:n].copy_(table)

        def put(target: Tensor, values: list[int] | list[float]) -> None:
            target[:n].copy_(torch.tensor(values, dtype=target.dtype).to(device))

        put(self.positions, [values.position for values in rows])
        put(self.seq_lens, [values.position + 1 for values in rows])
        put(self.last_positions, [values.last_position for values in rows])
        put(self.seeds, [values.seed for values in rows])
        put(self.temperature, [values.temperature for values in rows])

    def compact(self, keep: Sequence[int]) -> None:
        """Move the rows ``keep`` to the front, in that order, and make the others inert."""
        index = torch.tensor(list(keep), dtype=torch.int64).to(self.tokens.device)
        for tensor in self._per_row:
            tensor[: len(keep)].copy_(tensor.index_select(0, index))
        self.positions[len(keep) :].fill_(-1)
        self.seq_lens[len(keep) :].zero_()

    def choose(self, logits: Tensor, n_rows: int, sampled: bool) -> Tensor:
        """(n_rows,) int64: each row's next token, greedy or drawn with its seed and temperature."""
        if not sampled:
            return greedy(logits)
        return sample(logits, self.temperature[:n_rows], self.seeds[:n_rows])

    def advance(self, next_tokens: Tensor) -> None:
        """Take each live row's next token: emit it, and feed it next unless the row ends here."""
        n_rows = next_tokens.shape[0]
        positions = self.positions[:n_rows]
        live = positions >= 0
        goes_on = live & (positions < self.last_positions[:n_rows])
        goes_on &= ~(next_tokens[:, None] == self.eos).any(dim=1)
        self.emitted[:n_rows].copy_(torch.where(live, next_tokens, -1))
        self.tokens[:n_rows].copy_(next_tokens)
        positions.copy_(torch.where(goes_on, positions + 1, -1))
        torch.add(positions, 1, out=self.seq_lens[:n_rows])
        self.seeds[:n_rows].add_(1)


def decode_step(
    model: DecoderModel, cache: PagedKVCache, state: DecodeState, n_rows: int, sampled: bool
) -> None:
    """One decode step of the first ``n_rows`` rows: everything is read from and left in ``state``.

    The same function runs eagerly on the CPU and is captured in a CUDA graph on a GPU: no value
    leaves the device and no address depends on one.
    """
    logits = model(
        state.tokens[:n_rows],
        state.positions[:n_rows],
        state.request_index[:n_rows],
        cache,
        state.block_table[:n_rows],
        state.seq_lens[:n_rows],
    )
    state.advance(state.choose(logits, n_rows, sampled))
