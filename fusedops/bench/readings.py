"""The slowest readings of known contenders: what a sane run on the same GPU does not exceed.

A contender that is over ``TOLERANCE`` slower than its slowest reading here was hampered (clocks,
another process, a wrong algorithm), so a row that it lost proves nothing. Only rows up to
``MAX_M`` are held to it: above that the moment's clocks decide, and ratios within one run count.
"""

from __future__ import annotations

from fusedops.bench.measurement import Measurement

__all__ = ["MAX_M", "TOLERANCE", "void_reason"]

TOLERANCE = 0.10
MAX_M = 512

# F.linear in bf16, (N, K) -> M -> microseconds; CUDA-graph replay, weights rotated past the L2.
_LINEAR_BF16_US: dict[str, dict[tuple[int, int], dict[int, float]]] = {
    "NVIDIA H200": {
        (6144, 4096): {
            1: 16.5,
            8: 16.6,
            16: 16.8,
            32: 17.2,
            64: 16.7,
            128: 17.1,
            256: 21.7,
            512: 35.8,
        },
        (4096, 4096): {
            1: 13.9,
            8: 13.9,
            16: 13.8,
            32: 14.2,
            64: 12.3,
            128: 14.2,
            256: 18.8,
            512: 24.5,
        },
        (28672, 4096): {
            1: 57.1,
            8: 57.9,
            16: 62.0,
            32: 59.0,
            64: 62.3,
            128: 68.0,
            256: 93.5,
            512: 155.1,
        },
        (4096, 14336): {
            1: 33.1,
            8: 33.6,
            16: 34.1,
            32: 35.0,
            64: 39.2,
            128: 40.6,
            256: 58.4,
            512: 93.7,
        },
        (128256, 4096): {
            1: 239.4,
            8: 242.8,
            16: 245.6,
            32: 258.1,
            64: 275.2,
            128: 267.5,
            256: 366.5,
            512: 730.1,
        },
    }
}


def void_reason(gpu: str, M: int, N: int, K: int, linear: Measurement) -> str | None:
    """Why a row's bare bf16 ``F.linear`` cannot be trusted, or None.

    Args:
        gpu: torch's name of the device.
        M: rows of x; above ``MAX_M`` nothing is judged.
        N: rows of the weight.
        K: columns of the weight.
        linear: the bare product's time in this run.
    """
    slowest = _LINEAR_BF16_US.get(gpu, {}).get((N, K), {}).get(M)
    if slowest is None or M > MAX_M or linear.median_us <= slowest * (1 + TOLERANCE):
        return None
    return (
        f"F.linear took {linear.median_us:.1f} us at M={M}, over {TOLERANCE:.0%} slower than its "
        f"slowest reading of {slowest:.1f} us on {gpu}: the row is void until that is explained"
    )
