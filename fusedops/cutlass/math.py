"""float32 functions inside a CuTe DSL kernel, as the epilogue's ``KernelMath`` asks for them."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import BFloat16, Float16, Float32, Int32, Numeric, Uint8, Uint16, cute, select_

__all__ = [
    "CUTE_DTYPES",
    "STORAGE_DTYPES",
    "DslMath",
    "packed_pair",
    "packed_product",
    "round_to",
    "storage_value",
    "store_pair",
    "unpacked_pair",
]

CUTE_DTYPES: dict[torch.dtype, type[Numeric]] = {
    torch.float32: Float32,
    torch.bfloat16: BFloat16,
    torch.float16: Float16,
}
"""Dtypes that kernels read and write as floating-point numbers."""

STORAGE_DTYPES: dict[torch.dtype, type[Numeric]] = {
    **CUTE_DTYPES,
    torch.float8_e4m3fn: Uint8,
    torch.int8: Uint8,
}
"""How results are stored: 8-bit ones as bytes, converted by one PTX instruction each."""


class DslMath:
    """``fusedops.epilogue.emit.KernelMath`` for CuTe DSL."""

    def exp(self, value: Any) -> Any:
        return cute.math.exp(value, fastmath=True)

    def exp2(self, value: Any) -> Any:
        return _ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, value)

    def erf(self, value: Any) -> Any:
        return cute.math.erf(value)

    def tanh(self, value: Any) -> Any:
        return cute.math.tanh(value)

    def reciprocal(self, value: Any) -> Any:
        return _ptx("rcp.rn.f32 {$w0}, {$r0};", Float32, value)

    def fast_reciprocal(self, value: Any) -> Any:
        # Without .ftz three more instructions guard results below the smallest normal number.
        return _ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, value)

    def maximum(self, left: Any, right: Any) -> Any:
        # max.NaN (PTX ISA, "max") keeps a NaN; the plain form drops it.
        return _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, left, right)

    def absolute(self, value: Any) -> Any:
        return _ptx("abs.f32 {$w0}, {$r0};", Float32, value)

    def where(self, condition: Any, value: Any, otherwise: Any) -> Any:
        return select_(condition, Float32(value), Float32(otherwise))


def _ptx(code: str, result: type[Numeric], *args: Any) -> Any:
    read = [Float32(arg) if isinstance(arg, float) else arg for arg in args]
    return cute.arch.inline_ptx(code, write_only_types=[result], read_only_args=read)


def storage_value(value: Any, dtype: torch.dtype) -> Any:
    """``value`` (float32) rounded to ``dtype``, in the type that ``STORAGE_DTYPES`` stores.

    To e4m3 one ``cvt.rn.satfinite`` saturates and keeps NaN; to int8 ``cvt.rni`` rounds half to
    even and turns NaN into 0 (PTX ISA, "cvt"); the clamp keeps -128 out.
    """
    if dtype == torch.float8_e4m3fn:
        pair = _ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, value, 0.0)
        return Uint8(pair)
    if dtype == torch.int8:
        clamped = DslMath().maximum(value, -127.0)
        return Uint8(_ptx("cvt.rni.sat.s8.f32 {$w0}, {$r0};", Int32, clamped))
    return value.to(CUTE_DTYPES[dtype])


def packed_pair(low: Any, high: Any, dtype: torch.dtype) -> Any:
    """Two float32 values rounded to an 8- or 16-bit ``dtype`` in one register, ``low`` first.

    Rounds as ``storage_value`` does. Returns a Uint16 for an 8-bit dtype, else an Int32.
    """
    if dtype == torch.float8_e4m3fn:
        return _ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, low, high)
    if dtype == torch.int8:
        first, second = storage_value(low, dtype), storage_value(high, dtype)
        return Uint16(first) | (Uint16(second) << 8)
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    return _ptx(f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", Int32, low, high)


def unpacked_pair(register: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The two values of a packed pair of bfloat16 or float16, as float32."""
    if dtype == torch.bfloat16:
        low = _ptx("{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }", Float32, register)
        code = "{ .reg .b32 t; and.b32 t, {$r0}, 0xffff0000; mov.b32 {$w0}, t; }"
        return low, _ptx(code, Float32, register)
    first, second = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, " + half + "; }"
        for half in ("l", "h")
    )
    return _ptx(first, Float32, register), _ptx(second, Float32, register)


def packed_product(left: Any, right: Any, dtype: torch.dtype) -> Any:
    """Products of two packed pairs of ``dtype`` (bfloat16 or float16), each rounded once."""
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    return _ptx(f"mul.rn.{name} {{$w0}}, {{$r0}}, {{$r1}};", Int32, left, right)


def store_pair(
    address: Any, low: Any, high: Any, dtype: torch.dtype, inside: Any = None, space: str = "global"
) -> None:
    """Round two float32 values to ``dtype`` and store them at a byte address, as one access.

    Args:
        address: aligned to the pair; an Int64, of shared memory an Int32.
        inside: only where this holds; None: always.
        space: ``global`` or ``shared``.
    """
    if dtype == torch.float32:
        code, values = "v2.f32 [{$r0}], {{$r1}, {$r2}}", [Float32(low), Float32(high)]
    else:
        width = 16 * dtype.itemsize
        code, values = f"b{width} [{{$r0}}], {{$r1}}", [packed_pair(low, high, dtype)]
    cute.arch.inline_ptx(f"st.{space}.{code};", read_only_args=[address, *values], predicate=inside)


def round_to(value: Any, dtype: torch.dtype) -> Any:
    """``value`` rounded to ``dtype`` and back to float32 (floating-point dtypes of 16 bits up)."""
    return value if dtype == torch.float32 else value.to(CUTE_DTYPES[dtype]).to(Float32)
