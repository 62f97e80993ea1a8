"""The best of the first algorithms that cuBLASLt proposes, ranked once a problem and remembered.

Ranking uses the project's own protocol (graph replay, weights rotated past the L2, results
checked), so an algorithm that gives a wrong result cannot be the baseline. Choices are kept in the
process and in a JSON file, keyed by GPU, library version and everything the list depends on.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender, measure
from fusedops.bench.cublaslt import Algorithm, LtMatmul
from fusedops.bench.cublaslt_abi import library_version
from fusedops.bench.data import Buffers
from fusedops.bench.files import read_json, update_json
from fusedops.bench.measurement import Measurement, Outcome
from fusedops.bench.oracles import relative_error
from fusedops.bench.timer import Protocol
from fusedops.errors import LoadError, UnsupportedError

__all__ = ["CANDIDATES", "Ranked", "best_algorithm", "cache_path", "reference_product"]

CANDIDATES = 8
"""Entries of the heuristics list that are tried."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_PROTOCOL = Protocol(samples=11, cap_s=1.5)


@dataclass(frozen=True)
class Ranked:
    """The winner of a ranking.

    Attributes:
        algorithm: what to launch.
        median_us: its time, weights rotated past the L2.
        first_us: the time of the list's first entry, which is what a caller of the library gets.
        candidates: how many entries ran and gave right results.
    """

    algorithm: Algorithm
    median_us: float
    first_us: float
    candidates: int


def cache_path() -> Path | None:
    """The JSON file that keeps rankings, or None where there is no home folder.

    ``FUSEDOPS_BENCH_CACHE`` names the folder; by default it is ``fusedops/bench`` below
    ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    folder = os.environ.get("FUSEDOPS_BENCH_CACHE")
    if folder:
        return Path(folder) / "cublaslt.json"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "fusedops" / "bench" / "cublaslt.json"


def read_cache(path: Path | None) -> dict[str, Any]:
    """The stored rankings; an unreadable file counts as empty, because it can be measured again."""
    with contextlib.suppress(LoadError):
        return read_json(path) if path is not None else {}
    return {}


def write_cache(path: Path | None, entries: Mapping[str, Any]) -> None:
    """Add ``entries`` to the file; where it cannot be written, the ranking stays in the process."""
    if path is not None:
        with contextlib.suppress(OSError, LoadError):
            update_json(path, lambda data: data.update(entries))


def ranked_to_json(ranked: Ranked) -> dict[str, Any]:
    """A JSON object that ``ranked_from_json`` reads back."""
    return {
        "rank": ranked.algorithm.rank,
        "blob": ranked.algorithm.blob.hex(),
        "workspace_bytes": ranked.algorithm.workspace_bytes,
        "median_us": ranked.median_us,
        "first_us": ranked.first_us,
        "candidates": ranked.candidates,
    }


def ranked_from_json(data: Any) -> Ranked | None:
    """The inverse of ``ranked_to_json``; None for anything that is not a whole entry."""
    try:
        blob = bytes.fromhex(data["blob"])
        algorithm = Algorithm(int(data["rank"]), blob, int(data["workspace_bytes"]))
        ranked = Ranked(
            algorithm, float(data["median_us"]), float(data["first_us"]), int(data["candidates"])
        )
    except (KeyError, TypeError, ValueError):
        return None
    return ranked if len(blob) == 64 else None


def reference_product(
    x: Tensor, w: Tensor, bias: Tensor | None, addend: Tensor | None, epilogue: str
) -> Tensor:
    """``activation(x @ w.T + addend + bias)`` in float32, in cuBLASLt's order."""
    result = x.float() @ w.float().T
    if addend is not None:
        result += addend.float()
    if bias is not None:
        result += bias.float()
    for name, activation in _ACTIVATIONS.items():
        if name in epilogue:
            result = activation(result)
    return result


