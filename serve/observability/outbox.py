"""From the event loop to a thread that may wait: for a disk, a pipe, a collector on the network."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
BOUND = 65_536  # items
EVERY_S = 0.25  # a thread that wakes takes the interpreter from the event loop: the less often, the better


class Outbox(Generic[T]):
    """Holds items for a short while and hands them over together. Never waits: what does not fit is counted and dropped."""

    def __init__(self, deliver: Callable[[list[T]], None], *, name: str, bound: int = BOUND, every_s: float = EVERY_S) -> None:
        """An outbox of the running event loop.

        Args:
            deliver: called on the thread with the items since last time; if it raises, they are lost, and the log says so once.
            name: of the thread.
            bound: items that may wait.
            every_s: seconds between two deliveries, where there is something to deliver.
        """
        self._deliver = deliver
        self._bound = bound
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._items: list[T] = []
        self._handed: queue.SimpleQueue[list[T] | None] = queue.SimpleQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._put = 0
        self._done = 0  # written by the thread alone
        self._lost = 0  # likewise
        self._refused = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Items that never arrived: there was no room, or they could not be delivered."""
        return self._refused + self._lost

    def put(self, item: T) -> None:
        """Send an item, unless too many wait."""
        if self._closed or self._put - self._done >= self._bound:
            self._refused += 1
            return
        self._put += 1
        self._items.append(item)
        if self._timer is None:
            self._timer = self._loop.call_later(self._every_s, self._hand_over)

    def close(self, wait_s: float) -> None:
        """Deliver what is there, waiting so many seconds at most, and end the thread."""
        if not self._closed:
            self._closed = True
            self._hand_over()
            self._handed.put(None)
        self._thread.join(wait_s)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._items = self._items, []
        if items:
            self._handed.put(items)

    def _run(self) -> None:
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
