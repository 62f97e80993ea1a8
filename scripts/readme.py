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
    """Where and when a report was measured, one line; versions may stand one level deeper."""
    facts = {**environment, **environment.get("versions", {})}
    known = ("gpu", "cpu", "threads", "driver", "cuda", "torch", "transformers", "commit", "date")
    absent = (None, "none", "unknown")
    shown = [f"{key} {facts[key]}" for key in known if facts.get(key) not in absent]
    # Twelve digits name a commit.
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}", r"\1", f"Measured: {', '.join(shown)}.\n")


def yes(value: bool) -> str:
    """A truth for a table cell."""
    return "yes" if value else "no"


def demo_table(report: Report) -> str:
    """The demo's figures beside transformers'."""
    rows = [
        [
            run["name"],
            number(run["prefill_tokens_per_s"]),
            number(run["decode_tokens_per_s"]),
            number(run["step_ms_median"], 2),
            number(run["step_ms_p99"], 2),
            number(run["bytes_per_step"] and run["bytes_per_step"] / 1e6),
            number(run["gb_per_s"]),
            "-" if run["bandwidth_fraction"] is None else f"{run['bandwidth_fraction']:.0%}",
        ]
        for run in report["figures"]
    ]
    header = [
        "run",
        "prefill tok/s",
        "decode tok/s",
        "ms/step, median",
        "p99",
        "MB/step",
        "GB/s",
        f"of the read bandwidth ({report['read_bandwidth']['gb_per_s']:.1f} GB/s)",
    ]
    equal, prompts = report["prompts_equal"], len(report["prompts"])
    compared = "not compared" if equal is None else f"{equal}/{prompts}"
    return (
        table(header, rows)
        + f"\n`greedy tokens equal transformers: {compared}` ({report['model']}, "
        f"{report['dtype']}). " + provenance({**report["machine"], "threads": report["threads"]})
    )


def demo_cpu() -> str:
    """The demo on the CPU."""
    return demo_table(read("cpu/demo.json"))


def demo_gpu() -> str:
    """The demo on a GPU in float32, where its tokens can be compared."""
    return demo_table(read("h200/demo_float32.json"))


LIMITS_MS = {
    ("llama3-8b", 1): 5.84,
    ("llama3-8b", 8): 6.86,
    ("llama3-8b", 32): 8.48,
    ("llama3-8b", 64): 10.49,
}
"""What a decode step at context 1024 may take with cuBLAS's products: plain torch's own graph; for
other shapes the limit is the torch graph of the same run."""


def steps_of(report: Report, provider: str) -> dict[tuple[str, int, int], Report]:
    """(shape, batch, context) -> {contender: row} of a report of decode steps."""
    steps: dict[tuple[str, int, int], Report] = {}
    for row in report["rows"]:
        if (row["contender"], row["provider"]) in (
            ("fusedops", provider),
            ("torch graph", "torch"),
        ):
            key = (row["shape"], row["batch"], row["context"])
            steps.setdefault(key, {})[row["contender"]] = row
    return {key: pair for key, pair in steps.items() if len(pair) == 2}


def step_table(
    name: str,
    provider: str,
    header: list[str],
    cells: Callable[[tuple[str, int], Report, Report], list[str]],
) -> str:
    """Whole decode steps of a report, with our products by one provider, beside torch's graph.

    Args:
        name: the report's.
        provider: of our products.
        header: of our times and of what ``cells`` gives; torch's times stand between them.
        cells: the rest of a row, of (shape, batch), our figures and torch's.
    """
    report = read(name)
    rows = []
    for (shape, batch, context), pair in steps_of(report, provider).items():
        ours, torch_graph = pair["fusedops"], pair["torch graph"]
        times = [number(figures["ms"], 2) for figures in (ours, torch_graph)]
        rest = cells((shape, batch), ours, torch_graph)
        rows.append([shape, str(batch), str(context), *times, *rest])
    header = ["shape", "batch", "context", header[0], "torch graph, ms", *header[1:]]
    return table(header, rows) + "\n" + provenance(report["environment"])


