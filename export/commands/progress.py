"""What a command is doing, on standard error: a spinner on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0
SEARCH = "searching"  # a search may take long, so its first line is not held back


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """Gives what is told each step before it begins."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda step: status.update(Text(step))
    else:
        yield ProgressLines(console)


class ProgressLines:
    """Prints a step as a line where the last line, or the beginning, is at least 10 s ago, and the first step of a search.

    What is done in seconds prints nothing.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last, self._searching = clock(), False

    def __call__(self, step: str) -> None:
        """Take a step."""
        first_of_search = step.startswith(SEARCH) and not self._searching
        self._searching |= first_of_search
        now = self._clock()
        if first_of_search or now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._console.print(Text(step), soft_wrap=True)
