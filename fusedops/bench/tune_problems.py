"""What ``fusedops tune`` measures: a decoder's products, and the candidates for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from fusedops.bench.precompile import H200, Target, layer_problem, quantized_problem
from fusedops.bench.products import Layer
from fusedops.bench.sizes import DecoderSizes
from fusedops.config import (
    DECODE_BUCKETS,
    decode_tiles,
    mixed_tiles,
    prefill_tiles,
    tuning_key,
)
from fusedops.config.files import NamedTile, rank, tuning_m, winners
from fusedops.errors import ConfigError, UnsupportedError
from fusedops.jit.prebuild import Work
from fusedops.packing import padded_gate_rows
from fusedops.problem import GemmProblem
from fusedops.providers.cutlass import require_kernel_fits
from fusedops.providers.cutlass_decode import DecodeCandidate
from fusedops.providers.cutlass_mixed import MixedCandidate
from fusedops.providers.cutlass_prefill import PrefillCandidate
from fusedops.quant import Scheme
from fusedops.weight import GroupedFormat

__all__ = [
    "HEAD_ROWS",
    "CutlassCandidate",
    "DecoderSizes",
    "TuneProblem",
    "candidate_work",
    "candidates",
    "decoder_layers",
    "parse_shape",
    "target_of",
    "tune_problems",
]

HEAD_ROWS = 512
"""Rows beyond which the output head is left out: it sees one row a sequence, not one a token."""

HOPELESS = 2.0
"""A tiling that the model finds so much slower than the first is not worth GPU time: where the
model was further off (tiles of 128 rows for 8 to 32), all of its family were slow."""

Tile = TypeVar("Tile", bound=NamedTile)

CutlassCandidate = DecodeCandidate | PrefillCandidate | MixedCandidate


def target_of(device: torch.device) -> Target:
    """The GPU that is here.

    Raises:
        UnsupportedError: it is no Hopper GPU; only those have these kernels.
    """
    found = Target.of(device)
    if found.arch != H200.arch:
        raise UnsupportedError(
            f"tune: {found.gpu} needs kernels for {found.arch}; the tilings of sm90.toml are for "
            f"{H200.arch} only."
        )
    return found


def decoder_layers(
    sizes: DecoderSizes, m: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Layer]:
    """A decoder's products at M rows by name, as the fused modules run them.

    The head is left out beyond ``HEAD_ROWS``.
    """
    hidden, inner = sizes.hidden_size, padded_gate_rows(sizes.intermediate_size)
    heads = sizes.n_heads * sizes.head_dim
    kv = 2 * sizes.n_kv_heads * sizes.head_dim
    layers = {
        "qkv": Layer(m, heads + kv, hidden, bias=sizes.qkv_bias, dtype=dtype),
        "o": Layer(m, hidden, heads, bias=sizes.o_bias, residual=True, dtype=dtype),
        "gate_up": Layer(
            m,
            2 * inner,
            hidden,
            bias=sizes.mlp_bias,
            activation=sizes.activation,
            gated=True,
            dtype=dtype,
        ),
        "down": Layer(m, hidden, inner, bias=sizes.mlp_bias, residual=True, dtype=dtype),
    }
    if m <= HEAD_ROWS:
        layers["lm_head"] = Layer(m, sizes.vocab_size, hidden, dtype=dtype)
    return layers


def parse_shape(text: str, m: int) -> Layer:
    """The bf16 layer that ``N,K`` or ``N,K,bias|residual|gate`` describes, at M rows.

    Raises:
        ConfigError: the text has another form.
    """
    n, _, rest = text.partition(",")
    k, _, kind = rest.partition(",")
    if not (n.isdecimal() and k.isdecimal()) or kind not in ("", "bias", "residual", "gate"):
        raise ConfigError(
            f"--shape {text}: accepted are N,K and N,K,KIND with KIND bias, residual or gate, e.g. "
            "4096,14336,residual."
        )
    gated = kind == "gate"
    activation = "silu" if gated else ""
    if int(n) < 1 or int(k) < 1 or int(n) % 8 or int(k) % 8 or (gated and int(n) % 16):
        raise ConfigError(
            f"--shape {text}: N and K must be multiples of 8 (N of 16 behind a gate), so that rows "
            "start at multiples of 16 bytes."
        )
    return Layer(
        m,
        int(n),
        int(k),
        bias=kind == "bias",
        residual=kind == "residual",
        activation=activation,
        gated=gated,
    )


@dataclass(frozen=True)
class TuneProblem:
    """A product to choose a tiling for.

    Attributes:
        label: what it is, for people.
        layer: shapes and epilogue.
        problem: the same, as kernels see it.
        scheme: how the layer is quantized; None: it is not.
    """

    label: str
    layer: Layer
    problem: GemmProblem
    scheme: Scheme | None = None

    @property
    def key(self) -> str:
        """What the choice is filed under."""
        return tuning_key(self.problem)


def tune_problems(
    models: Sequence[tuple[str, DecoderSizes]],
    shapes: Sequence[str],
    rows: Sequence[int],
    target: Target,
    scheme: Scheme | None = None,
) -> list[TuneProblem]:
    """Products of models and single shapes, one a tuning key, in the order of ``rows``.

    Each M is measured at the M that its choice is filed under (1 at 8, for example). Those with a
    bias have none under a scheme, and M that its kernels do not take are left out.
    """
    found: dict[str, TuneProblem] = {}
    for m in dict.fromkeys(map(tuning_m, rows)):
        layers = {
            f"{name} {product}": layer
            for name, sizes in models
            for product, layer in decoder_layers(sizes, m).items()
        }
        layers |= {text: parse_shape(text, m) for text in shapes}
        for label, layer in layers.items():
            made = TuneProblem(f"{label} m{m}", layer, layer_problem(layer, target))
            if scheme is not None:
                layer = replace(layer, bias=False)
                problem = quantized_problem(layer, scheme, target)
                if not _is_taken(problem):
                    continue
                made = TuneProblem(f"{label} {scheme} m{m}", layer, problem, scheme)
            found.setdefault(made.key, made)
    return list(found.values())


def _is_taken(problem: GemmProblem) -> bool:
    try:
        require_kernel_fits(problem)
    except ConfigError:
        return False
    return True


def _shortlist(
    tiles: Sequence[Tile], problem: GemmProblem, top: int, known: Collection[str]
) -> list[Tile]:
    """The legal tiles that the model finds fastest: ``top``, ties with the last, and ``known``."""
    legal = [tile for tile in tiles if tile.legal(problem) is None]
    ranked = sorted(legal, key=lambda tile: rank(tile, problem))
    if not ranked:
        return []
    limit_us = ranked[min(top, len(ranked)) - 1].predicted_us(problem)
    return [t for t in ranked if t.predicted_us(problem) <= limit_us or t.name in known]


def candidates(problem: GemmProblem, top: int) -> list[CutlassCandidate]:
    """The tilings to measure: of each family the ``top`` by predicted time, ties included.

    What ``choose_candidate`` takes without measured choices is the first by predicted time, so it
    is always among them. Those predicted ``HOPELESS`` times slower than it are left out, but never
    one that was measured fastest for the product before, at any M.

    Raises:
        ConfigError: no kernel can load the problem's tensors.
    """
    require_kernel_fits(problem)
    known = winners(problem, problem.gpu)
    found: list[CutlassCandidate] = []
    if isinstance(problem.spec.weight, GroupedFormat):
        mixed = _shortlist(mixed_tiles(), problem, top, known)
        return [MixedCandidate(problem, tile) for tile in mixed]
    if problem.m <= DECODE_BUCKETS[-1]:
        tiles = _shortlist(decode_tiles(), problem, top, known)
        found += [DecodeCandidate(problem, tile) for tile in tiles]
    prefill = _shortlist(prefill_tiles(), problem, top, known)
    found += [PrefillCandidate(problem, tile) for tile in prefill]
    limit_us = HOPELESS * min((one.predicted_us for one in found), default=0.0)
    return [one for one in found if one.predicted_us <= limit_us or one.name in known]


def candidate_work(candidate: CutlassCandidate) -> Work:
    """What compiles a candidate's kernel for tensors as torch allocates them."""
    return candidate.program
