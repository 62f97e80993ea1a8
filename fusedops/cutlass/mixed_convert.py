"""Narrow codes to the bfloat16, float16 or e4m3 registers of a wgmma A fragment, exactly.

Codes become floating-point numbers by their bits alone: below a power of two with a unit last
place, a number's low mantissa bits are an integer that is added to it. 0x4300 | q is the bfloat16
128 + q for q < 128, 0x6400 | q the float16 1024 + q for q < 1024; taking the power of two away
again, with the zero point, is exact. Instructions for 8 codes (logic and shifts, float):

* int4 to bfloat16: 3 shifts, 4 LOP3, 4 HADD2; to float16: 1 shift, 4 LOP3, 2 HADD2, 2 HFMA2 (a
  nibble at bit 4 counts 16 times, its row's constant is another).
* int8 to bfloat16: 2 shifts, 8 LOP3, 4 HADD2. Bit 7 of 0x4300 | bit is the exponent's lowest, so it
  is 128 or, for negative codes, 256; (128 + low seven bits) minus it is the code. To float16: 2
  LOP3, 4 PRMT, 4 HADD2.
* e4m3: 6 shifts, 8 LOP3, 4 HMUL2. Exponent and mantissa are moved to their places, subnormal
  numbers included, and the difference of the exponents' biases is multiplied in.


Zero points can also be subtracted by products of their own, of a fragment that holds minus the zero
point in every column with the same activations: one wgmma more for each, and

* int4 to e4m3: 1 shift, 2 LOP3. A nibble in a byte of its own is the e4m3 number q 2^-9: exponent
  and mantissa count through the subnormal and the first normal numbers.
* int4 to float16: 1 shift, 4 LOP3. A nibble is the subnormal number q 2^-24, at bit 4 q 2^-20.
* int4 to bfloat16: 3 shifts, 4 LOP3, and 128 + q is multiplied.

Source: PTX ISA, "lop3", "prmt", "sub" and "fma" of f16x2 and bf16x2.
"""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Int32, cute

from fusedops.config.mixed import NarrowWeight

__all__ = ["code_scales", "eights", "fragment", "zero_constants"]


_AND_OR = 0xEA  # (a & b) | c
_OR_AND = 0xF8  # a | (b & c)

_MAGIC = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
_NAMES = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}


_OR = "or.b32 {$w0}, {$r0}, {$r1};"


def _both(half: int) -> int:
    """A 16-bit constant in both halves of a register, as a signed number."""
    word = half | (half << 16)
    return word - (1 << 32) if word >= 1 << 31 else word


def _op(code: str, *args: Any) -> Any:
    read = [Int32(arg) if isinstance(arg, int) else arg for arg in args]
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=read)


def _lop3(a: Any, b: Any, c: Any, table: int) -> Any:
    return _op(f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}}, {table};", a, b, c)


def _right(word: Any, bits: int) -> Any:
    return _op(f"shr.u32 {{$w0}}, {{$r0}}, {bits};", word) if bits else word


def _left(word: Any, bits: int) -> Any:
    return _op(f"shl.b32 {{$w0}}, {{$r0}}, {bits};", word)


def _and(word: Any, mask: int) -> Any:
    return _op("and.b32 {$w0}, {$r0}, {$r1};", word, mask)


