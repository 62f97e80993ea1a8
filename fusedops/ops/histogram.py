"""``histogram``, ``bincount`` and ``expert_histogram``: exact int64 counts.

Counts are sums of integers, so no order of additions changes them. The bin of a float follows from
comparisons with a table of edges alone, so every device finds the same bin, however it guesses
where to look first.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES, describe, describe_value, require_dtype
from fusedops.errors import ConfigError
from fusedops.ops.op import Op, entry

__all__ = [
    "HISTOGRAM_DTYPES",
    "INDEX_DTYPES",
    "MAX_BINS",
    "bin_edges",
    "bincount",
    "expert_histogram",
    "histogram",
    "resolve_range",
]

MAX_BINS = 1 << 20
"""The most bins (or experts) one call counts."""

HISTOGRAM_DTYPES = (*ACTIVATION_DTYPES, torch.float64)
"""Dtypes of the samples of ``histogram``."""

INDEX_DTYPES = (torch.int64, torch.int32, torch.uint8)
"""Dtypes of the values of ``bincount`` and of expert ids."""

# The temporaries of a chunk take about 100 MB, whatever the size of the input.
_CHUNK_ELEMENTS = 1 << 22


def histogram(
    x: Tensor, bins: int, *, range: tuple[float, float] | Sequence[float] | None = None
) -> Tensor:
    """Count samples in ``bins`` bins of equal width.

    Args:
        x: samples, any shape and strides; float32, bfloat16, float16 or float64.
        bins: number of bins, 1 to 2**20.
        range: (lo, hi), finite, lo < hi. None takes the smallest and the largest sample; equal
            ones widen by 0.5 on each side, and no samples give (0, 1). None reads the data: on a
            GPU it synchronises, and a CUDA graph capture refuses it.

    Returns:
        int64 (bins,). Bin i holds the samples with edge[i] <= sample < edge[i + 1], the last bin
        also those that equal hi. NaN and samples outside [lo, hi] are not counted.

    The edges: lo and hi are rounded to float32 (float64 samples: kept), step = (hi - lo) / bins in
    float64, edge[i] = lo + i * step in float64 with both operations rounded (no fused
    multiply-add), then rounded to float32 (float64 samples: kept); edge[bins] = hi. Samples of 16
    bits compare as float32, which holds them exactly. The result is the same on every device.

    Raises:
        ConfigError: ``bins`` or ``range`` is not legal; ``range`` is None and the data hold NaN or
            an infinity, or a capture is under way.
        DTypeError: ``x`` has another dtype.
        UnsupportedError: ``x`` requires grad while grad mode is on.
    """
    ends = None if range is None else _ends(range)
    result: Tensor = _OP_HISTOGRAM(x, bins, ends)
    return result


def _ends(range: Sequence[float]) -> list[float]:
    try:
        ends = [None if isinstance(end, bool) else float(end) for end in range]
    except (TypeError, ValueError):
        ends = [None]
    numbers = [end for end in ends if end is not None]
    if len(numbers) < len(ends):
        raise ConfigError(
            f"histogram: range is {describe_value(range)}; accepted: two numbers (lo, hi), or None."
        )
    return numbers


def bincount(x: Tensor, bins: int) -> Tensor:
    """Count how often each of 0, 1, ..., bins - 1 occurs.

    Args:
        x: any shape and strides; int64, int32 or uint8. Values outside [0, bins) are not counted.
        bins: number of bins, 1 to 2**20.

    Returns:
        int64 (bins,).

    Raises:
        ConfigError: ``bins`` is not legal.
        DTypeError: ``x`` has another dtype.
    """
    result: Tensor = _OP_BINCOUNT(x, bins)
    return result


def expert_histogram(expert_ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort tokens by expert: the bookkeeping before a grouped GEMM of a mixture of experts.

    Args:
        expert_ids: T ids in any shape (flattened in row-major order); int64, int32 or uint8.
        n_experts: E, 1 to 2**20.

    Returns:
        counts: int64 (E,), ids equal to each expert.
        offsets: int64 (E + 1,), the exclusive prefix sums of ``counts``; offsets[E] is the number
            of ids counted.
        permutation: int64 (T,). permutation[offsets[e]:offsets[e + 1]] are the positions of the
            ids equal to e, ascending. Ids outside [0, E) are not counted; their positions come
            last, ascending, from offsets[E] on.

    Raises:
        ConfigError: ``n_experts`` is not legal.
        DTypeError: ``expert_ids`` has another dtype.
    """
    result: tuple[Tensor, Tensor, Tensor] = _OP_EXPERT_HISTOGRAM(expert_ids, n_experts)
    return result


def resolve_range(x: Tensor, range: Sequence[float] | None) -> tuple[float, float]:
    """The ends of the histogram, rounded as samples of ``x`` compare; reads ``x`` where None.

    Raises:
        ConfigError: see ``histogram``.
    """
    if range is not None:
        lo, hi = range
        return _rounded(lo, x.dtype), _rounded(hi, x.dtype)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "histogram: range=None reads the data, which a CUDA graph capture cannot do; pass "
            "range=(lo, hi)."
        )
    if x.numel() == 0:
        return 0.0, 1.0
    lo, hi = torch.stack(torch.aminmax(x)).tolist()  # one synchronisation, not two
    if not math.isfinite(lo) or not math.isfinite(hi):
        raise ConfigError(
            f"histogram: x is {describe(x)} and holds NaN or an infinity, so range=None finds no "
            "range; pass range=(lo, hi)."
        )
    if lo == hi:
        lo, hi = _rounded(lo - 0.5, x.dtype), _rounded(hi + 0.5, x.dtype)
    if not math.isfinite(hi - lo):
        raise ConfigError(
            f"histogram: the samples reach from {lo} to {hi}, wider than the largest float64; "
            "scale x down or pass range=(lo, hi)."
        )
    return lo, hi


