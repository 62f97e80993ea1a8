"""What of a decoder's configuration decides which kernels it takes."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DecoderSizes", "ModelSizes"]


class ModelSizes(Protocol):
    """What of a decoder's configuration its kernels depend on."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def activation(self) -> str: ...


class DecoderSizes(ModelSizes, Protocol):
    """What of a decoder's configuration its products depend on."""

    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
