"""``BoundLaunch``: a kernel's launch of which only addresses and the stream change."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from fusedops.jit.driver import LaunchConfig

__all__ = ["BoundLaunch"]


class BoundLaunch:
    """A launch ready but for its addresses; get it from ``CudaKernel.bind``.

    It costs about 1 us from Python. A thread needs one of its own: the values lie in its memory
    while the driver reads them.

    Args:
        launch_kernel: ``Driver.launch_kernel``.
        arguments: what it is called with; they refer to ``values`` and ``config``.
        values: memory of the arguments, in which all but the addresses are filled in.
        config: of the launch.
        pointers: how many addresses ``values`` begins with.
        stream: the stream to launch on, asked at every launch.
        failed: called with the status of a launch that the driver refused; raises or repairs.
    """

    def __init__(
        self,
        launch_kernel: Callable[..., int],
        arguments: tuple[Any, ...],
        values: ctypes.Array[ctypes.c_uint64],
        config: LaunchConfig,
        pointers: int,
        stream: Callable[[], int],
        failed: Callable[[int], None],
    ) -> None:
        self._launch_kernel = launch_kernel
        self._arguments = arguments
        self._pack = struct.Struct(f"@{pointers}P").pack_into
        self._values = values
        self._config = config
        self._stream = stream
        self._failed = failed

    def __call__(self, *addresses: int) -> None:
        """Launch on the current stream of its device, which must be the current device.

        Raises:
            LaunchError: the driver refuses the launch.
        """
        self._pack(self._values, 0, *addresses)
        self._config.stream = self._stream()
        status = self._launch_kernel(*self._arguments)
        if status:
            self._failed(status)
