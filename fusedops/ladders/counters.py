"""Hardware counters of kernels, out of the table that Nsight Compute (``ncu``) prints.

In front of each step stands a marker kernel, by which the rows of the table are told apart; of the
kernels of a step the longest counts. Metric names: Nsight Compute, "Metrics Reference" and "Memory
Tables".
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fusedops.errors import LoadError

__all__ = ["METRICS", "Counters", "by_marker", "parse_raw_csv"]

MARKER = "fusedops::scale"
"""Part of the name of the kernel that the child launches in front of each step."""

METRICS: dict[str, tuple[str, ...]] = {
    "duration_ns": ("gpu__time_duration.sum",),
    "sectors": ("memory_l2_theoretical_sectors_global",),
    "ideal_sectors": ("memory_l2_theoretical_sectors_global_ideal",),
    "shared_loads": ("smsp__inst_executed_op_shared_ld.sum",),
    "shared_load_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",),
    "shared_store_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",),
    "bank_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
    "active_threads": ("smsp__thread_inst_executed_per_inst_executed.ratio",),
    "load_units_pct": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",),
    "issue_slots_pct": ("sm__inst_issued.avg.pct_of_peak_sustained_active",),
    "fma_pipe_pct": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",),
    "tensor_pipe_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    "global_atomics": ("smsp__inst_executed_op_global_red.sum",),
    "shared_atomics": ("smsp__inst_executed_op_shared_atom.sum",),
    "dram_bytes": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
}
"""Field of ``Counters`` -> the metrics whose sum it is."""


@dataclass(frozen=True)
class Counters:
    """Counters of one kernel; None where ncu gave no number.

    Attributes:
        kernel: its name.
        duration_ns: its time under the profiler, which is no measurement.
        sectors, ideal_sectors: 32-byte sectors of global memory asked for, and the least for as
            many accesses.
        shared_loads: warp instructions that read shared memory.
        shared_load_wavefronts, shared_store_wavefronts: turns that shared memory took.
        bank_conflicts: turns of those that conflicts added.
        active_threads: threads of 32 that an average instruction ran for.
        load_units_pct: turns of L1 and shared memory, of the most that they take.
        issue_slots_pct: cycles in which a scheduler issued an instruction.
        fma_pipe_pct: multiply-adds of the CUDA cores, of the most that they issue.
        tensor_pipe_pct: cycles with a busy tensor pipe.
        occupancy_pct: warps on a multiprocessor, of the most it holds.
        registers: a thread.
        global_atomics, shared_atomics: warp instructions.
        dram_bytes: read and written.
    """

    kernel: str
    duration_ns: float | None = None
    sectors: float | None = None
    ideal_sectors: float | None = None
    shared_loads: float | None = None
    shared_load_wavefronts: float | None = None
    shared_store_wavefronts: float | None = None
    bank_conflicts: float | None = None
    active_threads: float | None = None
    load_units_pct: float | None = None
    issue_slots_pct: float | None = None
    fma_pipe_pct: float | None = None
    tensor_pipe_pct: float | None = None
    occupancy_pct: float | None = None
    registers: float | None = None
    global_atomics: float | None = None
    shared_atomics: float | None = None
    dram_bytes: float | None = None

    @property
    def excess_sectors(self) -> float | None:
        """Sectors that better addresses would not need."""
        if self.sectors is None or self.ideal_sectors is None:
            return None
        return max(self.sectors - self.ideal_sectors, 0.0)

    @property
    def excess_share(self) -> float | None:
        """``excess_sectors`` of all sectors."""
        excess = self.excess_sectors
        return None if excess is None else excess / self.sectors if self.sectors else 0.0

    @property
    def conflict_share(self) -> float | None:
        """``bank_conflicts`` of all turns of shared memory."""
        turns = (self.shared_load_wavefronts, self.shared_store_wavefronts)
        known = [turn for turn in turns if turn is not None]
        if self.bank_conflicts is None or not known:
            return None
        return self.bank_conflicts / sum(known) if sum(known) else 0.0

    @property
    def load_ways(self) -> float | None:
        """Turns that an average load from shared memory took: n of an "n-way conflict"."""
        if not self.shared_loads or self.shared_load_wavefronts is None:
            return None
        return self.shared_load_wavefronts / self.shared_loads

    @property
    def inactive_threads(self) -> float | None:
        """Threads of 32 that an average instruction did nothing for."""
        return None if self.active_threads is None else 32.0 - self.active_threads

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields that are known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Counters:
        """The inverse of ``to_json``.

        Raises:
            LoadError: the object has other fields.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise LoadError(f"no counters: {error}.") from error


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _counters(row: dict[str, str]) -> Counters:
    values: dict[str, float | None] = {}
    for field, metrics in METRICS.items():
        numbers = [_number(row.get(metric)) for metric in metrics]
        known = [number for number in numbers if number is not None]
        values[field] = sum(known) if len(known) == len(numbers) else None
    return Counters(row["Kernel Name"], **values)


def parse_raw_csv(text: str) -> list[Counters]:
    """The kernels of ncu's raw table in the order in which they ran; empty without a table.

    ncu's own lines (``==PROF==``) come first, then the names of the columns, then their units.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    # The row of units has no number in the first column.
    return [_counters(row) for row in rows if row["ID"]]


def by_marker(kernels: Iterable[Counters]) -> list[Counters | None]:
    """The longest kernel behind each marker; None where a marker is followed by another."""
    groups: list[list[Counters]] = []
    for kernel in kernels:
        if MARKER in kernel.kernel:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return [max(group, key=lambda each: each.duration_ns or 0.0, default=None) for group in groups]
