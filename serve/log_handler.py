"""Logging to standard error without ever waiting for its reader.

A pipe that is not read, or a terminal stopped by Ctrl-S, blocks the thread that writes to it; on the event loop that would stop
all requests. Any client can provoke log lines, by sending something that is not HTTP/2.
"""

from __future__ import annotations

import logging
import select
import sys
from typing import TextIO

PIECE = 1024  # characters of at most four bytes: a pipe that polls as writable takes 4096 bytes at once


def log_to_standard_error(place: int | None = None) -> None:
    """Log from INFO on; `place`: number of this process, in front of its lines, where several write to the same file."""
    handler = NonBlockingHandler(sys.stderr, "" if place is None else f"[{place}] ")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", handlers=[handler])


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """Drops lines that would have to wait, and writes their number before the next line."""

    def __init__(self, stream: TextIO, prefix: str = "") -> None:
        """A handler that begins each line with `prefix`."""
        super().__init__(stream)
        self._prefix = prefix
        self._lost = 0
        self._is_torn = False  # the latest line was written in part

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's line, as far as that is possible at once."""
        if not self._is_writable():
            self._lost += 1
            return
        try:
            text = self._loss_report() + self.format(record) + self.terminator
            for at in range(0, len(text), PIECE):
                if at and not self._is_writable():
                    self._lost, self._is_torn = 1, True
                    return
                self.stream.write(text[at : at + PIECE])
                self.flush()
        except Exception:  # noqa: BLE001  (as every handler of logging does)
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record; a traceback has several."""
        text = super().format(record)
        return self._prefix + text.replace("\n", f"\n{self._prefix}") if self._prefix else text

    def _loss_report(self) -> str:
        lost, self._lost = self._lost, 0
        end, self._is_torn = "\n" if self._is_torn else "", False
        return f"{end}WARNING log lines lost because standard error was not read: {lost}\n" if lost else ""

    def _is_writable(self) -> bool:
        """Whether a write would not block; True where the system cannot say."""
        if sys.platform == "win32":
            return True
        poll = select.poll()
        try:
            poll.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # no file of the system's, or closed
            return True
        return bool(poll.poll(0))
