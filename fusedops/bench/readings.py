"""The slowest readings of known contenders: what a sane run on the same GPU does not exceed.

A GPU whose best cuBLAS product is over ``TOLERANCE`` slower than the slowest reading here was
hampered (clocks, another process), so a row that cuBLAS lost proves nothing. Only rows up to
M = 128 are held to it. Beyond about 190 rows wgmma binds a product, whose clocks the power limit
sets: F.linear with 512 rows of lm_head took 730 to 940 us. There ratios within one run count.
"""

from __future__ import annotations

from fusedops.bench.measurement import Measurement

__all__ = ["TOLERANCE", "void_reason"]

TOLERANCE = 0.10

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
        },
        (4096, 4096): {
            1: 13.9,
            8: 13.9,
            16: 13.8,
            32: 14.2,
            64: 12.3,
            128: 14.2,
        },
        (28672, 4096): {
            1: 57.1,
            8: 57.9,
            16: 62.0,
            32: 59.0,
            64: 62.3,
            128: 68.0,
        },
        (4096, 14336): {
            1: 33.1,
            8: 33.6,
            16: 34.1,
            32: 35.0,
            64: 39.2,
            128: 40.6,
        },
        (128256, 4096): {
            1: 239.4,
            8: 242.8,
            16: 245.6,
            32: 258.1,
            64: 275.2,
            128: 267.5,
        },
    }
}


def void_reason(gpu: str, M: int, N: int, K: int, best: Measurement) -> str | None:
    """Why a row's bare bf16 product by cuBLAS cannot be trusted, or None.

    Args:
        gpu: torch's name of the device.
        M: rows of x.
        N: rows of the weight.
        K: columns of the weight.
        best: the fastest of cuBLAS's times in this run.
    """
    slowest = _LINEAR_BF16_US.get(gpu, {}).get((N, K), {}).get(M)
    if slowest is None or best.median_us <= slowest * (1 + TOLERANCE):
        return None
    return (
        f"cuBLAS took {best.median_us:.1f} us at M={M}, over {TOLERANCE:.0%} slower than its "
        f"slowest reading of {slowest:.1f} us on {gpu}: the row is void until that is explained"
    )
