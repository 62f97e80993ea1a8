"""Peers: which are here, why the others are not, and how each runs memory-bound operations.

Products of linear layers are in ``products``.

Nothing is imported before a peer is asked for, so this module costs nothing where none is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.bench.contenders import Contender
from fusedops.bench.cublaslt_abi import library_version
from fusedops.bench.data import Buffers
from fusedops.bench.measurement import Absent
from fusedops.errors import ConfigError, UnsupportedError

__all__ = [
    "PEERS",
    "Available",
    "act_and_mul_peers",
    "add_rms_norm_peers",
    "fresh_compile",
    "peer_status",
    "rms_norm_peers",
    "sum_peers",
]

Check = Callable[[tuple[Tensor, ...], Buffers], str | None]


@dataclass(frozen=True)
class Available:
    """A peer that can run here, with its ``version``."""

    version: str


def _gpu_reason() -> str | None:
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _import_peer(module: str, package: str) -> Available | Absent:
    """Whether a GPU peer's module imports; the reason is the import's own words."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return Absent(f"the package {package} is not installed")
        return Absent(f"{package} {version}: import fails: {error}")
    except Exception as error:  # noqa: BLE001 - a library's import may fail in any way
        return Absent(f"{package} {version}: import fails: {type(error).__name__}: {error}")
    return Available(version or "unpackaged")


def _gpu_package(module: str, package: str) -> Available | Absent:
    reason = _gpu_reason()
    return Absent(reason) if reason is not None else _import_peer(module, package)


def _torch_compile() -> Available | Absent:
    if not torch.cuda.is_available():
        compiler = shutil.which("g++") or shutil.which("clang++")
        return Available(torch.__version__) if compiler else Absent("no C++ compiler for the CPU")
    triton = _import_peer("triton", "triton")
    if isinstance(triton, Absent):
        return Absent(f"it needs Triton: {triton.reason}")
    if not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        return Absent("Triton needs a C compiler for its launchers, and none is on the PATH")
    return Available(torch.__version__)


def _cublaslt() -> Available | Absent:
    reason = _gpu_reason()
    if reason is not None:
        return Absent(reason)
    try:
        return Available(str(library_version()))
    except UnsupportedError as error:
        return Absent(str(error))


_PROBES: dict[str, Callable[[], Available | Absent]] = {
    "torch": lambda: Available(torch.__version__),
    "torch.compile": _torch_compile,
    "cublaslt": _cublaslt,
    "flashinfer": lambda: _gpu_package("flashinfer", "flashinfer-python"),
    "quack": lambda: _gpu_package("quack", "quack-kernels"),
    "cub": lambda: _gpu_package("cuda.compute", "cuda-cccl"),
    "triton": lambda: _gpu_package("triton", "triton"),
}

PEERS = tuple(_PROBES)
"""Every peer by name."""


@functools.cache
def _status(name: str) -> Available | Absent:
    return _PROBES[name]()


def peer_status(names: Sequence[str] = PEERS) -> dict[str, Available | Absent]:
    """Which peers can run here, and exactly why the others cannot. Looked up once a process.

    Raises:
        ConfigError: a name is no peer's.
    """
    for name in names:
        if name not in _PROBES:
            raise ConfigError(f"unknown peer {name!r}; accepted are {', '.join(PEERS)}.")
    return {name: _status(name) for name in names}


