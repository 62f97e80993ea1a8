"""Weights of fewer bits than the activations, and scales along K: int4, int8, e4m3 and fp8 blocks.

Each class is the one definition of a stored form: its operands with their shapes and dtypes, the
checks, the values it stands for (``dequantize``) and the reference product. ``group`` columns of a
row share a scale; 0 stands for the whole row, and where K is no multiple of ``group`` the last
group of a row is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.check import describe, require_choice
from fusedops.epilogue.base import FLOAT_DTYPES, Context, Operand
from fusedops.epilogue.nodes import PACK
from fusedops.epilogue.outputs import GROUP
from fusedops.errors import ConfigError, DTypeError, LayoutError, ShapeError
from fusedops.weight.base import ROWS_OF_X, WeightFormat, WeightOperand
from fusedops.weight.dense import float_product
from fusedops.weight.fragments import pack_codes, packed_shape, unpack_codes
from fusedops.weight.int4_layout import INT4_LAYOUTS, int4_shape, to_rows, to_tiles, unpack_nibbles

__all__ = [
    "GROUP_SIZES",
    "BlockFp8",
    "EightBitWeight",
    "Fp8Weight",
    "GroupedFormat",
    "Int4",
    "Int8Weight",
    "QuantizedFormat",
]

GROUP_SIZES = (32, 64, 128)
"""Group sizes beside a whole row."""

_E4M3 = torch.float8_e4m3fn


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class QuantizedFormat(WeightFormat):
    """What formats of quantized weights share."""

    x_dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES
    w_dtype: ClassVar[torch.dtype] = torch.int8

    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the stored weight."""
        return self.n, self.k

    def check(self, x: Tensor, weight: Tensor) -> None:
        if x.dtype not in self.x_dtypes:
            accepted = ", ".join(map(_word, self.x_dtypes))
            raise DTypeError(
                f"gemm: x is {_word(x.dtype)}; beside a weight {self} it may be {accepted}. Cast "
                "or quantize x, or store the weight in another format."
            )
        if weight.dtype != self.w_dtype:
            raise DTypeError(
                f"gemm: w is {describe(weight)}; {self} stores {_word(self.w_dtype)}. "
                "fusedops.quant.quantize_weight() makes it."
            )
        shape = self.weight_shape()
        if tuple(weight.shape) != shape:
            raise ShapeError(
                f"gemm: w has shape {tuple(weight.shape)}; {self} is stored as {shape}. Change N, "
                "K or the layout in the format, or the tensor."
            )
        if shape[-1] > 1 and weight.stride(-1) != 1:
            raise LayoutError(
                f"gemm: w has strides {weight.stride()}; its last dimension must have stride 1. "
                "Call w.contiguous()."
            )
        if len(shape) == 3 and not weight.is_contiguous():
            raise LayoutError(
                f"gemm: w has strides {weight.stride()}; tiles must be contiguous. Call "
                "w.contiguous()."
            )

    def dequantize(self, weight: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor:
        """The (N, K) values that a stored weight stands for, float32.

        Args:
            weight: as stored.
            operands: this format's operands by name, in any accepted shape and dtype.
        """
        raise NotImplementedError

    def accumulate(self, x: Tensor, weight: Tensor, context: Context) -> Tensor:
        return float_product(x.float(), self.dequantize(weight, context.operands))

    def _operand(self, operands: Mapping[str, Tensor | None], name: str) -> Tensor:
        declared = {operand.name: operand for operand in self.operands()}[name]
        tensor = operands.get(name)
        if tensor is None:
            raise ShapeError(f"{self}: operand {name!r} is missing.")
        return declared.view(tensor, 0, self.n)


class LaidOut:
    """A weight that lies in rows, or as a kernel's registers take it.

    Attributes:
        layouts: what ``layout`` may be; the first is ``rows``.
        layout: a field of each format.
    """

    layouts: ClassVar[tuple[str, ...]] = INT4_LAYOUTS
    layout: str

    def in_rows(self, weight: Tensor) -> Tensor:
        """The stored weight in the layout ``rows``."""
        raise NotImplementedError

    def from_rows(self, rows: Tensor) -> Tensor:
        """A weight in the layout ``rows`` as this format stores it; the inverse of ``in_rows``."""
        raise NotImplementedError


@dataclass(frozen=True)
class GroupedFormat(LaidOut, QuantizedFormat):
    """A row's values in groups of consecutive columns, each group with a scale.

    Operand: ``w_scale`` (groups, N), N contiguous, so that a tile's scales of one group are one
    load; (N,) and (N, 1) are accepted too where a row is one group. float32, bfloat16 or float16,
    used in float32.
    """

    group: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.spec_name, "layout", self.layout, self.layouts)
        if self.group == self.k and self.k not in GROUP_SIZES:
            object.__setattr__(self, "group", 0)
        if self.group not in (0, *GROUP_SIZES):
            raise ConfigError(
                f"{self.spec_name}: group={self.group} with K={self.k}; accepted are "
                f"{', '.join(map(str, GROUP_SIZES))}, and 0 or K for a whole row."
            )

    @property
    def group_columns(self) -> int:
        """Columns of a whole group."""
        return self.group or max(self.k, 1)

    @property
    def groups(self) -> int:
        """Groups of a row; at least one."""
        return max(-(-self.k // self.group_columns), 1)

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        grouped = (self.groups, self.n)
        return (grouped, (self.n,), (self.n, 1)) if self.groups == 1 else (grouped,)

    def operands(self) -> tuple[Operand, ...]:
        return (WeightOperand("w_scale", "weight", FLOAT_DTYPES, shapes=self._shapes()),)

    def stored_bytes(self, x_dtype: torch.dtype) -> int:
        size = self.w_dtype.itemsize
        for length in self.weight_shape():
            size *= length
        # One group has float32 scales, more of them 16-bit ones (fusedops.quant).
        return size + self.groups * self.n * (4 if self.groups == 1 else 2)

    def by_column(self, values: Tensor) -> Tensor:
        """Values of each group, (groups, N), for each column: float32 (N, K)."""
        of_rows = values.float().t()
        if self.groups == 1:
            return of_rows
        return of_rows.repeat_interleave(self.group_columns, dim=1)[:, : self.k]

    def check(self, x: Tensor, weight: Tensor) -> None:
        super().check(x, weight)
        if self.layout != "rows" and (self.layout == "wgmma8") != (x.dtype == _E4M3):
            fitting = "wgmma8" if x.dtype == _E4M3 else "wgmma16"
            raise LayoutError(
                f"gemm: x is {_word(x.dtype)} and w is laid out as {self.layout}; accepted beside "
                f"such x are rows and {fitting}. Convert w with in_rows() of its format and "
                "from_rows() of the other."
            )

    def integers(self, weight: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor:
        """The values before their scale, float32 (N, K), exact."""
        return self.in_rows(weight).float()

    def dequantize(self, weight: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor:
        scale = self.by_column(self._operand(operands, "w_scale"))
        return self.integers(weight, operands) * scale


@dataclass(frozen=True)
class EightBitWeight(GroupedFormat):
    """Eight bits a value: ``w = q * w_scale``.

    ``layout``: ``rows``, (N, K), or ``wgmma16``, (ceil(N/16), ceil(K/32), 512), see
    ``fusedops.weight.fragments``.
    """

    layouts: ClassVar[tuple[str, ...]] = ("rows", "wgmma16")
    layout: str = "rows"

    def weight_shape(self) -> tuple[int, ...]:
        return (self.n, self.k) if self.layout == "rows" else packed_shape(self.n, self.k, 8)

    def in_rows(self, weight: Tensor) -> Tensor:
        if self.layout == "rows":
            return weight
        return unpack_codes(weight.view(torch.uint8), self.n, self.k, 8).view(self.w_dtype)

    def from_rows(self, rows: Tensor) -> Tensor:
        if self.layout == "rows":
            return rows
        return pack_codes(rows.view(torch.uint8), 8).view(self.w_dtype)


@dataclass(frozen=True)
class Int8Weight(EightBitWeight):
    """int8 beside 16-bit activations."""

    spec_name: ClassVar[str] = "int8_wo"


@dataclass(frozen=True)
class Fp8Weight(EightBitWeight):
    """e4m3 beside 16-bit activations; in the layout ``wgmma16`` without NaN."""

    spec_name: ClassVar[str] = "fp8_wo"
    w_dtype: ClassVar[torch.dtype] = _E4M3

    def from_rows(self, rows: Tensor) -> Tensor:
        # A kernel moves the bits of finite numbers.
        if (
            self.layout != "rows"
            and not rows.is_meta
            and bool((rows.view(torch.uint8) & 127 == 127).any())
        ):
            raise ConfigError(
                f"{self}: the weight holds NaN, which the layout {self.layout} has no place for; "
                "keep it in rows, or load the checkpoint again."
            )
        return super().from_rows(rows)


@dataclass(frozen=True)
class Int4(GroupedFormat):
    """Four bits a value, beside 16-bit activations or e4m3 ones (W4A8).

    A nibble q (0 to 15) stands for ``(q - 8) * w_scale``, or with ``zero`` = ``uint8`` for
    ``(q - w_zero) * w_scale``. The difference is exact in bf16, fp16 and, up to 16, in e4m3.

    Operands: ``w_scale``, see ``GroupedFormat``; ``w_zero`` uint8 of the same shapes, each at most
    16, where there are zero points.

    ``layout``: ``rows``, or ``wgmma16`` / ``wgmma8`` (e4m3 activations) as a kernel's registers
    take them: see ``fusedops.weight.int4_layout``.
    """

    spec_name: ClassVar[str] = "int4"
    x_dtypes: ClassVar[tuple[torch.dtype, ...]] = (*FLOAT_DTYPES, _E4M3)
    w_dtype: ClassVar[torch.dtype] = torch.uint8
    group: int = 128
    zero: str = "none"
    layout: str = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero not in ("none", "uint8"):
            raise ConfigError(f"int4: zero={self.zero!r}; accepted are none, uint8.")

    def weight_shape(self) -> tuple[int, ...]:
        return int4_shape(self.layout, self.n, self.k)

    def operands(self) -> tuple[Operand, ...]:
        if self.zero == "none":
            return super().operands()
        zero = WeightOperand("w_zero", "weight", (torch.uint8,), shapes=self._shapes())
        return (*super().operands(), zero)

    def stored_bytes(self, x_dtype: torch.dtype) -> int:
        zeros = 0 if self.zero == "none" else self.groups * self.n
        return super().stored_bytes(x_dtype) + zeros

    def in_rows(self, weight: Tensor) -> Tensor:
        return weight if self.layout == "rows" else to_rows(weight, self.n, self.k, self.layout)

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows if self.layout == "rows" else to_tiles(rows, self.k, self.layout)

    def integers(self, weight: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor:
        q = unpack_nibbles(self.in_rows(weight), self.k).float()
        if self.zero == "none":
            return q - 8.0
        return q - self.by_column(self._operand(operands, "w_zero"))


@dataclass(frozen=True)
class BlockFp8(QuantizedFormat):
    """e4m3 weight with a scale for 128 x 128 values, beside e4m3 activations with 1 x 128 ones.

    Of each 128 columns the product is summed on its own, multiplied by both scales and added up in
    float32, in the order of K. Source: DeepSeek-V3 technical report, 2024, section 3.3.

    Operands: ``x_scale`` float32 (ceil(K/128), M), as ``fusedops.quantize(granularity="block128")``
    gives it; ``w_scale`` float32 (row blocks, ceil(K/128)).

    ``rows``: ``plain``, where row block i holds rows 128 i to 128 i + 127; or ``gate_up``, for a
    weight of ``pack_gate_up`` whose halves have blocks of their own: row blocks 2 i and 2 i + 1 are
    blocks i of the gate and of the up half, so row r belongs to 2 (r // 256) + (r // 8) % 2.
    ``pack_rope`` moves rows within a head only: ``plain`` for head dimensions 64 and 128,
    ``gate_up`` for 256 (the halves of a head), none for 96.
    """

    spec_name: ClassVar[str] = "block_fp8"
    x_dtypes: ClassVar[tuple[torch.dtype, ...]] = (_E4M3,)
    w_dtype: ClassVar[torch.dtype] = _E4M3
    rows: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows not in ("plain", "gate_up"):
            raise ConfigError(f"block_fp8: rows={self.rows!r}; accepted are plain, gate_up.")
        if self.rows == "gate_up" and self.n % (2 * PACK):
            raise ConfigError(
                f"block_fp8: N={self.n} with rows=gate_up; accepted are multiples of 16, as "
                "fusedops.packing.pack_gate_up() gives them."
            )

    @property
    def k_blocks(self) -> int:
        """Blocks along K."""
        return -(-self.k // GROUP)

    @property
    def row_blocks(self) -> int:
        """Rows of ``w_scale``."""
        if self.rows == "gate_up":
            return 2 * -(-self.n // (2 * GROUP))
        return -(-self.n // GROUP)

    def block_of_rows(self, device: torch.device) -> Tensor:
        """The row block of each row, int64 (N,)."""
        row = torch.arange(self.n, device=device)
        if self.rows == "gate_up":
            return 2 * (row // (2 * GROUP)) + (row // PACK) % 2
        return row // GROUP

    def operands(self) -> tuple[Operand, ...]:
        of_x, of_w = (self.k_blocks, ROWS_OF_X), (self.row_blocks, self.k_blocks)
        return (
            WeightOperand("x_scale", "groups_m", shapes=(of_x,)),
            WeightOperand("w_scale", "weight", shapes=(of_w,)),
        )

    def stored_bytes(self, x_dtype: torch.dtype) -> int:
        return self.n * self.k + 4 * self.row_blocks * self.k_blocks

    def dequantize(self, weight: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor:
        scale = self._operand(operands, "w_scale")[self.block_of_rows(weight.device)]
        return weight.float() * scale.repeat_interleave(GROUP, dim=1)[:, : self.k]

    def accumulate(self, x: Tensor, weight: Tensor, context: Context) -> Tensor:
        x_scale = context.operands["x_scale"]
        if x_scale is None:
            raise ShapeError(f"{self}: operand 'x_scale' is missing.")
        w_scale = self._operand(context.operands, "w_scale")[self.block_of_rows(weight.device)]
        total = torch.zeros(len(x), self.n, dtype=torch.float32, device=x.device)
        for block in range(self.k_blocks):
            columns = slice(block * GROUP, (block + 1) * GROUP)
            part = float_product(x[:, columns].float(), weight[:, columns].float())
            total += part * (x_scale[block].unsqueeze(1) * w_scale[:, block])
        return total
