"""Quantized weights in float64, element by element, written apart from the library (numpy)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]


def floats(tensor: Tensor) -> Array:
    """A float64 copy of any tensor, exact."""
    return tensor.detach().to(torch.float64).numpy()


def nibbles_of(packed: Tensor, k: int) -> Array:
    """Column by column from the bytes of each row: even ones low, odd ones high."""
    data = packed.numpy()
    out = np.zeros((data.shape[0], k))
    for column in range(k):
        out[:, column] = (data[:, column // 2] >> (4 * (column % 2))) % 16
    return out


def int4_values(
    packed: Tensor, k: int, group: int, scale: Tensor, zero: Tensor | None = None
) -> Array:
    """What int4 rows stand for; scale and zero are (groups, N)."""
    q, scales = nibbles_of(packed, k), floats(scale)
    out = np.empty_like(q)
    for column in range(k):
        g = column // group if group else 0
        offset = 8.0 if zero is None else floats(zero)[g]
        out[:, column] = (q[:, column] - offset) * scales[g]
    return out


def grouped_values(stored: Tensor, group: int, scale: Tensor) -> Array:
    """What int8 or e4m3 values with scales (groups, N) stand for."""
    q, scales = floats(stored), floats(scale)
    columns = [q[:, c] * scales[c // group if group else 0] for c in range(q.shape[1])]
    return np.stack(columns, 1) if columns else q


def block_values(stored: Tensor, scale: Tensor, gate_up: bool = False) -> Array:
    """What e4m3 values with scales of 128 x 128 blocks stand for."""
    q, scales = floats(stored), floats(scale)
    out = np.empty_like(q)
    for row in range(q.shape[0]):
        if gate_up:  # gate and up rows alternate in eights; each half has blocks of its own
            half, source = (row // 8) % 2, 8 * (row // 16) + row % 8
            block = 2 * (source // 128) + half
        else:
            block = row // 128
        for column in range(q.shape[1]):
            out[row, column] = q[row, column] * scales[block, column // 128]
    return out


def group_values_of_x(q: Tensor, scale: Tensor) -> Array:
    """What 1 x 128 quantized activations (M, K) with scales (ceil(K/128), M) stand for."""
    return grouped_values(q, 128, scale)
