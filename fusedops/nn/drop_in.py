"""Fused blocks that stand in a Hugging Face model and keep its checkpoint's names.

A fused block holds its weights packed. Its ``state_dict()`` nevertheless has the keys and the exact
tensors of the block that it replaced, and ``load_state_dict()`` packs them again: a checkpoint
written by a converted model loads into a plain one and the other way round.

All tensors that ``DropInGatedMLP.state_dict()`` gives are copies: writing to one leaves
the block as it is. ``DropInMLP`` packs nothing, so its tensors share memory with its parameters, as
those of any ``nn.Module`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from fusedops.check import require_one_dtype
from fusedops.nn.base import gate_and_up
from fusedops.nn.linear import FusedGatedMLP, FusedMLP
from fusedops.packing import unpack_gate_up

__all__ = ["DropInGatedMLP", "DropInMLP"]


class _KeepsNames(nn.Module):
    """Translates between the packed parameters and the tensors under their original names."""

    def original_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the block that was replaced, by its name there, in its order."""
        raise NotImplementedError

    def joint_tensors(self) -> Sequence[Sequence[str]]:
        """Names of the tensors that one packed parameter holds together."""
        return ()

    def packed(self, tensors: Mapping[str, Tensor]) -> Self:
        """A block like this one that holds ``tensors``, named as ``original_tensors`` does."""
        raise NotImplementedError

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, tensor in self.original_tensors().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
        current = self.original_tensors()
        given: dict[str, Tensor] = {}
        for name, tensor in current.items():
            key = prefix + name
            if key not in state_dict:
                missing_keys += [key] if strict else []
            elif state_dict[key].shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {key}: the checkpoint has "
                    f"{tuple(state_dict[key].shape)}, the model {tuple(tensor.shape)}."
                )
            else:
                given[name] = state_dict[key]
        unexpected_keys += [
            key
            for key in state_dict
            if strict and key.startswith(prefix) and key.removeprefix(prefix) not in current
        ]
        if not given:
            return
        for names in self.joint_tensors():
            joint = {prefix + name: given[name] for name in names if name in given}
            require_one_dtype("load_state_dict", **joint)
        assign = local_metadata.get("assign_to_params_buffers", False)
        if not assign:  # as nn.Module does: what is loaded takes the dtype and device of its place
            given = {name: tensor.to(current[name]) for name, tensor in given.items()}
        # Assigned parameters are of the kind of what is loaded, as those of nn.Module are.
        is_inference = any(tensor.is_inference() for tensor in given.values())
        with torch.inference_mode(is_inference), torch.no_grad():
            loaded = dict(self.packed({**current, **given}).named_parameters())
        for name, parameter in list(self.named_parameters()):
            if assign:
                setattr(self, name, loaded[name])
                continue
            try:
                with torch.no_grad():
                    parameter.copy_(loaded[name])
            except RuntimeError as error:  # e.g. a parameter of inference mode, outside of it
                error_msgs.append(f"while copying into {prefix}{name}: {error}")


class DropInGatedMLP(_KeepsNames, FusedGatedMLP):
    """``FusedGatedMLP`` in the place of a model's own gated MLP.

    Attributes:
        halves: the replaced layers' names: (gate, up), or (gate_up,) where one layer held both.
        down_name: the name of the layer behind them.
        biased: the names of those layers that have a bias.
    """

    halves: tuple[str, ...] = ("gate_proj", "up_proj")
    down_name: str = "down_proj"
    biased: frozenset[str] = frozenset()

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], halves: Sequence[str], down: str, act: str
    ) -> Self:
        """Pack ``<layer>.weight`` and ``<layer>.bias`` of the layers ``halves`` and ``down``."""
        (gate, up), (gate_bias, up_bias) = gate_and_up(tensors, halves)
        module = cls.from_weights(
            gate,
            up,
            tensors[f"{down}.weight"],
            act,
            gate_bias,
            up_bias,
            tensors.get(f"{down}.bias"),
        )
        module.halves, module.down_name = tuple(halves), down
        module.biased = frozenset(
            name for name in (*halves, down) if tensors.get(f"{name}.bias") is not None
        )
        return module

    def packed(self, tensors: Mapping[str, Tensor]) -> Self:
        return self.from_tensors(tensors, self.halves, self.down_name, self.act)

    def joint_tensors(self) -> Sequence[Sequence[str]]:
        return [[f"{name}.{kind}" for name in self.halves] for kind in ("weight", "bias")]

    def original_tensors(self) -> dict[str, Tensor]:
        gate, up, down = self.unpacked()
        weights = [*self._as_stored(gate, up), down]
        biases: list[Tensor | None] = [None] * len(self.halves)
        if self.gate_up_bias is not None:
            biases = [*self._as_stored(*unpack_gate_up(self.gate_up_bias, self.intermediate))]
        biases.append(None if self.down_bias is None else self.down_bias.detach().clone())
        found: dict[str, Tensor] = {}
        for name, weight, bias in zip((*self.halves, self.down_name), weights, biases, strict=True):
            found[f"{name}.weight"] = weight
            if bias is not None and name in self.biased:
                found[f"{name}.bias"] = bias
        return found

    def _as_stored(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (gate, up) if len(self.halves) == 2 else (torch.cat((gate, up)),)


class DropInMLP(_KeepsNames, FusedMLP):
    """``FusedMLP`` in the place of a model's own MLP whose layers are called ``layers``."""

    layers: tuple[str, str] = ("up_proj", "down_proj")

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layers: tuple[str, str], act: str) -> Self:
        """Take over ``<layer>.weight`` and ``<layer>.bias`` of the two layers."""
        up, down = layers
        module = cls.from_weights(
            tensors[f"{up}.weight"],
            tensors[f"{down}.weight"],
            act,
            tensors.get(f"{up}.bias"),
            tensors.get(f"{down}.bias"),
        )
        module.layers = layers
        return module

    def packed(self, tensors: Mapping[str, Tensor]) -> Self:
        return self.from_tensors(tensors, self.layers, self.act)

    def original_tensors(self) -> dict[str, Tensor]:
        up, down = self.layers
        named = {
            f"{up}.weight": self.up,
            f"{up}.bias": self.up_bias,
            f"{down}.weight": self.down,
            f"{down}.bias": self.down_bias,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}
