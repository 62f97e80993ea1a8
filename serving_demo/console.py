"""What a run shows: progress bars while loading, and the answers as they are written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["LoadingBars", "TextStreams"]

_SECONDS_BETWEEN_FRAMES = 0.15
"""A frame takes some milliseconds, so a slow decode is not drawn token by token."""


def _moves_cursor(console: Console) -> bool:
    """Whether the console may draw over what it has shown."""
    return console.is_interactive and not console.quiet


def printable(text: str) -> str:
    """``text`` with control characters replaced: what a model writes must not steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class LoadingBars:
    """Progress bars, one a loop; nothing where the console is quiet or no terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not _moves_cursor(console),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def track(self, items: Sequence[Any], label: str) -> Iterable[Any]:
        """Hand out the items and move a bar of that name."""
        return self._progress.track(items, total=len(items), description=label)


class TextStreams:
    """Several answers at once: panels on a terminal, else one answer after the other.

    Where nothing can be drawn over, the first answer that has not ended is shown line by line as it
    is written, and those behind it wait, so that no two mix.

    Args:
        console: where to write; a quiet one shows nothing.
        prompts: the questions, shown above their answers.
    """

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self._console = console
        self._prompts = [printable(prompt) for prompt in prompts]
        self._texts = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._shown = 0
        self._printed = 0
        self._last_frame = 0.0
        self._live: Live | None = None
        if _moves_cursor(console):
            # Drawn by hand: a refresh thread would take time from the decode steps.
            self._live = Live(self._panels(), console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(self._panels(), refresh=True)
            self._live.stop()
        elif kind is None:
            self._ended = [True] * len(self._ended)
            self._print_lines()

    def push(self, index: int, text: str) -> None:
        """Add text to the answer of prompt ``index``."""
        self._texts[index] += printable(text)
        if self._live is None:
            self._print_lines()
        elif time.monotonic() - self._last_frame > _SECONDS_BETWEEN_FRAMES:
            self._live.update(self._panels(), refresh=True)
            self._last_frame = time.monotonic()

    def end(self, index: int) -> None:
        """Say that the answer of prompt ``index`` is whole."""
        self._ended[index] = True
        if self._live is None:
            self._print_lines()

    def _print_lines(self) -> None:
        """Print what has become whole: lines of the answer at hand, then the answers behind it."""
        while self._shown < len(self._texts):
            text, ended = self._texts[self._shown], self._ended[self._shown]
            end = len(text) if ended else text.rfind("\n") + 1
            fresh = text[self._printed : end]
            self._printed = max(end, self._printed)
            for line in fresh.splitlines():
                self._console.print(Text(f"[{self._shown + 1}] {line}"), soft_wrap=True)
            if not ended:
                return
            self._shown += 1
            self._printed = 0

    def _panels(self) -> Group:
        return Group(
            *(
                Panel(Text(text), title=Text(prompt), title_align="left", border_style="dim")
                for prompt, text in zip(self._prompts, self._texts, strict=True)
            )
        )
