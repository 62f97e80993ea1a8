"""Host overhead: what a call costs on the CPU beside the work, in microseconds.

The products are so small (N=192, K=96) that the call around them is most of the time; ``torch.mm``
on the same data says how much of it torch itself takes. All calls of a dtype and M alternate round
by round, each checked before it is timed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedops.bench.environment import collect_environment
from fusedops.bench.files import write_json
from fusedops.bench.measurement import Measurement, Outcome, outcome_to_json
from fusedops.bench.oracles import relative_error
from fusedops.bench.runner import CpuRunner
from fusedops.bench.timer import Program, Protocol, time_programs
from fusedops.gemm import gemm, spec_text
from fusedops.nn.linear import FusedLinear
from fusedops.ops.attention import paged_attention
from fusedops.ops.norm import rms_norm

__all__ = ["LIMIT_US", "SCHEMA", "HostRow", "measure_host", "target_of", "write_host"]

SCHEMA = 1
N, K = 192, 96
ROWS = (1, 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TARGET_CALL = "torch.ops.fusedops.gemm"
LIMIT_US = 12.0
"""The target: median of a plain ``torch.ops.fusedops.gemm``, M=1, float32."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_EPS = 1e-6
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 32
_PAGE_SIZE, _KV_LENGTH = 16, 16

Call = tuple[Callable[[], Any], Tensor]
"""A call and the float64 result that it must give."""


@dataclass(frozen=True)
class HostRow:
    """One call at one size.

    Attributes:
        call: what is called.
        m: rows of x (requests times queries).
        dtype: of data and weights.
        outcome: microseconds a call, or why there is no time.
    """

    call: str
    m: int
    dtype: str
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """A JSON object; ``min_us`` is the fastest round's."""
        row = {"call": self.call, "m": self.m, "dtype": self.dtype, **outcome_to_json(self.outcome)}
        if isinstance(self.outcome, Measurement):
            row["min_us"] = round(min(self.outcome.samples), 4)
        return row


def _gemm_calls(m: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Call]:
    """The product of x (m, K) and w (N, K)^T by every way to call it, and the norm of x."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, w, bias, gain = draw(m, K), draw(N, K), draw(N), draw(K)
    product = x.double() @ w.double().T
    biased = product + bias.double()
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + _EPS)
    plain_spec, bias_spec = (spec_text((N, K), e, dtype, None, None)[0] for e in (None, "bias"))
    op = torch.ops.fusedops.gemm.default
    partial = functools.partial
    return {
        "torch.mm": (partial(torch.mm, x, w.T), product),
        TARGET_CALL: (partial(op, x, w, [], plain_spec), product),
        f"{TARGET_CALL}, bias": (partial(op, x, w, [bias], bias_spec), biased),
        "fusedops.gemm": (partial(gemm, x, w), product),
        "fusedops.gemm, bias": (partial(gemm, x, w, "bias", {"bias": bias}), biased),
        "FusedLinear, bias": (partial(FusedLinear.from_weights(w, bias), x), biased),
        "fusedops.rms_norm": (partial(rms_norm, x, gain, _EPS), normed * gain.double()),
    }


def _attention_call(dtype: torch.dtype, generator: torch.Generator) -> Call:
    """One request's decode step over one page, whose slots are all in use."""
    q = torch.randn(1, _HEADS, _HEAD_DIM, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    group = _HEADS // _KV_HEADS
    keys, values = (t[0].double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("hd,phd->hp", q[0].double(), keys) / math.sqrt(_HEAD_DIM)
    expected = torch.einsum("hp,phd->hd", scores.softmax(-1), values)[None]
    table = torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.tensor([_KV_LENGTH], dtype=torch.int32)
    return functools.partial(paged_attention, q, k, v, table, lengths), expected


def _program(name: str, call: Call, tolerance: float, calls: int) -> Program:
    run, expected = call

    def enqueue(count: int) -> None:
        for _ in range(count):
            run()

    def check() -> str | None:
        returned = run()
        result = returned if isinstance(returned, Tensor) else returned[0]
        error = relative_error(result, expected)
        # A NaN fails, too.
        return None if error <= tolerance else f"relative error {error:.1e} over {tolerance:.0e}"

    return Program(name, enqueue, check, launches=calls)


@torch.inference_mode()
def measure_host(rounds: int, calls: int) -> list[HostRow]:
    """Time every call on the CPU.

    Args:
        rounds: samples of each call, >= 1.
        calls: calls in each sample, >= 1.

    Raises:
        ConfigError: a number is not accepted.
    """
    protocol = Protocol(samples=rounds, min_samples=rounds, max_launches=calls)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for m in ROWS:
            named = _gemm_calls(m, dtype, generator)
            if m == 1:
                named["fusedops.paged_attention"] = _attention_call(dtype, generator)
            programs = [
                _program(name, call, _TOLERANCE[dtype], calls) for name, call in named.items()
            ]
            outcomes = time_programs(programs, CpuRunner(), protocol=protocol, hot=True)
            rows += [HostRow(name, m, dtype_name, outcome) for name, outcome in outcomes.items()]
    return rows


def target_of(rows: list[HostRow]) -> dict[str, Any]:
    """The target and whether it is met, as a JSON object."""
    (row,) = (r for r in rows if (r.call, r.m, r.dtype) == (TARGET_CALL, 1, "float32"))
    median_us = row.outcome.median_us if isinstance(row.outcome, Measurement) else None
    return {
        "call": row.call,
        "m": row.m,
        "dtype": row.dtype,
        "limit_us": LIMIT_US,
        "median_us": None if median_us is None else round(median_us, 4),
        "ok": median_us is not None and median_us < LIMIT_US,
    }


def write_host(path: Path, rows: list[HostRow], target: Mapping[str, Any]) -> None:
    """Write the report: machine, sizes, rows and target."""
    report = {
        "schema": SCHEMA,
        "environment": collect_environment().to_json(),
        "threads": torch.get_num_threads(),
        "n": N,
        "k": K,
        "rows": [row.to_json() for row in rows],
        "target": dict(target),
    }
    write_json(path, report)