def _pick(outcomes: Mapping[str, Outcome], algorithms: list[Algorithm], what: str) -> Ranked:
    """The fastest of the candidates that ran right."""
    timed = [
        (outcome.median_us, algorithm)
        for algorithm, outcome in zip(algorithms, outcomes.values(), strict=True)
        if isinstance(outcome, Measurement)
    ]
    if not timed:
        reasons = "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
        raise UnsupportedError(f"cuBLASLt: no algorithm ran right for {what}: {reasons}")
    median_us, best = min(timed, key=lambda pair: pair[0])
    # Where the list's first entry failed, the first that ran stands for it.
    return Ranked(best, median_us, timed[0][0], len(timed))


def _rank(plan: LtMatmul, device: torch.device) -> Ranked:
    dtype, out_dtype = (getattr(torch, name) for name in plan.dtypes)
    w_pitch, x_pitch, addend_pitch, out_pitch = plan.pitches

    def make_buffers(generator: torch.Generator) -> Buffers:
        def normal(rows: int, pitch: int, columns: int, kind: torch.dtype) -> Tensor:
            drawn = torch.empty(rows, pitch, dtype=kind, device=device)
            return drawn.normal_(generator=generator)[:, :columns]

        inputs = [
            normal(plan.m, x_pitch, plan.k, dtype),
            normal(plan.n, w_pitch, plan.k, dtype).mul_(plan.k**-0.5),
        ]
        if plan.has_bias:
            inputs.append(normal(1, plan.n, plan.n, out_dtype)[0])
        if plan.has_addend:
            inputs.append(normal(plan.m, addend_pitch, plan.n, out_dtype))
        out = torch.empty(plan.m, out_pitch, dtype=out_dtype, device=device)[:, : plan.n]
        return Buffers(tuple(inputs), (out,))

    def operands(buffers: Buffers) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        x, w, *rest = buffers.inputs
        bias = rest.pop(0) if plan.has_bias else None
        return x, w, bias, rest.pop(0) if plan.has_addend else None

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        x, w, bias, addend = operands(buffers)
        expected = reference_product(x, w, bias, addend, plan.epilogue)
        error = relative_error(results[0], expected)
        # A split along K may round its partial sums to the output's dtype; a unit covers that.
        allowed = max(torch.finfo(out_dtype).eps, 1e-4)
        return None if error <= allowed else f"relative error {error:.3g}, allowed {allowed:.3g}"

    def launcher(algorithm: Algorithm) -> Contender:
        def run(buffers: Buffers) -> None:
            x, w, bias, addend = operands(buffers)
            plan.run(algorithm, x, w, buffers.outputs[0], bias, addend)

        return Contender(f"rank {algorithm.rank}", run, check)

    sample = operands(make_buffers(torch.Generator(device=device).manual_seed(0)))
    algorithms = plan.algorithms(CANDIDATES, bias=sample[2])
    if not algorithms:
        raise UnsupportedError(f"cuBLASLt: its heuristics list is empty for {plan.key}")
    outcomes = measure(
        [launcher(algorithm) for algorithm in algorithms],
        make_buffers,
        device=device,
        protocol=_PROTOCOL,
    )
    return _pick(outcomes, algorithms, plan.key)


_known: dict[str, Ranked] = {}


def best_algorithm(plan: LtMatmul, device: torch.device) -> Ranked:
    """The fastest right algorithm among the first ``CANDIDATES`` of the heuristics list.

    The first call for a problem measures (about two seconds, 0.5 GB of GPU memory), so it must not
    happen inside a capture.

    Raises:
        UnsupportedError: the list is empty, or no entry ran right.
    """
    key = f"{torch.cuda.get_device_name(device)} | cublasLt {library_version()} | {plan.key}"
    if key in _known:
        return _known[key]
    path = cache_path()
    stored = ranked_from_json(read_cache(path).get(key))
    if stored is None:
        stored = _rank(plan, device)
        write_cache(path, {key: ranked_to_json(stored)})
    _known[key] = stored
    return stored
