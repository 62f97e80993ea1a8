"""The store: where every compiled kernel comes from.

A kernel is looked up in memory, then in the prebuilt overlay folders, then in the cache folder on
disk, and compiled only when none has it. A key is compiled once, however many threads and processes
ask for it at the same time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from fusedops.errors import BuildError, KernelMissingError
from fusedops.jit.entry import DamagedEntryError, Entry, read_manifest
from fusedops.jit.folder import (
    Build,
    CacheFolder,
    overlay_errors,
    run_build,
    storage_errors,
    why_no_entry,
)
from fusedops.jit.key import KernelKey
from fusedops.jit.location import (
    OVERLAY_VARIABLE,
    CacheSettings,
    require_overlay,
    require_own,
    require_trusted,
)
from fusedops.jit.progress import progress

__all__ = [
    "COMPILE_VARIABLE",
    "Store",
    "capture_under_way",
    "compiling_allowed",
    "default_store",
]

COMPILE_VARIABLE = "FUSEDOPS_COMPILE"

Loaded = TypeVar("Loaded")


def compiling_allowed() -> bool:
    """Whether FUSEDOPS_COMPILE lets missing kernels be compiled (it does unless it is 0)."""
    return os.environ.get(COMPILE_VARIABLE, "1") != "0"


def capture_under_way() -> bool:
    """Whether this thread's current stream is being captured into a CUDA graph.

    Never initialises CUDA: a process that has not done so captures nothing.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


