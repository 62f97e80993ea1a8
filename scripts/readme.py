#!/usr/bin/env python3
"""Write the README's tables from the committed reports.

usage: scripts/readme.py [--check]

Every block between ``<!-- table NAME -->`` and ``<!-- end -->`` is replaced by the table of that
name. ``--check`` changes nothing and exits 1 where a block differs from its report.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
REPORTS = ROOT / "reports"
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Report = dict[str, Any]


def read(name: str) -> Report:
    """The report at ``reports/<name>``."""
    loaded: Report = json.loads((REPORTS / name).read_text())
    return loaded


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table cell; a dash where nothing was measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}"


def provenance(environment: Report) -> str:
    """Where and when a report was measured, one line."""
    known = ("gpu", "cpu", "threads", "driver", "cuda", "torch", "transformers", "commit", "date")
    facts = [f"{key} {environment[key]}" for key in known if environment.get(key) is not None]
    return "Measured: " + ", ".join(facts) + ".\n"


def emitter_properties() -> str:
    """What the ways to emit a GEMM from Python need and can do."""
    report = read("h200/emitters.json")
    rows = [
        [row["what"], row["cutlass_dsl"], row["operators"], row["cutlass_cpp"]]
        for row in report["properties"]
    ]
    header = ["", "CuTe DSL 4.8", "cutlass-operators 0.3", "nvidia-cutlass 4.2 (C++ templates)"]
    return table(header, rows)


def emitter_times() -> str:
    """Times of kernels emitted in each way."""
    report = read("h200/emitters.json")
    rows = [
        [
            row["shape"],
            str(row["m"]),
            *(
                number(row[name])
                for name in ("cublas_silu_apart", "quack", "operators_plain", "cutlass_cpp")
            ),
        ]
        for row in report["times_us"]
    ]
    header = [
        "weight N x K",
        "M",
        "cuBLAS + SiLU apart",
        "CuTe DSL (QuACK), fused",
        "operators, plain",
        "C++ templates, fused",
    ]
    return table(header, rows) + "\n" + provenance(report["environment"])


TABLES: dict[str, Callable[[], str]] = {
    "emitter_properties": emitter_properties,
    "emitter_times": emitter_times,
}


def rendered(text: str) -> str:
    """``text`` with every block's table made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in TABLES:
            raise SystemExit(f"README has a table {name!r}; known are {', '.join(TABLES)}.")
        return f"{match.group(1)}\n{TABLES[name]()}\n{match.group(4)}"

    return BLOCK.sub(fill, text)


def main() -> int:
    """Entry point."""
    text = README.read_text()
    fresh = rendered(text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print("README.md's tables differ from reports/; run scripts/readme.py", file=sys.stderr)
            return 1
        return 0
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
