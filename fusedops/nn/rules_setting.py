"""What the rules of a conversion need beside the module: dtypes, the family, and schemes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES
from fusedops.quant import UNQUANTIZED, Scheme

__all__ = ["Setting", "set_data"]

_CASTABLE = (torch.float64, *ACTIVATION_DTYPES)


@dataclass(frozen=True)
class Setting:
    """What a rule needs beside the module.

    Attributes:
        config: the model's Hugging Face config, or None.
        dtype: what parameters are cast to before modules are replaced; None keeps theirs.
        model_dtype: dtype of the activations that flow through the model.
        home: the Python module that defines the family's classes; None for no family.
        scheme: how linear layers are quantized.
        overrides: schemes of layers whose names match a pattern; the first that matches counts.
        path: the name in the model of the module that a rule looks at.
    """

    config: Any
    dtype: torch.dtype | None
    model_dtype: torch.dtype
    home: str | None = None
    scheme: Scheme = UNQUANTIZED
    overrides: tuple[tuple[str, Scheme], ...] = ()
    path: str = ""

    def at(self, path: str) -> Setting:
        """The setting for the module of that name."""
        return replace(self, path=path)

    def scheme_of(self, child: str = "") -> Scheme:
        """The scheme of the module at ``path``, or of a layer inside it."""
        name = f"{self.path}.{child}" if child else self.path
        for pattern, scheme in self.overrides:
            if fnmatchcase(name, pattern):
                return scheme
        return self.scheme

    def casts(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is cast: plain floating-point tensors of another dtype are."""
        return (
            self.dtype is not None
            and parameter.dtype in _CASTABLE
            and parameter.dtype != self.dtype
            and type(parameter.data) is Tensor
        )

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype of ``parameter`` once it is cast."""
        return self.dtype if self.dtype and self.casts(parameter) else parameter.dtype


def set_data(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Give ``parameter`` the changed values; it stays the same object and of the same kind.

    A tensor made under ``torch.inference_mode()`` and one made outside are of two kinds, and data
    of the other kind leave a parameter that later operations refuse.
    """
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        parameter.data = change(parameter.data)
