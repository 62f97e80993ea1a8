"""Compiling many kernels at once, ahead of their use and without a GPU, in processes of their own.

A kernel of the DSL takes one to three seconds on one core, and tracing holds the interpreter's
lock, so that only processes run at the same time. They write to the store; nothing is loaded. What
csrc has takes tenths of a second each and is compiled in the same way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from fusedops.errors import BuildError, ConfigError, FusedOpsError
from fusedops.jit.dsl import DslProgram, compile_dsl, dsl_key
from fusedops.jit.key import KernelKey
from fusedops.jit.location import CacheSettings
from fusedops.jit.nvrtc import CudaProgram, compile_program, program_key
from fusedops.jit.store import Store

__all__ = ["Compiled", "KernelPool", "Work", "key_of"]

Work = Callable[[], DslProgram | CudaProgram]
"""Makes a program; picklable, e.g. ``functools.partial`` of a module's function and its data."""


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel.

    Attributes:
        origin: ``"overlay"`` or ``"disk"`` (it was there already), ``"compiled"``, or ``"failed"``.
        reason: why it failed, the error's class first, else empty.
        seconds: what it took.
    """

    origin: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the kernel is in the store now."""
        return not self.reason

    @classmethod
    def failure(cls, error: Exception, seconds: float = 0.0) -> Compiled:
        """A kernel that is not there because of ``error``."""
        return cls("failed", f"{type(error).__name__}: {error}", seconds)


def key_of(program: DslProgram | CudaProgram, arch: str) -> KernelKey:
    """The key under which the store keeps a program for ``arch``.

    Raises:
        BuildError, ConfigError: as ``dsl_key`` and ``program_key``.
    """
    if isinstance(program, CudaProgram):
        return program_key(program, arch)
    return dsl_key(program, arch)


def _compile(program: DslProgram | CudaProgram, arch: str, folder: Path) -> Mapping[str, str]:
    if isinstance(program, CudaProgram):
        return compile_program(program, arch, folder)
    return compile_dsl(program, arch, folder)


def _ensure(work: Work, arch: str, settings: CacheSettings, shared: bool) -> Compiled:
    """Put a kernel into the store, in whatever process this runs."""
    started = time.monotonic()
    program = work()
    store = Store(settings, shared=shared)
    try:
        entry = store.ensure(key_of(program, arch), lambda folder: _compile(program, arch, folder))
    except (FusedOpsError, OSError) as error:
        return Compiled.failure(error, time.monotonic() - started)
    return Compiled(entry.origin, "", time.monotonic() - started)


def _start_worker(pool_open: Connection) -> None:
    # The parent shows progress; lines about single kernels would run through it.
    os.environ["FUSEDOPS_QUIET"] = "1"
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave_with_pool() -> None:
        # Nothing is ever sent: the pipe ends when the pool closes it, or its process is gone.
        with contextlib.suppress(EOFError, OSError):
            pool_open.recv()
        os._exit(1)

    threading.Thread(target=leave_with_pool, daemon=True).start()


class KernelPool:
    """Compiles kernels for one architecture in parallel; each only once, however often asked for.

    Args:
        arch: e.g. ``"sm_90a"``.
        settings: the store's folders; kernels that an overlay holds are not compiled.
        shared: what is compiled becomes readable for everyone.
        workers: processes; by default as many as the process has cores, at most 32.

    Raises:
        ConfigError: ``workers`` is not positive.
    """

    def __init__(
        self,
        arch: str,
        settings: CacheSettings,
        *,
        shared: bool = False,
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"KernelPool: workers={workers}; accepted: 1 or more.")
        self.arch = arch
        self._settings = settings
        self._shared = shared
        self._workers = workers or min(32, len(os.sched_getaffinity(0)))
        self._executor: ProcessPoolExecutor | None = None
        self._open, self._closing = multiprocessing.Pipe(duplex=False)
        self._store = Store(settings, shared=shared)
        self._futures: dict[str, Future[Compiled]] = {}

    def __enter__(self) -> KernelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes at once; what they have not finished is given up."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._closing.close()
        self._open.close()

    def submit(self, work: Work) -> str:
        """Have a kernel compiled unless it is there; returns its name for ``result`` at once."""
        key = key_of(work(), self.arch)
        if key.digest not in self._futures:
            entry = self._store.find(key)
            if entry is None:
                self._futures[key.digest] = self._start(work)
            else:
                done: Future[Compiled] = Future()
                done.set_result(Compiled(entry.origin))
                self._futures[key.digest] = done
        return key.digest

    def _start(self, work: Work) -> Future[Compiled]:
        if self._executor is None:
            self._executor = self._processes(self._workers)
        try:
            return self._executor.submit(_ensure, work, self.arch, self._settings, self._shared)
        except BrokenProcessPool as error:
            broken: Future[Compiled] = Future()
            broken.set_exception(error)
            return broken

    def _processes(self, count: int) -> ProcessPoolExecutor:
        # Not forked: a child of a process that has started CUDA cannot use torch safely.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            count, mp_context=context, initializer=_start_worker, initargs=(self._open,)
        )

    @property
    def kernels(self) -> int:
        """Distinct kernels asked for so far."""
        return len(self._futures)

    def when_done(self, name: str, call: Callable[[], object]) -> None:
        """Call a function, from any thread, once a kernel is compiled or has failed."""
        self._futures[name].add_done_callback(lambda _: call())

    def ready(self, names: Iterable[str], timeout_s: float | None = None) -> bool:
        """Wait for kernels; False if some are still being compiled after ``timeout_s``."""
        pending = {self._futures[name] for name in names}
        return not wait(pending, timeout_s).not_done

    def result(self, name: str, work: Work) -> Compiled:
        """What became of a kernel that was submitted; waits for it.

        A compiler that takes its process down takes the others' work along. Each of them is then
        compiled in a process of its own, so that only the guilty one fails.
        """
        try:
            return self._futures[name].result()
        except BrokenProcessPool:
            done = self._compile_alone(work)
        settled: Future[Compiled] = Future()
        settled.set_result(done)
        self._futures[name] = settled
        return done

    def _compile_alone(self, work: Work) -> Compiled:
        with self._processes(1) as executor:
            try:
                return executor.submit(
                    _ensure, work, self.arch, self._settings, self._shared
                ).result()
            except BrokenProcessPool:
                kernel = key_of(work(), self.arch).describe()
                error = BuildError(
                    f"{kernel}: the compiler's process was killed or crashed, also with no other "
                    "beside it. Its last words may stand on stderr; if the system killed it for "
                    "memory (dmesg tells), free some and start again."
                )
        return Compiled.failure(error)
