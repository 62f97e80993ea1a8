"""Launch each kernel family in each of its variants, to be watched by compute-sanitizer.

usage: PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
           python scripts/sanitize.py [FAMILY ...]

A family is one of the GEMMs (decode, norm_gemm, prefill, split), a scheme of quantized weights or a
file of csrc by its name; ``gemm``, ``quant`` and ``csrc`` stand for all of a kind. Without torch's
caching allocator every tensor is an allocation of its own, so an access past its end is seen. GEMM
problems claim a GPU of few multiprocessors: each CTA then has several tiles and its ring goes
round. Results are compared with exact ones; exit status 1 if one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import sanitize_cuda
import sanitize_quant
import torch
from sanitize_cuda import Case
from torch import Tensor

import fusedops
from fusedops.config import DECODE_BUCKETS, DecodeTile, PrefillTile, decode_tiles, prefill_tiles
from fusedops.epilogue import Epilogue
from fusedops.problem import GemmProblem, GemmSpec
from fusedops.prologue import NO_PROLOGUE, Prologue, RmsNormPrologue
from fusedops.providers.cutlass_decode import DecodeCandidate
from fusedops.providers.cutlass_kernel import Launch
from fusedops.providers.cutlass_prefill import PrefillCandidate
from fusedops.providers.kernel_tensors import operands_read, written
from fusedops.weight import Dense

N, K, SM_COUNT = 272, 648, 2
DTYPE = torch.bfloat16
CHAIN = Epilogue.parse("bias|residual|row_stat(sumsq,132)")


def integers(*shape: int) -> Tensor:
    """Whole numbers whose products add up exactly in float32."""
    return torch.randint(-2, 3, shape, device="cuda").to(DTYPE)


def _decode_launcher(tile: DecodeTile, problem: GemmProblem) -> Launch:
    return DecodeCandidate(problem, tile).launcher()


def _prefill_launcher(tile: PrefillTile, problem: GemmProblem) -> Launch:
    return PrefillCandidate(problem, tile).launcher()


def gemm(
    launcher: Callable[[GemmProblem], Launch],
    m: int,
    prologue: Prologue = NO_PROLOGUE,
    sm_count: int = SM_COUNT,
) -> bool:
    """Run the chain on whole numbers; whether the result is exact."""
    spec = GemmSpec(Dense(N, K), CHAIN, DTYPE, prologue)
    # Rows of +-1 and +-2 have a norm that is no whole number, so those are compared within bounds.
    x, w, bias, residual = integers(m, K), integers(N, K), integers(N), integers(m, N)
    operands: list[Tensor | None] = [bias, residual]
    y = x
    if prologue != NO_PROLOGUE:
        weight = torch.rand(K, device="cuda").to(DTYPE)
        sumsq = torch.zeros(5, m, device="cuda")
        sumsq[3] = x.float().square().sum(1)
        operands = [weight, sumsq, *operands]
        y = fusedops.rms_norm(x, weight, 1e-5)
    problem = fusedops.explain(x, w, CHAIN, operands, out_dtype=DTYPE, prologue=prologue).problem
    results = spec.allocate(x)
    main, *extra = (written(result, m) for result in results)
    launch = launcher(replace(problem, sm_count=sm_count))
    launch(x, w, main, operands_read(spec, operands, m), extra)
    exact = y.double() @ w.double().T + bias.double() + residual.double()
    statistic = (results[1].sum(0) - results[0].float().square().sum(1)).abs().max()
    if prologue == NO_PROLOGUE and not torch.equal(results[0], exact.to(DTYPE)):
        return False
    close = torch.allclose(results[0].double(), exact, rtol=2e-2, atol=1.0)
    return close and bool(statistic <= 1e-4 * results[0].float().square().sum(1).max())


def decode() -> Iterator[Case]:
    """Every padded M with one tile a CTA wide, one split over a cluster, one of two warpgroups."""
    tiles = {tile.name: tile for tile in decode_tiles()}
    for name in ("r32k128", "r64k128s2", "r112k64"):
        for bucket in DECODE_BUCKETS:
            launcher = partial(_decode_launcher, tiles[name])
            yield f"{name} M={bucket - 3}", partial(gemm, launcher, bucket - 3)


def norm() -> Iterator[Case]:
    """The decode kernel with an RMSNorm inside."""
    tiles = {tile.name: tile for tile in decode_tiles()}
    for name in ("r48k128", "r64k128s2", "r112k64"):
        for m in (1, 13, 29):
            launcher = partial(_decode_launcher, tiles[name])
            yield f"{name} M={m}", partial(gemm, launcher, m, RmsNormPrologue(1e-5))


def prefill() -> Iterator[Case]:
    """Cooperative and ping-pong, with and without clusters."""
    tiles = {tile.name: tile for tile in prefill_tiles()}
    for name in ("c128x192", "c128x192m2", "c128x128n2", "p64x128m2"):
        for m in (3, 130, 300):
            yield f"{name} M={m}", partial(gemm, partial(_prefill_launcher, tiles[name]), m)


def split() -> Iterator[Case]:
    """The prefill kernel with K split over a cluster, whose clusters have one tile.

    Each CTA of 2, 4 or 8 has 16 to 128 of a tile's columns to finish.
    """
    tiles = [tile for tile in prefill_tiles() if tile.split > 1]
    for tile in tiles:
        for m in (3, 130):
            launcher = partial(_prefill_launcher, tile)
            yield f"{tile.name} M={m}", partial(gemm, launcher, m, sm_count=132)


GEMMS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode,
    "norm_gemm": norm,
    "prefill": prefill,
    "split": split,
}
FAMILIES = {**GEMMS, **sanitize_quant.FAMILIES, **sanitize_cuda.FAMILIES}
GROUPS = {
    "gemm": list(GEMMS),
    "quant": list(sanitize_quant.FAMILIES),
    "csrc": list(sanitize_cuda.FAMILIES),
}


def families(asked: Sequence[str]) -> list[str]:
    """The families that the command line names, each once; all of them without a name.

    Raises:
        ValueError: a name is neither a family's nor a group's.
    """
    names = [name for word in asked or GROUPS for name in GROUPS.get(word, [word])]
    if unknown := [name for name in names if name not in FAMILIES]:
        accepted = ", ".join([*GROUPS, *FAMILIES])
        raise ValueError(f"unknown {', '.join(unknown)}; accepted are {accepted}")
    return list(dict.fromkeys(names))


def main() -> int:
    """Run the families; 0 all right, 1 a result is wrong, 2 bad input."""
    try:
        asked = families(sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = 0
    for family in asked:
        for name, run in FAMILIES[family]():
            right = run()
            torch.cuda.synchronize()
            wrong += not right
            print(f"{family} {name}: {'right' if right else 'WRONG'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
