"""Loading a cubin and launching its kernels on torch tensors."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusedops.errors import BuildError, ConfigError, DeviceError, LaunchError
from fusedops.jit.bound import BoundLaunch
from fusedops.jit.driver import (
    INVALID_CONTEXT,
    Driver,
    DriverError,
    LaunchAttribute,
    LaunchConfig,
    driver,
    launch_attributes,
)
from fusedops.jit.entry import Entry
from fusedops.jit.nvrtc import CUBIN, CudaProgram, compile_program, lowered_names, program_key
from fusedops.jit.store import Store, default_store

__all__ = ["CudaKernel", "CudaModule", "cuda_module", "device_arch", "load_cubin"]

Dim3 = tuple[int, int, int]
_Plan = tuple[Dim3, Dim3, int, bool, Dim3 | None]

_CODES = {
    "pointer": "P",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float32": "f",
    "float64": "d",
}
_PORTABLE_CLUSTER_BLOCKS = 8
_LARGEST_SIZE = 2**31 - 1
_NO_DEVICE = -2  # torch gives -1 to CPU tensors


def device_arch(device: int) -> str:
    """The architecture to compile for to run on a CUDA device: ``sm_80``, ``sm_90a``, ``sm_100a``.

    From compute capability 9.0 on, the ``a`` variant, which has all of the device's instructions.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cuda_module(program: CudaProgram, arch: str, store: Store | None = None) -> CudaModule:
    """The compiled and loaded kernels of a CUDA source; one object per process.

    Args:
        program: what to compile.
        arch: the architecture, see ``device_arch``.
        store: where to look; None takes ``default_store()``.

    Raises:
        BuildError, KernelMissingError, ConfigError: as ``Store.get``.
    """
    return (store or default_store()).get(
        program_key(program, arch),
        lambda folder: compile_program(program, arch, folder),
        lambda entry: load_cubin(entry, f"csrc/{program.file} for {arch}"),
    )


def load_cubin(entry: Entry, label: str) -> CudaModule:
    """The kernels of an entry that ``compile_program`` wrote; ``label`` names it in messages."""
    return CudaModule(entry.read(CUBIN), lowered_names(entry.info), label)


class CudaModule:
    """A cubin. It reaches a device with the first launch of a kernel there, and stays.

    Args:
        cubin: the binary.
        names: name expression of each kernel -> mangled name.
        label: what messages call it.
    """

    def __init__(self, cubin: bytes, names: Mapping[str, str], label: str) -> None:
        self.label = label
        self._cubin = cubin
        self._names = dict(names)
        self._lock = threading.Lock()
        self._library = 0
        self._kernels: dict[tuple[str, tuple[str, ...]], CudaKernel] = {}

    def kernel(self, name: str, parameters: Sequence[str]) -> CudaKernel:
        """A kernel by its name expression.

        Args:
            name: as in ``CudaProgram.kernels``.
            parameters: type of each parameter: pointer, int32, uint32, int64, float32 or float64.

        Raises:
            ConfigError: there is no such kernel or type.
        """
        if name not in self._names:
            raise ConfigError(
                f"{self.label} has no kernel {name!r}; it has {', '.join(sorted(self._names))}. "
                "Add it to CudaProgram.kernels."
            )
        key = (name, tuple(parameters))
        with self._lock:
            if key not in self._kernels:
                self._kernels[key] = CudaKernel(self, name, self._names[name], key[1])
            return self._kernels[key]

    def library(self, api: Driver) -> int:
        """The driver's handle of the cubin."""
        with self._lock:
            if not self._library:
                self._library = api.load_library(self._cubin)
            return self._library


