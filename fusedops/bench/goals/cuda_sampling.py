"""Sampling from 64 rows of a vocabulary of 128,256, and their 50 largest logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.data import Buffers
from fusedops.bench.goal_run import GoalRun, Reading
from fusedops.bench.goals import goal
from fusedops.bench.goals.cuda_rows import COVERS, MINE, measured, reading
from fusedops.bench.measurement import Absent, Outcome, speedup
from fusedops.bench.oracles import bitwise
from fusedops.bench.peers import Available, compiled_peers, peer_status
from fusedops.ops.sampling import sample
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_sampling import top_k

__all__ = ["CUTS", "RADIX_SELECT", "sampling_outcomes", "top_k_outcomes"]

RADIX_SELECT = "radix select (flashinfer.top_k)"
"""The selection that RAFT's ``select_k`` does: by digits of the keys, from the highest on."""

_COVERS = (*COVERS, "csrc/sampling.cu")
_SHAPE = (64, 128256)
_K = 50
_P = 0.9

CUTS: dict[str, tuple[int | None, float | None]] = {
    "top-k and top-p": (_K, _P),
    "top-p": (None, _P),
    "top-k": (_K, None),
}
"""What is sampled from, by name: (k, p)."""

Check = Callable[[tuple[Tensor, ...], Buffers], str | None]


def _allowed(k: int | None, p: float | None) -> Check:
    """Whether every token may be drawn: its rank below k, the mass before it below p."""

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        logits = buffers.inputs[0]
        token = results[0].long()[:, None]
        if bool(((token < 0) | (token >= logits.shape[1])).any()):
            return "a token lies outside the vocabulary"
        own = logits.gather(1, token)
        above = logits > own
        rank = above.sum(1)
        if k is not None and bool((rank >= k).any()):
            return f"a token has rank {int(rank.max())}, drawn from {k}"
        if p is not None:
            kept = logits.double()
            if k is not None:
                least = logits.topk(k, dim=1).values[:, -1:]
                kept = kept.masked_fill(logits < least, -torch.inf)
            before = (kept.softmax(1) * above).sum(1)
            # A float32 sum of 128,256 weights is off by some 1e-5.
            if bool((before >= p + 1e-4).any()):
                return f"the mass before a token is {float(before.max())}, drawn from {p}"
        return None

    return check


def _flashinfer(k: int | None, p: float | None, check: Check) -> Contender:
    """FlashInfer from logits on: its softmax where its sampling takes probabilities."""
    sampling = importlib.import_module("flashinfer.sampling")

    def run(buffers: Buffers) -> Tensor:
        logits = buffers.inputs[0]
        seed, offset = buffers.indices[3:5]
        options: dict[str, Any] = {"deterministic": True, "seed": seed, "offset": offset}
        if k is not None and p is not None:
            token = sampling.top_k_top_p_sampling_from_logits(logits, k, p, **options)
        elif p is not None:
            token = sampling.top_p_sampling_from_probs(sampling.softmax(logits), p, **options)
        else:
            token = sampling.top_k_sampling_from_probs(sampling.softmax(logits), k, **options)
        return token  # type: ignore[no-any-return]

    return Contender("flashinfer", run, check)


def sampling_outcomes(
    run: GoalRun, shape: tuple[int, int], k: int | None, p: float | None
) -> dict[str, Outcome]:
    """A token a row at temperature 1, by us, by the same definition in torch, by FlashInfer."""
    rows = shape[0]

    def make(generator: torch.Generator) -> Buffers:
        logits = torch.empty(shape, device=run.device).normal_(generator=generator).mul_(3.0)
        new: dict[str, Any] = {"device": run.device}
        indices = (
            torch.ones(rows, **new),
            torch.arange(rows, **new),
            torch.full((rows,), 0 if k is None else k, dtype=torch.int32, **new),
            torch.ones(1, dtype=torch.int64, **new),
            torch.zeros(1, dtype=torch.int64, **new),
            torch.full((rows,), 1.0 if p is None else p, **new),
        )
        return Buffers((logits,), indices=indices)

    def ours(buffers: Buffers) -> Tensor:
        temperature, seed, ks, _, _, ps = buffers.indices
        return sample(
            buffers.inputs[0],
            temperature,
            seed,
            top_k=None if k is None else ks,
            top_p=None if p is None else ps,
        )

    def torchs(buffers: Buffers) -> Tensor:
        with use_provider("torch" if buffers.inputs[0].is_cuda else "reference"):
            return ours(buffers)

    check = _allowed(k, p)
    found = [Contender(MINE, ours, check), Contender("torch", torchs, check)]
    if isinstance(peer_status(["flashinfer"])["flashinfer"], Available):
        found.append(_flashinfer(k, p, check))
    reasons = {
        "torch.compile": "left out: the row torch is one operator to it, which stays as it is"
    }
    return measured(run, f"{shape[0]}x{shape[1]} k={k} p={p}", found, make, reasons=reasons)


@goal("cuda.sampling", provider="cuda", covers=_COVERS)
def sampling(run: GoalRun) -> Reading:
    """The least of our speeds over FlashInfer's, of the three cuts; the note holds all."""
    ratios, notes = {}, []
    for name, (k, p) in CUTS.items():
        rows = sampling_outcomes(run, _SHAPE, k, p)
        _, peer = run.best(rows, ["flashinfer"])
        mine = run.mine(rows, MINE)
        ratios[name] = speedup(mine, peer)
        notes.append(f"{name} {mine.median_us:.1f} us, flashinfer {peer.median_us:.1f} us")
    worst = ratios[min(ratios, key=lambda name: ratios[name].median)]
    return Reading(worst.median, worst.low, worst.high, note="; ".join(notes))


def top_k_outcomes(
    run: GoalRun, shape: tuple[int, int], k: int, ours: Callable[..., tuple[Tensor, Tensor]]
) -> dict[str, Outcome]:
    """The k largest of each row, sorted: ``ours``, torch's, and FlashInfer's radix selection."""

    def make(generator: torch.Generator) -> Buffers:
        return Buffers((torch.empty(shape, device=run.device).normal_(generator=generator),))

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x = buffers.inputs[0]
        values, indices = results
        expected = x.topk(k, dim=1).values
        return bitwise(values, expected) or bitwise(x.gather(1, indices.long()), expected)

    def torchs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, k, dim=1)
        return values, indices

    def on_input(name: str, function: Callable[..., Any]) -> Contender:
        return Contender(name, lambda buffers: tuple(function(buffers.inputs[0], k)), check)

    found = [
        on_input(MINE, ours),
        on_input("torch", torchs),
        *compiled_peers(lambda x: tuple(torch.topk(x, k, dim=1)), check),
    ]
    status = peer_status(["flashinfer"])["flashinfer"]
    if isinstance(status, Available):
        # Looked up when it runs, so that a release without it is a row with that reason.
        def select(x: Tensor, k: int) -> Any:
            return importlib.import_module("flashinfer").top_k(x, k, sorted=True)

        found.append(on_input(RADIX_SELECT, select))
    reasons = {
        "flashinfer": f"it is the row {RADIX_SELECT}",
        "quack": "its top-k takes rows of up to 4096 elements",
    }
    if isinstance(status, Absent):
        reasons[RADIX_SELECT] = status.reason
    return measured(run, f"{shape[0]}x{shape[1]} k={k}", found, make, reasons=reasons)


@goal("cuda.topk50", provider="cuda", covers=_COVERS)
def top_k_50(run: GoalRun) -> Reading:
    """Values and indices in descending order."""
    return reading(run, top_k_outcomes(run, _SHAPE, _K, top_k))
