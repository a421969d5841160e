"""Tensors in memory that two processes share: the sender's pool of segments, and the receiver's views of them.

A segment is a sealed memory file that the sender makes and whose descriptor travels with the first message that uses it. The
receiver's arrays are views; when the last of them is gone, the segment is free for another message.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from typing import Any

import numpy as np

SMALLEST_BYTES = 1 << 18
ALIGNMENT = 64
MOST_FREE = 4  # segments kept for later messages
MOST_FREE_BYTES = 1 << 28
# A receiver that maps a file which then shrinks is killed by the system.
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0)
AVAILABLE = hasattr(os, "memfd_create") and bool(SEALS)

View = np.ndarray  # array of bytes


def aligned(size: int) -> int:
    """The size, rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Segment:
    """One shared memory file, mapped here.

    Attributes:
        number: names it between the two processes.
        size: size in bytes.
        view: all its bytes.
        fd: descriptor of the file until it has been sent, then -1.
    """

    __slots__ = ("fd", "number", "size", "view")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create("halfserve-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.view = memoryview(mmap.mmap(self.fd, size))
        except BaseException:
            self.close_file()
            raise

    def close_file(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close_file()


class SegmentPool:
    """The sender's segments. Used under the channel's lock."""

    def __init__(self) -> None:
        self._lent: dict[int, Segment] = {}
        self._free: list[Segment] = []  # sorted by size
        self._made = 0
        self.dropped: list[int] = []  # numbers that the receiver should unmap

    def take(self, size: int) -> Segment:
        """A segment of at least `size` bytes.

        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        found = next((segment for segment in self._free if segment.size >= size), None)
        if found is None:
            self._made += 1
            found = Segment(self._made, max(SMALLEST_BYTES, 1 << (size - 1).bit_length()))
        else:
            self._free.remove(found)
        self._lent[found.number] = found
        return found

    def give_back(self, number: int) -> None:
        """The receiver no longer uses a segment."""
        segment = self._lent.pop(number, None)
        if segment is None:
            return
        self._free.append(segment)
        self._free.sort(key=lambda free: free.size)
        while len(self._free) > MOST_FREE:
            self.dropped.append(self._free.pop(0).number)  # the smallest: a larger one serves as well
        while sum(free.size for free in self._free) > MOST_FREE_BYTES:
            self.dropped.append(self._free.pop().number)


class MappedSegments:
    """The receiver's side.

    Attributes:
        released: numbers of segments without views, to be told to the sender. Appended to on any thread.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[Any]] = {}
        self.released: deque[int] = deque()

    def view(self, number: int, fd: int | None) -> np.ndarray[Any, Any]:
        """All bytes of a segment; `fd` is its file where it is new, and is closed here.

        Raises:
            ValueError: the file could shrink, or the segment is unknown.
        """
        if fd is not None:
            try:
                if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS:
                    raise ValueError("a shared memory file is not sealed")
                self._mapped[number] = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
        if number not in self._mapped:
            raise ValueError(f"there is no segment {number}")
        view = np.frombuffer(self._mapped[number], np.uint8)
        released = self.released

        def gone(_: object) -> None:
            released.append(number)  # on any thread, perhaps within the collector: no lock may be taken

        self._views[number] = weakref.ref(view, gone)
        return view

    def drop(self, number: int) -> None:
        """Unmap a segment, once no view is left."""
        self._mapped.pop(number, None)
        self._views.pop(number, None)
