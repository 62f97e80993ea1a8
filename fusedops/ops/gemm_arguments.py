"""The Python arguments of ``gemm``: turned into a spec and an operand list, and checked.

What depends on shapes and dtypes is checked behind the operator (``GemmSpec.check``). Types are
looked at only where a spec is made for the first time or a call has failed, so that other calls pay
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from fusedops.check import describe, describe_value, require_bool, require_tensor
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.spec import DTYPES, forget_when_redefined
from fusedops.errors import ConfigError, DTypeError, LayoutError, ShapeError
from fusedops.ops.overlap import overlap
from fusedops.problem import GemmSpec
from fusedops.prologue import NO_PROLOGUE, Prologue
from fusedops.weight import DENSE_DTYPES, Dense, WeightFormat

__all__ = [
    "as_epilogue",
    "as_format",
    "as_prologue",
    "cached_spec",
    "form_of",
    "ordered",
    "require_out_apart",
    "require_types",
    "require_x_dtype",
    "shape_of",
    "spec_text",
]


def as_epilogue(epilogue: Epilogue | str | None) -> Epilogue:
    """The chain that ``epilogue`` is or describes; ConfigError for anything else."""
    if epilogue is None:
        return Epilogue()
    if isinstance(epilogue, str):
        return Epilogue.parse(epilogue)
    if not isinstance(epilogue, Epilogue):
        raise ConfigError(
            f"gemm: epilogue is {describe_value(epilogue)}; accepted: an Epilogue, e.g. "
            'Epilogue((Bias(), Act("silu"))), its text, e.g. "bias|act(silu)", or None.'
        )
    return epilogue


def as_prologue(prologue: Prologue | str | None) -> Prologue:
    """The prologue that ``prologue`` is or describes; ConfigError for anything else."""
    if prologue is None:
        return NO_PROLOGUE
    if isinstance(prologue, str):
        return Prologue.parse(prologue)
    if not isinstance(prologue, Prologue):
        raise ConfigError(
            f"gemm: prologue is {describe_value(prologue)}; accepted: a Prologue, its text, e.g. "
            '"rms_norm(1e-05)", or None.'
        )
    return prologue


def as_format(weight: WeightFormat | str) -> WeightFormat:
    """The weight format that ``weight`` is or describes; ConfigError for anything else."""
    if isinstance(weight, str):
        return WeightFormat.parse(weight)
    if not isinstance(weight, WeightFormat):
        raise ConfigError(
            f"gemm: weight is {describe_value(weight)}; accepted: a WeightFormat, its text, e.g. "
            '"int4(4096,14336)", or None for a dense weight.'
        )
    return weight


def form_of(weight: WeightFormat | str | None, w: Tensor) -> WeightFormat | str | tuple[int, ...]:
    """The weight's format for ``spec_text``, or the shape of a dense one where it is None."""
    if weight is None:
        return shape_of(w)
    return weight if isinstance(weight, str) else as_format(weight)


def _as_weight(weight: WeightFormat | str | tuple[int, ...]) -> WeightFormat:
    if isinstance(weight, (WeightFormat, str)):
        return as_format(weight)
    if len(weight) != 2:
        raise ShapeError(
            f"gemm: w has shape {tuple(weight)}; accepted: (N, K), as nn.Linear stores it."
        )
    return Dense(*weight)


def require_x_dtype(x_dtype: torch.dtype) -> None:
    """Raise DTypeError unless activations may have this dtype."""
    if x_dtype not in DENSE_DTYPES:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in DENSE_DTYPES)
        raise DTypeError(
            f"gemm: x is {str(x_dtype).removeprefix('torch.')}; accepted are tensors of "
            f"{accepted}. Cast x and w first, e.g. x.float()."
        )


def _require_out_dtype(out_dtype: torch.dtype | None) -> None:
    if out_dtype is None:
        return
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPES.values():
        accepted = ", ".join(map(str, DTYPES.values()))
        raise ConfigError(f"gemm: out_dtype={out_dtype!r}; accepted are {accepted}, or None.")


# Typed, for 1 == True.
@lru_cache(maxsize=4096, typed=True)
def cached_spec(
    weight: WeightFormat | str | tuple[int, ...],
    epilogue: Epilogue | str | None,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    prologue: Prologue | str | None,
    batch_invariant: bool = False,
) -> GemmSpec:
    """The spec for a weight format or its text, or for a dense weight of the given shape."""
    form = _as_weight(weight)
    chain = as_epilogue(epilogue)
    require_x_dtype(x_dtype)
    _require_out_dtype(out_dtype)
    if out_dtype is None:
        wide = x_dtype if x_dtype.is_floating_point and x_dtype.itemsize > 1 else torch.bfloat16
        out_dtype = chain.result_dtype(wide)
    return GemmSpec(form, chain, out_dtype, as_prologue(prologue), batch_invariant)


forget_when_redefined(cached_spec.cache_clear)


