"""How many connections each of the servers behind one port has open, in memory that they share.

They wait for connections at the same sockets, and the one that wakes first would take the most.
"""

from __future__ import annotations

import mmap
from pathlib import Path

NAME = "connections"
BYTES = 8  # of one count
GONE = 2**62  # the count of a server that accepts nothing


class ConnectionCounts:
    """One count per place; each server writes its own, and the supervisor that of a server that has ended."""

    def __init__(self, folder: Path) -> None:
        """Map the file that `create` has made.

        Raises:
            OSError: it is not there.
        """
        with (folder / NAME).open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @staticmethod
    def create(folder: Path, places: int) -> None:
        """Make the file for so many servers, none of which accepts yet."""
        (folder / NAME).write_bytes(GONE.to_bytes(BYTES, "little") * places)

    def set(self, place: int, count: int) -> None:
        """Write the count of the server at `place`, from 1 on."""
        self._counts[place - 1] = count

    def fewest(self) -> int:
        """The smallest count."""
        return min(self._counts)

    def all_accept(self) -> bool:
        """Whether no server is missing."""
        return max(self._counts) < GONE
