"""Epilogue nodes that write more than the value: quantize, second outputs, row statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.epilogue.base import (
    E4M3_MAX,
    FLOAT32_ROUNDOFF,
    Context,
    ExtraOutput,
    Node,
    Operand,
    rounding_bound,
    to_dtype,
)
from fusedops.epilogue.emit import KernelTile, Value
from fusedops.epilogue.nodes import scale_axis
from fusedops.epilogue.spec import dtype_from_name
from fusedops.errors import ConfigError

__all__ = ["GROUP", "Quantize", "RowStat", "Tap", "group_scale", "group_scale_empty"]

GROUP = 128
"""Columns that share a scale in 1x128 quantization."""

_MIN_SCALE = torch.finfo(torch.float32).tiny


def group_scale_empty(
    m_shape: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An empty (ceil(N/128), M) float32 tensor of 1x128 scales, M contiguous and padded to 4."""
    m = _product(m_shape)
    padded = -(-m // 4) * 4
    # The last row's padding belongs to the tensor too: a kernel loads whole 16-byte units of it.
    return torch.empty((-(-n // GROUP), padded), dtype=dtype, device=device)[:, :m]


def group_scale(value: Tensor, largest: float) -> Tensor:
    """1x128 scales of ``value`` (M, N): (ceil(N/128), M), absmax / largest; 1 for all-zero groups.

    A group with NaN gets a NaN scale, one with an infinity an infinite one.
    """
    m, n = value.shape
    groups = -(-n // GROUP)
    padded = torch.nn.functional.pad(value, (0, groups * GROUP - n))
    absmax = padded.reshape(m, groups, GROUP).abs().amax(-1).t()
    # A tensor, because torch turns a division by a Python number into a product on CUDA.
    divisor = torch.full((), largest, dtype=absmax.dtype, device=absmax.device)
    scale = (absmax / divisor).clamp(min=_MIN_SCALE)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


@dataclass(frozen=True)
class Quantize(Node):
    """Quantize the result to e4m3 or int8: ``round(value * (1 / scale))``, so value = q * scale.

    ``mode``: ``scalar`` or ``m`` read a given float32 scale (operand ``out_scale``); ``group128``
    computes the scale of each 1x128 group and returns it as an extra output of logical shape
    (ceil(N/128), M), M contiguous and padded to a multiple of 4.
    """

    spec_name: ClassVar[str] = "quantize"
    terminal: ClassVar[bool] = True
    dtype: str = "e4m3"
    mode: str = "scalar"

    def __post_init__(self) -> None:
        if self.dtype not in ("e4m3", "int8"):
            raise ConfigError(f"quantize: dtype {self.dtype!r}; accepted are e4m3, int8.")
        if self.mode not in ("scalar", "m", "group128"):
            raise ConfigError(f"quantize: mode {self.mode!r}; accepted: scalar, m, group128.")

    def operands(self) -> tuple[Operand, ...]:
        if self.mode == "group128":
            return ()
        return (Operand("out_scale", scale_axis(self.spec_name, self.mode)),)

    def extra_outputs(self) -> tuple[ExtraOutput, ...]:
        if self.mode != "group128":
            return ()
        return (ExtraOutput("out_scale", torch.float32, group_scale_empty),)

    def result_dtype(self) -> torch.dtype:
        return dtype_from_name(self.dtype)

    @property
    def largest(self) -> float:
        """The largest magnitude that the quantized dtype holds."""
        return E4M3_MAX if self.dtype == "e4m3" else 127.0

    def _scale(self, value: Tensor, context: Context) -> Tensor:
        if self.mode != "group128":
            return context.read("out_scale", value)
        scale = group_scale(value, self.largest)
        return scale.t().repeat_interleave(GROUP, dim=1)[:, : value.shape[1]]

    def reference(self, value: Tensor, context: Context) -> Tensor:
        if self.mode == "group128":
            m, n = value.shape
            stored = group_scale_empty((m,), n, torch.float32, value.device)
            context.outputs.append(stored.copy_(group_scale(value, self.largest)))
        return value * self._scale(value, context).reciprocal()

    def group_columns(self) -> int:
        return GROUP if self.mode == "group128" else 1

    def emit(self, tile: KernelTile) -> KernelTile:
        math = tile.math

        def scale(absmax: Value) -> Value:
            # As in ``group_scale``; the maximum keeps a NaN.
            return math.where(absmax == 0.0, 1.0, math.maximum(absmax / self.largest, _MIN_SCALE))

        if self.mode == "group128":
            return tile.scale_groups("out_scale", GROUP, scale)
        return tile.combine(
            "out_scale", lambda value, inverse: value * inverse, prepare=tile.math.reciprocal
        )

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        scale = self._scale(value, context).abs()
        own_scale_error = torch.zeros_like(scale)
        if self.mode == "group128":
            # The scale itself follows the computed values: it moves by the group's largest error.
            largest_error = group_scale(error, self.largest).t().repeat_interleave(GROUP, dim=1)
            own_scale_error = largest_error[:, : value.shape[1]] / scale
        reach = (value.abs() + error) / scale
        return error / scale + reach * (own_scale_error + 3 * FLOAT32_ROUNDOFF)


@dataclass(frozen=True)
class Tap(Node):
    """Write the value at this point as an extra output, rounded to ``dtype``.

    ``out`` stands for the dtype of the main result.
    """

    spec_name: ClassVar[str] = "tap"
    name: str = "tap"
    dtype: str = "out"

    def __post_init__(self) -> None:
        if self.dtype != "out":
            dtype_from_name(self.dtype)

    def _dtype(self) -> torch.dtype | None:
        return None if self.dtype == "out" else dtype_from_name(self.dtype)

    def extra_outputs(self) -> tuple[ExtraOutput, ...]:
        return (ExtraOutput(self.name, self._dtype(), _tap_empty),)

    def reference(self, value: Tensor, context: Context) -> Tensor:
        rounded = to_dtype(value, self._dtype() or context.out_dtype)
        # Results never share memory, not with the main one either.
        context.outputs.append(rounded.clone() if rounded is value else rounded)
        return value

    def emit(self, tile: KernelTile) -> KernelTile:
        tile.write(self.name, self._dtype())
        return tile

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        context.outputs.append(rounding_bound(value, error, self._dtype() or context.out_dtype))
        return error


def _tap_empty(
    m_shape: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((*m_shape, n), dtype=dtype, device=device)


@dataclass(frozen=True)
class RowStat(Node):
    """A statistic of each row, for the next operation: ``sumsq`` or ``absmax``.

    It is taken over the value rounded to the result's dtype (what the next layer will read) in
    float32 and written as (parts, M) partial results: their sum (sumsq) or maximum (absmax) is the
    statistic. How columns are split over the parts is the kernel's choice; the order in which a
    consumer adds them is fixed.
    """

    spec_name: ClassVar[str] = "row_stat"
    statistic: str = "sumsq"
    parts: int = 1

    def __post_init__(self) -> None:
        if self.statistic not in ("sumsq", "absmax"):
            raise ConfigError(f"row_stat: {self.statistic!r}; accepted are sumsq, absmax.")
        if self.parts < 1:
            raise ConfigError(f"row_stat: parts={self.parts} must be at least 1.")

    def depends_on_tiles(self) -> bool:
        return True

    def extra_outputs(self) -> tuple[ExtraOutput, ...]:
        return (ExtraOutput(self.statistic, torch.float32, self._empty),)

    def _empty(
        self, m_shape: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty((self.parts, _product(m_shape)), dtype=dtype, device=device)

    def reference(self, value: Tensor, context: Context) -> Tensor:
        rounded = to_dtype(value, context.out_dtype).to(value.dtype)
        partial = torch.zeros(
            (self.parts, value.shape[0]), dtype=torch.float32, device=value.device
        )
        if self.statistic == "sumsq":
            partial[0] = rounded.square().sum(1)
        elif value.shape[1]:
            partial[0] = rounded.abs().amax(1)
        context.outputs.append(partial)
        return value

    def emit(self, tile: KernelTile) -> KernelTile:
        if self.statistic == "sumsq":
            tile.reduce_rows(self.statistic, lambda value: value * value, "sum")
        else:
            tile.reduce_rows(self.statistic, tile.math.absolute, "max")
        return tile

    def bound(self, value: Tensor, error: Tensor, context: Context) -> Tensor:
        rounded = rounding_bound(value, error, context.out_dtype)
        if self.statistic == "absmax":
            row = rounded.amax(1) if value.shape[1] else rounded.new_zeros(value.shape[0])
        else:
            reach = value.abs() + rounded
            row = (2 * reach * rounded + reach.square() * 64 * FLOAT32_ROUNDOFF).sum(1)
        context.outputs.append(row.expand(self.parts, -1))
        return error