def bin_edges(lo: float, hi: float, bins: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The (bins + 1,) edges that ``histogram`` documents, for samples of ``dtype``; ascending.

    They are float32, or float64 for float64 samples. No host data is copied to the device, so a
    CUDA graph capture may record it.
    """
    step = (hi - lo) / bins
    edges = torch.arange(bins + 1, dtype=torch.float64, device=device).mul_(step).add_(lo)
    edges[-1].fill_(hi)
    return edges.to(_comparison_dtype(dtype))


def _comparison_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(value: float, dtype: torch.dtype) -> float:
    return value if dtype == torch.float64 else ctypes.c_float(value).value


def _require_bins(op: str, name: str, bins: int) -> None:
    if not 1 <= bins <= MAX_BINS:
        raise ConfigError(f"{op}: {name}={bins}; accepted are 1 to {MAX_BINS}.")


def _check_histogram(x: Tensor, bins: int, range: list[float] | None) -> None:
    require_dtype("histogram", "x", x, HISTOGRAM_DTYPES)
    _require_bins("histogram", "bins", bins)
    if range is None:
        return
    if len(range) != 2:
        raise ConfigError(f"histogram: range={tuple(range)}; it needs two ends, (lo, hi).")
    lo, hi = (_rounded(end, x.dtype) for end in range)
    # A finite difference implies finite ends.
    if not math.isfinite(hi - lo) or lo >= hi:
        name = str(_comparison_dtype(x.dtype)).removeprefix("torch.")
        raise ConfigError(
            f"histogram: range={tuple(range)}; in {name}, lo, hi and hi - lo must be finite and lo "
            "below hi."
        )


def _check_bincount(x: Tensor, bins: int) -> None:
    require_dtype("bincount", "x", x, INDEX_DTYPES)
    _require_bins("bincount", "bins", bins)


def _check_expert_histogram(expert_ids: Tensor, n_experts: int) -> None:
    require_dtype("expert_histogram", "expert_ids", expert_ids, INDEX_DTYPES)
    _require_bins("expert_histogram", "n_experts", n_experts)


def _chunks(x: Tensor) -> Iterator[Tensor]:
    yield from torch.split(x.reshape(-1), _CHUNK_ELEMENTS)


def _count(indices: Iterator[Tensor], bins: int, device: torch.device) -> Tensor:
    """Count int64 indices in [0, bins]; index ``bins`` marks what is not to be counted.

    ``torch.bincount`` would synchronise on a GPU; additions into a tensor of fixed size do not.
    """
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=device)
    one = torch.ones((), dtype=torch.int64, device=device)
    for index in indices:
        counts.scatter_add_(0, index, one.expand_as(index))
    return counts[:bins].clone()


def _index_or_none(values: Tensor, bins: int) -> Tensor:
    """``values`` as int64, ``bins`` in place of those outside [0, bins)."""
    index = values.to(torch.int64)
    return index.masked_fill((index < 0) | (index >= bins), bins)


def _histogram_reference(x: Tensor, bins: int, range: list[float] | None) -> Tensor:
    lo, hi = resolve_range(x, range)
    edges = bin_edges(lo, hi, bins, x.dtype, x.device)

    def bin_of(chunk: Tensor) -> Tensor:
        samples = chunk.to(edges.dtype)
        index = torch.bucketize(samples, edges, right=True).sub_(1).clamp_(max=bins - 1)
        inside = (samples >= lo) & (samples <= hi)
        return index.masked_fill_(inside.logical_not_(), bins)

    return _count(map(bin_of, _chunks(x)), bins, x.device)


def _bincount_reference(x: Tensor, bins: int) -> Tensor:
    indices = (_index_or_none(chunk, bins) for chunk in _chunks(x))
    return _count(indices, bins, x.device)


def _expert_histogram_reference(
    expert_ids: Tensor, n_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    keys = _index_or_none(expert_ids.reshape(-1), n_experts)
    counts = _count(iter((keys,)), n_experts, keys.device)
    offsets = torch.zeros(n_experts + 1, dtype=torch.int64, device=keys.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return counts, offsets, keys.argsort(stable=True)


def _count_fake(x: Tensor, bins: int, range: list[float] | None = None) -> Tensor:
    return x.new_empty((bins,), dtype=torch.int64)


def _expert_histogram_fake(expert_ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (n_experts, n_experts + 1, expert_ids.numel())
    counts, offsets, permutation = (
        expert_ids.new_empty((size,), dtype=torch.int64) for size in sizes
    )
    return counts, offsets, permutation


Op(
    "histogram(Tensor x, int bins, float[]? range) -> Tensor",
    check=_check_histogram,
    fake=_count_fake,
    reference=_histogram_reference,
)

Op(
    "bincount(Tensor x, int bins) -> Tensor",
    check=_check_bincount,
    fake=_count_fake,
    reference=_bincount_reference,
)

Op(
    "expert_histogram(Tensor expert_ids, int n_experts) -> (Tensor, Tensor, Tensor)",
    check=_check_expert_histogram,
    fake=_expert_histogram_fake,
    reference=_expert_histogram_reference,
)

_OP_HISTOGRAM = entry("histogram")
_OP_BINCOUNT = entry("bincount")
_OP_EXPERT_HISTOGRAM = entry("expert_histogram")