def spec_text(
    weight: WeightFormat | str | tuple[int, ...],
    epilogue: Epilogue | str | None,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    prologue: Prologue | str | None,
    batch_invariant: bool = False,
) -> tuple[str, tuple[str, ...]]:
    """The canonical spec and its operands' names; a constant to torch.compile.

    Args:
        weight: the weight's format or its text, or the (N, K) shape of a dense one.
        epilogue: the chain or its text.
        x_dtype: dtype of the activations.
        out_dtype: dtype of the result; None: what the chain forces, else x's (bf16 for 8-bit x).
        prologue: the prologue or its text.
        batch_invariant: whether a row's result may not depend on M.
    """
    spec = cached_spec(weight, epilogue, x_dtype, out_dtype, prologue, batch_invariant)
    return spec.text, spec.operand_names


# What torch.compiler.assume_constant_result does, which would import torch._dynamo first: it takes
# longer than all else between ``import fusedops`` and a first result.
spec_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shape_of(w: Tensor) -> tuple[int, ...]:
    """The weight's shape for ``spec_text``.

    N and K stand in the spec, so torch.compile(dynamic=True) must take them as constants and
    compile anew for another weight's shape: ``index`` makes it do so.
    """
    return tuple(map(index, w.shape)) if torch.compiler.is_compiling() else w.shape


def ordered(
    text: str,
    names: tuple[str, ...],
    operands: Mapping[str, Tensor | None] | Sequence[Tensor | None] | None,
) -> list[Tensor | None]:
    """The operands in the spec's order."""
    if operands is None:
        operands = {}
    if isinstance(operands, (list, tuple)):
        return list(operands)
    if not isinstance(operands, Mapping):
        raise DTypeError(
            f"gemm: operands is {describe_value(operands)}; accepted: tensors by name, e.g. "
            f"{{'bias': bias}}, or a list of them in the order of {', '.join(names) or 'none'}."
        )
    unknown = [str(name) for name in operands if name not in names]
    if unknown:
        raise ConfigError(
            f"gemm: unknown operand(s) {', '.join(unknown)}; the spec {text} reads "
            f"{', '.join(names) or 'none'}."
        )
    return [operands.get(name) for name in names]


def require_types(
    x: object,
    w: object,
    options: tuple[Any, Any, Any, Any, Any],
    operands: Any,
    out: Any = None,
) -> None:
    """Raise for the first argument that is of the wrong type; ``options``: weight, epilogue, ...

    Raises:
        DTypeError: something that is no tensor stands for one.
        ConfigError: an option is of the wrong type.
    """
    require_tensor("gemm", "x", x)
    require_tensor("gemm", "w", w)
    weight, epilogue, out_dtype, prologue, batch_invariant = options
    if weight is not None:
        as_format(weight)
    as_epilogue(epilogue)
    _require_out_dtype(out_dtype)
    as_prologue(prologue)
    require_bool("gemm", batch_invariant=batch_invariant)
    if isinstance(operands, (Mapping, list, tuple)):
        named = operands if isinstance(operands, Mapping) else dict(enumerate(operands))
        for name, operand in named.items():
            require_tensor("gemm", f"operand {name!r}", operand, optional=True)
    if out is not None:
        for number, result in enumerate(out if isinstance(out, (list, tuple)) else [out]):
            require_tensor("gemm", f"out[{number}]" if number else "out", result)


def require_out_apart(
    x: Tensor,
    w: Tensor,
    operands: Sequence[Tensor | None],
    axes: Sequence[str],
    out: Sequence[Tensor],
) -> None:
    """Raise LayoutError where an output shares memory with what is read, or with another output.

    The one exception: the main result may be a residual of its shape and strides, an operand with
    axis ``mn``, since each of its elements is read just before it is written.

    Args:
        axes: of the operands.
    """
    inputs = [("x", x, ""), ("w", w, "")]
    inputs += [
        (f"operand {i}", tensor, axis)
        for i, (tensor, axis) in enumerate(zip(operands, axes, strict=False))
        if tensor is not None
    ]
    for number, result in enumerate(out):
        for name, tensor, axis in inputs:
            in_place = number == 0 and axis == "mn" and _is_same(result, tensor)
            if overlap(result, tensor) and not in_place:
                raise LayoutError(
                    f"gemm_out: out shares memory with {name}, which is read while out is written "
                    f"(out: {describe(result)}, {name}: {describe(tensor)}); pass a separate "
                    "tensor (only a residual may be updated in place, by passing it as out)."
                )
        for other in range(number):
            if overlap(result, out[other]):
                raise LayoutError(
                    f"gemm_out: outputs {other} and {number} overlap in memory "
                    f"({describe(out[other])}, {describe(result)}); both are written, so pass "
                    "separate tensors."
                )


def _is_same(result: Tensor, tensor: Tensor) -> bool:
    return (
        result.data_ptr() == tensor.data_ptr()
        and result.dtype == tensor.dtype
        and result.shape == tensor.shape
        and result.stride() == tensor.stride()
    )
