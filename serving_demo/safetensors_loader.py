"""Read a Hugging Face folder: config.json, safetensors (one file or sharded) and tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import LoadError
from serving_demo.checkpoint import Checkpoint, Track, check_shapes, no_progress
from serving_demo.config import config_from_hf
from serving_demo.files import read_json
from serving_demo.tokenizer import tokenizer_from_folder

__all__ = ["load_folder"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


def _shards(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise LoadError(f"{folder} has neither {_SINGLE} nor {_INDEX}.")
    index = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise LoadError(f"{folder / _INDEX}: the field 'weight_map' is missing or empty.")
    names = sorted({str(name) for name in index.values()})
    for name in names:
        # A shard is a plain file of this folder; an index may not name one elsewhere.
        if Path(name).name != name:
            raise LoadError(f"{folder / _INDEX} names the shard {name!r}, which is no plain file.")
        if not (folder / name).is_file():
            raise LoadError(f"{folder / name} is missing, but {_INDEX} names it.")
    return [folder / name for name in names]


def load_folder(
    folder: Path, dtype: torch.dtype = torch.float32, track: Track = no_progress
) -> Checkpoint:
    """Read a Llama-family model from a Hugging Face folder; tensors are cast to ``dtype``.

    Args:
        folder: holds config.json, tokenizer.json and model.safetensors or its sharded form.
        dtype: dtype of the returned tensors.
        track: wraps the loop over tensors to show progress.

    Raises:
        LoadError: a file is missing or damaged, the architecture is another, a tensor is missing
            or has another shape or dtype than accepted.
    """
    from safetensors import SafetensorError, safe_open

    values = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else None
    config = config_from_hf(values, str(folder / "config.json"), generation)
    tokenizer = tokenizer_from_folder(folder)
    homes: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stored: set[str] = set()
    for shard in _shards(folder):
        try:
            file: Any = safe_open(shard, framework="pt")
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{shard} is damaged or truncated: {error}.") from None
        for name in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            # Older checkpoints store the rotary frequencies, and some a tied output head again;
            # both follow from the rest.
            tied_head = name == "lm_head.weight" and config.tied_embeddings
            if name.endswith(".rotary_emb.inv_freq") or tied_head:
                continue
            piece = file.get_slice(name)
            if piece.get_dtype() not in _DTYPES:
                raise LoadError(
                    f"{shard}: the tensor {name!r} is stored as {piece.get_dtype()}; accepted are "
                    f"{', '.join(_DTYPES)}."
                )
            homes[name], shapes[name] = file, tuple(piece.get_shape())
            stored.add(piece.get_dtype())
    check_shapes(shapes, config, str(folder))
    tensors: dict[str, Tensor] = {
        name: homes[name].get_tensor(name).to(dtype) for name in track(list(homes), "loading")
    }
    return Checkpoint(
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        rope_factors=None,
        path=folder,
        weight_format=f"safetensors, {', '.join(sorted(stored))}",
        hf_config=values,
    )
