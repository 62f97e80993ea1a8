"""A table of quantized products: ``python -m fusedops.bench.quant_table [--list]``.

M from 1 to 4096 under every scheme, each beside its floor, its peers and bfloat16. Up to M = 128 a
row is a dependent chain of all schemes, beyond it a row a scheme on rotated buffers. Rows are kept
in ``reports/<gpu>/quant.json`` as they come; a run goes on where the one before it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedops.bench.environment import (
    Environment,
    collect_environment,
    gpu_slug,
    repository_root,
    set_peer_variables,
    source_hash,
)
from fusedops.bench.files import read_json, update_json
from fusedops.bench.goal_run import RowStore
from fusedops.bench.goals.quant_layers import (
    PRODUCTS,
    TABLE_CHAIN_M,
    TABLE_LARGE,
    TABLE_M,
    chain_layers,
)
from fusedops.bench.goals.quant_notes import annotated
from fusedops.bench.imports import imported_files
from fusedops.bench.measurement import Measurement, Outcome, outcome_from_json
from fusedops.bench.quant_products import QuantLayer
from fusedops.bench.quant_rows import MINE, Rotation, chain_outcomes, mine, rotated_outcomes
from fusedops.bench.roofline import PUBLISHED_CEILINGS
from fusedops.bench.timer import Protocol
from fusedops.errors import ConfigError, DeviceError, FusedOpsError
from fusedops.providers.base import use_provider
from fusedops.quant import SCHEMES

__all__ = ["TableRow", "main", "markdown", "measure_table", "table_rows"]

_REFERENCE_GPU = "NVIDIA H200"


@dataclass(frozen=True)
class TableRow:
    """Layers that are measured together: one product under several schemes."""

    key: str
    layers: tuple[QuantLayer, ...]

    def outcomes(self, device: torch.device | str, protocol: Protocol) -> dict[str, Outcome]:
        """The measured row; ours are named by their scheme."""
        if self.layers[0].layer.M <= TABLE_CHAIN_M:
            return annotated(self.layers, chain_outcomes(self.layers, device, protocol), device)
        (made,) = self.layers
        rotation = Rotation(made)
        peers = rotation.peers() | {peer.name: peer for peer in rotation.bf16_peers()[:1]}
        found = annotated([made], rotated_outcomes(rotation, peers, device, protocol), device)
        return {mine(made) if name == MINE else name: row for name, row in found.items()}


def table_rows() -> Iterator[TableRow]:
    """Every row, M by M."""
    for m in TABLE_M:
        if m <= TABLE_CHAIN_M:
            for product in PRODUCTS:
                yield TableRow(f"{product} m{m}", tuple(chain_layers(product, m, SCHEMES)))
            continue
        for product in TABLE_LARGE:
            for made in chain_layers(product, m, SCHEMES):
                yield TableRow(f"{product} m{m} {made.scheme.name}", (made,))


def _sources() -> str:
    """Hash of what the figures depend on."""
    root = repository_root()
    if root is None:
        raise ConfigError("quant_table: fusedops runs from a wheel; run from a checkout.")
    files = imported_files([__name__ if __name__ != "__main__" else _NAME, _PROVIDER], root)
    return source_hash([*(path.as_posix() for path in files), "cutlass_configs"])


_NAME = "fusedops.bench.quant_table"
_PROVIDER = "fusedops.providers.cutlass"


def measure_table(
    path: Path,
    environment: Environment,
    *,
    device: torch.device | str,
    protocol: Protocol,
    provider: str = "cutlass",
    rows: Sequence[TableRow] | None = None,
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure rows that are not recorded for today's sources; returns how many are left.

    Args:
        path: the report.
        environment: written into it.
        device: where to measure.
        protocol: lengths and caps.
        provider: of our products, pinned.
        rows: by default all.
        deadline: value of ``clock`` after which no row is begun.
        clock: seconds.
    """
    known: dict[str, Any] = read_json(path).get("rows", {})
    facts = {
        "gpu": environment.gpu,
        "driver": environment.driver,
        "versions": environment.versions,
        "commit": environment.commit,
        "date": environment.date,
    }

    def save() -> None:
        update_json(path, lambda data: data.update({"environment": facts, "rows": known}))

    store = RowStore(known, _sources(), save)
    left = 0
    for row in rows if rows is not None else table_rows():
        if store.get(row.key) is not None:
            continue
        if deadline is not None and clock() >= deadline:
            left += 1
            continue
        with use_provider(provider, strict=True) as usage:
            outcomes = row.outcomes(device, protocol)
        store.put(row.key, outcomes, usage.count("gemm", provider))
    return left


def _cell(row: Outcome | None) -> str:
    if row is None:
        return "-"
    return f"{row.median_us:.1f}" if isinstance(row, Measurement) else "failed"


def markdown(stored: Mapping[str, Any], gpu: str) -> str:
    """A Markdown table of a report's rows: microseconds, and the share of the floor reached."""
    limits = PUBLISHED_CEILINGS.get(gpu)
    lines = [
        "| product | M | scheme | us | floor | of it | peers, us |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table_rows():
        if row.key not in stored:
            continue
        found = {
            name: outcome_from_json(data) for name, data in stored[row.key]["outcomes"].items()
        }
        peers = [
            f"{name} {_cell(outcome)}"
            for name, outcome in found.items()
            if not name.startswith(MINE) and isinstance(outcome, Measurement)
        ]
        for made in row.layers:
            ours = found.get(mine(made))
            bound = made.floor(limits) if limits is not None else None
            share = "-"
            if bound is not None and isinstance(ours, Measurement):
                share = f"{bound.fraction(ours.median_us):.0%}"
            cells = [
                row.key.split(" ")[0],
                str(made.layer.M),
                made.scheme.name,
                _cell(ours),
                "-" if bound is None else f"{bound.us:.1f}",
                share,
                ", ".join(peers) or "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; exit status 0, 1 rows are left, 2 bad input."""
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description="Quantized products.")
    parser.add_argument("--list", action="store_true", help="print the record, measure nothing")
    parser.add_argument("--cap-s", type=float, default=0.4, metavar="S", help="cap of a row")
    parser.add_argument("--budget-s", type=float, metavar="S", help="begin no row after S seconds")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="default: reports/<gpu>")
    options = parser.parse_args(arguments)
    set_peer_variables()
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if has_gpu else _REFERENCE_GPU
    folder = options.reports or (repository_root() or Path.cwd()) / "reports" / gpu_slug(gpu)
    path = folder / "quant.json"
    try:
        if options.list:
            print(markdown(read_json(path).get("rows", {}), gpu))
            return 0
        if not has_gpu:
            raise DeviceError("quant_table: torch sees no CUDA device; --list needs none.")
        deadline = None if options.budget_s is None else time.monotonic() + options.budget_s
        left = measure_table(
            path,
            collect_environment(),
            device="cuda",
            protocol=Protocol(samples=15, cap_s=options.cap_s, settle_max_s=0.2),
            deadline=deadline,
        )
    except FusedOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"left": left, "report": str(path)}))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
