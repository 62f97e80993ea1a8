"""Weights quantized by round-to-nearest, as the weight formats store them.

Edge cases, the same in every scheme: a row, group or block of zeros has scale 1 and holds zeros; no
scale is below 2^-126, the smallest normal float32; values beyond the largest stored one saturate;
NaN and infinities are refused, as a weight that holds one is damaged. Where N or K is no multiple
of a group or block, the last one is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.check import ACTIVATION_DTYPES, require_dim, require_dtype, require_tensor
from fusedops.epilogue.base import to_dtype
from fusedops.epilogue.nodes import PACK
from fusedops.epilogue.outputs import GROUP
from fusedops.errors import ConfigError
from fusedops.ops.quantize import FORMATS, SMALLEST_SCALE
from fusedops.quant.schemes import Scheme, as_scheme
from fusedops.weight import (
    BlockFp8,
    Dense,
    EightBitWeight,
    Fp8Weight,
    GroupedFormat,
    Int4,
    Int8Weight,
    QuantizedFormat,
    WeightFormat,
    pack_nibbles,
)

__all__ = ["QuantizedWeight", "empty_weight", "quantize_weight", "weight_format"]


def weight_format(
    scheme: Scheme, n: int, k: int, *, rows: str = "plain", layout: str = "rows"
) -> WeightFormat:
    """How a scheme stores an (N, K) weight.

    Args:
        scheme: the scheme.
        n, k: output rows and input columns.
        rows: as in ``quantize_weight``.
        layout: of weights in groups, see their formats; others have ``rows`` only.

    Raises:
        ConfigError: the scheme has no such layout.
    """
    if scheme.weight == "int4":
        return Int4(n, k, scheme.group, "uint8" if scheme.zero_points else "none", layout)
    if scheme.sharing == "group":
        return (Int8Weight if scheme.weight == "int8" else Fp8Weight)(n, k, scheme.group, layout)
    if layout != "rows":
        raise ConfigError(f"scheme {scheme}: layout={layout!r}; accepted: rows.")
    if scheme.sharing == "block":
        return BlockFp8(n, k, rows)
    return Dense(n, k)


def _scale_dtype(stored: GroupedFormat) -> torch.dtype:
    # In groups they are read with the weight: 16 bits cost 3 % of int4's bytes, 32 would be 6 %.
    return torch.float32 if stored.groups == 1 else torch.bfloat16


def empty_weight(
    scheme: Scheme,
    n: int,
    k: int,
    *,
    rows: str = "plain",
    layout: str = "rows",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> QuantizedWeight:
    """A weight of that form without values yet; ``dtype`` is that of an unquantized one."""
    stored = weight_format(scheme, n, k, rows=rows, layout=layout)
    shape: tuple[int, ...]
    if isinstance(stored, GroupedFormat):
        shape, scale_dtype = (stored.groups, n), _scale_dtype(stored)
    elif isinstance(stored, BlockFp8):
        shape, scale_dtype = (stored.row_blocks, stored.k_blocks), torch.float32
    else:
        shape, scale_dtype = (n,) if scheme.sharing == "channel" else (), torch.float32
    sizes: tuple[int, ...] = (n, k)
    if isinstance(stored, QuantizedFormat):
        sizes, dtype = stored.weight_shape(), stored.w_dtype
    elif scheme.weight != "float":
        dtype = FORMATS[scheme.weight].dtype
    scales: dict[str, Tensor] = {}
    if scheme.weight != "float":
        scales["w_scale"] = torch.empty(shape, dtype=scale_dtype, device=device)
    if scheme.zero_points:
        scales["w_zero"] = torch.empty(shape, dtype=torch.uint8, device=device)
    weight = torch.empty(sizes, dtype=dtype, device=device)
    return QuantizedWeight(scheme, stored, weight, scales)


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight of N rows and K columns.

    Attributes:
        scheme: how it was quantized.
        format: how ``weight`` is stored; the ``weight=`` of ``fusedops.gemm``.
        weight: the stored values.
        scales: its operands in a product: ``w_scale``, and ``w_zero`` where there are zero points.
            Per tensor () and per channel (N,), in groups (groups, N), of blocks (row blocks,
            ceil(K/128)). float32; in more than one group a row bfloat16; zero points uint8.
    """

    scheme: Scheme
    format: WeightFormat
    weight: Tensor
    scales: dict[str, Tensor] = field(compare=False)

    def dequantize(self) -> Tensor:
        """The values that it stands for: float32 (N, K), each rounded at most once."""
        if isinstance(self.format, QuantizedFormat):
            return self.format.dequantize(self.weight, self.scales)
        if not self.scales:
            return self.weight.float()
        scale = self.scales["w_scale"]
        return self.weight.float() * (scale.unsqueeze(1) if scale.dim() else scale)

    def in_layout(self, layout: str) -> QuantizedWeight:
        """The same weight laid out anew, see its format; exact.

        Raises:
            ConfigError: the format has no such layout, or the layout no place for a value.
        """
        stored = self.format
        if not isinstance(stored, (Int4, EightBitWeight)):
            raise ConfigError(
                f"in_layout: the weight is {stored}; accepted are weights with scales in groups."
            )
        if layout == stored.layout:
            return self
        new = replace(stored, layout=layout)
        return replace(self, format=new, weight=new.from_rows(stored.in_rows(self.weight)))


