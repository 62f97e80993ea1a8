"""Peers: which are here, why the others are not, and how each runs memory-bound operations.

Products of linear layers are in ``products``.

Nothing is imported before a peer is asked for, so this module costs nothing where none is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import shutil
import time
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
from fusedops.epilogue.activations import ACTIVATIONS
from fusedops.errors import ConfigError, UnsupportedError

__all__ = [
    "COMPILE_BUDGET",
    "PEERS",
    "Available",
    "CompileBudget",
    "act_and_mul_peers",
    "add_rms_norm_peers",
    "compiled_peers",
    "fresh_compile",
    "layer_norm_peers",
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


class CompileBudget:
    """Seconds that torch.compile may take from the memory-bound rows of one process.

    Each row has a function of its own to compile, which takes seconds: some fifty of them would
    take more of a run than all that is measured.

    Args:
        limit_s: once so much is spent, later rows go without it and say so.
        clock: seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.limit_s = limit_s
        self.spent_s = 0.0
        self._clock = clock

    def status(self) -> Available | Absent:
        """Whether torch.compile works here and has time left."""
        status = peer_status(["torch.compile"])["torch.compile"]
        if isinstance(status, Available) and self.spent_s >= self.limit_s:
            return Absent(
                f"left out: compiling had taken {self.spent_s:.0f} s of this run, and "
                f"{self.limit_s:.0f} s are allowed"
            )
        return status

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``fresh_compile`` whose first call, in which torch compiles, counts."""
        compiled = fresh_compile(function)
        is_first = True

        def call(*args: Any) -> Any:
            nonlocal is_first
            if not is_first:
                return compiled(*args)
            is_first = False
            start = self._clock()
            try:
                return compiled(*args)
            finally:
                self.spent_s += self._clock() - start

        return call


COMPILE_BUDGET = CompileBudget(30.0)
"""What the rows of this process share."""


def compiled_peers(function: Callable[..., Any], check: Check) -> list[Contender]:
    """``function`` of a row's inputs by torch.compile, where it works and has time left."""
    if not isinstance(COMPILE_BUDGET.status(), Available):
        return []
    compiled = COMPILE_BUDGET.compile(function)
    return [Contender("torch.compile", lambda b: compiled(*b.inputs), check)]


def _with_compiled(
    function: Callable[..., Any], check: Check, found: list[Contender]
) -> list[Contender]:
    """torch first, its compiled form second, then the others."""
    plain = [Contender("torch", lambda b: function(*b.inputs), check)]
    return [*plain, *compiled_peers(function, check), *found]


def _present(candidates: dict[str, Callable[[], Contender]]) -> list[Contender]:
    """The contenders whose peers are available, made only then."""
    status = peer_status(list(candidates))
    return [make() for name, make in candidates.items() if isinstance(status[name], Available)]


def rms_norm_peers(check: Check, eps: float) -> list[Contender]:
    """RMSNorm of inputs (x, weight), both (rows, columns) and (columns,), as each peer does it."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def flashinfer() -> Contender:
        norm = importlib.import_module("flashinfer.norm")
        return Contender("flashinfer", lambda b: norm.rmsnorm(*b.inputs, eps=eps), check)

    def quack() -> Contender:
        rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm_fwd
        return Contender("quack", lambda b: rmsnorm(*b.inputs, eps=eps)[0], check)

    def triton() -> Contender:
        from fusedops.bench.triton_kernels import rms_norm

        return Contender("triton", lambda b: rms_norm(b.inputs[0], b.inputs[1], eps), check)

    others = _present({"flashinfer": flashinfer, "quack": quack, "triton": triton})
    return _with_compiled(plain, check, others)


def add_rms_norm_peers(check: Check, eps: float) -> list[Contender]:
    """Residual add and RMSNorm of inputs (x, residual, weight); results are (normed, new residual).

    FlashInfer works in place: its contender overwrites x and residual and is checked once.
    """

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        added = x + residual
        return F.rms_norm(added, (x.shape[-1],), weight, eps), added

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

    return _with_compiled(plain, check, _present({"flashinfer": flashinfer, "quack": quack}))


def layer_norm_peers(check: Check, eps: float) -> list[Contender]:
    """LayerNorm of inputs (x, weight, bias), the parameters in float32.

    torch wants them in the dtype of ``x``; they are converted outside the timing. Those of
    FlashInfer and QuACK are float32.
    """

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def converted(buffers: Buffers) -> tuple[Tensor, ...]:
        x, *parameters = buffers.inputs
        return (x, *(parameter.to(x.dtype) for parameter in parameters))

    # Looked up when they run, so that a release without them is a row with that reason.
    def by(module: str, function: str) -> Callable[[Buffers], Tensor]:
        def run(buffers: Buffers) -> Tensor:
            norm = getattr(importlib.import_module(module), function)
            return norm(*buffers.inputs, eps=eps)  # type: ignore[no-any-return]

        return run

    found = [Contender("torch", lambda tensors: plain(*tensors), check, prepare=converted)]
    if isinstance(COMPILE_BUDGET.status(), Available):
        compiled = COMPILE_BUDGET.compile(plain)
        found.append(
            Contender("torch.compile", lambda tensors: compiled(*tensors), check, converted)
        )
    others = {
        "flashinfer": lambda: Contender("flashinfer", by("flashinfer.norm", "layernorm"), check),
        "quack": lambda: Contender("quack", by("quack.rmsnorm", "layernorm_fwd"), check),
    }
    return found + _present(others)


_FLASHINFER_ACTIVATIONS = {
    "silu": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
}


def act_and_mul_peers(check: Check, act: str = "silu") -> list[Contender]:
    """``act(x[:, :d]) * x[:, d:]`` of one input (rows, 2 d)."""
    formula = ACTIVATIONS[act].formula

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return formula(gate) * up

    def flashinfer() -> Contender:
        activation = importlib.import_module("flashinfer.activation")
        function = getattr(activation, _FLASHINFER_ACTIVATIONS[act])
        return Contender("flashinfer", lambda b: function(*b.inputs), check)

    others = {"flashinfer": flashinfer} if act in _FLASHINFER_ACTIVATIONS else {}
    return _with_compiled(plain, check, _present(others))


class _Stream:
    """torch's current stream in the form that NVIDIA's Python libraries ask for."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def sum_peers(check: Check, op: str = "sum") -> list[Contender]:
    """The sum or the maximum (``op``) of one contiguous float32 or int32 input; shape (1,)."""

    def cub() -> Contender:
        import numpy as np

        compute = importlib.import_module("cuda.compute")
        kind = compute.OpKind.PLUS if op == "sum" else compute.OpKind.MAXIMUM

        def prepare(buffers: Buffers) -> Any:
            data = buffers.inputs[0].flatten()
            out = torch.empty(1, dtype=data.dtype, device=data.device)
            dtype = np.dtype(str(data.dtype).removeprefix("torch."))
            least = -np.inf if dtype.kind == "f" else np.iinfo(dtype).min
            start = np.full(1, 0 if op == "sum" else least, dtype=dtype)
            reduce = compute.make_reduce_into(d_in=data, d_out=out, op=kind, h_init=start)
            call = {"d_in": data, "d_out": out, "op": kind, "h_init": start}
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
        x = buffers.inputs[0]
        return (torch.sum(x, dtype=x.dtype) if op == "sum" else x.amax()).view(1)

    return _present({"torch": lambda: Contender("torch", plain, check), "cub": cub})
