"""Choosing the next token: greedy, and seeded sampling with temperature, top-k and top-p.

The noise is counter-based: a hash of (seed, vocabulary index) in 64-bit integers, the same on
every device, so a request's token depends on its own logits and seed only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_dim,
    require_dtype,
    require_same_device,
    require_shape,
)
from fusedops.errors import ConfigError, ShapeError
from fusedops.ops.op import Op, entry

__all__ = ["greedy", "sample"]


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that holds it: torch has no unsigned arithmetic."""
    return value - (1 << 64) if value >> 63 else value


# Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix64).
_GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_ROW_GAMMA = _signed(0xD1B54A32D192ED03)
"""Distance of the seeds of neighbouring rows under one shared seed; odd, so rows never collide."""

_PROBABILITY_ONE = 1 << 40
"""Fixed-point one of the top-p sum: integer sums do not depend on the order of addition."""


def _xor_shift_(z: Tensor, shift: int) -> Tensor:
    # int64 >> copies the sign bit in; the mask makes it the unsigned shift that the hash needs.
    return z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's finaliser in place, on int64 that wraps around."""
    _xor_shift_(z, 30).mul_(_MIX_1)
    _xor_shift_(z, 27).mul_(_MIX_2)
    return _xor_shift_(z, 31)


def _noise_bits(seed: Tensor, rows: int, index: Tensor) -> Tensor:
    """(rows, n) int64 in [0, 2^32): the top half of the hash of (row's seed, vocabulary index).

    ``index`` is (n,), or (rows, n) for other candidates in each row.
    """
    if seed.shape[0] != rows:
        seed = seed + torch.arange(rows, device=seed.device) * _ROW_GAMMA
    # Mixing the seed first keeps neighbouring seeds from giving shifted copies of one sequence.
    key = _mix_(seed + _GOLDEN_GAMMA)[:, None]
    return (_mix_(key + (index + 1) * _GOLDEN_GAMMA) >> 32).bitwise_and_(0xFFFFFFFF)


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from uniform 32-bit integers.

    The logarithms are float64: in float32 a uniform this close to 1 rounds to 1, whose noise is
    infinite, and devices would differ by an ulp.
    """
    uniform = (bits.double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().float()


def _check_logits(op: str, logits: Tensor) -> None:
    if logits.dtype not in ACTIVATION_DTYPES:
        require_dtype(op, "logits", logits, ACTIVATION_DTYPES)
    if logits.dim() != 2:
        require_dim(op, "logits", logits, 2, exactly=True)
    if logits.shape[1] == 0:
        raise ShapeError(f"{op}: logits is {describe(logits)}; it needs at least one column.")


def _check_greedy(logits: Tensor) -> None:
    _check_logits("greedy", logits)


def _greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _check_sample(
    logits: Tensor, temperature: Tensor, seed: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> None:
    op = "sample"
    _check_logits(op, logits)
    rows = logits.shape[0]
    require_dtype(op, "temperature", temperature, (torch.float32,))
    require_dtype(op, "seed", seed, (torch.int64,))
    require_shape(op, "temperature", temperature, [(rows,)], "one for each row of logits")
    require_shape(op, "seed", seed, [(rows,), (1,)], "one for each row of logits, or one for all")
    if top_k is not None:
        require_dtype(op, "top_k", top_k, (torch.int32,))
        require_shape(op, "top_k", top_k, [(rows,)], "one for each row of logits")
    if top_p is not None:
        require_dtype(op, "top_p", top_p, (torch.float32,))
        require_shape(op, "top_p", top_p, [(rows,)], "one for each row of logits")
    require_same_device(
        op, "logits", logits, temperature=temperature, seed=seed, top_k=top_k, top_p=top_p
    )


def _check_sample_values(
    logits: Tensor, temperature: Tensor, seed: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> None:
    for value in temperature.tolist():
        if not 0.0 <= value < float("inf"):
            raise ConfigError(
                f"sample: temperature holds {value}; accepted are finite values >= 0 (0: greedy)."
            )
    for k in [] if top_k is None else top_k.tolist():
        if k < 0:
            raise ConfigError(f"sample: top_k holds {k}; accepted are 0 (off) and above.")
    for p in [] if top_p is None else top_p.tolist():
        if not 0.0 < p <= 1.0:
            raise ConfigError(f"sample: top_p holds {p}; accepted are 0 < top_p <= 1 (1: off).")


def _sample(
    logits: Tensor, temperature: Tensor, seed: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    rows, vocabulary = logits.shape
    best, choice = logits.amax(-1, keepdim=True).float(), _greedy(logits)
    # Relative to the best, so that a tiny temperature gives -inf, never inf, beside it.
    scores = (logits.float() - best) / temperature[:, None]
    if top_k is None and top_p is None:
        index = torch.arange(vocabulary, device=logits.device)
        sampled = scores.add_(_gumbel(_noise_bits(seed, rows, index))).argmax(-1)
    else:
        ranked, order = _ranked(scores, top_k)
        allowed = _allowed(ranked, top_k, top_p)
        noise = _gumbel(_noise_bits(seed, rows, order))
        ranked = (ranked + noise).masked_fill_(~allowed, -torch.inf)
        sampled = order.gather(1, ranked.argmax(-1, keepdim=True))[:, 0]
    # A row whose best logit is NaN or infinite has no distribution: it takes the greedy token.
    random = (temperature > 0.0) & best[:, 0].isfinite()
    return torch.where(random, sampled, choice)


def _ranked(scores: Tensor, top_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores in descending order with their indices, the lower index first at a tie.

    On the CPU, where k may be looked at, only the k largest are sorted, which is several times
    quicker; all are where the k-th largest ties with one left out, since topk keeps either.
    """
    vocabulary = scores.shape[1]
    if top_k is not None and top_k.is_cpu and scores.shape[0]:
        smallest, largest = (int(k) for k in torch.aminmax(top_k))
        if smallest > 0 and largest < vocabulary:
            values, order = scores.topk(largest)
            if not (scores >= values[:, -1:]).sum(-1).gt(largest).any():
                order = order.sort(-1).values
                ranked, place = scores.gather(1, order).sort(dim=-1, descending=True, stable=True)
                return ranked, order.gather(1, place)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    return ranked, order


