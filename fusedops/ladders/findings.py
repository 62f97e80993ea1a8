"""What the rows of a ladder say together: its own findings, and its end against the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusedops.bench.files import update_json
from fusedops.bench.measurement import Measurement
from fusedops.ladders.model import Finding, Ladder, Step
from fusedops.ladders.report import ResultRow

__all__ = ["AgainstLibrary", "against_library", "findings_of", "record_findings"]

CLOSE = 1.02
"""The last step that a ladder writes out may take so many times what the library's kernel does."""

Rows = Mapping[str, Mapping[str, ResultRow]]


@dataclass(frozen=True)
class AgainstLibrary:
    """A ladder's last own step on a problem, and the library's kernel.

    Attributes:
        problem: its name.
        step, us: the last step whose code is the ladder's own, and its median.
        library, library_us: the step that calls the library; the same step where the ladder ends
            with the library's kernel.
    """

    problem: str
    step: str
    us: float
    library: str
    library_us: float

    @property
    def ratio(self) -> float:
        """The step's time over the library's."""
        return self.us / self.library_us

    @property
    def is_close(self) -> bool:
        """Whether the step takes at most ``CLOSE`` times as long."""
        return self.ratio <= CLOSE


def _last(steps: tuple[Step, ...], rows: Mapping[str, ResultRow]) -> tuple[str, float] | None:
    for step in reversed(steps):
        outcome = rows[step.id].outcome if step.id in rows else None
        if isinstance(outcome, Measurement):
            return step.id, outcome.median_us
    return None


def against_library(ladder: Ladder, rows: Rows) -> list[AgainstLibrary]:
    """A line for each problem on which both were timed.

    A call of the library that is a rung by itself, as in the ladder of products, is the last step
    and the library at once.
    """
    found = []
    apart = f"{ladder.name}.library"
    for problem, each in rows.items():
        steps = ladder.steps_on(problem)
        calls = tuple(step for step in steps if step.operation)
        own = tuple(step for step in steps if step.id != apart and (step.kernels or step.operation))
        last, library = _last(own, each), _last(calls, each)
        if last is not None and library is not None:
            found.append(AgainstLibrary(problem, *last, *library))
    return found


def _finding(found: list[AgainstLibrary]) -> Finding:
    far = [f"{each.step} on {each.problem}" for each in found if not each.is_close]
    same = sorted({each.step for each in found if each.step == each.library})
    text = f"The last own step may take {CLOSE - 1:.0%} longer than the library's kernel: "
    text += f"not so for {', '.join(far)}." if far else "so it is on every problem."
    if same:
        text += f" {', '.join(same)} is the library's kernel itself."
    lines = tuple(
        (
            *(each.problem, each.step, f"{each.us:.2f}", each.library, f"{each.library_us:.2f}"),
            *(f"{each.ratio:.3f}", "yes" if each.is_close else "no"),
        )
        for each in found
    )
    headings = (
        *("problem", "last own step", "us", "the library", "us", "over the library's"),
        f"within {CLOSE - 1:.0%}",
    )
    return Finding("The last own step against the library", text, headings, lines)


def findings_of(ladder: Ladder, recorded: Rows) -> tuple[Finding, ...]:
    """All that is said of a ladder's recorded rows, told in the ladder's order of problems."""
    # Results are stored by name.
    names = [problem.name for problem in ladder.problems(ladder.size)]
    rows = {name: recorded[name] for name in names if name in recorded}
    own = ladder.findings(rows) if ladder.findings is not None else ()
    found = against_library(ladder, rows)
    return (*own, _finding(found)) if found else own


def record_findings(path: Path, ladders: Iterable[Ladder], recorded: Mapping[str, Rows]) -> None:
    """Write what is said of some ladders' rows beside them into the file of results."""
    said = {
        ladder.name: [asdict(each) for each in findings_of(ladder, recorded.get(ladder.name, {}))]
        for ladder in ladders
    }

    def change(data: dict[str, Any]) -> None:
        data.setdefault("findings", {}).update(said)

    update_json(path, change)
