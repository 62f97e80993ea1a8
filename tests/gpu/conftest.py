"""Shards and records GPU tests, and lists those that are stale.

Options (given as ``pytest tests/gpu --shard 1/4 --record reports/h200/tests.json``):

--shard i/n       run the i-th of n parts; parts add up in the record
--record FILE     add outcomes to FILE
--only-stale      leave out tests that --record already has as passed for today's sources
--stale FILE      run nothing; list the tests that FILE does not have as passed, exit 1 if any
                  (give -m "gpu or gpu_large" too; works without a GPU)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from fusedops.bench.pytest_recorder import Recorder
from fusedops.bench.records import Shard
from fusedops.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def shard(text: str) -> Shard:
    try:
        return Shard.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "GPU tests")
    group.addoption("--shard", type=shard, metavar="I/N", help="run part I of N")
    group.addoption("--record", type=Path, metavar="FILE", help="add outcomes to FILE")
    group.addoption("--only-stale", action="store_true", help="run what --record does not have")
    group.addoption("--stale", type=Path, metavar="FILE", help="list what FILE does not have")


def pytest_configure(config: pytest.Config) -> None:
    def option(name: str) -> object:
        # The options are unknown where this folder was not named on the command line.
        return config.getoption(name, default=None)

    record, against = option("record"), option("stale")
    if option("only_stale") and record is None:
        raise pytest.UsageError("--only-stale needs --record FILE, which it is judged by")
    has_gpu = torch.cuda.is_available()
    if record is not None and not has_gpu:
        raise pytest.UsageError("--record needs a GPU: a skipped test is no record")
    recorder = Recorder(
        ROOT,
        record=record,
        gpu=torch.cuda.get_device_name() if has_gpu else "none",
        shard=option("shard"),
        only_stale=bool(option("only_stale")),
        list_stale=against is not None,
        stale_against=against or record,
    )
    config.pluginmanager.register(recorder, "fusedops-gpu-recorder")
