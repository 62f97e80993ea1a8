"""A plain copy: what the memory reads and writes at best, which benchmarks hold kernels against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.check import describe, require_same_device
from fusedops.errors import DeviceError, LayoutError
from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.nvrtc import CudaProgram
from fusedops.providers.base import current_policy
from fusedops.providers.cuda_base import NAME
from fusedops.providers.cuda_plan import THREADS, VECTOR_BYTES, ceil_div

__all__ = ["UNROLLS", "copy"]

UNROLLS = (1, 2, 4)
"""16-byte vectors a thread, for which the kernel is compiled."""

_PARAMETERS = ("pointer", "pointer", "int64")


def copy(x: Tensor, out: Tensor, unroll: int = UNROLLS[0]) -> None:
    """Copy ``x`` into ``out`` on torch's current stream.

    Args:
        x, out: contiguous CUDA tensors of one size in bytes, a multiple of 16, aligned to 16.
        unroll: of ``UNROLLS``.

    Raises:
        DeviceError: a tensor is not on the GPU, or they are on two.
        LayoutError: they are not as above.
    """
    require_same_device("copy", "x", x, out=out)
    if not x.is_cuda:
        raise DeviceError(f"copy: x is {describe(x)}; accepted are CUDA tensors.")
    for name, tensor in {"x": x, "out": out}.items():
        total = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or (tensor.data_ptr() | total) % VECTOR_BYTES:
            raise LayoutError(
                f"copy: {name} is {describe(tensor)} with strides {tuple(tensor.stride())}; it "
                "must be contiguous, and its address and size in bytes multiples of 16."
            )
    if x.numel() * x.element_size() != out.numel() * out.element_size():
        raise LayoutError(
            f"copy: x is {describe(x)} but out is {describe(out)}; both need one size in bytes."
        )
    count = x.numel() * x.element_size() // VECTOR_BYTES
    usage = current_policy().usage
    if usage is not None:
        usage.calls["copy", NAME] += 1
    if count == 0:
        return
    name = f"fusedops::copy<{unroll}>"
    module = cuda_module(CudaProgram("copy.cu", (name,)), device_arch(x.get_device()))
    blocks = ceil_div(count, THREADS * unroll)
    module.kernel(name, _PARAMETERS).launch(
        (blocks, 1, 1),
        (THREADS, 1, 1),
        [x, out, count],
        pdl=torch.cuda.get_device_capability(x.device) >= (9, 0),
    )
