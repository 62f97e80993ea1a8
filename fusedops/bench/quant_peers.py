"""Peers of quantized products: cuBLAS's fp8, FlashInfer's fp8 blocks, QuACK's int4 weights.

Each multiplies the very numbers that ours does, its weights brought into the peer's order outside
any timing, and runs the rest of the epilogue as separate torch operations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fusedops.bench.layer_chain import finish_into
from fusedops.bench.measurement import Absent
from fusedops.bench.peers import Available, peer_status
from fusedops.bench.quant_products import Activations, QuantLayer
from fusedops.errors import ConfigError
from fusedops.quant import QuantizedWeight
from fusedops.weight.int4_layout import pack_nibbles, unpack_nibbles

__all__ = ["FLASHINFER", "QUACK", "SCALED_MM", "Peer", "bare", "finishing", "quant_peers"]

SCALED_MM = {"fp8": "cuBLAS fp8 row-wise", "fp8-tensor": "cuBLAS fp8 one scale"}
"""The contender that runs ``torch._scaled_mm``, by scheme."""

FLASHINFER = "flashinfer fp8 blocks"
QUACK = {"int4": "quack W4A16", "w4a8": "quack W4A8"}
"""QuACK's contender by scheme."""

Product = Callable[[Activations, Tensor], object]
"""``product(x, out)``: the bare product, (M, N) bfloat16, contiguous."""

Peer = Callable[[QuantizedWeight], Product]
"""Makes the product with one weight."""


def bare(made: QuantLayer) -> QuantLayer:
    """The same product without an epilogue."""
    layer = made.layer
    return QuantLayer(replace(layer, activation="", gated=False, residual=False), made.scheme)


def _scaled_mm(made: QuantLayer, fast_sums: bool) -> Peer:
    by_row = made.scheme.sharing == "channel"

    def peer(weight: QuantizedWeight) -> Product:
        columns = made.in_order(weight.weight).t()
        w_scale = weight.scales["w_scale"]
        if by_row:
            w_scale = made.in_order(w_scale).unsqueeze(0)

        def product(x: Activations, out: Tensor) -> object:
            if x.scale is None:
                raise ConfigError("cuBLAS fp8: the activations are not quantized.")
            return torch._scaled_mm(
                x.values,
                columns,
                scale_a=x.scale.unsqueeze(1) if by_row else x.scale,
                scale_b=w_scale,
                out_dtype=out.dtype,
                use_fast_accum=fast_sums,
                out=out,
            )

        return product

    return peer


def _flashinfer(made: QuantLayer) -> Peer:
    multiply = importlib.import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90

    def peer(weight: QuantizedWeight) -> Product:
        rows, w_scale = made.in_order(weight.weight), weight.scales["w_scale"]
        if made.layer.gated:
            # Blocks of gate and up rows alternate, see BlockFp8.
            w_scale = torch.cat((w_scale[0::2], w_scale[1::2]))

        def product(x: Activations, out: Tensor) -> object:
            if x.scale is None:
                raise ConfigError(f"{FLASHINFER}: the activations are not quantized.")
            # Its kernel reads groups x rows, rows padded to 4, as ours lie.
            return multiply(x.values, rows, x.scale.t(), w_scale, out=out)

        return product

    return peer


def _quack_w4a16(made: QuantLayer) -> Peer:
    module = importlib.import_module("quack.gemm_w4")

    def peer(weight: QuantizedWeight) -> Product:
        nibbles = made.in_order(weight.in_layout("rows").weight)
        scales = made.in_order(weight.scales["w_scale"].t().contiguous())
        blob, strip = module.prepare_w4_weight(nibbles, scales, "int4")
        return lambda x, out: module.gemm_w4a16(x.values, blob, strip, out=out, wformat="int4")

    return peer


def _quack_w4a8(made: QuantLayer) -> Peer:
    module = importlib.import_module("quack.gemm_w4")

    def peer(weight: QuantizedWeight) -> Product:
        # Sign and magnitude: it has no -8, and neither have the weights (``QuantLayer.stored``).
        codes = unpack_nibbles(weight.in_layout("rows").weight, made.layer.K).to(torch.int16) - 8
        signed = torch.where(codes < 0, 8 - codes, codes).to(torch.uint8)
        scales = made.in_order(weight.scales["w_scale"].t().contiguous())
        blob, strip = module.prepare_w4_weight(
            made.in_order(pack_nibbles(signed)), scales, "int4sm"
        )
        return lambda x, out: module.gemm_w4a8(
            x.values, blob, strip, act_scale=x.scale, out=out, wformat="int4sm"
        )

    return peer


def quant_peers(made: QuantLayer, exact_sums: bool = False) -> dict[str, Peer | Absent]:
    """Those that have a product of the scheme by name, or why they cannot run here.

    cuBLAS's fp8 adds up as serving frameworks call it (``use_fast_accum``); with ``exact_sums``
    there is a contender without that, too.
    """
    scheme = made.scheme
    found: dict[str, tuple[str, Callable[[QuantLayer], Peer]]] = {}
    if scheme.name in SCALED_MM:
        name = SCALED_MM[scheme.name]
        found[name] = "cublaslt", lambda made: _scaled_mm(made, fast_sums=True)
        if exact_sums:
            found[f"{name}, exact sums"] = "cublaslt", lambda made: _scaled_mm(made, False)
    elif scheme.sharing == "block":
        found[FLASHINFER] = "flashinfer", _flashinfer
    elif scheme.weight == "int4" and scheme.group == 128 and not scheme.zero_points:
        make = _quack_w4a16 if scheme.activation is None else _quack_w4a8
        found[QUACK[scheme.name]] = "quack", make
    peers: dict[str, Peer | Absent] = {}
    for name, (library, make_peer) in found.items():
        status = peer_status([library])[library]
        if not isinstance(status, Available):
            peers[name] = status
            continue
        try:
            peers[name] = make_peer(made)
        except (ImportError, AttributeError) as error:
            peers[name] = Absent(f"{library} {status.version}: {error}")
    return peers


def finishing(made: QuantLayer, product: Product, residual: Tensor | None) -> Product:
    """A bare product with the layer's epilogue as separate operations behind it.

    Without an epilogue the product goes where the result does, unless that has a row pitch.
    """
    layer = made.layer
    is_bare = layer.chain_text == "none"
    scratch: list[Tensor] = []

    def run(x: Activations, out: Tensor) -> object:
        if is_bare and out.is_contiguous():
            return product(x, out)
        if not scratch:
            scratch.append(torch.empty(layer.M, layer.N, dtype=layer.dtype, device=out.device))
        product(x, scratch[0])
        finish_into(layer, scratch[0], residual, out)
        return out

    return run
