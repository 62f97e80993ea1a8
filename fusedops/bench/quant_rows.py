"""Rows of quantized products: in chains, as a decode step meets them, and on rotated buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fusedops.bench.chain import ChainContender
from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Absent, Failed, Outcome
from fusedops.bench.products import cublas_peers, make_layer_buffers
from fusedops.bench.quant_peers import Peer, Product, bare, finishing, quant_peers
from fusedops.bench.quant_products import Activations, Call, QuantLayer
from fusedops.bench.runner import make_runner
from fusedops.bench.timer import Protocol, time_programs
from fusedops.quant import QuantizedWeight

__all__ = ["BF16", "MINE", "QuantChain", "Rotation", "chain_outcomes", "mine", "rotated_outcomes"]

MINE = "fusedops"

BF16 = "cuBLAS bf16"
"""The layer in bfloat16 by ``torch``, in a chain with weights of its own."""

_GIVEN = 2
"""Quantized activations that the launches of a chain take in turn, as outputs do."""


def mine(made: QuantLayer) -> str:
    """Our contender's name in a chain of several schemes."""
    return f"{MINE} {made.scheme.name}"


class QuantChain:
    """A quantized layer in a dependent chain (see ``fusedops.bench.chain``).

    Activations that stay in 16 bits come from the launch before. An 8-bit kernel cannot read the
    bfloat16 result of the one before it, so its activations are given, and it follows that kernel
    as launches of a stream do. With programmatic dependent launch it waits for it all the same
    before it reads them: it cannot know who wrote them.

    Args:
        made: what is launched.
        device: where it runs.

    Attributes:
        made: as given.
        chain: where launches read and write.
        weights: quantized weights that take turns.
        residual: (M, columns_out) or None.
    """

    def __init__(self, made: QuantLayer, device: torch.device | str) -> None:
        self.made = made
        layer = made.layer
        layers = LayerChain(layer, device, weight_bytes=made.stored_bytes)
        self.chain, self.residual = layers.chain, layers.residual
        self.weights = [made.stored(weight) for weight in self.chain.weights]
        # The chain only counts its weights, and these are larger than the quantized ones.
        self.chain.weights = [weight.weight for weight in self.weights]
        self._given: list[Activations] = []
        if made.scheme.activation is not None:
            generator = torch.Generator(device=device).manual_seed(3)
            for _ in range(_GIVEN):
                x = torch.empty(layer.M, layer.K, dtype=layer.dtype, device=device)
                self._given.append(made.activations(x.normal_(generator=generator)))

    def activations(self, x: Tensor, index: int) -> Activations:
        """What the launch with weight ``index`` reads, where the chain's columns are ``x``."""
        return self._given[index % _GIVEN] if self._given else Activations(x, None)

    def _verdict(self, x: Activations, index: int, out: Tensor) -> str | None:
        values = self.made.values(self.weights[index])
        return self.made.expected(x, values, self.residual).verdict(out)

    def contender(self, name: str, call: Call | None = None) -> ChainContender:
        """Ours, through ``fusedops::gemm_out`` unless ``call`` launches otherwise."""
        run = call or self.made.call()
        others = {} if self.residual is None else {"residual": self.residual}

        def launch(x: Tensor, index: int, out: Tensor) -> None:
            run(self.activations(x, index), self.weights[index], others, out)

        def check(x: Tensor, index: int, out: Tensor) -> str | None:
            return self._verdict(self.activations(x, index), index, out)

        return ChainContender(name, launch, check)

    def peers(self) -> dict[str, ChainContender | Absent]:
        """The peers of the scheme by name."""
        return {
            name: peer if isinstance(peer, Absent) else self._peer(name, peer)
            for name, peer in quant_peers(self.made).items()
        }

    def _peer(self, name: str, peer: Peer) -> ChainContender:
        runs = [finishing(self.made, peer(weight), self.residual) for weight in self.weights]
        # QuACK takes no row pitch: it reads a buffer of its own instead of the chain's columns.
        views = [self.chain.views(position)[0] for position in range(3)]
        dense = {x.data_ptr(): x.contiguous() for x in views if not x.is_contiguous()}

        def read(x: Tensor, index: int) -> Activations:
            return self.activations(dense.get(x.data_ptr(), x), index)

        def launch(x: Tensor, index: int, out: Tensor) -> None:
            runs[index](read(x, index), out)

        def check(x: Tensor, index: int, out: Tensor) -> str | None:
            return self._verdict(read(x, index), index, out)

        return ChainContender(name, launch, check, repeatable=False)


def chain_outcomes(
    layers: Sequence[QuantLayer], device: torch.device | str, protocol: Protocol
) -> dict[str, Outcome]:
    """A row of one product: ours under each scheme, the schemes' peers, and bf16 by cuBLAS.

    Args:
        layers: one product under several schemes.
        device: where it runs.
        protocol: lengths and caps.
    """
    gc.collect()
    runner = make_runner(device)
    programs, absent = [], dict[str, Outcome]()
    for made in layers:
        chain = QuantChain(made, device)
        programs.append(chain.chain.program(chain.contender(mine(made)), runner))
        for name, peer in chain.peers().items():
            if isinstance(peer, Absent):
                absent[name] = peer
            else:
                programs.append(chain.chain.program(peer, runner))
    dense = LayerChain(layers[0].layer, device)
    torchs = replace(dense.peers()[0], name=BF16)
    programs.append(dense.chain.program(torchs, runner))
    return {**time_programs(programs, runner, protocol=protocol), **absent}


@dataclass(frozen=True)
class _Set:
    """One set of buffers of a rotation, as the scheme takes it."""

    x: Activations
    weight: QuantizedWeight
    others: Mapping[str, Tensor]
    out: Tensor

    @property
    def residual(self) -> Tensor | None:
        return self.others.get("residual")


