"""``Checkpoint``: a model as read from disk, under Hugging Face's tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fusedops.errors import LoadError
from serving_demo.config import ModelConfig, each_tensor

if TYPE_CHECKING:
    from serving_demo.tokenizer import DemoTokenizer

__all__ = ["Checkpoint", "Track", "check_shapes", "no_progress"]

Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Wraps the items of a long loop, with a label for the progress bar."""


def no_progress(items: Sequence[Any], label: str) -> Iterable[Any]:
    """A ``Track`` that shows nothing."""
    return items


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration, weights and tokenizer.

    Attributes:
        config: its shape.
        tensors: every tensor of ``each_tensor(config)``, on the CPU, in the dtype asked for.
        tokenizer: its tokenizer.
        rope_factors: (head_dim / 2,) float32 divisors of the rotary frequencies that a GGUF file
            may carry (llama.cpp stores Llama 3's scaling so); None without.
        path: the file or folder.
        weight_format: how the weights are stored there, e.g. ``GGUF, Q4_1 and Q8_0``.
        hf_config: the parsed config.json; None for a GGUF file.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: DemoTokenizer
    rope_factors: Tensor | None
    path: Path
    weight_format: str
    hf_config: Mapping[str, Any] | None = None


def check_shapes(
    shapes: Mapping[str, Sequence[int]],
    config: ModelConfig,
    where: str,
    file_name: Callable[[str], str] = str,
) -> None:
    """Raise LoadError unless a file holds exactly the tensors of such a model, in their shapes.

    Args:
        shapes: the file's tensors under Hugging Face's names.
        config: the model.
        where: the file's name, for messages.
        file_name: Hugging Face's name of a tensor -> the file's own.
    """
    wanted: set[str] = set()
    # One by one: a damaged layer count must end at the first tensor that is not there.
    for name, shape in each_tensor(config):
        wanted.add(name)
        got = shapes.get(name)
        if got is None:
            raise LoadError(f"{where}: the tensor {file_name(name)!r} is missing.")
        if tuple(got) != shape:
            raise LoadError(
                f"{where}: the tensor {file_name(name)!r} has shape {tuple(got)}; the "
                f"configuration asks for {shape}."
            )
    unknown = sorted(set(shapes) - wanted)
    if unknown:
        raise LoadError(
            f"{where}: the tensor {file_name(unknown[0])!r} is no part of a "
            f"{config.architecture} model as the configuration describes it"
            + (f" (nor are {len(unknown) - 1} others)." if len(unknown) > 1 else ".")
        )
