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
            disable=console.quiet or not console.is_terminal,
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
    """Several answers at once: panels on a terminal, else each line when it is whole.

    Args:
        console: where to write; a quiet one shows nothing.
        prompts: the questions, shown above their answers.
    """

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self._console = console
        self._prompts = [printable(prompt) for prompt in prompts]
        self._texts = [""] * len(prompts)
        self._printed = [0] * len(prompts)
        self._last_frame = 0.0
        self._live: Live | None = None
        if console.is_terminal and not console.quiet:
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
            for index in range(len(self._texts)):
                self._print_lines(index, whole_text=True)

    def push(self, index: int, text: str) -> None:
        """Add text to the answer of prompt ``index``."""
        self._texts[index] += printable(text)
        if self._live is None:
            self._print_lines(index, whole_text=False)
        elif time.monotonic() - self._last_frame > _SECONDS_BETWEEN_FRAMES:
            self._live.update(self._panels(), refresh=True)
            self._last_frame = time.monotonic()

    def _print_lines(self, index: int, whole_text: bool) -> None:
        text = self._texts[index]
        end = len(text) if whole_text else text.rfind("\n") + 1
        fresh = text[self._printed[index] : end]
        self._printed[index] = max(end, self._printed[index])
        for line in fresh.splitlines():
            self._console.print(Text(f"[{index + 1}] {line}"), soft_wrap=True)

    def _panels(self) -> Group:
        return Group(
            *(
                Panel(Text(text), title=Text(prompt), title_align="left", border_style="dim")
                for prompt, text in zip(self._prompts, self._texts, strict=True)
            )
        )
