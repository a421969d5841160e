"""Where the log goes: lines on standard error. Whoever stops reading them keeps nobody waiting.

A pipe whose reader stands still, or a terminal that Ctrl-S has stopped, would hold up the thread that writes to it; on the
event loop that is everybody, and any stranger who speaks no HTTP/2 can have a line written there.
"""

from __future__ import annotations

import logging
import select
import sys
from typing import TextIO

PIECE = 1024  # characters: four bytes each at most, which is what a pipe takes whole where it says that it takes some


def log_to_standard_error() -> None:
    """From now on, what is logged goes there."""
    handler = UnwaitingHandler(sys.stderr)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", handlers=[handler])


class UnwaitingHandler(logging.StreamHandler[TextIO]):
    """Writes lines, and drops those that would have to wait; the next one that is read is behind their number."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lost = 0
        self._is_torn = False  # the latest line, which was longer than there was room

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's line, as far as that can be done at once."""
        if not self._takes_more():
            self._lost += 1
            return
        try:
            text = self._words_of_loss() + self.format(record) + self.terminator
            for at in range(0, len(text), PIECE):
                if at and not self._takes_more():
                    self._lost, self._is_torn = 1, True
                    return
                self.stream.write(text[at : at + PIECE])
                self.flush()
        except Exception:  # noqa: BLE001  (as every handler of logging does)
            self.handleError(record)

    def _words_of_loss(self) -> str:
        lost, self._lost = self._lost, 0
        end, self._is_torn = "\n" if self._is_torn else "", False
        return f"{end}WARNING lines of the log that are lost, as nobody read them: {lost}\n" if lost else ""

    def _takes_more(self) -> bool:
        """Whether something can be written without waiting, as far as that can be known."""
        if sys.platform == "win32":
            return True
        poll = select.poll()
        try:
            poll.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # no file of the system's, or closed
            return True
        return bool(poll.poll(0))
