"""Linear layers whose bias, activation, gate and residual run in the GEMM's epilogue.

Under ``torch.autocast`` each product computes as ``nn.Linear`` does there: in autocast's dtype,
whatever the dtypes of x and of the parameters, which are cast at every call. (``convert`` with that
dtype as its policy casts them once.)
"""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from fusedops.check import require_bool, require_one_dtype
from fusedops.epilogue.activations import lookup
from fusedops.errors import ShapeError
from fusedops.nn.base import (
    autocast_dtype,
    empty_parameter,
    frozen,
    require_bias,
    require_sizes,
    require_weights,
    run_dense,
)
from fusedops.nn.norm import RMSNorm, require_norm
from fusedops.packing import pack_gate_up, padded_gate_rows, unpack_gate_up

__all__ = ["FusedGatedMLP", "FusedLinear", "FusedMLP", "FusedQKV"]


def _joined(*steps: str | None) -> str:
    return "|".join(step for step in steps if step) or "none"


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    step: str | None = None,
    residual: Tensor | None = None,
    norm: RMSNorm | None = None,
) -> Tensor:
    """``step(norm(x) @ weight.T + bias) + residual`` with whatever of the four is there.

    Raises:
        ConfigError: ``norm`` is no ``fusedops.nn.RMSNorm``.
    """
    require_norm(norm)
    if norm is not None and autocast_dtype(x) is not None:
        # Autocast casts what goes into a product, never what goes into a norm.
        x, norm = norm.normalize(x), None
    epilogue = _joined(
        "bias" if bias is not None else None,
        step,
        "residual" if residual is not None else None,
    )
    operands: list[Tensor | None] = [t for t in (bias, residual) if t is not None]
    if norm is None:
        return run_dense(x, weight, epilogue, operands)
    return run_dense(x, weight, epilogue, [norm.weight, None, *operands], norm.prologue)