class Store:
    """Compiled kernels in memory, in prebuilt folders and on disk.

    Args:
        settings: where the folders are; ``default_store()`` takes them from the environment.
        shared: what is compiled becomes readable for everyone (for ``fusedops prebuild``).

    Attributes:
        counts: how many kernels came from ``"overlay"``, ``"disk"``, ``"compiled"`` and
            ``"memory only"``; calls served from memory are not counted.
    """

    def __init__(self, settings: CacheSettings, *, shared: bool = False) -> None:
        self._settings = settings
        self._shared = shared
        self._overlays = [CacheFolder(path) for path in settings.overlays]
        self._reset()
        _stores.add(self)

    def _reset(self) -> None:
        """Start empty; also in a forked child, where locks may be held for ever by lost threads."""
        self._lock = threading.Lock()
        self._memory: dict[str, Any] = {}
        self._flights: dict[str, Future[Any]] = {}
        self.counts: Counter[str] = Counter()

    def get(
        self,
        key: KernelKey,
        build: Build,
        load: Callable[[Entry], Loaded],
        *,
        warm_up: str = "call the operation once with the same shapes and dtypes",
    ) -> Loaded:
        """The loaded kernel of ``key``; one object per key and process.

        Args:
            key: the kernel asked for.
            build: compiles it, see ``folder.Build``.
            load: turns the verified entry into what is launched. It must not keep the entry's
                paths: the files of a kernel that is not stored are gone after it.
            warm_up: the advice given when the kernel is missing while a CUDA graph is captured.

        Raises:
            KernelMissingError: it must be compiled, but FUSEDOPS_COMPILE=0 or a capture is under
                way.
            BuildError: the compile failed, or the cache folder cannot be used.
            ConfigError: a folder of FUSEDOPS_OVERLAY does not exist, is no folder or cannot be
                read.
        """
        while True:
            with self._lock:
                if key.digest in self._memory:
                    return cast(Loaded, self._memory[key.digest])
                flight = self._flights.get(key.digest)
                mine = flight is None
                if flight is None:
                    flight = self._flights[key.digest] = Future()
            if mine:
                return self._lead(key, flight, lambda: self._obtain(key, build, load, warm_up))
            error = flight.exception()
            # A refusal or an interrupt concerns the thread it came to; a failed compile is the
            # same for all that wait, and trying again would only fail again, once per thread.
            if isinstance(error, Exception) and not isinstance(error, KernelMissingError):
                raise error

    def _lead(self, key: KernelKey, flight: Future[Any], obtain: Callable[[], Loaded]) -> Loaded:
        try:
            loaded = obtain()
        except BaseException as error:
            with self._lock:
                del self._flights[key.digest]
            flight.set_exception(error)
            raise
        with self._lock:
            self._memory[key.digest] = loaded
            del self._flights[key.digest]
        flight.set_result(loaded)
        return loaded

    def _obtain(
        self, key: KernelKey, build: Build, load: Callable[[Entry], Loaded], warm_up: str
    ) -> Loaded:
        if key.memory_only:
            return self._build_unstored(key, build, load, warm_up)
        try:
            return load(self.ensure(key, build, warm_up=warm_up))
        except (FileNotFoundError, DamagedEntryError):
            # Somebody cleared the cache between finding and loading. Once more, with the lock held.
            if self.find(key) is None:
                self._require_compiling(key, warm_up, [])
        try:
            return self._in_cache(key, build, load)
        except (FileNotFoundError, DamagedEntryError) as error:
            raise BuildError(
                f"{key.describe()} vanished twice while it was being loaded ({error}). Something "
                "keeps removing or changing it."
            ) from error

    def ensure(
        self, key: KernelKey, build: Build, *, warm_up: str = "call the operation once"
    ) -> Entry:
        """The stored entry of ``key``, compiled if needed, without loading it.

        Raises:
            BuildError: as ``get``; also for a key whose kernel may not be stored.
            KernelMissingError, ConfigError: as ``get``.
        """
        if key.memory_only:
            raise BuildError(
                f"{key.describe()} cannot be stored on disk: {key.memory_only}. Define the class "
                "at the top of a module that lies in a file."
            )
        notes: list[str] = []
        entry = self.find(key, notes)
        if entry is None:
            self._require_compiling(key, warm_up, notes)
            return self._in_cache(key, build, lambda added: added)
        return self._count(entry)

    def _in_cache(self, key: KernelKey, build: Build, use: Callable[[Entry], Loaded]) -> Loaded:
        folder = CacheFolder(self._settings.resolve_root(), shared=self._shared)
        return folder.find_or_add(key, build, "disk", lambda entry: use(self._count(entry)))

    def _count(self, entry: Entry) -> Entry:
        with self._lock:
            self.counts[entry.origin] += 1
        return entry

    def find(self, key: KernelKey, notes: list[str] | None = None) -> Entry | None:
        """The verified entry of ``key`` in an overlay or on disk; compiles and writes nothing.

        Args:
            key: the kernel asked for.
            notes: takes up what is worth telling about near misses.

        Raises:
            BuildError: a folder belongs to someone else or can be written by others.
            ConfigError: a folder of FUSEDOPS_OVERLAY does not exist, is no folder or cannot be
                read.
        """
        found_damage: list[str] = [] if notes is None else notes

        def note_damage(folder: Path, why: str) -> None:
            found_damage.append(f"{folder} is damaged: {why}")

        for overlay in self._overlays:
            with overlay_errors(overlay.root):
                require_overlay(overlay.root)
                entry = overlay.find(key, "overlay", note_damage, require_trusted)
            if entry is not None:
                return entry
        root = self._settings.root
        if root is None or not require_own(root):
            return None
        with storage_errors(root):
            return CacheFolder(root).find(key, "disk", note_damage)

    def _require_compiling(self, key: KernelKey, warm_up: str, notes: list[str]) -> None:
        if capture_under_way():
            raise KernelMissingError(
                f"{key.describe()} is not compiled yet, and a CUDA graph is being captured, where "
                f"nothing is compiled. The warm-up call: {warm_up} before the capture."
            )
        if compiling_allowed():
            return
        folders = [overlay.root for overlay in self._overlays]
        if self._settings.root is not None:
            folders.append(self._settings.root)
        message = (
            f"{key.describe()} is not in {', '.join(map(str, folders)) or 'any folder'} and "
            f"{COMPILE_VARIABLE}=0 forbids compiling it. Build it with `fusedops prebuild MODEL "
            f"--arch {key.arch} --out DIR` and set {OVERLAY_VARIABLE}=DIR, or unset "
            f"{COMPILE_VARIABLE}."
        )
        details = [*notes, *self._other_builds(key, folders)]
        raise KernelMissingError("\n  ".join([message, *details]))

    def _other_builds(self, key: KernelKey, folders: list[Path]) -> list[str]:
        """Lines about builds of the same sources by other versions of the tools."""
        lines = []
        for root in folders:
            for path in CacheFolder(root).builds_of_same_sources(key):
                if why_no_entry(path) is not None:
                    continue
                try:
                    toolchain = read_manifest(path).toolchain
                except (OSError, DamagedEntryError):
                    continue
                if not key.accepts_toolchain(toolchain):
                    lines.append(
                        f"{path} was built with {dict(toolchain)}, installed here is "
                        f"{dict(key.toolchain)}"
                    )
        return lines

    def _build_unstored(
        self, key: KernelKey, build: Build, load: Callable[[Entry], Loaded], warm_up: str
    ) -> Loaded:
        self._require_compiling(key, warm_up, [f"It is never stored: {key.memory_only}."])
        where = Path(tempfile.gettempdir())
        with storage_errors(where, "TMPDIR"):
            temporary = tempfile.TemporaryDirectory(prefix="fusedops-")
        with temporary as name:
            with storage_errors(where, "TMPDIR"), progress(f"compiling {key.describe()}"):
                info = run_build(build, Path(name), key)
                entry = Entry.of_unstored(Path(name), info)
            return load(self._count(entry))


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_defaults: dict[CacheSettings, Store] = {}
_defaults_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _defaults_lock
    _defaults_lock = threading.Lock()
    for store in list(_stores):
        store._reset()


os.register_at_fork(after_in_child=_after_fork_in_child)


def default_store() -> Store:
    """The store that the environment names; the same object as long as it names the same folders.

    Touches no disk: folders are looked at when a kernel is asked for.
    """
    settings = CacheSettings.from_environment()
    with _defaults_lock:
        store = _defaults.get(settings)
        if store is None:
            store = _defaults[settings] = Store(settings)
        return store
