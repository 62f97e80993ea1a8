"""Figure of calls: what a launch from Python costs, and what its path takes to build."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fusedops.bench.oracles import bitwise
from fusedops.errors import FusedOpsError, UnsupportedError
from fusedops.jit.launch import device_arch
from fusedops.jit.nvrtc import CUBIN, compile_program
from fusedops.ladders.call_sources import PYBIND_SOURCE, TVM_FFI_SOURCE
from fusedops.ladders.figures import Bench, Figure, FigureRow, Panel
from fusedops.ladders.model import Lesson
from fusedops.ladders.small_host import CHAIN, THREADS, chain_reference

__all__ = ["PATHS", "calls", "lacks_compiler"]

_CALLS = 200
_SAMPLES = 15
_LIBRARY = "fusedops_ladder"
_LEGACY_STREAM = 1
"""The default stream by the handle that is no null: ``CU_STREAM_LEGACY``."""

Call = Callable[[Tensor], object]
"""One step of the chain on x, of ``THREADS`` float32, in place on the current stream."""

Path_ = Callable[[torch.device], tuple[Call, float | None]]
"""Builds a path: the call, and the seconds that took (None where nothing is built).

Raises UnsupportedError where the machine lacks something, with what.
"""


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def lacks_compiler() -> str:
    """What a path that is compiled from C++ lacks on this machine, or an empty text."""
    compiler = os.environ.get("CXX", "g++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not on the PATH" if missing else ""


def _require_compiler() -> None:
    missing = lacks_compiler()
    if missing:
        raise UnsupportedError(missing)


def _require_module(module: str, package: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UnsupportedError(f"the package {package} is not installed")


@functools.cache
def _compiled(device: torch.device) -> tuple[float, bytes, str]:
    """Seconds of NVRTC past the store, the cubin, and the kernel's name in it."""
    with tempfile.TemporaryDirectory(prefix="fusedops-") as name:
        start = time.perf_counter()
        info = compile_program(CHAIN.program, device_arch(device.index or 0), Path(name))
        build_s = time.perf_counter() - start
        (mangled,) = info.values()
        return build_s, (Path(name) / CUBIN).read_bytes(), mangled


def _function(device: torch.device) -> int:
    return CHAIN.loaded(device).function(device.index or 0)


def _launch_address() -> int:
    """Address of ``cuLaunchKernel``, so that what is compiled links with no driver."""
    library = ctypes.CDLL("libcuda.so.1")
    return ctypes.cast(library.cuLaunchKernel, ctypes.c_void_p).value or 0


def torch_call(device: torch.device) -> tuple[Call, float | None]:
    """torch's own operator, already there."""
    one = torch.ones((), device=device)
    return lambda x: torch.add(one, x, alpha=0.5, out=x), None


def bound_call(device: torch.device) -> tuple[Call, float | None]:
    """A launch of fusedops with everything but addresses and stream prepared."""
    build_s, _, _ = _compiled(device)
    kernel = CHAIN.loaded(device)
    bound = kernel.bind(device.index or 0, (1, 1, 1), (THREADS, 1, 1), (1, THREADS))
    return lambda x: bound(x.data_ptr()), build_s


def prepared_call(device: torch.device) -> tuple[Call, float | None]:
    """``CudaKernel.launch`` of fusedops: arguments checked, structures kept."""
    build_s, _, _ = _compiled(device)
    kernel = CHAIN.loaded(device)
    grid, block = (1, 1, 1), (THREADS, 1, 1)
    return lambda x: kernel.launch(grid, block, (x, 1, THREADS)), build_s


def ctypes_call(device: torch.device) -> tuple[Call, float | None]:
    """``cuLaunchKernel`` through ctypes, its arguments made anew for each call."""
    build_s, _, _ = _compiled(device)
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    function = ctypes.c_void_p(_function(device))
    sizes = [ctypes.c_uint(size) for size in (1, 1, 1, THREADS, 1, 1, 0)]

    def call(x: Tensor) -> None:
        values = (ctypes.c_void_p(x.data_ptr()), ctypes.c_int(1), ctypes.c_int(THREADS))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        status = launch(function, *sizes, ctypes.c_void_p(_stream(device)), pointers, None)
        if status:
            raise RuntimeError(f"cuLaunchKernel failed: CUresult {status}")

    return call, build_s


def cuda_core_call(device: torch.device) -> tuple[Call, float | None]:
    """``cuda.core.launch``."""
    _require_module("cuda.core", "cuda-core")
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

    build_s, cubin, mangled = _compiled(device)
    Device(device.index or 0).set_current()
    kernel = ObjectCode.from_cubin(cubin).get_kernel(mangled)
    config = LaunchConfig(grid=1, block=THREADS)
    stream = Stream.from_handle(_stream(device) or _LEGACY_STREAM)
    numbers = ctypes.c_int(1), ctypes.c_int(THREADS)
    return lambda x: launch(stream, config, kernel, x.data_ptr(), *numbers), build_s


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library(_LIBRARY, "DEF")
    library.define("chain_(Tensor(a!) x) -> ()")

    loaded = functools.cache(CHAIN.loaded)

    def run(x: Tensor) -> None:
        loaded(x.device).launch((1, 1, 1), (THREADS, 1, 1), (x, 1, THREADS))

    library.impl("chain_", run, "CUDA")
    return library


