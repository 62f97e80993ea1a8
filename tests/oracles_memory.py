"""Independent formulas for quantize, reduce and histogram: float64, one value at a time."""

from __future__ import annotations

import bisect
import itertools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

E4M3_NAN = 0x7F


def decoded_e4m3(code: int) -> float:
    """The value of an e4m3 byte, from its bit fields: 1 sign, 4 exponent (bias 7), 3 mantissa."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    sign = -1.0 if code & 0x80 else 1.0
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


E4M3_MAGNITUDES = [decoded_e4m3(code) for code in range(E4M3_NAN)]
"""The 127 finite magnitudes, ascending: the code is the index."""


def encoded_e4m3(value: float) -> int:
    """The nearest e4m3 byte, ties to the even code; saturates; NaN is 0x7f."""
    if math.isnan(value):
        return E4M3_NAN
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = min(abs(value), E4M3_MAGNITUDES[-1])
    above = bisect.bisect_left(E4M3_MAGNITUDES, magnitude)
    if E4M3_MAGNITUDES[above] == magnitude:
        return sign | above
    middle = (E4M3_MAGNITUDES[above - 1] + E4M3_MAGNITUDES[above]) / 2
    if magnitude == middle:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if magnitude > middle else above - 1)


def encoded_int8(value: float) -> int:
    """The nearest integer in +-127, ties to even; NaN is 0."""
    if math.isnan(value):
        return 0
    if abs(value) >= 127.0:
        return 127 if value > 0 else -127
    whole, rest = divmod(value, 1.0)
    up = rest > 0.5 or (rest == 0.5 and whole % 2 == 1)
    return int(whole) + up


def stored(value: float, scale: float, fmt: str) -> int:
    """The code stored for ``value`` under ``scale``; both steps rounded to float32."""
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / np.float32(scale)
        scaled = float(np.float32(value) * inverse)
    return encoded_e4m3(scaled) if fmt == "e4m3" else encoded_int8(scaled)


def scale_of(values: Floats, fmt: str) -> float:
    """The dynamic scale of the values that share it."""
    if np.isnan(values).any():
        return math.nan
    absmax = max((abs(v) for v in values.ravel()), default=0.0)
    if absmax == 0.0:
        return 1.0
    quotient = float(np.float32(absmax) / np.float32(448 if fmt == "e4m3" else 127))
    return max(quotient, 2.0**-126)


def sharing(rows: int, columns: int, granularity: str) -> list[tuple[slice, slice]]:
    """The parts of an (M, K) matrix that share a scale, in row-major order of the scale tensor."""
    if granularity == "tensor":
        return [(slice(0, rows), slice(0, columns))]
    if granularity == "token":
        return [(slice(r, r + 1), slice(0, columns)) for r in range(rows)]
    return [
        (slice(r, r + 1), slice(c, min(c + 128, columns)))
        for c, r in itertools.product(range(0, columns, 128), range(rows))
    ]


def quantized(x: Floats, fmt: str, granularity: str) -> tuple[npt.NDArray[np.int64], list[float]]:
    """Codes (M, K) and the scales in row-major order of their tensor."""
    codes = np.zeros(x.shape, dtype=np.int64)
    scales = []
    for part in sharing(*x.shape, granularity):
        scales.append(scale_of(x[part], fmt))
        codes[part] = [[stored(v, scales[-1], fmt) for v in row] for row in x[part]]
    return codes, scales


def reduced(values: list[float], op: str) -> float:
    """``op`` of a list of numbers in float64, sums exactly rounded."""
    if op in ("argmax", "argmin"):
        return position(values, largest=op == "argmax")
    if op in ("max", "min", "absmax"):
        if any(math.isnan(v) for v in values):
            return math.nan
        ordered = sorted(abs(v) if op == "absmax" else v for v in values)
        return ordered[0] if op == "min" else ordered[-1]
    if op == "any":
        return float(sum(v != 0 for v in values) > 0)
    if op == "all":
        return float(sum(v == 0 for v in values) == 0)
    if op == "logsumexp":
        total = -math.inf
        for v in values:
            total = float(np.logaddexp(total, v))
        return total
    total = math.fsum(v * v if op == "sumsq" else v for v in values)
    if op != "mean":
        return total
    return total / len(values) if values else math.nan


def position(values: list[float], *, largest: bool) -> int:
    """Index of the first extremum; the first NaN wins."""
    best = 0
    for index, value in enumerate(values):
        if math.isnan(value):
            return index
        if value > values[best] if largest else value < values[best]:
            best = index
    return best


def reduced_over(x: Floats, op: str, axes: tuple[int, ...]) -> Floats:
    """``op`` over ``axes`` of an array, the rest kept in order."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    shape = [x.shape[axis] for axis in kept]
    rows = x.transpose(*kept, *axes).reshape(math.prod(shape), -1 if x.size else 0)
    return np.array([reduced(row.tolist(), op) for row in rows]).reshape(shape)


def edges(lo: float, hi: float, bins: int, *, double: bool = False) -> list[float]:
    """The documented bin edges, computed with Python floats."""
    step = (hi - lo) / bins
    inner = [lo + i * step for i in range(bins)]
    return [*(inner if double else (float(np.float32(e)) for e in inner)), hi]


def histogram(
    samples: list[float], bins: int, lo: float, hi: float, *, double: bool = False
) -> list[int]:
    """Counts by walking the edges for each sample."""
    if not double:
        lo, hi = float(np.float32(lo)), float(np.float32(hi))
    borders = edges(lo, hi, bins, double=double)
    counts = [0] * bins
    for sample in samples:
        if sample == hi:
            counts[-1] += 1
            continue
        for index in range(bins):
            if borders[index] <= sample < borders[index + 1]:
                counts[index] += 1
    return counts


def by_expert(ids: list[int], n_experts: int) -> tuple[list[int], list[int], list[int]]:
    """Counts, exclusive offsets and the stable order of ids, strangers last."""
    places: dict[int, list[int]] = {expert: [] for expert in range(n_experts)}
    strangers = []
    for place, expert in enumerate(ids):
        places.get(expert, strangers).append(place)
    counts = [len(group) for group in places.values()]
    order = [place for group in places.values() for place in group] + strangers
    return counts, [0, *itertools.accumulate(counts)], order
