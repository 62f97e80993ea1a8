"""``fusedops::gemm``: check, choose a provider, run; and ``explain`` for what would run.

``fusedops::gemm(Tensor x, Tensor w, Tensor?[] operands, str spec) -> Tensor[]`` serves every
fusion; ``fusedops::gemm_out`` writes into given tensors. The function ``gemm`` builds the spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops.epilogue.chain import Epilogue
from fusedops.errors import ConfigError, DeviceError, LayoutError, ShapeError
from fusedops.jit.launch import device_arch
from fusedops.ops.op import LIBRARY, ignore_autocast, refuse_grad
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import NO_PROLOGUE, Prologue
from fusedops.providers.base import Policy, Support, choose, current_policy
from fusedops.providers.front import answer, description, run_of
from fusedops.providers.gemm import GemmRun
from fusedops.weight import Dense, WeightFormat

__all__ = ["Explanation", "clear_plans", "explain", "explain_problem", "gemm", "spec_text"]

_PLAN_LIMIT = 4096
_plans: dict[tuple[Any, ...], tuple[str, GemmRun]] = {}


def clear_plans() -> None:
    """Forget every cached plan: needed after registering a provider or defining a node anew."""
    _plans.clear()


def _aligned_bytes(tensors: Sequence[Tensor]) -> int:
    """Largest power of two up to 16 that divides every address and row pitch in bytes."""
    bits = 16
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            bits |= stride * tensor.itemsize
    return bits & -bits


@cache
def _device_facts(device: torch.device) -> dict[str, Any]:
    """What a problem says of its device; the device must exist."""
    if device.type != "cuda":
        return {"device_type": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device_type": "cuda",
        "sm_count": properties.multi_processor_count,
        "arch": device_arch(device.index or 0),
        "gpu": properties.name,
    }


def _problem(
    spec: GemmSpec, x: Tensor, w: Tensor, operands: Sequence[Tensor | None]
) -> GemmProblem:
    return GemmProblem(
        spec,
        prod(x.shape[:-1]),
        x.dtype,
        tuple(None if t is None else t.dtype for t in operands),
        aligned_bytes=_aligned_bytes((x, w)),
        **_device_facts(x.device),
    )


def _key(
    spec: str,
    policy: Policy,
    x: Tensor,
    w: Tensor,
    operands: Sequence[Tensor | None],
    out: Sequence[Tensor] | None,
) -> tuple[Any, ...]:
    """Everything that checks, selection and plan depend on, as cheap attribute reads."""
    key: tuple[Any, ...] = (
        spec,
        policy.pinned,
        policy.strict,
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        w.shape,
        w.stride(),
        w.dtype,
        w.device,
        (x.data_ptr() | w.data_ptr()) & 15,
    )
    for tensor in operands:
        if tensor is None:
            key += (None,)
        else:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if out is not None:
        for tensor in out:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            key += (tensor.data_ptr() & 15,)
    return key


def _plan(
    spec: str,
    policy: Policy,
    x: Tensor,
    w: Tensor,
    operands: Sequence[Tensor | None],
    out: Sequence[Tensor] | None,
) -> tuple[str, GemmRun]:
    parsed = GemmSpec.parse(spec)
    parsed.check(x, w, operands)
    if out is not None:
        parsed.check_out(x, out)
    problem = _problem(parsed, x, w, operands)
    name = choose("gemm", lambda candidate: answer(candidate, problem), policy)
    return name, run_of(name, problem)


def _run(
    x: Tensor,
    w: Tensor,
    operands: Sequence[Tensor | None],
    spec: str,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    if torch.is_grad_enabled():
        refuse_grad("gemm", (x, w, operands))
    policy = current_policy()
    key = _key(spec, policy, x, w, operands, out)
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(spec, policy, x, w, operands, out)
        if len(_plans) >= _PLAN_LIMIT:
            _plans.clear()
        _plans[key] = plan
    name, run = plan
    if policy.usage is not None:
        policy.usage.calls["gemm", name] += 1
    return run(x, w, operands, out)


def _run_out(
    x: Tensor, w: Tensor, operands: Sequence[Tensor | None], spec: str, out: Sequence[Tensor]
) -> None:
    shared = {t.untyped_storage().data_ptr() for t in out if t.numel()}
    for name, tensor in (("x", x), ("w", w)):
        if tensor.numel() and tensor.untyped_storage().data_ptr() in shared:
            raise LayoutError(
                f"gemm_out: out shares memory with {name}, which is read while out is written; "
                "pass a separate tensor (only a residual may be updated in place)."
            )
    _run(x, w, operands, spec, out)


def _fake(x: Tensor, w: Tensor, operands: Sequence[Tensor | None], spec: str) -> list[Tensor]:
    parsed = GemmSpec.parse(spec)
    parsed.check(x, w, operands)
    return parsed.allocate(x)


def _fake_out(
    x: Tensor, w: Tensor, operands: Sequence[Tensor | None], spec: str, out: Sequence[Tensor]
) -> None:
    parsed = GemmSpec.parse(spec)
    parsed.check(x, w, operands)
    parsed.check_out(x, out)


LIBRARY.define("gemm(Tensor x, Tensor w, Tensor?[] operands, str spec) -> Tensor[]")
LIBRARY.impl("gemm", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fusedops::gemm", _fake, lib=LIBRARY)
ignore_autocast("gemm")
LIBRARY.define("gemm_out(Tensor x, Tensor w, Tensor?[] operands, str spec, Tensor(a!)[] out) -> ()")
LIBRARY.impl("gemm_out", _run_out, "CompositeExplicitAutograd")
torch.library.register_fake("fusedops::gemm_out", _fake_out, lib=LIBRARY)
ignore_autocast("gemm_out")


def _as_epilogue(epilogue: Epilogue | str | None) -> Epilogue:
    if epilogue is None:
        return Epilogue()
    return Epilogue.parse(epilogue) if isinstance(epilogue, str) else epilogue


@lru_cache(maxsize=4096)
def _cached_spec(
    weight: WeightFormat | tuple[int, ...],
    epilogue: Epilogue | str | None,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    prologue: Prologue | str | None,
) -> GemmSpec:
    """The spec for a weight format, or for a dense weight of the given shape."""
    if not isinstance(weight, WeightFormat):
        if len(weight) != 2:
            raise ShapeError(
                f"gemm: w has shape {weight}; accepted: (N, K), as nn.Linear stores it."
            )
        weight = Dense(*weight)
    chain = _as_epilogue(epilogue)
    if out_dtype is None:
        wide = x_dtype if x_dtype.is_floating_point and x_dtype.itemsize > 1 else torch.bfloat16
        out_dtype = chain.result_dtype(wide)
    front = Prologue.parse(prologue) if isinstance(prologue, str) else prologue or NO_PROLOGUE
    return GemmSpec(weight, chain, out_dtype, front)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def spec_text(
    weight: WeightFormat | tuple[int, ...],
    epilogue: Epilogue | str | None,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    prologue: Prologue | str | None,
) -> tuple[str, tuple[str, ...]]:
    """The canonical spec and its operands' names; a constant to torch.compile.

    Args:
        weight: the weight's format, or the (N, K) shape of a dense one.
        epilogue: the chain or its text.
        x_dtype: dtype of the activations.
        out_dtype: dtype of the result; None: what the chain forces, else x's (bf16 for 8-bit x).
        prologue: the prologue or its text.
    """
    spec = _cached_spec(weight, epilogue, x_dtype, out_dtype, prologue)
    return spec.text, spec.operand_names


def _ordered(
    text: str,
    names: tuple[str, ...],
    operands: Mapping[str, Tensor | None] | Sequence[Tensor | None] | None,
) -> list[Tensor | None]:
    """The operands in the spec's order."""
    if operands is None:
        operands = {}
    if not isinstance(operands, Mapping):
        return list(operands)
    unknown = [name for name in operands if name not in names]
    if unknown:
        raise ConfigError(
            f"gemm: unknown operand(s) {', '.join(unknown)}; the spec {text} reads "
            f"{', '.join(names) or 'none'}."
        )
    return [operands.get(name) for name in names]


