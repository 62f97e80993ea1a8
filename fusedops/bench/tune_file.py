"""The file of measured choices that ``fusedops tune`` writes and ``choose_candidate`` reads.

It is written in one step after every problem, so a run that is killed leaves a whole file, and the
next run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedops.bench.environment import Environment, source_hash
from fusedops.bench.files import read_json, update_json
from fusedops.bench.measurement import Measurement, Outcome
from fusedops.bench.products import CUBLASLT
from fusedops.bench.tune_problems import CutlassCandidate, TuneProblem
from fusedops.config.files import TUNED_SCHEMA
from fusedops.epilogue.spec import dtype_name
from fusedops.errors import ConfigError

__all__ = ["COVERS", "TORCH", "TuneFile", "choice_row", "sources_hash"]

TORCH = "torch"
"""The peer that runs torch's product, which is cuBLAS's own choice of a kernel."""

COVERS = (
    "fusedops/config/decode.py",
    "fusedops/config/files.py",
    "fusedops/config/mixed.py",
    "fusedops/config/mixed_tiles.py",
    "fusedops/config/prefill.py",
    "fusedops/cutlass",
    "fusedops/epilogue",
    "fusedops/providers/cutlass_decode.py",
    "fusedops/providers/cutlass_mixed.py",
    "fusedops/providers/cutlass_prefill.py",
    "cutlass_configs/sm90.toml",
)
"""Sources that a candidate's time depends on; a change of one makes every row stale."""


def sources_hash() -> str:
    """Hash of today's kernels and configurations.

    Raises:
        ConfigError: fusedops runs from a wheel, whose files cannot be compared with a checkout's.
    """
    return source_hash(COVERS)


def _micro(value_us: float) -> float:
    return round(value_us, 3)


def _peer_us(outcomes: Mapping[str, Outcome], name: str) -> float | None:
    outcome = outcomes.get(name)
    return _micro(outcome.median_us) if isinstance(outcome, Measurement) else None


def choice_row(
    problem: TuneProblem,
    tried: list[CutlassCandidate],
    outcomes: Mapping[str, Outcome],
) -> dict[str, Any]:
    """What is stored about a problem; ``config`` is None where no candidate ran right.

    Args:
        problem: what was measured.
        tried: its candidates, in order of family and predicted time.
        outcomes: of every candidate by name, and of the peers.
    """
    timed: dict[str, Measurement] = {}
    failed: dict[str, str] = {}
    for candidate in tried:
        outcome = outcomes[candidate.name]
        if isinstance(outcome, Measurement):
            timed[candidate.name] = outcome
        else:
            failed[candidate.name] = outcome.reason
    ranked = sorted(timed, key=lambda name: (timed[name].median_us, name))
    model = min(tried, key=lambda candidate: candidate.predicted_us).name
    row: dict[str, Any] = {
        "product": problem.label,
        "epilogue": str(problem.problem.spec.epilogue),
        "m": problem.problem.m,
        "dtype": dtype_name(problem.problem.x_dtype),
        "config": None,
        "cublas_us": _peer_us(outcomes, TORCH),
        "cublaslt_us": _peer_us(outcomes, CUBLASLT),
        "model_choice": {"config": model, "us": _peer_us(outcomes, model)},
        "runner_up": None,
        "candidates": {name: _micro(timed[name].median_us) for name in ranked},
        "failed": failed,
    }
    if ranked:
        best = timed[ranked[0]]
        row |= {
            "config": ranked[0],
            "us": _micro(best.median_us),
            "low_us": _micro(best.low_us),
            "high_us": _micro(best.high_us),
            "notes": list(best.notes),
        }
    if len(ranked) > 1:
        row["runner_up"] = {"config": ranked[1], "us": _micro(timed[ranked[1]].median_us)}
    return row


class TuneFile:
    """Measured choices of one GPU on disk.

    Args:
        path: the file; it need not exist.
        environment: of the measuring; its GPU must be the file's.
        sources: hash of today's sources, see ``sources_hash``.
        start: a file whose rows a new one begins with (the committed one).

    Raises:
        ConfigError: the file is another GPU's or of another layout.
        LoadError: it holds no JSON object.
    """

    def __init__(
        self, path: Path, environment: Environment, sources: str, start: Path | None = None
    ) -> None:
        self.path = path
        self._environment = environment
        self._sources = sources
        source = start if start is not None and not path.exists() else path
        data = read_json(source)
        if data and (data.get("schema"), data.get("gpu")) != (TUNED_SCHEMA, environment.gpu):
            raise ConfigError(
                f"{source}: schema {data.get('schema')!r}, GPU {data.get('gpu')!r}; accepted: "
                f"schema {TUNED_SCHEMA} of {environment.gpu!r}. Choose another --out."
            )
        for field in ("choices", "failures"):
            if not isinstance(data.get(field, {}), dict):
                raise ConfigError(f"{source}: {field!r} is no JSON object. Choose another --out.")
        self._choices: dict[str, Any] = data.get("choices", {})
        self._failures: dict[str, Any] = data.get("failures", {})

    @property
    def choices(self) -> Mapping[str, Any]:
        """Problem key -> row."""
        return self._choices

    @property
    def failures(self) -> Mapping[str, Any]:
        """Problem key -> row of a problem that no candidate solved."""
        return self._failures

    def is_current(self, key: str) -> bool:
        """Whether a choice was measured on today's sources."""
        row = self._choices.get(key)
        return isinstance(row, dict) and row.get("sources") == self._sources

    def put(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep a problem's row and write the file.

        A row without a ``config`` goes to the failures and takes an older choice away: what it
        names gave wrong results today.
        """
        environment = self._environment
        stored = {
            **row,
            "sources": self._sources,
            "commit": environment.commit,
            "date": environment.date,
        }
        chosen = row["config"] is not None
        kept, dropped = ("choices", "failures") if chosen else ("failures", "choices")

        def write(data: dict[str, Any]) -> None:
            # What the file holds wins: another process may have changed it since it was read here.
            self._choices = data.setdefault("choices", self._choices)
            self._failures = data.setdefault("failures", self._failures)
            data[kept][key] = stored
            data[dropped].pop(key, None)
            self._describe(data)

        update_json(self.path, write)

    def _describe(self, data: dict[str, Any]) -> None:
        environment = self._environment
        data |= {
            "schema": TUNED_SCHEMA,
            "gpu": environment.gpu,
            "driver": environment.driver,
            "versions": environment.versions,
            "date": environment.date,
            "commit": environment.commit,
            "sources": self._sources,
        }