def decode_baseline() -> str:
    """Whole decode steps with cuBLAS's products."""

    def cells(step: tuple[str, int], ours: Report, torch_graph: Report) -> list[str]:
        limit, plan_us = LIMITS_MS.get(step, torch_graph["ms"]), ours["plan_us"]
        return [
            number(limit, 2),
            number(ours["floor_ms"], 2),
            number(plan_us and plan_us / 1e3, 2),
            yes(None not in (ours["ms"], limit) and ours["ms"] <= limit),
        ]

    header = ["fusedops with cuBLAS, ms", "limit, ms", "memory floor, ms"]
    header += ["attention's plan on the host, ms", "ok"]
    return step_table("h200/decode_baseline.json", "cublas", header, cells)


def decode_cutlass() -> str:
    """Whole decode steps with our kernels' products."""

    def cells(_: tuple[str, int], ours: Report, torch_graph: Report) -> list[str]:
        ratio = ours["ms"] and torch_graph["ms"] and torch_graph["ms"] / ours["ms"]
        return [number(ratio, 2), number(ours["floor_ms"], 2)]

    header = ["fusedops, ms", "ratio", "memory floor, ms"]
    return step_table("h200/decode_cutlass.json", "cutlass", header, cells)


def significant(value: float | None) -> str:
    """Four significant digits; a dash where there is no figure."""
    return "-" if value is None else f"{value:.4g}"


def _ends(entry: Report) -> str:
    """The interval of a figure; a dash where there is none."""
    ends = (entry["low"], entry["high"])
    return "-" if None in ends else "-".join(map(significant, ends))


def goals() -> str:
    """Every goal that was measured, those missed included."""
    specs = json.loads((ROOT / "fusedops/bench/goals.json").read_text())["goals"]
    entries = read("h200/goals.json")["goals"]
    known = {spec["id"]: spec for spec in specs if spec["id"] in entries}
    rows = []
    for name, spec in known.items():
        entry = entries[name]
        rows.append(
            [
                f"`{name}`",
                f"{spec['op']} {significant(spec['goal'])} {spec['unit']}",
                significant(spec["floor"]),
                significant(entry["value"]),
                _ends(entry),
                entry["peer"] or "-",
                yes(entry["ok"]),
                entry["provider"],
            ]
        )
    header = ["id", "goal", "floor", "measured", "low-high", "peer, same run", "ok", "provider"]
    met = sum(entries[name]["ok"] for name in known)
    count = f"{len(rows)} of {len(specs)} goals are measured, {met} of them met. "
    return table(header, rows) + "\n" + count + provenance(_common([entries[i] for i in known]))


def _common(entries: list[Report]) -> Report:
    """One environment for entries of several runs: the different values of each fact, and days."""
    flat = [{**entry, **entry["versions"], "date": entry["date"][:10]} for entry in entries]
    names = ("gpu", "driver", "cuda", "torch", "commit", "date")
    return {name: " and ".join(sorted({str(entry.get(name)) for entry in flat})) for name in names}


def host_overhead() -> str:
    """What a small call costs on the CPU."""
    report = read("cpu/host.json")
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for row in report["rows"]:
        text = f"{row['median_us']:.1f} ({row['min_us']:.1f})" if "median_us" in row else "failed"
        cells.setdefault(row["call"], {})[row["dtype"], row["m"]] = text
    sizes = list(dict.fromkeys((row["dtype"], row["m"]) for row in report["rows"]))
    rows = [[f"`{call}`", *(by.get(size, "-") for size in sizes)] for call, by in cells.items()]
    header = ["call", *(f"{dtype}, M={m}" for dtype, m in sizes)]
    target = report["target"]
    verdict = "met" if target["ok"] else "missed"
    return (
        table(header, rows)
        + f"\nTarget: `{target['call']}`, {target['dtype']}, M={target['m']}, under "
        f"{target['limit_us']:g} us a call: {verdict} ({number(target['median_us'])} us). "
        + provenance({**report["environment"], "threads": report["threads"]})
    )


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
    "demo_cpu": demo_cpu,
    "demo_gpu": demo_gpu,
    "decode_baseline": decode_baseline,
    "decode_cutlass": decode_cutlass,
    "goals": goals,
    "host_overhead": host_overhead,
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
