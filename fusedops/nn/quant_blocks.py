"""Feed-forward and attention blocks of quantized layers.

A block is made of ``QuantLinear`` layers, and its ``state_dict()`` holds theirs:
``gate_up.weight``, ``gate_up.weight_scale`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from fusedops.check import require_integer
from fusedops.errors import ShapeError
from fusedops.nn.base import gate_and_up
from fusedops.nn.norm import RMSNorm
from fusedops.nn.quant_linear import QuantizedActivations, QuantLinear
from fusedops.packing import pack_gate_up, padded_gate_rows
from fusedops.quant import Scheme

__all__ = ["QuantGatedMLP", "QuantMLP", "QuantQKV"]


def _joined_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> list[Tensor] | None:
    """The biases of parts of one weight, zeros where one is absent; None where all are."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    return [
        given[0].new_zeros(size) if bias is None else bias.reshape(-1)
        for bias, size in zip(biases, sizes, strict=True)
    ]


class QuantGatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x)) + residual`` with quantized weights.

    Layers: ``gate_up``, rows interleaved in blocks of 8 (``fusedops.packing``), and ``down``
    (hidden, F'), where F' is the intermediate size rounded up to a multiple of 8. What ``down``
    takes is quantized in the epilogue of ``gate_up`` where its scheme allows that.

    Attributes:
        halves, down_name: the names under which ``load_state_dict`` also takes the floating-point
            weights of an unquantized block: (gate, up), or one layer that holds both.
    """

    halves: tuple[str, ...] = ("gate_proj", "up_proj")
    down_name: str = "down_proj"

    def __init__(self, gate_up: QuantLinear, down: QuantLinear, intermediate: int) -> None:
        """A block of the two layers.

        Raises:
            ConfigError: ``intermediate`` is no integer >= 0.
            ShapeError: the layers do not fit one another.
        """
        super().__init__()
        require_integer("QuantGatedMLP", "intermediate", intermediate, 0)
        padded = padded_gate_rows(intermediate)
        if gate_up.out_features != 2 * padded or down.in_features != padded:
            raise ShapeError(
                f"QuantGatedMLP: gate_up has {gate_up.out_features} rows and down "
                f"{down.in_features} columns; accepted for intermediate={intermediate} are "
                f"{2 * padded} and {padded}."
            )
        self.intermediate = intermediate
        self.gate_up, self.down = gate_up, down

    @classmethod
    def from_weights(
        cls,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        scheme: Scheme | str | None = "fp8",
        act: str = "silu",
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        down_scheme: Scheme | str | None = "same",
        down_input_scale: Tensor | None = None,
    ) -> Self:
        """Quantize gate (F, H), up (F, H) and down (H, F); biases are kept.

        Args:
            gate, up, down, gate_bias, up_bias, down_bias: of the layers.
            scheme: of ``gate_up``; None leaves it as it is.
            act: the gate's activation.
            down_scheme: of ``down``; ``same``: as ``scheme``.
            down_input_scale: a static scale of what ``down`` takes.

        Raises:
            ConfigError, DTypeError, ShapeError: an argument is not as described.
        """
        intermediate, hidden = gate.shape
        if tuple(down.shape) != (hidden, intermediate):
            raise ShapeError(
                f"QuantGatedMLP: gate is {tuple(gate.shape)}, down {tuple(down.shape)}; accepted: "
                f"down ({hidden}, {intermediate})."
            )
        biases = _joined_bias((gate_bias, up_bias), (intermediate, intermediate))
        joint = None if biases is None else pack_gate_up(*biases)
        packed = pack_gate_up(gate, up)
        first = QuantLinear.from_weights(packed, joint, scheme, gate=act, name="gate or up")
        padding = padded_gate_rows(intermediate) - intermediate
        second = QuantLinear.from_weights(
            nn.functional.pad(down, (0, padding)),
            down_bias,
            scheme if down_scheme == "same" else down_scheme,
            input_scale=down_input_scale,
            name="down",
        )
        return cls(first, second, intermediate)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        halves: Sequence[str],
        down: str,
        act: str,
        schemes: Mapping[str, Scheme],
    ) -> Self:
        """Quantize ``<layer>.weight`` of the layers ``halves`` and ``down``, each by its scheme.

        Biases are ``<layer>.bias``. ``halves`` are (gate, up), or one layer with gate above up.
        """
        (gate, up), (gate_bias, up_bias) = gate_and_up(tensors, halves)
        block = cls.from_weights(
            gate,
            up,
            tensors[f"{down}.weight"],
            schemes[halves[0]],
            act,
            gate_bias,
            up_bias,
            tensors.get(f"{down}.bias"),
            down_scheme=schemes[down],
        )
        block.halves, block.down_name = tuple(halves), down
        return block

    def forward(
        self,
        x: Tensor | QuantizedActivations,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """x (..., hidden) -> (..., hidden); ``norm`` is applied to x first, ``residual`` added."""
        gated = self.gate_up.into(self.down, x, norm)
        result: Tensor = self.down(gated, residual)
        return result

    def extra_repr(self) -> str:
        """Size and activation, for ``print(model)``."""
        return f"intermediate={self.intermediate}, act={self.gate_up.gate!r}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # The layers load what their parent leaves under their names.
        padded = padded_gate_rows(self.intermediate)
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}.{kind}" for name in self.halves]
            if all(key in state_dict for key in keys):
                parts = [state_dict.pop(key) for key in keys]
                halves = parts[0].chunk(2) if len(parts) == 1 else parts
                state_dict[f"{prefix}gate_up.{kind}"] = pack_gate_up(*halves)
            key = f"{prefix}{self.down_name}.{kind}"
            if key in state_dict:
                given = state_dict.pop(key)
                padding = (0, padded - self.intermediate) if kind == "weight" else (0, 0)
                state_dict[f"{prefix}down.{kind}"] = nn.functional.pad(given, padding)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


class QuantMLP(nn.Module):
    """``down(act(up(x))) + residual`` with quantized weights: the block without a gate.

    Attributes:
        layers: the names under which ``load_state_dict`` also takes the floating-point weights of
            an unquantized block.
    """

    layers: tuple[str, str] = ("up_proj", "down_proj")

    def __init__(self, up: QuantLinear, down: QuantLinear) -> None:
        """A block of the two layers; ShapeError where they do not fit one another."""
        super().__init__()
        if up.out_features != down.in_features:
            raise ShapeError(
                f"QuantMLP: up has {up.out_features} rows and down {down.in_features} columns; "
                "accepted are as many."
            )
        self.up, self.down = up, down

    @classmethod
    def from_weights(
        cls,
        up: Tensor,
        down: Tensor,
        scheme: Scheme | str | None = "fp8",
        act: str = "gelu",
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        down_scheme: Scheme | str | None = "same",
        down_input_scale: Tensor | None = None,
    ) -> Self:
        """Quantize up (F, H) and down (H, F), see ``QuantGatedMLP.from_weights``."""
        first = QuantLinear.from_weights(up, up_bias, scheme, activation=act, name="up")
        second = QuantLinear.from_weights(
            down,
            down_bias,
            scheme if down_scheme == "same" else down_scheme,
            input_scale=down_input_scale,
            name="down",
        )
        return cls(first, second)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        layers: tuple[str, str],
        act: str,
        schemes: Mapping[str, Scheme],
    ) -> Self:
        """Quantize ``<layer>.weight`` of the two layers, each by its scheme; biases are kept."""
        up, down = layers
        block = cls.from_weights(
            tensors[f"{up}.weight"],
            tensors[f"{down}.weight"],
            schemes[up],
            act,
            tensors.get(f"{up}.bias"),
            tensors.get(f"{down}.bias"),
            down_scheme=schemes[down],
        )
        block.layers = layers
        return block

    def forward(
        self,
        x: Tensor | QuantizedActivations,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """x (..., hidden) -> (..., hidden); ``norm`` is applied to x first, ``residual`` added."""
        activated = self.up.into(self.down, x, norm)
        result: Tensor = self.down(activated, residual)
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, own in zip(self.layers, ("up", "down"), strict=True):
            for kind in ("weight", "bias"):
                if f"{prefix}{name}.{kind}" in state_dict:
                    state_dict[f"{prefix}{own}.{kind}"] = state_dict.pop(f"{prefix}{name}.{kind}")
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


class QuantQKV(nn.Module):
    """The query, key and value projections as one quantized kernel.

    Layer: ``joint``, rows in the order q, k, v. In the scheme ``fp8-block`` its blocks of 128 rows
    are those of the joint weight.
    """

    def __init__(self, joint: QuantLinear, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """The block of a joint layer; ShapeError where its rows are not those of the heads."""
        super().__init__()
        rows = (n_heads + 2 * n_kv_heads) * head_dim
        if joint.out_features != rows:
            raise ShapeError(
                f"QuantQKV: the joint layer has {joint.out_features} rows; accepted are {rows} "
                f"for {n_heads} + 2 x {n_kv_heads} heads of {head_dim}."
            )
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.joint = joint

    @classmethod
    def from_weights(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        scheme: Scheme | str | None = "fp8",
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Self:
        """Join and quantize q (n_heads * head_dim, hidden), k and v (n_kv_heads * head_dim, ...).

        Raises:
            ConfigError, DTypeError, ShapeError: an argument is not as described.
        """
        parts = _joined_bias((q_bias, k_bias, v_bias), (len(q), len(k), len(v)))
        bias = None if parts is None else torch.cat(parts)
        joint = QuantLinear.from_weights(torch.cat((q, k, v)), bias, scheme, name="q, k or v")
        return cls(joint, n_heads, n_kv_heads, head_dim)

    def forward(
        self, x: Tensor | QuantizedActivations, norm: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, hidden) -> q (T, n_heads, head_dim), k and v (T, n_kv_heads, head_dim).

        The three are views of one buffer. ``norm`` is applied to x first.
        """
        joint: Tensor = self.joint(x, norm=norm)
        count = self.n_heads + 2 * self.n_kv_heads
        heads = joint.view(*joint.shape[:-1], count, self.head_dim)
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=-2)
        return q, k, v

    def extra_repr(self) -> str:
        """Head counts, for ``print(model)``."""
        return f"heads={self.n_heads}, kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"
