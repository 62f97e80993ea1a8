"""Descriptions of tensors for the copy engine (TMA), from sm_90 on."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fusedops.errors import LaunchError

__all__ = ["tiled_map"]

_MAP_BYTES = 128


def tiled_map(x: Tensor, box: tuple[int, int]) -> Tensor:
    """A tensor map of a contiguous float32 matrix, in memory of its device.

    Args:
        x: (rows, columns), aligned to 16 bytes, its rows a multiple of 16 bytes.
        box: rows and columns of one copy; the columns are 32, the 128 bytes of the swizzle.

    Returns:
        (128,) uint8. Source: CUDA driver API, ``cuTensorMapEncodeTiled``.

    Raises:
        LaunchError: the driver refuses the description.
    """
    from cuda.bindings import driver

    rows, columns = x.shape
    # The innermost dimension comes first.
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        2,
        x.data_ptr(),
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns * x.element_size())],
        [driver.cuuint32_t(box[1]), driver.cuuint32_t(box[0])],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"cuTensorMapEncodeTiled of {tuple(x.shape)} in boxes of {box}: {status}")
    data = bytearray(ctypes.string_at(encoded.getPtr(), _MAP_BYTES))
    return torch.frombuffer(data, dtype=torch.uint8).to(x.device)
