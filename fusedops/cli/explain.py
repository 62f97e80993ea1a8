"""``fusedops explain``: which provider would run a GEMM, with what, and why not the others."""

from __future__ import annotations

from typing import Annotated

import typer

from fusedops.cli.output import console, parse_device, parse_dtype

__all__ = ["explain"]


def explain(
    m: Annotated[int, typer.Argument(min=0, help="Rows of the activations (tokens).")],
    n: Annotated[int, typer.Argument(min=0, help="Output features.")],
    k: Annotated[int, typer.Argument(min=0, help="Input features.")],
    dtype: Annotated[str, typer.Option(help="Dtype of activations and weight.")] = "bf16",
    epilogue: Annotated[str, typer.Option(help='A chain, e.g. "bias|act(silu)".')] = "",
    out_dtype: Annotated[str, typer.Option(help="Dtype of the result; default: the chain's.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Show who would run the GEMM (M, K) x (N, K)^T with an epilogue, and why not the others."""
    from fusedops.gemm import explain_problem

    explanation = explain_problem(
        m,
        n,
        k,
        dtype=parse_dtype("--dtype", dtype),
        epilogue=epilogue or None,
        out_dtype=parse_dtype("--out-dtype", out_dtype) if out_dtype else None,
        device=parse_device("--device", device),
    )
    console().print(str(explanation), markup=False, soft_wrap=True)
