"""Error types: every public call raises one of these, or returns a right result.

Each message states what was got, what is accepted and where to change it. The classes also inherit
the closest built-in type, so ``except ValueError`` in a caller's code keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BuildError",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "FusedOpsError",
    "KernelMissingError",
    "LaunchError",
    "LayoutError",
    "LoadError",
    "PositionError",
    "ShapeError",
    "UnsupportedError",
]


class FusedOpsError(Exception):
    """Base class of every error that fusedops raises on purpose."""


class ShapeError(FusedOpsError, ValueError):
    """A tensor has the wrong number of dimensions or a wrong size."""


class LayoutError(FusedOpsError, ValueError):
    """A tensor's strides, offset or packing are not what the operation accepts."""


class ConfigError(FusedOpsError, ValueError):
    """An option, a spec string or a tile configuration is not legal, or of the wrong type."""


class DTypeError(FusedOpsError, TypeError):
    """A tensor has a dtype that the operation does not accept, or an argument is no tensor."""


class DeviceError(FusedOpsError, ValueError):
    """Tensors live on different devices, or the device asked for is absent."""


class PositionError(FusedOpsError, IndexError):
    """A position, token or page index lies outside its table (checked on the CPU only)."""


class LoadError(FusedOpsError, ValueError):
    """A model file is missing, truncated, inconsistent or of an unknown architecture."""


class BuildError(FusedOpsError, RuntimeError):
    """A kernel failed to compile (the log's last lines follow), or the store cannot be used."""


class KernelMissingError(FusedOpsError, RuntimeError):
    """A kernel is not ready and may not be compiled now; the message says which command helps."""


class LaunchError(FusedOpsError, RuntimeError):
    """The driver refused a launch; the message holds the plan that was launched."""


class UnsupportedError(FusedOpsError, NotImplementedError):
    """No provider serves the request.

    Attributes:
        reasons: provider name -> why it was passed over.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons: dict[str, str] = dict(reasons or {})
        lines = [message, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join(lines))
