"""Read a Hugging Face folder: config.json, safetensors (one file or sharded) and tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedops.errors import LoadError
from serving_demo.checkpoint import Checkpoint, Track, check_shapes, no_progress
from serving_demo.config import config_from_hf
from serving_demo.files import read_json, require_content
from serving_demo.tokenizer import TOKENIZER_FILE, tokenizer_from_folder

__all__ = ["load_folder"]

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


def _require_parts(folder: Path) -> None:
    """Raise LoadError with everything that the folder lacks, and what it might be instead."""
    missing = [name for name in (_CONFIG, TOKENIZER_FILE) if not (folder / name).is_file()]
    if not (folder / _SINGLE).is_file() and not (folder / _INDEX).is_file():
        missing.append(f"{_SINGLE} (or {_INDEX} with its shards)")
    if not missing:
        return
    hint = f"a folder holds {_CONFIG}, {TOKENIZER_FILE} and safetensors"
    other = sorted(file.name for file in folder.iterdir() if file.suffix == ".gguf")
    if other:
        hint = f"for a GGUF file name the file itself, --model {folder / other[0]}"
    elif any(folder.glob("pytorch_model*.bin")):
        hint += "; its pytorch_model*.bin is not read, so save the model as safetensors"
    raise LoadError(f"{folder} lacks {', '.join(missing)}; {hint} (--model).")


def _shards(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
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

    if not (folder / _CONFIG).is_file():
        _require_parts(folder)
    values = read_json(folder / _CONFIG)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else None
    config = config_from_hf(values, str(folder / _CONFIG), generation)
    # Another architecture is the first thing to know, whatever else the folder lacks.
    _require_parts(folder)
    tokenizer = tokenizer_from_folder(folder)
    homes: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stored: set[str] = set()
    for shard in _shards(folder):
        try:
            require_content(shard)
            file: Any = safe_open(shard, framework="pt")
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise LoadError(
                f"{shard} is damaged or truncated: {reason}. Fetch the file again."
            ) from None
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
