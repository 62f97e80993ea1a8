"""Timing the candidates of one problem and its peers on a GPU, each checked before it is timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fusedops.bench.chain import measure_chain
from fusedops.bench.contenders import Contender, measure
from fusedops.bench.data import Buffers
from fusedops.bench.layer_chain import LayerChain
from fusedops.bench.measurement import Failed, Outcome
from fusedops.bench.products import Layer, cublas_peers, make_layer_buffers
from fusedops.bench.quant_products import Activations, Call, QuantLayer
from fusedops.bench.quant_rows import QuantChain, Rotation
from fusedops.bench.timer import Protocol
from fusedops.bench.tune_problems import CutlassCandidate, TuneProblem
from fusedops.errors import DeviceError
from fusedops.providers.cutlass_kernel import Launch
from fusedops.providers.kernel_tensors import as_bytes, operands_read, written
from fusedops.quant import QuantizedWeight
from fusedops.weight import GroupedFormat
from fusedops.weight.fragments import words

__all__ = [
    "CHAIN_ROWS",
    "PROTOCOL",
    "measure_in_chain",
    "measure_on_gpu",
    "measure_quantized",
    "measure_rotated",
]

CHAIN_ROWS = 128
"""Up to this M a product is timed in a dependent chain, as a decode step meets it; beyond, where a
launch outlasts its neighbours' prologues, as launches on rotated buffers."""

PROTOCOL = Protocol(samples=15, cap_s=1.0, settle_max_s=0.3)


def measure_in_chain(
    layer: Layer, launches: Mapping[str, Launch], device: torch.device, protocol: Protocol
) -> dict[str, Outcome]:
    """A layer's launches by name, and its peers, in a chain where each reads the one before."""
    chain = LayerChain(layer, device)
    weights = [layer.packed(weight) for weight in chain.chain.weights]
    operands = []
    if chain.bias is not None:
        operands.append(layer.packed(chain.bias))
    if chain.residual is not None:
        operands.append(chain.residual)

    def contender(launch: Launch) -> Callable[[Tensor, int, Tensor], None]:
        return lambda x, index, out: launch(x, weights[index], out, operands, ())

    ours = [chain.contender(name, contender(launch)) for name, launch in launches.items()]
    return measure_chain(chain.chain, [*ours, *chain.peers()], device=device, protocol=protocol)


def measure_rotated(
    layer: Layer, launches: Mapping[str, Launch], device: torch.device, protocol: Protocol
) -> dict[str, Outcome]:
    """A layer's launches by name, and its peers, on independent sets of buffers."""
    # All contenders meet the same sets, so each is packed, and its reference computed, once.
    references: dict[int, Tensor] = {}
    packed: dict[int, Tensor] = {}

    def check(results: tuple[Tensor, ...], buffers: Buffers) -> str | None:
        key = buffers.inputs[0].data_ptr()
        if key not in references:
            references[key] = layer.reference(buffers)
        return layer.verdict(results[0], references[key])

    def prepare(buffers: Buffers) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        x, w, bias, residual = layer.operands(buffers)
        if w.data_ptr() not in packed:
            packed[w.data_ptr()] = layer.packed(w)
        operands = [] if bias is None else [layer.packed(bias)]
        operands += [] if residual is None else [residual]
        return x, packed[w.data_ptr()], buffers.outputs[0], operands

    def contender(name: str, launch: Launch) -> Contender:
        def run(state: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
            launch(*state, ())

        return Contender(name, run, check, prepare=prepare)

    ours = [contender(name, launch) for name, launch in launches.items()]
    return measure(
        [*ours, *cublas_peers(layer, check)],
        lambda generator: make_layer_buffers(layer, generator),
        device=device,
        protocol=protocol,
    )


def _quantized_call(made: QuantLayer, launch: Launch) -> Call:
    """A candidate's launch on operands as the provider hands them to it."""
    spec, m = made.spec, made.layer.M
    in_groups = isinstance(spec.weight, GroupedFormat)

    def call(
        x: Activations, weight: QuantizedWeight, others: Mapping[str, Tensor], out: Tensor
    ) -> None:
        given = made.operands(spec.operand_names, x, weight, others)
        stored = words(weight.weight) if in_groups else as_bytes(weight.weight)
        read = operands_read(spec, given, m)
        launch(as_bytes(x.values), stored, written(out, m), read, ())

    return call


def measure_quantized(
    made: QuantLayer, launches: Mapping[str, Launch], device: torch.device, protocol: Protocol
) -> dict[str, Outcome]:
    """A quantized layer's launches by name: a chain up to ``CHAIN_ROWS``, else rotated buffers.

    cuBLAS's bf16 stands beside those on rotated buffers.
    """
    calls = {name: _quantized_call(made, launch) for name, launch in launches.items()}
    if made.layer.M <= CHAIN_ROWS:
        chain = QuantChain(made, device)
        chained = [chain.contender(name, call) for name, call in calls.items()]
        return measure_chain(chain.chain, chained, device=device, protocol=protocol)
    rotation = Rotation(made)
    contenders = [rotation.contender(name, call) for name, call in calls.items()]
    contenders += rotation.bf16_peers()
    return measure(contenders, rotation.buffers, device=device, protocol=protocol)


def measure_on_gpu(
    problem: TuneProblem,
    tried: Sequence[CutlassCandidate],
    device: torch.device,
    protocol: Protocol = PROTOCOL,
) -> dict[str, Outcome]:
    """Every candidate of a problem and the peers, in one row of the measuring protocol.

    A candidate whose kernel cannot be had, or that gives a wrong result, is ``Failed``.

    Raises:
        DeviceError: the GPU no longer works after it (a kernel touched foreign memory, say).
    """
    failed: dict[str, Outcome] = {}
    launches: dict[str, Launch] = {}
    for candidate in tried:
        try:
            launches[candidate.name] = candidate.launcher()
        except Exception as error:  # noqa: BLE001 - a candidate that cannot be loaded is a row
            failed[candidate.name] = Failed(f"{type(error).__name__}: {error}")
    row = measure_in_chain if problem.layer.M <= CHAIN_ROWS else measure_rotated
    with torch.cuda.device(device):
        if problem.scheme is not None:
            made = QuantLayer(problem.layer, problem.scheme)
            outcomes = measure_quantized(made, launches, device, protocol)
        else:
            outcomes = row(problem.layer, launches, device, protocol)
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            # From here on everything fails in this process, so no outcome means anything.
            raise DeviceError(
                f"tune: the GPU stopped working while {problem.label} was measured with "
                f"{', '.join(launches)}; its row is not kept. {error}"
            ) from error
        # Graphs and their memory hang in reference cycles; the next problem needs the room.
        gc.collect()
        torch.cuda.empty_cache()
    return failed | outcomes
