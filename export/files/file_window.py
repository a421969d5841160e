"""A file read here and there, and never mapped: of a map, all pages near a read count as this process's memory."""

from __future__ import annotations

import os
from typing import BinaryIO

WINDOW_BYTES = 1 << 16


class FileWindow:
    """The bytes of a file by position, like a bytes object; only a window of it is in memory.

    Args:
        file: Open for reading, unbuffered or not; its position does not matter.

    Raises:
        OSError: From reading, as the system reports it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._size = os.fstat(self._descriptor).st_size
        self._start = 0
        self._window = b""

    def __len__(self) -> int:
        """Size of the file in bytes."""
        return self._size

    def byte(self, position: int) -> int:
        """One byte, as a number.

        Raises:
            IndexError: The file ends before it.
        """
        index = position - self._start
        if not 0 <= index < len(self._window):
            self._start, self._window, index = position, self.piece(position, position + WINDOW_BYTES), 0
        return self._window[index]

    def piece(self, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`, or to the end of the file."""
        return os.pread(self._descriptor, end - start, start) if end - start < WINDOW_BYTES else self._long(start, end)

    def _long(self, start: int, end: int) -> bytes:
        parts = []  # one read gives at most 2 GiB on Linux
        while start < end and (part := os.pread(self._descriptor, min(end - start, 1 << 30), start)):
            parts.append(part)
            start += len(part)
        return b"".join(parts)