def gemm(
    x: Tensor,
    w: Tensor,
    epilogue: Epilogue | str | None = None,
    operands: Mapping[str, Tensor | None] | Sequence[Tensor | None] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    prologue: Prologue | str | None = None,
    weight: WeightFormat | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
) -> Tensor | list[Tensor]:
    """``epilogue(prologue(x) @ w.T)``, float32 accumulation, one rounding at the end.

    Args:
        x: activations (..., K), K contiguous; float32, bf16, fp16, e4m3 or int8.
        w: weight (N, K) as nn.Linear stores it, in x's dtype; never the result of a kernel just
            before this call: it is read before that one has ended.
        epilogue: a chain or its text, e.g. ``"bias|act(silu)"``; see ``fusedops.epilogue``.
        operands: what the chain reads, by name or in the chain's order.
        out_dtype: dtype of the result; default: what the chain forces, else x's (bf16 for 8-bit x).
        prologue: e.g. ``"rms_norm(1e-05)"``, applied to x first.
        weight: the weight's format; default: dense.
        out: tensor(s) to write instead of new ones; the result may have a row pitch.

    Returns:
        the result (..., N'), or a list with the extra outputs after it when the chain has any.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ConfigError: what was got and is accepted.
        UnsupportedError: no provider serves it, or an input requires grad while grad mode is on.
    """
    text, names = spec_text(weight or tuple(w.shape), epilogue, x.dtype, out_dtype, prologue)
    tensors = _ordered(text, names, operands)
    if out is None:
        results: list[Tensor] = torch.ops.fusedops.gemm.default(x, w, tensors, text)
    else:
        results = [out] if isinstance(out, Tensor) else list(out)
        torch.ops.fusedops.gemm_out.default(x, w, tensors, text, results)
    return results[0] if len(results) == 1 else results


