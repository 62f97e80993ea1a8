"""The probe on a GPU: compiled by NVRTC, loaded, launched, captured and replayed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from fusedops.errors import BuildError, KernelMissingError, LaunchError
from fusedops.jit import launch
from fusedops.jit.launch import CudaKernel, CudaModule, cuda_module, device_arch, load_cubin
from fusedops.jit.location import CacheSettings
from fusedops.jit.nvrtc import compile_program, program_key
from fusedops.jit.probe import PROBE, PROBE_PARAMETERS
from fusedops.jit.store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

KERNELS = {
    torch.float32: "fusedops::scale<float>",
    torch.float16: "fusedops::scale<__half>",
    torch.bfloat16: "fusedops::scale<__nv_bfloat16>",
}
SIZES = (1, 7, 8, 1023, 4096, 1_000_003)
GUARD = 1234.0


def scale(
    module: CudaModule,
    x: torch.Tensor,
    out: torch.Tensor,
    factor: float,
    *,
    pdl: bool = False,
    cluster: tuple[int, int, int] | None = None,
    shared_bytes: int = 0,
) -> None:
    kernel = module.kernel(KERNELS[x.dtype], PROBE_PARAMETERS)
    blocks = min(1024, -(-x.numel() // 256))
    blocks = -(-blocks // 8) * 8  # a multiple of every cluster used here
    kernel.launch(
        (blocks, 1, 1),
        (256, 1, 1),
        [x, out, factor, x.numel()],
        pdl=pdl,
        cluster=cluster,
        shared_bytes=shared_bytes,
    )


def expected(x: torch.Tensor, factor: float) -> torch.Tensor:
    return (x.float() * factor).to(x.dtype)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CudaModule:
    store = Store(CacheSettings(tmp_path_factory.mktemp("cache")))
    return cuda_module(PROBE, device_arch(0), store)


@pytest.mark.parametrize("dtype", list(KERNELS), ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_the_probe_scales_any_size_at_any_offset(
    module: CudaModule, dtype: torch.dtype, offset: int
) -> None:
    torch.manual_seed(0)
    for size in SIZES:
        x = torch.randn(size + offset, device="cuda").to(dtype)[offset:]
        whole = torch.full((size + offset + 16,), GUARD, device="cuda", dtype=dtype)
        out = whole[offset : offset + size]
        out.fill_(float("nan"))
        scale(module, x, out, 0.3)
        assert torch.equal(out, expected(x, 0.3)), size
        assert (whole[:offset] == GUARD).all()
        assert (whole[offset + size :] == GUARD).all()


def test_launches_follow_torchs_current_stream(module: CudaModule) -> None:
    x = torch.ones(1 << 22, device="cuda")
    out = torch.zeros_like(x)
    scale(module, x, out, 1.0)  # loads the kernel, which takes longer than the pause below
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.mul_(2)
        scale(module, x, out, 3.0)
    assert not stream.query()
    stream.synchronize()
    assert (out == 6).all()


def test_a_capture_replays_with_changed_inputs(module: CudaModule) -> None:
    x = torch.randn(5000, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    scale(module, x, out, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(module, x, out, 2.0)
        scale(module, out, out, 0.3, pdl=True)
    for _ in range(3):
        x.copy_(torch.randn(5000, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected(expected(x, 2.0), 0.3))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs compute capability 9.0 for clusters and dependent launch",
)
def test_dependent_launches_and_clusters_run_and_keep_their_order(module: CudaModule) -> None:
    x = torch.ones(1 << 20, device="cuda")
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    scale(module, x, a, 1.0)
    for _ in range(20):  # each launch reads what the one before it wrote
        scale(module, a, b, 2.0, pdl=True, cluster=(2, 1, 1))
        scale(module, b, a, 0.5, pdl=True, cluster=(8, 1, 1))
    assert (a == 1).all()
    assert (b == 2).all()


def test_much_shared_memory_is_allowed_and_too_much_is_an_error(module: CudaModule) -> None:
    x = torch.ones(100, device="cuda")
    out = torch.zeros_like(x)
    scale(module, x, out, 2.0, shared_bytes=90 * 1024)
    assert (out == 2).all()
    with pytest.raises(LaunchError, match="shared_bytes=10485760"):
        scale(module, x, out, 2.0, shared_bytes=10 << 20)
    scale(module, x, out, 3.0)
    assert (out == 3).all()


def test_the_driver_checks_the_declared_parameters(module: CudaModule) -> None:
    kernel = module.kernel(KERNELS[torch.float32], ("pointer", "pointer", "float32", "int32"))
    x = torch.ones(8, device="cuda")
    with pytest.raises(BuildError, match="Correct the declaration"):
        kernel.launch((1, 1, 1), (32, 1, 1), [x, x, 1.0, 8])


def test_a_refused_launch_leaves_no_error_behind(module: CudaModule) -> None:
    x = torch.ones(8, device="cuda")
    kernel = module.kernel(KERNELS[torch.float32], PROBE_PARAMETERS)
    with pytest.raises(LaunchError, match=r"block=\(4096, 1, 1\)"):
        kernel.launch((1, 1, 1), (4096, 1, 1), [x, x, 1.0, 8])
    torch.cuda.synchronize()
    assert (x + 1 == 2).all()


def test_threads_without_a_context_of_their_own_can_launch(module: CudaModule) -> None:
    xs = [torch.full((1000,), float(i), device="cuda") for i in range(4)]
    outs = [torch.zeros_like(x) for x in xs]
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            for _ in range(50):
                scale(module, xs[index], outs[index], 2.0)
        except BaseException as error:  # noqa: BLE001 - asserted on below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    assert [float(out[0]) for out in outs] == [0.0, 2.0, 4.0, 6.0]


def test_b30_a_cold_kernel_in_a_capture_raises_and_a_stored_one_is_captured(tmp_path: Path) -> None:
    arch = device_arch(0)
    x = torch.full((100,), 3.0, device="cuda")
    out = torch.zeros_like(x)
    settings = CacheSettings(tmp_path / "cache")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(KernelMissingError, match="warm-up call"):
            cuda_module(PROBE, arch, Store(settings))
        x.mul_(1)
    Store(settings).ensure(
        program_key(PROBE, arch), lambda folder: compile_program(PROBE, arch, folder)
    )
    cold = Store(settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # loads the kernel from disk into the GPU inside the capture
        scale(cuda_module(PROBE, arch, cold), x, out, 2.0)
    assert cold.counts == {"disk": 1}
    graph.replay()
    assert (out == 6).all()


def test_a_cubin_for_a_newer_architecture_is_an_error_that_names_both(tmp_path: Path) -> None:
    other = "sm_100a" if device_arch(0) != "sm_100a" else "sm_90a"
    entry = Store(CacheSettings(tmp_path / "cache")).ensure(
        program_key(PROBE, other), lambda folder: compile_program(PROBE, other, folder)
    )
    x = torch.ones(8, device="cuda")
    kernel: CudaKernel = load_cubin(entry, f"csrc/probe.cu for {other}").kernel(
        KERNELS[torch.float32], PROBE_PARAMETERS
    )
    with pytest.raises(BuildError, match=f"for {other} on cuda:0 .*{device_arch(0)}"):
        kernel.launch((1, 1, 1), (32, 1, 1), [x, x, 1.0, 8])
    assert (x + 1 == 2).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_b35_tensors_on_the_second_gpu_run_there(module: CudaModule) -> None:
    x = torch.full((1000,), 3.0, device="cuda:1")
    out = torch.zeros_like(x)
    with torch.cuda.device(0):
        scale(module, x, out, 2.0)
        assert torch.cuda.current_device() == 0
    assert (out == 6).all()
    with torch.cuda.device(1):
        assert launch._raw_stream(1) == torch.cuda.current_stream(1).cuda_stream
