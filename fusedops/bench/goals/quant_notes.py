"""What rows of quantized products share: kernels compiled ahead, and notes beside their times."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from fusedops.bench.goals.quant_layers import QUANT_ROWS, TABLE
from fusedops.bench.measurement import Measurement, Outcome
from fusedops.bench.precompile import Target, precompile
from fusedops.bench.quant_products import QuantLayer
from fusedops.bench.quant_rows import MINE, mine
from fusedops.bench.roofline import row_ceilings
from fusedops.errors import ConfigError
from fusedops.providers.cutlass import choose_candidate

__all__ = ["annotated", "compile_ahead"]


def compile_ahead(device: torch.device | str) -> None:
    """Compile what all goals of quantized products need, in parallel, before the first row.

    Kernels that the store has are not compiled again. One that cannot be compiled is no error
    here; its row fails with the reason.
    """
    if torch.device(device).type == "cuda":
        _compile_once(Target.of(device))


@functools.cache
def _compile_once(target: Target) -> None:
    rows = [row for name, make in QUANT_ROWS.items() if name != TABLE for row in make()]
    precompile([row.made.problem(target) for row in rows], target.arch)


def _plan(made: QuantLayer, device: torch.device | str) -> str:
    if torch.device(device).type != "cuda":
        return "none on this device"
    try:
        return choose_candidate(made.problem(Target.of(device))).describe()
    except ConfigError as error:
        return str(error)


def annotated(
    layers: Sequence[QuantLayer], outcomes: dict[str, Outcome], device: torch.device | str
) -> dict[str, Outcome]:
    """The outcomes, with floor and plan in the notes of our rows."""
    limits, found = row_ceilings(device), dict(outcomes)
    for made in layers:
        for name in (mine(made), MINE):
            row = outcomes.get(name)
            if isinstance(row, Measurement):
                bound = made.floor(limits)
                notes = (
                    f"floor {bound.us:.2f} us, {bound.fraction(row.median_us):.1%} of it reached",
                    f"plan {_plan(made, device)}",
                )
                found[name] = replace(row, notes=(*row.notes, *notes))
    return found