@dataclass(frozen=True)
class Explanation:
    """Who would serve a GEMM, and why not the others.

    Attributes:
        spec: the canonical spec.
        problem: the problem that providers were asked about.
        provider: the one that would run.
        plan: what it would run, one line.
        passed_over: provider -> reason, for those asked before it.
    """

    spec: GemmSpec
    problem: GemmProblem
    provider: str
    plan: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        problem = self.problem
        lines = [
            f"gemm M={problem.m} N={self.spec.n} K={self.spec.k} on {problem.device_type}",
            f"  spec      {self.spec}",
            f"  provider  {self.provider}: {self.plan}",
            f"  bytes     {problem.minimum_bytes:,} at least (x, w and the result once each)",
            f"  flops     {problem.flops:,}",
        ]
        lines += [f"  passed    {name}: {reason}" for name, reason in self.passed_over.items()]
        return "\n".join(lines)


def _explain(problem: GemmProblem) -> Explanation:
    policy = current_policy()
    passed: dict[str, str] = {}

    def ask(candidate: str) -> Support | None:
        said = answer(candidate, problem)
        if said is not None and not said.ok:
            passed[candidate] = said.reason
        return said

    name = choose("gemm", ask, policy)
    plan = description(name, problem)
    return Explanation(problem.spec, problem, name, plan, passed)


def explain(
    x: Tensor,
    w: Tensor,
    epilogue: Epilogue | str | None = None,
    operands: Mapping[str, Tensor | None] | Sequence[Tensor | None] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    prologue: Prologue | str | None = None,
    weight: WeightFormat | None = None,
) -> Explanation:
    """What ``gemm`` with these arguments would run, without running it; raises as it would."""
    spec = _cached_spec(weight or tuple(w.shape), epilogue, x.dtype, out_dtype, prologue)
    tensors = _ordered(spec.text, spec.operand_names, operands)
    spec.check(x, w, tensors)
    return _explain(_problem(spec, x, w, tensors))


def explain_problem(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    epilogue: Epilogue | str | None = None,
    out_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Explanation:
    """``explain`` for shapes instead of tensors; operands are taken to have the dtype they prefer.

    Raises:
        ConfigError, DeviceError: a dimension is negative; CUDA is asked for and absent.
    """
    if min(m, n, k) < 0:
        raise ConfigError(f"explain: M={m}, N={n}, K={k} must not be negative.")
    chain = _as_epilogue(epilogue)
    if out_dtype is None:
        out_dtype = chain.result_dtype(dtype)
    spec = GemmSpec(Dense(n, k), chain, out_dtype)
    operand_dtypes = tuple(
        dtype if dtype in operand.dtypes else operand.dtypes[0] for operand in spec.operands
    )
    kind = torch.device(device)
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("explain: a CUDA device was asked for, but torch sees none; use cpu.")
    problem = GemmProblem(spec, m, dtype, operand_dtypes, **_device_facts(kind))
    return _explain(problem)
