"""What the rows of the ladder of products say together: loads, and which route to take."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.bench.measurement import Measurement
from fusedops.ladders.catalog import load_ladder
from fusedops.ladders.gemm_problem import predicted_loads
from fusedops.ladders.model import Finding
from fusedops.ladders.report import ResultRow

__all__ = ["NAME", "SIZE", "TILES", "findings", "recorded_words"]

NAME = "gemm"
SIZE = 4096

TILES = {
    "gemm.v1": (1, 1),
    "gemm.v2_16": (16, 16),
    "gemm.v2_32": (32, 32),
    "gemm.v3": (32, 32),
    "gemm.v4": (128, 128),
    "gemm.v5": (128, 128),
    "gemm.v6": (128, 128),
}
"""Rows and columns of the result that share what a block loads."""

ROUTES = {
    "cuBLAS, a call": ("gemm.torch",),
    "CUDA C++": tuple(TILES),
    "Triton": ("gemm.triton",),
    "CUTLASS (CuTe DSL)": ("gemm.v7", "gemm.v8"),
}
"""Route -> its steps, of which the fastest on a problem counts."""

CLOSE = 1.1
"""Times within this factor of the best count as close to it."""

Rows = Mapping[str, Mapping[str, ResultRow]]
_EMITTER_FILE = Path(__file__).with_name("gemm_emitter.json")
_NONE = "-"


def findings(rows: Rows) -> tuple[Finding, ...]:
    """Predicted against counted loads; routes with times and lines; the older emitter's record."""
    return (_loads(rows), _answer(rows), _emitter())


# Loads


def _loads(rows: Rows) -> Finding:
    readings = {step: row.readings for each in rows.values() for step, row in each.items()}
    lines: list[tuple[str, ...]] = []
    off: list[str] = []
    for step, (tile_m, tile_n) in TILES.items():
        found = readings.get(step, {})
        counted, predicted = found.get("loads"), found.get("predicted_loads")
        if counted != predicted:
            off.append(step)
        lines.append(
            (
                step,
                f"{tile_m} x {tile_n}",
                f"{predicted_loads(SIZE, SIZE, SIZE, tile_m, tile_n):,.0f}",
                _NONE if predicted is None else f"{predicted:,.0f}",
                _NONE if counted is None else f"{counted:,.0f}",
                f"{2 * tile_m * tile_n / (tile_m + tile_n):g}",
            )
        )
    if not any("loads" in found for found in readings.values()):
        verdict = "Nothing was counted yet."
    elif off:
        verdict = f"The count is another than the prediction for {', '.join(off)}."
    else:
        verdict = "Every count equals its prediction."
    return Finding(
        "Loads, predicted and counted",
        "A tile of TM x TN results needs TM + TN elements for each step of K, so a product loads "
        "(TM + TN) / (TM TN) MNK elements from global memory. They are counted one by one, on a "
        f"smaller product, by the same kernels compiled with a counter. {verdict}",
        (
            *("step", "tile", f"predicted, {SIZE} x {SIZE} x {SIZE}"),
            *("predicted, where counted", "counted", "FLOP a load"),
        ),
        tuple(lines),
    )


# Which route


@dataclass(frozen=True)
class _Timed:
    """The fastest step of a route on a problem; 0 lines are a call of a library."""

    route: str
    step: str
    us: float
    lines: int


def _fastest(route: str, steps: tuple[str, ...], rows: Mapping[str, ResultRow]) -> _Timed | None:
    lines = {step.id: step.lesson.lines for step in load_ladder(NAME).steps}
    found = [
        _Timed(route, step, outcome.median_us, lines[step])
        for step in steps
        if step in rows and isinstance(outcome := rows[step].outcome, Measurement)
    ]
    return min(found, key=lambda each: each.us, default=None)


def _sentence(problem: str, timed: list[_Timed]) -> str:
    best = min(timed, key=lambda each: each.us)
    close = [each for each in timed if each.us <= CLOSE * best.us]
    least = min(close, key=lambda each: each.lines)
    text = f"{problem}: {best.route} is the fastest ({best.step}, {best.us:.1f} us)"
    if least is best:
        return f"{text}, and nothing within {CLOSE - 1:.0%} of it takes fewer lines."
    return f"{text}; {least.route} comes within {CLOSE - 1:.0%} of it with the fewest lines."


def _answer(rows: Rows) -> Finding:
    lines: list[tuple[str, ...]] = []
    words: list[str] = []
    for problem, each in rows.items():
        found = [_fastest(route, steps, each) for route, steps in ROUTES.items()]
        timed = [one for one in found if one is not None]
        if not timed:
            continue
        cublas = next((one.us for one in timed if one.step == "gemm.torch"), None)
        words.append(_sentence(problem, timed))
        lines += [
            (
                problem,
                one.route,
                one.step,
                f"{one.us:.1f}",
                _NONE if cublas is None else f"{cublas / one.us:.2f}",
                str(one.lines) if one.lines else "a call",
            )
            for one in timed
        ]
    return Finding(
        "Triton, CUDA or CUTLASS for this target?",
        " ".join(words or ["No step has a time yet."])
        + " Lines are those of code, without blank lines, comments and docstrings; those of the "
        "CuTe DSL kernel serve every epilogue, dtype and tiling of the library, those of the "
        "others this product alone.",
        ("problem", "route", "fastest step", "us", "of cuBLAS's speed", "lines of code"),
        tuple(lines),
    )


# The older emitter


@functools.cache
def _record() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_EMITTER_FILE.read_text(encoding="utf-8"))
    return data


def recorded_words() -> str:
    """What stands in the place of the older emitter's time."""
    record = _record()
    row = next(row for row in record["products"] if {row["m"], row["n"], row["k"]} == {SIZE})
    return (
        f"not run here; recorded on {record['date']} on an {record['gpu']}: {row['emitter_us']} us "
        f"with bias or scale and SiLU in its epilogue, where cuBLAS took {row['cublas_us']} us for "
        f"the product and {row['cublas_silu_us']} us with SiLU apart"
    )


def _emitter() -> Finding:
    record = _record()
    low, high = record["compile_cpu_s"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = tuple(
        (
            f"{row['m']} x {row['n']} x {row['k']}",
            *(f"{row[name]:g}" for name in ("cublas_us", "cublas_silu_us", "emitter_us")),
            f"{row['cublas_silu_us'] / row['emitter_us']:.2f}",
        )
        for row in record["products"]
    )
    return Finding(
        "The older CUTLASS emitter, as recorded",
        f"Read on {record['date']} on an {record['gpu']} (driver {record['driver']}, {versions}): "
        "C++ templates with bias or scale and SiLU in the epilogue, bfloat16, medians of "
        f"CUDA-graph replays, the best of {record['builds']} builds. A build took {low} to {high} "
        "CPU seconds of nvcc. Its sources are not part of this project, so its lines are not "
        "counted.",
        ("M x N x K", "cuBLAS, us", "cuBLAS + SiLU, us", "emitter, us", "of cuBLAS + SiLU's speed"),
        lines,
    )
