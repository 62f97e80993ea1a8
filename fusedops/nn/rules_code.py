"""What a module runs: whether its code is that of the class which a rule describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.epilogue.activations import activation

__all__ = ["computes", "has_hooks", "other_code"]


def other_code(module: nn.Module, home: str, class_name: str) -> str | None:
    """Why ``module`` does not run the code of the class ``class_name`` in ``home``, or None.

    Names do not tell: a subclass may be called like its base, and ``forward`` may be assigned to a
    class. So the globals of ``forward``, of what it calls on ``self``, and of all that wraps them
    (``functools.wraps`` copies names, not globals) must be those of the place it should come from.
    """
    kind = type(module)
    found, expected = f"{kind.__module__}.{kind.__qualname__}", f"{home}.{class_name}"
    if found != expected:
        return f"its class is {found}, not {expected}"
    if kind.__call__ is not nn.Module.__call__:
        return "its class has a __call__ of its own"
    package = home.partition(".")[0]
    waiting, seen = ["forward"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        if name in vars(module):
            return f"its {name} was replaced on the instance"
        layer: Any = getattr(kind, name)
        while hasattr(layer, "__wrapped__") and _defined_in(layer).startswith(f"{package}."):
            layer = layer.__wrapped__
        if _defined_in(layer) != home or layer.__qualname__ != f"{class_name}.{name}":
            return f"the {name} of its class was replaced"
        called = layer.__code__.co_names
        waiting += [n for n in called if n not in seen and _is_own_method(kind, n)]
    return None


def _defined_in(function: Any) -> str:
    """Name of the Python module whose globals a function reads; empty for anything else."""
    if not isinstance(function, FunctionType):
        return ""
    return str(function.__globals__.get("__name__", ""))


def _is_own_method(kind: type, name: str) -> bool:
    """Whether ``kind`` has a method of this name that ``nn.Module`` does not have."""
    member = inspect.getattr_static(kind, name, None)
    return callable(member) and not hasattr(nn.Module, name)


def has_hooks(child: object) -> bool:
    """Whether a hook of any kind is registered on a module or inside it."""
    return isinstance(child, nn.Module) and any(
        value
        for part in child.modules()
        for attribute, value in vars(part).items()
        if attribute.endswith("_hooks")
    )


def computes(function: Callable[[Tensor], Tensor], name: str) -> bool:
    """Whether ``function``, which a module runs, is the activation ``name`` of its config."""
    samples = torch.linspace(-6.0, 6.0, 97, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        try:
            return torch.allclose(function(samples), activation(name, samples), 1e-4, 1e-5)
        except Exception:  # noqa: BLE001 - whatever it takes, it is not one tensor for another
            return False
