"""The check of registers of products in flight finds what it is for, and no more."""

from __future__ import annotations

import pytest
from sass_products import touched_in_flight

PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R36, gdesc[UR12], R24"
FILL = "IMAD.MOV.U32 R37, RZ, RZ, -0x77777778"
ONE_LEFT, NONE_LEFT = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def code(*lines: str) -> str:
    """Instructions as nvdisasm prints them; a line that ends in a colon is a label."""
    shown = [
        f"{line}" if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    ]
    return "\n".join(shown)


@pytest.mark.parametrize(
    "line",
    [
        FILL,
        "@P1 LDS.128 R36, [R52]",
        "LDS.64 R38, [R52+0x200]",
        "LOP3.LUT P0, R39, R39, 0xf000f, R67, 0xea, !PT",
        "FFMA R8, R31, R9, R8",
        "IMAD.WIDE R22, R3, 0x2, R30",
        "STS.128 [R4], R24",
    ],
)
def test_registers_that_a_product_may_still_use(line: str) -> None:
    (found,) = touched_in_flight(code(f"{PRODUCT}, gsb0", line))
    assert "of 0000" in found
    assert line.split()[-1] in found
    assert touched_in_flight(code(f"{PRODUCT}, gsb0", NONE_LEFT, line)) == []
    assert touched_in_flight(code(line, f"{PRODUCT}, gsb0", NONE_LEFT)) == []


@pytest.mark.parametrize(
    "line",
    [
        "IMAD.MOV.U32 R40, RZ, RZ, R35",
        "LDS.128 R32, [R52]",
        "ISETP.NE.U32.AND P1, PT, R36, RZ, PT",  # A is only read
        "STS.128 [R4], R36",
        "R2UR UR10, R37",
        "CS2R.32 R35, SRZ",
        "MOV R23, UR24",
        PRODUCT,
    ],
)
def test_other_registers_and_what_only_reads_a_are_fine(line: str) -> None:
    assert touched_in_flight(code(f"{PRODUCT}, gsb0", line)) == []


def test_a_wait_ends_all_but_the_youngest_groups() -> None:
    other = "QGMMA.64x16x32.F32.E4M3.E4M3 R56, R40, gdesc[UR12], RZ, !UPT, gsb0"
    first = f"{PRODUCT}, gsb0"
    assert touched_in_flight(code(first, other, ONE_LEFT, FILL)) == []
    assert len(touched_in_flight(code(other, first, ONE_LEFT, FILL))) == 1
    # A product that no group has taken yet is in flight too.
    assert len(touched_in_flight(code(other, PRODUCT, NONE_LEFT, FILL))) == 1


def test_a_loop_comes_back_to_what_stands_before_its_products() -> None:
    start, back = ".L_x_7:", "@P1 BRA `(.L_x_7)"
    assert len(touched_in_flight(code(start, FILL, f"{PRODUCT}, gsb0", back))) == 1
    assert touched_in_flight(code(start, FILL, f"{PRODUCT}, gsb0", NONE_LEFT, back)) == []
