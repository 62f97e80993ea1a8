"""What the driver says of a kernel: registers, blocks a multiprocessor, clusters at once.

Source: CUDA Driver API, "Occupancy" and ``CUfunction_attribute``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusedops.errors import LaunchError
from fusedops.jit.launch import CudaKernel

__all__ = [
    "blocks_per_sm",
    "carve_out",
    "clusters_at_once",
    "local_bytes",
    "registers",
    "warps_per_sm",
]

_PORTABLE_BLOCKS = 8


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(name: str, kernel: CudaKernel, answer: tuple[Any, ...]) -> int:
    """The number in an answer of the driver.

    Raises:
        LaunchError: the driver refused the question.
    """
    status, *values = answer
    if int(status) != 0:
        raise LaunchError(f"{name} of {kernel.name}: {status}")
    return int(values[0]) if values else 0


def _function(kernel: CudaKernel, device: torch.device) -> Any:
    return _driver().CUfunction(kernel.function(device.index or 0))


def _attribute(kernel: CudaKernel, device: torch.device, name: str) -> int:
    api = _driver()
    attribute = getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    answer = api.cuFuncGetAttribute(attribute, _function(kernel, device))
    return _checked("cuFuncGetAttribute", kernel, answer)


def _set_attribute(kernel: CudaKernel, device: torch.device, name: str, value: int) -> None:
    api = _driver()
    attribute = getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    answer = api.cuFuncSetAttribute(_function(kernel, device), attribute, value)
    _checked("cuFuncSetAttribute", kernel, answer)


def registers(kernel: CudaKernel, device: torch.device) -> int:
    """Registers a thread."""
    return _attribute(kernel, device, "NUM_REGS")


def local_bytes(kernel: CudaKernel, device: torch.device) -> int:
    """Local memory a thread, which is where registers spill to."""
    return _attribute(kernel, device, "LOCAL_SIZE_BYTES")


def warps_per_sm(device: torch.device) -> int:
    """Warps that a multiprocessor holds at most."""
    threads: int = torch.cuda.get_device_properties(device).max_threads_per_multi_processor
    return threads // 32


def _allow(kernel: CudaKernel, device: torch.device, shared_bytes: int) -> None:
    # Only ever raised: the kernel remembers what its launches were allowed.
    name = "MAX_DYNAMIC_SHARED_SIZE_BYTES"
    if _attribute(kernel, device, name) < shared_bytes:
        _set_attribute(kernel, device, name, shared_bytes)


def blocks_per_sm(kernel: CudaKernel, device: torch.device, threads: int, shared_bytes: int) -> int:
    """Blocks that a multiprocessor holds at once.

    Args:
        threads: a block.
        shared_bytes: dynamic, a block.

    Raises:
        LaunchError: no device holds such a block.
    """
    _allow(kernel, device, shared_bytes)
    answer = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        _function(kernel, device), threads, shared_bytes
    )
    return _checked("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, answer)


def clusters_at_once(
    kernel: CudaKernel, device: torch.device, threads: int, shared_bytes: int, blocks: int
) -> int:
    """Clusters of ``blocks`` blocks that the device runs at once.

    Raises:
        LaunchError: the device has no clusters of that size.
    """
    api = _driver()
    _allow(kernel, device, shared_bytes)
    if blocks > _PORTABLE_BLOCKS:
        _set_attribute(kernel, device, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
    attribute = api.CUlaunchAttribute()
    attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = blocks
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    answer = api.cuOccupancyMaxActiveClusters(_function(kernel, device), config)
    return _checked("cuOccupancyMaxActiveClusters", kernel, answer)


@contextmanager
def carve_out(kernel: CudaKernel, device: torch.device, percent: int) -> Iterator[None]:
    """Within the block the kernel prefers ``percent`` of the most shared memory; the rest is L1."""
    _set_attribute(kernel, device, "PREFERRED_SHARED_MEMORY_CARVEOUT", percent)
    try:
        yield
    finally:
        _set_attribute(kernel, device, "PREFERRED_SHARED_MEMORY_CARVEOUT", -1)