def library_call(device: torch.device) -> tuple[Call, float | None]:
    """An operator of ``torch.library`` in Python, which torch.compile and autograd know."""
    build_s, _, _ = _compiled(device)
    start = time.perf_counter()
    _library()
    call: Call = getattr(torch.ops, _LIBRARY).chain_.default
    return call, build_s + time.perf_counter() - start


def _built(build: Callable[[str], Callable[..., object]]) -> tuple[Callable[..., object], float]:
    """A C++ function and the seconds that building it took, from nothing."""
    with tempfile.TemporaryDirectory(prefix="fusedops-") as folder:
        start = time.perf_counter()
        call = build(folder)
        return call, time.perf_counter() - start


def build_pybind(folder: str) -> Callable[..., object]:
    """The torch extension: ``chain(x, launch, function, stream)``."""
    from torch.utils.cpp_extension import load_inline

    module = load_inline(
        "fusedops_ladder_chain",
        cpp_sources=[PYBIND_SOURCE],
        functions=["chain"],
        build_directory=folder,
        with_cuda=False,
    )
    call: Callable[..., object] = module.chain
    return call


def build_tvm_ffi(folder: str) -> Callable[..., object]:
    """The same function behind tvm-ffi."""
    from tvm_ffi import cpp

    module = cpp.load_inline(
        "fusedops_ladder_chain_ffi",
        cpp_sources=TVM_FFI_SOURCE,
        functions="chain",
        build_directory=folder,
    )
    call: Callable[..., object] = module.chain
    return call


def _compiled_call(
    device: torch.device, build: Callable[[str], Callable[..., object]]
) -> tuple[Call, float | None]:
    _require_compiler()
    nvrtc_s, _, _ = _compiled(device)
    function, build_s = _built(build)
    launch, kernel = _launch_address(), _function(device)
    return lambda x: function(x, launch, kernel, _stream(device)), nvrtc_s + build_s


def pybind_call(device: torch.device) -> tuple[Call, float | None]:
    """A torch extension through pybind11, compiled by g++."""
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise UnsupportedError("Python.h is not installed")
    return _compiled_call(device, build_pybind)


def tvm_ffi_call(device: torch.device) -> tuple[Call, float | None]:
    """A C++ function through tvm-ffi, compiled by g++."""
    _require_module("tvm_ffi", "apache-tvm-ffi")
    return _compiled_call(device, build_tvm_ffi)


PATHS: dict[str, Path_] = {
    "torch operator": torch_call,
    "torch.library": library_call,
    "ctypes": ctypes_call,
    "fusedops, CudaKernel.launch": prepared_call,
    "fusedops, CudaKernel.bind": bound_call,
    "cuda.core": cuda_core_call,
    "pybind11 (torch extension)": pybind_call,
    "tvm-ffi": tvm_ffi_call,
}


def call_us(call: Call, x: Tensor) -> float:
    """Median host time of a call in us, few enough that the queue of launches never fills."""
    times = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call(x)
        times.append((time.perf_counter() - start) * 1e6 / _CALLS)
    torch.cuda.synchronize()
    return statistics.median(times)


def path_row(name: str, build: Path_, device: torch.device) -> FigureRow:
    """Builds, checks and times one path; what the machine lacks is said."""
    try:
        call, build_s = build(device)
        x = torch.randn(THREADS, device=device)
        expected = chain_reference(x.clone(), 1)
        call(x)
        wrong = bitwise(x, expected)
        if wrong is not None:
            return FigureRow(name, "call", failed=wrong)
        values = {"us a call": call_us(call, x)}
    except (UnsupportedError, ImportError) as error:
        return FigureRow(name, "call", absent=str(error))
    except (OSError, RuntimeError, TypeError, AttributeError, FusedOpsError) as error:
        reason = " ".join(str(error).split())[:300]
        return FigureRow(name, "call", failed=f"{type(error).__name__}: {reason}")
    return FigureRow(
        name, "call", None, values if build_s is None else {**values, "s to build": build_s}
    )


def _rows(bench: Bench) -> Iterator[FigureRow]:
    for name, build in PATHS.items():
        yield path_row(name, build, bench.device)


def calls(id: str, title: str) -> Figure:
    """Microseconds a call and seconds to build, for each way from Python to a kernel."""
    lesson = Lesson(
        "One kernel of 256 elements, launched from Python in every usual way.",
        "launch. The kernel runs for about a microsecond: what is left is Python making arguments, "
        "torch's dispatcher, and the driver's call.",
        "Prepare what does not change and keep it; compile the path only where calls are many; "
        "capture a graph where there are too many.",
    )
    panel = Panel(
        "Host time of a call",
        "path",
        ("us a call", "s to build"),
        ("us a call",),
        _rows,
        f"{_CALLS} calls in a row without waiting, by the host's clock. Seconds to build are from "
        "nothing: NVRTC's for the kernel, and g++'s where the path is compiled.",
    )
    return Figure(id, title, lesson, (panel,), files=(CHAIN.file,))