def fresh_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` of a contender, which neither inherits nor falls back.

    Functions made from one piece of code share a limit of recompilations, past which torch runs
    them eagerly: after eight shapes the contender would be another one. So earlier compilations
    are dropped, and ``fullgraph`` turns any fall-back into an error.
    """
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def _present(candidates: dict[str, Callable[[], Contender]]) -> list[Contender]:
    """The contenders whose peers are available, made only then."""
    status = peer_status(list(candidates))
    return [make() for name, make in candidates.items() if isinstance(status[name], Available)]


def rms_norm_peers(check: Check, eps: float) -> list[Contender]:
    """RMSNorm of inputs (x, weight), both (rows, columns) and (columns,), as each peer does it."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def compiled() -> Contender:
        function = fresh_compile(plain)
        return Contender("torch.compile", lambda b: function(*b.inputs), check)

    def flashinfer() -> Contender:
        norm = importlib.import_module("flashinfer.norm")
        return Contender("flashinfer", lambda b: norm.rmsnorm(*b.inputs, eps=eps), check)

    def quack() -> Contender:
        rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm_fwd
        return Contender("quack", lambda b: rmsnorm(*b.inputs, eps=eps)[0], check)

    def triton() -> Contender:
        kernel = importlib.import_module("fusedops.bench.triton_kernels").rms_norm
        return Contender("triton", lambda b: kernel(*b.inputs, eps), check)

    return _present(
        {
            "torch": lambda: Contender("torch", lambda b: plain(*b.inputs), check),
            "torch.compile": compiled,
            "flashinfer": flashinfer,
            "quack": quack,
            "triton": triton,
        }
    )


def add_rms_norm_peers(check: Check, eps: float) -> list[Contender]:
    """Residual add and RMSNorm of inputs (x, residual, weight); results are (normed, new residual).

    FlashInfer works in place: its contender overwrites x and residual and is checked once.
    """

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        added = x + residual
        return F.rms_norm(added, (x.shape[-1],), weight, eps), added

    def compiled() -> Contender:
        function = fresh_compile(plain)
        return Contender("torch.compile", lambda b: function(*b.inputs), check)

    def flashinfer() -> Contender:
        norm = importlib.import_module("flashinfer.norm")

        def run(buffers: Buffers) -> tuple[Tensor, Tensor]:
            x, residual, weight = buffers.inputs
            norm.fused_add_rmsnorm(x, residual, weight, eps=eps)
            return x, residual

        return Contender("flashinfer", run, check, in_place=True)

    def quack() -> Contender:
        rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm_fwd

        def run(buffers: Buffers) -> tuple[Tensor, Tensor]:
            x, residual, weight = buffers.inputs
            normed, added, _ = rmsnorm(x, weight, residual=residual, eps=eps)
            return normed, added

        return Contender("quack", run, check)

    return _present(
        {
            "torch": lambda: Contender("torch", lambda b: plain(*b.inputs), check),
            "torch.compile": compiled,
            "flashinfer": flashinfer,
            "quack": quack,
        }
    )


def act_and_mul_peers(check: Check) -> list[Contender]:
    """``silu(x[:, :d]) * x[:, d:]`` of one input (rows, 2 d)."""

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def compiled() -> Contender:
        function = fresh_compile(plain)
        return Contender("torch.compile", lambda b: function(*b.inputs), check)

    def flashinfer() -> Contender:
        activation = importlib.import_module("flashinfer.activation")
        return Contender("flashinfer", lambda b: activation.silu_and_mul(*b.inputs), check)

    return _present(
        {
            "torch": lambda: Contender("torch", lambda b: plain(*b.inputs), check),
            "torch.compile": compiled,
            "flashinfer": flashinfer,
        }
    )


class _Stream:
    """torch's current stream in the form that NVIDIA's Python libraries ask for."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def sum_peers(check: Check) -> list[Contender]:
    """The sum of all elements of one input, a contiguous float32 or int32 tensor; shape (1,)."""

    def cub() -> Contender:
        import numpy as np

        compute = importlib.import_module("cuda.compute")

        def prepare(buffers: Buffers) -> Any:
            data = buffers.inputs[0].flatten()
            out = torch.empty(1, dtype=data.dtype, device=data.device)
            start = np.zeros(1, dtype=str(data.dtype).removeprefix("torch."))
            reduce = compute.make_reduce_into(
                d_in=data, d_out=out, op=compute.OpKind.PLUS, h_init=start
            )
            call = {"d_in": data, "d_out": out, "op": compute.OpKind.PLUS, "h_init": start}
            call |= {"num_items": data.numel(), "stream": _Stream()}
            size = reduce(temp_storage=None, **call)
            storage = torch.empty(max(int(size), 1), dtype=torch.uint8, device=data.device)
            return reduce, storage, call, out

        def run(state: Any) -> Tensor:
            reduce, storage, call, out = state
            reduce(temp_storage=storage, **call)
            return out  # type: ignore[no-any-return]

        return Contender("cub", run, check, prepare=prepare)

    def plain(buffers: Buffers) -> Tensor:
        return torch.sum(buffers.inputs[0], dtype=buffers.inputs[0].dtype).view(1)

    return _present({"torch": lambda: Contender("torch", plain, check), "cub": cub})
