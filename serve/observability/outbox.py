"""Passes items from the event loop to a thread that writes them to a file, a pipe, or a collector on the network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from halfserve.serve.engine.errors import FailedPreconditionError

logger = logging.getLogger(__name__)

T = TypeVar("T")
BOUND = 65_536  # most items that may wait
EVERY_S = 1.0  # seconds between two deliveries: each time the thread wakes, it takes the interpreter lock from the event loop
MOST = 2048  # most items that are handed over at once
LINE_FEED = ord("\n")


class Outbox(Generic[T]):
    """Collects items for a short while and hands them over together. Items over the bound are dropped and counted.

    Attributes:
        fill: called before items are handed over; puts items that were only announced by `expect`.
    """

    def __init__(
        self,
        deliver: Callable[[list[T]], None],
        *,
        name: str,
        bound: int = BOUND,
        every_s: float = EVERY_S,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread of an outbox for the running event loop.

        `deliver` is called on the thread with the new items; if it raises, they are lost, and the first loss is logged. At most
        `bound` items wait, `every_s` seconds pass between two deliveries. `prepare` is called on the thread when it starts; an
        error that it raises is raised again by `deliver`.
        """
        self._deliver = deliver
        self._bound = bound
        self._every_s = every_s
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._items: list[T] = []
        self._handed: queue.SimpleQueue[list[T] | None] = queue.SimpleQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._put = 0
        self._done = 0  # written by the thread alone
        self._lost = 0  # written by the thread alone
        self._refused = 0
        self._closed = False
        self.fill: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of items that were refused for lack of room, or whose delivery failed."""
        return self._refused + self._lost

    def put(self, item: T) -> None:
        """Send an item, unless too many wait."""
        if self._closed or self._put - self._done >= self._bound:
            self._refused += 1
            return
        self._put += 1
        self._items.append(item)
        if len(self._items) >= MOST:
            self.hand_over()
        else:
            self.expect()

    def expect(self) -> None:
        """Hand over the items that wait, and the items that `fill` puts, within `every_s`."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._every_s, self._time_is_up)

    def close(self, wait_s: float) -> None:
        """Deliver the remaining items within `wait_s` seconds, and end the thread."""
        if not self._closed:
            self._time_is_up()
            self._closed = True
            self._handed.put(None)
        self._thread.join(wait_s)

    def _time_is_up(self) -> None:
        if self.fill is not None:
            self.fill()
        self.hand_over()

    def hand_over(self) -> None:
        """Hand over the items that wait, without waiting for `every_s`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._items = self._items, []
        if items:
            self._handed.put(items)

    def _run(self) -> None:
        if self._prepare is not None:
            with contextlib.suppress(Exception):
                self._prepare()
        failing = False
        while (items := self._handed.get()) is not None:
            try:
                self._deliver(items)
                failing = False
            except Exception as error:  # noqa: BLE001  (a full disk or a lost collector must not end the thread)
                self._lost += len(items)
                if not failing:
                    logger.warning("%s: %d lost: %s", threading.current_thread().name, len(items), error)
                failing = True
            self._done += len(items)


def check_writable(path: Path, what: str) -> None:
    """Check that a file can be written, so that an error shows when the server starts and not at the first line.

    Raises:
        FailedPreconditionError: the file cannot be written; the message gives the reason.
    """
    folder = path.parent
    if not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif path.is_dir():
        reason = "it is a folder, expected a file"
    elif os.access(path if path.exists() else folder, os.W_OK):
        return
    else:
        reason = os.strerror(errno.EACCES)
    raise FailedPreconditionError(f"{what} cannot be written to {path}: {reason}; choose another file")


class LineFile:
    """Appends whole lines to a file. If the file was moved or deleted meanwhile, as by a log rotation, it is opened again."""

    def __init__(self, path: Path | None) -> None:
        """Make a file that is opened at the first write; None stands for standard error."""
        self._path = path
        self._descriptor: int | None = None
        self._opened: os.stat_result | None = None  # cached because each fstat waits for the interpreter lock afterwards
        self._is_torn = False  # whether a full disk has cut the last line

    def write(self, lines: list[str]) -> None:
        """Append lines, each with its line feed.

        Raises:
            OSError: the file cannot be written.
        """
        data = "".join(lines).encode()
        descriptor = self._open()
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            written = os.write(descriptor, rest)
            self._is_torn = rest[written - 1] != LINE_FEED
            rest = rest[written:]

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._path is None:
            return sys.stderr.fileno()
        if self._descriptor is not None and not _is_at(self._path, self._opened):
            self.close()
            self._is_torn = False
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            self._opened = os.fstat(self._descriptor)
        return self._descriptor


class ArrayFile:
    """Writes a JSON array that is whole after each write, so that it can be read at any time, also after a crash.

    The first write replaces a file that is there. If another program moved, deleted or changed the file meanwhile, the next
    write begins a new array.
    """

    def __init__(self, path: Path) -> None:
        """Name a file that is opened at the first write."""
        self._path = path
        self._descriptor: int | None = None
        self._opened: os.stat_result | None = None
        self._end = 0  # where the closing bracket is

    def write(self, values: list[str]) -> None:
        """Append values, each as JSON, over the closing bracket.

        Raises:
            OSError: the file cannot be written; the array is as before.
        """
        descriptor = self._open()
        data = (("," if self._end > 1 else "") + "\n" + ",\n".join(values) + "]").encode()
        place, rest = self._end, memoryview(data)
        try:
            while rest:
                written = os.pwrite(descriptor, rest, place)
                place, rest = place + written, rest[written:]
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, b"]", self._end)
                os.ftruncate(descriptor, self._end + 1)
            raise
        self._end = place - 1

    def close(self) -> None:
        """Close the file; a later `write` begins another one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is not None and not (
            _is_at(self._path, self._opened) and os.fstat(self._descriptor).st_size == self._end + 1
        ):
            self.close()
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            self._opened = os.fstat(self._descriptor)
            self._end = os.write(self._descriptor, b"[]") - 1
        return self._descriptor


def _is_at(path: Path, opened: os.stat_result | None) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return opened is not None and os.path.samestat(there, opened)
