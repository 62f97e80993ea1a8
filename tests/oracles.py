"""Independent formulas of norms, activations, rope, attention and sampling in float64.

They are written element by element or with other mathematics (complex numbers, Python integers)
than the operations, so that a shared mistake is unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]

_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_SMALLEST_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}


def floats(tensor: Tensor) -> Floats:
    """A tensor's values as float64."""
    return tensor.detach().cpu().to(torch.float64).numpy()


def rounded(values: Floats, dtype: torch.dtype) -> Floats:
    """Values rounded to ``dtype``, half to even; no overflow is expected."""
    spacing = ulp(values, dtype)
    return np.rint(values / spacing) * spacing


def ulp(values: Floats, dtype: torch.dtype) -> Floats:
    """Distance between neighbours of ``dtype`` around each value."""
    _, exponent = np.frexp(np.abs(values))
    exponent = np.maximum(exponent - 1, _SMALLEST_EXPONENT[dtype])
    return np.ldexp(1.0, exponent - _MANTISSA_BITS[dtype])


def ulps_off(actual: Tensor, expected: Floats, floor: float = 0.0) -> float:
    """The largest distance of ``actual`` from ``expected`` in ulps of ``actual``'s dtype.

    ``floor`` is the magnitude below which an ulp is not taken to shrink any further, for results
    of a sum whose terms cancel.
    """
    if actual.numel() == 0:
        return 0.0
    spacing = ulp(np.maximum(np.abs(expected), floor), actual.dtype)
    return float(np.max(np.abs(floats(actual) - expected) / spacing))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_before_weight: bool = False
) -> Floats:
    """RMSNorm over the last dimension; Llama's first rounding where asked for, never the last."""
    values = floats(x)
    mean_square = np.einsum("...h,...h->...", values, values) / values.shape[-1]
    normalised = values / np.sqrt(mean_square + eps)[..., None]
    if round_before_weight:
        normalised = rounded(normalised, x.dtype)
    return normalised * (floats(weight) + offset)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Floats:
    """LayerNorm over the last dimension."""
    values = floats(x)
    size = values.shape[-1]
    mean = values.sum(-1, keepdims=True) / size
    variance = (values * values).sum(-1, keepdims=True) / size - mean * mean
    y = (values - mean) / np.sqrt(variance + eps)
    if weight is not None:
        y = y * floats(weight)
    return y if bias is None else y + floats(bias)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else 1.0 - 1.0 / (1.0 + math.exp(x))


def _gelu_tanh(x: float) -> float:
    return x / (1.0 + math.exp(-2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2.0)),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu2": lambda x: x * x if x > 0 else 0.0,
    "sigmoid": _sigmoid,
}
"""Each activation of one number."""


def activation(name: str, values: Floats) -> Floats:
    """An activation of every value."""
    formula = ACTIVATIONS[name]
    flat = [formula(value) for value in values.ravel().tolist()]
    return np.array(flat, dtype=np.float64).reshape(values.shape)


def act_and_mul(x: Tensor, name: str) -> Floats:
    """act(gate) rounded to the dtype, times up; the product is not rounded."""
    values = floats(x)
    half = values.shape[-1] // 2
    gate = rounded(activation(name, values[..., :half]), x.dtype)
    return gate * values[..., half:]


def rope(x: Tensor, positions: Sequence[int], frequencies: Sequence[float], style: str) -> Floats:
    """Each pair of a head as one complex number, turned by exp(i * position * frequency)."""
    values = floats(x)
    out = values.copy()
    half = len(frequencies)
    for token, position in enumerate(positions):
        turn = np.array(
            [complex(math.cos(position * f), math.sin(position * f)) for f in frequencies]
        )
        if style == "halves":
            real, imag = slice(0, half), slice(half, 2 * half)
        else:
            real, imag = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        turned = (values[token, :, real] + 1j * values[token, :, imag]) * turn
        out[token, :, real] = turned.real
        out[token, :, imag] = turned.imag
    return out


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> Floats:
    """One request: (n, Hq, D) queries over (L, Hkv, D) keys; the last query sits at L - 1."""
    queries, query_heads, _ = q.shape
    length, heads, _ = k.shape
    out = np.zeros_like(q)
    for j in range(queries):
        own = length - queries + j
        low = max(0, own - window + 1) if window else 0
        high = own + 1 if causal else length
        for head in range(query_heads):
            kv = head // (query_heads // heads)
            scores = [scale * math.fsum(q[j, head] * k[key, kv]) for key in range(low, high)]
            if softcap:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            top = max(scores, default=0.0)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum(weights)
            for key, weight in zip(range(low, high), weights, strict=True):
                out[j, head] += weight / total * v[key, kv]
    return out


