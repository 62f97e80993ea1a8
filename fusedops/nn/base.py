"""What the modules share: frozen parameters, checks of weights, products under autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusedops.check import (
    ACTIVATION_DTYPES,
    describe,
    require_dim,
    require_dtype,
    require_integer,
    require_one_dtype,
    require_same_device,
    require_tensor,
)
from fusedops.errors import ConfigError, FusedOpsError, ShapeError
from fusedops.gemm import spec_text
from fusedops.ops.gemm_arguments import shape_of
from fusedops.weight import DENSE_DTYPES

__all__ = [
    "autocast_dtype",
    "empty_parameter",
    "frozen",
    "gate_and_up",
    "require_bias",
    "require_sizes",
    "require_weights",
    "run_dense",
    "run_gemm",
]

# Looked up once: the three attribute reads cost a tenth of a small call.
_OP_GEMM = torch.ops.fusedops.gemm.default


def frozen(tensor: Tensor) -> nn.Parameter:
    """``tensor`` as a parameter that never requires grad: fusedops is inference only."""
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def empty_parameter(
    *shape: int, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter:
    """A frozen parameter without values yet."""
    return frozen(torch.empty(*shape, dtype=dtype, device=device))


def gate_and_up(
    tensors: Mapping[str, Tensor], halves: Sequence[str]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights and biases of gate and up, from the tensors of the layers that hold them.

    Args:
        tensors: ``<layer>.weight`` and, where there is one, ``<layer>.bias``.
        halves: (gate, up), or one layer with gate above up.
    """
    weights: Sequence[Tensor] = [tensors[f"{name}.weight"] for name in halves]
    biases: Sequence[Tensor | None] = [tensors.get(f"{name}.bias") for name in halves]
    if len(halves) == 1:
        weights = weights[0].chunk(2)
        biases = (None, None) if biases[0] is None else biases[0].chunk(2)
    return weights, biases


def require_sizes(op: str, dtype: torch.dtype | None, **sizes: int) -> None:
    """Check the arguments of a module's constructor.

    Raises:
        ConfigError: a size is no integer or negative, or ``dtype`` is no dtype of activations.
    """
    for name, size in sizes.items():
        require_integer(op, name, size, 0)
    if dtype is not None and dtype not in ACTIVATION_DTYPES:
        raise ConfigError(
            f"{op}: dtype={dtype!r}; accepted are torch.float32, torch.bfloat16, torch.float16, or "
            "None for torch's default dtype."
        )


def require_weights(op: str, **weights: Tensor) -> None:
    """Check the weights that a module takes over.

    Raises:
        DTypeError: one is no tensor or of a dtype that no product takes, or their dtypes differ.
        ShapeError: one is no matrix.
        DeviceError: their devices differ.
    """
    for name, weight in weights.items():
        require_tensor(op, name, weight)
        require_dtype(op, name, weight, DENSE_DTYPES)
        require_dim(op, name, weight, 2, exactly=True)
    require_one_dtype(op, **weights)
    first, anchor = next(iter(weights.items()))
    require_same_device(op, first, anchor, **weights)


def require_bias(op: str, name: str, bias: Tensor | None, rows: int) -> None:
    """Raise unless ``bias`` is None or a tensor of shape (rows,) or (1, rows)."""
    require_tensor(op, name, bias, optional=True)
    if bias is not None and tuple(bias.shape) not in ((rows,), (1, rows)):
        raise ShapeError(f"{op}: {name} has shape {tuple(bias.shape)}; accepted: ({rows},).")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What torch.autocast has linear layers compute in on x's device now; None outside of it."""
    device_type = "cuda" if x.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def run_dense(
    x: Tensor,
    weight: Tensor,
    epilogue: str,
    operands: list[Tensor | None],
    prologue: str | None = None,
) -> Tensor:
    """``epilogue(prologue(x) @ weight.T)`` in x's dtype through ``fusedops::gemm``.

    An x whose rows are strided is copied first: a module that stands in a model cannot ask the code
    around it for another layout.

    Under ``torch.autocast`` the result is what ``F.linear`` gives there: x, the weight and the
    bias are cast to autocast's dtype, which is the result's dtype (with a residual: the wider of
    the two). The weight is then cast at every call, as torch does for parameters that need no
    gradient; there must be no prologue.
    """
    try:
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        dtype = autocast_dtype(x)
        if dtype is not None:
            return _run_under_autocast(x, weight, epilogue, operands, dtype)
        spec, _ = spec_text(shape_of(weight), epilogue, x.dtype, x.dtype, prologue)
        result: Tensor = _OP_GEMM(x, weight, operands, spec)[0]
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        # Types are looked at only once something failed: other calls do not pay for it.
        if not isinstance(error, FusedOpsError):
            _require_tensors(x, operands)
        raise
    return result


def run_gemm(
    x: Tensor,
    weight: Tensor,
    form: str,
    epilogue: str,
    operands: Mapping[str, Tensor | None],
    out_dtype: torch.dtype | None,
    prologue: str | None = None,
) -> list[Tensor]:
    """All results of ``fusedops::gemm`` with a weight in any format; strided x is copied first.

    Args:
        x, weight, epilogue, out_dtype, prologue: as in ``fusedops.gemm``.
        form: the weight format's text.
        operands: by name; more than the product reads may be given.
    """
    try:
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        spec, names = spec_text(form, epilogue, x.dtype, out_dtype, prologue)
        results: list[Tensor] = _OP_GEMM(x, weight, [operands.get(name) for name in names], spec)
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        if not isinstance(error, FusedOpsError):
            _require_tensors(x, [operands.get("residual")])
        raise
    return results


def _require_tensors(x: Tensor, operands: list[Tensor | None]) -> None:
    require_tensor("fused module", "x", x)
    if x.dim() == 0:
        raise ShapeError(f"fused module: x is {describe(x)}; accepted: (..., features).")
    for operand in operands:
        require_tensor("fused module", "residual", operand, optional=True)


def _run_under_autocast(
    x: Tensor, weight: Tensor, epilogue: str, operands: list[Tensor | None], dtype: torch.dtype
) -> Tensor:
    _, names = spec_text(shape_of(weight), epilogue, dtype, dtype, None)
    out_dtype = dtype
    cast: list[Tensor | None] = []
    for name, operand in zip(names, operands, strict=True):
        if operand is not None and name == "residual":
            out_dtype = torch.promote_types(dtype, operand.dtype)
            cast.append(operand)
        else:
            cast.append(None if operand is None else operand.to(dtype))
    spec, _ = spec_text(shape_of(weight), epilogue, dtype, out_dtype, None)
    result: Tensor = _OP_GEMM(x.to(dtype), weight.to(dtype), cast, spec)[0]
    return result
