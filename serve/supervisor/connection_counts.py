"""Numbers of open connections of the servers behind one port, in shared memory.

The servers accept from the same sockets, and without the counts the server that wakes first would take the most.
"""

from __future__ import annotations

import mmap
from pathlib import Path

NAME = "connections"
BYTES = 8  # size of one count
GONE = 2**62  # count of a server that does not accept connections


class ConnectionCounts:
    """One count per place; each server writes its own, and the supervisor that of a server that has ended."""

    def __init__(self, folder: Path) -> None:
        """Map the file that `create` made.

        Raises:
            OSError: there is no such file.
        """
        with (folder / NAME).open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @staticmethod
    def create(folder: Path, places: int) -> None:
        """Create the file for `places` servers, none of which accepts yet."""
        (folder / NAME).write_bytes(GONE.to_bytes(BYTES, "little") * places)

    def set(self, place: int, count: int) -> None:
        """Write the count of the server at `place`, counted from 1."""
        self._counts[place - 1] = count

    def fewest(self) -> int:
        """The smallest count."""
        return min(self._counts)

    def all_accept(self) -> bool:
        """Whether every server accepts connections."""
        return max(self._counts) < GONE
