"""``fusedops::gemm``: check, choose a provider, run; and ``explain`` for what would run.

``fusedops::gemm(Tensor x, Tensor w, Tensor?[] operands, str spec) -> Tensor[]`` serves every
fusion; ``fusedops::gemm_out`` writes into given tensors. The function ``gemm`` builds the spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops.check import require_bool, require_integer, require_updatable
from fusedops.epilogue.chain import Epilogue
from fusedops.epilogue.spec import forget_when_redefined
from fusedops.errors import ConfigError, DeviceError
from fusedops.jit.launch import device_arch
from fusedops.ops.gemm_arguments import (
    as_epilogue,
    as_format,
    as_prologue,
    cached_spec,
    form_of,
    ordered,
    require_out_apart,
    require_types,
    require_x_dtype,
    spec_text,
)
from fusedops.ops.op import LIBRARY, ignore_autocast, refuse_grad, refuse_layouts
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import Prologue
from fusedops.providers.base import Policy, Support, choose, current_policy
from fusedops.providers.front import answer, description, run_of
from fusedops.providers.gemm import GemmRun
from fusedops.weight import WeightFormat

__all__ = ["Explanation", "clear_plans", "explain", "explain_problem", "gemm", "spec_text"]

_PLAN_LIMIT = 4096
_plans: dict[tuple[Any, ...], tuple[str, GemmRun]] = {}


def clear_plans() -> None:
    """Forget every cached plan: needed after registering a provider."""
    _plans.clear()


forget_when_redefined(clear_plans)


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
        key += (len(out),)  # an empty list is not None
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
        refuse_grad("gemm", (x, w, operands, out))
    policy = current_policy()
    try:
        key = _key(spec, policy, x, w, operands, out)
    except AttributeError:
        require_types(x, w, (None, None, None, None, False), operands, out)
        raise
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
    for number, result in enumerate(out):
        require_updatable("gemm", f"out[{number}]" if number else "out", result)
    axes = [operand.axis for operand in GemmSpec.parse(spec).operands]
    require_out_apart(x, w, operands, axes, out)
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
refuse_layouts("gemm")
LIBRARY.define("gemm_out(Tensor x, Tensor w, Tensor?[] operands, str spec, Tensor(a!)[] out) -> ()")
LIBRARY.impl("gemm_out", _run_out, "CompositeExplicitAutograd")
torch.library.register_fake("fusedops::gemm_out", _fake_out, lib=LIBRARY)
ignore_autocast("gemm_out")
refuse_layouts("gemm_out")


def gemm(
    x: Tensor,
    w: Tensor,
    epilogue: Epilogue | str | None = None,
    operands: Mapping[str, Tensor | None] | Sequence[Tensor | None] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    prologue: Prologue | str | None = None,
    weight: WeightFormat | str | None = None,
    batch_invariant: bool = False,
    out: Tensor | Sequence[Tensor] | None = None,
) -> Tensor | list[Tensor]:
    """``epilogue(prologue(x) @ w.T)``, float32 accumulation, one rounding at the end.

    Args:
        x: activations (..., K), K contiguous; float32, bf16, fp16, e4m3 or int8.
        w: weight (N, K) as nn.Linear stores it, in x's dtype, or as ``weight`` says. It and a
            prologue's ``norm_weight`` are read before the kernel ahead of this call has ended,
            unless a call of fusedops made them just now (one more launch). A kernel of your own
            that allows dependents to launch early must not write them right before this call.
        epilogue: a chain or its text, e.g. ``"bias|act(silu)"``; see ``fusedops.epilogue``.
        operands: what the chain reads, by name or in the chain's order.
        out_dtype: float32, bf16, fp16, or e4m3 or int8, to which the result saturates; default:
            what the chain forces, else x's (bf16 for 8-bit x).
        prologue: e.g. ``"rms_norm(1e-05)"``, applied to x first.
        weight: the weight's format or its text; default: dense. A quantized one
            (``fusedops.weight``: int4, int8_wo, fp8_wo, block_fp8) reads its scales and zero points
            as operands, before the epilogue's: ``w_scale``, ``w_zero``, ``x_scale``.
        batch_invariant: a row's result is bit for bit the same whatever other rows x has: K is
            never split over CTAs, which narrow products at few rows gain most from.
            Not with a prologue or row statistics.
        out: tensor(s) to write instead of new ones; the result may have a row pitch.

    Returns:
        the result (..., N'), or a list with the extra outputs after it when the chain has any.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError, ConfigError: what was got and is accepted.
        UnsupportedError: no provider serves it; an input or out requires grad while grad mode is
            on; out was made under ``torch.inference_mode()`` and is used outside of it.
    """
    try:
        text, names = spec_text(
            form_of(weight, w), epilogue, x.dtype, out_dtype, prologue, batch_invariant
        )
        tensors = ordered(text, names, operands)
        if out is None:
            results: list[Tensor] = torch.ops.fusedops.gemm.default(x, w, tensors, text)
        else:
            results = [out] if isinstance(out, Tensor) else list(out)
            torch.ops.fusedops.gemm_out.default(x, w, tensors, text, results)
    except (AttributeError, RuntimeError, TypeError):
        options = (weight, epilogue, out_dtype, prologue, batch_invariant)
        require_types(x, w, options, operands, out)
        raise
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
    weight: WeightFormat | str | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """What ``gemm`` with these arguments would run, without running it; raises as it would."""
    require_types(x, w, (weight, epilogue, out_dtype, prologue, batch_invariant), operands)
    spec = cached_spec(form_of(weight, w), epilogue, x.dtype, out_dtype, prologue, batch_invariant)
    tensors = ordered(spec.text, spec.operand_names, operands)
    spec.check(x, w, tensors)
    return _explain(_problem(spec, x, w, tensors))


def _device(name: str) -> torch.device:
    try:
        kind = torch.device(name)
    except (RuntimeError, TypeError):
        kind = torch.device("meta")
    if kind.type not in ("cpu", "cuda"):
        raise DeviceError(f"explain: device={name!r}; accepted are cpu and cuda.")
    return kind


def explain_problem(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    epilogue: Epilogue | str | None = None,
    prologue: Prologue | str | None = None,
    out_dtype: torch.dtype | None = None,
    weight: WeightFormat | str | None = None,
    batch_invariant: bool = False,
    device: str = "cpu",
) -> Explanation:
    """``explain`` for shapes instead of tensors; operands are taken to have the dtype they prefer.

    Raises:
        ConfigError: a dimension is no integer or negative, or an option is not legal, or the
            weight's format is for another N and K.
        DTypeError: activations may not have that dtype.
        DeviceError: there is no such device, or CUDA is asked for and absent.
    """
    for name, size in (("M", m), ("N", n), ("K", k)):
        require_integer("explain", name, size, 0)
    require_x_dtype(dtype)
    require_bool("explain", batch_invariant=batch_invariant)
    chain, ahead = as_epilogue(epilogue), as_prologue(prologue)
    form = (n, k) if weight is None else as_format(weight)
    spec = cached_spec(form, chain, dtype, out_dtype, ahead, batch_invariant)
    if (spec.n, spec.k) != (n, k):
        raise ConfigError(f"explain: weight is {spec.weight}; accepted: one of ({n},{k}).")
    spec.check_prologue(dtype)
    operand_dtypes = tuple(
        dtype if dtype in operand.dtypes else operand.dtypes[0] for operand in spec.operands
    )
    kind = _device(device)
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("explain: a CUDA device was asked for, but torch sees none; use cpu.")
    problem = GemmProblem(spec, m, dtype, operand_dtypes, **_device_facts(kind))
    return _explain(problem)