def quantize_weight(
    weight: Tensor, scheme: Scheme | str, *, rows: str = "plain", name: str = "weight"
) -> QuantizedWeight:
    """Quantize a weight by round-to-nearest.

    A scale is the largest magnitude over the largest stored one: 448 for e4m3, 127 for int8, 7.5
    for int4 (nibbles 0 to 15 stand for -8 to 7, and no value is more than half a step off, but for
    the scale's own rounding). With zero points it is (max - min) / 15, where the range includes 0
    and the zero point is round(-min / scale). Everything is computed in float32; scales of more
    than one group a row are rounded to bfloat16 first. Values are rounded half to even.

    Args:
        weight: (N, K) float32, bfloat16 or float16.
        scheme: a scheme or its name.
        rows: ``gate_up`` for the result of ``pack_gate_up``, whose halves get blocks of their own
            in the scheme ``fp8-block``; other schemes take no notice.
        name: what errors call the weight.

    Raises:
        ConfigError: the weight holds NaN or an infinity; no such scheme.
        DTypeError, ShapeError: the weight is not as described.
    """
    found = as_scheme(scheme)
    require_tensor("quantize_weight", name, weight)
    require_dtype("quantize_weight", name, weight, ACTIVATION_DTYPES)
    require_dim("quantize_weight", name, weight, 2, exactly=True)
    if not bool(weight.isfinite().all()):
        count = int((~weight.isfinite()).sum())
        raise ConfigError(
            f"quantize_weight: {name} holds {count} value(s) that are NaN or infinite; accepted "
            "are finite weights. Leave this layer unquantized, or load the checkpoint again."
        )
    stored = weight_format(found, *weight.shape, rows=rows)
    if found.weight == "float":
        return QuantizedWeight(found, stored, weight.detach(), {})
    values = weight.detach().float()
    if isinstance(stored, BlockFp8):
        return _in_blocks(values, found, stored)
    if isinstance(stored, GroupedFormat):
        return _in_groups(values, found, stored)
    largest = FORMATS[found.weight].largest
    absmax = _largest_magnitude(values, 1) if found.sharing == "channel" else _of_all(values)
    scale = _scale_of(absmax, largest)
    per_row = scale.unsqueeze(1) if found.sharing == "channel" else scale
    return QuantizedWeight(
        found, stored, _rounded(values, per_row, found.weight), {"w_scale": scale}
    )