class FusedLinear(nn.Linear):
    """``activation(x @ weight.T + bias) + residual`` as one kernel.

    Parameters: ``weight`` (out_features, in_features), ``bias`` (out_features,) or None; frozen.

    It is an ``nn.Linear``, so that adapter libraries find it and may wrap it. They add to the
    layer's result: with an activation, that would be after the activation, so wrap none such.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"in_features": in_features, "out_features": out_features}
        require_sizes("FusedLinear", dtype, **sizes)
        require_bool("FusedLinear", bias=bias)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.requires_grad_(False)
        self.activation = activation
        if activation is not None:
            lookup(activation)
        steps = ("bias" if bias else None, f"act({activation})" if activation else None)
        self._epilogue = _joined(*steps)
        self._epilogue_residual = _joined(*steps, "residual")

    def reset_parameters(self) -> None:
        """Draw nothing: parameters are loaded, and drawing them would cost seconds a model."""

    @classmethod
    def from_weights(
        cls, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Self:
        """A module that takes over an nn.Linear's weight (out, in) and bias (out,)."""
        require_weights("FusedLinear", weight=weight)
        require_bias("FusedLinear", "bias", bias, weight.shape[0])
        module = cls(
            weight.shape[1], weight.shape[0], bias is not None, activation=activation, device="meta"
        )
        module.weight = frozen(weight)
        if bias is not None:
            module.bias = frozen(bias.reshape(-1))
        return module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (..., in_features) -> (..., out_features), plus ``residual`` of the result's shape."""
        bias: Tensor | None = self.bias
        operands: list[Tensor | None] = [] if bias is None else [bias]
        if residual is None:
            return run_dense(x, self.weight, self._epilogue, operands)
        return run_dense(x, self.weight, self._epilogue_residual, [*operands, residual])

    def extra_repr(self) -> str:
        """Sizes and epilogue, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, epilogue={self._epilogue!r}"


class FusedGatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x)) + residual`` as two kernels.

    Parameters: ``gate_up`` holds both projections with rows interleaved in blocks of 8
    (``fusedops.packing``); ``down`` (hidden, F'), where F' is the intermediate size rounded up to a
    multiple of 8 and the added columns are zero, so they contribute nothing.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        act: str = "silu",
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        lookup(act)
        require_sizes("FusedGatedMLP", dtype, hidden=hidden, intermediate=intermediate)
        require_bool("FusedGatedMLP", bias=bias)
        self.hidden, self.intermediate, self.act = hidden, intermediate, act
        padded = padded_gate_rows(intermediate)
        empty = partial(empty_parameter, dtype=dtype, device=device)
        self.gate_up = empty(2 * padded, hidden)
        self.down = empty(hidden, padded)
        self.gate_up_bias = empty(2 * padded) if bias else None
        self.down_bias = empty(hidden) if bias else None

    @classmethod
    def from_weights(
        cls,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        act: str = "silu",
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Self:
        """Pack gate (F, H), up (F, H) and down (H, F); an absent gate or up bias is zero."""
        require_weights("FusedGatedMLP", gate=gate, up=up, down=down)
        intermediate, hidden = gate.shape
        require_bias("FusedGatedMLP", "gate_bias", gate_bias, intermediate)
        require_bias("FusedGatedMLP", "up_bias", up_bias, intermediate)
        require_bias("FusedGatedMLP", "down_bias", down_bias, hidden)
        if tuple(down.shape) != (hidden, intermediate):
            raise ShapeError(
                f"FusedGatedMLP: gate is {tuple(gate.shape)}, down {tuple(down.shape)}; accepted: "
                f"down ({hidden}, {intermediate})."
            )
        module = cls(hidden, intermediate, act, device="meta")
        module.gate_up = frozen(pack_gate_up(gate, up))
        padding = padded_gate_rows(intermediate) - intermediate
        module.down = frozen(nn.functional.pad(down, (0, padding)))
        if gate_bias is not None or up_bias is not None:
            given = [b for b in (gate_bias, up_bias) if b is not None]
            zero = given[0].new_zeros(intermediate)
            halves = (zero if b is None else b.reshape(-1) for b in (gate_bias, up_bias))
            module.gate_up_bias = frozen(pack_gate_up(*halves))
        if down_bias is not None:
            module.down_bias = frozen(down_bias.reshape(-1))
        return module

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """(gate, up, down) exactly as they were given to ``from_weights``: copies."""
        gate, up = unpack_gate_up(self.gate_up, self.intermediate)
        down = self.down.detach()[:, : self.intermediate]
        return gate, up, down.clone(memory_format=torch.contiguous_format)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """x (..., hidden) -> (..., hidden); ``residual`` of the same shape is added.

        ``norm`` is applied to x first, as the prologue of the first product.
        """
        gated = _run(x, self.gate_up, self.gate_up_bias, f"gate({self.act})", norm=norm)
        return _run(gated, self.down, self.down_bias, residual=residual)

    def extra_repr(self) -> str:
        """Sizes and activation, for ``print(model)``."""
        return f"{self.hidden}, {self.intermediate}, act={self.act!r}"


class FusedMLP(nn.Module):
    """``down(act(up(x))) + residual`` as two kernels: the feed-forward block without a gate.

    Parameters: ``up`` (intermediate, hidden), ``down`` (hidden, intermediate), and ``up_bias``
    (intermediate,), ``down_bias`` (hidden,) or None; frozen.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        act: str = "gelu",
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        lookup(act)
        require_sizes("FusedMLP", dtype, hidden=hidden, intermediate=intermediate)
        require_bool("FusedMLP", bias=bias)
        self.hidden, self.intermediate, self.act = hidden, intermediate, act
        empty = partial(empty_parameter, dtype=dtype, device=device)
        self.up = empty(intermediate, hidden)
        self.down = empty(hidden, intermediate)
        self.up_bias = empty(intermediate) if bias else None
        self.down_bias = empty(hidden) if bias else None

    @classmethod
    def from_weights(
        cls,
        up: Tensor,
        down: Tensor,
        act: str = "gelu",
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Self:
        """A module that takes over up (F, H), down (H, F) and their biases."""
        require_weights("FusedMLP", up=up, down=down)
        intermediate, hidden = up.shape
        require_bias("FusedMLP", "up_bias", up_bias, intermediate)
        require_bias("FusedMLP", "down_bias", down_bias, hidden)
        if tuple(down.shape) != (hidden, intermediate):
            raise ShapeError(
                f"FusedMLP: up is {tuple(up.shape)}, down {tuple(down.shape)}; accepted: down "
                f"({hidden}, {intermediate})."
            )
        module = cls(hidden, intermediate, act, device="meta")
        module.up, module.down = frozen(up), frozen(down)
        if up_bias is not None:
            module.up_bias = frozen(up_bias.reshape(-1))
        if down_bias is not None:
            module.down_bias = frozen(down_bias.reshape(-1))
        return module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (..., hidden) -> (..., hidden); ``residual`` of the same shape is added."""
        activated = _run(x, self.up, self.up_bias, f"act({self.act})")
        return _run(activated, self.down, self.down_bias, residual=residual)

    def extra_repr(self) -> str:
        """Sizes and activation, for ``print(model)``."""
        return f"{self.hidden}, {self.intermediate}, act={self.act!r}"


class FusedQKV(nn.Module):
    """The query, key and value projections as one kernel.

    Parameters: ``weight`` ((n_heads + 2 * n_kv_heads) * head_dim, hidden), rows in the order q, k,
    v; ``bias`` of as many elements, or None.
    """

    def __init__(
        self,
        hidden: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        require_sizes("FusedQKV", dtype, hidden=hidden, **sizes)
        require_bool("FusedQKV", bias=bias)
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        rows = (n_heads + 2 * n_kv_heads) * head_dim
        self.weight = frozen(torch.empty(rows, hidden, dtype=dtype, device=device))
        self.bias = frozen(torch.empty(rows, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_weights(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Self:
        """Join q (n_heads * head_dim, hidden), k and v (n_kv_heads * head_dim, hidden)."""
        require_weights("FusedQKV", q=q, k=k, v=v)
        for name, tensor, heads in (("q", q, n_heads), ("k", k, n_kv_heads), ("v", v, n_kv_heads)):
            if tuple(tensor.shape) != (heads * head_dim, q.shape[1]):
                raise ShapeError(
                    f"FusedQKV: {name} has shape {tuple(tensor.shape)}; accepted: "
                    f"({heads} heads x {head_dim}, {q.shape[1]})."
                )
        module = cls(q.shape[1], n_heads, n_kv_heads, head_dim, device="meta")
        module.weight = frozen(torch.cat((q, k, v)))
        biases = (q_bias, k_bias, v_bias)
        for name, bias, tensor in zip("qkv", biases, (q, k, v), strict=True):
            require_bias("FusedQKV", f"{name}_bias", bias, tensor.shape[0])
        require_one_dtype("FusedQKV", q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
        given = [bias for bias in biases if bias is not None]
        if given:
            parts = [
                given[0].new_zeros(tensor.shape[0]) if bias is None else bias.reshape(-1)
                for bias, tensor in zip(biases, (q, k, v), strict=True)
            ]
            module.bias = frozen(torch.cat(parts))
        return module

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, hidden) -> q (T, n_heads, head_dim), k and v (T, n_kv_heads, head_dim).

        The three are views of one buffer. ``norm`` is applied to x first, as its prologue.
        """
        joint = _run(x, self.weight, self.bias, norm=norm)
        count = self.n_heads + 2 * self.n_kv_heads
        heads = joint.view(*joint.shape[:-1], count, self.head_dim)
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=-2)
        return q, k, v

    def extra_repr(self) -> str:
        """Head counts, for ``print(model)``."""
        return f"heads={self.n_heads}, kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"