class _Prepared:
    """The memory that one thread's launches of one kernel reuse."""

    def __init__(self, layout: struct.Struct, offsets: Sequence[int]) -> None:
        # 64-bit words, so that the values are aligned as the layout assumes.
        self.values = (ctypes.c_uint64 * max(1, -(-layout.size // 8)))()
        base = ctypes.addressof(self.values)
        pointers = [base + offset for offset in offsets]
        self.pointers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self.config = LaunchConfig()
        self.config_reference = ctypes.byref(self.config)
        self.plan: _Plan | None = None
        self._attributes: ctypes.Array[LaunchAttribute] | None = None

    def set_plan(self, plan: _Plan) -> None:
        grid, block, shared_bytes, pdl, cluster = plan
        config = self.config
        config.grid_x, config.grid_y, config.grid_z = grid
        config.block_x, config.block_y, config.block_z = block
        config.shared_bytes = shared_bytes
        attributes = launch_attributes(pdl, cluster)
        self._attributes = (LaunchAttribute * max(1, len(attributes)))(*attributes)
        config.attributes = self._attributes
        config.attribute_count = len(attributes)
        self.plan = plan


class CudaKernel:
    """A kernel ready to launch; get it from ``CudaModule.kernel``. Threads may share it.

    Args:
        module: the cubin it is in.
        name: name expression, for messages.
        mangled: its name in the cubin.
        parameters: type of each parameter, see ``CudaModule.kernel``.
    """

    def __init__(
        self, module: CudaModule, name: str, mangled: str, parameters: tuple[str, ...]
    ) -> None:
        unknown = [word for word in parameters if word not in _CODES]
        if unknown:
            raise ConfigError(
                f"{name}: parameter type {unknown[0]!r}; accepted are {', '.join(_CODES)}."
            )
        self.name = name
        self.parameters = parameters
        self._module = module
        self._mangled = mangled
        codes = [_CODES[word] for word in parameters]
        self._layout = struct.Struct("@" + "".join(codes))
        # "0q" adds no value but aligns, as C does before a member of that type.
        self._offsets = [
            struct.calcsize("@" + "".join(codes[:i]) + "0" + code) for i, code in enumerate(codes)
        ]
        self._sizes = [struct.calcsize("@" + code) for code in codes]
        self._lock = threading.Lock()
        self._api: Driver
        self._functions: dict[int, int] = {}
        # Device -> the most dynamic shared memory and the largest cluster allowed so far.
        self._allowed: dict[int, tuple[int, int]] = {}
        self._local = threading.local()

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        args: Sequence[torch.Tensor | int | float],
        stream: int | None = None,
        shared_bytes: int = 0,
        pdl: bool = False,
        cluster: Dim3 | None = None,
    ) -> None:
        """Launch on the device of the first tensor among ``args``, whatever device is current.

        Args:
            grid: blocks in x, y, z.
            block: threads a block in x, y, z.
            args: one value for each parameter; a tensor stands for the address of its data.
            stream: a ``cudaStream_t`` (``torch.cuda.Stream.cuda_stream``) of that device; None
                takes torch's current stream there.
            shared_bytes: dynamic shared memory a block.
            pdl: programmatic dependent launch: may start before the kernel ahead has finished.
            cluster: blocks a cluster in x, y, z.

        Raises:
            DeviceError: a tensor is on the CPU or on another device than the first one.
            LaunchError: a value does not fit its parameter, or the driver refuses the launch.
            BuildError: the driver cannot load the kernel on this device.
        """
        device = _NO_DEVICE
        values: list[int | float] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                index = arg.get_device()
                if index != device:
                    if device != _NO_DEVICE or index < 0:
                        raise DeviceError(
                            f"{self.name}: argument {len(values)} is on {arg.device}; all tensors "
                            "of a launch must be on one CUDA device. Move it there."
                        )
                    device = index
                values.append(arg.data_ptr())
            else:
                values.append(arg)
        current = torch.cuda.current_device()
        if device in (_NO_DEVICE, current):
            self._launch(current, grid, block, values, stream, shared_bytes, pdl, cluster)
        else:
            with torch.cuda.device(device):
                self._launch(device, grid, block, values, stream, shared_bytes, pdl, cluster)

    def _launch(
        self,
        device: int,
        grid: Dim3,
        block: Dim3,
        values: Sequence[int | float],
        stream: int | None,
        shared_bytes: int,
        pdl: bool,
        cluster: Dim3 | None,
    ) -> None:
        try:
            prepared: _Prepared = self._local.prepared
        except AttributeError:
            prepared = self._local.prepared = _Prepared(self._layout, self._offsets)
        plan = (grid, block, shared_bytes, pdl, cluster)
        function = self._fill(prepared, device, plan, values)
        prepared.config.stream = _raw_stream(device) if stream is None else stream
        launch_args = (prepared.config_reference, function, prepared.pointers, None)
        status = self._api.launch_kernel(*launch_args)
        if status:
            self._retry(plan, device, launch_args, status)

    def bind(
        self,
        device: int,
        grid: Dim3,
        block: Dim3,
        constants: Sequence[int | float],
        shared_bytes: int = 0,
        pdl: bool = False,
        cluster: Dim3 | None = None,
    ) -> BoundLaunch:
        """A launch on one device whose arguments are fixed, but for the addresses they begin with.

        Args:
            device: index of a CUDA device; the kernel is loaded there.
            grid, block, shared_bytes, pdl, cluster: as ``launch``.
            constants: the values of the last parameters; those before them are pointers.

        Raises:
            ConfigError: a parameter before the constants is no pointer.
            LaunchError, BuildError: as ``launch``.
        """
        count = len(self.parameters) - len(constants)
        if count < 0 or set(self.parameters[:count]) - {"pointer"}:
            raise ConfigError(
                f"{self.name} takes ({', '.join(self.parameters)}), got {len(constants)} "
                "constants; what stands before them must be pointers."
            )
        prepared = _Prepared(self._layout, self._offsets)
        plan = (grid, block, shared_bytes, pdl, cluster)
        function = self._fill(prepared, device, plan, (*[0] * count, *constants))
        launch_args = (prepared.config_reference, function, prepared.pointers, None)
        return BoundLaunch(
            self._api.launch_kernel,
            launch_args,
            prepared.values,
            prepared.config,
            count,
            functools.partial(_raw_stream, device),
            lambda status: self._retry(plan, device, launch_args, status),
        )

    def function(self, device: int) -> int:
        """The driver's handle of the kernel on a device, for asking it; raises as ``launch``."""
        return self._functions.get(device) or self._load(device)

    def _retry(self, plan: _Plan, device: int, launch_args: tuple[Any, ...], status: int) -> None:
        api = self._api
        if status == INVALID_CONTEXT:  # the first CUDA call of a new thread
            api.make_current(device)
            status = api.launch_kernel(*launch_args)
        if status:
            raise self._refused(plan, device, api.explain(status))

    def _fill(
        self, prepared: _Prepared, device: int, plan: _Plan, values: Sequence[int | float]
    ) -> int:
        """Write a launch into ``prepared``; returns the function to launch, loaded and allowed."""
        grid, block, shared_bytes, _, cluster = plan
        if plan != prepared.plan:
            sizes = (*grid, *block, *(cluster or (1, 1, 1)))
            if len(sizes) != 9 or min(sizes) < 1 or max(sizes) > _LARGEST_SIZE or shared_bytes < 0:
                raise self._refused(
                    plan,
                    device,
                    f"grid, block and cluster take three sizes of 1..{_LARGEST_SIZE}, shared_bytes "
                    "0 or more; an empty input is to be answered without a launch",
                )
            prepared.set_plan(plan)
        try:
            self._layout.pack_into(prepared.values, 0, *values)
        except (struct.error, OverflowError) as error:
            raise LaunchError(
                f"{self.name} takes ({', '.join(self.parameters)}), got {values!r}: {error}."
            ) from error
        function = self._functions.get(device) or self._load(device)
        allowed_bytes, allowed_blocks = self._allowed[device]
        cluster_blocks = 1 if cluster is None else cluster[0] * cluster[1] * cluster[2]
        if shared_bytes > allowed_bytes or cluster_blocks > allowed_blocks:
            try:
                self._allow(device, shared_bytes, cluster_blocks)
            except DriverError as error:
                raise self._refused(plan, device, str(error)) from error
        return function

    def _allow(self, device: int, shared_bytes: int, cluster_blocks: int) -> None:
        with self._lock:
            allowed_bytes, allowed_blocks = self._allowed[device]
            if shared_bytes > allowed_bytes:
                self._api.allow_shared_bytes(self._functions[device], shared_bytes)
                allowed_bytes = shared_bytes
            if cluster_blocks > allowed_blocks:
                self._api.allow_large_clusters(self._functions[device])
                allowed_blocks = cluster_blocks
            self._allowed[device] = (allowed_bytes, allowed_blocks)

    def _load(self, device: int) -> int:
        with self._lock:
            if device in self._functions:
                return self._functions[device]
            api = self._api = driver()
            try:
                # The driver loads lazily; asked for here, so that no launch does it in a capture.
                with api.on(device), api.relaxed_capture():
                    kernel = api.kernel(self._module.library(api), self._mangled)
                    function = api.function(kernel)
                    layout = api.parameter_layout(kernel)
            except DriverError as error:
                raise BuildError(
                    f"the driver cannot load {self.name} of {self._module.label} on cuda:{device} "
                    f"({torch.cuda.get_device_name(device)}, {device_arch(device)}): {error}. "
                    "Compile for this device's architecture; CUDA 13 needs driver R580 or newer."
                ) from error
            if layout != list(zip(self._offsets, self._sizes, strict=True)):
                raise BuildError(
                    f"{self.name} was declared with parameters ({', '.join(self.parameters)}), but "
                    f"the (offset, size) of those it has are {layout}. Correct the declaration."
                )
            self._allowed[device] = (0, _PORTABLE_CLUSTER_BLOCKS)
            self._functions[device] = function
            return function

    def _refused(self, plan: _Plan, device: int, why: str) -> LaunchError:
        grid, block, shared_bytes, pdl, cluster = plan
        return LaunchError(
            f"{self.name} of {self._module.label}: {why}. Plan: grid={grid}, block={block}, "
            f"shared_bytes={shared_bytes}, pdl={pdl}, cluster={cluster}, cuda:{device}."
        )


def _no_stream(device: int) -> int:
    raise DeviceError(f"cuda:{device}: this build of torch has no CUDA. Install one that has.")


# torch.cuda.current_stream() builds a Stream object for it, at ten times the cost.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
