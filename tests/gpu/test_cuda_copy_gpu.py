"""The plain copy kernel, and the launches that only change their addresses."""

from __future__ import annotations

import pytest
import torch

from fusedops.errors import DeviceError, LayoutError
from fusedops.jit.launch import cuda_module, device_arch
from fusedops.jit.probe import PROBE, PROBE_PARAMETERS
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_copy import UNROLLS, copy

COVERS = (
    "csrc/copy.cu",
    "csrc/include",
    "fusedops/jit/bound.py",
    "fusedops/jit/launch.py",
    "csrc/probe.cu",
    "fusedops/providers/cuda*.py",
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("unroll", UNROLLS)
def test_every_size_is_copied_and_nothing_beside_it(unroll: int) -> None:
    with use_provider("cuda") as usage:
        for count in (0, 4, 8, 1020, 1024, 4096, 1_000_004):
            x = torch.randn(count, device="cuda")
            whole = torch.full((count + 64,), 1234.0, device="cuda")
            copy(x, whole[32 : 32 + count], unroll)
            assert torch.equal(whole[32 : 32 + count], x)
            assert whole[:32].eq(1234).all()
            assert whole[32 + count :].eq(1234).all()
    assert usage.count("copy", "cuda") == 7


def test_what_cannot_be_copied_is_refused() -> None:
    x = torch.randn(64, device="cuda")
    for bad in (x[1:5], x[::2], x[:3], x[:32]):
        with pytest.raises(LayoutError, match="copy: "):
            copy(x, bad)
    with pytest.raises(DeviceError):
        copy(x, x.cpu())
    with pytest.raises(DeviceError, match="accepted are CUDA tensors"):
        copy(x.cpu(), x.cpu())


def test_a_bound_launch_takes_new_addresses_and_the_current_stream() -> None:
    kernel = cuda_module(PROBE, device_arch(0)).kernel(PROBE.kernels[0], PROBE_PARAMETERS)
    bound = kernel.bind(0, (4, 1, 1), (256, 1, 1), (3.0, 1024), pdl=True)
    stream = torch.cuda.Stream()
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(1024, device="cuda")
        out = torch.empty_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            bound(x.data_ptr(), out.data_ptr())
        stream.synchronize()
        assert torch.equal(out, x * 3.0)
