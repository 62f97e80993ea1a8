"""Whether compiled code leaves the registers of asynchronous products alone until they have ended.

wgmma reads A from registers and adds to its accumulators while later instructions run; until a wait
for its group neither may be touched (PTX ISA, "wgmma.mma_async"). ptxas is to see to that for what
it moves by itself, and does not for every source: registers of constants have been filled behind
the products that read them. Results then depend on what was in the registers before.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_PRODUCT = re.compile(r"[HQI]GMMA\.64x(\d+)x")
_WIDE = re.compile(r"\.WIDE|^CS2R(?!\.32)|^D(ADD|MUL|FMA)|\.64\b")
_PREDICATES_ONLY = re.compile(r"SETP|^PLOP3|^R2P|^VOTE")


def _number(operand: str) -> int | None:
    """The register that an operand is; None for RZ and all that is no register."""
    found = re.match(r"[-|~!]*R(\d+)\b", operand)
    return int(found[1]) if found else None


def _written(name: str, operands: list[str]) -> set[int]:
    """Registers that an instruction other than a product writes."""
    if _PREDICATES_ONLY.search(name):
        return set()
    register = next((operand for operand in operands if not re.match(r"!?U?P[\dT]", operand)), "")
    first = _number(register)
    if first is None:
        return set()
    count = 4 if ".128" in name else 2 if _WIDE.search(name) else 1
    return set(range(first, first + count))


def _paths(sass: str) -> list[tuple[str, str, list[str]]]:
    """(address, name, operands) in the order of the text, each loop with products twice."""
    found: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        if not (matched := _INSTRUCTION.search(line)):
            continue
        operands = [part.strip() for part in matched[3].split(",")]
        found.append((matched[1], matched[2], operands))
        if matched[2] != "BRA" or not (target := re.search(r"`\((\.L_x_\d+)\)", line)):
            continue
        loop = found[labels.get(target[1], len(found)) :]
        if any(_PRODUCT.match(name) for _, name, _ in loop):
            found += loop
    return found


def touched_in_flight(sass: str) -> list[str]:
    """Instructions that touch registers of products that may still run; none in sound code.

    Args:
        sass: ``nvdisasm -c`` of a kernel.

    Returns:
        Each as "address NAME operands: which registers of which product".
    """
    groups: list[list[tuple[str, set[int], set[int]]]] = []
    current: list[tuple[str, set[int], set[int]]] = []
    wrong = {}
    for address, name, operands in _paths(sass):
        if product := _PRODUCT.match(name):
            sums = _number(operands[0])
            a = _number(operands[1])
            assert sums is not None
            written = set(range(sums, sums + int(product[1]) // 2))
            read = set() if a is None else set(range(a, a + 4))
            current.append((address, read, written))
            if any(operand.startswith("gsb") for operand in operands):
                groups.append(current)
                current = []
            continue
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands[1], 0)
            groups = groups[len(groups) - left :] if left else []
            continue
        writes = _written(name, operands)
        names = {int(n) for n in re.findall(r"\bR(\d+)\b", " ".join(operands))} | writes
        for of, read, sums_of in (p for group in (*groups, current) for p in group):
            if touched := (writes & read) | (names & sums_of):
                registers = ", ".join(f"R{n}" for n in sorted(touched))
                text = f"{address} {name} {', '.join(operands)}: {registers} of {of}"
                wrong.setdefault(address, text)
    return list(wrong.values())
