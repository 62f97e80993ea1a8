"""What an epilogue node is: operands, shape and dtype rule, reference and error bound in one class.

The bounds follow the standard model of floating-point arithmetic (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., chapter 2): one float32 operation adds a relative error
of at most ``FLOAT32_ROUNDOFF``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fusedops.check import describe, describe_value, require_bool
from fusedops.epilogue.emit import KernelTile
from fusedops.epilogue.spec import SpecItem
from fusedops.errors import ConfigError, DTypeError, ShapeError, UnsupportedError

__all__ = [
    "FLOAT32_ROUNDOFF",
    "FLOAT_DTYPES",
    "Axis",
    "Context",
    "ExtraOutput",
    "Node",
    "Operand",
    "rounding_bound",
    "to_dtype",
]

FLOAT32_ROUNDOFF = 2.0**-24
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ANY_COUNT = -1
"""Stands in an accepted shape for any number from 1 on."""

Axis = Literal["scalar", "m", "n", "mn", "k", "parts_m", "weight", "groups_m"]
"""How an operand runs along the GEMM: M rows, N columns (of the node's input), K, or partial
row statistics of shape (parts, M). Weight formats have two more, whose shapes they state: what
belongs to the weight alone, and scales of x of shape (groups along K, M)."""


def _require_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{what} name {name!r}; accepted: an identifier (letters, digits and _, no digit "
            "first), e.g. bias2."
        )


def _require_dtypes(who: str, dtypes: object) -> None:
    legal = isinstance(dtypes, tuple) and all(isinstance(dtype, torch.dtype) for dtype in dtypes)
    if not legal or not dtypes:
        raise ConfigError(
            f"{who}: dtypes is {dtypes!r}; accepted: a tuple of torch.dtype, e.g. (torch.float32,)."
        )


@dataclass(frozen=True)
class Operand:
    """A tensor that a part of the specification reads.

    Attributes:
        name: its name in specs, error messages and keyword arguments.
        axis: which dimensions it has, see ``Axis``.
        dtypes: accepted dtypes.
        optional: None may be passed.

    Raises:
        ConfigError: a field is not as described.
    """

    axes: ClassVar[tuple[str, ...]] = ("scalar", "m", "n", "mn", "k", "parts_m")
    stated_by: ClassVar[str] = "the epilogue"
    name: str
    axis: Axis
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    optional: bool = False

    def __post_init__(self) -> None:
        _require_name("operand", self.name)
        who = f"operand {self.name!r}"
        if self.axis not in self.axes:
            accepted = ", ".join(self.axes)
            raise ConfigError(f"{who}: axis is {self.axis!r}; accepted are {accepted}.")
        _require_dtypes(who, self.dtypes)
        require_bool(who, optional=self.optional)

    def accepted_shapes(
        self, m_shape: tuple[int, ...], m: int, n: int, k: int
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes accepted beside x of shape (*m_shape, K) with M = prod(m_shape)."""
        match self.axis:
            case "scalar":
                return ((), (1,))
            case "m":
                return ((m,), (m, 1), m_shape, (*m_shape, 1))
            case "n":
                return ((n,), (1, n))
            case "k":
                return ((k,), (1, k))
            case "mn":
                return ((*m_shape, n),)
            case "parts_m":
                return ((_ANY_COUNT, m),)
            case _:
                return ()

    def check(
        self, op: str, tensor: Tensor, m_shape: tuple[int, ...], m: int, n: int, k: int
    ) -> None:
        """Raise DTypeError or ShapeError unless ``tensor`` may be this operand."""
        if tensor.dtype not in self.dtypes:
            accepted = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            raise DTypeError(
                f"{op}: operand {self.name!r} has dtype {str(tensor.dtype).removeprefix('torch.')};"
                f" accepted: {accepted}. Cast it first."
            )
        shape = tuple(tensor.shape)
        accepted_shapes = self.accepted_shapes(m_shape, m, n, k)
        for candidate in accepted_shapes:
            if len(candidate) == len(shape) and all(
                s >= 1 if c == _ANY_COUNT else c == s for c, s in zip(candidate, shape, strict=True)
            ):
                return
        names = " or ".join(dict.fromkeys(str(s) for s in accepted_shapes))
        names = names.replace(f"({_ANY_COUNT},", "(parts >= 1,")
        raise ShapeError(
            f"{op}: operand {self.name!r} has shape {shape}; accepted: {names} "
            f"(axis {self.axis!r}, M={m}, N={n}, K={k}). Reshape it, or change {self.stated_by}."
        )

    def view(self, tensor: Tensor, m: int, n: int) -> Tensor:
        """``tensor`` as a 0- or 2-D view that broadcasts against an (M, N) accumulator."""
        match self.axis:
            case "scalar":
                return tensor.reshape(())
            case "m":
                return tensor.reshape(m, 1)
            case "n":
                return tensor.reshape(1, n)
            case "mn":
                return tensor.reshape(m, n)
            case _:
                return tensor


@dataclass(frozen=True)
class ExtraOutput:
    """A tensor that a node writes beside the main result.

    Attributes:
        name: for messages and ``explain``.
        dtype: its dtype; None means the dtype of the main result.
        allocate: ``(m_shape, n, dtype, device) -> Tensor``: empty, of its shape and strides.

    Raises:
        ConfigError: the name is no identifier, or ``dtype`` no torch.dtype.
    """

    name: str
    dtype: torch.dtype | None
    allocate: Callable[[tuple[int, ...], int, torch.dtype, torch.device], Tensor]

    def __post_init__(self) -> None:
        _require_name("extra output", self.name)
        if self.dtype is not None:
            _require_dtypes(f"extra output {self.name!r}", (self.dtype,))


@dataclass
class Context:
    """What a node's reference sees beside the accumulator.

    Attributes:
        operands: by name, as views that broadcast against (M, N), in their stored dtype; None where
            an optional one was left out.
        out_dtype: dtype of the main result.
        outputs: extra outputs, filled by the nodes in chain order.
    """

    operands: Mapping[str, Tensor | None]
    out_dtype: torch.dtype
    outputs: list[Tensor] = field(default_factory=list)

    def read(self, name: str, like: Tensor) -> Tensor:
        """Operand ``name`` in the compute dtype of ``like``."""
        try:
            operand = self.operands[name]
        except KeyError:
            declared = ", ".join(self.operands) or "none"
            raise ConfigError(
                f"operand {name!r} is read but not declared; declared: {declared}."
            ) from None
        if operand is None:
            raise ShapeError(f"operand {name!r} is missing.")
        return operand.to(like.dtype)


@dataclass(frozen=True)
class Node(SpecItem):
    """One step of an epilogue, on the float32 accumulator of shape (M, N).

    A subclass is the one definition of its math: operands (checks, fake and kernel arguments
    follow), the rule for width and dtype, the reference and the error bound.

    A subclass outside of fusedops runs its reference on copies, so that one which works in place
    changes neither another node's results nor the caller's tensors, and what it gives is checked.
    """

    registry: ClassVar[dict[str, type[SpecItem]]] = {}
    kind: ClassVar[str] = "epilogue node"
    terminal: ClassVar[bool] = False
    """True where no node that changes the value may follow."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reference" in cls.__dict__ and cls.__module__.partition(".")[0] != "fusedops":
            setattr(cls, "reference", _on_copies(cls.reference))  # noqa: B010

    def operands(self) -> tuple[Operand, ...]:
        """Tensors this node reads, in the order in which they are passed."""
        return ()

    def extra_outputs(self) -> tuple[ExtraOutput, ...]:
        """Tensors this node writes beside the main result."""
        return ()

    def width(self, n: int) -> int:
        """Columns after this node, given ``n`` before it; ShapeError where ``n`` does not fit."""
        return n

    def group_columns(self) -> int:
        """Columns whose values the node needs together; a kernel's tile holds whole groups."""
        return 1

    def depends_on_tiles(self) -> bool:
        """Whether a result is partial: the kernel's tiles decide which columns it covers."""
        return False

    def result_dtype(self) -> torch.dtype | None:
        """The dtype this node forces on the main result, or None."""
        return None

    def reference(self, value: Tensor, context: Context) -> Tensor:
        """The node on ``value`` (M, N), in ``value``'s dtype (float32; float64 in bounds)."""
        raise UnsupportedError(
            f"the node class {type(self).__qualname__} defines no reference(self, value, context); "
            "add it: the reference and cuBLAS providers run it."
        )

    def emit(self, tile: KernelTile) -> KernelTile:
        """The node on a tile of float32 register values, traced into a kernel.

        A class that leaves it out still works through the reference and cuBLAS providers; the
        kernel providers then say so.
        """
        raise NotImplementedError

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        """Elementwise bound of |computed - exact| after the node.

        Args:
            value: exact input (M, N), float64.
            error: bound of the error that the input already carries, float64.
            context: operands as for ``reference``.
        """
        raise UnsupportedError(
            f"the node class {type(self).__qualname__} defines no bound(self, value, error, "
            "context); only error bounds need it."
        )


_Reference = Callable[[Node, Tensor, Context], Tensor]


class _Declared(dict[str, Tensor | None]):
    """The operands that a node declares; another name is an error that says which node wants it."""

    def __init__(self, node: Node, operands: Mapping[str, Tensor | None]) -> None:
        names = [operand.name for operand in node.operands()]
        given = {name: operands[name] for name in names if name in operands}
        super().__init__({k: None if t is None else t.clone() for k, t in given.items()})
        self._node, self._names = node, names

    def __missing__(self, name: str) -> Tensor | None:
        declared = ", ".join(self._names) or "none"
        raise ConfigError(
            f"{self._node}: its reference reads operand {name!r}, which "
            f"{type(self._node).__qualname__}.operands() does not declare; declared: {declared}."
        )


def _on_copies(reference: _Reference) -> _Reference:
    """A user's ``Node.reference`` on copies of what it is given, with its results checked.

    Raises:
        ConfigError: it reads an operand that the node does not declare, or returns or writes
            something else than the node says.
    """

    @functools.wraps(reference)
    def run(self: Node, value: Tensor, context: Context) -> Tensor:
        own = Context(_Declared(self, context.operands), context.out_dtype)
        result = reference(self, value.clone(), own)
        shape = (value.shape[0], self.width(value.shape[1]))
        _require_result(f"{self}: its reference returned", result, shape, value.dtype)
        declared = self.extra_outputs()
        if len(own.outputs) != len(declared):
            raise ConfigError(
                f"{self}: its reference wrote {len(own.outputs)} extra output(s) into "
                f"context.outputs; its extra_outputs() declares {len(declared)}."
            )
        for output, given in zip(own.outputs, declared, strict=True):
            context.outputs.append(_as_declared(self, given, output, value, context.out_dtype))
        return result.contiguous()

    return run


def _as_declared(
    node: Node, declared: ExtraOutput, output: Tensor, value: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """A copy of an extra output with the strides that its node declares."""
    m, n = value.shape
    like = declared.allocate((m,), n, declared.dtype or out_dtype, value.device)
    what = f"{node}: its reference wrote into {declared.name!r}"
    _require_result(what, output, tuple(like.shape), like.dtype)
    return like.copy_(output)


def _require_result(what: str, result: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(result, Tensor) or result.shape != shape or result.dtype != dtype:
        got = describe(result) if isinstance(result, Tensor) else describe_value(result)
        raise ConfigError(
            f"{what} {got}; accepted: {str(dtype).removeprefix('torch.')} {shape}, as the node "
            "declares."
        )


_HALF_ULP = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
}


def rounding_bound(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Error bound after rounding to ``dtype`` a value that carries ``error``.

    Rounding to nearest adds half a unit in the last place of the rounded value, which may lie
    ``error`` away from ``value``; int8 adds 0.5.
    """
    if dtype == torch.int8:
        return error + 0.5
    relative, absolute = _HALF_ULP[dtype]
    return error + (value.abs() + error) * relative + absolute


E4M3_MAX = 448.0


def to_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``value`` once to ``dtype`` by the library's rules.

    To e4m3: saturate at +-448 (infinities too), NaN stays NaN. To int8: round half to even, clamp
    to +-127, NaN becomes 0. Floating-point dtypes round to nearest even and overflow to infinity.
    """
    if dtype == torch.float8_e4m3fn:
        # One NaN (byte 0x7f) whatever the sign bit, as the GPU's conversion gives.
        clamped = value.clamp(-E4M3_MAX, E4M3_MAX)
        return clamped.masked_fill(value.isnan(), float("nan")).to(dtype)
    if dtype == torch.int8:
        return value.round().clamp(-127, 127).nan_to_num(0.0).to(dtype)
    return value.to(dtype)