@dataclass
class Rotation:
    """Quantized buffers of a layer: sets that hold together more than the caches.

    Attributes:
        made: what is launched.
        out_scale: of results that are quantized.
    """

    made: QuantLayer
    out_scale: float = 2.0**-4
    _sets: dict[int, _Set] = field(default_factory=dict, repr=False)

    def buffers(self, generator: torch.Generator) -> Buffers:
        """One set: activations, weight, scales and residual as inputs, the result as output."""
        made, layer = self.made, self.made.layer
        x, w, _, residual = layer.operands(make_layer_buffers(layer, generator))
        given, weight = made.activations(x), made.stored(w)
        others = {} if residual is None else {"residual": residual}
        inputs = [given.values, weight.weight, *weight.scales.values(), *others.values()]
        inputs += [] if given.scale is None else [given.scale]
        if made.quantizes:
            others["out_scale"] = torch.tensor(self.out_scale, device=x.device)
        shape = (layer.M, layer.columns_out)
        out = torch.empty(shape, dtype=made.spec.out_dtype, device=x.device)
        self._sets[given.values.data_ptr()] = _Set(given, weight, others, out)
        return Buffers(tuple(inputs), (out,))

    def of(self, buffers: Buffers) -> _Set:
        """What was made with a set of buffers."""
        return self._sets[buffers.inputs[0].data_ptr()]

    def refusal(self, device: torch.device | str) -> str | None:
        """Why our kernels do not multiply it, or None."""
        generator = torch.Generator(device=device).manual_seed(0)
        try:
            one = self.of(self.buffers(generator))
            self.made.call()(one.x, one.weight, one.others, one.out)
        except Exception as error:  # noqa: BLE001 - whatever our kernels raise is the row's reason
            return f"{type(error).__name__}: {error}"
        finally:
            self._sets.clear()
        return None

    def check(self, results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        """Judges the layer's result."""
        one = self.of(buffers)
        expected = self.made.expected(one.x, self.made.values(one.weight), one.residual)
        if results[0].dtype == torch.float8_e4m3fn:
            return expected.quantized_verdict(results[0], one.others["out_scale"])
        return expected.verdict(results[0])

    def rounded_check(self, results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        """Judges the result of a peer that has rounded weight and activations to 16 bits."""
        one, made = self.of(buffers), self.made
        expected = made.expected(one.x, made.values(one.weight), one.residual, rounded=True)
        return expected.verdict(results[0])

    def bare_check(self, results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        """Judges the result of the product without an epilogue."""
        one = self.of(buffers)
        return bare(self.made).expected(one.x, self.made.values(one.weight)).verdict(results[0])

    def contender(self, name: str = MINE, call: Call | None = None) -> Contender:
        """Ours, through ``fusedops::gemm_out`` unless ``call`` launches otherwise."""
        launch = call or self.made.call()

        def run(one: _Set) -> None:
            launch(one.x, one.weight, one.others, one.out)

        return Contender(name, run, self.check, prepare=self.of)

    def peers(
        self, exact_sums: bool = False, product_only: bool = False
    ) -> dict[str, Contender | Absent]:
        """The peers of the scheme by name.

        Args:
            exact_sums: see ``quant_peers``.
            product_only: they leave the layer's epilogue out.
        """
        return {
            name: peer if isinstance(peer, Absent) else self._peer(name, peer, product_only)
            for name, peer in quant_peers(self.made, exact_sums).items()
        }

    def _peer(self, name: str, peer: Peer, product_only: bool) -> Contender:
        done = bare(self.made) if product_only else self.made
        layer = done.layer

        def prepare(buffers: Buffers) -> tuple[Product, Activations, Tensor]:
            one = self.of(buffers)
            residual = None if product_only else one.residual
            shape = (layer.M, layer.columns_out)
            out = torch.empty(shape, dtype=layer.dtype, device=one.out.device)
            return finishing(done, peer(one.weight), residual), one.x, out

        def run(state: tuple[Product, Activations, Tensor]) -> Tensor:
            product, x, out = state
            product(x, out)
            return out

        check = self.bare_check if product_only else self.check
        return Contender(name, run, check, prepare=prepare)

    def bf16_peers(self) -> list[Contender]:
        """torch and cuBLASLt's best of 8 on the values that the stored numbers stand for."""

        def on_values(contender: Contender) -> Contender:
            inner: Callable[[Buffers], object] = contender.prepare or (lambda values: values)

            def prepare(buffers: Buffers) -> object:
                one, dtype = self.of(buffers), self.made.layer.dtype
                inputs = [one.x.wide().to(dtype), self.made.values(one.weight).to(dtype)]
                inputs += [] if one.residual is None else [one.residual]
                return inner(Buffers(tuple(inputs), (torch.empty_like(one.out, dtype=dtype),)))

            return replace(contender, check=self.rounded_check, prepare=prepare)

        return [on_values(each) for each in cublas_peers(self.made.layer, self.rounded_check)]


def rotated_outcomes(
    rotation: Rotation,
    peers: Mapping[str, Contender | Absent],
    device: torch.device | str,
    protocol: Protocol,
) -> dict[str, Outcome]:
    """A row on rotated buffers; what our kernels refuse has the reason, and no peer is timed."""
    gc.collect()
    refused = rotation.refusal(device)
    if refused is not None:
        return {MINE: Failed(refused)}
    absent = {name: peer for name, peer in peers.items() if isinstance(peer, Absent)}
    there = [peer for peer in peers.values() if not isinstance(peer, Absent)]
    contenders = [rotation.contender(), *there]
    return {**measure(contenders, rotation.buffers, device=device, protocol=protocol), **absent}