def _allowed(ranked: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """(B, V) bool over scores in descending order: True for those that may be drawn."""
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    allowed = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        limit = top_k[:, None]
        allowed &= (rank < limit) | (limit <= 0)
    if top_p is not None:
        weights = ranked.masked_fill(~allowed, -torch.inf).softmax(-1)
        fixed = (weights.double() * _PROBABILITY_ONE).long()
        before = fixed.cumsum(-1) - fixed
        limit = (top_p[:, None].double() * _PROBABILITY_ONE).long()
        allowed &= (before < limit) | (rank == 0) | (top_p[:, None] >= 1.0)
    return allowed


Op(
    "greedy(Tensor logits) -> Tensor",
    check=_check_greedy,
    fake=lambda logits: logits.new_empty((logits.shape[0],), dtype=torch.int64),
    reference=_greedy,
)
Op(
    "sample(Tensor logits, Tensor temperature, Tensor seed, Tensor? top_k, Tensor? top_p)"
    " -> Tensor",
    check=_check_sample,
    check_values=_check_sample_values,
    fake=lambda logits, *_rest: logits.new_empty((logits.shape[0],), dtype=torch.int64),
    reference=_sample,
)

_OP_GREEDY = entry("greedy")
_OP_SAMPLE = entry("sample")


def greedy(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row.

    The lowest index wins a tie. A NaN counts as the largest, and the first NaN wins, as in
    ``torch.argmax``.

    Args:
        logits: (B, V), float32, bfloat16 or float16, V >= 1.

    Returns:
        (B,) int64.

    Raises:
        ShapeError, DTypeError: logits is not as described.
        UnsupportedError: logits requires grad while grad mode is on.
    """
    token: Tensor = _OP_GREEDY(logits)
    return token


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Draw one token a row from ``softmax(logits / temperature)``, cut to top-k, then to top-p.

    Drawing adds Gumbel noise and takes the largest. The noise is a hash of (seed, index), so equal
    arguments give equal tokens, on every device and at every batch size; pass another seed for
    every step. Nothing synchronises on a GPU.

    Args:
        logits: (B, V), float32, bfloat16 or float16, V >= 1.
        temperature: (B,) float32, >= 0; 0 gives that row ``greedy``'s token.
        seed: int64; (B,): the noise depends on the seed and the index only, not on the row; (1,):
            one seed for all, from which each row takes its own noise (row 0 that of the seed).
        top_k: (B,) int32: draw from the k largest; at a tie the lower index is kept; 0 or above V:
            off. None: off for all.
        top_p: (B,) float32 in (0, 1]: draw from the fewest tokens, most likely first, whose
            probability reaches p (of what top-k left); 1: off. None: off for all.

    Returns:
        (B,) int64. A row with a NaN or +inf logit, or with nothing but -inf, gets ``greedy``'s
        token.

    Raises:
        ConfigError: a temperature, top_k or top_p is not as described, on the CPU. On a GPU a
            temperature that is not > 0 means greedy, top_k <= 0 off, top_p <= 0 the best token
            only, top_p >= 1 off.
        ShapeError, DTypeError, DeviceError: an argument is not as described.
        UnsupportedError: an input requires grad while grad mode is on.

    Sources: Gumbel-max: Maddison et al., "A* Sampling", 2014; top-p: Holtzman et al., "The Curious
    Case of Neural Text Degeneration", 2020.
    """
    token: Tensor = _OP_SAMPLE(logits, temperature, seed, top_k, top_p)
    return token
