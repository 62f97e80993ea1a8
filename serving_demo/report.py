"""``DemoReport``: what a demo run measured, as a table and as JSON."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fusedops.bench.environment import collect_environment
from serving_demo.bandwidth import ReadBandwidth
from serving_demo.engine import Generation
from serving_demo.files import write_atomically

__all__ = ["DemoReport", "RunFigures", "figures_of", "machine_facts", "table_of", "write_json"]

_HEADINGS = (
    "prefill\ntok/s",
    "decode\ntok/s",
    "ms/step\nmedian",
    "ms/step\np99",
    "MB/step",
    "GB/s",
    "of read\nroof",
)
"""Columns of the table after the run's name; with it they fit 80 characters."""


@dataclass(frozen=True)
class RunFigures:
    """How fast one contender was.

    Attributes:
        name: whose figures these are, and how it ran.
        prefill_tokens_per_s: prompt tokens over the time until all first tokens were there.
        decode_tokens_per_s: tokens over the time of all decode steps.
        step_ms_median, step_ms_p99: time of a decode step, which gives each live prompt a token.
        n_steps: number of decode steps.
        bytes_per_step: mean bytes a step has to read: every weight once, and the keys and values of
            the positions attended.
        gb_per_s: those bytes over the time of all steps, 10^9 a second.
        bandwidth_fraction: gb_per_s over the measured read bandwidth.
    """

    name: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    step_ms_median: float | None
    step_ms_p99: float | None
    n_steps: int
    bytes_per_step: float | None
    gb_per_s: float | None
    bandwidth_fraction: float | None


@dataclass(frozen=True)
class DemoReport:
    """A demo run.

    Attributes:
        model, weight_format: the file or folder, and how its weights are stored.
        device, dtype, threads: where and in what it ran.
        prompts, texts, tokens: what was asked and what fusedops' model answered.
        figures: fusedops' figures first, then transformers'.
        read_bandwidth: measured in this run.
        prompts_equal: prompts whose greedy tokens equal transformers'; None where not compared.
        comparison: how transformers ran, or why it did not.
        seconds: name of a part -> wall time.
        machine: names, versions, commit and date.
    """

    model: str
    weight_format: str
    device: str
    dtype: str
    threads: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    figures: tuple[RunFigures, ...]
    read_bandwidth: ReadBandwidth
    prompts_equal: int | None
    comparison: str
    seconds: dict[str, float]
    machine: dict[str, str]

    @property
    def equality_line(self) -> str:
        """``greedy tokens equal transformers: N/N``, or why nothing was compared."""
        label = "greedy tokens equal transformers"
        if self.prompts_equal is None:
            return f"{label}: not compared ({self.comparison})"
        return f"{label}: {self.prompts_equal}/{len(self.prompts)}"


def figures_of(
    name: str,
    generation: Generation,
    weight_bytes: int,
    kv_bytes_per_position: int,
    bandwidth: ReadBandwidth,
) -> RunFigures:
    """Figures of a run; those of decode steps are None where there was none."""
    prefill = generation.prefill_tokens / generation.prefill_seconds
    steps = generation.steps
    if not steps:
        return RunFigures(name, prefill, None, None, None, 0, None, None, None)
    total = sum(step.seconds for step in steps)
    n_bytes = [weight_bytes + kv_bytes_per_position * step.n_positions for step in steps]
    gb_per_s = sum(n_bytes) / total / 1e9
    milliseconds = [1e3 * step.seconds for step in steps]
    return RunFigures(
        name=name,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=sum(step.n_tokens for step in steps) / total,
        step_ms_median=quantile(milliseconds, 0.5),
        step_ms_p99=quantile(milliseconds, 0.99),
        n_steps=len(steps),
        bytes_per_step=sum(n_bytes) / len(steps),
        gb_per_s=gb_per_s,
        bandwidth_fraction=gb_per_s / bandwidth.gb_per_s,
    )


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least ``fraction`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def table_of(report: DemoReport) -> Table:
    """The report's table for a terminal."""
    roof = report.read_bandwidth
    caption = f"roof: the read bandwidth here, {roof.gb_per_s:.1f} GB/s ({roof.how})"
    n_prompts = len(report.prompts)
    if n_prompts > 1:
        caption = f"x{n_prompts}: all {n_prompts} prompts at once; x1: one by one\n{caption}"
    table = Table(
        # As a Text: a file's name is no markup.
        title=Text(f"{Path(report.model).name} on {report.device}, {report.dtype}", "italic"),
        caption=caption,
        box=SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("run", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in report.figures:
        cells = (
            (run.prefill_tokens_per_s, ".1f", 1.0),
            (run.decode_tokens_per_s, ".1f", 1.0),
            (run.step_ms_median, ".2f", 1.0),
            (run.step_ms_p99, ".2f", 1.0),
            (run.bytes_per_step, ".1f", 1e-6),
            (run.gb_per_s, ".1f", 1.0),
            (run.bandwidth_fraction, ".0%", 1.0),
        )
        table.add_row(
            run.name,
            *("-" if value is None else format(value * unit, form) for value, form, unit in cells),
        )
    return table


def machine_facts(device: torch.device) -> dict[str, str]:
    """Names and versions that a figure depends on, the commit and the date."""
    environment = collect_environment()
    facts = {
        "cpu": environment.cpu,
        "simd": torch.backends.cpu.get_cpu_capability(),
        "python": environment.python,
        "platform": platform.platform(),
        **environment.versions,
        "commit": environment.commit,
        "date": environment.date,
    }
    for package in ("fusedops", "transformers", "tokenizers", "gguf", "safetensors"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    if device.type == "cuda":
        facts |= {"gpu": environment.gpu, "driver": environment.driver}
    return facts


def write_json(report: DemoReport, path: Path) -> None:
    """Write the report, whole or not at all; of the model's path only the name.

    Raises:
        ConfigError: the file cannot be written.
    """
    # Where the model lay says nothing on another machine.
    data = {**asdict(report), "model": Path(report.model).resolve().name}
    write_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
