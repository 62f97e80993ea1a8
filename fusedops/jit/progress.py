"""The line on stderr that tells what a long compile is doing. FUSEDOPS_QUIET=1 keeps it quiet."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["progress", "say"]

ANNOUNCE_AFTER_S = 1.0


def say(line: str) -> None:
    """Write one line to stderr, unless FUSEDOPS_QUIET is set to anything but 0."""
    if os.environ.get("FUSEDOPS_QUIET", "0") not in ("", "0") or sys.stderr is None:
        return
    # A closed or full stderr must not fail the compile that the line is about.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"fusedops: {line}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say ``what`` when the block is still running after a second, and how long it took at its end.

    A block that takes less says nothing. The first line comes from a timer thread, so it appears
    while the block is still at work.
    """
    lock = threading.Lock()
    announced = False
    over = False

    def announce() -> None:
        nonlocal announced
        with lock:
            if not over:
                say(f"{what} ...")
                announced = True

    timer = threading.Timer(ANNOUNCE_AFTER_S, announce)
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    outcome = "failed after"
    try:
        yield
        outcome = "finished in"
    finally:
        timer.cancel()
        with lock:
            over = True
        if announced:
            say(f"{what}: {outcome} {time.monotonic() - start:.1f} s")