def _prmt(low: Any, high: Any, selector: int) -> Any:
    return _op(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", low, high)


def _packed(operation: str, dtype: torch.dtype, *args: Any) -> Any:
    """An operation on pairs of 16-bit numbers; they take constants from registers only."""
    moves = "".join(f"mov.b32 a{i}, {{$r{i}}}; " for i in range(len(args)))
    names = ", ".join(f"a{i}" for i in range(len(args)))
    code = f"{{ .reg .b32 a<3>; {moves}{operation}.rn.{_NAMES[dtype]} {{$w0}}, {names}; }}"
    return _op(code, *args)


def code_scales(dtype: torch.dtype, products: bool) -> tuple[float, float]:
    """What the numbers of a thread's two rows are to be multiplied by, see ``zero_constants``."""
    if dtype == torch.float8_e4m3fn:
        return 2.0**9, 2.0**9
    if dtype == torch.float16 and products:
        return 2.0**24, 2.0**20
    return 1.0, 1.0


def zero_constants(zeros: Any, dtype: torch.dtype, products: bool) -> tuple[Any, ...]:
    """The zero points of a thread's two rows, as registers of ``dtype``.

    Args:
        zeros: both, at most 16, in registers of their own. For the zero point 8 of codes stored
            plus 8: ``eights`` with ``products``, else None.
        dtype: of the activations: bfloat16, float16 or float8_e4m3fn.
        products: four registers that are multiplied with the activations as ``fragment``'s are,
            which come without a zero point; else the two that ``fragment`` takes.
    """
    if products:
        return _negative_zeros(zeros, dtype)
    magic = _MAGIC[dtype]
    if zeros is None:
        # float16's second row has -(64 + 8), see below.
        return Int32(_both(magic + 8)), Int32(_both(0xD480 if dtype == torch.float16 else 0x4308))
    # Bytes (zero, magic) twice; the magic number's lower byte is zero.
    first, second = (_prmt(zero, _both(magic | magic >> 8), 0x4040) for zero in zeros)
    if dtype == torch.float16:
        second = _packed("sub", dtype, _both(0x6380), second)  # 960 - (1024 + z): -(64 + z)
    return first, second


def eights(positive: Any) -> tuple[Any, Any]:
    """The zero point 8 of both rows, as numbers that the compiler cannot know.

    ptxas (13.4) fills a fragment's registers of constants where it likes, also while products that
    read them run: with constants, results depend on what the registers held before.

    Args:
        positive: a number that is known at run time only, from 0 to 2^31 - 1.
    """
    first, second = (_op(_OR, _right(positive, 31), 8) for _ in range(2))
    return first, second


def _negative_zeros(zeros: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """Minus the zero points, in the form of ``fragment``'s numbers: a fragment's four registers.

    Each is computed: of two in one register a fragment would be put together for every product.
    """
    signed = {
        torch.float8_e4m3fn: (0x8080, 0x8080),
        torch.bfloat16: (0xC300, 0xC300),
        torch.float16: (0x8000, 0x8000),
    }[dtype]
    fourth = dtype == torch.float16  # its second row's nibbles are four bits further up
    # Byte 0 of a zero point in every byte, or in the lower one of each half.
    selector = 0x0000 if dtype == torch.float8_e4m3fn else 0x1010
    first, second = (_prmt(zero, 0, selector) for zero in zeros)
    second = _left(second, 4) if fourth else second
    return tuple(
        _op(_OR, zero, _both(sign))
        for _ in range(2)
        for zero, sign in zip((first, second), signed, strict=True)
    )


def fragment(words: list[Any], weight: NarrowWeight, dtype: torch.dtype, constants: Any) -> Any:
    """The four registers of a wgmma's step: bit 0 of the index is the row half, bit 1 the K half.

    Args:
        words: that hold the step: one of int4 codes beside 16-bit activations, else two.
        weight: the format.
        dtype: of the activations: bfloat16, float16 or float8_e4m3fn.
        constants: of ``zero_constants``, for int4; None leaves the zero point to products.
    """
    if dtype == torch.float8_e4m3fn:
        return [_and(_right(word, bits), _both(0x0F0F)) for word in words for bits in (0, 4)]
    if weight.kind == "int4":
        return _int4(words[0], dtype, constants)
    convert = _int8 if weight.kind == "int8" else _e4m3
    return [register for word in words for register in convert(word, dtype)]


def _int4(word: Any, dtype: torch.dtype, constants: Any) -> list[Any]:
    if dtype == torch.bfloat16:
        magic = _both(_MAGIC[dtype])
        numbers = [_lop3(_right(word, 4 * r), _both(0x000F), magic, _AND_OR) for r in range(4)]
        if constants is None:
            return numbers
        return [_packed("sub", dtype, number, constants[r % 2]) for r, number in enumerate(numbers)]
    parts = (word, _right(word, 8))
    if constants is None:
        return [_and(part, _both(mask)) for part in parts for mask in (0x000F, 0x00F0)]
    return [register for part in parts for register in _float16(part, *constants)]


def _float16(part: Any, first: Any, second: Any) -> list[Any]:
    """Of each half of a register the nibbles 0 and 1."""
    magic, dtype = _both(_MAGIC[torch.float16]), torch.float16
    low = _lop3(part, _both(0x000F), magic, _AND_OR)
    high = _lop3(part, _both(0x00F0), magic, _AND_OR)
    sixteenth = _both(0x2C00)
    return [_packed("sub", dtype, low, first), _packed("fma", dtype, high, sixteenth, second)]


def _int8(word: Any, dtype: torch.dtype) -> list[Any]:
    magic = _both(_MAGIC[dtype])
    if dtype == torch.float16:
        # The sign bit flipped: q + 128, below 256.
        raised = _op("xor.b32 {$w0}, {$r0}, {$r1};", word, _both(0x8080))
        return [
            _packed("sub", dtype, _prmt(raised, _both(0x6464), selector), _both(0x6480))
            for selector in (0x4240, 0x4341)
        ]
    return [
        _packed(
            "sub",
            dtype,
            _lop3(part, _both(0x007F), magic, _AND_OR),
            _lop3(part, _both(0x0080), magic, _AND_OR),
        )
        for part in (word, _right(word, 8))
    ]


def _e4m3(word: Any, dtype: torch.dtype) -> list[Any]:
    # Of the byte's seven bits below the sign three are mantissa: they go to bits 4 or 7 on.
    shift = 4 if dtype == torch.bfloat16 else 7
    mask, sign = _both(0x7F << shift), _both(0x8000)
    # 2^(127 - 7) and 2^(15 - 7).
    scale = _both(0x7B80 if dtype == torch.bfloat16 else 0x5C00)
    even = _lop3(_and(_left(word, shift), mask), _left(word, 8), sign, _OR_AND)
    odd = _lop3(_and(_right(word, 8 - shift), mask), word, sign, _OR_AND)
    return [_packed("mul", dtype, value, scale) for value in (even, odd)]