@dataclass(frozen=True)
class PagedBatch:
    """Requests in a paged cache whose unused slots hold garbage.

    Attributes:
        q: (T, Hq, D).
        k_cache, v_cache: in ``layout``.
        block_table: pages at random places of the pool, garbage behind the used ones.
        seq_lens: KV lengths.
        counts: queries of each request; T is their sum.
        keys, values: the same, dense: (L, Hkv, D) of each request.
        layout: of the caches.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    counts: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    layout: str

    @property
    def query_start(self) -> Tensor:
        return torch.tensor([0, *np.cumsum(self.counts)], dtype=torch.int32)


def paged_batch(
    lengths: list[int],
    counts: list[int] | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    garbage: float = math.nan,
    in_order: bool = False,
    seed: int = 0,
) -> PagedBatch:
    """Random tokens, stored page by page in a pool otherwise full of ``garbage``."""
    generator = torch.Generator().manual_seed(seed)
    counts = [1] * len(lengths) if counts is None else counts

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query_heads, kv_heads = heads
    needed = [-(-length // page_size) for length in lengths]
    width = max(needed, default=0) + 2
    pages = sum(needed) + 3
    order = torch.randperm(pages, generator=generator).tolist()
    order = list(range(pages)) if in_order else order
    shape = (pages, page_size, kv_heads, head_dim)
    pools = [torch.full(shape, garbage, dtype=dtype) for _ in range(2)]
    block_table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    block_table[:, -1] = -1
    dense: tuple[list[Tensor], list[Tensor]] = ([], [])
    for request, length in enumerate(lengths):
        for page in range(needed[request]):
            block_table[request, page] = order.pop(0)
        for pool, kept in zip(pools, dense, strict=True):
            new = normal(length, kv_heads, head_dim)
            kept.append(new)
            for position in range(length):
                page = int(block_table[request, position // page_size])
                pool[page, position % page_size] = new[position]
    if layout == "HND":
        pools = [pool.transpose(1, 2).contiguous() for pool in pools]
    q = normal(sum(counts), query_heads, head_dim)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return PagedBatch(q, pools[0], pools[1], block_table, seq_lens, counts, *dense, layout)


def paged_attention(batch: PagedBatch, **options: Any) -> Floats:
    """Each request by the naive float64 formula, from the dense keys and values."""
    options.setdefault("scale", batch.q.shape[-1] ** -0.5)
    out = np.zeros(tuple(batch.q.shape))
    start = 0
    for count, keys, values in zip(batch.counts, batch.keys, batch.values, strict=True):
        rows = slice(start, start + count)
        if len(keys):
            q, k, v = (floats(t) for t in (batch.q[rows], keys, values))
            out[rows] = attention(q, k, v, **options)
        start += count
    return out


_WORD = (1 << 64) - 1


def split_mix(word: int) -> int:
    """SplitMix64's output function on an unsigned 64-bit integer."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def noise_bits(seed: int, index: int) -> int:
    """The 32 random bits of one vocabulary index under one row's seed."""
    key = split_mix((seed + 0x9E3779B97F4A7C15) & _WORD)
    return split_mix((key + (index + 1) * 0x9E3779B97F4A7C15) & _WORD) >> 32


def row_seed(seed: int, row: int) -> int:
    """The seed of a row under one seed shared by all rows."""
    return (seed + row * 0xD1B54A32D192ED03) & _WORD


def gumbel(seed: int, vocabulary: int) -> Floats:
    """Standard Gumbel noise of every vocabulary index."""
    uniform = [(noise_bits(seed, index) + 0.5) / 2.0**32 for index in range(vocabulary)]
    return np.array([-math.log(-math.log(u)) for u in uniform])


def nucleus(logits: Floats, top_k: int, top_p: float) -> list[int]:
    """Indices that top-k, then top-p leave of one row, the most likely first."""
    order = sorted(range(len(logits)), key=lambda index: (-logits[index], index))
    order = order[:top_k] if top_k > 0 else order
    weights = [math.exp(logits[index] - logits[order[0]]) for index in order]
    total = math.fsum(weights)
    kept, mass = [], 0.0
    for index, weight in zip(order, weights, strict=True):
        if kept and mass >= top_p * total:
            break
        kept.append(index)
        mass += weight
    return kept
