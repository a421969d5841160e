"""A file of lines that others may read, move away or delete while it is written."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from serve.engine.errors import FailedPreconditionError

LINE_FEED = ord("\n")


def check_writable(path: Path, what: str) -> None:
    """Whether a file could be written, so that a server says so when it starts and not when the first line is lost.

    Raises:
        FailedPreconditionError: it could not; the text says why.
    """
    folder = path.parent
    if not folder.is_dir():
        reason = f"{folder} is no folder"
    elif path.is_dir():
        reason = "it is a folder, expected a file"
    elif os.access(path if path.exists() else folder, os.W_OK):
        return
    else:
        reason = os.strerror(errno.EACCES)
    raise FailedPreconditionError(f"{what} cannot be written to {path}: {reason}; choose another file")


class LineFile:
    """Appends lines; whole ones, so that two writers do not mix. A file that has been moved away is begun anew."""

    def __init__(self, path: Path | None) -> None:
        """A file that is opened when it is first written.

        Args:
            path: None is standard error.
        """
        self._path = path
        self._descriptor: int | None = None
        self._opened: os.stat_result | None = None  # asked for once: each such question has to wait for the event loop after it
        self._is_torn = False  # the last line there has no end: the disk was full

    def write(self, lines: list[str]) -> None:
        """Append lines, each with its line feed.

        Raises:
            OSError: it cannot be written.
        """
        data = "".join(lines).encode()
        descriptor = self._open()
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            written = os.write(descriptor, rest)
            self._is_torn = rest[written - 1] != LINE_FEED
            rest = rest[written:]

    def close(self) -> None:
        """Close it; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._path is None:
            return sys.stderr.fileno()
        if self._descriptor is not None and not self._is_here():
            self.close()
            self._is_torn = False
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            self._opened = os.fstat(self._descriptor)
        return self._descriptor

    def _is_here(self) -> bool:
        assert self._path is not None  # noqa: S101  (for the type checker: only a path has a descriptor)
        assert self._opened is not None  # noqa: S101  (see above)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (self._opened.st_dev, self._opened.st_ino)
