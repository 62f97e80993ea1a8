"""What a GEMM provider offers, and the two that need no kernel of ours: reference and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.epilogue.base import FLOAT_DTYPES, Operand
from fusedops.epilogue.nodes import Bias, Gate, Residual
from fusedops.epilogue.spec import dtype_name
from fusedops.errors import ShapeError
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import NO_PROLOGUE
from fusedops.providers.base import (
    SUPPORTED,
    Support,
    current_policy,
    not_applicable,
    unsupported,
)
from fusedops.providers.epilogue_torch import finish
from fusedops.weight import Dense, float_product, in_blocks

__all__ = [
    "GEMM_PROVIDERS",
    "CublasProvider",
    "GemmProvider",
    "GemmRun",
    "ReferenceProvider",
    "product_8_bit",
    "refuse_prologue",
    "register_gemm_provider",
]

GemmRun = Callable[[Tensor, Tensor, Sequence[Tensor | None], Sequence[Tensor] | None], list[Tensor]]
"""``run(x, w, operands, out)``: arguments are already checked; ``out`` None allocates."""


class GemmProvider(Protocol):
    """Serves GEMM problems; stateless, so one object serves every thread."""

    name: str

    def supports(self, problem: GemmProblem) -> Support:
        """Whether ``plan`` can serve the problem, or the reason why not."""
        ...

    def plan(self, problem: GemmProblem) -> GemmRun:
        """The function that runs problems like this one; called once, then cached."""
        ...

    def describe(self, problem: GemmProblem) -> str:
        """One line for ``explain``: what would run."""
        ...


GEMM_PROVIDERS: dict[str, GemmProvider] = {}


def register_gemm_provider(provider: GemmProvider) -> None:
    """Add (or replace) the GEMM provider of that name."""
    GEMM_PROVIDERS[provider.name] = provider


def refuse_prologue(problem: GemmProblem) -> Support | None:
    """The answer of a provider without prologues inside; ``fusedops.gemm`` then runs them ahead."""
    prologue = problem.spec.prologue
    return None if prologue == NO_PROLOGUE else unsupported(f"has no kernel with {prologue} inside")


def deliver(
    spec: GemmSpec, x: Tensor, results: list[Tensor], out: Sequence[Tensor] | None
) -> list[Tensor]:
    """Give flat (M, ...) results the leading shape of x, or copy them into ``out``."""
    m_shape = x.shape[:-1]
    if out is not None:
        for target, result in zip(out, results, strict=True):
            target.copy_(result.view(target.shape))
        return list(out)
    results[0] = results[0].view(*m_shape, spec.out_n)
    if len(m_shape) != 1 and len(results) > 1:
        shapes = [shape for shape, _, _ in spec.expected_outputs(x)]
        # A view would give dimensions of one element other strides than were allocated.
        results = [
            result if result.shape == shape else result.view(shape)
            for result, shape in zip(results, shapes, strict=True)
        ]
    return results


DirectForm = tuple[str, Callable[[Tensor, Tensor, Sequence[Tensor | None]], Tensor]]


def _direct_form(problem: GemmProblem) -> DirectForm | None:
    """The single torch call that does the whole chain with one rounding, or None.

    torch adds a bias to the float32 accumulator before it rounds. A residual it adds so in float32
    only: in half precision some cuBLAS kernels behind ``addmm`` round the product first (seen on an
    H200: the error reached the size of the result where product and residual cancel).
    """
    spec = problem.spec
    if not isinstance(spec.weight, Dense) or problem.x_dtype not in FLOAT_DTYPES:
        return None
    if any(dtype != problem.x_dtype for dtype in (spec.out_dtype, *problem.operand_dtypes)):
        return None
    n = spec.n
    match spec.epilogue.nodes:
        case ():
            if problem.x_dtype == torch.float32 and in_blocks(problem.m, n, spec.k):
                return "float32 product", lambda x, w, _: float_product(x, w)
            return "F.linear", lambda x, w, _: F.linear(x, w)
        case (Bias(),):
            return "F.linear with a bias", lambda x, w, t: F.linear(x, w, _row(t[0], n))
        case (Residual(beta=beta),) if problem.x_dtype == torch.float32:
            return "float32 product, then the residual", lambda x, w, t: float_product(x, w).add_(
                _given(t[0]).reshape(problem.m, n), alpha=beta
            )
        case (Gate() as gate,) if problem.x_dtype == torch.float32 and problem.device_type == "cpu":
            context = spec.context((), problem.m)
            return "float32 product, then the gate", lambda x, w, _: gate.reference(
                float_product(x, w), context
            )
    return None


def _given(operand: Tensor | None) -> Tensor:
    if operand is None:
        raise ShapeError("gemm: an operand is None but not optional.")
    return operand


def _row(operand: Tensor | None, n: int) -> Tensor:
    bias = _given(operand)
    return bias if bias.dim() == 1 else bias.view(n)


def _run_direct(problem: GemmProblem, form: DirectForm) -> GemmRun:
    spec, m, k = problem.spec, problem.m, problem.spec.k
    call = form[1]

    def run(
        x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
    ) -> list[Tensor]:
        if x.dim() == 2 and out is None:
            return [call(x, w, operands)]
        return deliver(spec, x, [call(x.reshape(m, k), w, operands)], out)

    return run


class ReferenceProvider:
    """float32 product and the chain's own reference, on any device: the definition of right."""

    name = "reference"

    def supports(self, problem: GemmProblem) -> Support:
        spec, is_asked_for = problem.spec, current_policy().pinned == self.name
        is_wide = isinstance(spec.weight, Dense) and problem.x_dtype in FLOAT_DTYPES
        is_empty = 0 in (problem.m, spec.n, spec.k)
        if problem.device_type == "cuda" and not (is_wide or is_empty or is_asked_for):
            return unsupported(
                f"makes float32 values of all of the {dtype_name(problem.x_dtype)} x and of the "
                f"weight {spec.weight} at every call, which takes longer than the product in 16 "
                "bits; use_provider('reference') runs it"
            )
        return refuse_prologue(problem) or SUPPORTED

    def _direct(self, problem: GemmProblem) -> DirectForm | None:
        # Only in float32: there torch's call and the chain differ by float32 rounding alone.
        if problem.x_dtype != torch.float32 or problem.spec.batch_invariant:
            return None
        return _direct_form(problem)

    def describe(self, problem: GemmProblem) -> str:
        direct = self._direct(problem)
        return direct[0] if direct else "product in float32, then the chain node by node in float32"

    def plan(self, problem: GemmProblem) -> GemmRun:
        direct = self._direct(problem)
        if direct is not None:
            return _run_direct(problem, direct)
        spec, m = problem.spec, problem.m
        by_row = spec.batch_invariant and m > 1

        def run(
            x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
        ) -> list[Tensor]:
            rows = x.reshape(m, spec.k)
            if by_row:
                return _row_by_row(
                    spec, rows, w, operands, spec.allocate(x) if out is None else out
                )
            return deliver(spec, x, _reference(spec, rows, w, operands), out)

        return run


