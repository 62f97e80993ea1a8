#!/usr/bin/env python3
"""Measures the project's goals on this machine's GPU and records what it read.

usage: python scripts/goals.py [PATTERN ...]        e.g. 'cuda.*' gemm.o_residual.m16

Each goal has a measuring function in fusedops/bench/goals/. Its result is checked before it is
timed, with the provider pinned in strict mode. What is recorded for today's sources is not measured
again. Results go to reports/<gpu>/goals.json, raw rows to goals_rows.json beside it. Goals that
nothing measures yet print "not built". Without a GPU the recorded figures are shown.

exit status: 0 every selected goal that is built is met; 1 one is missed, failed or was not run;
             2 bad input
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fusedops.bench.environment import (
    collect_environment,
    gpu_slug,
    repository_root,
    set_peer_variables,
)
from fusedops.bench.goal_harness import NOT_BUILT, Harness, select, table
from fusedops.bench.goal_spec import load_goals, sync_goals
from fusedops.bench.goals import load_all
from fusedops.bench.timer import Protocol
from fusedops.errors import FusedOpsError

REFERENCE_GPU = "NVIDIA H200"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="ids, shell style")
    parser.add_argument("--force", action="store_true", help="measure again what is recorded")
    parser.add_argument("--list", action="store_true", help="show the record, measure nothing")
    parser.add_argument(
        "--budget-s",
        type=float,
        metavar="S",
        help="begin no row after S seconds",
    )
    parser.add_argument(
        "--cap-s", type=float, default=2.0, metavar="S", help="cap of a row (default %(default)s)"
    )
    parser.add_argument("--reports", type=Path, metavar="DIR", help="default: reports/<gpu>")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the shown entries there")
    parser.add_argument(
        "--sync",
        type=Path,
        metavar="PATH",
        help="replace the project's goals by PATH's",
    )
    return parser.parse_args(arguments)


def reports_folder(given: Path | None, gpu: str) -> Path:
    """``reports/<gpu>`` of the checkout, unless a folder is given."""
    if given is not None:
        return given
    root = repository_root() or Path.cwd()
    return root / "reports" / gpu_slug(gpu)


def run(options: argparse.Namespace) -> int:
    """Do what the options say; returns the exit status."""
    if options.sync is not None:
        count, changed = sync_goals(options.sync)
        print(f"{count} goals; changed: {', '.join(changed) or 'none'}")
        return 0
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if has_gpu else REFERENCE_GPU
    folder = reports_folder(options.reports, gpu)
    goals = select(load_goals(), options.patterns)
    deadline = None if options.budget_s is None else time.monotonic() + options.budget_s
    harness = Harness(
        folder,
        collect_environment(),
        load_all(),
        protocol=Protocol(cap_s=options.cap_s),
        deadline=deadline,
        force=options.force,
    )
    if options.list or not has_gpu:
        if not has_gpu:
            print(f"no GPU here: what was recorded on {gpu}")
        entries = [(goal, harness.known(goal)) for goal in goals]
        print(table(entries))
        return 0
    entries = []
    for goal in goals:
        if goal.id in harness.registry:
            print(f"{goal.id} ...", file=sys.stderr, flush=True)
        entries.append((goal, harness.run(goal)))
    print(table(entries))
    if options.json is not None:
        shown = [{"goal": dataclasses.asdict(goal), **entry} for goal, entry in entries]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    return 0 if all(entry["status"] in ("ok", NOT_BUILT) for _, entry in entries) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; an error of the project's own is one line and exit status 2."""
    options = parse(arguments)
    set_peer_variables()
    try:
        return run(options)
    except FusedOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
