"""Logging to standard error, as text or as JSON lines, without ever waiting for its reader.

A pipe that is not read, or a terminal stopped by Ctrl-S, blocks the thread that writes to it; on the event loop that would stop
all requests. Any client can provoke log lines, by sending something that is not HTTP/2.
"""

from __future__ import annotations

import json
import logging
import re
import select
import sys
import time
from enum import StrEnum
from typing import TextIO

from halfserve.serve.engine.errors import cut

MAX_TEXT = 16_384  # most characters of a message or traceback; the middle of longer ones is left out
PIECE = 1024  # characters of at most four bytes: a pipe that polls as writable takes 4096 bytes at once
# Line ends, control characters that terminals execute, and characters that change the writing direction.
CONTROLS = (*range(32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
ESCAPES = {code: ascii(chr(code))[1:-1] for code in CONTROLS}
LABEL = re.compile(r"(.+?)(?:/(\d+))?(?: instance \d+)?", re.DOTALL)


class LineFormat(StrEnum):
    """Format of a log message: a line of text that begins with the time, or a JSON object on one line."""

    TEXT = "text"
    JSON = "json"


def log_to_standard_error(line_format: LineFormat = LineFormat.TEXT, process: int | None = None) -> None:
    """Log from INFO on; `process` is the number of this process, shown in its lines if several write to the same file."""
    handler = NonBlockingHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if line_format is LineFormat.JSON else TextFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def time_stamp(seconds: float) -> str:
    """Format a time since the epoch as 2026-02-01T12:00:00.250Z, as in the access log."""
    milliseconds = int(seconds * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"


class TextFormatter(logging.Formatter):
    """`TIME LEVEL MESSAGE`; the lines of a traceback follow, indented. Among several processes, `[PROCESS]` begins each line.

    Names and texts of others that a message or traceback quotes cannot imitate another log line.
    """

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._prefix = "" if process is None else f"[{process}] "

    def format(self, record: logging.LogRecord) -> str:
        message, *trace = _message(record).rstrip(), *filter(None, _trace(self, record).split("\n"))
        lines = [f"{time_stamp(record.created)} {record.levelname} {message}", *(f"  {line}" for line in trace)]
        return "\n".join([self._prefix + line.translate(ESCAPES) for line in lines])


def _message(record: logging.LogRecord) -> str:
    return cut(record.getMessage(), MAX_TEXT)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a record: of its exception, or that of another process in `trace` of its `extra`."""
    trace = formatter.formatException(record.exc_info) if record.exc_info else str(vars(record).get("trace", ""))
    return cut(trace, MAX_TEXT)


class JsonFormatter(logging.Formatter):
    """A JSON object with `time`, `level`, `logger` and `message`, and further fields of the record.

    A record about a model or a request has these in its `extra`: `model` ("NAME", "NAME/VERSION" or "NAME/VERSION instance
    NUMBER", which is written as `model` and `version`) and `id`, the request's id. A traceback becomes the text `exception`;
    that of another process is in `trace` of the `extra`. `process` is present if there are several processes.
    """

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, str | int] = {
            "time": time_stamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if self._process is not None:
            content["process"] = self._process
        about = LABEL.fullmatch(str(vars(record).get("model", "")))
        if about is not None:
            content["model"] = about[1]
            if about[2] is not None:
                content["version"] = about[2]
        request_id = vars(record).get("id")
        if request_id:
            content["id"] = str(request_id)
        if trace := _trace(self, record):
            content["exception"] = trace
        return json.dumps(content)


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """Drops lines that would block, and reports their number before the next line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lost = 0
        self._is_torn = False  # whether the last line was written only in part

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's line, as far as that is possible without blocking."""
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

    def _loss_report(self) -> str:
        lost, self._lost = self._lost, 0
        end, self._is_torn = "\n" if self._is_torn else "", False
        if not lost:
            return ""
        said = "log lines lost because standard error was not read: %d"
        report = logging.LogRecord(__name__, logging.WARNING, __file__, 0, said, (lost,), None)
        return f"{end}{self.format(report)}{self.terminator}"

    def _is_writable(self) -> bool:
        """Return whether a write would not block; True if the system cannot say."""
        if sys.platform == "win32":
            return True
        poll = select.poll()
        try:
            poll.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # not a file of the system, or closed
            return True
        return bool(poll.poll(0))