def _reference(
    spec: GemmSpec, rows: Tensor, w: Tensor, operands: Sequence[Tensor | None]
) -> list[Tensor]:
    context = spec.context(operands, len(rows))
    accumulator = spec.weight.accumulate(rows, w, context)
    return [spec.epilogue.reference(accumulator, context), *context.outputs]


def _row_by_row(
    spec: GemmSpec,
    rows: Tensor,
    w: Tensor,
    operands: Sequence[Tensor | None],
    results: Sequence[Tensor],
) -> list[Tensor]:
    """One row after the other into ``results``: torch's sums and last bits depend on M.

    It computes a function by vectors up to where a tensor or a thread's share of it ends, and the
    rest otherwise.
    """
    m = len(rows)

    def of_row(operand: Operand, tensor: Tensor | None, i: int) -> Tensor | None:
        if tensor is None or operand.axis not in ("m", "mn", "groups_m"):
            return tensor
        if operand.axis == "groups_m":
            return tensor[:, i : i + 1]
        flat = tensor.reshape(m, tensor.shape[-1]) if operand.axis == "mn" else tensor.reshape(-1)
        return flat[i : i + 1]

    if isinstance(spec.weight, Dense) and w.dtype not in (torch.int8, torch.float32):
        # Once, not for every row; products of int8 are summed in float64.
        rows, w = rows.float(), w.float()
    for i in range(m):
        given = [of_row(*pair, i) for pair in zip(spec.operands, operands, strict=True)]
        parts = _reference(spec, rows[i : i + 1], w, given)
        for result, part in zip(results, parts, strict=True):
            columns = part.shape[-1]
            whole = result.view(m, columns) if result.shape[-1] == columns else result
            axis = next(d for d in range(part.dim()) if whole.shape[d] != part.shape[d])
            whole.narrow(axis, i, 1).copy_(part)
    return list(results)


