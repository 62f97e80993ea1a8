"""Measuring: the timing protocol, floors, peers, reports, goals and records of GPU test runs.

``measure`` times contenders on rotated buffers, ``measure_chain`` in a chain of dependent launches.
"""

from __future__ import annotations

from fusedops.bench.chain import ChainContender, ChainSpec, DependentChain, gain_for, measure_chain
from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Absent, Failed, Measurement, Outcome, Ratio, speedup
from fusedops.bench.timer import Program, Protocol, time_programs

__all__ = [
    "Absent",
    "Buffers",
    "ChainContender",
    "ChainSpec",
    "Contender",
    "DependentChain",
    "Failed",
    "Measurement",
    "Outcome",
    "Program",
    "Protocol",
    "Ratio",
    "gain_for",
    "measure",
    "measure_chain",
    "speedup",
    "time_programs",
]
