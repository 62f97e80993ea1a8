"""The few calls of the CUDA driver that loading and launching a cubin takes, through ctypes.

A prepared call with its structures kept costs 1-2 us from Python; general launchers, which build
them anew each time, cost 7. It needs nothing but the driver, so kernels that are already compiled
run where no CUDA package is installed. Source: CUDA Driver API, "Library Management", "Execution
Control" and "Stream Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fusedops.errors import DeviceError

__all__ = ["Driver", "DriverError", "LaunchAttribute", "LaunchConfig", "driver"]

INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CAPTURE_MODE_RELAXED = 2
_ATTRIBUTE_CLUSTER_DIMENSION = 4
_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class DriverError(Exception):
    """A driver call failed. Stays inside the package, which says what it was doing.

    Attributes:
        status: the CUresult.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class _AttributeValue(ctypes.Union):
    _fields_ = (
        ("cluster", ctypes.c_uint32 * 3),
        ("flag", ctypes.c_int32),
        ("padding", ctypes.c_uint64 * 8),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: 72 bytes."""

    _fields_ = (
        ("id", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("value", _AttributeValue),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
        ("block_x", ctypes.c_uint32),
        ("block_y", ctypes.c_uint32),
        ("block_z", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    )


def launch_attributes(pdl: bool, cluster: tuple[int, int, int] | None) -> Sequence[LaunchAttribute]:
    """The attributes of a launch: dependent launch, and the size of a cluster in blocks."""
    attributes = []
    if cluster is not None:
        attribute = LaunchAttribute(id=_ATTRIBUTE_CLUSTER_DIMENSION)
        attribute.value.cluster[:] = cluster
        attributes.append(attribute)
    if pdl:
        attribute = LaunchAttribute(id=_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value.flag = 1
        attributes.append(attribute)
    return attributes


class _Library(Protocol):
    def __getattr__(self, name: str) -> Any: ...


_HANDLE = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_void_p)
_SIZE_OUT = ctypes.POINTER(ctypes.c_size_t)
_TEXT_OUT = ctypes.POINTER(ctypes.c_char_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, _TEXT_OUT),
    "cuGetErrorString": (ctypes.c_int, _TEXT_OUT),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuCtxGetCurrent": (_OUT,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
    "cuLibraryLoadData": (
        *(_OUT, ctypes.c_char_p, _HANDLE, _HANDLE, ctypes.c_uint),
        *(_HANDLE, _HANDLE, ctypes.c_uint),
    ),
    "cuLibraryGetKernel": (_OUT, _HANDLE, ctypes.c_char_p),
    "cuKernelGetFunction": (_OUT, _HANDLE),
    "cuKernelGetParamInfo": (_HANDLE, ctypes.c_size_t, _SIZE_OUT, _SIZE_OUT),
    "cuFuncSetAttribute": (_HANDLE, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernelEx": (ctypes.POINTER(LaunchConfig), _HANDLE, _HANDLE, _HANDLE),
}


class Driver:
    """The driver's calls, with failures raised as ``DriverError``.

    Args:
        library: libcuda, or anything with the same functions.

    Attributes:
        launch_kernel: ``cuLaunchKernelEx(config, function, parameters, extra) -> status``,
            unwrapped, because every launch goes through it.
    """

    def __init__(self, library: _Library) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
            self._functions[name] = function
        self.launch_kernel = self._functions["cuLaunchKernelEx"]
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise DriverError(status, f"{name} failed: {self.explain(status)}")

    def _handle(self, name: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def explain(self, status: int) -> str:
        """``CUDA_ERROR_INVALID_VALUE (1): invalid argument``."""
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            self._functions[name](status, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({status}): {texts[1]}"

    def make_current(self, device: int) -> None:
        """Make the primary context of a device, the one torch uses, current in this thread."""
        with self._lock:
            if device not in self._contexts:
                ordinal = ctypes.c_int()
                self._call("cuDeviceGet", ctypes.byref(ordinal), device)
                self._contexts[device] = self._handle("cuDevicePrimaryCtxRetain", ordinal)
        self._call("cuCtxSetCurrent", self._contexts[device])

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device's primary context current for a while: the thread's own comes back."""
        before = self._handle("cuCtxGetCurrent")
        self.make_current(device)
        try:
            yield
        finally:
            # A thread without a context keeps this one, as after its first launch.
            if before:
                self._call("cuCtxSetCurrent", before)

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread load a kernel while a stream is captured, without harm to the capture."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def load_library(self, cubin: bytes) -> int:
        """Handle of a cubin; it serves every device and is never unloaded."""
        return self._handle("cuLibraryLoadData", cubin, None, None, 0, None, None, 0)

    def kernel(self, library: int, mangled: str) -> int:
        """Handle of a kernel of a library."""
        return self._handle("cuLibraryGetKernel", library, mangled.encode())

    def function(self, kernel: int) -> int:
        """The kernel loaded on the current context's device."""
        return self._handle("cuKernelGetFunction", kernel)

    def parameter_layout(self, kernel: int) -> list[tuple[int, int]]:
        """(offset, size) in bytes of each parameter of a kernel."""
        layout: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        query = self._functions["cuKernelGetParamInfo"]
        while query(kernel, len(layout), ctypes.byref(offset), ctypes.byref(size)) == 0:
            layout.append((offset.value, size.value))
        return layout

    def allow_shared_bytes(self, function: int, shared_bytes: int) -> None:
        """Allow launches with this much dynamic shared memory, beyond the usual 48 KiB too."""
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def allow_large_clusters(self, function: int) -> None:
        """Allow clusters of more than 8 blocks, where the device has them."""
        self._call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)


_driver: Driver | None = None
_driver_lock = threading.Lock()


def driver() -> Driver:
    """The driver of this machine, loaded on the first call.

    Raises:
        DeviceError: there is no NVIDIA driver, or it finds no GPU.
    """
    global _driver
    with _driver_lock:
        if _driver is None:
            try:
                _driver = Driver(ctypes.CDLL("libcuda.so.1"))
            except (OSError, AttributeError, DriverError) as error:
                raise DeviceError(
                    f"cannot use the NVIDIA driver: {error}. Kernels need a GPU and driver R580 or "
                    "newer; without them, use CPU tensors."
                ) from error
        return _driver
