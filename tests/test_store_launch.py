"""Launching a kernel, checked against a driver made of Python functions: what reaches its calls."""

from __future__ import annotations

import ctypes
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from store_worker import fake_key

from fusedops.errors import BuildError, ConfigError, DeviceError, LaunchError
from fusedops.jit import driver as driver_module
from fusedops.jit import launch
from fusedops.jit.driver import Driver, LaunchAttribute, LaunchConfig, launch_attributes
from fusedops.jit.launch import CudaKernel, CudaModule, cuda_module, device_arch, load_cubin
from fusedops.jit.location import CacheSettings
from fusedops.jit.nvrtc import CUBIN, CudaProgram
from fusedops.jit.store import Store

PARAMETERS = ("pointer", "int32", "pointer", "float32", "int64", "uint32", "float64")
# (offset, size) as a C compiler lays out (void*, int, void*, float, long long, unsigned, double)
LAYOUT = [(0, 8), (8, 4), (16, 8), (24, 4), (32, 8), (40, 4), (48, 8)]
LIBRARY, KERNEL, FUNCTION, CONTEXT = 0x1000, 0x2000, 0x3000, 0x4000


class FakeCuda:
    """Stands for libcuda: notes each call, and reads a launch's arguments from raw memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[dict[str, Any]] = []
        self.statuses: dict[str, list[int]] = {}
        self.layout = list(LAYOUT)
        self.context = 0
        self._callbacks = {name: self._function(name) for name in driver_module._SIGNATURES}

    def __getattr__(self, name: str) -> Any:
        return self._callbacks[name]

    def _function(self, name: str) -> Any:
        arguments = driver_module._SIGNATURES[name]
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *values: self._call(name, *values))

    def _call(self, name: str, *values: Any) -> int:
        if name.startswith("cuGetError"):
            text = b"CUDA_ERROR_TEST" if name == "cuGetErrorName" else b"what it means"
            values[1][0] = text
            return 0
        self.calls.append((name, *values))
        if self.statuses.get(name):
            status = self.statuses[name].pop(0)
            if status:
                return status
        handles = {
            "cuLibraryLoadData": LIBRARY,
            "cuLibraryGetKernel": KERNEL,
            "cuKernelGetFunction": FUNCTION,
            "cuDevicePrimaryCtxRetain": CONTEXT,
            "cuDeviceGet": 0,
        }
        if name in handles:
            values[0][0] = handles[name]
        if name == "cuCtxGetCurrent":
            values[0][0] = self.context
        if name == "cuCtxSetCurrent":
            self.context = values[0]
        if name == "cuKernelGetParamInfo":
            if values[1] >= len(self.layout):
                return 1
            values[2][0], values[3][0] = self.layout[values[1]]
        if name == "cuLaunchKernelEx":
            self.launches.append(self._read_launch(*values))
        return 0

    def _read_launch(self, config: Any, function: int, parameters: int, extra: int) -> Any:
        got = config.contents
        assert extra is None
        count = len(self.layout)
        pointers = (ctypes.c_void_p * count).from_address(parameters)
        values = [
            ctypes.string_at(pointer, size)
            for pointer, (_, size) in zip(pointers, self.layout, strict=True)
        ]
        attributes = [got.attributes[i] for i in range(got.attribute_count)]
        return {
            "function": function,
            "grid": (got.grid_x, got.grid_y, got.grid_z),
            "block": (got.block_x, got.block_y, got.block_z),
            "shared_bytes": got.shared_bytes,
            "stream": got.stream,
            "attributes": [
                (one.id, tuple(one.value.cluster), one.value.flag) for one in attributes
            ],
            "values": values,
        }

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    index: int

    def get_device(self) -> int:
        return self.index


def on_gpu(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    view = tensor.as_subclass(OnGpu)
    view.index = index
    return view


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(driver_module, "_driver", Driver(fake))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a test GPU")
    monkeypatch.setattr(launch, "_raw_stream", lambda device: 0x77 + device)
    return fake


@pytest.fixture
def module(cuda: FakeCuda) -> CudaModule:
    return CudaModule(b"\x7fELF cubin \0 with a zero", {"k<float>": "_Z1k"}, "csrc/k.cu for sm_90a")


@pytest.fixture
def kernel(module: CudaModule) -> CudaKernel:
    return module.kernel("k<float>", PARAMETERS)


def arguments(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    return [x, -5, y, 0.5, 2**40, 2**32 - 1, 0.1]


def test_every_argument_reaches_the_driver_where_the_kernel_reads_it(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x, y = on_gpu(torch.zeros(8)), on_gpu(torch.zeros(8)[3:])
    kernel.launch((3, 2, 1), (128, 1, 1), arguments(x, y))
    (got,) = cuda.launches
    assert got["function"] == FUNCTION
    assert (got["grid"], got["block"]) == ((3, 2, 1), (128, 1, 1))
    assert (got["shared_bytes"], got["stream"], got["attributes"]) == (0, 0x77, [])
    assert got["values"] == [
        struct.pack("P", x.data_ptr()),
        struct.pack("i", -5),
        struct.pack("P", y.data_ptr()),
        struct.pack("f", 0.5),
        struct.pack("q", 2**40),
        struct.pack("I", 2**32 - 1),
        struct.pack("d", 0.1),
    ]


def test_a_second_launch_reuses_everything_but_the_new_values(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x, y = on_gpu(torch.zeros(8)), on_gpu(torch.zeros(8))
    kernel.launch((3, 2, 1), (128, 1, 1), arguments(x, y), stream=0x55)
    loading = len(cuda.calls)
    kernel.launch((4, 1, 1), (64, 2, 1), arguments(y, x))
    assert [call[0] for call in cuda.calls[loading:]] == ["cuLaunchKernelEx"]
    first, second = cuda.launches
    assert (first["stream"], second["stream"]) == (0x55, 0x77)
    assert (second["grid"], second["block"]) == ((4, 1, 1), (64, 2, 1))
    assert second["values"][0] == first["values"][2]
    assert second["values"][2] == first["values"][0]


def test_the_cubin_is_loaded_whole_and_in_relaxed_capture_mode(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x = on_gpu(torch.zeros(8))
    kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    names = [call[0] for call in cuda.calls]
    exchange = "cuThreadExchangeStreamCaptureMode"
    loading = names[names.index(exchange) : len(names) - 1 - names[::-1].index(exchange)]
    for name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"):
        assert name in loading
    assert names.count(exchange) == 2
    (load,) = [call for call in cuda.calls if call[0] == "cuLibraryLoadData"]
    assert load[2].startswith(b"\x7fELF cubin ")
    (get,) = [call for call in cuda.calls if call[0] == "cuLibraryGetKernel"]
    assert get[2:] == (LIBRARY, b"_Z1k")


def test_dependent_launch_and_clusters_are_attributes(cuda: FakeCuda, kernel: CudaKernel) -> None:
    x = on_gpu(torch.zeros(8))
    for pdl, cluster in ((True, None), (False, (2, 1, 1)), (True, (1, 4, 2)), (False, None)):
        kernel.launch((8, 8, 8), (32, 1, 1), arguments(x, x), pdl=pdl, cluster=cluster)
    attributes = [
        [(kind, cluster if kind == 4 else flag) for kind, cluster, flag in got["attributes"]]
        for got in cuda.launches
    ]
    assert attributes == [[(6, 1)], [(4, (2, 1, 1))], [(4, (1, 4, 2)), (6, 1)], []]
    assert cuda.count("cuFuncSetAttribute") == 0
    kernel.launch((16, 1, 1), (32, 1, 1), arguments(x, x), cluster=(16, 1, 1))
    kernel.launch((16, 1, 1), (32, 1, 1), arguments(x, x), cluster=(16, 1, 1))
    settings = [call[1:] for call in cuda.calls if call[0] == "cuFuncSetAttribute"]
    assert settings == [(FUNCTION, 14, 1)]


def test_more_shared_memory_is_asked_for_once(cuda: FakeCuda, kernel: CudaKernel) -> None:
    x = on_gpu(torch.zeros(8))
    for shared_bytes in (0, 1000, 200_000, 100_000, 200_000):
        kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x), shared_bytes=shared_bytes)
    settings = [call[1:] for call in cuda.calls if call[0] == "cuFuncSetAttribute"]
    assert settings == [(FUNCTION, 8, 1000), (FUNCTION, 8, 200_000)]
    assert [got["shared_bytes"] for got in cuda.launches] == [0, 1000, 200_000, 100_000, 200_000]
    cuda.statuses["cuFuncSetAttribute"] = [1]
    with pytest.raises(LaunchError, match="shared_bytes=300000"):
        kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x), shared_bytes=300_000)


def test_b35_a_launch_goes_to_the_tensors_device(
    cuda: FakeCuda, kernel: CudaKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.previous, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.previous

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    x = on_gpu(torch.zeros(8), 1)
    kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    assert cuda.launches[0]["stream"] == 0x77 + 1
    assert current == [0]
    assert (cuda.count("cuLibraryLoadData"), cuda.count("cuKernelGetFunction")) == (1, 1)
    x = on_gpu(torch.zeros(8), 0)
    kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    assert cuda.launches[1]["stream"] == 0x77
    assert (cuda.count("cuLibraryLoadData"), cuda.count("cuKernelGetFunction")) == (1, 2)


@pytest.mark.parametrize(
    ("first", "second"), [(0, 1), (0, -1), (-1, 0), (-1, -1)], ids=lambda index: f"cuda{index}"
)
def test_b35_mixed_devices_and_cpu_tensors_are_refused(
    first: int, second: int, cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x, y = on_gpu(torch.zeros(8), first), on_gpu(torch.zeros(8), second)
    with pytest.raises(DeviceError, match="must be on one CUDA device"):
        kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, y))
    assert cuda.launches == []


@pytest.mark.parametrize(
    ("index", "value"),
    [(1, 2**31), (1, 0.5), (4, 2**63), (5, -1), (0, 0.5), (6, "0.1"), (6, None)],
)
def test_a_value_that_does_not_fit_its_parameter_is_refused(
    index: int, value: Any, cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x = on_gpu(torch.zeros(8))
    values = arguments(x, x)
    values[index] = value
    with pytest.raises(LaunchError, match="takes \\(pointer, int32"):
        kernel.launch((1, 1, 1), (32, 1, 1), values)
    for wrong in (values[:-1], [*values, 1]):
        with pytest.raises(LaunchError, match="takes \\(pointer, int32"):
            kernel.launch((1, 1, 1), (32, 1, 1), wrong)
    assert cuda.launches == []


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (((0, 1, 1), (32, 1, 1)), {}),
        (((1, 1, 1), (32, 0, 1)), {}),
        (((2**32 + 1, 1, 1), (32, 1, 1)), {}),
        (((1, 1), (32, 1, 1)), {}),
        (((1, 1, 1), (32, 1, 1)), {"cluster": (0, 1, 1)}),
        (((1, 1, 1), (32, 1, 1)), {"shared_bytes": -1}),
    ],
)
def test_b04_an_empty_or_impossible_grid_never_reaches_the_driver(
    plan: Any, options: dict[str, Any], cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x = on_gpu(torch.zeros(8))
    with pytest.raises(LaunchError, match="an empty input is to be answered without a launch"):
        kernel.launch(*plan, arguments(x, x), **options)
    assert cuda.launches == []


def test_a_refused_launch_tells_the_plan_and_the_next_one_works(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x = on_gpu(torch.zeros(8))
    cuda.statuses["cuLaunchKernelEx"] = [701]
    with pytest.raises(LaunchError) as caught:
        kernel.launch((7, 1, 1), (1024, 1, 1), arguments(x, x), pdl=True)
    for part in ("k<float>", "csrc/k.cu for sm_90a", "CUDA_ERROR_TEST (701)", "grid=(7, 1, 1)"):
        assert part in str(caught.value)
    kernel.launch((7, 1, 1), (1024, 1, 1), arguments(x, x), pdl=True)
    assert len(cuda.launches) == 1


def test_a_thread_without_a_context_gets_the_one_torch_uses(
    cuda: FakeCuda, kernel: CudaKernel
) -> None:
    x = on_gpu(torch.zeros(8))
    cuda.statuses["cuLaunchKernelEx"] = [driver_module.INVALID_CONTEXT]
    kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    assert len(cuda.launches) == 1
    assert cuda.calls[-2] == ("cuCtxSetCurrent", CONTEXT)
    assert cuda.count("cuDevicePrimaryCtxRetain") == 1


def test_b35_loading_a_kernel_leaves_the_current_device(cuda: FakeCuda, kernel: CudaKernel) -> None:
    x = on_gpu(torch.zeros(8))
    cuda.context = CONTEXT + 1
    kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    assert ("cuCtxSetCurrent", CONTEXT) in cuda.calls
    assert cuda.context == CONTEXT + 1


def test_a_cubin_for_another_architecture_is_an_error(cuda: FakeCuda, kernel: CudaKernel) -> None:
    x = on_gpu(torch.zeros(8))
    cuda.statuses["cuKernelGetFunction"] = [209]
    with pytest.raises(BuildError, match=r"cannot load k<float> .* on cuda:0 \(a test GPU, sm_90a"):
        kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    assert cuda.count("cuThreadExchangeStreamCaptureMode") == 2
    kernel.launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    assert cuda.count("cuLibraryLoadData") == 1


def test_a_wrong_declaration_of_the_parameters_is_found_when_loading(
    cuda: FakeCuda, module: CudaModule
) -> None:
    x = on_gpu(torch.zeros(8))
    kernel = module.kernel("k<float>", ("pointer", "int64"))
    with pytest.raises(BuildError, match="Correct the declaration"):
        kernel.launch((1, 1, 1), (32, 1, 1), [x, 1])
    assert cuda.launches == []


def test_unknown_kernels_and_parameter_types_are_refused(module: CudaModule) -> None:
    with pytest.raises(ConfigError, match=r"no kernel 'j'; it has k<float>"):
        module.kernel("j", PARAMETERS)
    with pytest.raises(ConfigError, match="parameter type 'half'"):
        module.kernel("k<float>", ("half",))
    assert module.kernel("k<float>", PARAMETERS) is module.kernel("k<float>", list(PARAMETERS))


def test_threads_do_not_mix_their_arguments(cuda: FakeCuda, kernel: CudaKernel) -> None:
    tensors = [on_gpu(torch.zeros(8)) for _ in range(4)]

    def run(index: int) -> None:
        x = tensors[index]
        for _ in range(50):
            kernel.launch((index + 1, 1, 1), (32, 1, 1), [x, index, x, 0.0, 0, 0, 0.0])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.launches) == 200
    for got in cuda.launches:
        index = got["grid"][0] - 1
        assert got["values"][0] == struct.pack("P", tensors[index].data_ptr())
        assert got["values"][1] == struct.pack("i", index)


def test_a_kernel_without_parameters_launches(cuda: FakeCuda, module: CudaModule) -> None:
    cuda.layout = []
    module.kernel("k<float>", ()).launch((1, 1, 1), (1, 1, 1), [], stream=3)
    assert cuda.launches[0]["values"] == []
    assert cuda.launches[0]["stream"] == 3


def test_a_stored_cubin_becomes_a_module(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_fake(program: CudaProgram, arch: str, folder: Path) -> dict[str, str]:
        (folder / CUBIN).write_bytes(f"{program.file} {arch}".encode())
        return {"kernel k<float>": "_Z1k"}

    monkeypatch.setattr(launch, "compile_program", compile_fake)
    store = Store(CacheSettings(tmp_path))
    program = CudaProgram("probe.cu", ("k<float>",))
    module = cuda_module(program, "sm_90a", store)
    assert cuda_module(program, "sm_90a", store) is module
    assert cuda_module(program, "sm_80", store) is not module
    x = on_gpu(torch.zeros(8))
    module.kernel("k<float>", PARAMETERS).launch((1, 1, 1), (32, 1, 1), arguments(x, x))
    (load,) = [call for call in cuda.calls if call[0] == "cuLibraryLoadData"]
    assert load[2] == b"probe.cu sm_90a"
    entry = store.ensure(fake_key("a"), lambda folder: compile_fake(program, "sm_80", folder))
    assert load_cubin(entry, "again").kernel("k<float>", PARAMETERS).name == "k<float>"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")],
)
def test_the_arch_of_a_device(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert device_arch(0) == arch


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module, "_driver", None)
    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1.*use CPU tensors"):
        driver_module.driver()


def test_our_structures_lie_in_memory_as_the_cuda_headers_say() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    config = bindings.CUlaunchConfig()
    for number, field in enumerate(
        ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"), 1
    ):
        setattr(config, field, number)
    config.sharedMemBytes = 7
    config.hStream = 0x8888
    cluster, pdl = bindings.CUlaunchAttribute(), bindings.CUlaunchAttribute()
    kinds = bindings.CUlaunchAttributeID
    cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 2, 3, 4
    pdl.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    pdl.value.programmaticStreamSerializationAllowed = 1
    config.attrs = [cluster, pdl]
    config.numAttrs = 2
    ours = LaunchConfig.from_address(int(config.getPtr()))
    sizes = (ours.grid_x, ours.grid_y, ours.grid_z, ours.block_x, ours.block_y, ours.block_z)
    assert sizes == (1, 2, 3, 4, 5, 6)
    assert (ours.shared_bytes, ours.stream, ours.attribute_count) == (7, 0x8888, 2)
    for number, expected in enumerate(launch_attributes(True, (2, 3, 4))):
        got = ours.attributes[number]
        assert got.id == expected.id
        assert bytes(got.value)[:12] == bytes(expected.value)[:12]
    assert ctypes.sizeof(LaunchAttribute) == 72
    for name, value in (
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 8),
        ("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 14),
    ):
        assert int(getattr(bindings.CUfunction_attribute, name)) == value
    assert int(bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED) == 2
    assert int(bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT) == driver_module.INVALID_CONTEXT
