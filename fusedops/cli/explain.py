"""``fusedops explain``: which provider would run a GEMM, with what, and why not the others."""

from __future__ import annotations

from typing import Annotated

from fusedops.cli.options import choice, size, text
from fusedops.cli.output import DTYPE_WORDS, console, parse_device

__all__ = ["explain"]


def explain(
    m: Annotated[int, size("M", "Rows of the activations (tokens)")],
    n: Annotated[int, size("N", "Output features")],
    k: Annotated[int, size("K", "Input features")],
    dtype: Annotated[
        str, choice("--dtype", "Dtype of activations and weight", DTYPE_WORDS)
    ] = "bf16",
    epilogue: Annotated[
        str, text("--epilogue", 'Nodes joined by "|", e.g. "bias|act(silu)"', default="none")
    ] = "",
    prologue: Annotated[
        str, text("--prologue", 'Done to x first, e.g. "rms_norm(1e-05)"', default="none")
    ] = "",
    out_dtype: Annotated[
        str | None,
        choice("--out-dtype", "Dtype of the result", DTYPE_WORDS, default="the epilogue's"),
    ] = None,
    device: Annotated[str, text("--device", "Where it would run: cpu, cuda or cuda:N")] = "cpu",
) -> None:
    """Show who would run the GEMM (M, K) x (N, K)^T with an epilogue, and why not the others."""
    from fusedops.epilogue import Epilogue
    from fusedops.gemm import explain_problem
    from fusedops.prologue import Prologue

    # What is written wrong is named before what this machine lacks.
    chain = Epilogue.parse(epilogue) if epilogue else None
    front = Prologue.parse(prologue) if prologue else None
    explanation = explain_problem(
        m,
        n,
        k,
        dtype=DTYPE_WORDS[dtype],
        epilogue=chain,
        prologue=front,
        out_dtype=None if out_dtype is None else DTYPE_WORDS[out_dtype],
        device=parse_device("--device", device),
    )
    lines = str(explanation).splitlines()
    if m == 0 or n == 0:
        empty = " and ".join(name for name, count in (("M", m), ("N", n)) if count == 0)
        lines[2:] = [
            f"  provider  none: {empty} = 0, so the result is empty and nothing is launched"
        ]
    elif k == 0:
        lines.append("  note      K = 0: there is no product, and the epilogue runs on zeros")
    console().print("\n".join(lines), markup=False, soft_wrap=True)
