"""A lock per kernel that processes share, and that the operating system frees when one dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

__all__ = ["KeyLock"]


class KeyLock:
    """An exclusive ``flock`` on a file of its own; a context manager.

    A lock file may be deleted by ``release(delete=True)``, so a process that waited for one checks
    after getting it that the file is still the one of that name, and starts over if not.

    Args:
        path: the lock file; created when absent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock; with ``wait=False`` give up at once when another process holds it.

        Returns:
            whether the lock is held now.

        Raises:
            OSError: the file cannot be made, or its file system has no locks.
        """
        operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, operation)
                if self._is_current(descriptor):
                    self._descriptor, descriptor = descriptor, -1
                    return True
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and not wait:
                    return False
                raise
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        mine = os.fstat(descriptor)
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self, *, delete: bool = False) -> None:
        """Give the lock back; ``delete`` removes its file first, while it is still held."""
        if self._descriptor is None:
            return
        if delete:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> KeyLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
