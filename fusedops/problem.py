"""``GemmSpec`` and ``GemmProblem``: what a GEMM computes, and one instance of it on tensors.

A spec's canonical text is ``prologue > weight format > epilogue > output dtype``, and
``batch_invariant`` where that is asked for, for example
``none > dense(4096,14336) > residual > bf16``. It is all that ``torch.ops.fusedops.gemm`` needs
beside the tensors, so the fake implementation, ``torch.compile`` and another process understand a
user's own chain without registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from fusedops.check import require_bool
from fusedops.epilogue.base import FLOAT_DTYPES, Context, Operand
from fusedops.epilogue.chain import NO_EPILOGUE, Epilogue
from fusedops.epilogue.spec import (
    dtype_from_name,
    dtype_name,
    forget_when_redefined,
    split_chain,
)
from fusedops.errors import ConfigError, DeviceError, DTypeError, LayoutError, ShapeError
from fusedops.prologue import NO_PROLOGUE, Prologue
from fusedops.weight import WeightFormat

__all__ = ["GemmProblem", "GemmSpec"]

_BATCH_INVARIANT = "batch_invariant"


@dataclass(frozen=True)
class GemmSpec:
    """What a GEMM computes: everything but the tensors and M.

    Attributes:
        weight: the weight's format, with N and K.
        epilogue, prologue: what is done to the accumulator, and to x.
        out_dtype: of the main result.
        batch_invariant: whether a row's result may not depend on M, bit for bit.
    """

    weight: WeightFormat
    epilogue: Epilogue = NO_EPILOGUE
    out_dtype: torch.dtype = torch.bfloat16
    prologue: Prologue = NO_PROLOGUE
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        require_bool("gemm", batch_invariant=self.batch_invariant)
        names = self.operand_names
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(f"spec {self}: operand name(s) {', '.join(sorted(repeated))} twice.")
        forced = self.epilogue.result_dtype(self.out_dtype)
        if forced != self.out_dtype:
            raise ConfigError(
                f"spec {self}: the epilogue's result is {dtype_name(forced)}, the spec asks for "
                f"{dtype_name(self.out_dtype)}; write {dtype_name(forced)}."
            )
        self.epilogue.widths(self.weight.n)
        if self.batch_invariant:
            self._check_batch_invariant()

    def _check_batch_invariant(self) -> None:
        partial = [str(node) for node in self.epilogue if node.depends_on_tiles()]
        reason = f"{partial[0]} is partial results of a kernel's tiles" if partial else None
        if self.prologue != NO_PROLOGUE:
            reason = f"the threads that share a row of {self.prologue} depend on M"
        if reason is not None:
            raise ConfigError(
                f"spec {self}: {reason}, so it is not batch invariant; leave it out, or leave out "
                "batch_invariant."
            )

    def __str__(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        """The canonical text."""
        parts = [self.prologue, self.weight, self.epilogue, dtype_name(self.out_dtype)]
        return " > ".join(map(str, parts + [_BATCH_INVARIANT] * self.batch_invariant))

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> GemmSpec:
        """The spec that ``text`` describes; ConfigError names the part that does not fit."""
        parts = split_chain(text, ">")
        if len(parts) not in (4, 5) or parts[4:] not in ([], [_BATCH_INVARIANT]):
            raise ConfigError(
                f"gemm spec {text!r} has {len(parts)} parts; write "
                "'prologue > weight > epilogue > dtype', e.g. 'none > dense(64,32) > bias > bf16', "
                f"and {_BATCH_INVARIANT!r} after that where it is asked for."
            )
        prologue, weight, epilogue, dtype, *invariant = parts
        return cls(
            WeightFormat.parse(weight),
            Epilogue.parse(epilogue),
            dtype_from_name(dtype),
            Prologue.parse(prologue),
            bool(invariant),
        )

    @property
    def n(self) -> int:
        """Rows of the weight: columns of the accumulator."""
        return self.weight.n

    @property
    def k(self) -> int:
        """Length of the inner product."""
        return self.weight.k

    @cached_property
    def out_n(self) -> int:
        """Columns of the main result."""
        return self.epilogue.widths(self.weight.n)[-1]

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Operands of prologue, weight format and epilogue in the order they are passed."""
        return (
            *self.prologue.operands(),
            *self.weight.operands(),
            *self.epilogue.operands,
        )

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands in that order."""
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def operand_widths(self) -> tuple[int, ...]:
        """The N against which each operand is checked and viewed."""
        before = len(self.prologue.operands()) + len(self.weight.operands())
        return (*([self.n] * before), *self.epilogue.operand_widths(self.n))

    def allocate(self, x: Tensor) -> list[Tensor]:
        """Empty results for activations ``x``: the main one, then the extra outputs in order."""
        m_shape = tuple(x.shape[:-1])
        outputs = [torch.empty((*m_shape, self.out_n), dtype=self.out_dtype, device=x.device)]
        for output, width in self.epilogue.extra_outputs(self.n):
            dtype = output.dtype or self.out_dtype
            outputs.append(output.allocate(m_shape, width, dtype, x.device))
        return outputs

    def context(self, operands: Sequence[Tensor | None], m: int) -> Context:
        """Operands by name, viewed to broadcast against the (M, N) accumulator."""
        views: dict[str, Tensor | None] = {}
        for operand, tensor, width in zip(
            self.operands, operands, self.operand_widths, strict=True
        ):
            views[operand.name] = None if tensor is None else operand.view(tensor, m, width)
        return Context(views, self.out_dtype)

    def check(self, x: Tensor, weight: Tensor, operands: Sequence[Tensor | None]) -> None:
        """Raise unless the tensors fit this spec; reads no values, so it also runs on fakes.

        Raises:
            ShapeError, DTypeError, LayoutError, DeviceError: with what was got and is accepted.
        """
        if x.dim() < 1 or x.shape[-1] != self.k:
            raise ShapeError(
                f"gemm: x has shape {tuple(x.shape)}; its last dimension must be K={self.k} "
                f"({self.weight})."
            )
        if self.k > 1 and x.stride(-1) != 1:
            raise LayoutError(
                f"gemm: x has strides {x.stride()}; K must be contiguous. Call x.contiguous()."
            )
        self.check_prologue(x.dtype)
        self.weight.check(x, weight)
        if len(operands) != len(self.operands):
            names = ", ".join(self.operand_names) or "none"
            missing = ", ".join(self.operand_names[len(operands) :])
            raise ShapeError(
                f"gemm: got {len(operands)} operand(s), the spec {self} needs "
                f"{len(self.operands)}: {names}{f'; missing: {missing}' if missing else ''}."
            )
        if weight.device != x.device:
            raise DeviceError(
                f"gemm: x is on {x.device}, w on {weight.device}; move both to one device."
            )
        m_shape = tuple(x.shape[:-1])
        m = prod(m_shape)
        for operand, tensor, width in zip(
            self.operands, operands, self.operand_widths, strict=True
        ):
            if tensor is None:
                if not operand.optional:
                    raise ShapeError(
                        f"gemm: operand {operand.name!r} is missing, and not optional in the spec "
                        f"{self}; pass it by name in operands={{{operand.name!r}: ...}}."
                    )
                continue
            operand.check("gemm", tensor, m_shape, m, width, self.k)
            if tensor.device != x.device:
                raise DeviceError(
                    f"gemm: x is on {x.device}, operand {operand.name!r} on {tensor.device}; "
                    "move both to one device."
                )

    def check_prologue(self, x_dtype: torch.dtype) -> None:
        """Raise DTypeError unless the prologue, if there is one, takes such activations."""
        if self.prologue != NO_PROLOGUE and x_dtype not in FLOAT_DTYPES:
            raise DTypeError(
                f"gemm: x is {str(x_dtype).removeprefix('torch.')}; the prologue {self.prologue} "
                "takes float32, bfloat16 and float16 activations; quantize behind it, or leave it "
                "out."
            )

    def check_out(self, x: Tensor, out: Sequence[Tensor]) -> None:
        """Raise unless ``out`` can take the results of activations ``x``.

        The main result may have a row pitch (stride(-1) = 1 and rows that do not overlap); the
        extra outputs must have the strides that ``allocate`` gives.
        """
        expected = self.expected_outputs(x)
        if len(out) != len(expected):
            raise ShapeError(
                f"gemm_out: got {len(out)} output(s); the spec {self} writes {len(expected)}."
            )
        for index, (tensor, (shape, stride, dtype)) in enumerate(zip(out, expected, strict=True)):
            name = "out" if index == 0 else f"extra output {index}"
            if tuple(tensor.shape) != shape:
                raise ShapeError(
                    f"gemm_out: {name} has shape {tuple(tensor.shape)}; accepted: {shape}."
                )
            if tensor.dtype != dtype:
                raise DTypeError(
                    f"gemm_out: {name} has dtype {tensor.dtype}; accepted: {dtype}. Change the "
                    "spec's output dtype or the tensor."
                )
            if tensor.device != x.device:
                raise DeviceError(f"gemm_out: {name} is on {tensor.device}, x on {x.device}.")
            if index == 0:
                _check_pitch(tensor)
            elif tensor.stride() != stride and tensor.numel():
                raise LayoutError(
                    f"gemm_out: {name} has strides {tensor.stride()}; accepted: {stride}."
                )

    def expected_outputs(
        self, x: Tensor
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """(shape, strides, dtype) of every result for ``x``; the main one has no strides here."""
        m_shape = tuple(x.shape[:-1])
        main: tuple[int, ...] = (*m_shape, self.out_n)
        expected: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = [
            (main, (), self.out_dtype)
        ]
        meta = torch.device("meta")
        for output, width in self.epilogue.extra_outputs(self.n):
            dtype = output.dtype or self.out_dtype
            like = output.allocate(m_shape, width, dtype, meta)
            expected.append((tuple(like.shape), tuple(like.stride()), dtype))
        return expected


forget_when_redefined(GemmSpec.parse.cache_clear)


def _check_pitch(out: Tensor) -> None:
    """LayoutError unless ``out`` is rows of stride-1 elements with one pitch over all rows."""
    if out.numel() == 0:
        return
    n = out.shape[-1]
    legal = n == 1 or out.stride(-1) == 1
    # Rows of every leading dimension together have one pitch; dimensions of one element have none.
    rows = zip(out.shape[-2::-1], out.stride()[-2::-1], strict=True)
    pitches = [(size, step) for size, step in rows if size > 1]
    expected = pitches[0][1] if pitches else n
    legal = legal and expected >= n
    for size, step in pitches:
        legal = legal and step == expected
        expected = step * size
    if not legal:
        raise LayoutError(
            f"gemm_out: out has shape {tuple(out.shape)} and strides {out.stride()}; accepted are "
            "rows with stride 1 and one pitch of at least N elements. Nothing was written; pass "
            "out=None or a contiguous tensor."
        )


@dataclass(frozen=True)
class GemmProblem:
    """One instance of a spec: what a provider is asked to serve and a configuration is chosen for.

    Attributes:
        spec: what is computed.
        m: rows of the activations, the product of their leading dimensions.
        x_dtype: dtype of the activations.
        operand_dtypes: dtype of each operand, None where it was left out.
        device_type: ``cpu`` or ``cuda``.
        sm_count: multiprocessors of the device, 0 on a CPU.
        aligned_bytes: largest power of two up to 16 that divides the address and the row pitch of
            x and w: what a vectorised or bulk copy may assume.
        arch: architecture to compile for, e.g. ``sm_90a``; empty on a CPU.
        gpu: the device's name, e.g. ``NVIDIA H200``; empty on a CPU.
    """

    spec: GemmSpec
    m: int
    x_dtype: torch.dtype
    operand_dtypes: tuple[torch.dtype | None, ...]
    device_type: str
    sm_count: int = 0
    aligned_bytes: int = 16
    arch: str = ""
    gpu: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations of the product alone."""
        return 2 * self.m * self.spec.n * self.spec.k

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross the memory bus: x, weight and result once each."""
        weights = self.spec.weight.stored_bytes(self.x_dtype)
        activations = self.m * self.spec.k * self.x_dtype.itemsize
        return weights + activations + self.m * self.spec.out_n * self.spec.out_dtype.itemsize
