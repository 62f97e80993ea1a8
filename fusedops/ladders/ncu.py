"""Nsight Compute (``ncu``) as a child process that watches another one, which runs the steps.

One child serves all that is asked, because starting it takes longer than most steps. Where ncu is
missing or may not read counters, the answer is the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fusedops.ladders.counters import METRICS, Counters, by_marker, parse_raw_csv

__all__ = ["Asked", "CounterReader", "asked_from_json", "asked_to_json", "read_counters"]

_NOT_FOUND = re.compile(r"(failed to|cannot|could not|unable to) find.*metric", re.IGNORECASE)
_TIMEOUT_S = 600.0
_NO_PERMISSION = "ERR_NVGPUCTRPERM"

_TABLE_S = 10.0
"""Kept for ncu to write its table once the child has begun its last step."""

_GRACE_S = 20.0
"""By which a child may overrun before it is ended."""


@dataclass(frozen=True)
class Asked:
    """Steps of one problem whose counters are wanted.

    Attributes:
        ladder: name.
        problem: a problem's name, or the id of a figure.
        steps: ids of steps, or keys of the figure's rows; run in this order.
    """

    ladder: str
    problem: str
    steps: tuple[str, ...]


CounterReader = Callable[[Sequence[Asked], float | None], "list[dict[str, Counters]] | str"]
"""As ``read_counters``."""


def asked_to_json(asked: Sequence[Asked], until: float | None) -> str:
    """What the child is told: the steps, and the time (``time.time``) from which it begins none."""
    return json.dumps({"asked": [asdict(each) for each in asked], "until": until})


def asked_from_json(text: str) -> tuple[list[Asked], float | None]:
    """The inverse of ``asked_to_json``."""
    data = json.loads(text)
    asked = [Asked(one["ladder"], one["problem"], tuple(one["steps"])) for one in data["asked"]]
    return asked, data["until"]


def ncu_command(
    ncu: str, log: Path, child: Sequence[str], without: Collection[str] = ()
) -> list[str]:
    """The command line that profiles ``child`` and writes ncu's raw table to ``log``.

    Args:
        without: metrics that this ncu does not know for this GPU.
    """
    known = (name for names in METRICS.values() for name in names if name not in without)
    metrics = ",".join(known)
    return [
        *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"),
        *("--profile-from-start", "off", "--log-file", str(log), "--metrics", metrics),
        *child,
    ]


def find_ncu() -> str | None:
    """ncu on the PATH, or in the toolkit that CUDA_HOME names."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("ncu") or (shutil.which("ncu", path=f"{home}/bin") if home else None)


def read_counters(
    asked: Sequence[Asked], limit_s: float | None = None, ncu: str | None = None
) -> list[dict[str, Counters]] | str:
    """Counters of steps, or the reason why there are none.

    Args:
        asked: what is wanted.
        limit_s: seconds after which no further step is begun; None for as many as all take.
        ncu: the program; None looks for it.

    Returns:
        for each of ``asked``, step -> counters; those of a step that failed, launched nothing or
        was not begun are left out.
    """
    ncu = ncu or find_ncu()
    if ncu is None:
        return "ncu (Nsight Compute) is neither on the PATH nor in CUDA_HOME"
    until = None if limit_s is None else time.time() + max(limit_s - _TABLE_S, 0.0)
    timeout_s = _TIMEOUT_S if limit_s is None else limit_s + _GRACE_S
    child = [sys.executable, "-m", "fusedops.ladders.profiled", asked_to_json(asked, until)]
    with tempfile.TemporaryDirectory(prefix="fusedops-") as folder:
        log = Path(folder) / "ncu.csv"
        without: set[str] = set()
        try:
            said = _run(ncu_command(ncu, log, child), Path(folder) / "said", timeout_s)
            # ncu refuses to start for one name it does not know; the other counters are kept.
            while unknown := _unknown(_text(log) + said) - without:
                without |= unknown
                command = ncu_command(ncu, log, child, without)
                said = _run(command, Path(folder) / "said", timeout_s)
        except subprocess.TimeoutExpired:
            return f"ncu took more than {timeout_s:.0f} s"
        except OSError as error:
            return f"ncu does not start: {error.strerror or error}"
        table = _text(log)
    found = by_marker(parse_raw_csv(table))
    if not any(found):
        return _failure(f"{table}\n{said}")
    # A child that was cut off, or that failed in the end, has a table of what it ran.
    each = iter(found)
    return [
        {step: counters for step in one.steps if (counters := next(each, None)) is not None}
        for one in asked
    ]


def _run(command: Sequence[str], output: Path, timeout_s: float) -> str:
    """What a command says on both of its streams.

    Raises:
        subprocess.TimeoutExpired: it took longer; it was ended with all that it had started.
        OSError: it does not start.
    """
    # Into a file, because a process that outlives ncu would hold a pipe open.
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except BaseException:
            # ncu's own end would leave the process that it watches, and with it the GPU's memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    return _text(output)


def _unknown(output: str) -> set[str]:
    """Metrics of ours in the lines in which ncu says that it finds no such metric."""
    lines = [line for line in output.splitlines() if _NOT_FOUND.search(line)]
    words = {word for line in lines for word in re.findall(r"[\w.]+", line)}
    return words & {name for names in METRICS.values() for name in names}


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _failure(output: str) -> str:
    """What ncu or the child said, in one line."""
    if _NO_PERMISSION in output:
        return f"this user may not read the GPU's counters ({_NO_PERMISSION})"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    last = (errors or lines or ["it said nothing"])[-1 if not errors else 0]
    return f"ncu read nothing: {last.removeprefix('==ERROR==').strip()[:200]}"
