"""Tensors in memory that two processes share: the sender's pool of segments, and the receiver's views of them.

A segment is a sealed memory file that the sender makes and whose descriptor travels with the first message that uses it. The
receiver's arrays are views. When the last of them is gone, the receiver marks the segment as free in the segment itself: the
sender can use it for its next message without receiving anything.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

SMALLEST_BYTES = 1 << 18
ALIGNMENT = 64
HEAD_BYTES = ALIGNMENT  # of a segment, before the tensors: the first byte says whether it is lent
FREE, LENT = 0, 1
MOST_FREE = 4  # segments kept for later messages
MOST_FREE_BYTES = 1 << 28
# More is not lent at a time, unless it is a single segment. Before Python 3.13 each side keeps a file of each segment open.
MOST_LENT = 16
MOST_LENT_BYTES = 1 << 26
# A receiver that maps a file which then shrinks is killed by the system.
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0)
AVAILABLE = hasattr(os, "memfd_create") and bool(SEALS)

View = np.ndarray  # array of bytes


def aligned(size: int) -> int:
    """Return the size, rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Segment:
    """One shared memory file, mapped here.

    Attributes:
        number: names it between the two processes.
        size: number of bytes for tensors.
        view: the bytes for tensors.
        fd: descriptor of the file until it has been sent, then -1.
    """

    __slots__ = ("_mapped", "fd", "number", "size", "view")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create("halfserve-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, HEAD_BYTES + size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._mapped = _mapped(self.fd, HEAD_BYTES + size)
            self.view = memoryview(self._mapped)[HEAD_BYTES:]
        except BaseException:
            self.close_file()
            raise

    @property
    def is_lent(self) -> bool:
        """Whether the receiver may still read the segment."""
        return self._mapped[0] == LENT

    def lend(self) -> None:
        """Mark the segment as lent."""
        self._mapped[0] = LENT

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
        self._lent: list[Segment] = []
        self._free: list[Segment] = []  # sorted by size
        self._made = 0
        self.dropped: list[int] = []  # numbers that the receiver should unmap

    def take(self, size: int) -> Segment | None:
        """Lend a segment of at least `size` bytes; None while too much is lent.

        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        self._take_back()
        lent = self._lent
        if lent and (len(lent) >= MOST_LENT or sum([segment.size for segment in lent]) + size > MOST_LENT_BYTES):
            return None
        found = next((segment for segment in self._free if segment.size >= size), None)
        if found is None:
            self._made += 1
            found = Segment(self._made, max(SMALLEST_BYTES, 1 << (size - 1).bit_length()))
        else:
            self._free.remove(found)
        found.lend()
        lent.append(found)
        return found

    def _take_back(self) -> None:
        """Take back the segments that the receiver has marked as free, and drop the ones that are too many."""
        back = [segment for segment in self._lent if not segment.is_lent]
        if not back:
            return
        self._lent = [segment for segment in self._lent if segment not in back]
        free = self._free = sorted([*self._free, *back], key=lambda segment: segment.size)
        while len(free) > MOST_FREE:
            self.dropped.append(free.pop(0).number)  # the smallest: a larger one serves as well
        while sum(segment.size for segment in free) > MOST_FREE_BYTES:
            self.dropped.append(free.pop().number)


class MappedSegments:
    """The receiver's side."""

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[Any]] = {}

    def view(self, number: int, fd: int | None) -> np.ndarray[Any, Any]:
        """Return the bytes for tensors of a segment; `fd` is its file where it is new, and is closed here.

        Raises:
            ValueError: the file could shrink, is too small or cannot be mapped, or the segment is unknown.
        """
        if fd is not None:
            try:
                if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS:
                    raise ValueError("a shared memory file is not sealed")
                self._mapped[number] = _mapped(fd, os.fstat(fd).st_size)
            except OSError as error:
                raise ValueError(f"a shared memory file cannot be mapped: {error.strerror}") from None
            finally:
                os.close(fd)
        mapped = self._mapped.get(number)
        if mapped is None:
            raise ValueError(f"there is no segment {number}")
        view = np.frombuffer(mapped, np.uint8, offset=HEAD_BYTES)

        def gone(_: object) -> None:
            mapped[0] = FREE  # on any thread, perhaps within the collector: no lock may be taken

        self._views[number] = weakref.ref(view, gone)
        return view

    def drop(self, number: int) -> None:
        """Unmap a segment, once no view is left."""
        self._mapped.pop(number, None)
        self._views.pop(number, None)


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Map a file; where Python can, without keeping it open."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, trackfd=False)
    return mmap.mmap(fd, size)
