"""The provider ``cuda`` without a GPU: registration, answers, cached plans and bound launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_store_launch import FUNCTION, LAYOUT, PARAMETERS, FakeCuda, OnGpu, cuda, kernel, module

from fusedops.errors import ConfigError, DeviceError, LaunchError, LayoutError, UnsupportedError
from fusedops.jit.launch import CudaKernel
from fusedops.jit.nvrtc import CudaProgram
from fusedops.ops.op import OPS
from fusedops.ops.reduce import reduce
from fusedops.ops.transpose import transpose
from fusedops.providers import cuda_base
from fusedops.providers.base import use_provider
from fusedops.providers.cuda_base import CudaOp
from fusedops.providers.cuda_copy import copy
from fusedops.providers.cuda_plan import OUT, WORK, Gpu, Launch, Plan, View, X

__all__ = ["cuda", "kernel", "module"]


# Bound launches


def test_a_bound_launch_changes_its_addresses_and_nothing_else(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    cuda.layout = [(0, 8), (8, 8), (16, 4), (24, 8)]
    two = CudaKernel(kernel._module, "k", "_Z1k", ("pointer", "pointer", "int32", "int64"))
    bound = two.bind(0, (7, 3, 1), (64, 1, 1), (-5, 2**40), shared_bytes=65536, pdl=True)
    for addresses in ((0x1000, 0x2000), (0x3000, 0x4000)):
        bound(*addresses)
    first, second = cuda.launches
    assert first["grid"] == second["grid"] == (7, 3, 1)
    assert (first["function"], first["stream"], first["shared_bytes"]) == (FUNCTION, 0x77, 65536)
    assert [int.from_bytes(value, "little") for value in second["values"]] == [
        *(0x3000, 0x4000, 2**32 - 5, 2**40)
    ]
    assert first["attributes"][0][0] == 6
    assert cuda.count("cuFuncSetAttribute") == 1


def test_two_bound_launches_do_not_share_their_values(cuda: FakeCuda, kernel: CudaKernel) -> None:
    cuda.layout = [(0, 8), (8, 8)]
    one = CudaKernel(kernel._module, "k", "_Z1k", ("pointer", "int64"))
    bound = [one.bind(0, (n, 1, 1), (32, 1, 1), (n,)) for n in (1, 2)]
    for n in (0, 1, 0):
        bound[n](0x100 * (n + 1))
    assert [launch["grid"][0] for launch in cuda.launches] == [1, 2, 1]
    assert [launch["values"][1][0] for launch in cuda.launches] == [1, 2, 1]


def test_what_stands_before_the_constants_must_be_pointers(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    assert PARAMETERS[1] != "pointer"
    for constants in ((1, 2), (0,) * (len(LAYOUT) + 1)):
        with pytest.raises(ConfigError, match="must be pointers"):
            kernel.bind(0, (1, 1, 1), (1, 1, 1), constants)


def test_a_refused_bound_launch_tells_its_plan(cuda: FakeCuda, kernel: CudaKernel) -> None:
    cuda.layout = [(0, 8)]
    one = CudaKernel(kernel._module, "k", "_Z1k", ("pointer",))
    bound = one.bind(0, (9, 1, 1), (32, 1, 1), ())
    cuda.statuses["cuLaunchKernelEx"] = [1]
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_TEST.*grid=\(9, 1, 1\)"):
        bound(0x10)
    # A thread without a context gets the one that torch uses.
    cuda.statuses["cuLaunchKernelEx"] = [201]
    bound(0x20)
    assert cuda.count("cuCtxSetCurrent") == 2
    with pytest.raises(LaunchError, match="an empty input"):
        one.bind(0, (0, 1, 1), (32, 1, 1), ())


# The operation


class Recorder:
    """Stands for the binding of launches: notes what is launched."""

    def __init__(self) -> None:
        self.bound: list[tuple[Launch, int]] = []
        self.launches: list[tuple[str, tuple[int, ...]]] = []

    def bind(self, launch: Launch, device: int) -> Callable[..., None]:
        self.bound.append((launch, device))
        return lambda *addresses: self.launches.append((launch.kernel, addresses))


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    tensor = x.as_subclass(OnGpu)
    tensor.index = 0
    return tensor


def plan(view: View, gpu: Gpu, *options: Any) -> Plan:
    program = CudaProgram("probe.cu", ("first", "second"))
    first = Launch(program, "first", ("pointer",) * 2, (X, WORK), (), (1, 1))
    second = Launch(program, "second", ("pointer",) * 2, (WORK, OUT), (), (1, 1))
    return Plan(view.shape, view.dtype, (first, second), work_bytes=256)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(cuda_base, "bind_launch", found.bind)
    monkeypatch.setattr(cuda_base, "gpu_of", lambda device: Gpu("sm_90a", 132))
    monkeypatch.setattr(cuda_base, "current_device", lambda: 0)
    return found


def test_a_signature_is_planned_once_and_its_launches_follow_the_tensors(
    recorder: Recorder,
) -> None:
    op = CudaOp(plan)
    base = torch.randn(6, 8)
    x = on_gpu(base)
    results = [op.run(x, "option") for _ in range(3)]
    assert len(recorder.bound) == 2
    assert [name for name, _ in recorder.launches] == ["first", "second"] * 3
    for number, result in enumerate(results):
        (_, (source, work)), (_, (parts, out)) = recorder.launches[2 * number : 2 * number + 2]
        assert (source, out) == (x.data_ptr(), result.data_ptr())
        assert work == parts
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
    op.run(x, "other")
    op.run(on_gpu(base.t()), "option")
    op.run(on_gpu(base.view(-1)[1:].view(1, 47)), "option")
    op.run(on_gpu(base.view(-1)[:47].view(1, 47)), "option")
    assert len(recorder.bound) == 2 * 5


def test_each_thread_has_launches_of_its_own(recorder: Recorder) -> None:
    op = CudaOp(plan)
    x = on_gpu(torch.randn(4, 4))
    op.run(x)
    thread = threading.Thread(target=op.run, args=(x,))
    thread.start()
    thread.join()
    assert len(recorder.bound) == 4


def test_plans_do_not_pile_up_for_ever(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_base, "ENTRY_LIMIT", 4)
    op = CudaOp(plan)
    for size in range(1, 12):
        op.run(on_gpu(torch.zeros(size)))
        assert len(op._entries.of) <= 4


def test_a_result_without_elements_needs_no_launch(recorder: Recorder) -> None:
    op = CudaOp(lambda view, gpu: Plan((0, 3), view.dtype))
    assert op.run(on_gpu(torch.zeros(3, 0))).shape == (0, 3)
    assert recorder.launches == []


def test_the_answer_names_what_the_machine_or_the_plan_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CudaTensor(OnGpu):
        is_cuda = True  # type: ignore[assignment]

    def ask(op: CudaOp, x: torch.Tensor) -> tuple[bool, str]:
        tensor = x.as_subclass(CudaTensor)
        tensor.index = 0
        cuda_base.machine_refusal.cache_clear()
        answer = op.supports(tensor)
        cuda_base.machine_refusal.cache_clear()
        return answer.ok, answer.reason

    def refuse(view: View, gpu: Gpu) -> Plan:
        raise UnsupportedError("walks up to 4 dimensions")

    monkeypatch.setattr(cuda_base, "gpu_of", lambda device: Gpu("sm_90a", 132))
    monkeypatch.setattr(cuda_base, "device_arch", lambda device: "sm_90a")
    monkeypatch.delenv("FUSEDOPS_OVERLAY", raising=False)
    few, many = torch.zeros(2, 2), torch.zeros((2,) * 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert ask(CudaOp(plan), few) == (
        False,
        "needs compute capability 8.0 or newer, cuda:0 has 7.5",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    without = type("Key", (), {"missing_tools": ("nvrtc",)})
    monkeypatch.setattr(cuda_base, "program_key", lambda program, arch: without)
    ok, reason = ask(CudaOp(plan), few)
    assert not ok
    assert "pip install 'fusedops[cuda]'" in reason
    monkeypatch.setenv("FUSEDOPS_OVERLAY", "somewhere")
    assert ask(CudaOp(plan), few) == (True, "")
    assert ask(CudaOp(plan), many) == (True, "")
    assert ask(CudaOp(refuse), few) == (True, "")
    assert ask(CudaOp(refuse), many) == (False, "walks up to 4 dimensions")


# Registration


@pytest.mark.parametrize("op", ["transpose", "reduce"])
def test_the_kernels_are_registered(op: str) -> None:
    assert "cuda" in OPS[op].providers


def test_a_cpu_tensor_is_not_for_the_kernels() -> None:
    x = torch.randn(3, 4)
    answers = (OPS["transpose"].answers(x), OPS["reduce"].answers(x, "sum", [1], False))
    for answer in (found["cuda"] for found in answers):
        assert (answer.ok, answer.applicable) == (False, False)
        assert answer.reason == "runs on CUDA tensors, got one on cpu"
    assert torch.equal(transpose(x), x.t())
    calls: list[Callable[[], object]] = [lambda: transpose(x), lambda: reduce(x, "sum", 1)]
    for call in calls:
        with use_provider("cuda"), pytest.raises(UnsupportedError, match="got one on cpu"):
            call()


def test_a_copy_of_cpu_tensors_or_of_others_than_vectors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.zeros(64)
    with pytest.raises(DeviceError, match="accepted are CUDA tensors"):
        copy(x, torch.zeros(64))
    with pytest.raises(DeviceError, match="move both to one device"):
        copy(x, torch.zeros(64, device="meta"))

    class CudaTensor(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    cuda_x = x.as_subclass(CudaTensor)
    for bad in (torch.zeros(128)[::2], torch.zeros(68)[1:65], torch.zeros(61), torch.zeros(60)):
        with pytest.raises(LayoutError, match=r"copy: .* (?:multiples of 16|one size in bytes)"):
            copy(cuda_x, bad)