_LEAST_INT8_ROWS = 17
"""Rows from which ``torch._int_mm`` multiplies."""


def _refuses_8_bit(problem: GemmProblem) -> str | None:
    """Why cuBLAS cannot multiply e4m3 or int8 here, or None."""
    spec = problem.spec
    multiple = 16 if problem.x_dtype == torch.float8_e4m3fn else 8
    if 0 in (problem.m, spec.n, spec.k) or spec.n % multiple or spec.k % multiple:
        return (
            f"multiplies {dtype_name(problem.x_dtype)} with M > 0 and N and K multiples of "
            f"{multiple}, got M={problem.m}, N={spec.n}, K={spec.k}"
        )
    if problem.aligned_bytes < 16:
        return (
            "multiplies 8-bit x and w whose addresses and row pitches are multiples of 16 bytes, "
            f"got multiples of {problem.aligned_bytes}"
        )
    return None


def product_8_bit(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w.T`` of e4m3 or int8 (M, K) and (N, K): float32 (M, N), int8 exact in int32 first."""
    if x.dtype == torch.float8_e4m3fn:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        # Fast accumulation keeps some 14 bits over all of K.
        return torch._scaled_mm(
            x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
        )
    m = x.shape[0]
    rows = F.pad(x, (0, 0, 0, _LEAST_INT8_ROWS - m)) if m < _LEAST_INT8_ROWS else x
    return torch._int_mm(rows, w.t())[:m].float()


class CublasProvider:
    """torch's matrix product (cuBLAS) on CUDA, then the rest of the chain in float32.

    Where cuBLAS itself can do the whole chain with one rounding (``_direct_form``) it does;
    otherwise the product is written in float32, so that the one-rounding contract holds, and the
    chain follows in as few kernels as torch offers (``epilogue_torch.finish``).
    """

    name = "cublas"

    def supports(self, problem: GemmProblem) -> Support:
        if problem.device_type != "cuda":
            return not_applicable(f"runs on CUDA tensors, got {problem.device_type}")
        if not isinstance(problem.spec.weight, Dense):
            return unsupported(f"multiplies dense weights only, got {problem.spec.weight}")
        if problem.spec.batch_invariant:
            return unsupported("is not batch invariant: the kernel it takes depends on M")
        if problem.x_dtype not in FLOAT_DTYPES:
            reason = _refuses_8_bit(problem)
            if reason is not None:
                return unsupported(reason)
        return refuse_prologue(problem) or SUPPORTED

    def describe(self, problem: GemmProblem) -> str:
        direct = _direct_form(problem)
        if direct is not None:
            return direct[0]
        eight = {torch.float8_e4m3fn: "torch._scaled_mm", torch.int8: "torch._int_mm"}
        product = eight.get(problem.x_dtype, "torch.mm")
        return f"{product} with float32 output, then the chain node by node"

    def plan(self, problem: GemmProblem) -> GemmRun:
        direct = _direct_form(problem)
        if direct is not None:
            return _run_direct(problem, direct)
        spec, m, k = problem.spec, problem.m, problem.spec.k

        def run(
            x: Tensor, w: Tensor, operands: Sequence[Tensor | None], out: Sequence[Tensor] | None
        ) -> list[Tensor]:
            context = spec.context(operands, m)
            rows = x.reshape(m, k)
            if rows.dtype == torch.float32:
                accumulator = torch.mm(rows, w.t())
            elif rows.dtype in FLOAT_DTYPES:
                accumulator = torch.mm(rows, w.t(), out_dtype=torch.float32)
            else:
                accumulator = product_8_bit(rows, w)
            main = finish(spec.epilogue, accumulator, context)
            return deliver(spec, x, [main, *context.outputs], out)

        return run


register_gemm_provider(ReferenceProvider())
register_gemm_provider(CublasProvider())