def _largest_magnitude(values: Tensor, dim: int) -> Tensor:
    """absmax over ``dim``; 0 where it is empty."""
    if values.shape[dim] == 0:
        return values.new_zeros(values.sum(dim).shape)
    return values.abs().amax(dim)


def _of_all(values: Tensor) -> Tensor:
    return values.abs().amax() if values.numel() else values.new_zeros(())


def _scale_of(absmax: Tensor, largest: float, dtype: torch.dtype = torch.float32) -> Tensor:
    # A tensor as divisor: torch on CUDA multiplies by the rounded reciprocal of a number instead.
    scale = (absmax / absmax.new_full((), largest)).to(dtype).clamp(min=SMALLEST_SCALE)
    return scale.masked_fill(absmax == 0, 1.0)


def _rounded(values: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Values over their scale, as ``fusedops.quantize`` rounds them."""
    return to_dtype(values * scale.reciprocal(), FORMATS[dtype].dtype)


def _in_blocks(values: Tensor, scheme: Scheme, stored: BlockFp8) -> QuantizedWeight:
    n, k = values.shape
    padded = F.pad(values, (0, stored.k_blocks * GROUP - k))
    by_row = _largest_magnitude(padded.reshape(n, stored.k_blocks, GROUP), 2)
    halves = 2 if stored.rows == "gate_up" else 1
    blocks = stored.row_blocks // halves
    rows = F.pad(by_row, (0, 0, 0, blocks * halves * GROUP - n))
    absmax = rows.reshape(blocks, GROUP // PACK, halves, PACK, stored.k_blocks).amax((1, 3))
    scale = _scale_of(absmax.flatten(0, 1), FORMATS["e4m3"].largest)
    of_rows = scale[stored.block_of_rows(values.device)]
    over_columns = of_rows.repeat_interleave(GROUP, dim=1)[:, :k]
    weight = _rounded(values, over_columns, "e4m3")
    return QuantizedWeight(scheme, stored, weight, {"w_scale": scale})


def _in_groups(values: Tensor, scheme: Scheme, stored: GroupedFormat) -> QuantizedWeight:
    n, k = values.shape
    padding = stored.groups * stored.group_columns - k
    grouped = F.pad(values, (0, padding)).reshape(n, stored.groups, stored.group_columns)
    dtype = _scale_dtype(stored)
    if scheme.zero_points:
        return _with_zero_points(values, grouped, scheme, stored, dtype)
    absmax = _largest_magnitude(grouped, 2).t().contiguous()
    if isinstance(stored, Int4):
        scale = _scale_of(absmax, 7.5, dtype)
        steps = (values / stored.by_column(scale)).round_() + 8
        weight = pack_nibbles(steps.clamp_(0, 15).to(torch.uint8))
    else:
        scale = _scale_of(absmax, FORMATS[scheme.weight].largest, dtype)
        weight = _rounded(values, stored.by_column(scale), scheme.weight)
    return QuantizedWeight(scheme, stored, weight, {"w_scale": scale})


def _with_zero_points(
    values: Tensor, grouped: Tensor, scheme: Scheme, stored: GroupedFormat, dtype: torch.dtype
) -> QuantizedWeight:
    # The range includes 0; each end is divided on its own, as their distance may overflow.
    low = grouped.amin(2).clamp_(max=0).t().contiguous()
    high = grouped.amax(2).clamp_(min=0).t().contiguous()
    fifteen = low.new_full((), 15.0)
    width = high / fifteen - low / fifteen
    scale = width.to(dtype).clamp(min=SMALLEST_SCALE).masked_fill(width == 0, 1.0)
    zero = (-low / scale.float()).round_().clamp_(0, 15)
    steps = (values / stored.by_column(scale)).round_() + stored.by_column(zero)
    weight = pack_nibbles(steps.clamp_(0, 15).to(torch.uint8))
    scales = {"w_scale": scale, "w_zero": zero.to(torch.uint8)}
    return QuantizedWeight(scheme, stored, weight, scales)
